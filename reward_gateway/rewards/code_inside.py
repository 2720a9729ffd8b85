"""Runs in the sandbox with the standard library alone: tests in one process, and the program that they test in another.

The two share no memory: the tests call the program's functions over a pipe, and what comes back is rebuilt from plain
data. So the program sees the arguments that it is called with, and neither the tests nor what they expect, and it has
no way to the verdicts. The process of the tests lets none of its equals look into it, and alone holds the way out.

    stdin    a line of JSON: source, setup, tests, seconds of each, and partial: whether to go on when one has failed
    stdout   READY, then a line of JSON for each test: whether it passed, and why not; or that it is broken
"""

import builtins
import ctypes
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

READY = "ready"
BROKEN = "broken"
PR_SET_DUMPABLE = 4
LARGEST_PIECE = 1 << 16


class Broken(BaseException):
    """The test does what cannot be done over a pipe: it is not the program's fault."""


class Gone(BaseException):
    """The program took too long, or its process ended. A test that expects an exception is not content with that."""


class Thing:
    """What the program has and is no plain data: it can be called, gone through, and asked for attributes and items.

    What it is equal to is not the program's to say.
    """

    def __init__(self, link: "Link", number: int) -> None:
        self.__dict__.update(_link=link, _number=number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._link.call(self._number, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask(["get", self._number, name])[0]

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask(["get", self._number, "__getitem__"])[0](key)

    def __iter__(self) -> Any:
        return self._do("iter")

    def __next__(self) -> Any:
        return self._do("next")

    def __len__(self) -> Any:
        return self._do("len")

    def __bool__(self) -> Any:
        return self._do("bool")

    def __str__(self) -> Any:
        return self._do("str")

    def __repr__(self) -> Any:
        return self._do("repr")

    def _do(self, name: str) -> Any:
        return self._link.ask(["do", self._number, name])[0]


def encode(value: Any, thing_of: Callable[[Any], int]) -> Any:
    """Plain data as JSON that tells tuples, sets, bytes and floats apart; anything else as `thing_of` numbers it."""
    if value is None or isinstance(value, (bool, int, str)):
        return value if type(value) in (bool, int, str, type(None)) else plain(value)
    if isinstance(value, float):
        return ["float", repr(float(value))]
    if isinstance(value, complex):
        return ["complex", repr(value.real), repr(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(key, thing_of), encode(item, thing_of)] for key, item in value.items()]]
    for name, kind in KINDS.items():
        if isinstance(value, kind):
            return [name, [encode(item, thing_of) for item in value]]
    return ["thing", thing_of(value)]


def plain(value: Any) -> Any:
    """Of a subclass, such as an enumeration of integers."""
    return next(kind for kind in (bool, int, str) if isinstance(value, kind))(value)


def decode(coded: Any, thing: Callable[[int], Any]) -> Any:
    """What `encode` encoded. Whatever it is given, it makes plain data, and `thing(number)` for the rest."""
    if not isinstance(coded, list):
        return coded
    name, *rest = coded
    if name == "float":
        return float(rest[0])
    if name == "complex":
        return complex(float(rest[0]), float(rest[1]))
    if name == "bytes":
        return bytes.fromhex(rest[0])
    if name == "dict":
        return {decode(key, thing): decode(item, thing) for key, item in rest[0]}
    if name == "thing":
        return thing(rest[0])
    return KINDS[name](decode(item, thing) for item in rest[0])


KINDS: "dict[str, Any]" = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Link:
    """The way from the tests to the program."""

    def __init__(self, source: str, seconds: float) -> None:
        self._source = source
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._names: dict[str, Any] | None = None
        self._read = b""
        self.ends_at = 0.0

    def start(self) -> None:
        """Start the program's process, which does nothing yet."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", sys.argv[0], "program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._names = None

    def names(self) -> "dict[str, Any]":
        """What the program defines, by name; it is run for that once."""
        if self._process is None:
            self.start()
        names = self._names
        if names is None:
            names = self._names = self.ask(["source", self._source])[0]
        return names

    def begin(self) -> None:
        """A test begins."""
        self.ends_at = time.monotonic() + self._seconds

    def call(self, number: int, arguments: "tuple[Any, ...]", named: "dict[str, Any]") -> Any:
        """The program's answer. Lists, dictionaries and sets among the arguments change as it changed them."""
        given = [encode(value, self._own) for value in arguments]
        result, *changed = self.ask(["call", number, given, {name: encode(named[name], self._own) for name in named}])
        for argument, after in zip(arguments, changed, strict=False):
            if isinstance(argument, list):
                argument[:] = after
            elif isinstance(argument, (dict, set)):
                argument.clear()
                argument.update(after)
        return result

    def ask(self, question: "list[Any]") -> "list[Any]":
        """The program's answer. Raises what the program raised, and Gone, when its process is ended."""
        try:
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            fine, answer = json.loads(self._line())
            if fine:
                return [decode(coded, lambda number: Thing(self, number)) for coded in answer]
            kind, message = (str(part) for part in answer)
        except Gone:
            self.end()
            raise
        except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            self.end()
            raise Gone("the program broke off") from error
        raise raised(kind, message)

    def end(self) -> None:
        """End the program's process; the next test has another one."""
        process, self._process, self._read = self._process, None, b""
        if process is not None:
            process.kill()
            process.wait()

    @staticmethod
    def _own(value: Any) -> int:
        if isinstance(value, Thing):
            return value.__dict__["_number"]
        raise Broken(f"the test hands the program a {type(value).__name__}, which is no plain data")

    def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._read:
            left = self.ends_at - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise Gone("the program took too long")
            piece = os.read(pipe, LARGEST_PIECE)
            if not piece:
                raise OSError("the pipe ended")
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line


def raised(kind: str, message: str) -> Exception:
    """The program's exception: the built-in one of that name, or a plain one."""
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(message)
        except TypeError:  # one that wants more than a message
            pass
    return Exception(f"{kind}: {message}")


def test() -> None:
    """Run the tests, and write their verdicts. What they import is never what the program left in its folder."""
    del sys.path[0]
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("the tests cannot be hidden from the program")
    asked = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    link = Link(asked["source"], asked["seconds"])
    link.start()
    print(READY, file=out, flush=True)
    for code in asked["tests"]:
        told = verdict(link, asked["setup"], code)
        print(json.dumps(told), file=out, flush=True)
        if told[0] is not True and not asked["partial"]:
            break
    link.end()


def verdict(link: Link, setup: str, code: str) -> "list[Any]":
    """Whether the test passed, and why not; BROKEN and why for one that cannot be run."""
    try:
        compiled = compile(setup, "setup", "exec"), compile(code, "test", "exec")
    except (SyntaxError, ValueError) as error:
        return [BROKEN, str(error)]
    link.begin()
    try:
        defined = link.names()
        names = {name: defined[name] for name in defined if is_its_own(name)}
        names["__name__"] = "test"
        for part in compiled:
            exec(part, names)
    except Broken as error:
        return [BROKEN, str(error)]
    except Gone as error:
        return [False, str(error)]
    except BaseException as error:
        return [False, told(error)]
    return [True, ""]


def told(error: BaseException) -> str:
    """What was raised, whose message may be the program's to make."""
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except BaseException:
        return type(error).__name__


def is_its_own(name: Any) -> bool:
    """Whether a program may define it for its tests: nothing that is built in, and nothing that says what is."""
    return isinstance(name, str) and not name.startswith("__") and not hasattr(builtins, name)


def program() -> None:
    """Be the program: run its source, then answer calls."""
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    things: list[Any] = []

    def thing_of(value: Any) -> int:
        things.append(value)
        return len(things) - 1

    for line in questions:
        try:
            answer = [True, [encode(value, thing_of) for value in answered(json.loads(line), things)]]
        except BaseException as error:
            answer = [False, [type(error).__name__, str(error)[:500]]]
        print(json.dumps(answer), file=answers, flush=True)


def answered(question: "list[Any]", things: "list[Any]") -> "list[Any]":
    """What the program says to a question, first; then the arguments as they are now."""
    kind, *rest = question
    if kind == "source":
        names = {"__name__": "solution"}
        exec(compile(rest[0], "solution.py", "exec"), names)
        return [{name: names[name] for name in names if not name.startswith("__")}]
    if kind == "get":
        return [getattr(things[rest[0]], rest[1])]
    if kind == "do":
        return [getattr(builtins, rest[1])(things[rest[0]])]
    arguments = decode(["list", rest[1]], things.__getitem__)
    named = {name: decode(coded, things.__getitem__) for name, coded in rest[2].items()}
    return [things[rest[0]](*arguments, **named), *arguments]


if __name__ == "__main__":
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    program() if sys.argv[1:] == ["program"] else test()
