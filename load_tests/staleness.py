"""What stale samples cost: a small frozen lake learnt at alpha 0, 1, 2, 4 and 8, with and without correction.

    .venv/bin/python load_tests/staleness.py --picture docs/staleness.png
    .venv/bin/python load_tests/staleness.py --quick

Plays the demo on a lake of 3 x 3, with a small model, by `rollfarm up`. Corrected runs take ratios to the policy that
sampled, which is the default; the others take every sample for a fresh one.

The last line on stdout is one JSON object; progress goes to stderr. The exit status is 0 only if corrected runs of
alpha 1 and 2 end within the noise of alpha 0.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.aging import report
from load_tests.aging.farm import Aged, FarmFailed, age

ALPHAS = (0.0, 1.0, 2.0, 4.0, 8.0)
STEPS = 100
QUICK_STEPS = 6


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.quick:
        options.seeds, options.steps = 1, QUICK_STEPS
    corrected: dict[float, list[Aged]] = {alpha: [] for alpha in ALPHAS}
    uncorrected: dict[float, list[Aged]] = {alpha: [] for alpha in ALPHAS}
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="rf-staleness-"))
    try:
        for seed in range(options.seeds):
            for alpha in ALPHAS:
                for runs, is_corrected in ((corrected, True), (uncorrected, False)):
                    run = age(folder, seed=seed, alpha=alpha, corrected=is_corrected, steps=options.steps)
                    runs[alpha].append(run)
                    kind = "with   " if is_corrected else "without"
                    told = f"reward {run.end:.3f}, lag {run.staleness:.2f}, {run.seconds:.0f} s"
                    _say(f"seed {seed} alpha {alpha:g} {kind}: {told}")
    except FarmFailed as failed:
        _say(f"FAILED. {failed}")
        return 1
    result = report.figures(corrected, uncorrected)
    if options.picture:
        report.draw(corrected, uncorrected, options.picture)
    machine = {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}
    shape = {"seeds": options.seeds, "steps": options.steps, "wall_s": round(time.monotonic() - began, 1)}
    print(json.dumps({"benchmark": "staleness", **machine, **shape, **result}))
    pairs = [report.compared(corrected[0.0], corrected[alpha]) for alpha in ALPHAS if 0 < alpha <= report.BOUND_ALPHA]
    return int(any(pair["within_noise"] is False for pair in pairs))


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/staleness.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (%(default)s)")
    parser.add_argument("--picture", type=Path, help="where the plot is drawn (nowhere)")
    parser.add_argument(
        "--quick", action="store_true", help=f"1 seed and {QUICK_STEPS} steps, to see that it works: nothing is learnt"
    )
    return parser


def _say(text: str) -> None:
    print(f"staleness.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
