"""Whatever an environment does, its episode fails with the cause, and the worker lives and plays the next."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rollfarm.env import Environment, Observation, Step, name_of
from rollfarm.env_server import EnvironmentServicer
from rollfarm.v1 import trajectory_pb2
from tests.env_manager.fakes import FakeBuffer, FakeProxy, episode, serving, tokenizer, working

TOKENIZER = tokenizer()


@dataclass(frozen=True)
class Raises:
    """Instead of an answer."""

    error: BaseException


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Grave(BaseException):
    """Beside Exception, as what test runners and other event loops raise."""


class Poisoned(Environment):
    """Answers as it is told to. One without a dose is done at once."""

    doses: Sequence[tuple[Any, Any]] = ()
    """What reset and step answer."""

    def __init__(self, *, dose: int = -1) -> None:
        healthy = ("at 0 0", Step(reward=1.0, done=True))
        self.shown, self.answer = healthy if dose < 0 else self.doses[dose]

    def reset(self, seed: int, index: int) -> Any:
        return given(self.shown)

    def step(self, action: str) -> Any:
        return given(self.answer)


class PoisonedFast(Poisoned):
    runs = "loop"


class PoisonedAsync(Poisoned):
    async def reset(self, seed: int, index: int) -> Any:
        return super().reset(seed, index)

    async def step(self, action: str) -> Any:
        return super().step(action)


KINDS = [Poisoned, PoisonedFast, PoisonedAsync]


def given(answer: Any) -> Any:
    if isinstance(answer, Raises):
        raise answer.error
    return answer


def wrong(kind: Callable[..., Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """`kind` with one of `fields` wrong."""
    return st.one_of([st.builds(kind, **({"text": st.just("")} | {name: value})) for name, value in fields.items()])


surrogates = st.text(st.characters(categories=["Cs"]), min_size=1)
texts = st.sampled_from([None, 5, b"left", ["left"]]) | surrogates.map(lambda text: f"at {text} 0")
numbers = st.sampled_from([None, "1.0", [], 1j, 10**400, Decimal("sNaN"), np.zeros(2), np.float32("nan")])
numbers |= st.sampled_from([float("nan"), float("inf"), float("-inf")])
flags = st.sampled_from([None, "yes", 2, [], np.zeros(2)])
metrics = st.sampled_from([None, 3, [("success", 1.0)]])
metrics |= st.dictionaries(texts.filter(lambda name: not isinstance(name, list)), st.just(1.0), min_size=1)
metrics |= st.dictionaries(st.just("success"), numbers, min_size=1)
errors = st.sampled_from([ValueError("the ice broke"), ValueError("x" * 100_000), StopIteration(), SystemExit(0)])
errors |= st.sampled_from([asyncio.CancelledError(), TimeoutError(), Mute(), Grave()]) | surrogates.map(ValueError)
worthless = st.sampled_from([None, 5, "done", Step]) | errors.map(Raises)

observations = st.sampled_from([None, 5, Step()]) | errors.map(Raises) | surrogates
observations |= wrong(Observation, text=texts, reference=texts, state_hash=texts, system=texts)
steps = worthless | wrong(
    Step, text=texts, reward=numbers, done=flags, truncated=flags, state_hash=texts, metrics=metrics
)
poisons = st.tuples(observations, st.just(Step(done=True))) | st.tuples(st.just("at 0 0"), steps)


async def play(names: Sequence[str], **config: Any) -> FakeBuffer:
    """The buffer after an episode of each dose, and then one without."""
    buffer, proxy = FakeBuffer(), FakeProxy(lambda prompt, asked: TOKENIZER.encode("left"))
    async with serving(proxy.register) as address, working(buffer, address, environment_seconds=3, **config):
        buffer.add(*[episode(name, settings=f'{{"dose": {dose}}}') for dose, name in enumerate(names)])
        await buffer.ended(len(names))
        buffer.add(episode(names[0]))
        await buffer.ended(len(names) + 1)
    return buffer


async def play_on_a_server(names: Sequence[str]) -> FakeBuffer:
    async with serving(EnvironmentServicer(KINDS).register) as server:
        return await play(names, servers=[server])


@pytest.mark.parametrize("served", [False, True], ids=["local", "served"])
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(poisons=st.lists(st.tuples(st.sampled_from(KINDS), poisons), min_size=10, max_size=40))
def test_a_poisonous_answer_fails_its_episode_with_the_cause_and_the_next_is_played(
    served: bool, poisons: Sequence[tuple[type[Poisoned], tuple[Any, Any]]]
):
    Poisoned.doses = [dose for _, dose in poisons]
    kinds = [kind for kind, _ in poisons]

    if served:
        buffer = asyncio.run(play_on_a_server([name_of(kind) for kind in kinds]))
    else:
        buffer = asyncio.run(play([f"{__name__}:{kind.__name__}" for kind in kinds]))

    assert [trajectory.reward for trajectory in buffer.completed.values()] == [1.0]
    for lease in buffer.leased[:-1]:
        failed = buffer.failed[lease.lease_id]
        assert failed.outcome == trajectory_pb2.OUTCOME_ENV_FAILED, failed.detail
        assert f"Environment {name_of(kinds[int(lease.lease_id.removeprefix('lease-'))])}" in failed.detail


class Flood(Environment):
    """Shows more than anyone may see."""

    def reset(self, seed: int, index: int) -> str:
        return "at 0 0"

    def step(self, action: str) -> Step:
        return Step("ice " * 1000)


@pytest.mark.parametrize("served", [False, True], ids=["local", "served"])
async def test_a_huge_observation_fails_its_episode_with_its_size(served: bool):
    buffer, proxy = FakeBuffer(), FakeProxy(lambda prompt, asked: TOKENIZER.encode("left"))
    async with (
        serving(EnvironmentServicer([Flood]).register) as server,
        serving(proxy.register) as address,
        working(buffer, address, servers=[server], max_observation_chars=3999),
    ):
        buffer.add(episode("flood" if served else f"{__name__}:Flood"))
        await buffer.ended()

    [failed] = buffer.failed.values()
    assert failed.outcome == trajectory_pb2.OUTCOME_ENV_FAILED
    assert "step gave 4,000 characters, more than the 3,999 of max_observation_chars" in failed.detail
