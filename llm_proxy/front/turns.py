"""The policy's turn that a result is, and the log-probabilities in it. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollfarm import tokens
from rollfarm.v1 import llm_proxy_pb2, trajectory_pb2


def turn_of(result: llm_proxy_pb2.GenerationResult, token_count: int) -> trajectory_pb2.Turn:
    """The result's first `token_count` tokens; the engine may have made more before it heard that it should stop."""
    turn = trajectory_pb2.Turn(
        author=trajectory_pb2.AUTHOR_POLICY,
        token_ids=result.token_ids[: 4 * token_count],
        logprobs=result.logprobs[: 4 * token_count],
        version_spans=_first(result.version_spans, token_count),
        finish_reason=result.finish_reason,
        engine_id=result.engine_id,
        queue_duration=result.queue_duration,
        generate_duration=result.generate_duration,
    )
    if result.HasField("top_logprobs"):
        top = result.top_logprobs
        size = 4 * token_count * top.width
        turn.top_logprobs.width = top.width
        turn.top_logprobs.token_ids = top.token_ids[:size]
        turn.top_logprobs.logprobs = top.logprobs[:size]
    return turn


@dataclass(frozen=True, slots=True)
class Scored:
    """A sampled token with its log-probability, and the likeliest ones at its place."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def scored(turn: trajectory_pb2.Turn, width: int) -> Iterator[Scored]:
    """Every token of the turn, with the `width` likeliest ones where they were asked for."""
    ids, logprobs = tokens.unpack_ids(turn.token_ids).tolist(), tokens.unpack_logprobs(turn.logprobs).tolist()
    kept = turn.top_logprobs.width
    top_ids = tokens.unpack_ids(turn.top_logprobs.token_ids).tolist()
    top_logprobs = tokens.unpack_logprobs(turn.top_logprobs.logprobs).tolist()
    for at, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        row = slice(at * kept, at * kept + min(width, kept))
        yield Scored(token, logprob, list(zip(top_ids[row], top_logprobs[row], strict=True)))


def _first(spans: Iterable[trajectory_pb2.VersionSpan], count: int) -> Iterable[trajectory_pb2.VersionSpan]:
    if sum([span.token_count for span in spans]) <= count:
        return spans
    kept: list[trajectory_pb2.VersionSpan] = []
    for span in spans:
        if count <= 0:
            break
        taken = min(count, span.token_count)
        kept.append(trajectory_pb2.VersionSpan(policy_version=span.policy_version, token_count=taken))
        count -= taken
    return kept
