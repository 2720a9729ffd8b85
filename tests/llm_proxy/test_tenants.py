"""Tenants that wait share the engines by their weights; quotas bound each, and hold up nobody else."""

from collections import Counter

import pytest

from llm_proxy.tenants import TenantSettings
from rollfarm.errors import QuotaExceeded
from tests.llm_proxy.world import LENGTH, World


def serve(world: World, count: int, *, tokens: int = 4) -> Counter[str]:
    """Finish the oldest running request again and again; tokens served by tenant, whose name begins its requests'."""
    served: Counter[str] = Counter()
    for _ in range(count):
        engine = world.router.engine("e")
        wire_id = next(iter(engine.attempts))
        served[wire_id.split("-")[0]] += tokens
        world.tell("e", wire_id, [7] * tokens, reason=LENGTH)
    return served


def ask_many(world: World, tenant: str, count: int, *, tokens: int = 4) -> None:
    for number in range(count):
        world.ask(f"{tenant}-{number}", tenant=tenant, tokens_=tokens)


def test_tenants_that_wait_get_tokens_in_proportion_to_their_weights() -> None:
    world = World(tenants={"a": TenantSettings(weight=3.0)})
    ask_many(world, "a", 200)
    ask_many(world, "b", 200)
    world.engine("e", slots=4)

    served = serve(world, 120)

    assert served["a"] / served["b"] == pytest.approx(3.0, rel=0.1)


def test_tokens_are_shared_and_not_requests() -> None:
    world = World()
    ask_many(world, "long", 100, tokens=40)
    ask_many(world, "short", 400, tokens=4)
    world.engine("e", slots=4)

    served: Counter[str] = Counter()
    for _ in range(220):
        wire_id = next(iter(world.router.engine("e").attempts))
        tenant = wire_id.split("-")[0]
        length = 40 if tenant == "long" else 4
        served[tenant] += length
        world.tell("e", wire_id, [7] * length, reason=LENGTH)

    assert served["long"] / served["short"] == pytest.approx(1.0, rel=0.2)


def test_a_tenant_is_charged_for_what_it_used_and_not_for_what_it_might_have() -> None:
    world = World()
    ask_many(world, "modest", 300, tokens=4)
    ask_many(world, "boastful", 300, tokens=90)
    world.engine("e", slots=4)

    served = serve(world, 200)

    assert served["boastful"] / served["modest"] == pytest.approx(1.0, rel=0.3)


def test_idle_time_earns_no_credit() -> None:
    world = World()
    world.engine("e")
    ask_many(world, "busy", 200)
    world.step()
    serve(world, 100)

    ask_many(world, "late", 100)
    served = serve(world, 41)

    assert served["busy"] == pytest.approx(served["late"], abs=8)


def test_a_tenant_at_its_quota_waits_and_holds_up_nobody_else() -> None:
    world = World(tenants={"a": TenantSettings(weight=100.0, most_running=2)})
    ask_many(world, "a", 5)
    ask_many(world, "b", 5)
    world.engine("e", slots=6)

    assert Counter(generation.request_id[0] for _, generation in world.sent) == {"a": 2, "b": 4}
    assert world.tell("e", "b-0", [1], reason=LENGTH) == ["b-4@e"]
    assert world.tell("e", "a-0", [1], reason=LENGTH) == ["a-2@e"]


def test_a_cancelled_request_counts_against_the_quota_until_the_engine_confirms() -> None:
    world = World(tenants={"a": TenantSettings(most_running=1)})
    ask_many(world, "a", 2)
    world.engine("e", slots=2)

    world.router.cancel("a-0", world.now)
    assert world.step() == []

    assert world.tell("e", "a-0", [], reason=3) == ["a-1@e"]


def test_a_tenant_with_too_many_open_requests_is_refused_and_a_retry_of_one_is_not() -> None:
    world = World(tenants={"a": TenantSettings(most_open=2)})
    ask_many(world, "a", 2)
    world.ask("a-0", tenant="a")

    with pytest.raises(QuotaExceeded, match="has 2 requests open") as refused:
        world.ask("a-2", tenant="a")

    assert refused.value.facts == {"tenant": "a", "most_open": "2"}
    world.ask("b-0", tenant="b")
    world.router.cancel("a-0", world.now)
    world.ask("a-2", tenant="a")


def test_tenants_that_have_nothing_open_are_forgotten() -> None:
    world = World()
    world.engine("e")
    for number in range(1000):
        world.ask(f"r{number}", tenant=f"t{number}")
        world.step()
        world.tell("e", f"r{number}", [1], reason=LENGTH)

    assert world.router.tenants == []
    assert len(world.router._tenants._tenants) < 10  # pyright: ignore[reportPrivateUsage]


def test_who_never_had_to_wait_has_spent_all_the_same() -> None:
    world = World()
    world.engine("e")
    for number in range(50):
        world.ask(f"first-alone-{number}", tenant="first")
        world.step()
        serve(world, 1)
    ask_many(world, "late", 100)
    ask_many(world, "first", 100)
    world.step()

    served = serve(world, 41)

    assert served["first"] == pytest.approx(served["late"], abs=8)
