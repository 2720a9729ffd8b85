"""Figures from what was played, as one JSON object and as a table for people."""

from collections.abc import Mapping

from load_tests.straggling.farm import Played
from load_tests.straggling.plan import Case

Ways = Mapping[str, Played]
"""By the name of the way."""

HEADLINE = "normal_10_10"


def figures(cases: Mapping[str, tuple[Case, Ways]]) -> dict[str, object]:
    """Of every case that was played; the first figures are those of HEADLINE, where that is one of them."""
    of_cases = {name: case_figures(case, ways) for name, (case, ways) in cases.items()}
    headline = of_cases.get(HEADLINE) or next(iter(of_cases.values()))
    return {
        "env_level_speedup": headline["env_level_speedup"],
        "env_level_speedup_vs_ideal_batch": headline["env_level_speedup_vs_ideal_batch"],
        "redundant_speedup": headline["redundant_speedup"],
        "dropped_share": headline["dropped_share"],
        "wedged": sum(played.wedged for _, ways in cases.values() for played in ways.values()),
        "cancel_max_s": round(max(played.cancel_seconds for _, ways in cases.values() for played in ways.values()), 2),
        "cases": of_cases,
    }


def case_figures(case: Case, ways: Ways) -> dict[str, object]:
    """Of one case: how long each way took, and what that is against the others."""
    ideal = {name: way.ideal_seconds() for name, way in case.ways().items()}
    return {
        "environments": case.environments,
        "turns": case.turns,
        "scale": case.scale,
        "env_level_speedup": ratio(ways["batch"], ways["env"]),
        "env_level_speedup_vs_ideal_batch": round(ideal["batch"] / ways["env"].seconds, 2),
        "redundant_speedup": ratio(ways["env"], ways["env_redundant"]),
        "batch_redundant_speedup": ratio(ways["batch"], ways["batch_redundant"]),
        "dropped_share": round(ways["env_redundant"].dropped_share, 3),
        "batch_dropped_share": round(ways["batch_redundant"].dropped_share, 3),
        "ideal_env_level_speedup": round(ideal["batch"] / ideal["env"], 2),
        "ideal_redundant_speedup": round(ideal["env"] / ideal["env_redundant"], 2),
        "seconds": {name: round(played.seconds, 2) for name, played in ways.items()},
        "ideal_seconds": {name: round(seconds, 2) for name, seconds in ideal.items()},
        "cpu_ms_per_turn": round(1000 * ways["env"].cpu_seconds / (ways["env"].begun * case.turns), 2),
        "failed": {name: played.failed for name, played in ways.items()},
    }


def ratio(slow: Played, fast: Played) -> float | None:
    """How much faster the second was; None where one of them did not come to its end."""
    return None if slow.wedged or fast.wedged else round(slow.seconds / fast.seconds, 2)


def line(name: str, played: Played, ideal_seconds: float) -> str:
    """One run, for people."""
    return (
        f"  {name:<16} {played.seconds:7.2f} s  ideal {ideal_seconds:6.2f} s  dropped {played.dropped_share:6.1%}  "
        f"cut {played.failed:3}  cancelled in {played.cancel_seconds:4.2f} s  CPU {played.cpu_seconds:5.1f} s"
        + ("  WEDGED" if played.wedged else "")
    )


def table(cases: Mapping[str, tuple[Case, Ways]]) -> str:
    """The speed-ups, with what was paid for them."""
    rows = [f"{'latency':<14}{'environment-level':>18}{'+ redundancy':>14}{'dropped':>9}"]
    for name, (case, ways) in cases.items():
        made = case_figures(case, ways)
        rows.append(
            f"{name:<14}{made['env_level_speedup']!s:>17}x{made['redundant_speedup']!s:>13}x"
            f"{ways['env_redundant'].dropped_share:>9.1%}"
        )
    return "\n".join(rows)
