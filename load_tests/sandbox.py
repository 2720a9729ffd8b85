"""How fast the sandbox runs programs, and whether any of them breaks out, at each level that works on this machine.

    .venv/bin/python load_tests/sandbox.py
    .venv/bin/python load_tests/sandbox.py --runs 50 --levels landlock

The last line on stdout is one JSON object; the progress goes to stderr.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.escapes import ESCAPES
from load_tests.escapes.host import Host
from rollfarm.sandbox import PYTHON, Limits, Program, Sandbox, SandboxConfig
from rollfarm.sandbox.levels import LEVELS, Missing, choose

Figures = dict[str, float | int]

TRIVIAL = Program({"main.py": "print(sum(map(int, input().split())))"}, [PYTHON, "main.py"], "20 22")
AMPLE = Limits(seconds=60.0)


def main() -> None:
    options = read_options(sys.argv[1:])
    levels: dict[str, Figures | str] = {}
    for level in options.levels:
        config = SandboxConfig(level=level, workers=options.workers)
        try:
            choose(config)
        except Missing as missing:
            say(f"{level} is left out: {missing}")
            levels[level] = str(missing)
        else:
            levels[level] = asyncio.run(measure(config, options))
            say(f"{level}: {levels[level]}")
    best = next(((level, found) for level, found in levels.items() if isinstance(found, dict)), ("refused", {}))
    print(json.dumps({**machine(), "level": best[0], **best[1], "levels": levels}))


def read_options(argv: list[str]) -> argparse.Namespace:
    """Flags, with their defaults."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/sandbox.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--runs", type=int, default=200, help="of each measurement (%(default)s)")
    add("--workers", type=int, default=4, help="programs at once, when runs a second are measured (%(default)s)")
    add("--levels", nargs="+", choices=list(LEVELS), default=list(LEVELS), help="which to measure")
    return parser.parse_args(argv)


def machine() -> Mapping[str, object]:
    """What it ran on."""
    return {
        "benchmark": "sandbox",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "root": os.getuid() == 0,
    }


async def measure(config: SandboxConfig, options: argparse.Namespace) -> Figures:
    """One level: latency of one run after the other, rate of several at once, then the suite."""
    sandbox = Sandbox(config)
    try:
        await warm(sandbox)
        taken = sorted([await timed(sandbox) for _ in range(options.runs)])
        plain = [plainly() for _ in range(10)]
        await warm(sandbox)
        began, before = time.perf_counter(), _cpu_seconds()
        await asyncio.gather(*[timed(sandbox) for _ in range(options.runs)])
        seconds = time.perf_counter() - began
        sandbox.close()
        cpu = (_cpu_seconds() - before) / options.runs
        with Host() as host:
            outcomes = await host.attempt_all(ESCAPES, sandbox)
            escaped = [escape.name for escape in ESCAPES if outcomes[escape.name].escaped_from(escape)]
            for trouble in [*escaped, *host.harm()]:
                say(f"  ESCAPED: {trouble}")
            return {
                "p50_ms": round(1000 * statistics.median(taken), 1),
                "plain_ms": round(1000 * statistics.median(plain), 1),
                "p99_ms": round(1000 * taken[int(0.99 * len(taken))], 1),
                "runs_per_s": round(options.runs / seconds, 1),
                "cpu_ms": round(1000 * cpu, 1),
                "programs": len(ESCAPES),
                "escaped": len(escaped) + len(host.harm()),
            }
    finally:
        sandbox.close()


async def warm(sandbox: Sandbox) -> None:
    """Have its cells started."""
    await asyncio.gather(*[timed(sandbox) for _ in range(8)])
    await asyncio.sleep(1.0)


async def timed(sandbox: Sandbox) -> float:
    """Seconds from handing the program in to having its output."""
    began = time.perf_counter()
    finished = await sandbox.run(TRIVIAL, AMPLE)
    if finished.stdout != "42\n":
        raise SystemExit(f"The sandbox does not work: {finished}")
    return time.perf_counter() - began


def plainly() -> float:
    """The same with a Python of its own and nothing around it."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in TRIVIAL.files.items():
            (Path(folder) / name).write_text(str(text))
        began = time.perf_counter()
        subprocess.run([sys.executable, "-I", "main.py"], cwd=folder, input=b"20 22", check=True, capture_output=True)
        return time.perf_counter() - began


def _cpu_seconds() -> float:
    """Of this process and of children that ended, of which the keeper is one once its sandbox is closed."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
