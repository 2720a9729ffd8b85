"""Filters on complete groups: each a pure function of the members' rewards, named in `FILTERS`.

A filter answers whether the group is worth training on. Its keyword-only parameters are its settings.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from rollfarm.config import nearest
from rollfarm.errors import InvalidArgument
from rollfarm.v1 import sample_buffer_pb2

Filter = Callable[..., bool]


def zero_variance(rewards_G: Sequence[float], *, tolerance: float = 0.0) -> bool:
    """Keep a group whose rewards differ by more than `tolerance`: one that agrees has no advantage to learn from."""
    return max(rewards_G) - min(rewards_G) > tolerance


def difficulty(rewards_G: Sequence[float], *, min_mean: float = float("-inf"), max_mean: float = float("inf")) -> bool:
    """Keep a group whose mean reward lies within [min_mean, max_mean]: neither hopeless nor solved."""
    return min_mean <= fmean(rewards_G) <= max_mean


FILTERS: dict[str, Filter] = {"zero_variance": zero_variance, "difficulty": difficulty}


def check(filters: Iterable[sample_buffer_pb2.Filter]) -> None:
    """Raise InvalidArgument for a filter or a setting that is not known."""
    for chosen in filters:
        if chosen.name not in FILTERS:
            raise InvalidArgument(
                f"Unknown filter {chosen.name!r}.{nearest(chosen.name, list(FILTERS))}", filter=chosen.name
            )
        known = settings_of(chosen.name)
        for setting, value in chosen.settings.items():
            if setting not in known:
                raise InvalidArgument(
                    f"Filter {chosen.name!r} has no setting {setting!r}.{nearest(setting, known)}",
                    filter=chosen.name,
                    setting=setting,
                )
            if value != value:
                raise InvalidArgument(f"Filter {chosen.name!r}: {setting} is not a number.", filter=chosen.name)


def settings_of(name: str) -> list[str]:
    """Names of a filter's settings."""
    parameters = inspect.signature(FILTERS[name]).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def refused_by(filters: Iterable[tuple[str, Mapping[str, float]]], rewards_G: Sequence[float]) -> str | None:
    """The first filter that does not keep the group, or None."""
    return next((name for name, settings in filters if not FILTERS[name](rewards_G, **settings)), None)
