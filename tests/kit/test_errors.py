import pytest

from rollfarm.error_wire import from_failure, to_failure
from rollfarm.errors import CATALOGUE, FarmError, LeaseExpired, is_retryable


@pytest.mark.parametrize("error", CATALOGUE.values(), ids=CATALOGUE.keys())
def test_every_error_survives_the_trip_in_a_batched_answer(error: type[FarmError]):
    raised = error("Something is wrong with 7.", number=7)

    received = from_failure(to_failure(raised))

    assert type(received) is error
    assert str(received) == str(raised)
    assert received.facts == {"number": "7"}


def test_every_error_has_a_remedy_in_its_message():
    for error in CATALOGUE.values():
        assert error.remedy, error
        assert str(error("A problem.")) == f"A problem. {error.remedy}"


def test_every_error_says_who_raises_it():
    for error in CATALOGUE.values():
        assert "Raised " in (error.__doc__ or ""), error


def test_an_error_from_a_newer_server_keeps_its_code_reason_and_facts():
    failure = to_failure(LeaseExpired("Too late.", lease_id="l"))
    failure.reason = "INVENTED_LATER"

    received = from_failure(failure)

    assert (received.reason, received.code, received.facts) == ("INVENTED_LATER", LeaseExpired.code, {"lease_id": "l"})
    assert not is_retryable(received)


def test_a_fact_may_have_any_name():
    failure = to_failure(LeaseExpired("Too late.", lease_id="l"))
    failure.metadata.update({"problem": "p", "self": "s"})

    assert from_failure(failure).facts == {"lease_id": "l", "problem": "p", "self": "s"}
