"""llm_proxy's numbers for Prometheus, read from the router when the page is asked for."""

from collections.abc import Iterator

from prometheus_client import Histogram
from prometheus_client.core import REGISTRY, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from llm_proxy.routing import SERVING, Router

QUEUE_SECONDS = Histogram(
    "rollfarm_llm_proxy_queue_seconds",
    "Time that a request waited for a slot, each time it did.",
    buckets=(0.0005, 0.002, 0.01, 0.05, 0.25, 1, 5, 30, 120),
)


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
        yield from self._engines()

    def _engines(self) -> Iterator[Metric]:
        serving = _labelled("engine_serving", "1 while the engine may be given requests.")
        version = _labelled("engine_policy_version", "Version that the engine serves.")
        running = _labelled("engine_running_requests", "Requests that hold a slot of the engine.")
        slots = _labelled("engine_slots", "Requests that the engine decodes at once.")
        tokens = CounterMetricFamily(
            "rollfarm_llm_proxy_engine_generated_tokens", "Tokens that the engine generated.", labels=["engine"]
        )
        for engine in self._router.engines:
            name = [engine.engine_id]
            serving.add_metric(name, engine.state == SERVING)
            version.add_metric(name, engine.version)
            running.add_metric(name, len(engine.attempts))
            slots.add_metric(name, engine.status.slot_count)
            tokens.add_metric(name, engine.generated)
        yield from (serving, version, running, slots, tokens)


def register(router: Router, registry: CollectorRegistry = REGISTRY) -> None:
    """Show the router on the metrics page."""
    registry.register(RouterMetrics(router))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"rollfarm_llm_proxy_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"rollfarm_llm_proxy_{name}", text, value=value)


def _labelled(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rollfarm_llm_proxy_{name}", text, labels=["engine"])
