"""What Prometheus reads: every engine and tenant, from the router's state."""

from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from llm_proxy.metrics import register
from tests.llm_proxy.world import LENGTH, World


def page(world: World) -> dict[str, float]:
    registry = CollectorRegistry()
    register(world.router, registry)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_each_engine_shows_what_it_does_and_whether_it_may() -> None:
    world = World(suspend_failures=1)
    world.engine("one", version=2, slots=1)
    world.engine("two", version=2, slots=3)
    for number in range(3):
        world.ask(str(number), tokens_=10, tenant="a")
    world.step()
    world.tell("one", "0", [1, 2], version=2)
    world.fail("two", next(iter(world.router.engine("two").attempts)))
    status = type(world.router.engine("one").status)()
    status.CopyFrom(world.router.engine("one").status)
    status.kv_cache_usage, status.running_count, status.waiting_count = 0.5, 2, 1
    status.generated_token_count = 300
    world.now = 10.0
    world.router.reported("one", status, world.now)

    shown = page(world)

    prefix = "rollfarm_llm_proxy_engine_"
    assert {name: shown[f'{prefix}{name}{{engine="one"}}'] for name in (
        "serving", "suspended", "policy_version", "running_requests", "slots", "decoding_requests", "waiting_requests",
        "kv_cache_usage_ratio", "generated_tokens_total",
    )} == {
        "serving": 1, "suspended": 0, "policy_version": 2, "running_requests": 1, "slots": 1, "decoding_requests": 2,
        "waiting_requests": 1, "kv_cache_usage_ratio": 0.5, "generated_tokens_total": 2,
    }  # fmt: skip
    # 300 tokens in 10 s, averaged over 10 s: 30 * (1 - 1/e).
    assert round(shown[f'{prefix}tokens_per_second{{engine="one"}}'], 2) == 18.96
    assert shown[f'{prefix}serving{{engine="two"}}'] == 0
    assert shown[f'{prefix}suspended{{engine="two"}}'] == 1
    assert shown['rollfarm_llm_proxy_tenant_queued_requests{tenant="a"}'] == 1
    assert shown['rollfarm_llm_proxy_tenant_running_requests{tenant="a"}'] == 2


def test_the_time_that_requests_waited_is_counted_up_to_each_bound() -> None:
    world = World()
    world.engine("e", slots=1)
    world.ask("at once")
    world.step()
    world.ask("later")
    world.step()
    world.now = 0.25
    world.tell("e", "at once", [1], reason=LENGTH)

    shown = page(world)

    prefix = "rollfarm_llm_proxy_queue_seconds"
    bounds = ("0.0005", "0.05", "0.25", "120.0", "+Inf")
    assert [shown[f'{prefix}_bucket{{le="{bound}"}}'] for bound in bounds] == [1, 1, 2, 2, 2]
    assert (shown[f"{prefix}_count"], shown[f"{prefix}_sum"]) == (2, 0.25)
