"""One exercise of the coding world: a task with its parameters chosen, what tests call it with, and how they judge.

What is right is known here alone: a test's expected value never enters the sandbox, so the tested code has nothing to
forge a verdict with. Pure.
"""

import ast
import inspect
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from env_manager.environments.coding_tasks import TASKS, Task

IMPORTS = {
    "math": "import math",
    "Counter": "from collections import Counter",
    "combinations": "from itertools import combinations",
    "groupby": "from itertools import groupby",
}
"""What coding_tasks imports, by a name that needs it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a test."""

    argument: object
    expected: object


@dataclass(frozen=True, slots=True)
class Exercise:
    """What is to be written, and its tests."""

    name: str
    """Of the function."""

    statement: str
    """What the policy reads."""

    solution: str
    """Source that passes every test."""

    shown: tuple[Case, ...]
    """Tests that the policy may try its code on."""

    hidden: tuple[Case, ...]
    """Tests that judge it; they call it with other arguments wherever there are enough."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What tests said of a program."""

    passed: int
    total: int
    text: str
    """For the policy: which tests failed, and how."""

    @property
    def share(self) -> float:
        return self.passed / self.total


def make_exercise(chance: random.Random, *, tests: int, hidden_tests: int) -> Exercise:
    task = chance.choice(TASKS)
    parameters = {name: chance.choice(values) for name, values in task.parameters.items()}
    made = _tests(chance, task, parameters, tests + hidden_tests)
    name = task.solution.__name__
    (argument,) = _plain_parameters(task)
    hints = inspect.get_annotations(task.solution)
    signature = f"def {name}({argument}: {_type(hints[argument])}) -> {_type(hints['return'])}"
    task_text = (task.solution.__doc__ or "").format(**parameters)
    examples = "\n".join(f"{name}({test.argument!r}) == {test.expected!r}" for test in made[:tests])
    statement = f"Write the Python function {signature}\n{task_text}\n{examples}"
    return Exercise(name, statement, _source(task, parameters), tuple(made[:tests]), tuple(made[tests:]))


def judge(name: str, tests: Sequence[Case], lines: Sequence[str]) -> Outcome:
    """What the harness's lines say. Anything that is no answer to a test counts for nothing."""
    answers: dict[int, Mapping[str, Any]] = {}
    problem = ""
    for line in lines:
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict) and isinstance(said.get("at"), int):
            answers[said["at"]] = said
        elif isinstance(said, dict) and "error" in said:
            problem = str(said["error"])
    verdicts = [_verdict(answers.get(at), test) for at, test in enumerate(tests)]
    failures = [
        f"{name}({test.argument!r}) {verdict}." for test, verdict in zip(tests, verdicts, strict=True) if verdict
    ]
    passed = len(tests) - len(failures)
    return Outcome(passed, len(tests), problem or "\n".join((f"{passed} of {len(tests)} tests pass.", *failures)))


def _verdict(answer: Mapping[str, Any] | None, test: Case) -> str:
    """What is wrong with an answer; empty where it is right."""
    if answer is None:
        return "gave no answer"
    if "value" not in answer:
        return str(answer.get("error", "gave no answer"))
    value = answer["value"]
    return "" if _canonical(value) == _canonical(test.expected) else f"gave {_short(value)}, not {test.expected!r}"


def _canonical(value: object) -> str:
    """Equal for equal values of equal types, where a tuple is a list."""
    return json.dumps(value, sort_keys=True)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _tests(chance: random.Random, task: Task, parameters: Mapping[str, int], count: int) -> list[Case]:
    """So many, of different arguments as long as few are met twice."""
    tests: dict[str, Case] = {}
    for attempt in range(20 * count):
        argument = task.argument(chance)
        key = repr(argument) if attempt < 10 * count else f"{attempt}"
        tests.setdefault(key, Case(argument, task.solution(argument, **parameters)))
        if len(tests) == count:
            break
    return list(tests.values())


def _source(task: Task, parameters: Mapping[str, int]) -> str:
    """The solution as a program of its own, with the parameters written into it."""
    tree = ast.parse(inspect.getsource(task.solution))
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    given = [
        ast.Assign([ast.Name(name, ast.Store())], ast.Constant(value), lineno=0) for name, value in parameters.items()
    ]
    function.args.kwonlyargs, function.args.kw_defaults = [], []
    function.body = [*given, *function.body[1:]]
    body = ast.unparse(ast.fix_missing_locations(tree))
    imports = [line for name, line in IMPORTS.items() if name in body]
    return "\n".join((*imports, body))


def _plain_parameters(task: Task) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(task.solution).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]


def _type(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
