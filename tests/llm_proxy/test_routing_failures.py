"""Routing, one decision at a time: what becomes of a request when engines or clients go."""

from typing import Any

import pytest

from llm_proxy.requests import EngineMisbehaved
from llm_proxy.routing import BEHIND, CONNECTING, SERVING
from rollfarm import tokens
from rollfarm.error_wire import to_failure
from rollfarm.errors import EngineFailed, InvalidArgument, UnknownEngine
from tests.llm_proxy.world import ABORT, LENGTH, STOP, Client, World, chunk, ids_of, spans_of


def test_a_request_continues_from_its_tokens_when_its_engine_dies() -> None:
    world = World()
    world.engine("one")
    world.ask("a", tokens_=5, seed=40, temperature=0.5)
    world.step()
    world.tell("one", "a", [5, 6], version=0)

    world.engine("two")
    world.router.lost("one", "connection reset", world.now)
    assert world.step() == ["a@two"]

    again = world.sent[-1][1]
    assert tokens.unpack_ids(again.prompt_token_ids).tolist() == [1, 2, 5, 6]
    assert (again.sampling.max_tokens, again.sampling.seed, again.sampling.temperature) == (3, 42, 0.5)
    assert again.request_id != "a"
    world.tell("two", again.request_id, [7, 8, 9], reason=LENGTH)
    result = world.client.results["a"]
    assert ids_of(result) == [5, 6, 7, 8, 9]
    assert tokens.unpack_logprobs(result.logprobs).tolist() == [-1.25, -1.5, -1.75, -2.0, -2.25]
    assert spans_of(result) == [(0, 5)]
    assert (result.engine_id, result.resumption_count, world.router.resumption_count) == ("two", 1, 1)


def test_versions_are_kept_across_engines_and_updates() -> None:
    world = World()
    world.engine("e")
    world.ask("a", tokens_=4)
    world.step()
    world.tell("e", "a", [5])

    world.router.close_gate()
    world.router.served({"e": "e"}, 1, world.now)
    world.router.open_gate()
    world.tell("e", "a", [6, 7], version=1)
    world.tell("e", "a", [8], version=1, reason=LENGTH)

    assert spans_of(world.client.results["a"]) == [(0, 1), (1, 3)]


@pytest.mark.parametrize(
    ("generated", "limits", "reason"),
    [
        ([5, 6, 7, 8], {}, LENGTH),
        ([5, 6], {"stop_token_ids": [6]}, STOP),
        ([5, 6], {"prompt": [1] * 98, "tokens_": 9}, LENGTH),
    ],
    ids=["max_tokens", "stop token", "context"],
)
def test_a_request_that_is_complete_when_its_engine_dies_is_answered(
    generated: list[int], limits: Any, reason: int
) -> None:
    world = World()
    world.engine("e", context=100)
    world.ask("a", **limits)
    world.step()
    world.tell("e", "a", generated)

    world.router.lost("e", "gone", world.now)
    world.step()

    assert ids_of(world.client.results["a"]) == generated
    assert world.client.results["a"].finish_reason == reason


def test_an_abort_that_nobody_asked_for_is_continued() -> None:
    world = World()
    world.engine("e")
    world.ask("a", tokens_=3)
    world.step()

    assert world.tell("e", "a", [5], reason=ABORT) == ["a@e"]
    world.tell("e", world.sent[-1][1].request_id, [6, 7], reason=LENGTH)

    assert ids_of(world.client.results["a"]) == [5, 6, 7]


def test_a_failure_that_may_pass_is_tried_elsewhere_and_another_is_the_answer() -> None:
    world = World()
    world.engine("e", slots=2)
    world.ask("a")
    world.ask("b")
    world.step()

    broken, wrong = chunk("a", []), chunk("b", [])
    broken.failure.CopyFrom(to_failure(EngineFailed("Out of memory.")))
    wrong.failure.CopyFrom(to_failure(InvalidArgument("No such token.")))
    world.router.receive("e", broken, world.now)
    world.router.receive("e", wrong, world.now)

    assert world.step() == ["a@e"]
    assert world.client.results["b"].failure.reason == "INVALID_ARGUMENT"


