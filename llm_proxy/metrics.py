"""llm_proxy's numbers for Prometheus, read from the router when the page is asked for."""

from collections.abc import Callable, Iterator

from prometheus_client.core import REGISTRY, CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from llm_proxy.breakers import Phase
from llm_proxy.pool import SERVING, EngineState
from llm_proxy.routing import Router

ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineState], float]]] = {
    "serving": ("1 while the engine is given requests.", lambda engine: engine.state == SERVING),
    "suspended": ("1 while its breaker is open.", lambda engine: engine.breaker.phase is not Phase.CLOSED),
    "policy_version": ("Version that the engine serves.", lambda engine: engine.version),
    "running_requests": ("Requests that hold a slot of the engine.", lambda engine: len(engine.attempts)),
    "slots": ("Requests that the engine decodes at once.", lambda engine: engine.status.slot_count),
    "decoding_requests": ("Requests that it decodes, by its own account.", lambda engine: engine.status.running_count),
    "waiting_requests": ("Requests that wait within it.", lambda engine: engine.status.waiting_count),
    "outstanding_tokens": ("Tokens that its requests may still cost.", lambda engine: engine.load),
    "kv_cache_usage_ratio": ("Share of its KV cache in use.", lambda engine: engine.status.kv_cache_usage),
    "tokens_per_second": ("Tokens that it generates a second, lately.", lambda engine: engine.tokens_per_second),
}
"""By name: what it says, and how it is read."""


class RouterMetrics(Collector):
    """Gauges and counters of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        router = self._router
        yield _gauge("queued_requests", "Requests that wait for an engine (sum).", router.waiting_count)
        yield _gauge("running_requests", "Requests with an engine (sum).", router.running_count)
        yield _gauge("policy_version", "Version that engines must serve (max).", router.policy_version)
        yield _gauge("gate_closed", "1 while weights are applied (max).", router.gate_closed)
        yield _counter("generated_tokens", "Tokens generated.", router.generated_count)
        yield _counter("finished_requests", "Requests answered.", router.finished_count)
        yield _counter("resumptions", "Requests given to a further engine.", router.resumption_count)
        yield _counter("moves", "Stuck requests taken from their engine.", router.moved_count)
        yield HistogramMetricFamily(
            "rollfarm_llm_proxy_queue_seconds",
            "Time that a request waited for a slot, each time it did.",
            buckets=router.queue_seconds.buckets,
            sum_value=router.queue_seconds.total,
        )
        yield from self._engines()
        yield from self._tenants()

    def _engines(self) -> Iterator[Metric]:
        for name, (text, value) in ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(f"rollfarm_llm_proxy_engine_{name}", text, labels=["engine"])
            for engine in self._router.engines:
                gauge.add_metric([engine.engine_id], value(engine))
            yield gauge
        tokens = CounterMetricFamily(
            "rollfarm_llm_proxy_engine_generated_tokens", "Tokens that the engine generated.", labels=["engine"]
        )
        for engine in self._router.engines:
            tokens.add_metric([engine.engine_id], engine.generated)
        yield tokens

    def _tenants(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily(
            "rollfarm_llm_proxy_tenant_queued_requests", "The tenant's requests without an engine.", labels=["tenant"]
        )
        running = GaugeMetricFamily(
            "rollfarm_llm_proxy_tenant_running_requests", "The tenant's requests with an engine.", labels=["tenant"]
        )
        for tenant in self._router.tenants:
            queued.add_metric([tenant.name], tenant.waiting_count)
            running.add_metric([tenant.name], tenant.open_count - tenant.waiting_count)
        yield from (queued, running)


def register(router: Router, registry: CollectorRegistry = REGISTRY) -> None:
    """Show the router on the metrics page."""
    registry.register(RouterMetrics(router))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"rollfarm_llm_proxy_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"rollfarm_llm_proxy_{name}", text, value=value)
