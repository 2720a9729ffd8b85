"""One rollout step by batches and by a queue: generate until enough groups have samples that differ in their reward.

Both take the same prompts in the same order, ask the same llm_proxy, and know of a sample's length only once it ended.

Batch: a whole batch of prompts is issued at once, the samples of a prompt stay together on one engine, and rewards are
looked at when the last sample of the batch has ended; if groups are missing then, another whole batch follows. Queue:
every sample is a request of its own that goes wherever a slot is free; a group is looked at when it is complete, and
the next prompt takes its place at once. What still runs when there are enough groups is cancelled.
"""

import itertools
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from load_tests.engine_bench.workload import Prompt
from rollfarm import rpc, tokens
from rollfarm.testing import simulated_token
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, trajectory_pb2

PROMPT_TOKENS = 16
CALL_SECONDS = 60.0

Prompts = Callable[[int], Prompt]
"""The prompt at a place of the step's stream."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has its groups."""

    seconds: float
    prompts: int
    """Prompts begun."""
    rounds: int
    """Batches issued; 1 for a queue."""
    apart: int
    """Groups whose samples were not all made by one engine."""


@dataclass(slots=True)
class Groups:
    """Which prompts are running, and which are complete and teach."""

    running: dict[int, Prompt] = field(default_factory=dict[int, Prompt])
    kept: list[Prompt] = field(default_factory=list[Prompt])
    apart: int = 0
    _engines: dict[int, list[str]] = field(default_factory=dict[int, list[str]])

    def begin(self, prompt: Prompt) -> Prompt:
        self.running[prompt.number] = prompt
        self._engines[prompt.number] = []
        return prompt

    def ended(self, number: int, engine: str) -> bool:
        """A sample of the prompt is there. Whether its group is complete now."""
        prompt, engines = self.running[number], self._engines[number]
        engines.append(engine)
        if len(engines) < len(prompt.lengths):
            return False
        self.apart += len(set(engines)) > 1
        del self.running[number]
        if prompt.teaches:
            self.kept.append(prompt)
        return True


class Source(Protocol):
    """Where samples come from."""

    async def ask(self, prompts: list[Prompt], *, together: bool) -> None:
        """Begin every sample of the prompts; with `together`, those of a prompt on one engine."""
        ...

    async def ended(self) -> list[tuple[int, str]]:
        """Samples that ended since: the prompt's number and the engine of each."""
        ...

    async def cancel(self) -> None:
        """Stop what is open, and wait until it has stopped."""
        ...


class Samples:
    """Requests for samples on one GenerateMany stream: a Source."""

    def __init__(self, proxy: Any, *, most_tokens: int, vocabulary_size: int) -> None:
        self._proxy = proxy
        self._call = proxy.GenerateMany()
        self._most_tokens = most_tokens
        self._vocabulary_size = vocabulary_size
        self._open: dict[str, tuple[int, int]] = {}
        """By request: the prompt's number, and the tokens of the sample."""

    async def ask(self, prompts: list[Prompt], *, together: bool) -> None:
        generations: list[llm_proxy_pb2.ProxiedGeneration] = []
        for prompt in prompts:
            # Never seen before: no engine may be chosen for what it has cached.
            prompt_token_ids = tokens.pack_ids([secrets.randbelow(self._vocabulary_size) for _ in range(PROMPT_TOKENS)])
            for length in prompt.lengths:
                proxied = self._generation(prompt.number, prompt_token_ids, length)
                proxied.generation.session_id = prompt_token_ids.hex() if together else ""
                generations.append(proxied)
        await self._call.write(llm_proxy_pb2.GenerateManyRequest(generations=generations))

    def _generation(self, number: int, prompt_token_ids: bytes, length: int) -> llm_proxy_pb2.ProxiedGeneration:
        """All ask for as many tokens as any may have; the token at the sample's last place ends it."""
        request_id = uuid.uuid4().hex
        self._open[request_id] = (number, length)
        last = simulated_token(PROMPT_TOKENS + length - 1, 0, self._vocabulary_size)
        generation = engine_pb2.Generation(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=trajectory_pb2.Sampling(max_tokens=self._most_tokens, temperature=1.0, stop_token_ids=[last]),
        )
        return llm_proxy_pb2.ProxiedGeneration(generation=generation)

    async def ended(self) -> list[tuple[int, str]]:
        message = await self._call.read()
        ended: list[tuple[int, str]] = []
        for result in message.results:
            number, length = self._open.pop(result.request_id)
            made = tokens.token_count(result.token_ids)
            if result.finish_reason != trajectory_pb2.FINISH_REASON_ABORT:
                assert made == length, f"a sample has {made} tokens in place of {length}: {result.failure}"
                ended.append((number, result.engine_id))
        return ended

    async def cancel(self) -> None:
        if self._open:
            request = llm_proxy_pb2.CancelRequest(request_ids=list(self._open))
            await rpc.call(self._proxy.Cancel, request, timeout=CALL_SECONDS)
        while self._open:
            await self.ended()

    def close(self) -> None:
        self._call.cancel()


async def by_batches(samples: Source, prompts: Prompts, *, groups: int, batch: int) -> Step:
    """Rounds of `batch` prompts until `groups` of them teach."""
    began, stream, found = time.perf_counter(), _stream(prompts), Groups()
    rounds = 0
    while len(found.kept) < groups:
        rounds += 1
        await samples.ask([found.begin(next(stream)) for _ in range(batch)], together=True)
        while found.running:
            for number, engine in await samples.ended():
                found.ended(number, engine)
    return Step(time.perf_counter() - began, rounds * batch, rounds, found.apart)


async def by_queue(samples: Source, prompts: Prompts, *, groups: int, running: int) -> Step:
    """`running` prompts at once, each replaced when it is complete, until `groups` teach."""
    began, stream, found = time.perf_counter(), _stream(prompts), Groups()
    await samples.ask([found.begin(next(stream)) for _ in range(running)], together=False)
    begun = running
    while len(found.kept) < groups:
        complete = sum(found.ended(number, engine) for number, engine in await samples.ended())
        if complete and len(found.kept) < groups:
            await samples.ask([found.begin(next(stream)) for _ in range(complete)], together=False)
            begun += complete
    await samples.cancel()
    return Step(time.perf_counter() - began, begun, 1, found.apart)


def _stream(prompts: Prompts) -> Iterator[Prompt]:
    return map(prompts, itertools.count())