def test_a_request_that_no_engine_can_advance_is_refused_with_the_cause() -> None:
    world = World(max_fruitless_attempts=2)
    world.ask("poison")
    for attempt in range(3):
        world.engine("e")
        assert world.router.running_count == 1, attempt
        world.router.lost("e", "segmentation fault", world.now)
    world.step()

    failure = world.client.results["poison"].failure
    assert failure.reason == "ENGINE_FAILED"
    assert "segmentation fault" in failure.message


def test_attempts_that_add_tokens_are_not_counted_against_a_request() -> None:
    world = World(max_fruitless_attempts=0)
    world.ask("a", tokens_=10)
    for token in range(5):
        world.engine("e")
        world.tell("e", world.sent[-1][1].request_id, [token])
        world.router.lost("e", "gone", world.now)
    world.step()

    assert not world.client.results


def test_a_request_that_is_retried_joins_the_first_and_both_are_answered() -> None:
    world, other = World(), Client()
    world.engine("e")
    world.ask("a")
    world.ask("a", client=other)
    assert world.step() == ["a@e"]

    world.tell("e", "a", [5], reason=STOP)

    assert ids_of(world.client.results["a"]) == ids_of(other.results["a"]) == [5]
    assert world.router.finished_count == 1


def test_another_request_of_the_same_id_is_refused() -> None:
    world = World()
    world.ask("a")

    with pytest.raises(InvalidArgument, match="open and different"):
        world.ask("a", tokens_=9)


def test_a_request_lives_until_its_last_waiter_has_gone() -> None:
    world, other = World(), Client()
    world.engine("e")
    world.ask("a")
    world.ask("a", client=other)
    world.step()

    world.router.withdraw("a", other, world.now)
    world.step()
    assert world.cancelled == []
    world.router.withdraw("a", world.client, world.now)
    world.step()

    assert world.cancelled == [("e", "a")]
    assert world.router.running_count == 0


def test_a_cancelled_request_answers_with_its_tokens_and_holds_its_slot_until_the_engine_confirms() -> None:
    world = World()
    world.engine("e")
    world.ask("a")
    world.ask("b")
    world.step()
    world.tell("e", "a", [5])

    world.router.cancel("a", world.now)
    assert world.step() == []
    assert world.router.unconfirmed_cancels("e") == ["a"]
    assert world.tell("e", "a", [6], reason=ABORT) == ["b@e"]

    assert ids_of(world.client.results["a"]) == [5]
    assert world.client.results["a"].finish_reason == ABORT


def test_the_id_of_a_cancelled_request_may_be_used_again_at_once() -> None:
    world = World()
    world.engine("e", slots=2)
    world.ask("a")
    world.step()
    world.router.cancel("a", world.now)
    world.step()
    world.client.results.clear()

    world.ask("a")
    world.step()
    world.tell("e", "a", [9, 9], reason=ABORT)
    world.tell("e", world.sent[-1][1].request_id, [5], reason=STOP)

    assert ids_of(world.client.results["a"]) == [5]


def test_a_waiting_request_is_cancelled_in_the_line_and_in_the_car_park() -> None:
    world = World()
    world.ask("queued")
    world.ask("parked", min_version=9)

    world.router.cancel("queued", world.now)
    world.router.cancel("parked", world.now)
    world.engine("e", version=9, slots=2)

    assert world.sent == []
    assert sorted(world.client.results) == ["parked", "queued"]


def test_cancelled_requests_do_not_pile_up_in_the_line() -> None:
    world = World()
    for number in range(10_000):
        world.ask(str(number))
        world.router.withdraw(str(number), world.client, world.now)

    line = world.router._line  # pyright: ignore[reportPrivateUsage]
    assert len(line) == 0
    assert not line._lines  # pyright: ignore[reportPrivateUsage]


def test_nothing_is_given_out_while_the_gate_is_closed() -> None:
    world = World()
    world.engine("e")
    world.router.close_gate()
    world.ask("a")

    assert world.step() == []
    world.router.open_gate()

    assert world.step() == ["a@e"]


