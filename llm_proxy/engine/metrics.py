"""What an engine host counts. Gauges are read from the adapter's status when the page is fetched."""

from collections.abc import Callable

import prometheus_client

from llm_proxy.engine.adapters import Adapter, EngineStatus

STEP_SECONDS = prometheus_client.Histogram(
    "rollfarm_engine_step_seconds",
    "One forward pass of the embedded engine, sampling included.",
    buckets=(0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.5, 1, 2, 4),
)
STEP_TOKENS = prometheus_client.Counter(
    "rollfarm_engine_computed_tokens", "Tokens of prompt and output that went through the model."
)
PAUSE_SECONDS = prometheus_client.Histogram(
    "rollfarm_engine_weights_pause_seconds",
    "How long decoding stood still for new weights.",
    buckets=(0.001, 0.004, 0.016, 0.064, 0.25, 1, 4),
)

_GAUGES: dict[str, tuple[str, Callable[[EngineStatus], float]]] = {
    "rollfarm_engine_running_requests": ("Requests decoding.", lambda status: status.running_count),
    "rollfarm_engine_waiting_requests": ("Requests accepted, not decoding.", lambda status: status.waiting_count),
    "rollfarm_engine_generated_tokens": ("Tokens generated.", lambda status: status.generated_token_count),
    "rollfarm_engine_policy_version": ("Version served.", lambda status: status.policy_version),
    "rollfarm_engine_kv_cache_ratio": ("Share of the KV cache in use.", lambda status: status.kv_cache_usage),
}


def watch(adapter: Adapter) -> None:
    """Show the adapter's status on the metrics page. Once in a process."""
    for name, (text, read) in _GAUGES.items():
        prometheus_client.Gauge(name, text).set_function(lambda read=read: read(adapter.status()))
