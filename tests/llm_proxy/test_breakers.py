"""Engines that fail or stall are suspended, and come back by a probe; stuck requests move."""

import pytest

from llm_proxy.routing import SERVING, SUSPENDED
from tests.llm_proxy.world import ABORT, LENGTH, World, ids_of

SETTINGS = {"suspend_failures": 2, "suspend_seconds": 5, "most_suspend_seconds": 15, "max_fruitless_attempts": 100}


def fail(world: World, engine: str, times: int) -> list[str]:
    sent: list[str] = []
    for _ in range(times):
        sent = world.fail(engine, next(iter(world.router.engine(engine).attempts)))
    return sent


def test_an_engine_that_fails_again_and_again_gets_nothing_until_its_suspension_is_over() -> None:
    world = World(**SETTINGS)
    world.engine("e", slots=2)
    world.ask("a")
    world.step()

    assert fail(world, "e", 2) == []
    engine = world.router.engine("e")
    assert (engine.state, engine.detail) == (SUSPENDED, "Out of memory. Look at the engine's log; llm_proxy continues "
        "its requests elsewhere.; tried after 5 s")  # fmt: skip
    assert world.router.next_deadline == 5.0
    assert world.wait(4.9) == []

    assert world.wait(0.1) == ["a@e"]


def test_a_probe_that_brings_a_token_brings_the_engine_back() -> None:
    world = World(**SETTINGS)
    world.engine("e", slots=2)
    world.ask("a")
    world.step()
    fail(world, "e", 2)
    world.ask("b")
    assert world.wait(5) == ["a@e"]

    assert world.tell("e", world.last_wire_id(), [7]) == ["b@e"]

    assert world.router.engine("e").state == SERVING


def test_an_engine_that_waits_for_its_probe_gets_the_next_request() -> None:
    world = World(**SETTINGS)
    world.engine("e")
    world.ask("a")
    world.step()
    fail(world, "e", 2)
    world.engine("idle", slots=8)
    assert world.wait(5) == []

    world.ask("b")

    assert world.step() == ["b@e"]


def test_each_probe_that_fails_doubles_the_suspension_up_to_its_bound() -> None:
    world = World(**SETTINGS)
    world.engine("e")
    world.ask("a")
    world.step()
    fail(world, "e", 2)

    for suspension in (5, 10, 15, 15):
        assert world.wait(suspension - 0.1) == []
        assert world.wait(0.1) == ["a@e"]
        fail(world, "e", 1)


def test_a_probe_that_is_cancelled_lets_the_next_request_be_one() -> None:
    world = World(**SETTINGS)
    world.engine("e")
    world.ask("a")
    world.step()
    fail(world, "e", 2)
    world.wait(5)
    world.ask("b")

    world.router.cancel("a", world.now)
    world.step()

    assert world.tell("e", world.last_wire_id(), [], reason=ABORT) == ["b@e"]
    assert world.router.engine("e").state == SUSPENDED


def test_a_request_that_finishes_forgives_the_failures_before_it() -> None:
    world = World(**SETTINGS)
    world.engine("e")
    for name in "abc":
        world.ask(name)
        world.step()
        fail(world, "e", 1)
        world.tell("e", world.last_wire_id(), [7], reason=LENGTH)

    assert world.router.engine("e").state == SERVING


def test_what_is_the_request_s_fault_is_not_held_against_the_engine() -> None:
    world = World(**SETTINGS)
    world.engine("e")
    for name in "abc":
        world.ask(name)
        world.step()
        world.tell("e", name, [], reason=ABORT)
        world.router.cancel(name, world.now)
        world.tell("e", world.last_wire_id(), [], reason=ABORT)

    assert world.router.engine("e").state == SERVING


def test_an_engine_that_keeps_losing_its_connection_is_suspended_when_it_is_back() -> None:
    world = World(**SETTINGS)
    for _ in range(2):
        world.engine("e")
        world.router.lost("e", "connection reset", world.now)
    world.engine("e")
    world.ask("a")

    assert world.step() == []
    assert world.router.engine("e").detail == "connection reset; tried after 5 s"
    assert world.wait(5) == ["a@e"]


