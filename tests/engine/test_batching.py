"""The plan of each forward pass, and who keeps which row of the cache."""

import numpy as np

from llm_proxy.engine.batching import Batching, Segment
from llm_proxy.engine.requests import LENGTH, STOP, Request


def request(key: str, prompt: list[int], *, max_tokens: int = 3, session: str = "", stop: int = -1) -> Request:
    return Request(
        key=key,
        prompt=np.array(prompt, dtype=np.int32),
        max_tokens=max_tokens,
        session_id=session,
        stop_token_ids=frozenset({stop}),
    )


def plan(batching: Batching) -> list[tuple[str, int, int, bool]]:
    return [(s.sequence.request.key, s.start, s.count, s.samples) for s in batching.next_step()]


def step(batching: Batching, token: int = 9) -> list[Segment]:
    segments = batching.next_step()
    batching.computed(segments)
    for segment in segments:
        if segment.samples:
            batching.append(segment.sequence, token)
    return segments


def test_a_prompt_is_computed_once_and_then_one_token_at_a_time() -> None:
    batching = Batching(slot_count=2, row_count=2, step_tokens=100)
    batching.add(request("a", [1, 2, 3]))

    assert plan(batching) == [("a", 0, 3, True)]
    step(batching)
    assert plan(batching) == [("a", 3, 1, True)]


def test_decoding_goes_first_and_a_long_prompt_takes_what_room_is_left() -> None:
    batching = Batching(slot_count=3, row_count=3, step_tokens=5)
    batching.add(request("a", [1], max_tokens=9))
    step(batching)
    batching.add(request("b", [1] * 6, max_tokens=9))
    batching.add(request("c", [1] * 2, max_tokens=9))

    assert plan(batching) == [("a", 1, 1, True), ("b", 0, 4, False)]
    step(batching)
    assert plan(batching) == [("a", 2, 1, True), ("b", 4, 2, True), ("c", 0, 2, True)]


def test_requests_wait_in_order_for_a_slot() -> None:
    batching = Batching(slot_count=1, row_count=4, step_tokens=100)
    for key in "abc":
        batching.add(request(key, [1], max_tokens=1))
    batching.remove("b")

    assert (batching.running_count, batching.waiting_count) == (0, 2)
    assert plan(batching) == [("a", 0, 1, True)]
    step(batching)
    assert plan(batching) == [("c", 0, 1, True)]


def test_a_request_ends_with_its_stop_token_or_its_length() -> None:
    batching = Batching(slot_count=2, row_count=2, step_tokens=100)
    stopped = batching.add(request("a", [1], stop=7))
    long = batching.add(request("b", [1], max_tokens=2))
    batching.computed(batching.next_step())

    assert batching.append(stopped, 7) == STOP
    assert batching.append(long, 7) is None
    assert batching.append(long, 7) == LENGTH
    assert not batching.has_work()


def test_the_next_turn_of_a_session_computes_only_what_is_new() -> None:
    batching = Batching(slot_count=2, row_count=2, step_tokens=100)
    batching.add(request("a", [1, 2, 3], max_tokens=1, session="s"))
    step(batching, token=4)

    batching.add(request("b", [1, 2, 3, 4, 5], session="s"))

    assert plan(batching) == [("b", 3, 2, True)]


def test_a_turn_that_repeats_its_prefix_exactly_still_computes_its_last_token() -> None:
    batching = Batching(slot_count=2, row_count=2, step_tokens=100)
    batching.add(request("a", [1, 2, 3], max_tokens=1, session="s"))
    step(batching)

    batching.add(request("b", [1, 2, 3], session="s"))

    assert plan(batching) == [("b", 2, 1, True)]


def test_a_turn_that_differs_begins_where_it_differs() -> None:
    batching = Batching(slot_count=2, row_count=2, step_tokens=100)
    batching.add(request("a", [1, 2, 3, 4], max_tokens=1, session="s"))
    step(batching)

    batching.add(request("b", [1, 2, 8, 4], session="s"))

    assert plan(batching) == [("b", 2, 2, True)]


def test_other_sessions_see_nothing_and_the_oldest_row_is_given_away() -> None:
    batching = Batching(slot_count=1, row_count=2, step_tokens=100)
    for session in ("old", "new", "third"):
        batching.add(request(session, [1, 2], max_tokens=1, session=session))
        assert plan(batching) == [(session, 0, 2, True)]
        step(batching)

    batching.add(request("again", [1, 2, 3], max_tokens=1, session="new"))
    assert plan(batching) == [("again", 2, 1, True)]
    step(batching)
    batching.add(request("gone", [1, 2, 3], session="old"))
    assert plan(batching) == [("gone", 0, 3, True)]


def test_two_requests_of_one_session_have_rows_of_their_own() -> None:
    batching = Batching(slot_count=2, row_count=2, step_tokens=100)
    batching.add(request("a", [1, 2], session="s"))
    batching.add(request("b", [1, 2], session="s"))

    first, second = batching.next_step()

    assert first.sequence.slot != second.sequence.slot
    for _ in range(3):
        step(batching)
    assert batching.cached_token_count == 4  # the session keeps the later row alone


def test_new_weights_make_everything_be_computed_again() -> None:
    batching = Batching(slot_count=1, row_count=2, step_tokens=100)
    batching.add(request("kept", [1, 2], max_tokens=1, session="s"))
    step(batching)
    batching.add(request("running", [5, 6, 7], session="r", max_tokens=9))
    step(batching)

    batching.recompute()

    assert plan(batching) == [("running", 0, 4, True)]
    batching.remove("running")
    batching.add(request("next", [1, 2, 3], session="s"))
    assert plan(batching) == [("next", 0, 3, True)]


def test_kept_caches_are_never_handed_to_another_request() -> None:
    batching = Batching(slot_count=1, row_count=2, step_tokens=100)
    batching.add(request("running", [5, 6, 7], session="r", max_tokens=2))
    step(batching)

    batching.keep_running()

    assert plan(batching) == [("running", 3, 1, True)]
    step(batching)
    batching.add(request("next", [5, 6, 7, 9, 9], session="r"))
    assert plan(batching) == [("next", 0, 5, True)]


def test_nothing_is_admitted_while_it_drains() -> None:
    batching = Batching(slot_count=2, row_count=2, step_tokens=100)
    batching.add(request("a", [1], max_tokens=1))
    step(batching)
    batching.admitting = False
    batching.add(request("b", [1]))

    assert not batching.has_work()
    assert plan(batching) == []
    batching.admitting = True
    assert plan(batching) == [("b", 0, 1, True)]