def test_the_policy_version_is_the_highest_reported_and_engines_below_it_are_behind() -> None:
    world = World()
    world.engine("old", version=3)
    before = world.router.revision
    world.engine("new", version=5)
    world.ask("a")

    assert world.step() == ["a@new"]
    assert world.router.policy_version == 5
    old = world.router.engine("old")
    assert (old.state, old.detail) == (BEHIND, "serves version 3, waits for 5")
    assert world.router.revision > before


def test_an_engine_that_is_brought_up_to_date_serves() -> None:
    world = World()
    world.engine("new", version=5)
    world.engine("late", version=0)
    before = world.router.revision

    world.router.served({"late": "late"}, 5, world.now)

    assert world.router.engine("late").state == SERVING
    assert world.router.revision > before


def test_an_engine_that_was_restarted_after_it_applied_a_version_does_not_serve_it() -> None:
    world = World()
    world.engine("one")
    world.engine("two")
    world.router.lost("one", "killed", world.now)
    world.engine("one", instance="restarted")

    world.router.served({"one": "one", "two": "two"}, 1, world.now)

    one = world.router.engine("one")
    assert (one.state, one.version) == (BEHIND, 0)
    assert world.router.engine("two").state == SERVING


def test_a_late_answer_about_a_lost_engine_does_not_make_it_serve() -> None:
    world = World()
    world.engine("e", version=1)
    world.router.lost("e", "gone", world.now)

    world.router.served({"e": "e"}, 2, world.now)

    assert world.router.engine("e").state == CONNECTING


def test_the_requests_of_a_detached_engine_continue_elsewhere() -> None:
    world = World()
    world.engine("one")
    world.ask("a")
    world.step()
    world.engine("two")

    world.router.detach("one", world.now)

    assert world.step() == ["a@two"]
    with pytest.raises(UnknownEngine):
        world.router.detach("one", world.now)


def test_a_chunk_whose_arrays_disagree_is_refused_and_nothing_of_it_is_kept() -> None:
    world = World()
    world.engine("e")
    world.ask("a")
    world.step()
    bad = chunk("a", [5, 6])
    bad.version_spans[0].token_count = 3

    with pytest.raises(EngineMisbehaved, match="versions for 3 tokens"):
        world.router.receive("e", bad, world.now)
    world.tell("e", "a", [7], reason=STOP)

    assert ids_of(world.client.results["a"]) == [7]


def test_waiting_and_generating_are_measured_over_all_attempts() -> None:
    world = World()
    world.ask("a")
    world.now = 2.0
    world.engine("one")
    world.now = 3.5
    world.router.lost("one", "gone", world.now)
    world.now = 4.0
    world.engine("two")
    world.now = 10.0
    world.tell("two", world.sent[-1][1].request_id, [5], reason=STOP)

    result = world.client.results["a"]
    assert result.queue_duration.ToMilliseconds() == 2500
    assert result.generate_duration.ToMilliseconds() == 7500


def test_top_logprobs_are_joined_across_engines() -> None:
    world = World()
    world.engine("e")
    world.ask("a", top_logprobs=1)
    world.step()
    for ids, reason in (([5], ABORT), ([6], STOP)):
        more = chunk(world.sent[-1][1].request_id, ids, reason=reason)
        more.top_logprobs.width = 1
        more.top_logprobs.token_ids = tokens.pack_ids(ids)
        more.top_logprobs.logprobs = tokens.pack_logprobs([-0.5])
        world.router.receive("e", more, world.now)
        world.step()

    top = world.client.results["a"].top_logprobs
    assert (top.width, tokens.unpack_ids(top.token_ids).tolist()) == (1, [5, 6])
    assert tokens.unpack_logprobs(top.logprobs).tolist() == [-0.5, -0.5]


def test_limits_are_those_of_the_smallest_engine() -> None:
    world = World()
    assert (world.router.context_tokens, world.router.vocabulary_size) == (0, 0)

    world.engine("a", context=100)
    world.engine("b", context=60)

    assert (world.router.context_tokens, world.router.vocabulary_size) == (60, 50)
