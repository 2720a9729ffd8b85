"""`python -m llm_proxy.engine FARM.toml`: one engine host."""

import sys

from llm_proxy.engine.config import EngineRoot, refuse_unmade
from rollfarm import service
from rollfarm.config import ConfigError, exit_bad_config, load_or_exit
from rollfarm.imports import importing
from rollfarm.telemetry import start_telemetry

PROG = "python -m llm_proxy.engine"


def main() -> None:
    root = load_or_exit(EngineRoot, sys.argv[1:], prog=PROG)
    try:
        refuse_unmade(root.model)
    except ConfigError as error:
        exit_bad_config(PROG, error)
    start_telemetry("engine", root.engine.telemetry, root.engine.listen)
    service.run(lambda: serve(root), port_flag="--engine.listen.port")


async def serve(root: EngineRoot) -> None:
    """Start the engine, and serve it until it or the process is told to end."""
    with importing():
        from llm_proxy.engine import adapters, metrics
        from llm_proxy.engine.server import SERVICE, EngineServicer
        from rollfarm.v1 import engine_pb2_grpc

        adapter = adapters.make(root)
    server = EngineServicer(adapter)
    try:
        await adapter.start(server.deliver)
    except ConfigError as error:
        exit_bad_config(PROG, error)
    metrics.watch(adapter)
    try:
        await service.serve(
            lambda grpc_server: engine_pb2_grpc.add_EngineServiceServicer_to_server(server, grpc_server),
            root.engine.listen,
            adapter.watch,
            services=[SERVICE],
        )
    finally:
        await adapter.stop()


if __name__ == "__main__":
    main()
