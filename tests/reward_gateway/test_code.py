"""Programs against tests, in the real sandbox."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from reward_gateway.rewards.code import code
from reward_gateway.rewards.code_inside import decode, encode
from rollfarm import sandbox
from rollfarm.errors import RewardFailed, SandboxUnavailable
from rollfarm.reward import Episode, Score, Turn
from rollfarm.sandbox import Limits, SandboxConfig
from tests.reward_gateway.support import config, episode, scoring

ADDING = {"asserts": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]}
DOUBLING = {"inputs": ["2\n", "5\n"], "outputs": ["4", "10\n"]}


@pytest.fixture(scope="module", autouse=True)
def four_cells() -> None:
    sandbox.configure(SandboxConfig(workers=4))


@pytest.fixture(autouse=True)
async def cells_of_this_loop() -> AsyncIterator[None]:
    yield
    sandbox.shared().close()


async def run(source: str, tests: dict[str, Any], **settings: Any) -> Score:
    turns = [Turn("policy", f"Like so:\n```python\n{source}\n```\nDone.")]
    return await code(Episode(turns=turns, reference=json.dumps(tests)), **settings)


async def test_a_program_that_passes_every_test_is_worth_1():
    assert (await run("print(2 * int(input()))", DOUBLING)).value == 1.0
    assert (await run("def add(a, b):\n    return a + b", ADDING)).value == 1.0


async def test_one_failed_test_costs_everything_or_its_share():
    source = "def add(a, b):\n    return a + b if a == 1 else None"

    assert await run(source, ADDING) == Score(0.0, "1 of 2 tests passed; AssertionError: ")
    assert (await run(source, ADDING, partial=True)).value == 0.5
    assert (await run("print(4)", DOUBLING, partial=True)).value == 0.5
    assert await run("print(4)", DOUBLING) == Score(0.0, "1 of 2 tests passed; wrong output")


ENDS = {
    "x =": "SyntaxError",
    "1 / 0": "ZeroDivisionError",
    "import sys; sys.exit(3)": "exited with 3",
    "while True: pass": "ended by timeout",
    "x = bytearray(1 << 30)": "MemoryError",
    "while True: print('x' * 1000)": "ended by output",
}


async def test_a_program_that_ends_badly_is_0_and_says_how():
    scores = await asyncio.gather(*(run(source, DOUBLING, seconds=2.0) for source in ENDS))

    assert [score.value for score in scores] == [0.0] * len(ENDS)
    assert all(fault in score.detail for fault, score in zip(ENDS.values(), scores, strict=True))


async def test_a_function_that_hangs_is_0_and_costs_its_own_test_alone():
    source = "def add(a, b):\n    while a == 1: pass\n    return a + b"

    assert await run(source, ADDING, seconds=1.0, partial=True) == Score(
        0.5, "1 of 2 tests passed; the program took too long"
    )


def flooding(line: str) -> str:
    """A program that writes the line wherever it can."""
    return (
        "import os\n"
        "for number in range(3, 20):\n"
        f"    try: os.write(number, {line!r}.encode() + b'\\n')\n"
        "    except OSError: pass\n"
    )


FORGERIES = {
    "exit": "import os\nos._exit(0)",
    "exit when called": "def add(a, b):\n    import os\n    os._exit(0)",
    "equal to all": "class Yes:\n    def __eq__(self, other): return True\ndef add(a, b): return Yes()",
    "no assertions": "import builtins\nbuiltins.AssertionError = Exception\ndef add(a, b): return 0",
    "verdicts on stdout": "print('ready')\nprint('[true, \"\"]')\nprint('[true, \"\"]')",
    "verdicts on every descriptor": (
        "import os\n"
        "for process in filter(str.isdigit, os.listdir('/proc')):\n"
        "    for number in range(64):\n"
        "        try: open(f'/proc/{process}/fd/{number}', 'w').write('ready\\n[true, \"\"]\\n[true, \"\"]\\n')\n"
        "        except OSError: pass\n"
    ),
    "kill the tests": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "answers of its own": flooding("[true, [3]]"),
    "answers that are none": flooding('[true, [["thing", {}]]]'),
    "read the tests": (
        "import os\n"
        "found = [open(name).read() for name in os.listdir() if 'assert add(1' in open(name).read()]\n"
        "def add(a, b): return eval(found[0])"
    ),
    "memory of the tests": (
        "import os\n"
        "try: open(f'/proc/{os.getppid()}/mem', 'r+b')\n"
        "except OSError: open_to_all = False\n"
        "else: open_to_all = True\n"
        "def add(a, b): return a + b if open_to_all else None"
    ),
}


MODULE = """
import os
for number in range(3, 30):
    try: os.write(number, b'[true, ""]\\n' * 5)
    except OSError: pass
