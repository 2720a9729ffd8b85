"""What slow and hanging environments cost: environment-level asynchrony against lock-step, with and without redundancy.

    .venv/bin/python load_tests/stragglers.py
    .venv/bin/python load_tests/stragglers.py --only normal_10_10

The last line on stdout is one JSON object; a table and the progress go to stderr. The services are the real ones, each
a process: sample_buffer, llm_proxy with a simulated engine, reward_gateway and env_manager. The environment sleeps, and
time is scaled; what the services take by themselves shows in the difference to the ideal. In lock-step the same
env_manager plays the same episodes, and each turn of a batch is answered when every episode of it has its answer.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.straggling import report
from load_tests.straggling.farm import Played, Services
from load_tests.straggling.plan import CASES, QUICK, Case

DEADLINE_SECONDS = 90.0
"""After which a run is given up as wedged. The longest one takes half of it."""


def main() -> NoReturn:
    options = parse(sys.argv[1:])
    chosen = [case for case in (QUICK if options.quick else CASES) if case.latency in (options.only or case.latency)]
    with tempfile.TemporaryDirectory(prefix="rf-stragglers-") as folder:
        cases = measure(chosen, Path(folder))
    print(report.table(cases), file=sys.stderr)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "load_average": round(os.getloadavg()[0], 2)}
    print(json.dumps({"benchmark": "stragglers", **machine, **report.figures(cases)}))
    raise SystemExit(0)


def parse(argv: list[str]) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/stragglers.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [case.latency for case in CASES]
    parser.add_argument("--only", action="append", choices=names, help="one latency; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a few episodes, to see that it works")
    return parser.parse_args(argv)


def measure(chosen: list[Case], folder: Path) -> dict[str, tuple[Case, report.Ways]]:
    """Every way of every case, one after the other."""
    cases: dict[str, tuple[Case, report.Ways]] = {}
    with Services(folder).running() as services:
        for case in chosen:
            say(f"{case.latency}: {case.environments} environments, {case.turns} turns, 1 s takes {case.scale:g} s")
            ways: dict[str, Played] = {}
            for in_lockstep in (True, False):
                with services.env_manager(case, in_lockstep=in_lockstep):
                    for name, way in case.ways().items():
                        if way.in_lockstep == in_lockstep:
                            ways[name] = services.play(way, f"{case.latency}-{name}", DEADLINE_SECONDS)
                            say(report.line(name, ways[name], way.ideal_seconds()))
            cases[case.latency] = (case, ways)
    return cases


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
