"""What llm_proxy costs: latency, CPU time and memory of a request, against the engine alone and other routers.

    .venv/bin/python load_tests/proxy.py
    .venv/bin/python load_tests/proxy.py --rounds 1 --skip peers

The last line on stdout is one JSON object; a table and the progress go to stderr. Everything runs on this machine:
engines that are none and answer at once or after exactly one second, clients in a process of their own, and whoever
stands between them. Figures are medians over the rounds; what llm_proxy adds is against the engine in the same round.
"""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.buffering.report import Figures, table
from load_tests.proxying import agents, clients, payload, peers, report, servers
from load_tests.proxying.clients import Target
from load_tests.proxying.flow import Flow
from load_tests.proxying.http_clients import HttpTarget, http
from load_tests.proxying.patterns import Closed, Held, Paced, Pattern
from load_tests.proxying.servers import Engine
from load_tests.proxying.system import Ask, Plan, System
from load_tests.proxying.wire import request
from rollfarm.ports import free_port

PARTS = ("peers", "unary", "http", "held")

SPARE_FILES = 500
"""Open files of a process besides the connections under load."""


def main() -> NoReturn:
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="rf-proxy-") as name:
        figures = measure(options, Path(name))
    print(table(figures), file=sys.stderr)
    print(json.dumps(figures))
    raise SystemExit(0)


def parse(argv: list[str]) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/proxy.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="repetitions; figures are medians (%(default)s)")
    add("--in-flight", type=int, default=64, help="requests in flight when latency is measured (%(default)s)")
    add("--rate", type=float, default=500.0, help="requests a second offered to the instant engine (%(default)g)")
    add("--seconds", type=float, default=8.0, help="duration of each measurement of latency (%(default)g)")
    add("--quick", action="store_true", help="a hundredth of everything, to see that it works")
    add("--skip", action="append", choices=PARTS, default=[], help="leave a part out; may be repeated")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, folder: Path) -> Figures:
    """Every system in turn, in each round."""
    files = allow_files()
    figures: Figures = {
        "benchmark": "proxy",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "rounds": options.rounds,
        "in_flight": options.in_flight,
        "offered_per_s": options.rate,
        "prompt_tokens": payload.PROMPT_TOKENS,
        "tokens": payload.TOKENS,
    }
    with opened(options, folder, files) as bench:
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}, load average {os.getloadavg()[0]:.1f}")
            bench.round()
    return figures | report.figures(bench.measured, [peer.name for peer in peers.PEERS])