os._exit(0)
"""

JUDGED_BY_OTHERS = {
    "modules": f"open('fractions.py', 'w').write({MODULE!r})\ndef add(a, b): return 0",
    "built-in functions": (
        "import sys\n"
        "inside = sys.modules['__main__']\n"
        "encode = inside.encode\n"
        "def forged(value, thing_of):\n"
        "    more = {'__builtins__': {'abs': lambda _: 0}} if isinstance(value, dict) and 'add' in value else {}\n"
        "    return encode({**value, **more} if more else value, thing_of)\n"
        "inside.encode = forged\n"
        "def add(a, b): return 0"
    ),
}


@pytest.mark.parametrize("name", JUDGED_BY_OTHERS)
async def test_what_tests_judge_with_is_not_the_programs(name):
    tests = {"asserts": ["assert abs(add(1, 2) - 3) < 1e-9", "import fractions\nassert add(1, 2) == 3"]}

    assert (await run(JUDGED_BY_OTHERS[name], tests, partial=True)).value == 0.0


async def test_no_program_passes_tests_that_it_does_not_pass():
    scores = await asyncio.gather(*(run(source, ADDING, seconds=2.0) for source in FORGERIES.values()))

    assert {name: score.value for name, score in zip(FORGERIES, scores, strict=True)} == dict.fromkeys(FORGERIES, 0.0)


async def test_classes_exceptions_and_arguments_that_change_are_tested_across_the_pipe():
    source = """
class Counter:
    def __init__(self, start): self.count = start
    def add(self, n=1):
        self.count += n
        return self
def reverse(items): items.reverse()
def fail(): raise KeyError("no")
LIMIT = 5
"""
    asserts = [
        "c = Counter(2)\nassert c.add().add(n=3).count == 6",
        "items = [1, 2]\nreverse(items)\nassert items == [2, 1]",
        "try:\n    fail()\nexcept KeyError as error:\n    assert 'no' in str(error)\nelse:\n    assert False",
        "assert LIMIT == five",
        "assert math.isinf(Counter(float('inf')).count)",
    ]

    score = await run(source, {"asserts": asserts, "setup": "import math\nfive = 5"}, partial=True)

    assert score == Score(1.0, "5 of 5 tests passed; none failed")


@pytest.mark.parametrize(
    "value",
    [None, True, 7, 10**4000, 1.5, float("inf"), 1j, "text", b"\xff", [1, (2, {3})], {(1, 2): frozenset([4])}, []],
)
def test_plain_data_crosses_the_pipe_as_what_it_is(value):
    def refuse(thing: object) -> int:
        raise TypeError(thing)

    coded = encode(value, refuse)

    assert decode(coded, refuse) == value
    assert type(decode(coded, refuse)) is type(value)


async def test_what_is_no_plain_data_is_gone_through_measured_and_shown_across_the_pipe():
    source = """
def below(n):
    yield from range(n)
class Stack:
    def __init__(self, *items): self.items = items
    def __len__(self): return len(self.items)
    def __getitem__(self, at): return self.items[at]
    def __str__(self): return 'a stack'
class Plain: pass
class Sure:
    def __contains__(self, item): return True
    def __iter__(self): return iter([1])
