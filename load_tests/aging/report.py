"""Figures and the picture of what staleness costs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from load_tests.aging.farm import Aged
from rollfarm.up.report import ACCENT, INK, PALE, SECOND

Runs = Mapping[float, Sequence[Aged]]
"""By alpha, one for each seed."""

BOUND_ALPHA = 2.0
"""Up to here a corrected run shall be as good as a synchronous one."""


def figures(corrected: Runs, uncorrected: Runs) -> dict[str, object]:
    """How each alpha ended, and whether the corrected ones up to BOUND_ALPHA are within noise of alpha 0."""
    bound = {alpha: runs for alpha, runs in corrected.items() if 0 < alpha <= BOUND_ALPHA}
    return {
        "with_correction": {f"{alpha:g}": _ends(runs) for alpha, runs in corrected.items()},
        "without_correction": {f"{alpha:g}": _ends(runs) for alpha, runs in uncorrected.items()},
        "against_alpha_0": {f"{alpha:g}": compared(corrected[0.0], runs) for alpha, runs in bound.items()},
    }


def compared(fresh: Sequence[Aged], stale: Sequence[Aged]) -> dict[str, object]:
    """No worse within noise: the mean is lower by no more than two standard errors of the difference."""
    difference = fmean(run.end for run in stale) - fmean(run.end for run in fresh)
    if len(fresh) < 2:
        return {"difference": round(difference, 4), "noise": None, "within_noise": None}
    noise = 2 * sum(stdev(run.end for run in runs) ** 2 / len(runs) for runs in (fresh, stale)) ** 0.5
    return {"difference": round(difference, 4), "noise": round(noise, 4), "within_noise": difference >= -noise}


def draw(corrected: Runs, uncorrected: Runs, path: Path) -> None:
    """The end of the curves over alpha: the mean over the seeds, and each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 11, "axes.edgecolor": PALE, "text.color": INK, "axes.labelcolor": INK})
    figure, axes = pyplot.subplots(figsize=(9, 4.2), dpi=120, layout="constrained")
    for runs, color, label in (
        (corrected, ACCENT, "ratios to the policy that sampled (the default)"),
        (uncorrected, SECOND, "no correction"),
    ):
        places = range(len(runs))
        axes.plot(
            places,
            [fmean(run.end for run in each) for each in runs.values()],
            color=color,
            linewidth=2.2,
            marker="o",
            label=label,
        )
        for place, each in zip(places, runs.values(), strict=True):
            axes.scatter([place] * len(each), [run.end for run in each], color=color, alpha=0.45, s=18)
    axes.set_xticks(range(len(corrected)), [_tick(alpha, runs) for alpha, runs in corrected.items()])
    axes.set_xlabel("alpha (mean lag in versions)")
    axes.set_ylabel("reward at the end")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=PALE, alpha=0.5, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(path)
    pyplot.close(figure)


def _tick(alpha: float, runs: Sequence[Aged]) -> str:
    return f"{alpha:g} ({fmean(run.staleness for run in runs):.1f})"


def _ends(runs: Sequence[Aged]) -> dict[str, object]:
    return {
        "mean": round(fmean(run.end for run in runs), 4),
        "by_seed": [round(run.end, 4) for run in runs],
        "staleness": round(fmean(run.staleness for run in runs), 2),
        "run_s": [round(run.seconds, 1) for run in runs],
    }
