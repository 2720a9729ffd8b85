"""What a program sees of the machine: a minimal system and its Python, both read-only, and its own folder.

The service's own packages and source are hidden, also where they lie within what is shown.
"""

import functools
import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import rollfarm
from rollfarm.sandbox.config import SandboxConfig

SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
LOCAL = "/usr/local"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

PROBE = """
import json, os, sys, sysconfig
assert sys.version_info >= (3, 9), "it is older than 3.9"
print(json.dumps([sys.base_prefix, sys.prefix, sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})]))
"""


class NoPython(Exception):
    """No interpreter is fit for programs; the message says why."""


@dataclass(frozen=True)
class Sight:
    """What one program sees."""

    python: str
    """The interpreter."""

    shown: tuple[str, ...]
    """Files and folders that can be read, and programs in them run."""

    hidden: tuple[str, ...]
    """Folders within those that cannot."""

    def readable(self) -> list[str]:
        """The same without exceptions: a folder that hides something is replaced by what else is in it."""
        return [path for shown in self.shown for path in _without(Path(shown), [Path(path) for path in self.hidden])]


def sight(config: SandboxConfig, *, by_others: bool) -> Sight:
    """What programs see; with `by_others` they run as a user who needs everybody's permission. Raises NoPython."""
    if config.python:
        return _sight(config.python, packages=True, by_others=by_others)
    problems: list[str] = []
    for python in dict.fromkeys([os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"]):
        try:
            return _sight(python, packages=False, by_others=by_others)
        except NoPython as problem:
            problems.append(str(problem))
    raise NoPython(" ".join(problems))


@functools.cache
def _sight(python: str, *, packages: bool, by_others: bool) -> Sight:
    try:
        done = subprocess.run(
            [python, "-I", "-c", PROBE], capture_output=True, text=True, timeout=60, check=True, cwd="/", env={}
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoPython(f"{python} does not run: {error}.") from None
    base, prefix, sites = json.loads(done.stdout)
    if by_others and not (_reachable(python) and _reachable(base)):
        raise NoPython(f"{python} is in a folder that other users may not enter.")
    kit = str(Path(rollfarm.__file__).parent.parent)
    own = [path for path in dict.fromkeys([base, prefix]) if not Path(path).is_relative_to("/usr") or _local(path)]
    shown = [path for path in SYSTEM if Path(path).exists()] + own
    hidden = [*([] if packages else sites), kit, *([] if any(map(_local, own)) else [LOCAL])]
    return Sight(python, tuple(shown), tuple(path for path in hidden if _within(path, shown)))


def _local(path: str) -> bool:
    return Path(path).is_relative_to(LOCAL)


def _within(path: str, shown: list[str]) -> bool:
    return Path(path).is_dir() and any(Path(path).is_relative_to(place) and path != place for place in shown)


def _reachable(path: str) -> bool:
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in [Path(path), *Path(path).parents])


def _without(path: Path, hidden: list[Path]) -> list[str]:
    if path in hidden:
        return []
    if not any(place.is_relative_to(path) for place in hidden):
        return [str(path)]
    return [found for inner in sorted(path.iterdir()) if not inner.is_symlink() for found in _without(inner, hidden)]
