"""What an engine is asked for and what it answers, decoded once, and the checks that every adapter relies on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollfarm import images
from rollfarm.error_wire import to_failure
from rollfarm.errors import FarmError, InvalidArgument
from rollfarm.generation import check_prompt, check_sampling
from rollfarm.images import PlacedImage
from rollfarm.tokens import Ids, pack_ids, pack_logprobs, unpack_ids
from rollfarm.v1 import engine_pb2, trajectory_pb2

FinishReason = trajectory_pb2.FinishReason.ValueType
STOP = trajectory_pb2.FINISH_REASON_STOP
LENGTH = trajectory_pb2.FINISH_REASON_LENGTH
ABORT = trajectory_pb2.FINISH_REASON_ABORT


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can take. Fixed once it has started."""

    slot_count: int
    """Requests decoded at once."""

    context_token_count: int
    """Tokens of prompt and output together."""

    vocabulary_size: int
    """Token ids lie below it."""

    image_token_id: int | None = None
    """Stands for images, once for each token of them. None: the engine takes no images."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation that passed the checks."""

    key: str
    """Unique among the engine's open requests, of all streams."""

    prompt: Ids
    """At least one token, those that stand for images included."""

    max_tokens: int
    """At least 1; prompt and output fit the context."""

    temperature: float = 1.0
    """0 is greedy."""

    top_p: float = 1.0
    """1 keeps every token."""

    top_k: int = 0
    """0 keeps every token."""

    seed: int | None = None
    """None lets the engine choose."""

    top_logprobs: int = 0
    """Likeliest tokens reported at each position."""

    stop_token_ids: frozenset[int] = frozenset()
    """Part of the output."""

    session_id: str = ""
    """Empty is none."""

    images: Sequence[PlacedImage] = ()
    """In the order of the prompt."""


@dataclass(slots=True)
class Chunk:
    """What a request added since its last chunk."""

    key: str
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(policy version, tokens)."""

    top: list[tuple[Sequence[int], Sequence[float]]] = field(
        default_factory=list[tuple[Sequence[int], Sequence[float]]]
    )
    """For each token, the likeliest ids and their log-probabilities, where asked for."""

    finish: FinishReason | None = None
    """Set on the last chunk."""

    failure: FarmError | None = None
    """Set, on the last chunk, when the request was refused."""

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.failure is not None

    def add(self, token: int, logprob: float, version: int) -> None:
        """Append one token that was sampled under `version`."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + 1)
        else:
            self.spans.append((version, 1))

    def to_proto(self, request_id: str) -> engine_pb2.GenerationChunk:
        """The chunk as it travels."""
        chunk = engine_pb2.GenerationChunk(
            request_id=request_id,
            token_ids=pack_ids(self.token_ids),
            logprobs=pack_logprobs(self.logprobs),
            version_spans=[
                trajectory_pb2.VersionSpan(policy_version=version, token_count=count) for version, count in self.spans
            ],
        )
        if self.finish is not None:
            chunk.finish_reason = self.finish
        if self.failure is not None:
            chunk.failure.CopyFrom(to_failure(self.failure))
        if self.top:
            chunk.top_logprobs.width = len(self.top[0][0])
            chunk.top_logprobs.token_ids = pack_ids([ids for ids, _ in self.top])
            chunk.top_logprobs.logprobs = pack_logprobs([logprobs for _, logprobs in self.top])
        return chunk


def decode(generation: engine_pb2.Generation, key: str, limits: Limits) -> Request:
    """The request behind `generation`. Raises InvalidArgument."""
    prompt = unpack_ids(generation.prompt_token_ids)
    check_prompt(prompt, context_tokens=limits.context_token_count, vocabulary_size=limits.vocabulary_size)
    sampling = generation.sampling
    check_sampling(sampling, vocabulary_size=limits.vocabulary_size)
    return Request(
        key=key,
        prompt=prompt,
        max_tokens=min(sampling.max_tokens, limits.context_token_count - len(prompt)),
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        seed=sampling.seed if sampling.HasField("seed") else None,
        top_logprobs=sampling.top_logprobs,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        session_id=generation.session_id,
        images=_images(generation, prompt, limits) if generation.images else (),
    )


def _images(generation: engine_pb2.Generation, prompt: Ids, limits: Limits) -> Sequence[PlacedImage]:
    if limits.image_token_id is None:
        raise InvalidArgument(
            f"This engine takes no images. Use one of vLLM, with a model of {', '.join(images.MODEL_TYPES)}, or one of "
            "SGLang, with one of the last two.",
            field="images",
        )
    try:
        placed = images.place(generation.images, len(prompt), {})
    except images.BadImage as problem:
        raise InvalidArgument(f"In the prompt {problem}.", field="images") from None
    stands_for = np.zeros(len(prompt), np.bool_)
    for image in placed:
        stands_for[image.offset : image.offset + image.count] = True
    if not np.array_equal(stands_for, prompt == limits.image_token_id):
        # An engine is told of one place after the other, and would take any for the next image's.
        raise InvalidArgument(
            f"Token {limits.image_token_id} stands for images, and is elsewhere in the prompt, as where the policy "
            "wrote it, or not where they are.",
            field="images",
        )
    return placed
