"""Figures and the picture from what was played."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from load_tests.failing.account import NAMES
from load_tests.failing.farm import Played
from load_tests.failing.injections import OUTCOMES
from rollfarm.up.report import ACCENT, INK, PALE, SECOND, smooth

LAST = 0.2
"""Share of a curve's steps that its end is the mean of."""


def figures(without: Sequence[Played], failing: Sequence[Played]) -> dict[str, object]:
    """Of the runs without failures and of those with them, which had the same seeds."""
    accounts = [played.account for played in failing]
    return {
        "reward_with": reward(failing),
        "reward_without": reward(without),
        **comparison(without, failing),
        "injected": {name: sum(one.injected_by_outcome[name] for one in accounts) for name in NAMES},
        "counted": {name: sum(one.counted.get(name, 0) for one in accounts) for name in NAMES},
        "cancelled": {name: sum(one.cancelled[name] for one in accounts) for name in NAMES},
        "late": {name: sum(one.late[name] for one in accounts) for name in NAMES},
        "not_injected": {name: sum(one.not_injected[name] for one in accounts) for name in NAMES},
        "injected_by_kind": {kind: sum(one.injected[kind] for one in accounts) for kind in OUTCOMES},
        "failed_share": round(fmean(one.failed_share for one in accounts), 3),
        "failed_share_without": round(fmean(played.account.failed_share for played in without), 3),
        "dropped_groups": dict(sum((Counter(played.dropped_groups) for played in failing), Counter[str]())),
        "suspensions": sum(one.suspensions for one in accounts),
        "unaccounted": sum(len(played.account.faults) for played in (*without, *failing)),
        "run_s": {
            "with": [round(played.wall_seconds, 1) for played in failing],
            "without": [round(played.wall_seconds, 1) for played in without],
        },
    }


def reward(runs: Sequence[Played]) -> dict[str, object]:
    """How the curves ended, by seed and on average, and the success of the last validations."""
    ends = [end(played) for played in runs]
    return {
        "by_seed": [round(value, 4) for value in ends],
        "mean": round(fmean(ends), 4),
        "success_by_seed": [round(played.success, 4) for played in runs],
    }


def comparison(without: Sequence[Played], failing: Sequence[Played]) -> dict[str, object]:
    """Within noise: the means of the curves' ends differ by no more than two standard errors of their difference, as
    the seeds' spreads give it. One seed has no spread, and then there is no verdict."""
    difference = fmean(map(end, failing)) - fmean(map(end, without))
    result: dict[str, object] = {"difference": round(difference, 4), "noise": None, "within_noise": None}
    if len(without) > 1:
        noise = 2 * sum(stdev(map(end, runs)) ** 2 / len(runs) for runs in (without, failing)) ** 0.5
        result |= {"noise": round(noise, 4), "within_noise": abs(difference) <= noise}
    return result


def end(played: Played) -> float:
    """The mean of the last steps' rewards."""
    return fmean(played.rewards[-max(1, round(LAST * len(played.rewards))) :])


def draw(without: Sequence[Played], failing: Sequence[Played], path: Path) -> None:
    """Both learning curves: the mean over the seeds, and from the lowest to the highest of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 11, "axes.edgecolor": PALE, "text.color": INK, "axes.labelcolor": INK})
    figure, axes = pyplot.subplots(figsize=(9, 4.2), dpi=120, layout="constrained")
    share = fmean(played.account.failed_share for played in failing)
    for runs, color, label in (
        (without, ACCENT, "no episode fails"),
        (failing, SECOND, f"{share:.0%} of the episodes fail"),
    ):
        curves = list(zip(*(smooth(played.rewards) for played in runs), strict=True))
        steps = range(1, len(curves) + 1)
        axes.fill_between(steps, list(map(min, curves)), list(map(max, curves)), color=color, alpha=0.18, linewidth=0)
        axes.plot(steps, list(map(fmean, curves)), color=color, linewidth=2.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("reward of the batch")
    axes.margins(x=0.02)
    axes.grid(axis="y", color=PALE, alpha=0.5, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path)
    pyplot.close(figure)
