"""One open request: what was asked, what engines have generated for it so far, and what is left to ask the next one.

Invariant: token ids, log-probabilities and version spans always describe the same tokens, in order, whichever engines
they came from; nothing is ever generated twice or re-tokenised.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from llm_proxy.tenants import Tenant
from rollfarm import times
from rollfarm.error_wire import to_failure
from rollfarm.errors import FarmError
from rollfarm.tokens import Span, append_spans, token_count
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, trajectory_pb2

STOP = trajectory_pb2.FINISH_REASON_STOP
LENGTH = trajectory_pb2.FINISH_REASON_LENGTH
ABORT = trajectory_pb2.FINISH_REASON_ABORT

FinishReason = trajectory_pb2.FinishReason

_SEED_RANGE = 2**63


class EngineMisbehaved(Exception):
    """An engine broke its contract; its stream cannot be trusted any further."""


class Waiter(Protocol):
    """Who is to be told how a request ended."""

    def answer(self, request: "OpenRequest") -> None:
        """It has: `result` and `write_result` say how."""
        ...


Watch = Callable[[bytes], None]
"""Is told new tokens, [T] "<i4", as they come; it must not raise."""


class Place(Enum):
    """Where a request is."""

    WAITING = auto()
    """It waits for a slot, or for a version."""

    RUNNING = auto()
    """An engine has it."""

    DONE = auto()
    """Answered or withdrawn."""


WAITING, RUNNING, DONE = Place  # by name: Python 3.11 takes ten times as long to find a member by its enum


def _no_spans() -> list[Span]:
    return []  # list[Span]() takes ten times as long


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request from its arrival to its answer."""

    asked: llm_proxy_pb2.ProxiedGeneration
    generation: engine_pb2.Generation
    """That of `asked`."""

    request_id: str
    arrival: int
    """Position among all requests; breaks ties."""

    waiters: list[Waiter]
    tenant: Tenant
    since: float
    """When it came to its place, seconds."""

    watch: Watch | None = None
    place: Place = DONE
    engine_id: str = ""
    """The engine that has it, or had it last."""

    wire_id: str = ""
    """Its id at that engine."""

    attempts: int = 0
    """Engines that it was given to."""

    fruitless_attempts: int = 0
    """The latest attempts that failed and added no token."""

    queue_seconds: float = 0.0
    generate_seconds: float = 0.0
    token_ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    spans: list[Span] = field(default_factory=_no_spans)
    top: llm_proxy_pb2.GenerationResult | None = None
    """Holds top_logprobs where they were asked for."""

    finish_reason: "FinishReason.ValueType" = trajectory_pb2.FINISH_REASON_UNSPECIFIED
    """Why it ended, when it has, unless it was refused."""

    refusal: FarmError | None = None
    """Why it was refused."""

    @property
    def order(self) -> tuple[int, bool, int]:
        """Least goes first: oldest version, then what was begun, then arrival."""
        return self.asked.priority, not self.attempts, self.arrival

    @property
    def made(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) // 4

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.generation.sampling.max_tokens - self.made

    @property
    def latest_version(self) -> int:
        """Of its last token; 0 without tokens."""
        return self.spans[-1][0] if self.spans else 0

    def append(self, chunk: engine_pb2.GenerationChunk) -> int:
        """Take the chunk's tokens, and say how many. Raises EngineMisbehaved, and then takes none."""
        token_ids, logprobs = chunk.token_ids, chunk.logprobs
        spans = [(span.policy_version, span.token_count) for span in chunk.version_spans]
        stamped = sum([count for _, count in spans])
        if not len(token_ids) == len(logprobs) == 4 * stamped:
            raise EngineMisbehaved(
                f"A chunk has {len(token_ids)} bytes of ids, {len(logprobs)} of log-probabilities and versions for "
                f"{stamped} tokens."
            )
        self.token_ids += token_ids
        self.logprobs += logprobs
        append_spans(self.spans, spans)
        if chunk.HasField("top_logprobs"):
            self._append_top(chunk.top_logprobs)
        if self.watch is not None:
            self.watch(token_ids)
        return stamped

    def _append_top(self, more: trajectory_pb2.TopLogprobs) -> None:
        if self.top is None:
            self.top = llm_proxy_pb2.GenerationResult()
        top = self.top.top_logprobs
        top.width = more.width
        top.token_ids += more.token_ids
        top.logprobs += more.logprobs

    def broke_exact_version(self) -> bool:
        """Whether a token came from another version than the one that was demanded."""
        return self.asked.HasField("exact_version") and any(
            version != self.asked.exact_version for version, _ in self.spans
        )

    def completed(self, context_tokens: int) -> "FinishReason.ValueType | None":
        """Why there is nothing left to generate, or None. A context of 0 tokens is unknown."""
        asked = self.generation
        if self.token_ids:
            last = int.from_bytes(self.token_ids[-4:], "little", signed=True)
            if last in asked.sampling.stop_token_ids:
                return STOP
        length = token_count(asked.prompt_token_ids) + self.made
        if self.made >= asked.sampling.max_tokens or 0 < context_tokens <= length:
            return LENGTH
        return None

    def continuation(self, wire_id: str) -> engine_pb2.Generation:
        """What the next engine is asked: the prompt with the tokens so far, for the tokens that are left.

        A seed moves on by the tokens so far, so that a resumed generation does not draw the same random numbers
        twice; it is reproducible given where it was cut, and not equal to the uncut one.
        """
        asked = self.generation
        if not self.token_ids and wire_id == self.request_id:
            return asked
        generation = engine_pb2.Generation()
        generation.CopyFrom(asked)
        generation.request_id = wire_id
        generation.prompt_token_ids = asked.prompt_token_ids + bytes(self.token_ids)
        generation.sampling.max_tokens -= self.made
        if generation.sampling.HasField("seed"):
            generation.sampling.seed = (generation.sampling.seed + self.made) % _SEED_RANGE
        return generation

    def leave_place(self, now: float) -> None:
        """Account for the time spent where it is."""
        spent = now - self.since
        if self.place is RUNNING:
            self.generate_seconds += spent
        else:
            self.queue_seconds += spent
        self.since = now

    def result(self) -> llm_proxy_pb2.GenerationResult:
        """The answer of a request that has ended."""
        result = llm_proxy_pb2.GenerationResult()
        self.write_result(result)
        return result

    def write_result(self, result: llm_proxy_pb2.GenerationResult) -> None:
        """The same, into an empty message."""
        if self.refusal is not None:
            write_refusal(result, self.request_id, self.refusal)
            return
        result.request_id = self.request_id
        result.token_ids = bytes(self.token_ids)
        result.logprobs = bytes(self.logprobs)
        result.finish_reason = self.finish_reason
        result.engine_id = self.engine_id
        for version, count in self.spans:
            result.version_spans.add(policy_version=version, token_count=count)
        if self.attempts > 1:
            result.resumption_count = self.attempts - 1
        times.set_duration(result.queue_duration, self.queue_seconds)
        times.set_duration(result.generate_duration, self.generate_seconds)
        if self.top is not None:
            result.top_logprobs.CopyFrom(self.top.top_logprobs)


def write_refusal(result: llm_proxy_pb2.GenerationResult, request_id: str, error: FarmError) -> None:
    """The answer to a request that is refused, into an empty message."""
    result.request_id = request_id
    result.failure.CopyFrom(to_failure(error))
