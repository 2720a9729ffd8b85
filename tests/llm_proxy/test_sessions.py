import pytest

from llm_proxy.front.sessions import Sessions
from rollfarm import times
from rollfarm.errors import InvalidArgument, SessionsFull, UnknownAgentSession
from rollfarm.v1 import llm_proxy_pb2, trajectory_pb2


def opening(session_id: str = "a", **more) -> llm_proxy_pb2.OpenSessionRequest:
    return llm_proxy_pb2.OpenSessionRequest(session_id=session_id, **more)


def sessions(*, most: int = 10, idle_seconds: float = 60.0) -> Sessions:
    return Sessions(most=most, idle_seconds=idle_seconds)


def found(mine: Sessions, key: str, now: float = 0.0) -> str | None:
    session = mine.find(key, now)
    return session and session.session_id


def test_a_key_opens_its_own_session_alone():
    mine = sessions()
    first, second = mine.open(opening("a"), 0.0), mine.open(opening("b"), 0.0)

    assert (found(mine, first), found(mine, second)) == ("a", "b")
    assert [found(mine, key) for key in ("", "rf-", first[:-1], first + "x", "ü")] == [None] * 5
    assert len(first) == 3 + 43


def test_keys_of_two_processes_differ_for_the_same_session():
    assert sessions().open(opening(), 0.0) != sessions().open(opening(), 0.0)


def test_no_key_is_kept():
    mine = sessions()
    key = mine.open(opening(), 0.0)

    kept = [repr(vars(part)) for part in (mine, mine._keys, mine._mint)]
    assert not any(key in text or key.removeprefix("rf-") in text for text in kept)


def test_opening_again_gives_the_same_key_and_keeps_the_record():
    mine = sessions()
    key = mine.open(opening(priority=3), 0.0)
    session = mine.find(key, 0.0)

    assert mine.open(opening(priority=3), 1.0) == key
    assert mine.find(key, 1.0) is session


def test_opening_an_open_session_otherwise_is_refused():
    mine = sessions()
    mine.open(opening(priority=3), 0.0)

    with pytest.raises(InvalidArgument, match="open and different"):
        mine.open(opening(priority=4), 0.0)
    with pytest.raises(InvalidArgument, match="session_id is empty"):
        mine.open(opening(""), 0.0)


def test_a_session_expires_when_it_was_idle_for_longer_than_it_may():
    mine = sessions(idle_seconds=60)
    key = mine.open(opening(), 0.0)

    assert found(mine, key, 60.0) == "a"
    assert found(mine, key, 120.0) == "a", "it was used at 60"
    assert found(mine, key, 180.1) is None
    with pytest.raises(UnknownAgentSession):
        mine.get("a", 180.1)
    assert mine.open_count == 1
    mine.expire(180.1)
    assert mine.open_count == 0


def test_a_session_may_choose_how_long_it_lies_idle():
    mine = sessions(idle_seconds=60)
    key = mine.open(opening(idle_duration=times.duration(5)), 0.0)

    assert found(mine, key, 5.1) is None


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 1.5}, {"max_tokens": -1}, {"top_k": -1}])
def test_a_session_that_could_never_be_sampled_is_refused(wrong: dict[str, float]):
    mine = sessions()

    with pytest.raises(InvalidArgument, match=f"{next(iter(wrong))} is"):
        mine.open(opening(sampling=trajectory_pb2.Sampling(**wrong)), 0.0)  # pyright: ignore[reportArgumentType]

    assert mine.open_count == 0


def test_an_idle_duration_that_is_none_is_refused_and_none_is_too_long():
    mine = sessions()
    negative, endless = opening(), opening()
    negative.idle_duration.seconds = -1
    endless.idle_duration.seconds = 2**62

    with pytest.raises(InvalidArgument, match="less than nothing"):
        mine.open(negative, 0.0)
    assert found(mine, mine.open(endless, 0.0), 1e9) == "a"


def test_a_session_with_an_open_request_does_not_expire():
    mine = sessions(idle_seconds=60)
    session = mine.find(mine.open(opening(), 0.0), 0.0)
    assert session
    session.requests.add("r")

    mine.expire(1000.0)

    assert mine.get("a", 1000.0) is session


def test_looking_at_a_session_does_not_prolong_it():
    mine = sessions(idle_seconds=60)
    mine.open(opening(), 0.0)
    mine.get("a", 59.0)

    with pytest.raises(UnknownAgentSession):
        mine.get("a", 61.0)


def test_a_closed_sessions_key_is_refused_and_its_record_can_be_fetched_again():
    mine = sessions()
    key = mine.open(opening(), 0.0)

    session = mine.close("a", 1.0)

    assert found(mine, key, 1.0) is None
    assert mine.close("a", 2.0) is session
    assert mine.get("a", 60.0) is session
    assert mine.open_count == 0
    with pytest.raises(InvalidArgument, match="was closed"):
        mine.open(opening(), 2.0)
    with pytest.raises(UnknownAgentSession):
        mine.close("a", 61.1)


def test_the_session_that_was_closed_first_makes_room_and_an_open_one_never_does():
    mine = sessions(most=2)
    mine.open(opening("a"), 0.0)
    mine.open(opening("b"), 0.0)
    with pytest.raises(SessionsFull, match="2 sessions are open"):
        mine.open(opening("c"), 1.0)
    mine.close("b", 2.0)

    mine.open(opening("c"), 3.0)

    assert mine.get("a", 3.0)
    with pytest.raises(UnknownAgentSession):
        mine.get("b", 3.0)


def test_an_expired_session_makes_room():
    mine = sessions(most=1, idle_seconds=60)
    mine.open(opening("a"), 0.0)

    mine.open(opening("b"), 61.0)

    assert mine.open_count == 1


def test_an_expired_session_leaves_nothing_behind_when_its_name_is_used_again():
    mine = sessions(idle_seconds=60)
    first = mine.open(opening(priority=1), 0.0)
    expired = mine.find(first, 0.0)
    assert expired

    second = mine.open(opening(priority=2), 61.0)

    assert (found(mine, first, 61.0), found(mine, second, 61.0)) == (None, "a")
    assert expired.is_closed
    assert len(mine._keys._owners) == 1
