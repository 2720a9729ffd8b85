"""reasoning-gym's data sets, by their name: one question, one answer, judged by the data set's own scorer.

Equal seeds give equal episodes: each question is drawn from a generator of its own.
"""

import re
from typing import Annotated, Any

from pydantic import Field

from env_manager.adapters.adapter import SEEDS, Adapter, wrong_setting
from rollfarm import reasoning
from rollfarm.env import Observation, Step

ANSWER = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)


class ReasoningGym(Adapter):
    """One question. It runs in a process: its import takes seconds, and several data sets compute for as long, in pure
    Python."""

    name = "reasoning_gym"
    package = "reasoning_gym"
    runs = "process"
    max_turns = 1

    def __init__(
        self,
        *,
        dataset: str,
        options: dict[str, Any] = {},  # noqa: B006
        size: Annotated[int, Field(ge=0)] = 0,
        size_seed: Annotated[int, Field(ge=0, lt=SEEDS)] = 0,
        system: str = "",
    ) -> None:
        """`options` go to reasoning_gym.create_dataset. 0 `size` asks a new question of every task, from its seed;
        more asks the questions of a data set of that size, made from `size_seed`, in the order of the tasks' indices.
        The answer is what stands between <answer> and </answer>, and where they are missing the whole text."""
        self._name, self._options = dataset, options
        self._size, self._size_seed = size, size_seed
        self._system = system

    def reset(self, seed: int, index: int) -> Observation:
        package = self.load()
        drawn, item = (self._size_seed, index % self._size) if self._size else (seed % SEEDS, 0)
        try:
            self._dataset = package.create_dataset(self._name, seed=drawn, size=self._size or 1, **self._options)
        except (AssertionError, TypeError, ValueError) as error:
            raise wrong_setting(type(self), f"create_dataset({self._name!r}) failed: {error}") from None
        self._entry = self._dataset[item]
        return Observation(self._entry["question"], reference=str(self._entry["answer"] or ""), system=self._system)

    def step(self, action: str) -> Step:
        marked = ANSWER.findall(action)
        answer = marked[-1].strip() if marked else action.strip()
        score = reasoning.score(self._dataset.score_answer, answer, self._entry)
        return Step(reward=score, done=True, metrics={"success": float(score >= 1.0)})
