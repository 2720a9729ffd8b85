"""What a batch tells of its episodes, whatever is learnt from it: over all of it, each domain, and each environment.

Names of a part begin with "domain/NAME/" or "environment/NAME/". Pure functions; nothing here touches the model.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, pstdev

from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from trainer.rows import Row
from trainer.samples import was_truncated

Trajectories = Sequence[trajectory_pb2.Trajectory]
RowsOfEach = Sequence[Sequence[Row]]


def measured(trajectories: Trajectories, rows_of_each: RowsOfEach) -> dict[str, float]:
    """Every measure of a batch by name. Nothing of no trajectories."""
    if not trajectories:
        return {}
    whole = _measures(trajectories, rows_of_each)
    return {
        **whole,
        **_by("domain", trajectories, rows_of_each, whole, lambda each: each.task.domain),
        **_by("environment", trajectories, rows_of_each, whole, lambda each: each.task.environment),
    }


def _by(
    kind: str,
    trajectories: Trajectories,
    rows_of_each: RowsOfEach,
    whole: dict[str, float],
    part_of: Callable[[trajectory_pb2.Trajectory], str],
) -> dict[str, float]:
    """The measures of each part, under its name; `whole` are those of all."""
    found: dict[str, float] = {}
    for name in sorted({part_of(each) for each in trajectories} - {""}):
        inside = [index for index, each in enumerate(trajectories) if part_of(each) == name]
        part = [trajectories[index] for index in inside]
        measures = {
            "reward": fmean(each.reward for each in part),
            "episodes": float(len(part)),
            **(whole if len(part) == len(trajectories) else _measures(part, [rows_of_each[index] for index in inside])),
        }
        found |= {f"{kind}/{name}/{key}": value for key, value in measures.items()}
    return found


def _measures(trajectories: Trajectories, rows_of_each: RowsOfEach) -> dict[str, float]:
    lags = [max(float(row.lag_P.max(initial=0)) for row in each) for each in rows_of_each]
    names = sorted({name for each in trajectories for name in each.metrics})
    return {
        "reward_std": pstdev(each.reward for each in trajectories),
        "equal_rewards_share": _equal_rewards_share(trajectories),
        "staleness": fmean(lags),
        "staleness_max": max(lags),
        "episode_tokens": fmean(sum(map(len, each)) for each in rows_of_each),
        "episode_policy_tokens": fmean(sum(row.policy_tokens for row in each) for each in rows_of_each),
        "episode_segments": fmean(map(len, rows_of_each)),
        "episode_truncated": fmean(map(was_truncated, trajectories)),
        **{
            f"episode_{name}": fmean(each.metrics[name] for each in trajectories if name in each.metrics)
            for name in names
        },
    }


def _equal_rewards_share(trajectories: Trajectories) -> float:
    """Share of the episodes whose group agrees, which teaches nothing to an advantage that compares its members."""
    rewards: dict[str, list[float]] = {}
    for each in trajectories:
        rewards.setdefault(each.group_id, []).append(each.reward)
    return sum(len(group) for group in rewards.values() if _are_equal(group)) / len(trajectories)


def _are_equal(values: Iterable[float]) -> bool:
    return len(set(values)) == 1


def buffer_measures(status: sample_buffer_pb2.GetStatusResponse) -> dict[str, float]:
    """What sample_buffer counted since the run began.

    dropped_share/REASON is of all groups that were admitted; dropped_share/length_K, of the Kth quarter of the
    episodes by length, those lost with their group; outcome_count/NAME counts episodes that ended so.
    """
    admitted = max(1, status.next_group_index)
    return {
        **{f"dropped_share/{reason}": count / admitted for reason, count in status.dropped_group_counts.items()},
        **{
            f"dropped_share/length_{number}": sum(quarter.dropped_counts.values()) / max(1, quarter.episode_count)
            for number, quarter in enumerate(status.length_quartiles, start=1)
        },
        **{
            f"outcome_count/{name.removeprefix('OUTCOME_').lower()}": float(count)
            for name, count in status.outcome_counts.items()
        },
    }