def test_a_suspended_engine_that_lacks_the_weights_is_behind() -> None:
    world = World(**SETTINGS)
    world.engine("e")
    world.ask("a")
    world.step()
    fail(world, "e", 2)

    world.engine("new", version=1)

    assert world.router.engine("e").detail == "serves version 0, waits for 1"


def test_an_engine_that_brings_no_token_is_suspended_and_its_requests_go_elsewhere() -> None:
    world = World(stall_seconds=30)
    world.engine("stalls", slots=2)
    world.ask("a", tokens_=4)
    world.step()
    world.tell("stalls", "a", [5, 6])
    world.engine("other")

    assert world.wait(29) == []
    assert world.wait(1) == ["a@other"]

    assert world.cancelled == [("stalls", "a")]
    engine = world.router.engine("stalls")
    assert (engine.state, engine.detail) == (SUSPENDED, "no token for 30 s; tried after 5 s")
    world.tell("stalls", "a", [9, 9], reason=LENGTH)
    world.tell("other", world.last_wire_id(), [7, 8], reason=LENGTH)
    assert ids_of(world.client.results["a"]) == [5, 6, 7, 8]


@pytest.mark.parametrize("why", ["it takes weights", "it is paused", "another request advances"])
def test_an_engine_that_owes_no_token_does_not_stall(why: str) -> None:
    world = World(stall_seconds=30)
    world.engine("e", slots=2)
    world.ask("a")
    world.ask("b", tokens_=90)
    world.step()
    if why == "it takes weights":
        world.router.hold("e")
    if why == "it is paused":
        status = type(world.router.engine("e").status)()
        status.CopyFrom(world.router.engine("e").status)
        status.paused = True
        world.router.reported("e", status, world.now)

    for _ in range(5):
        world.wait(20)
        if why == "another request advances":
            world.tell("e", "b", [1])

    assert world.router.engine("e").state == SERVING


def test_with_every_engine_suspended_requests_wait_for_the_probes() -> None:
    world = World(stall_seconds=30, suspend_seconds=5)
    world.engine("one", slots=2)
    world.engine("two", slots=2)
    for name in "ab":
        world.ask(name)
    world.step()
    world.wait(30)
    world.ask("c")
    world.ask("d")
    world.ask("late")
    assert world.step() == []

    assert sorted(world.wait(5)) == ["c@two", "d@one"]
    assert world.tell("one", "d", [7], reason=LENGTH) == ["late@one"]
    assert [engine.state for engine in world.router.engines] == [SERVING, SUSPENDED]


def test_a_stuck_request_moves_to_an_engine_that_has_nothing_else_to_do() -> None:
    world = World(stuck_seconds=10)
    world.engine("one", slots=2)
    world.ask("stuck", tokens_=4)
    world.ask("lively", tokens_=90)
    world.step()
    world.tell("one", "stuck", [5])
    world.wait(9)
    world.tell("one", "lively", [1])
    world.wait(2)
    world.ask("waits")

    world.engine("two")
    assert [engine for engine, _ in world.sent[2:]] == ["two"]
    assert world.tell("two", "waits", [7], reason=LENGTH) == ["stuck@two"]

    assert world.cancelled == [("one", "stuck")]
    assert world.router.moved_count == 1
    assert world.router.unconfirmed_cancels("one") == ["stuck"]
    world.tell("two", world.last_wire_id(), [6, 7, 8], reason=LENGTH)
    world.tell("one", "stuck", [9], reason=ABORT)
    assert ids_of(world.client.results["stuck"]) == [5, 6, 7, 8]


def test_a_stuck_request_moves_past_an_engine_that_waits_for_its_probe() -> None:
    world = World(stuck_seconds=10, **SETTINGS)
    world.engine("failing")
    world.ask("a")
    world.step()
    fail(world, "failing", 2)
    world.engine("one")
    world.router.hold("failing")
    world.ask("stuck")
    world.step()
    world.router.release("failing", world.now)
    world.router.cancel("stuck", world.now)
    world.wait(6)

    world.engine("sound")

    assert world.wait(10) == ["a@sound"]


def test_a_request_that_advances_again_is_not_moved() -> None:
    world = World(stuck_seconds=10)
    world.engine("one")
    world.ask("a", tokens_=9)
    world.step()
    world.wait(11)

    world.tell("one", "a", [5])
    world.engine("two")

    assert len(world.sent) == 1
    assert world.wait(10) == ["a@two"]
