"""The formulas again, one token at a time in float64: what the vectorised ones are compared with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

FLOOR = 1e-6


@dataclass
class Episode:
    """A trajectory by its actions: what each paid, in which state it was taken, and how many tokens it has."""

    group: int
    reward: float
    paid: list[float]
    states: list[int]
    lengths: list[int]
    charges: list[float] = field(default_factory=list[float])
    """What each token costs; empty is nothing."""

    @property
    def score(self) -> float:
        return self.reward - sum(self.charges)

    @property
    def credits(self) -> list[float]:
        """Of each action: the sum of its tokens'."""
        ends = [sum(self.lengths[: index + 1]) for index in range(len(self.lengths))]
        return [sum(self.token_credits[end - length : end]) for end, length in zip(ends, self.lengths, strict=True)]

    @property
    def token_credits(self) -> list[float]:
        paid = [*self.paid[:-1], self.paid[-1] + self.reward - sum(self.paid)]
        earned: list[float] = []
        for credit, length in zip(paid, self.lengths, strict=True):
            earned += [0.0] * (length - 1) + [credit]
        charges = self.charges or [0.0] * len(earned)
        return [credit - charge for credit, charge in zip(earned, charges, strict=True)]


Batch = Sequence[Episode]


def spread(batch: Batch, per_episode: Callable[[Episode], float]) -> list[float]:
    return [per_episode(episode) for episode in batch for _ in range(sum(episode.lengths))]


def rewards_of(batch: Batch, group: int) -> list[float]:
    return [episode.score for episode in batch if episode.group == group]


def standard(value: float, mean_of: Sequence[float], std_of: Sequence[float] | None) -> float:
    """(value - mean) / deviation; 0 where the deviation vanishes."""
    moved = value - fmean(mean_of)
    if std_of is None:
        return 0.0 if min(mean_of) == max(mean_of) else moved
    return moved / pstdev(std_of) if pstdev(std_of) > FLOOR else 0.0


def grpo(batch: Batch) -> list[float]:
    return spread(batch, lambda e: standard(e.score, (g := rewards_of(batch, e.group)), g))


def dr_grpo(batch: Batch) -> list[float]:
    return spread(batch, lambda e: standard(e.score, rewards_of(batch, e.group), None))


def lite_ppo(batch: Batch) -> list[float]:
    everyone = [episode.score for episode in batch]
    return spread(batch, lambda e: standard(e.score, rewards_of(batch, e.group), everyone))


def rloo(batch: Batch) -> list[float]:
    def advantage(episode: Episode) -> float:
        others = [other.score for other in batch if other.group == episode.group and other is not episode]
        return episode.score - fmean(others) if others else 0.0

    return spread(batch, advantage)


def maxrl(batch: Batch) -> list[float]:
    def advantage(episode: Episode) -> float:
        mean = fmean(rewards_of(batch, episode.group))
        return (episode.score - mean) / mean if mean > FLOOR else 0.0

    return spread(batch, advantage)


def raft(batch: Batch) -> list[float]:
    return spread(batch, lambda e: 1.0 if e.score > 0 else 0.0)


def returns(credits: Sequence[float], gamma: float) -> list[float]:
    return [
        sum(gamma ** (later - now) * credits[later] for later in range(now, len(credits)))
        for now in range(len(credits))
    ]


def whitened(values: Sequence[float]) -> list[float]:
    return [standard(value, values, values) for value in values]


def reinforce(batch: Batch, gamma: float) -> list[float]:
    return [value for episode in batch for value in returns(episode.token_credits, gamma)]


def reinforce_plus_plus(batch: Batch, gamma: float) -> list[float]:
    return whitened(reinforce(batch, gamma))


def reinforce_plus_plus_baseline(batch: Batch) -> list[float]:
    return whitened(dr_grpo(batch))


def to_tokens(batch: Batch, per_action: Sequence[float]) -> list[float]:
    lengths = [length for episode in batch for length in episode.lengths]
    return [value for value, length in zip(per_action, lengths, strict=True) for _ in range(length)]


def agentic_reinforce(batch: Batch, gamma: float) -> list[float]:
    return to_tokens(batch, whitened([g for episode in batch for g in returns(episode.credits, gamma)]))


def step_reinforce(batch: Batch, gamma: float) -> list[float]:
    per_action: list[float] = []
    for episode in batch:
        siblings = [g for other in batch if other.group == episode.group for g in returns(other.credits, gamma)]
        per_action += [standard(g, siblings, None) for g in returns(episode.credits, gamma)]
    return to_tokens(batch, per_action)


