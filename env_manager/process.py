"""Plays one environment for the env_manager that starts it: `process ENVIRONMENT ADDRESS LOG_FORMAT LOG_LEVEL`.

It ends with env_manager, however that ends: the kernel kills it where it is Linux, and the end of stdin does elsewhere.
"""

import asyncio
import ctypes
import os
import signal
import sys
import threading

from grpc import aio

from env_manager.environments import ENVIRONMENTS
from env_manager.worlds import find_kind
from rollfarm import rpc, service
from rollfarm.config import Telemetry
from rollfarm.env_server import EnvironmentServicer
from rollfarm.telemetry import configure_logging

PR_SET_PDEATHSIG = 1


def main(environment: str, address: str, log_format: str, log_level: str) -> None:
    _die_with_parent()
    configure_logging("environment", Telemetry.model_validate({"log_format": log_format, "log_level": log_level}))
    kind = find_kind(ENVIRONMENTS, environment)
    assert kind is not None
    service.run(lambda: _serve(EnvironmentServicer({environment: kind}), address))


async def _serve(servicer: EnvironmentServicer, address: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = aio.server(interceptors=[service.ErrorInterceptor()], options=rpc.MESSAGE_OPTIONS)
    servicer.register(server)
    server.add_insecure_port(address)
    await server.start()
    await stop.wait()
    await server.stop(grace=None)
    await servicer.close()


def _die_with_parent() -> None:
    """Even with an environment that holds the interpreter, where the kernel can see to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_when_stdin_ends, daemon=True).start()


def _exit_when_stdin_ends() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
