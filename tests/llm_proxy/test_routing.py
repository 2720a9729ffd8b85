"""Routing, one decision at a time: who goes first, and where to."""

import pytest

from rollfarm.errors import VersionUnavailable
from tests.llm_proxy.world import LENGTH, STOP, World, ids_of


def test_requests_wait_in_the_line_until_a_slot_is_free() -> None:
    world = World()
    world.engine("e", slots=2)
    for name in "abc":
        world.ask(name)

    assert world.step() == ["a@e", "b@e"]
    assert (world.router.waiting_count, world.router.running_count) == (1, 2)
    assert world.tell("e", "a", [7, 8, 9, 10], reason=LENGTH) == ["c@e"]

    assert ids_of(world.client.results["a"]) == [7, 8, 9, 10]
    assert world.client.results["a"].engine_id == "e"


def test_the_oldest_version_goes_first_then_what_was_begun_then_arrival() -> None:
    world = World()
    world.ask("begun", priority=3)
    world.engine("dying")
    world.ask("first", priority=3)
    world.ask("second", priority=3)
    world.ask("old", priority=2)
    world.router.lost("dying", "gone", world.now)

    world.engine("e", slots=4)

    assert [generation.request_id.split("~")[0] for _, generation in world.sent[1:]] == [
        "old", "begun", "first", "second",
    ]  # fmt: skip


def test_the_engine_with_fewest_outstanding_tokens_is_chosen() -> None:
    world = World()
    world.engine("a", slots=8)
    world.engine("b", slots=8)
    world.ask("long", tokens_=90)
    world.ask("short", tokens_=5)
    world.ask("next", tokens_=5)

    assert world.step() == ["long@a", "short@b", "next@b"]


def test_tokens_that_were_generated_are_no_longer_outstanding() -> None:
    world = World()
    world.engine("a", slots=8)
    world.engine("b", slots=8)
    world.ask("one", tokens_=10)
    world.ask("two", tokens_=8)
    assert world.step() == ["one@a", "two@b"]

    world.tell("a", "one", [5] * 9)
    world.ask("three")

    assert world.step() == ["three@a"]


def test_a_session_stays_with_its_engine_until_that_is_too_busy() -> None:
    world = World(affinity_bound_tokens=20)
    world.engine("a", slots=8)
    world.engine("b", slots=8)
    world.ask("turn 1", session_id="s", tokens_=8)
    assert world.step() == ["turn 1@a"]

    world.ask("turn 2", session_id="s", tokens_=8)
    assert world.step() == ["turn 2@a"]
    world.ask("turn 3", session_id="s", tokens_=8)
    assert world.step() == ["turn 3@a"]
    world.ask("turn 4", session_id="s", tokens_=8)
    assert world.step() == ["turn 4@b"]
    world.ask("turn 5", session_id="s", tokens_=8)
    assert world.step() == ["turn 5@b"]


def test_only_the_latest_sessions_are_remembered() -> None:
    world = World(session_count=2)
    world.engine("a", slots=100)
    for name in "vwxyz":
        world.ask(name, session_id=name)
    world.step()

    sessions = world.router._choice.sessions  # pyright: ignore[reportPrivateUsage]
    assert [sessions.get(name) is not None for name in "vwxyz"] == [False, False, True, True, True]


def test_oversubscription_gives_an_engine_more_than_its_slots() -> None:
    world = World(oversubscription=1.5)
    world.engine("e", slots=2)
    for name in "abcd":
        world.ask(name)

    assert world.step() == ["a@e", "b@e", "c@e"]


def test_an_engine_without_slots_is_given_nothing() -> None:
    world = World()
    world.engine("e", slots=0)
    world.ask("a")

    assert world.step() == []


def test_a_request_waits_until_its_min_version_is_served() -> None:
    world = World()
    world.engine("e", version=1, slots=4)
    world.ask("new", min_version=2)
    world.ask("now", min_version=1)

    assert world.step() == ["now@e"]
    world.router.served({"e": "e"}, 2, world.now)

    assert world.step() == ["new@e"]


def test_an_exact_version_that_has_passed_is_refused() -> None:
    world = World()
    world.engine("e", version=3)

    with pytest.raises(VersionUnavailable, match="Version 2 is gone; 3 is served") as refused:
        world.ask("a", exact_version=2)

    assert refused.value.facts == {"exact_version": "2", "policy_version": "3"}
    assert world.router.running_count == world.router.waiting_count == 0


def test_an_exact_version_is_refused_when_it_passes_while_the_request_waits() -> None:
    world = World()
    world.engine("e", version=1)
    world.ask("busy")
    world.ask("waits", exact_version=1)
    world.ask("later", exact_version=2)
    world.step()

    world.router.served({"e": "e"}, 2, world.now)
    world.step()

    assert world.client.results["waits"].failure.reason == "VERSION_UNAVAILABLE"
    assert world.tell("e", "busy", [1], version=1, reason=STOP) == ["later@e"]


def test_a_running_request_of_an_exact_version_is_refused_at_the_first_token_of_another() -> None:
    world = World()
    world.engine("e", version=1)
    world.ask("a", exact_version=1)
    world.step()

    world.tell("e", "a", [5], version=1)
    world.router.served({"e": "e"}, 2, world.now)
    world.tell("e", "a", [6], version=2)

    assert world.client.results["a"].failure.reason == "VERSION_UNAVAILABLE"
    assert world.cancelled == [("e", "a")]
