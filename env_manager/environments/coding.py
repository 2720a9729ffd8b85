"""Write a small Python function: try it on the tests that are shown, then be judged by tests that are not.

The policy answers with its program, in a fenced block where it also says other things; of several the last counts. Each
turn runs it on the shown tests, in the sandbox, and tells what failed. The episode ends when all of them pass, or when
the turns are used up; the reward is then the share of hidden tests that the last program passes, and nothing else pays.
"""

import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from env_manager.environments import coding_harness
from env_manager.environments.coding_exercise import Case, Outcome, judge, make_exercise
from env_manager.environments.solvable import Solvable, digest
from rollfarm.env import Observation, Step
from rollfarm.reward import Turn
from rollfarm.sandbox import PYTHON, Finished, Limits, Program, shared

RULES = (
    "Write a Python function. Answer with the whole program in a block that begins with ```python and ends with ```. "
    "It is tested, and you are told what failed; when all tests pass, or no turn is left, other tests judge it."
)

ENDINGS = {
    "timeout": "It took too long.",
    "memory": "It took too much memory.",
    "output": "It wrote too much.",
    "killed": "It was killed.",
    "exited": "",
}

MOST_PRINTED = 500
"""Characters of the program's own output that the policy is shown, from its end."""

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Coding(Solvable):
    """Multi-turn programming with tests. The loop goes on while it waits for the sandbox."""

    name = "coding"
    runs = "loop"

    def __init__(
        self,
        *,
        turns: Annotated[int, Field(ge=1)] = 3,
        tests: Annotated[int, Field(ge=1, le=20)] = 3,
        hidden_tests: Annotated[int, Field(ge=1, le=100)] = 10,
        seconds: Annotated[float, Field(gt=0, le=60)] = 5.0,
        rules: bool = True,
    ) -> None:
        """So many `tests` are shown, and so many `hidden_tests` judge. A run of the program may take `seconds`.
        `rules` explains it in a system message."""
        self._turns_left = turns
        self._tests, self._hidden_tests = tests, hidden_tests
        self._limits = Limits(
            seconds=seconds,
            cpu_seconds=math.ceil(seconds),
            memory_bytes=256 * 2**20,
            processes=8,
            output_bytes=2**16,
            file_bytes=2**20,
        )
        self._rules = RULES if rules else ""
        self._source = ""

    def reset(self, seed: int, index: int) -> Observation:
        chance = random.Random(seed)
        self._exercise = make_exercise(chance, tests=self._tests, hidden_tests=self._hidden_tests)
        return Observation(
            self._exercise.statement,
            reference=self._exercise.solution,
            system=self._rules,
            state_hash=self._state(),
        )

    async def step(self, action: str) -> Step:
        self._turns_left -= 1
        self._source = program_in(action)
        shown, printed = await self._run(self._exercise.shown)
        passed = shown.passed == shown.total
        over = passed or self._turns_left == 0
        judged = (await self._run(self._exercise.hidden))[0].share if over else 0.0
        return Step(
            "" if over else shown.text + printed,
            reward=judged,
            done=over,
            truncated=over and not passed,
            state_hash=self._state(),
            metrics={"success": float(judged == 1.0), "shown_passed": shown.share},
        )

    async def score(self, turns: Sequence[Turn], answer: str) -> Step:
        """An agent's answer is its last program: the hidden tests judge it."""
        self._turns_left = 1
        return await self.step(answer)

    def solve(self) -> str:
        return f"```python\n{self._exercise.solution}\n```"

    def actions(self) -> list[str]:
        """Programs that give the same whatever they are called with."""
        values = ("0", "1", "[]", "''", "True", "given")
        return [f"```python\ndef {self._exercise.name}(given):\n    return {value}\n```" for value in values]

    async def _run(self, tests: Sequence[Case]) -> tuple[Outcome, str]:
        """What the tests say, and what else there is to tell of the run."""
        request = {"name": self._exercise.name, "arguments": [test.argument for test in tests]}
        files = {"main.py": _HARNESS, "solution.py": self._source}
        finished = await shared().run(Program(files, [PYTHON, "main.py"], json.dumps(request)), self._limits)
        return judge(self._exercise.name, tests, finished.stdout.splitlines()), _told(finished)

    def _state(self) -> str:
        return digest(self._exercise.statement, self._source)


def program_in(action: str) -> str:
    """The last fenced block, or everything; as text that UTF-8 can carry."""
    blocks: list[str] = _BLOCK.findall(action)
    return (blocks[-1] if blocks else action).encode(errors="replace").decode()


def _told(finished: Finished) -> str:
    ending = ENDINGS[finished.ending]
    printed = finished.stderr.strip()[-MOST_PRINTED:]
    return (f"\n{ending}" if ending else "") + (f"\nIt printed:\n{printed}" if printed else "")


_HARNESS = Path(coding_harness.__file__).read_text()
