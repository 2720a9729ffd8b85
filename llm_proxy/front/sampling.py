"""How one generation of an agent is sampled: what it asks for, within what its session allows. Pure."""

from dataclasses import dataclass

from rollfarm.v1 import trajectory_pb2

SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request says of sampling; None where it says nothing."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


FREE = trajectory_pb2.Sampling(temperature=1.0, top_p=1.0)
"""Where no session says otherwise; its max_tokens of 0 is bound by the context alone."""


def bind(
    chosen: trajectory_pb2.Sampling,
    wishes: Wishes,
    bound: trajectory_pb2.Sampling,
    *,
    allow: bool,
    room: int,
    number: int,
    index: int,
    stop_token_ids: tuple[int, ...],
    top_logprobs: int,
) -> None:
    """Choose the sampling of generation `index` of a request, which is the session's `number`-th generation.

    `room` is the tokens that the context has left. Of one seed, each generation gets another.
    """
    chosen.CopyFrom(bound)
    limits = [limit for limit in (bound.max_tokens, wishes.max_tokens, room) if limit]
    chosen.max_tokens = max(1, min(limits)) if limits else 1
    chosen.top_logprobs = max(bound.top_logprobs, top_logprobs)
    chosen.stop_token_ids[:] = sorted({*bound.stop_token_ids, *stop_token_ids})
    if chosen.HasField("seed"):
        chosen.seed = (chosen.seed + number) % SEEDS
    if allow:
        _take(chosen, wishes, index)


def _take(chosen: trajectory_pb2.Sampling, wishes: Wishes, index: int) -> None:
    if wishes.temperature is not None:
        chosen.temperature = wishes.temperature
    if wishes.top_p is not None:
        chosen.top_p = wishes.top_p
    if wishes.top_k is not None:
        chosen.top_k = wishes.top_k
    if wishes.seed is not None:
        chosen.seed = (wishes.seed + index) % SEEDS
