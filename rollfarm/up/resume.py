"""`rollfarm resume RUN [--table.key value]`: a run goes on with the configuration that it was begun with."""

import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = """usage: rollfarm resume RUN [--table.key value ...]

Starts the farm of an unfinished run again, as RUN/config.toml has it. RUN is the run's folder, such as runs/demo, or
its name, if that folder is in runs/. The trainer goes on from its newest checkpoint; batches that it was given since
are delivered again, and nothing is lost or trained twice.

  --run.steps 400          more steps than were asked for, also for a finished run
  --up.trainer_ranks 2     any key of any table, over the file; what the run is made of may not change
  rollfarm up --flags      lists every key, with its default and its meaning

Ends like `rollfarm up`: with the result as JSON on stdout, and exit status 0 done, 1 failed or another farm works on
the run, 2 wrong configuration, an unknown or a finished run, 3 a port is in use, 130 interrupted.
"""

PROG = "rollfarm resume"

FIXED = {
    "--run.name": "the run keeps its name",
    "--run.folder": "the run keeps its folder",
    "--up.fresh": "a run that goes on does not begin anew. Use `rollfarm up` for that",
}
"""Flags that make no sense here, and why."""


def main(argv: Sequence[str]) -> int:
    """Go on with a run, and return the command's exit status."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2

    from rollfarm import train
    from rollfarm.config import ConfigError, exit_bad_config
    from rollfarm.up.command import start
    from rollfarm.up.folder import is_on_records

    try:
        wanted = arguments(argv)
        return (train.start if is_on_records(Path(wanted[0])) else start)(wanted, prog=PROG)
    except ConfigError as error:
        exit_bad_config(PROG, error)


def arguments(argv: Sequence[str]) -> list[str]:
    """What `rollfarm up` is to be given. Raises ConfigError."""
    from rollfarm.config import ConfigError
    from rollfarm.up.folder import CONFIG

    name, *flags = argv
    if name.startswith("-"):
        raise ConfigError(f"{name}: the run comes first. Say `{PROG} RUN {' '.join(argv)}`.")
    for flag in flags:
        if why := FIXED.get(flag.partition("=")[0]):
            raise ConfigError(f"{flag}: {why}.")
    run = find(name)
    return [str(run / CONFIG), *_place(run), *flags]


def find(name: str) -> Path:
    """The folder of a run, by its path or its name. Raises ConfigError."""
    from rollfarm.config import ConfigError, nearest
    from rollfarm.run import RunConfig
    from rollfarm.up.folder import CONFIG

    usual = RunConfig().folder
    path = Path(name).parent if Path(name).name == CONFIG else Path(name)
    for run in (path, usual / name):
        if (run / CONFIG).is_file():
            return run
    if path.is_dir():
        raise ConfigError(f"{name}: no run's folder: it has no {CONFIG}. Begin a run in it with `rollfarm up`.")
    known = [config.parent.name for config in usual.glob(f"*/{CONFIG}")]
    hint = nearest(name, known) if known else f" There is none in {usual.resolve()}."
    raise ConfigError(f"{name}: no such run.{hint} Give its folder, or go to where it was begun.")


def _place(run: Path) -> list[str]:
    """Flags for a run whose folder is not where its configuration says. Raises ConfigError where that does not do."""
    from rollfarm.config import ConfigError
    from rollfarm.up.folder import CONFIG

    name, folder = _begun_as(run / CONFIG)
    here = run.resolve()
    if here.name != name:
        raise ConfigError(
            f"{run}: this is the run {name!r}, whose journal and checkpoints go by that name. Rename the "
            f"folder to {here.with_name(name)}."
        )
    if (folder / name).resolve() == here:
        return []
    if folder.is_absolute():
        return ["--run.folder", str(here.parent)]
    began_in = here.parents[len(folder.parts)]
    if began_in / folder == here.parent:
        raise ConfigError(
            f"{run}: the run was begun in {began_in}, and its configuration goes by paths from there. Go there first: "
            f"cd {began_in}"
        )
    return ["--run.folder", str(here.parent)]


def _begun_as(config: Path) -> tuple[str, Path]:
    """The run's name, and the folder that it was to be in. Raises ConfigError."""
    from rollfarm.run import RunConfig
    from rollfarm.up.folder import tables_of

    table, default = tables_of(config).get("run", {}), RunConfig()
    return str(table.get("name", default.name)), Path(table.get("folder", default.folder))
