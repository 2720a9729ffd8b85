"""The run's folder: who may use it, what is in it already, and what begins in it."""

import os
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rollfarm
from rollfarm.config import ConfigError
from rollfarm.ports import is_free
from rollfarm.up.claims import claimed
from rollfarm.up.config import FarmRoot, as_used, write_toml
from rollfarm.up.summary import finished_summary

CONFIG = "config.toml"
LOCK = ".lock"


class RunInUse(Exception):
    """Another farm works on the run."""


class PortsInUse(Exception):
    """A port that the farm needs is taken."""


def refuse_finished(farm: FarmRoot) -> None:
    """Raise ConfigError when the run is over and nothing is left to do."""
    done = _steps_of_finished(farm)
    if done and not farm.up.fresh:
        raise ConfigError(
            f"run.name: the run {farm.run.name!r} in {farm.run.path} is finished ({done} steps). Begin it anew "
            f"with --up.fresh true, choose another --run.name, or go on with --run.steps {2 * done}."
        )


def refuse_taken(ports: Iterable[tuple[int, str]], base_port: int) -> None:
    """Raise PortsInUse when any port cannot be listened on."""
    taken = [(port, name) for port, name in ports if not is_free(port)]
    if taken:
        named = ", ".join(f"{port} ({name})" for port, name in taken)
        noun = "Ports" if len(taken) > 1 else "Port"
        raise PortsInUse(
            f"{noun} in use: {named}. Stop what listens there (another farm?), or choose other ports with "
            f"--up.base_port {base_port + 100}."
        )


@contextmanager
def opened(farm: FarmRoot) -> Iterator[tuple[bool, int]]:
    """Make the run's folder ours, and yield whether it holds an earlier part of the run, and what claims it.

    Raises RunInUse and ConfigError.
    """
    run = farm.run.path
    run.mkdir(parents=True, exist_ok=True)
    (run / LOCK).touch()
    with claimed(run / LOCK) as claim:
        if claim is None:
            raise RunInUse(
                f"Another `rollfarm up` works on {run}, or was killed and its services still drain. Stop it, or wait "
                "for them, or choose another --run.name."
            )
        goes_on = (run / CONFIG).exists() and not _steps_of_finished(farm)
        if farm.up.fresh is True or (farm.up.fresh == "finished" and not goes_on):
            _empty(run)
            if farm.model.is_outdated:
                shutil.rmtree(farm.model.path)
        farm.model.refuse_outdated()
        resumed = (run / CONFIG).exists()
        if resumed and is_on_records(run / CONFIG):
            raise ConfigError(f"run.name: {run} is a run of `rollfarm train`. Choose another --run.name.")
        (run / "logs").mkdir(exist_ok=True)
        tables = as_used(farm)
        tables["up"]["fresh"] = False
        write_toml(tables, run / CONFIG)
        yield resumed, claim


def resume_command(run: Path) -> str:
    """What a person types to go on with the run, from the folder in which this program was started."""
    return f"{_program()} resume {shlex.quote(str(run))}"


def _program() -> str:
    started = sys.argv[0]
    if started.endswith(".py"):
        return f"{shlex.quote(sys.executable)} -m rollfarm"
    name = Path(started).name
    found = shutil.which(name)
    return name if found and Path(found).resolve() == Path(started).resolve() else shlex.quote(started)


def tables_of(config: Path) -> dict[str, Any]:
    """What a run's file says. Raises ConfigError."""
    try:
        return tomllib.loads(config.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{config}: not valid TOML: {error}. Restore the file.") from None


def is_on_records(config: Path) -> bool:
    """Whether `rollfarm train` began the run of that file. Raises ConfigError."""
    return "offline" in tables_of(config).get("trainer", {})


def checkout() -> Path:
    """The folder that holds the services: where this kit was checked out, or the current one."""
    root = Path(rollfarm.__file__).resolve().parents[1]
    return root if (root / "sample_buffer").is_dir() else Path.cwd()


def make_importable(root: Path) -> None:
    """Let this process and those that it starts import the services, and this one what `python -m` lets those import:
    the modules of the current folder."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(root) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), *paths]))


def _steps_of_finished(farm: FarmRoot) -> int:
    """How many steps the run has, if all of them are done; else 0."""
    done = finished_summary(farm.run.path)
    return done["steps"] if done and 0 < farm.run.steps <= done["steps"] else 0


def _empty(run: Path) -> None:
    """Delete what an earlier run left; refuse to delete what no run made."""
    inside = [path for path in run.iterdir() if path.name != LOCK]
    if inside and not (run / CONFIG).exists() and not (run / "logs").exists():
        raise ConfigError(
            f"up.fresh: {run} is not a run's folder and not empty. Empty it yourself, or choose another --run.name."
        )
    for path in inside:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
