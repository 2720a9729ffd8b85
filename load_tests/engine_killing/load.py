"""The client: a constant number of open requests on one GenerateMany stream, each with a known length."""

import random
import time
import uuid
from typing import Any

from load_tests.engine_killing.evidence import Answer, Asked, Evidence
from rollfarm import tokens
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, trajectory_pb2

LONGEST_PROMPT = 64
FEWEST_TOKENS, MOST_TOKENS = 16, 256

DEMANDING = 0.2
"""Share of the requests that demand a version."""

AHEAD = 0.5
"""Share of those that demand the version after the newest, and wait for it."""


class Load:
    """Keeps `concurrency` requests open until told to finish."""

    def __init__(self, proxy: Any, evidence: Evidence, *, concurrency: int, vocabulary_size: int, seed: int) -> None:
        self._proxy = proxy
        self._evidence = evidence
        self._concurrency = concurrency
        self._vocabulary_size = vocabulary_size
        self._random = random.Random(seed)
        self._stopping = False

    @property
    def open_count(self) -> int:
        """Requests without an answer."""
        return len(self._evidence.asked) - len({answer.request_id for answer in self._evidence.answers})

    async def finish(self, seconds: float) -> None:
        """Ask for nothing more, and wait until everything is answered, but no longer than `seconds`."""
        self._stopping = True
        await self._evidence.changed.first(lambda: True if self.open_count == 0 else None, seconds)

    async def run(self) -> None:
        """Ask and note the answers, until cancelled."""
        call = self._proxy.GenerateMany()
        await self._ask(call, self._concurrency)
        async for message in call:
            for result in message.results:
                self._evidence.answers.append(_answer(result))
            self._evidence.changed.notify()
            await self._ask(call, 0 if self._stopping else len(message.results))

    async def _ask(self, call: Any, count: int) -> None:
        generations = [self._generation() for _ in range(count)]
        if generations:
            await call.write(llm_proxy_pb2.GenerateManyRequest(generations=generations))

    def _generation(self) -> llm_proxy_pb2.ProxiedGeneration:
        prompt = [self._random.randrange(self._vocabulary_size) for _ in range(self._random.randint(1, LONGEST_PROMPT))]
        request_id = uuid.UUID(int=self._random.getrandbits(128)).hex
        asked = Asked(
            at=time.monotonic(),
            prompt_count=len(prompt),
            max_tokens=self._random.randint(FEWEST_TOKENS, MOST_TOKENS),
            **self._demand(),
        )
        self._evidence.asked[request_id] = asked
        return llm_proxy_pb2.ProxiedGeneration(
            generation=engine_pb2.Generation(
                request_id=request_id,
                trace_id=request_id,
                prompt_token_ids=tokens.pack_ids(prompt),
                sampling=trajectory_pb2.Sampling(max_tokens=asked.max_tokens, temperature=1.0),
            ),
            min_version=asked.min_version,
            exact_version=asked.exact_version,
        )

    def _demand(self) -> dict[str, int]:
        if self._random.random() >= DEMANDING:
            return {}
        newest = self._evidence.committed_version
        version = newest + 1 if self._random.random() < AHEAD else newest
        return {self._random.choice(("min_version", "exact_version")): version}


def _answer(result: llm_proxy_pb2.GenerationResult) -> Answer:
    return Answer(
        at=time.monotonic(),
        request_id=result.request_id,
        token_ids=tokens.unpack_ids(result.token_ids).tolist(),
        logprobs=tokens.unpack_logprobs(result.logprobs).tolist(),
        spans=[(span.policy_version, span.token_count) for span in result.version_spans],
        is_whole=result.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH,
        refusal=result.failure.reason if result.HasField("failure") else "",
        resumptions=result.resumption_count,
    )
