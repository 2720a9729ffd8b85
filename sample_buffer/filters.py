"""Filters on complete groups: each a pure function of what is known of the group, named in `FILTERS`.

A filter answers whether the group is worth training on. Its keyword-only parameters are its settings, and their types
say which values they take.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from rollfarm.config import nearest
from rollfarm.errors import InvalidArgument
from rollfarm.registry import settings_model
from rollfarm.v1 import sample_buffer_pb2

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete group, and what a filter may know of the run."""

    rewards_G: Sequence[float]
    lengths_G: Sequence[int]
    """Policy tokens."""
    step: int
    """Batches taken so far."""
    seen: Mapping[str, int]
    """Earlier groups of the run by the pool that they were found in."""


class Verdict(NamedTuple):
    """What a filter makes of a group."""

    kept: bool
    pool: str = ""
    """Where the group is counted, for the `seen` of later ones; empty is nowhere."""


Filter = Callable[..., Verdict]


def zero_variance(group: Candidate, *, tolerance: Annotated[float, Field(ge=0)] = 0.0) -> Verdict:
    """Keep a group whose rewards differ by more than `tolerance`: one that agrees has no advantage to learn from."""
    return Verdict(max(group.rewards_G) - min(group.rewards_G) > tolerance)


def difficulty(group: Candidate, *, min_mean: float = -math.inf, max_mean: float = math.inf) -> Verdict:
    """Keep a group whose mean reward lies within [min_mean, max_mean]: neither hopeless nor solved."""
    return Verdict(min_mean <= fmean(group.rewards_G) <= max_mean)


def max_length(group: Candidate, *, tokens: Annotated[int, Field(ge=1)], share: Share = 0.0) -> Verdict:
    """Keep a group of whose members no more than `share` have more than `tokens` policy tokens."""
    long = sum(length > tokens for length in group.lengths_G)
    return Verdict(long / len(group.lengths_G) <= share)


def all_failed(group: Candidate, *, threshold: float = 0.0) -> Verdict:
    """Keep a group in which some reward exceeds `threshold`."""
    return Verdict(max(group.rewards_G) > threshold)


def pools(
    group: Candidate,
    *,
    easy_above: float = math.inf,
    hard_below: float = -math.inf,
    easy_share: Share = 0.0,
    hard_share: Share = 0.0,
    ramp_steps: Annotated[int, Field(ge=0)] = 0,
) -> Verdict:
    """Keep every normal group, and a share of the easy and of the hard ones: a curriculum.

    A mean reward above `easy_above` is easy and one below `hard_below` hard. Of n groups of such a pool
    floor(n * share) are kept, evenly spread. The hard share grows linearly from 0 to `hard_share` over the first
    `ramp_steps` batches: a run whose every group is hard at the beginning would never get its first batch.
    """
    mean = fmean(group.rewards_G)
    if mean > easy_above:
        return _thinned("easy", group, easy_share)
    if mean < hard_below:
        return _thinned("hard", group, hard_share * min(1.0, group.step / ramp_steps) if ramp_steps else hard_share)
    return Verdict(kept=True, pool="normal")


def _thinned(pool: str, group: Candidate, share: float) -> Verdict:
    before = group.seen.get(pool, 0)
    return Verdict(math.floor((before + 1) * share) > math.floor(before * share), pool)


FILTERS: dict[str, Filter] = {
    "zero_variance": zero_variance,
    "difficulty": difficulty,
    "max_length": max_length,
    "all_failed": all_failed,
    "pools": pools,
}

_ASCENDING = {"difficulty": [("min_mean", "max_mean")], "pools": [("hard_below", "easy_above")]}
"""Settings of which the first may not exceed the second."""


def check(filters: Iterable[sample_buffer_pb2.Filter]) -> None:
    """Raise InvalidArgument for a filter or a setting that is not known or not in range."""
    names: set[str] = set()
    for chosen in filters:
        if chosen.name not in FILTERS:
            raise InvalidArgument(
                f"Unknown filter {chosen.name!r}.{nearest(chosen.name, list(FILTERS))}", filter=chosen.name
            )
        if chosen.name in names:
            raise InvalidArgument(f"Filter {chosen.name!r} is there twice.", filter=chosen.name)
        names.add(chosen.name)
        _check_settings(chosen.name, chosen.settings)


def _check_settings(name: str, settings: Mapping[str, float]) -> None:
    table = settings_model(FILTERS[name])
    for setting, value in settings.items():
        if setting not in table.model_fields:
            raise InvalidArgument(
                f"Filter {name!r} has no setting {setting!r}.{nearest(setting, list(table.model_fields))}",
                filter=name,
                setting=setting,
            )
        if math.isnan(value):
            raise InvalidArgument(f"Filter {name!r}: {setting} is not a number.", filter=name, setting=setting)
    try:
        checked = table(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        setting = str(first["loc"][0])
        raise InvalidArgument(f"Filter {name!r}: {setting}: {first['msg']}.", filter=name, setting=setting) from None
    for low, high in _ASCENDING.get(name, ()):
        if getattr(checked, low) > getattr(checked, high):
            raise InvalidArgument(f"Filter {name!r}: {low} exceeds {high}.", filter=name, setting=low)


def judge(filters: Iterable[sample_buffer_pb2.Filter], group: Candidate) -> tuple[str, str]:
    """The first filter that does not keep the group, or empty; and the pool that the group was found in."""
    pool = ""
    for chosen in filters:
        verdict = FILTERS[chosen.name](group, **chosen.settings)
        pool = verdict.pool or pool
        if not verdict.kept:
            return chosen.name, pool
    return "", pool
