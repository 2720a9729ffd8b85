"""What failing episodes cost: the demo's learning curve with 30 % injected failures, against the one without.

    .venv/bin/python load_tests/failures.py
    .venv/bin/python load_tests/failures.py --quick

Plays examples/demo.toml with a small model by `rollfarm up`, for each seed twice. In one of the two runs the
environment raises, hangs or returns garbage for 22 % of the episodes, and the sandbox of a reward breaks for 8 %: it
cannot start its program, or its cell is killed or stopped. Each injection is written down with its trace as it happens,
and in the end every one is held against what the farm counted.

The last line on stdout is one JSON object; the progress goes to stderr. The exit status is 0 only if every injection
and every failure is accounted for, the environment was never suspended, and the curves are within noise of each other.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.failing import report
from load_tests.failing.farm import STEPS, FarmFailed, Played, play

QUICK_STEPS = 8
QUICK_EPISODES = 16
EPISODES = 128
"""Of a validation."""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.quick:
        options.seeds, options.steps = 1, QUICK_STEPS
    folder = Path(tempfile.mkdtemp(prefix="rf-failures-", dir=options.folder))
    began = time.monotonic()
    _say(f"playing in {folder}")
    try:
        without, failing = _play(options, folder)
    except FarmFailed as failed:
        _say(f"FAILED. {failed}")
        return 1
    result = report.figures(without, failing)
    if options.picture:
        report.draw(without, failing, options.picture)
    machine = {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}
    wall = {"steps": options.steps, "wall_s": round(time.monotonic() - began, 1)}
    print(json.dumps({"benchmark": "failures", **machine, **result, **wall}))
    for fault in [fault for played in (*without, *failing) for fault in played.account.faults][:20]:
        _say(f"unaccounted: {fault}")
    if result["unaccounted"] or result["suspensions"] or result["within_noise"] is False:
        _say(f"FAILED. The runs are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/failures.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (%(default)s)")
    parser.add_argument("--picture", type=Path, help="where the two curves are drawn (nowhere)")
    parser.add_argument(
        "--folder", type=Path, help="where the runs' folder is made, and kept on failure (the system's)"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"1 seed and {QUICK_STEPS} steps, to see that it works: nothing is learnt"
    )
    return parser


def _play(options: argparse.Namespace, folder: Path) -> tuple[list[Played], list[Played]]:
    """Each seed without failures and with them, one after the other, so that both meet the same machine."""
    without: list[Played] = []
    failing: list[Played] = []
    for seed in range(options.seeds):
        for runs, fails in ((without, False), (failing, True)):
            played = play(
                folder,
                seed=seed,
                failing=fails,
                steps=options.steps,
                validation_episodes=QUICK_EPISODES if options.quick else EPISODES,
            )
            runs.append(played)
            _say(
                f"seed {seed} {'with   ' if fails else 'without'}: {played.wall_seconds:5.1f} s, reward "
                f"{report.end(played):.3f}, success {played.success:.2f}, failed {played.account.failed_share:.1%}, "
                f"unaccounted {len(played.account.faults)}"
            )
    return without, failing


def _say(text: str) -> None:
    print(f"failures.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
