"""Run llm_proxy: `python -m llm_proxy farm.toml --llm_proxy.listen.port 7801`."""

import sys

from llm_proxy import metrics
from llm_proxy.config import LlmProxyRoot
from llm_proxy.engines import Fleet
from llm_proxy.server import SERVICE, LlmProxyServicer
from rollfarm.config import load_or_exit
from rollfarm.service import run, serve, stop_on_signal
from rollfarm.telemetry import start_telemetry
from rollfarm.v1.llm_proxy_pb2_grpc import add_LlmProxyServiceServicer_to_server


def main() -> None:
    config = load_or_exit(LlmProxyRoot, sys.argv[1:], prog="python -m llm_proxy").llm_proxy
    start_telemetry("llm_proxy", config.telemetry, config.listen)
    fleet = Fleet(config)
    metrics.register(fleet.router)

    async def wire() -> None:
        stop = stop_on_signal()
        servicer = LlmProxyServicer(fleet, stop)
        await serve(
            lambda server: add_LlmProxyServiceServicer_to_server(servicer, server),
            config.listen,
            fleet.run,
            servicer.wake_on_stop,
            services=[SERVICE],
            stop=stop,
        )

    run(wire, port_flag="--llm_proxy.listen.port")


if __name__ == "__main__":
    main()