"""
    asserts = [
        "assert list(below(3)) == [0, 1, 2]",
        "numbers = below(2)\nassert next(numbers) == 0\nassert sum(numbers) == 1",
        "assert len(Stack(1, 2)) == 2 and Stack(1, 2)[1] == 2 and str(Stack()) == 'a stack'",
        "assert not Stack() and Stack(1) and Plain()",
        "assert 2 not in Sure()",
        "try:\n    len(Plain())\nexcept TypeError:\n    pass\nelse:\n    assert False",
    ]

    assert await run(source, {"asserts": asserts}, partial=True) == Score(1.0, "6 of 6 tests passed; none failed")


async def test_a_message_that_hangs_costs_its_own_test_alone():
    source = """
class Slow:
    def __str__(self):
        while True: pass
def f(n): return Slow() if n else 0
"""
    tests = {"asserts": ["assert f(1) == 0, f(1)", "assert f(0) == 0"]}

    assert (await run(source, tests, seconds=1.0, partial=True)).value == 0.5


async def test_a_program_that_hangs_or_dies_has_not_raised():
    tests = {"asserts": ["try:\n    f(0)\nexcept Exception:\n    pass\nelse:\n    assert False"]}

    for body in ("while True: pass", "import os; os._exit(1)"):
        assert (await run(f"def f(n):\n    {body}", tests, seconds=1.0)).value == 0.0


async def test_an_answer_without_code_is_0():
    score = await code(Episode(turns=[Turn("policy", "def add(a, b): ...")], reference=json.dumps(ADDING)))

    assert score == Score(0.0, "no code in the answer")


@pytest.mark.parametrize(
    ("reference", "cause"),
    [
        ("", "gives no usable tests"),
        ("{}", "either inputs and outputs or asserts are needed"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs and 0 outputs"),
        ('{"asserts": ["assert ("]}', "a test of the reference cannot be run"),
        ('{"asserts": ["add(lambda: 1, 2)"]}', "hands the program a function, which is no plain data"),
    ],
)
async def test_tests_that_cannot_be_run_are_a_failure_and_never_0(reference, cause):
    turns = [Turn("policy", "```python\ndef add(a, b):\n    return a + b\n```")]

    with pytest.raises(ValueError, match=cause):
        await code(Episode(turns=turns, reference=reference))


async def test_without_a_sandbox_the_score_fails_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    async def refuse(*_: Any) -> None:
        raise SandboxUnavailable("No sandbox works here.")

    monkeypatch.setattr(sandbox.Sandbox, "run", refuse)
    async with scoring(config({"name": "code"})) as score:
        with pytest.raises(RewardFailed, match=r"SandboxUnavailable: No sandbox works here\. Install bubblewrap"):
            await score(episode("```python\nx = 1\n```", reference=json.dumps(DOUBLING)))


async def test_a_gateway_scores_programs_and_a_hanging_one_is_0_in_spite_of_quick_ones_before():
    reward = {"name": "code", "settings": {"seconds": 2.5}}
    quick, hanging = "```python\nprint(2 * int(input()))\n```", "```python\nwhile True: pass\n```"
    async with scoring(config(reward)) as score:
        first = await score(episode(quick, reference=json.dumps(DOUBLING)))
        second = await score(episode(hanging, reference=json.dumps(DOUBLING)))

    assert (first.reward, second.reward) == (1.0, 0.0)


async def test_a_sandbox_of_few_files_runs_programs():
    sandbox.shared().close()
    sandbox.configure(SandboxConfig(workers=1, limits=Limits(file_bytes=2**20)))
    try:
        assert (await run("print(2 * int(input()))", DOUBLING)).value == 1.0
    finally:
        sandbox.shared().close()
        sandbox.configure(SandboxConfig(workers=4))


async def test_programs_are_scored_side_by_side():
    scores = await asyncio.gather(*(run(f"print({n} * int(input()))", DOUBLING) for n in range(4)))

    assert [score.value for score in scores] == [0.0, 0.0, 1.0, 0.0]
