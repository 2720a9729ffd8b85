"""`python -m env_manager farm.toml`: play episodes until SIGTERM, then give the unfinished ones back."""

import sys

from env_manager.config import EnvManagerConfig, EnvManagerRoot
from rollfarm import service
from rollfarm.config import ConfigError, exit_bad_config, load_or_exit
from rollfarm.telemetry import start_telemetry

PROG = "python -m env_manager"


def main() -> None:
    root = load_or_exit(EnvManagerRoot, sys.argv[1:], prog=PROG)
    config = root.env_manager
    # Here, because transformers takes a second, which --help and a wrong flag shall not.
    from env_manager.model import load
    from env_manager.rendering import Renderer
    from env_manager.server import SERVICE
    from env_manager.wiring import open_worker

    async def serve(config: EnvManagerConfig, renderer: Renderer, context_tokens: int) -> None:
        async with open_worker(config, renderer, context_tokens) as worker:
            register, loops = worker.servicer.register, worker.loops
            service.calm_collector(looks=10)
            await service.serve(register, config.listen, *loops, services=[SERVICE], drains=[worker.drain])

    try:
        renderer, context_tokens = load(root.model.path, config.template, config.context_tokens, config.rewriting)
        config.read_token()
    except ConfigError as error:
        exit_bad_config(PROG, error)
    start_telemetry("env_manager", config.telemetry, config.listen)
    service.run(lambda: serve(config, renderer, context_tokens), port_flag="--env_manager.listen.port")


if __name__ == "__main__":
    main()