def allow_files() -> int:
    """Let this process and its children open as many files as they may; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@contextmanager
def opened(options: argparse.Namespace, folder: Path, files: int) -> Iterator["Bench"]:
    """The engines and the client process, until the block ends."""
    with ExitStack() as stack:
        engines = {
            (protocol, seconds): stack.enter_context(servers.engine(folder, protocol, seconds))
            for protocol in ("grpc", "http")
            for seconds in (0.0, report.ENGINE_SECONDS)
        }
        spawn = multiprocessing.get_context("spawn")
        client = stack.enter_context(ProcessPoolExecutor(1, mp_context=spawn, initializer=gc.disable))
        yield Bench(options, folder, files, engines, client)


@dataclass
class Bench:
    """The engines, the client process, and what was measured so far."""

    options: argparse.Namespace
    folder: Path
    files: int
    """That a process may have open."""

    engines: dict[tuple[str, float], Engine]
    """By protocol and seconds."""

    client: ProcessPoolExecutor
    measured: dict[str, dict[str, list[Flow]]] = field(default_factory=dict[str, dict[str, list[Flow]]])
    """By system and measure, one flow for each round."""

    def round(self) -> None:
        """Every system once. A peer that does not run here is left out, and said so."""
        for system in self._systems():
            try:
                for seconds, plan in system.plans.items():
                    self._run(system, self.engines[system.protocol, seconds], plan)
            except peers.PeerFailed as failure:
                say(f"  {system.name} does not run here: {failure}")

    def _run(self, system: System, engine: Engine, plan: Plan) -> None:
        in_flight = self.options.in_flight
        with system.start(engine) as ask:
            self.client.submit(ask, Closed(in_flight, in_flight)).result()
            for name, pattern in plan.items():
                flow: Flow = self.client.submit(ask, pattern).result()
                self.measured.setdefault(system.name, {}).setdefault(name, []).append(flow)
                say(f"  {system.name} {name}: {report.line(flow)}")

    def _systems(self) -> Iterator[System]:
        skip = self.options.skip
        stream = {0.0: self._instant(20_000), 1.0: self._slow(1)}
        single = {0.0: self._instant(5000)}
        closed = single[0.0]["closed"]
        yield System("direct", "grpc", partial(direct_grpc, clients.stream), stream)
        yield System("llm_proxy", "grpc", partial(llm_proxy, self.folder, clients.stream), stream)
        yield System("relay", "grpc", partial(relay, self.folder), {1.0: {"open": stream[1.0]["open"]}})
        if "unary" not in skip:
            yield System("unary_floor", "grpc", partial(direct_grpc, clients.unary), {0.0: {"closed": closed}})
            yield System("unary", "grpc", partial(llm_proxy, self.folder, clients.unary), single)
        if "http" not in skip:
            yield System("http", "grpc", partial(front_door, self.folder, closed.requests), {0.0: {"closed": closed}})
        if "peers" not in skip:
            yield System("direct_http", "http", direct_http, {**single, 1.0: self._slow(1)})
            for peer in peers.PEERS:
                yield System(
                    peer.name, "http", partial(peers.router, peer, self.folder), {**single, 1.0: self._slow(2)}
                )

    def _instant(self, requests: int) -> Plan:
        """What is measured on the engine that answers at once."""
        options = self.options
        return {
            "closed": Closed(max(options.in_flight, self._scaled(requests)), options.in_flight),
            "paced": Paced(self._scaled(options.seconds * options.rate), options.rate),
        }

    def _slow(self, connections: int) -> Plan:
        """What is measured on the engine that takes a second; a request costs so many open files at most."""
        in_flight = self.options.in_flight
        plan: dict[str, Pattern] = {"open": Paced(self._scaled(self.options.seconds * in_flight), in_flight)}
        for count in () if "held" in self.options.skip else report.HELD:
            if connections * self._scaled(count) + SPARE_FILES < self.files:
                plan[f"held_{count}"] = Held(self._scaled(count))
        return plan

    def _scaled(self, requests: float) -> int:
        return round(requests / (100 if self.options.quick else 1))


@contextmanager
def direct_grpc(ask: Callable[..., Flow], engine: Engine) -> Iterator[Ask]:
    """The engine alone, asked as llm_proxy asks it or as llm_proxy is asked."""
    yield partial(ask, Target(engine.port, engine.pid, direct=True))


@contextmanager
def direct_http(engine: Engine) -> Iterator[Ask]:
    """The engine alone, asked as a router asks it."""
    yield partial(
        http, HttpTarget(engine.port, engine.pid, (request("/generate", engine.port, payload.generate_body()),))
    )


@contextmanager
def relay(folder: Path, engine: Engine) -> Iterator[Ask]:
    """A relay that knows nothing before the engine, asked as the engine is."""
    with servers.relay(folder, engine) as proxy:
        yield partial(clients.stream, Target(proxy.port, proxy.pid, direct=True))


@contextmanager
def llm_proxy(folder: Path, ask: Callable[..., Flow], engine: Engine) -> Iterator[Ask]:
    """An llm_proxy before the engine."""
    with servers.llm_proxy(folder, engine) as proxy:
        yield partial(ask, Target(proxy.port, proxy.pid))


@contextmanager
def front_door(folder: Path, requests: int, engine: Engine) -> Iterator[Ask]:
    """An llm_proxy before the engine, asked by agents."""
    port = free_port()
    flags = ("--llm_proxy.http.enabled", "true", "--llm_proxy.http.listen.port", str(port))
    with servers.llm_proxy(folder, engine, *flags, "--model.path", str(agents.write_model(folder))) as proxy:
        asked = agents.conversations(proxy.port, port, max(1, requests // agents.TURNS))
        yield partial(http, HttpTarget(port, proxy.pid, asked))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
