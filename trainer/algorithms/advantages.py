"""Rewards to advantages, one for each token that the policy wrote.

A group that agrees teaches nothing: all zeros, wherever an advantage compares the members of a group.

Legend: N trajectories, K actions (turns of the policy), P tokens of all actions.
"""

from typing import Protocol

import torch
from torch import Tensor

from trainer.algorithms.samples import (
    STD_FLOOR,
    Over,
    Samples,
    centered_by,
    count_by,
    discounted,
    mean_by,
    normalized,
)


class Advantage(Protocol):
    def __call__(self, samples: Samples, /) -> Tensor:
        """The batch to f64[P] advantages, unitless."""
        ...


# --- one advantage for a whole trajectory ---


def grpo(samples: Samples, *, std_floor: float = STD_FLOOR) -> Tensor:
    """(r - mean of the group) / standard deviation of the group (GRPO, arXiv 2402.03300)."""
    return _of_trajectories(samples, mean="group", std="group", std_floor=std_floor)


def dr_grpo(samples: Samples) -> Tensor:
    """r - mean of the group (Dr. GRPO, arXiv 2503.20783). Easy and hard tasks weigh less than in GRPO."""
    return _of_trajectories(samples, mean="group", std="none")


def lite_ppo(samples: Samples, *, std_floor: float = STD_FLOOR) -> Tensor:
    """(r - mean of the group) / standard deviation of the batch (Lite PPO, arXiv 2508.08221)."""
    return _of_trajectories(samples, mean="group", std="batch", std_floor=std_floor)


def starpo(samples: Samples, *, mean: Over = "group", std: Over = "group") -> Tensor:
    """The whole interaction is one sample: its score, normalised, counts for every token of every turn (StarPO, arXiv
    2504.20073)."""
    return _of_trajectories(samples, mean=mean, std=std)


def rloo(samples: Samples) -> Tensor:
    """r - mean of the *other* members, an unbiased baseline (RLOO, arXiv 2402.14740). Alone it is 0."""
    size_N = count_by(samples.group_N, int(samples.group_N.max()) + 1)[samples.group_N].double()
    scale_N = size_N / (size_N - 1).clamp(min=1)
    return (centered_by(samples.score_N(), samples.group_N) * scale_N)[samples.trajectory_P]


def maxrl(samples: Samples, *, mean_floor: float = 1e-6) -> Tensor:
    """(r - mean of the group) / mean of the group, for rewards of 0 and 1: the gradient of log-likelihood, where GRPO's
    is of expected reward; hard tasks weigh more (MaxRL, arXiv 2602.02710). A mean up to `mean_floor` gives 0."""
    groups = int(samples.group_N.max()) + 1
    mean_N = mean_by(samples.score_N(), samples.group_N, groups)[samples.group_N]
    centered_N = centered_by(samples.score_N(), samples.group_N)
    return torch.where(mean_N > mean_floor, centered_N / mean_N.clamp(min=mean_floor), 0.0)[samples.trajectory_P]


def raft(samples: Samples, *, threshold: float = 0.0) -> Tensor:
    """1 for a trajectory whose score exceeds `threshold`, 0 for others: only successes teach (RAFT++, arXiv 2504.11343,
    with the loss `clipped`)."""
    return (samples.score_N() > threshold).double()[samples.trajectory_P]


# --- advantages in time ---


def reinforce(samples: Samples, *, gamma: float = 1.0, mean: Over = "none", std: Over = "none") -> Tensor:
    """The discounted return from each token on (Williams 1992), normalised over all tokens of the group or batch."""
    return_P = discounted(samples.credit_P(), samples.trajectory_P, gamma)
    return normalized(return_P, samples.group_N[samples.trajectory_P], mean=mean, std=std)


def reinforce_plus_plus(samples: Samples, *, gamma: float = 1.0) -> Tensor:
    """The return from each token on, normalised over all tokens of the batch (REINFORCE++, arXiv 2501.03262)."""
    return reinforce(samples, gamma=gamma, mean="batch", std="batch")


