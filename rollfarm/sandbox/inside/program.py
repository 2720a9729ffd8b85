"""A fork of a cell becomes the program: in the interpreter that runs already, or in place of it."""

from __future__ import annotations

import atexit
import builtins
import gc
import os
import sys

from rollfarm.sandbox.inside.confine import confine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, NoReturn

    from rollfarm.sandbox.inside.landlock import Rules

PYTHON = "@python"
HOME = "home"
"""The program's working folder, within the cell's."""

NOT_FOUND = 127
OURS = "rollfarm"


class Walls:
    """What stands around a cell's program, beside seccomp and limits."""

    def __init__(self, folder: str, uid: int | None, rules: Rules | None) -> None:
        self.folder = folder
        """The one that it may write to."""
        self.uid = uid
        """Its user, unique to the run; None leaves the cell's."""
        self.rules = rules
        """What it may reach; None where the mounts say so."""


def become(job: dict[str, Any], files: list[bytes], stdio: list[int], trouble: int, walls: Walls) -> NoReturn:
    """Be the program from here on. What goes wrong before it begins is written to `trouble`, which then closes."""
    try:
        _prepare(job, files, stdio, trouble, walls)
    except BaseException as error:
        os.write(trouble, f"{type(error).__name__}: {error}"[:1000].encode())
        os._exit(1)
    command = job["command"]
    if command[0] == PYTHON and len(command) > 1 and os.path.isfile(command[1]):
        os.close(trouble)
        _be_python(command[1:])
    _replace([sys.executable if command[0] == PYTHON else command[0], *command[1:]])


def _prepare(job: dict[str, Any], files: list[bytes], stdio: list[int], trouble: int, walls: Walls) -> None:
    os.setsid()
    for place, descriptor in enumerate(stdio):
        os.dup2(descriptor, place)
    kept = {0, 1, 2, trouble, walls.rules.ruleset if walls.rules else trouble}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            _close(int(name))
    confine(job["limits"], walls.uid, walls.rules)
    home = os.path.join(walls.folder, HOME)
    os.mkdir(home, 0o700)
    os.chdir(home)
    _write(dict(zip(job["files"], files)))
    os.environ.clear()
    path = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
    os.environ.update(PATH=path, HOME=home, TMPDIR=walls.folder, LANG="C.UTF-8")


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        pass  # the listing's own


def _write(files: dict[str, bytes]) -> None:
    for name, content in files.items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def _be_python(arguments: list[str]) -> NoReturn:
    """Run a script as `python script` would."""
    for name in [name for name in sys.modules if name.split(".")[0] == OURS]:
        del sys.modules[name]
    before = set(sys.modules)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)
    main = type(sys)("__main__")
    main.__file__ = arguments[0]
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    code = _execute(arguments[0], main)
    _finish(main, before)
    os._exit(code)


def _execute(script: str, main: ModuleType) -> int:
    """The exit status that the script ends with."""
    try:
        with open(script, "rb") as file:
            source = file.read()
        exec(compile(source, script, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as wished:
        if wished.code is None or isinstance(wished.code, int):
            return (wished.code or 0) & 0xFF
        print(wished.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _finish(main: ModuleType, before: set[str]) -> None:
    """Do what the end of an interpreter does that a program can see.

    That is to wait for threads, run exit functions, and finalize what the program made, which flushes its files. The
    interpreter's own end would touch every page that is shared with the cell, and so take ten times as long.
    """
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    for name in set(sys.modules) - before:
        del sys.modules[name]
    main.__dict__.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the program closed it


def _replace(command: list[str]) -> NoReturn:

    import signal  # which takes long, and is needed here alone

    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(NOT_FOUND)
