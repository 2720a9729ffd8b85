"""Over random episodes, through the real llm_proxy: the turns of each segment are the tokens that the engine saw."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Literal

import pytest

from env_manager.rendering import Renderer, Rewriting
from rollfarm import tokens
from rollfarm.env import Action, Environment, Observation, Step, ToolResult
from rollfarm.testing import SimulatedEngine
from rollfarm.v1 import trajectory_pb2
from tests.env_manager.fakes import FakeBuffer, episode, working
from tests.llm_proxy import models
from tests.llm_proxy.support import run_proxy

POLICY = trajectory_pb2.AUTHOR_POLICY
EPISODES = 34
CONTEXT = 1200
WORDS = [
    "sunny",
    "né",
    "🌧🌧",
    "日本",
    "\n\n",
    "  ",
    "{",
    '"',
    "</think>",
    "<tool_call>",
    "<|im_end|>",
    "assistant",
    "%}",
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("weather", "search")
]

NUMBERED = models.TEMPLATE.replace(
    "{{- '<|im_start|>' + message.role + '\\n'", "{{- '<|im_start|>' + message.role + ' ' ~ loop.index ~ '\\n'"
)
"""Says the number of each message, so that no suffix is that of another turn."""

CONTENT = "{{- message.content }}"
TRIMMING = models.TEMPLATE.replace(CONTENT, "{{- message.content | trim }}")

REFUSING = models.TEMPLATE.replace(
    CONTENT, "{%- if '{' in message.content %}{{ raise_exception('no braces') }}{% endif %}" + CONTENT
)
"""Refuses some of what a policy may write, as templates do that were made for well-behaved ones."""


def say(chance: random.Random, most: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(0, most)))


class Wild(Environment):
    """Shows anything, calls tools by their names, and ends when it likes."""

    runs = "loop"

    def reset(self, seed: int, index: int) -> Observation:
        self.chance = random.Random(seed)
        self.tools = TOOLS[: self.chance.randint(0, 2)]
        system = say(self.chance, 6) if self.chance.random() < 0.5 else ""
        return Observation(f"episode {seed} {say(self.chance, 12)}", system=system, tools=self.tools, state_hash="0")

    def step(self, action: Action) -> Step:
        assert self.tools or not action.tool_calls
        results = [ToolResult(call.tool_call_id, call.name, say(self.chance, 8)) for call in action.tool_calls]
        text = action.tool_problem or say(self.chance, 8) if not results or self.chance.random() < 0.3 else ""
        return Step(text, reward=0.5, done=self.chance.random() < 0.15, state_hash="1", tool_results=results)


class WildPolicy:
    """Writes thoughts, calls and noise; remembers every prompt with what it wrote after it."""

    def __init__(self, seed: int) -> None:
        self.seen: dict[tuple[int, ...], list[int]] = {}
        self._chance = random.Random(seed)
        self._writing: dict[tuple[int, ...], tuple[tuple[int, ...], Iterator[int]]] = {}

    def __call__(self, ids: Sequence[int], version: int) -> int:
        so_far = tuple(ids)
        prompt, rest = self._writing.pop(so_far, (so_far, None))
        if rest is None:
            assert prompt not in self.seen, "every prompt is a new one"
            self.seen[prompt], rest = [], iter(self._reply())
        token = next(rest)
        self.seen[prompt].append(token)
        self._writing[(*so_far, token)] = (prompt, rest)
        return token

    def _reply(self) -> list[int]:
        chance = self._chance
        parts = [f"<think>{say(chance, 5)}</think>"] if chance.random() < 0.4 else []
        parts.append(say(chance, 6).replace("<|im_end|>", ""))
        for _ in range(chance.choice([0, 0, 1, 1, 2])):
            called = {"name": chance.choice(["weather", "search"]), "arguments": {"q": say(chance, 3)}}
            body = json.dumps(called, ensure_ascii=chance.random() < 0.5)
            parts.append(f"<tool_call>{body if chance.random() < 0.8 else body[:-3]}</tool_call>")
        written = [token for token in models.encode("".join(parts)) if token != models.tokenizer().eos_token_id]
        noise = [chance.randrange(3, models.VOCABULARY) for _ in range(chance.choice([0, 0, 3]))]
        ended = chance.random() < 0.8
        return [*written, *noise, *(models.encode("<|im_end|>") if ended else [4] * 200)]


def generations(trajectory: trajectory_pb2.Trajectory) -> dict[tuple[int, ...], list[int]]:
    """What the engine has to have seen and written, by the record."""
    found: dict[tuple[int, ...], list[int]] = {}
    shown: list[int] = []
    for turn in trajectory.turns:
        ids = tokens.unpack_ids(turn.token_ids).tolist()
        if turn.begins_segment:
            shown = []
        if turn.author == POLICY:
            found[tuple(shown)] = ids
        shown += ids
    return found


async def play(policy: WildPolicy, template: str, rewriting: Rewriting, seed: int) -> list[trajectory_pb2.Trajectory]:
    renderer = Renderer(models.tokenizer(template), rewriting=rewriting)
    buffer = FakeBuffer()
    engine = SimulatedEngine(
        slots=64, vocabulary_size=models.VOCABULARY, context_tokens=CONTEXT, chunk_tokens=64, policy=policy
    )
    wild = f"{__name__}:Wild"
    buffer.add(*(episode(wild, seed=seed + number, member=number, max_tokens=100) for number in range(EPISODES)))
    async with (
        engine.serve() as address,
        run_proxy(address) as proxy,
        working(buffer, proxy.address, renderer=renderer, context_tokens=CONTEXT, max_turns=12),
    ):
        await buffer.until(lambda: len(buffer.completed) + len(buffer.failed) == EPISODES, seconds=60)
    assert not buffer.failed, {failed.detail for failed in buffer.failed.values()}
    return list(buffer.completed.values())


@pytest.mark.parametrize(
    ("template", "rewriting", "rewrites"),
    [
        (models.TEMPLATE, "segment", False),
        (models.FORGETFUL, "segment", True),
        (models.FORGETFUL, "append", False),
        (NUMBERED, "segment", False),
        (TRIMMING, "segment", False),
        (REFUSING, "segment", False),
    ],
    ids=["plain", "forgetful", "appended", "numbered", "trimming", "refusing"],
)
async def test_the_turns_of_each_segment_are_exactly_what_the_engine_saw_and_wrote(
    template: str, rewriting: Literal["segment", "append"], rewrites: bool
):
    policy = WildPolicy(seed=len(template))

    played = await play(policy, template, rewriting, seed=len(template))

    recorded = {prompt: written for each in played for prompt, written in generations(each).items()}
    assert recorded == policy.seen
    assert any(turn.begins_segment for each in played for turn in each.turns) == rewrites
    assert sum(map(len, map(generations, played))) == len(policy.seen)
    assert {trajectory_pb2.OUTCOME_OK, trajectory_pb2.OUTCOME_TRUNCATED} == {each.outcome for each in played}
    assert all(
        turn.HasField("step_reward") and turn.state_hash
        for each in played
        for turn in each.turns
        if turn.author == POLICY
    )
    assert max(len(prompt) + len(written) for prompt, written in policy.seen.items()) <= CONTEXT
