"""Structured logs on stderr, Prometheus metrics on /metrics, and trace ids that travel with every call."""

import contextvars
import logging
import sys
import uuid
from typing import Any

import prometheus_client
import structlog

from rollfarm.config import EXIT_PORT_IN_USE, Listen, Telemetry

TRACE_METADATA = "traceparent"

trace_id: contextvars.ContextVar[str] = contextvars.ContextVar("trace_id", default="")
"""32 hexadecimal digits, shared by all that one episode sets off, in every service. Empty is none."""

RPC_SECONDS = prometheus_client.Histogram(
    "rollfarm_rpc_server_seconds",
    "Time to answer a call; a long poll includes the wait.",
    ["method", "code"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)


def start_telemetry(service: str, telemetry: Telemetry, listen: Listen) -> None:
    """Configure logging for the process and serve its metrics page. Ends the process when that port is taken."""
    configure_logging(service, telemetry)
    if telemetry.metrics_port:
        try:
            prometheus_client.start_http_server(telemetry.metrics_port, addr=listen.host)
        except OSError as error:
            print(
                f"Cannot serve metrics on {listen.host}:{telemetry.metrics_port}: {error.strerror}. Stop what uses the "
                f"port, or choose another with --{service}.telemetry.metrics_port.",
                file=sys.stderr,
            )
            raise SystemExit(EXIT_PORT_IN_USE) from None


def configure_logging(service: str, telemetry: Telemetry) -> None:
    """Send structlog and the standard library's loggers to stderr in one format."""
    level = getattr(logging, telemetry.log_level.upper())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_trace,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=telemetry.log_format == "json"),
    ]
    if telemetry.log_format == "json":
        last: list[structlog.typing.Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ]
    else:
        last = [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    structlog.configure(
        processors=shared + last,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(level=max(level, logging.WARNING), stream=sys.stderr, force=True)


def _add_trace(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A line says which trace it belongs to, unless its event has said so itself."""
    if trace := event.pop("trace_id", "") or trace_id.get():
        event["trace_id"] = trace
    return event


def begin_trace() -> None:
    """Begin a trace: log lines and calls of this asyncio task, and of those that it starts, carry it from here on."""
    trace_id.set(_new_id())


def traceparent() -> str:
    """The W3C traceparent header of the current trace; where there is none, of a new one for this call alone."""
    return f"00-{trace_id.get() or _new_id()}-{uuid.uuid4().hex[:16]}-01"


def adopt(header: str) -> None:
    """Continue the trace of a caller."""
    parts = header.split("-")
    if len(parts) == 4 and len(parts[1]) == 32:
        trace_id.set(parts[1])


def _new_id() -> str:
    return uuid.uuid4().hex
