"""A version that does not come: requests wait for it as long as they may, and then learn which one is served."""

from tests.llm_proxy.world import LENGTH, World


def test_a_request_waits_for_its_version_as_long_as_it_may_and_is_then_refused() -> None:
    world = World(version_wait_seconds=30)
    world.engine("e", version=1)
    world.now = 100.0
    world.ask("a", min_version=3)
    assert world.router.next_deadline == 130.0

    world.wait(29)
    assert not world.client.results
    world.wait(1)

    failure = world.client.results["a"].failure
    assert failure.reason == "VERSION_NOT_SERVED"
    assert dict(failure.metadata) == {"version": "3", "policy_version": "1"}
    assert world.router.waiting_count == 0
    assert world.router.next_deadline is None


def test_with_no_time_to_wait_it_is_refused_at_once() -> None:
    world = World(version_wait_seconds=0)
    world.engine("e", version=1)

    world.ask("a", exact_version=2)
    world.step()

    assert world.client.results["a"].failure.reason == "VERSION_NOT_SERVED"


def test_the_deadline_ends_when_the_version_is_served() -> None:
    world = World(version_wait_seconds=30)
    world.engine("e", version=1)
    world.ask("busy")
    world.ask("a", min_version=2)
    world.step()
    world.router.served({"e": "e"}, 2, world.now)

    world.wait(100)

    assert not world.client.results
    assert world.tell("e", "busy", [1], reason=LENGTH) == ["a@e"]


def test_a_request_that_waits_for_a_slot_alone_has_no_deadline() -> None:
    world = World(version_wait_seconds=30)
    world.ask("a")

    assert world.router.next_deadline is None


def test_a_request_that_waits_for_a_version_can_be_cancelled() -> None:
    world = World(version_wait_seconds=30)
    world.ask("a", min_version=2)

    world.router.cancel("a", world.now)
    world.step()

    assert world.router.next_deadline is None
    assert not world.client.results["a"].HasField("failure")
