"""How fast weights reach engines, and how long an engine stands still for them.

    .venv/bin/python load_tests/weights.py
    .venv/bin/python load_tests/weights.py --sizes 3M 100M --rounds 3 --skip vllm

For each size: the trainer's own snapshots, publisher and transports, a real llm_proxy and a real engine host with the
embedded engine, each a process; full versions by gloo, ipc and store, then what a LoRA-sized change moves. Beside each
round a raw broadcast of the same bytes. Then engines are killed in the middle of a transfer; and the smallest model
goes to a real vLLM on CPU where there is one.

The last line on stdout is one JSON object; a table and the progress go to stderr. Ratios are of one round each, and
figures are their medians. load_tests/README.md says what they mean.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import structlog
import torch
from torch import Tensor

from load_tests.engine_bench.servers import VLLM_PYTHON, Server, engine, llm_proxy
from load_tests.weighing import models
from load_tests.weighing.publishing import TRANSFER_SECONDS, Published, Trainer, cpu_seconds
from load_tests.weighing.raw import HOST, Raw, raw
from rollfarm import rpc
from rollfarm.v1 import llm_proxy_pb2_grpc
from trainer.weights.groups import Links
from trainer.weights.memory import arena_for
from trainer.weights.shared import SharedMemory
from trainer.weights.snapshot import Snapshots
from trainer.weights.store import Store
from trainer.weights.transport import Transport

TRANSPORTS = ("gloo", "ipc", "store")
BUCKET_BYTES = 16 * 1024 * 1024
"""As trainer.bucket_size_mb has it."""

WARM_UPS = 2
"""Versions that are not counted: memory is used again from the third on."""

KILLED_AFTER = 0.3
"""Of the usual time of a transfer."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """One size, ready to be published."""

    size: models.Size
    weights: Mapping[str, Tensor]
    folder: Path

    @property
    def flags(self) -> dict[str, str]:
        return {
            "model.path": str(self.folder / "model"),
            "model.dtype": self.size.dtype,
            "engine.device": "cpu",
            "engine.kv_cache": "64M",
            "engine.slots": "4",
        }

    def trainer(self, proxy: Any, name: str, *hosts: Server, deltas: bool = False) -> Trainer:
        transports: dict[str, Transport] = {
            "gloo": Links(host=HOST, port=0, timeout_seconds=TRANSFER_SECONDS),
            "ipc": SharedMemory(),
            "store": Store(self.folder / f"store-{deltas}", deltas=deltas),
        }
        dtype = getattr(torch, self.size.dtype)
        snapshots = Snapshots(dtype=dtype, bucket_size_bytes=BUCKET_BYTES, make_arena=arena_for(name))
        return Trainer(proxy, transports[name], snapshots, [host.pid for host in hosts])


def main() -> None:
    options = _parse(sys.argv[1:])
    with contextlib.redirect_stdout(sys.stderr):  # libraries say that they find no GPU
        figures = _measure(options)
    print("\n".join(f"{key:<26}{value}" for key, value in figures.items()), file=sys.stderr)
    print(json.dumps(figures))


def _measure(options: argparse.Namespace) -> Figures:
    torch.set_num_threads(1)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    figures: Figures = {
        "benchmark": "weights",
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "rounds": options.rounds,
        "full_vs_raw": {},
        "pause_s": {},
        "delta_bytes_share": {},
    }
    for name in options.sizes:
        with tempfile.TemporaryDirectory(prefix="rf-weights-", dir=options.folder) as folder:
            _say(f"{name}: making the model")
            size = models.SIZES[name]
            bench = Bench(size, models.make(size, Path(folder) / "model"), Path(folder))
            measured = _size(bench, options)
            for key, value in measured.items():
                figures.setdefault(key, {})[name] = value
    figures["delays_nobody"] = all(each["others_served"] for each in _values(figures.get("dead_engine", {})))
    return figures


def _values(by_size: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    return [each for by_transport in by_size.values() for each in by_transport.values()]


def _parse(argv: list[str]) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/weights.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--sizes", nargs="+", choices=list(models.SIZES), default=list(models.SIZES), help="(all)")
    add("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS), help="(all)")
    add("--rounds", type=int, default=5, help="versions of each kind that are counted (%(default)s)")
    add("--folder", type=Path, default=Path("/dev/shm"), help="models and stored weights lie there (%(default)s)")
    add("--skip", action="append", choices=("dead", "vllm"), default=[], help="leave a part out; may be repeated")
    return parser.parse_args(argv)


def _size(bench: Bench, options: argparse.Namespace) -> Figures:
    with ExitStack() as stack:
        host = stack.enter_context(engine(bench.folder, "engine", bench.flags))
        proxy = stack.enter_context(llm_proxy(bench.folder, "proxy", [host], {}))
        yardstick = stack.enter_context(raw(models.size_bytes(bench.weights), BUCKET_BYTES))
        figures = asyncio.run(_full_and_delta(bench, [host, proxy], yardstick, options))
    if "dead" not in options.skip:
        figures["dead_engine"] = {name: _dead(bench, name, options.rounds) for name in options.transports}
    if "vllm" not in options.skip and bench.size.name == "3M" and VLLM_PYTHON.is_file():
        figures["vllm"] = _vllm(bench, options.rounds)
    return figures


# full versions, and what changes


Round = tuple[Published, float, float]
"""A version, and the seconds and the CPU time of the raw broadcast before it."""


async def _full_and_delta(
    bench: Bench, servers: Sequence[Server], yardstick: Raw, options: argparse.Namespace
) -> Figures:
    Trainer.version = 0
    rounds: int = options.rounds
    figures: Figures = {"bytes": models.size_bytes(bench.weights)}
    async with rpc.channel(servers[-1].address) as channel:
        stub = llm_proxy_pb2_grpc.LlmProxyServiceStub(channel)
        runs = {name: await _full(bench, stub, name, servers, yardstick, rounds) for name in options.transports}
        figures |= _of_full(runs, figures["bytes"])
        figures["delta_bytes_share"], figures["delta_publish_s"] = await _delta(bench, stub, rounds)
        figures["adapter_bytes_share"], figures["adapter_publish_s"] = await _adapter(bench, stub, rounds)
    return figures


async def _full(
    bench: Bench, stub: Any, name: str, servers: Sequence[Server], yardstick: Raw, rounds: int
) -> list[Round]:
    """One transport after the other: each keeps memory at both ends."""
    trainer = bench.trainer(stub, name, *servers)
    runs: list[Round] = []
    for number in range(WARM_UPS + rounds):
        alone = _alone(yardstick)
        runs.append((await trainer.publish(bench.weights), *alone))
        took = f"{name} {runs[-1][0].transfer_s:.3f} s, raw {alone[0]:.3f} s"
        _say(f"{bench.size.name}: version {number + 1} of {WARM_UPS + rounds}: {took}")
    return runs[WARM_UPS:]


def _alone(yardstick: Raw) -> tuple[float, float]:
    before = cpu_seconds([os.getpid(), yardstick.pid])
    return yardstick.seconds(), cpu_seconds([os.getpid(), yardstick.pid]) - before


def _of_full(runs: Mapping[str, Sequence[Round]], size_bytes: int) -> Figures:
    def medians(pick: Callable[[Published, float, float], float]) -> dict[str, float]:
        return {name: round(median(pick(*each) for each in rounds), 4) for name, rounds in runs.items()}

    gigabytes = size_bytes / 1e9
    every = [each for rounds in runs.values() for each in rounds]
    fastest = min(alone for _, alone, _ in every)
    return {
        "full_vs_raw": medians(lambda done, alone, _: alone / done.transfer_s),
        "best_vs_raw": {
            name: round(fastest / min(done.transfer_s for done, _, _ in rounds), 4) for name, rounds in runs.items()
        },
        "gb_per_s": medians(lambda done, *_: gigabytes / done.transfer_s),
        "raw_gb_per_s": round(median(gigabytes / alone for _, alone, _ in every), 3),
        "cpu_s_per_gb": medians(lambda done, *_: done.cpu_s / gigabytes),
        "raw_cpu_s_per_gb": round(median(cpu / gigabytes for _, _, cpu in every), 3),
        "take_s": medians(lambda done, *_: done.take_s),
        "publish_s": medians(lambda done, *_: done.publish_s),
        "pause_s": medians(lambda done, *_: done.pause_s),
    }


async def _delta(bench: Bench, stub: Any, rounds: int) -> tuple[float, float]:
    """Whole tensors change that have together as many bytes as an adapter."""
    trainer = bench.trainer(stub, "store", deltas=True)
    budget = models.size_bytes(models.adapter(bench.weights).tensors)
    await trainer.publish(bench.weights)
    done: list[Published] = []
    for _ in range(rounds):
        assert models.change_as_much(bench.weights, budget)
        done.append(await trainer.publish(bench.weights))
    return _share_and_seconds(bench, done)


async def _adapter(bench: Bench, stub: Any, rounds: int) -> tuple[float, float]:
    """The adapter alone; the engine merges it into the base model."""
    trainer = bench.trainer(stub, "store")
    done = [await trainer.publish(bench.weights, adapter=models.adapter(bench.weights)) for _ in range(rounds)]
    return _share_and_seconds(bench, done)


def _share_and_seconds(bench: Bench, done: Sequence[Published]) -> tuple[float, float]:
    share = median(each.moved_bytes for each in done) / models.size_bytes(bench.weights)
    return round(share, 5), round(median(each.publish_s for each in done), 4)


# an engine that dies


def _dead(bench: Bench, name: str, rounds: int) -> Figures:
    """Two engines; one is killed when part of a version has come."""
    _say(f"{bench.size.name}: kill -9 in the middle of a transfer by {name}")
    with ExitStack() as stack:
        hosts = [stack.enter_context(engine(bench.folder, f"{name}-{n}", bench.flags)) for n in range(2)]
        proxy = stack.enter_context(llm_proxy(bench.folder, f"proxy-{name}", hosts, {}))
        return asyncio.run(_dead_engine(bench, name, proxy, hosts[1], rounds))


async def _dead_engine(bench: Bench, name: str, proxy: Server, victim: Server, rounds: int) -> Figures:
    Trainer.version = 0
    async with rpc.channel(proxy.address) as channel:
        trainer = bench.trainer(llm_proxy_pb2_grpc.LlmProxyServiceStub(channel), name)
        usual = [await trainer.publish(bench.weights) for _ in range(WARM_UPS + rounds)][WARM_UPS:]
        usual_s = median(each.publish_s for each in usual)
        loop, kill = asyncio.get_running_loop(), partial(os.kill, victim.pid, signal.SIGKILL)
        wait = KILLED_AFTER * median(each.transfer_s for each in usual)
        struck = await trainer.publish(bench.weights, meanwhile=lambda: loop.call_later(wait, kill))
        after = await trainer.publish(bench.weights)
    return {
        "usual_s": round(usual_s, 3),
        "struck_s": round(struck.publish_s, 3),
        "delay_s": round(struck.publish_s - usual_s, 3),
        "others_served": struck.engines == 1 and after.engines == 1,
    }


# a real vLLM


def _vllm(bench: Bench, rounds: int) -> Figures:
    _say(f"{bench.size.name}: vLLM starts")
    flags = bench.flags | {
        "engine.adapter": "vllm",
        "engine.vllm.python": str(VLLM_PYTHON),
        "engine.vllm.start_seconds": "500",
    }
    with ExitStack() as stack:
        host = stack.enter_context(engine(bench.folder, "vllm", flags))
        proxy = stack.enter_context(llm_proxy(bench.folder, "proxy-vllm", [host], {}))
        return asyncio.run(_pauses(bench, proxy, rounds))


async def _pauses(bench: Bench, proxy: Server, rounds: int) -> Figures:
    Trainer.version = 0
    figures: Figures = {}
    async with rpc.channel(proxy.address) as channel:
        stub = llm_proxy_pb2_grpc.LlmProxyServiceStub(channel)
        for name in TRANSPORTS:
            trainer = bench.trainer(stub, name)
            done = [await trainer.publish(bench.weights) for _ in range(WARM_UPS + rounds)][WARM_UPS:]
            figures[name] = {
                "publish_s": round(median(each.publish_s for each in done), 3),
                "pause_s": round(median(each.pause_s for each in done), 3),
            }
    return figures


def _say(line: str) -> None:
    print(f"weights.py: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