def reinforce_plus_plus_baseline(samples: Samples) -> Tensor:
    """r - mean of the group, then normalised over all tokens of the batch (REINFORCE++-baseline, the same paper)."""
    centered_P = centered_by(samples.score_N(), samples.group_N)[samples.trajectory_P]
    return normalized(centered_P, samples.group_N[samples.trajectory_P], mean="batch", std="batch")


def agentic_reinforce(samples: Samples, *, gamma: float = 0.95, mean: Over = "batch", std: Over = "batch") -> Tensor:
    """The return from each *action* on, discounted once for each action and never within one: every token of an action
    counts alike, however many there are. Normalised over the actions of the group or batch."""
    return _of_actions(samples, gamma, mean, std)


def step_reinforce(samples: Samples, *, gamma: float = 0.95, mean: Over = "group", std: Over = "none") -> Tensor:
    """The same with the mean of the group's actions as baseline: each step is a sample of its own."""
    return _of_actions(samples, gamma, mean, std)


def gigpo(samples: Samples, *, gamma: float = 0.95, step_weight: float = 1.0, std: bool = True) -> Tensor:
    """The trajectory's advantage in its group, plus `step_weight` times that of its action among all actions of the
    group that were taken in the same state, by their discounted returns (GiGPO, arXiv 2505.10978).

    An action in a state that nobody else met, or that is not known, has the first part alone. Without `std` nothing is
    divided by a deviation.
    """
    episode_P = _of_trajectories(samples, mean="group", std="group" if std else "none")
    return_K = discounted(samples.credit_K(), samples.trajectory_K, gamma)
    step_K = normalized(return_K, samples.state_K + 1, mean="group", std="group" if std else "none")
    step_K = torch.where(samples.state_K >= 0, step_K, 0.0)
    return episode_P + step_weight * step_K[samples.action_P]


# --- advantages by another model ---


def gae(samples: Samples, *, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """A_t = d_t + gamma lam A_(t+1), with d_t = r_t + gamma V_(t+1) - V_t and V 0 after the last token (generalised
    advantage estimation, arXiv 1506.02438, eq. 16). A step in time is a token of the policy: what the environment wrote
    between two of them is none. V + A is what the critic should have expected."""
    value_P = _known(samples.value_P, "a critic")
    after_P = torch.zeros_like(value_P)
    goes_on_P = samples.trajectory_P[1:] == samples.trajectory_P[:-1]
    after_P[:-1] = torch.where(goes_on_P, value_P[1:], 0.0)
    surprise_P = samples.credit_P() + gamma * after_P - value_P
    return discounted(surprise_P, samples.trajectory_P, gamma * lam)


def opd(samples: Samples, *, coef: float = 1.0) -> Tensor:
    """coef * (log teacher - log policy) of each token: the policy gradient of the reverse KL to a teacher, whatever the
    rewards (on-policy distillation, GKD, arXiv 2306.13649, with a reverse KL; MiniLLM, arXiv 2306.08543)."""
    return coef * _known(samples.teacher_gap_P, "a teacher")


def _known(values_P: Tensor | None, what: str) -> Tensor:
    if values_P is None:
        raise LookupError(f"This advantage needs {what}, and there is none.")
    return values_P


def _of_trajectories(samples: Samples, *, mean: Over, std: Over, std_floor: float = STD_FLOOR) -> Tensor:
    advantage_N = normalized(samples.score_N(), samples.group_N, mean=mean, std=std, std_floor=std_floor)
    return advantage_N[samples.trajectory_P]


def _of_actions(samples: Samples, gamma: float, mean: Over, std: Over) -> Tensor:
    return_K = discounted(samples.credit_K(), samples.trajectory_K, gamma)
    return normalized(return_K, samples.group_K, mean=mean, std=std)[samples.action_P]


ADVANTAGES: dict[str, Advantage] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "lite_ppo": lite_ppo,
    "starpo": starpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "raft": raft,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "agentic_reinforce": agentic_reinforce,
    "step_reinforce": step_reinforce,
    "gigpo": gigpo,
    "gae": gae,
    "opd": opd,
}
