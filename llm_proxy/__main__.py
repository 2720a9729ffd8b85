"""Run llm_proxy: `python -m llm_proxy farm.toml --llm_proxy.listen.port 7801`."""

import sys
from typing import TYPE_CHECKING

from llm_proxy import metrics
from llm_proxy.config import LlmProxyRoot
from llm_proxy.engines import Fleet
from llm_proxy.front.config import HttpConfig
from llm_proxy.server import SERVICE, LlmProxyServicer
from rollfarm.config import ConfigError, exit_bad_config, load_or_exit
from rollfarm.service import calm_collector, run, serve, stop_on_signal
from rollfarm.telemetry import start_telemetry
from rollfarm.v1.llm_proxy_pb2_grpc import add_LlmProxyServiceServicer_to_server

if TYPE_CHECKING:
    from llm_proxy.front.wiring import Front

PROG = "python -m llm_proxy"

YOUNG_OBJECTS = 200_000
"""More than a burst of 20,000 requests makes, which looks would slow by a tenth. A unary call leaves six, in cycles."""


def main() -> None:
    root = load_or_exit(LlmProxyRoot, sys.argv[1:], prog=PROG)
    config = root.llm_proxy
    start_telemetry("llm_proxy", config.telemetry, config.listen)
    fleet = Fleet(config)
    metrics.register(fleet.router)

    async def wire() -> None:
        stop = stop_on_signal()
        front = _open_front(config.http, root.model.path, fleet)
        servicer = LlmProxyServicer(fleet, stop, front)
        calm_collector(young=YOUNG_OBJECTS)
        await serve(
            lambda server: add_LlmProxyServiceServicer_to_server(servicer, server),
            config.listen,
            fleet.run,
            servicer.wake_on_stop,
            servicer.watch_sleep,
            *([front.http.run] if front else []),
            services=[SERVICE],
            stop=stop,
            drains=[front.http.drain] if front else [],
        )

    run(wire, port_flag="--llm_proxy.listen.port", quick=True)


def _open_front(config: HttpConfig, model_path: str, fleet: Fleet) -> "Front | None":
    """The front door for agents, where it is enabled. A configuration that opens none ends the process."""
    if not config.enabled:
        return None
    # Here, because transformers takes a second, which nobody else shall wait for.
    from llm_proxy.front.wiring import open_front

    try:
        return open_front(config, model_path, fleet)
    except ConfigError as error:
        exit_bad_config(PROG, error)


if __name__ == "__main__":
    main()