def gigpo(batch: Batch, gamma: float, weight: float) -> list[float]:
    met: dict[tuple[int, int], list[float]] = {}
    for episode in batch:
        for state, value in zip(episode.states, returns(episode.credits, gamma), strict=True):
            met.setdefault((episode.group, state), []).append(value)
    steps: list[float] = []
    for episode in batch:
        for state, value in zip(episode.states, returns(episode.credits, gamma), strict=True):
            same = met[episode.group, state]
            steps.append(standard(value, same, same) if state >= 0 else 0.0)
    return [outer + weight * inner for outer, inner in zip(grpo(batch), to_tokens(batch, steps), strict=True)]


def gae(reward_NT: F64, value_NT: F64, mask_NT: NDArray[np.bool_], gamma: float, lam: float) -> F64:
    """Of every position in the mask; those outside have no time. The recursion as a double sum."""
    advantage_NT = np.zeros_like(reward_NT)
    for row in range(len(mask_NT)):
        places = np.flatnonzero(mask_NT[row])
        for now, place in enumerate(places):
            for later in range(now, len(places)):
                here = places[later]
                after = value_NT[row, places[later + 1]] if later + 1 < len(places) else 0.0
                surprise = reward_NT[row, here] + gamma * after - value_NT[row, here]
                advantage_NT[row, place] += (gamma * lam) ** (later - now) * surprise
    return advantage_NT


# --- divergences, values and shaping ---


def divergence(name: str, policy: float, reference: float) -> float:
    """Of a token, by the probabilities themselves."""
    r = math.exp(policy) / math.exp(reference)
    return {"k1": math.log(r), "k2": math.log(r) ** 2 / 2, "k3": 1 / r - 1 - math.log(1 / r), "abs": abs(math.log(r))}[
        name
    ]


def value_loss(value: float, old: float, target: float, clip: float) -> float:
    near = min(max(value, old - clip), old + clip)
    return max((value - target) ** 2, (near - target) ** 2) / 2


def overlong(tokens: int, limit: int, buffer: int) -> float:
    if tokens <= limit - buffer:
        return 0.0
    return -1.0 if tokens > limit else ((limit - buffer) - tokens) / buffer


# --- aggregation, over positions in the mask of padded rows ---


def aggregated(name: str, loss_ST: F64, mask_ST: NDArray[np.bool_], *, length: int = 1024) -> float:
    used = [row for row in range(len(loss_ST)) if mask_ST[row].any()]
    sums = [float(loss_ST[row, mask_ST[row]].sum()) for row in used]
    counts = [int(mask_ST[row].sum()) for row in used]
    match name:
        case "token_mean":
            return sum(sums) / sum(counts)
        case "seq_mean_token_mean":
            return fmean(total / count for total, count in zip(sums, counts, strict=True))
        case "seq_mean_token_sum":
            return fmean(sums)
        case "seq_mean_token_sum_norm":
            return fmean(sums) / length
        case _:
            raise KeyError(name)


# --- losses, of one token: current, behaviour and proximal log-probability, advantage ---


def clipped(pi: float, anchor: float, a: float, *, low: float, high: float, dual: float) -> float:
    r = math.exp(pi - anchor)
    objective = min(r * a, min(max(r, 1 - low), 1 + high) * a)
    if a < 0 and dual:
        objective = max(objective, dual * a)
    return -objective


def weighted(pi: float, anchor: float, a: float, *, low: float, high: float) -> float:
    return -min(max(math.exp(pi - anchor), low), high) * a * pi


def topr(pi: float, anchor: float, a: float) -> float:
    return -a * pi if a >= 0 else weighted(pi, anchor, a, low=0, high=1)


def kimi(pi: float, anchor: float, a: float, *, tau: float) -> float:
    return -a * pi + tau / 2 * (pi - anchor) ** 2


def weights(gaps: Sequence[float], sequences: Sequence[int], level: str) -> list[float]:
    """Proximal to behaviour, of each token."""

    def weight(gap: float, sequence: int) -> float:
        siblings = [other for other, owner in zip(gaps, sequences, strict=True) if owner == sequence]
        match level:
            case "token":
                return math.exp(gap)
            case "sequence":
                return math.prod(math.exp(each) for each in siblings)
            case _:
                return math.prod(math.exp(each) for each in siblings) ** (1 / len(siblings))

    return [weight(gap, sequence) for gap, sequence in zip(gaps, sequences, strict=True)]


def gspo(log_ratios: Sequence[float], a: float, *, low: float, high: float) -> float:
    """Of each token of a sequence."""
    r = math.exp(fmean(log_ratios))
    return -min(r * a, min(max(r, 1 - low), 1 + high) * a)


def gmpo(log_ratios: Sequence[float], a: float, *, low: float, high: float) -> float:
    """Of each token of a sequence."""
    kept = [min(each, high) if a > 0 else max(each, -low) for each in log_ratios]
    return -math.exp(fmean(kept)) * a
