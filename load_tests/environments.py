"""What a step costs wherever the environment runs, beside OpenEnv's WebSocket; and 10,000 sleeping episodes.

    .venv/bin/python load_tests/environments.py
    .venv/bin/python load_tests/environments.py --rounds 1 --skip openenv

The last line on stdout is one JSON object; a table and the progress go to stderr. The same environment, which answers
every action with the same text, is played in env_manager's process, on an environment server, by a worker that dialled
in, in a process that env_manager starts, and on OpenEnv's server by OpenEnv's client; each client and each server is a
process. They take turns, and stay connected from round to round. Then one env_manager between real services plays
episodes that sleep, and again with the episodes on an environment server. Figures are medians over the rounds; ratios
are within a round.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.buffering.report import Figures, table
from load_tests.buffering.servers import ROOT
from load_tests.stepping import openenv, report
from load_tests.stepping.flow import Flow, Order
from load_tests.stepping.holding import GROUP_SIZE, hold
from rollfarm.ports import free_port

PARTS = ("openenv", "steps", "held")

HELD_EPISODES = 10_000


def main() -> NoReturn:
    options = parse(sys.argv[1:])
    figures: Figures = {
        "benchmark": "environments",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "rounds": options.rounds,
        "sessions": options.sessions,
    }
    if "steps" not in options.skip:
        figures |= report.figures(measure(options))
    if "held" not in options.skip:
        figures |= held(HELD_EPISODES // 100 // GROUP_SIZE * GROUP_SIZE if options.quick else HELD_EPISODES)
    print(table(figures), file=sys.stderr)
    print(json.dumps(figures))
    raise SystemExit(0)


def parse(argv: list[str]) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/environments.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="repetitions; figures are medians (%(default)s)")
    add("--sessions", type=int, default=64, help="episodes at once (%(default)s)")
    add("--seconds", type=float, default=2.0, help="duration of each measurement (%(default)g)")
    add("--quick", action="store_true", help="a hundredth of everything, to see that it works")
    add("--skip", action="append", choices=PARTS, default=[], help="leave a part out; may be repeated")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace) -> report.Measured:
    """Every transport in turn, in each round."""
    orders = report.orders(options.sessions, options.seconds / (100 if options.quick else 1))
    measured: dict[str, dict[str, list[Flow]]] = {}
    with clients("openenv" not in options.skip) as players:
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}, load average {os.getloadavg()[0]:.1f}")
            for measure, order in orders.items():
                for transport, player in players.items():
                    if (transport, measure) != ("process", "threads"):
                        flow = player.play(order)
                        measured.setdefault(transport, {}).setdefault(measure, []).append(flow)
                        say(f"  {measure:<9} {transport:<16} {report.line(flow)}")
    return measured


class Client:
    """A process that plays what it is told."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._read()

    def play(self, order: Order) -> Flow:
        assert self._process.stdin is not None
        print(json.dumps(asdict(order)), file=self._process.stdin, flush=True)
        return Flow(**json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line == "ready\n" or line.startswith("{"):
                return line
        raise SystemExit(f"A client ended with status {self._process.wait()}: {self._process.args}")


@contextmanager
def clients(with_openenv: bool) -> Iterator[dict[str, Client]]:
    """Every client, with what it plays on, until the block ends."""
    module = "load_tests.stepping"
    commands = {
        transport: [sys.executable, "-m", f"{module}.client", transport]
        for transport in ("in_process", "grpc", "attached", "process")
    }
    if with_openenv:
        try:
            python = openenv.install()
        except openenv.NotInstalled as failure:
            say(f"OpenEnv does not install here: {failure}")
        else:
            for name, kind in {"openenv": "fast", "openenv_default": "default"}.items():
                ports = [str(free_port()) for _ in range(2)]
                commands[name] = [python, "-m", f"{module}.openenv_client", kind, *ports]
    with ExitStack() as stack:
        yield {name: stack.enter_context(client(command)) for name, command in commands.items()}


@contextmanager
def client(command: list[str]) -> Iterator[Client]:
    """A client until the block ends, and its server with it."""
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield Client(process)
        assert process.stdin is not None
        process.stdin.close()


def held(episodes: int) -> Figures:
    """The sleeping episodes, in env_manager and on a server."""
    made = []
    for on_server in (False, True):
        with tempfile.TemporaryDirectory(prefix="rf-held-") as folder:
            one = hold(Path(folder), episodes, on_server=on_server)
        say(
            f"{episodes:,} episodes asleep {'on a server' if on_server else 'in env_manager'}: {one.mb:,.0f} MB there, "
            f"{one.server_mb:,.0f} MB in the server, the loop {one.gap_ms:.0f} ms late at most, "
            f"{one.handed_in:,} handed in"
        )
        made.append(one)
    return report.held_figures(*made)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
