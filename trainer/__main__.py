"""`python -m trainer farm.toml`: rank 0 serves TrainerService and learns; under torchrun the other ranks follow it."""

import asyncio
import sys

from rollfarm.config import ConfigError, exit_bad_config, load_or_exit
from rollfarm.imports import importing
from trainer.config import TrainerRoot

PROG = "python -m trainer"


def main(argv: list[str]) -> None:
    root = load_or_exit(TrainerRoot, argv, prog=PROG)
    # Imported late: torch takes seconds, and --help and a wrong key need none of it.
    with importing():
        from rollfarm import service, telemetry
        from trainer import wiring

    try:
        wiring.check(root)
        if wiring.is_follower():
            telemetry.configure_logging("trainer", root.trainer.telemetry)
            wiring.follow(root)
            return
        telemetry.start_telemetry("trainer", root.trainer.telemetry, root.trainer.listen)
        service.run(lambda: wiring.serve(root), port_flag="--trainer.listen.port")
    except ConfigError as error:
        exit_bad_config(PROG, error)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None
