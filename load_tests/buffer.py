"""Throughput of sample_buffer with durability on: samples in and out, latency, restart, against raw Redis and Atropos.

    .venv/bin/python load_tests/buffer.py
    .venv/bin/python load_tests/buffer.py --rounds 1 --batches 8 --skip atropos

The last line on stdout is one JSON object; a table and the progress go to stderr. Everything runs on this machine: a
Valkey and a sample_buffer as a farm starts them, and clients in processes of their own. Figures are medians over the
rounds, and ratios are of figures of the same run.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.buffering import clients, raw_redis, servers
from load_tests.buffering.clients import Flow, Load
from load_tests.buffering.report import Figures, cpu_per_thousand, milliseconds, table
from load_tests.buffering.samples import Size
from rollfarm.config import ConfigError

PARTS = ("latency", "cycle", "raw_redis")


def main() -> NoReturn:
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="rf-buffer-", dir=options.folder) as name:
        try:
            figures = measure(options, Path(name))
        except ConfigError as error:
            raise SystemExit(f"load_tests/buffer.py: {error}") from None
    print(table(figures), file=sys.stderr)
    print(json.dumps(figures))
    raise SystemExit(0)


def parse(argv: list[str]) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/buffer.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="repetitions; figures are medians (%(default)s)")
    add("--batches", type=int, default=40, help="batches put and taken in a round (%(default)s)")
    add("--batch-groups", type=int, default=32, help="groups in a batch (%(default)s)")
    add("--group-size", type=int, default=8, help="samples in a group (%(default)s)")
    add("--tokens", type=int, default=1024, help="policy tokens of a sample (%(default)s)")
    add("--rate", type=float, default=5000.0, help="samples a second offered when latency is measured (%(default)g)")
    add("--calls", type=int, default=4, help="calls of the client under way at once (%(default)s)")
    add("--call-samples", type=int, default=128, help="most samples of one call (%(default)s)")
    add("--linger-ms", type=float, default=2.0, help="a sample waits so long for others of its call (%(default)g)")
    add("--appendfsync", choices=("always", "everysec", "no"), default="always", help="Valkey's (%(default)s)")
    add("--skip", action="append", choices=PARTS, default=[], help="leave a part out; may be repeated")
    add("--folder", type=Path, default=None, help="for temporary files, on a disk (the system's)")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, folder: Path) -> Figures:
    """Every part in turn."""
    figures: Figures = {
        "benchmark": "buffer",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "appendfsync": options.appendfsync,
        "filesystem": servers.filesystem(folder),
        "fsync_ms": round(servers.fsync_ms(folder), 3),
        "rounds": options.rounds,
        "samples_a_round": options.batches * options.batch_groups * options.group_size,
        "tokens": options.tokens,
    }
    with (
        servers.valkey(folder, options.appendfsync) as valkey,
        servers.buffer(folder, valkey.url) as buffer,
        client() as first,
        client() as second,
    ):
        bench = Bench(options, valkey, buffer, first, second)
        figures |= bench.throughput()
        if "latency" not in options.skip:
            figures |= bench.latency()
        if "cycle" not in options.skip:
            figures |= bench.cycle()
    return figures


def client() -> ProcessPoolExecutor:
    """One client process."""
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


class Bench:
    """The parts that share a Valkey and a sample_buffer."""

    def __init__(
        self,
        options: argparse.Namespace,
        valkey: servers.Valkey,
        buffer: servers.Buffer,
        first: ProcessPoolExecutor,
        second: ProcessPoolExecutor,
    ) -> None:
        self._options = options
        self._valkey = valkey
        self._buffer = buffer
        self._first = first
        self._second = second

    def _load(self, run_id: str, alpha: float) -> Load:
        options = self._options
        return Load(
            address=self._buffer.address,
            run_id=run_id,
            steps=options.batches,
            batch_groups=options.batch_groups,
            group_size=options.group_size,
            alpha=alpha,
            size=Size(tokens=options.tokens),
            calls=options.calls,
            call_samples=options.call_samples,
            linger_seconds=options.linger_ms / 1000,
            pids={"sample_buffer": self._buffer.pid, "valkey": self._valkey.pid},
        )

    def throughput(self) -> Figures:
        """Put everything, then take everything, and the raw baseline beside it, in each round."""
        puts: list[Flow] = []
        takes: list[Flow] = []
        raws: list[Flow] = []
        commits: list[float] = []
        for number in range(self._options.rounds):
            load = self._load(f"put-{number}", alpha=self._options.batches)
            before = servers.appends(self._valkey)
            puts.append(self._first.submit(clients.put, load, float("inf")).result())
            appends = servers.appends(self._valkey) - before
            commits.append(load.samples / appends)
            say(f"round {number + 1}: put {puts[-1].per_second:,.0f} samples/s")
            takes.append(self._second.submit(clients.take, load).result())
            say(f"round {number + 1}: take {takes[-1].per_second:,.0f} samples/s")
            if "raw_redis" not in self._options.skip:
                raws.append(self._first.submit(raw_redis.write, load, self._valkey.url, round(commits[-1])).result())
                say(f"round {number + 1}: raw Redis {raws[-1].per_second:,.0f} samples/s")
        put_per_s = median(flow.per_second for flow in puts)
        figures: Figures = {
            "put_per_s": round(put_per_s),
            "take_per_s": round(median(flow.per_second for flow in takes)),
            "batch_256_ms": milliseconds([flow.latencies for flow in takes], 0.5),
            "commit_samples": round(median(commits), 1),
            "put_cpu_s_per_thousand": cpu_per_thousand(puts),
            "take_cpu_s_per_thousand": cpu_per_thousand(takes),
        }
        if raws:
            raw_per_s = median(flow.per_second for flow in raws)
            figures |= {
                "raw_redis_per_s": round(raw_per_s),
                "vs_raw_redis": round(put_per_s / raw_per_s, 3),
                "raw_redis_cpu_s_per_thousand": cpu_per_thousand(raws),
            }
        return figures

    def latency(self) -> Figures:
        """Put at the offered rate."""
        flows: list[Flow] = []
        for number in range(self._options.rounds):
            load = self._load(f"paced-{number}", alpha=self._options.batches)
            flows.append(self._first.submit(clients.put, load, self._options.rate).result())
            say(f"round {number + 1}: {flows[-1].per_second:,.0f} samples/s at {self._options.rate:,.0f} offered")
            self._second.submit(clients.take, load).result()
        latencies = [flow.latencies for flow in flows]
        return {
            "offered_per_s": self._options.rate,
            "achieved_per_s": round(median(flow.per_second for flow in flows)),
            "put_p50_ms": milliseconds(latencies, 0.5),
            "put_p99_ms": milliseconds(latencies, 0.99),
            "paced_cpu_s_per_thousand": cpu_per_thousand(flows),
        }

    def cycle(self) -> Figures:
        """Put and take at once, two batches ahead."""
        takes: list[Flow] = []
        puts: list[Flow] = []
        for number in range(self._options.rounds):
            load = self._load(f"cycle-{number}", alpha=2.0)
            workers = self._first.submit(clients.cycle, load)
            takes.append(self._second.submit(clients.take, load).result())
            puts.append(workers.result())
            say(f"round {number + 1}: cycle {takes[-1].per_second:,.0f} samples/s")
        return {
            "cycle_per_s": round(median(flow.per_second for flow in takes)),
            "cycle_cpu_s_per_thousand": {
                **cpu_per_thousand(takes),
                "client": cpu_per_thousand(puts)["client"],
                "trainer": cpu_per_thousand(takes)["client"],
            },
        }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
