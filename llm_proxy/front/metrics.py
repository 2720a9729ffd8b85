"""The front door's numbers for Prometheus."""

from prometheus_client import Counter, Histogram

NEW_HISTORIES = Counter(
    "rollfarm_llm_proxy_session_histories",
    "Branches begun in sessions beyond the first, by cause: forked, rewritten, template.",
    ["cause"],
)

HTTP_SECONDS = Histogram(
    "rollfarm_llm_proxy_http_seconds",
    "Time from an agent's request to its last byte, by path and status.",
    ["path", "status"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
)
