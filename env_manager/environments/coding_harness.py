"""Runs in the sandbox: calls the function of solution.py with each argument, and says what came of it. Imports no farm.

Reads {"name", "arguments"} as JSON, and writes one JSON object a line: {"at": 0, "value": 3} or {"at": 0, "error": ""},
and {"error": ""} alone where the solution has no such function. What the solution itself prints goes to stderr.
"""

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from typing import Any

MOST_CHARACTERS = 200
"""Of an error."""


def main() -> None:
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    sys.setrecursionlimit(5000)
    try:
        function = runpy.run_path("solution.py")[request["name"]]
    except BaseException as error:
        name = request["name"]
        missing = isinstance(error, KeyError) and error.args == (name,)
        _say(out, {"error": f"There is no function {name}." if missing else f"It raised {_told(error)}."})
        return
    for at, argument in enumerate(request["arguments"]):
        _say(out, {"at": at} | _called(function, argument))


def _called(function: Callable[[Any], Any], argument: Any) -> dict[str, Any]:
    try:
        value = function(argument)
        json.dumps(value)
    except BaseException as error:
        return {"error": f"raised {_told(error)}"}
    return {"value": value}


def _told(error: BaseException) -> str:
    """What was raised, and by which line of the solution."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "solution.py"]
    where = f" (line {lines[-1]})" if lines else ""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = type(error).__name__
    return text[:MOST_CHARACTERS] + where


def _say(out: Any, what: dict[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
