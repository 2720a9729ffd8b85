"""The levels of the sandbox: what each needs of the machine, and which one is taken. None means that nothing is run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollfarm.sandbox import inside
from rollfarm.sandbox.config import SandboxConfig
from rollfarm.sandbox.inside import landlock, seccomp
from rollfarm.sandbox.sight import DEVICES, NoPython, Sight, sight
from rollfarm.v1 import trajectory_pb2

PROBE_SECONDS = 30.0

KIT = "/rollfarm"
"""Where a cell of bubblewrap finds its own code."""

FOLDER = "/tmp"
"""Of a cell of bubblewrap: in memory, and the only one that can be written to."""

BOTH_WAYS = "0"
"""Where a cell of bubblewrap answers: at its standard input, which is a socket."""

BOOT = """
import sys
for name, path in (("rollfarm", []), ("rollfarm.sandbox", [sys.argv[1]])):
    package = type(sys)(name)
    package.__path__ = path
    sys.modules[name] = package
from rollfarm.sandbox.inside import {module}
{module}.main()
"""
"""Starts a module of `inside` under any Python, with nothing else of the kit. Its first argument is the folder of
`inside`."""

NUMBERS = {
    "bubblewrap": trajectory_pb2.SANDBOX_LEVEL_BUBBLEWRAP,
    "landlock": trajectory_pb2.SANDBOX_LEVEL_LANDLOCK,
    "docker": trajectory_pb2.SANDBOX_LEVEL_DOCKER,
}
"""The levels in the contract, strongest first."""


class Missing(Exception):
    """A level cannot be had here; the message says why and what would help."""


@dataclass(frozen=True)
class Chosen:
    """A level that works here."""

    level: str
    """Its name in the configuration."""

    python: str
    """The interpreter of programs."""

    plan: Mapping[str, Any]
    """What the keeper of its cells is told; empty for containers."""


def choose(config: SandboxConfig) -> Chosen:
    """The level that the configuration names, or the first that works. Raises Missing with what is wrong with each."""
    problems: list[str] = []
    for level in LEVELS if config.level == "auto" else [config.level]:
        try:
            return LEVELS[level](config)
        except Missing as missing:
            problems.append(f"{level}: {missing}")
    raise Missing(" ".join(problems))


def bubblewrap(config: SandboxConfig) -> Chosen:
    """Namespaces of its own. Raises Missing."""
    _require_kernel()
    program = shutil.which("bwrap")
    if program is None:
        raise Missing("there is no bwrap; `apt-get install bubblewrap` brings it.")
    seen = _seen(config, by_others=False)
    walls = [program, *_walls(seen, config.limits.file_bytes), "--"]
    problem = _problem([*walls, seen.python, "-I", "-c", "pass"])
    if problem:
        raise Missing(f"bwrap does not work here ({problem}); in a container it needs user namespaces.")
    cell = [seen.python, "-I", "-c", BOOT.format(module="cell"), KIT, FOLDER, BOTH_WAYS]
    return Chosen("bubblewrap", seen.python, {"workers": config.workers, "command": [*walls, *cell]})


def _walls(seen: Sight, file_bytes: int) -> list[str]:
    words = ["--die-with-parent", "--as-pid-1", "--clearenv", "--setenv", "LANG", "C.UTF-8", "--hostname", "sandbox"]
    words += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:
        words += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    places = [*seen.shown, *DEVICES, f"{KIT}/inside"]
    for folder in sorted({parent for place in places for parent in Path(place).parents} - {Path("/")}):
        words += ["--dir", str(folder)]
    for path in seen.shown:
        words += (
            ["--symlink", str(Path(path).readlink()), path] if Path(path).is_symlink() else ["--ro-bind", path, path]
        )
    for path in seen.hidden:
        words += ["--tmpfs", path, "--remount-ro", path]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    words += ["--ro-bind", str(Path(inside.__file__).parent), f"{KIT}/inside", "--proc", "/proc"]
    words += ["--perms", "1777", "--size", str(file_bytes), "--tmpfs", FOLDER, "--remount-ro", "/", "--chdir", FOLDER]
    return words


def landlocked(config: SandboxConfig) -> Chosen:
    """Landlock, seccomp and resource limits, which need no privilege. Raises Missing."""
    _require_kernel()
    version = landlock.version()
    if version == 0:
        raise Missing("this kernel has no Landlock, which came with Linux 5.13.")
    if os.getuid() != 0 and version < landlock.SIGNALS_SINCE:
        raise Missing(
            f"this kernel's Landlock (version {version}) lets programs signal the service, unless the service runs as "
            "root and so can give each program a user of its own; Linux 6.12 mends that."
        )
    seen = _seen(config, by_others=os.getuid() == 0)
    plan = {"workers": config.workers, "landlock": {"readable": seen.readable(), "devices": DEVICES}}
    return Chosen("landlock", seen.python, plan)


def contained(config: SandboxConfig) -> Chosen:
    """A container of its own. Raises Missing."""
    from rollfarm.sandbox import containers

    problem = containers.problem(config.image)
    if problem:
        raise Missing(problem)
    return Chosen("docker", "python3", {})


def _require_kernel() -> None:
    """Raise Missing where the filter of system calls does not fit."""
    if sys.platform != "linux" or os.uname().machine not in seccomp.MACHINES:
        raise Missing(f"it needs Linux on {' or '.join(seccomp.MACHINES)}.")


def _seen(config: SandboxConfig, *, by_others: bool) -> Sight:
    try:
        return sight(config, by_others=by_others)
    except NoPython as problem:
        raise Missing(f"{problem} Set the sandbox's `python` to one that every user may run.") from None


def _problem(command: list[str]) -> str:
    """What is wrong with running it; empty if nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, env={}, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]


LEVELS: dict[str, Callable[[SandboxConfig], Chosen]] = {
    "bubblewrap": bubblewrap,
    "landlock": landlocked,
    "docker": contained,
}
"""Strongest first."""
