"""Throughput of sample_buffer with durability on: samples in and out, latency, restart, against raw Redis and Atropos.

    .venv/bin/python load_tests/buffer.py
    .venv/bin/python load_tests/buffer.py --rounds 1 --batches 8 --skip atropos

The last line on stdout is one JSON object; a table and the progress go to stderr. Everything runs on this machine: a
Valkey and a sample_buffer as a farm starts them, and clients in processes of their own. Figures are medians over the
rounds, and ratios are of figures of the same round.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.buffering import atropos, clients, raw_redis, replay, report, servers
from load_tests.buffering.clients import Flow, Load
from load_tests.buffering.report import Figures
from load_tests.buffering.samples import Size
from rollfarm.config import ConfigError
from sample_buffer.config import SampleBufferConfig

PARTS = ("latency", "cycle", "raw_redis", "atropos", "replay")

ATROPOS_BATCHES = 8
"""Most batches that Atropos gets in a round: it takes a second for each."""


def main() -> NoReturn:
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="rf-buffer-", dir=options.folder) as name:
        try:
            figures = measure(options, Path(name))
        except ConfigError as error:
            raise SystemExit(f"load_tests/buffer.py: {error}") from None
    print(report.table(figures), file=sys.stderr)
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
    add("--calls", type=int, default=8, help="calls under way at once, as of so many env_managers (%(default)s)")
    add("--call-samples", type=int, default=128, help="most samples of one call (%(default)s)")
    add("--linger-ms", type=float, default=2.0, help="a sample waits so long for others of its call (%(default)g)")
    add("--replay-events", type=int, default=1_000_000, help="events of the journal that is read back (%(default)s)")
    add("--appendfsync", choices=("always", "everysec", "no"), default="always", help="Valkey's (%(default)s)")
    add("--skip", action="append", choices=PARTS, default=[], help="leave a part out; may be repeated")
    add("--folder", type=Path, default=None, help="for temporary files, on a disk (the system's)")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, folder: Path) -> Figures:
    """Every part in turn, in each round."""
    figures: Figures = {
        "benchmark": "buffer",
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "appendfsync": options.appendfsync,
        "filesystem": servers.filesystem(folder),
        "fsync_ms": round(servers.fsync_ms(folder), 3),
        "rounds": options.rounds,
        "samples_a_round": options.batches * options.batch_groups * options.group_size,
        "tokens": options.tokens,
        "offered_per_s": options.rate,
    }
    with opened(options, folder) as bench:
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            bench.round(number)
    figures |= report.figures(bench.flows)
    if "replay" not in options.skip:
        figures |= restarts(options, folder)
    return figures


@contextmanager
def opened(options: argparse.Namespace, folder: Path) -> Iterator["Bench"]:
    """Every server and client process, until the block ends."""
    with ExitStack() as stack:
        valkey = stack.enter_context(servers.valkey(folder, options.appendfsync))
        yield Bench(
            options,
            valkey,
            stack.enter_context(servers.buffer(folder, valkey.url)),
            None if "atropos" in options.skip else stack.enter_context(atropos.server(folder)),
            stack.enter_context(client()),
            stack.enter_context(client()),
        )


@dataclass
class Bench:
    """The servers, the client processes, and what was measured so far."""

    options: argparse.Namespace
    valkey: servers.Valkey
    buffer: servers.Buffer
    atropos: tuple[int, int] | None
    """Port and process id."""
    workers: ProcessPoolExecutor
    trainer: ProcessPoolExecutor
    flows: dict[str, list[Flow]] = field(default_factory=dict[str, list[Flow]])
    """By name, one for each round."""

    def round(self, number: int) -> None:
        """Every part once."""
        self._throughput(self._load(f"put-{number}", alpha=self.options.batches))
        if self.atropos is not None:
            self._against_atropos(*self.atropos)
        if "latency" not in self.options.skip:
            load = self._load(f"paced-{number}", alpha=self.options.batches)
            self._add("paced", self.workers.submit(clients.put, load, self.options.rate))
            self.trainer.submit(clients.take, load).result()
        if "cycle" not in self.options.skip:
            load = self._load(f"cycle-{number}", alpha=2.0)
            handed_in = self.workers.submit(clients.cycle, load)
            self._add("cycle", self.trainer.submit(clients.take, load))
            handed_in.result()

    def _throughput(self, load: Load) -> None:
        """Put everything, then take everything, then write the same straight to Valkey."""
        self._add("put", self.workers.submit(clients.put, load, float("inf")))
        self._add("take", self.trainer.submit(clients.take, load))
        if "raw_redis" not in self.options.skip:
            commit = round(load.samples / self.flows["put"][-1].commits)
            self._add("raw_redis", self.workers.submit(raw_redis.write, load, commit))

    def _against_atropos(self, port: int, pid: int) -> None:
        """Atropos with plain JSON, and compressed as its own environments send it."""
        load = make_load(self.options, "atropos", {"atropos": pid})
        load = replace(load, steps=min(load.steps, ATROPOS_BATCHES))
        self._add("atropos_put", self.workers.submit(atropos.put, load, port, False))
        self._add("atropos_take", self.trainer.submit(atropos.take, load, port))
        atropos.reset(port)
        self._add("atropos_compressed_put", self.workers.submit(atropos.put, load, port, True))
        atropos.reset(port)

    def _add(self, name: str, measured: Future[Flow]) -> None:
        flow = measured.result()
        self.flows.setdefault(name, []).append(flow)
        say(f"  {name}: {flow.per_second:,.0f} samples/s")

    def _load(self, run_id: str, alpha: float) -> Load:
        pids = {"sample_buffer": self.buffer.pid, "valkey": self.valkey.pid}
        load = make_load(self.options, run_id, pids)
        return replace(load, address=self.buffer.address, journal=self.valkey.url, alpha=alpha)


def make_load(options: argparse.Namespace, run_id: str, pids: Mapping[str, int]) -> Load:
    """A load of the chosen sizes, for no server yet."""
    return Load(
        address="",
        journal="",
        run_id=run_id,
        steps=options.batches,
        batch_groups=options.batch_groups,
        group_size=options.group_size,
        alpha=0.0,
        size=Size(tokens=options.tokens),
        calls=options.calls,
        call_samples=options.call_samples,
        linger_seconds=options.linger_ms / 1000,
        pids=pids,
    )


def client() -> ProcessPoolExecutor:
    """One client process."""
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def restarts(options: argparse.Namespace, folder: Path) -> Figures:
    """How long a restart reads a journal without a snapshot, and one with snapshots as they are set by default."""
    default: int = SampleBufferConfig.model_fields["snapshot_every_events"].default
    whole = restart(options, folder / "whole", options.replay_events, replay.NEVER)
    bounded = restart(options, folder / "bounded", min(options.replay_events, round(1.9 * default)), default)
    return {
        "replay_events": whole.events,
        "replay_s": round(whole.seconds, 2),
        "replay_s_per_million": round(whole.seconds / whole.events * 1e6, 2),
        "replay_rss_mb": round(whole.rss_mb),
        "restart_events": bounded.events,
        "restart_s": round(bounded.start_seconds, 2),
        "restart_rss_mb": round(bounded.rss_mb),
    }


def restart(options: argparse.Namespace, folder: Path, events: int, snapshot_every_events: int) -> servers.Restart:
    """Write a journal of short trajectories, then start a sample_buffer on it."""
    folder.mkdir()
    with servers.valkey(folder, options.appendfsync) as valkey:
        load = replace(make_load(options, "replay", {}), steps=10**6, batch_groups=128, size=Size(tokens=4))
        with client() as writer:
            began = time.monotonic()
            written = writer.submit(replay.write, load, valkey.url, events, snapshot_every_events).result()
            say(f"replay: {written:,} events written in {time.monotonic() - began:.1f} s; starting a sample_buffer ...")
        flags = ("--sample_buffer.snapshot_every_events", str(snapshot_every_events))
        with servers.buffer(folder, valkey.url, *flags) as buffer:
            return buffer.restart()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
