"""Thousands of sleeping episodes: in one real env_manager between the real services, or on an environment server.

The environment sleeps in the first step until a file tells it to wake. So every episode has had its generation, and has
its transcript, its lease and its timers.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from load_tests.buffering.servers import serving
from load_tests.straggling.farm import DOMAIN, LEASE_SECONDS, Services, Trainer
from rollfarm import rpc, times
from rollfarm.env import Action, Environment, Step, serve
from rollfarm.ports import free_port
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import sample_buffer_pb2_grpc, trajectory_pb2

GROUP_SIZE = 8
HELD_SECONDS = 15.0
"""How long they sleep together while the clocks run."""

NAP_SECONDS = 5.0
TICK_SECONDS = 0.01
REPORT_SECONDS = 0.2
RAMP_SECONDS = 300.0
"""How long it may take until all sleep, and from their waking until all are handed in."""

ENVIRONMENT_SECONDS = 3600.0


class Sleeper(Environment):
    """Sleeps until it is woken."""

    sleeping: ClassVar[int] = 0
    tickers: ClassVar[dict[str, "asyncio.Task[None]"]] = {}

    def __init__(self, *, folder: str = "") -> None:
        """Progress is reported in `folder`, and a file there called "wake" wakes everybody."""
        self._folder = folder

    async def reset(self, seed: int, index: int) -> str:
        if self._folder not in self.tickers:
            self.tickers[self._folder] = asyncio.create_task(tick(Path(self._folder)))
        return "sleep"

    async def step(self, action: Action) -> Step:
        Sleeper.sleeping += 1
        while not self.tickers[self._folder].done():  # noqa: ASYNC110
            await asyncio.sleep(random.uniform(0.5, 1) * NAP_SECONDS)
        Sleeper.sleeping -= 1
        return Step("awake", reward=1.0, done=True)


async def tick(folder: Path) -> None:
    """Report how many sleep, and the longest that the loop took to come back, until they are woken."""
    longest, told = 0.0, time.monotonic()
    while not (folder / "wake").exists():
        began = time.monotonic()
        await asyncio.sleep(TICK_SECONDS)
        longest = max(longest, time.monotonic() - began - TICK_SECONDS)
        if time.monotonic() - told > REPORT_SECONDS:
            report = folder / "report.new"
            report.write_text(json.dumps({"sleeping": Sleeper.sleeping, "longest_gap_s": longest}))
            report.rename(folder / "report")
            if (folder / "forget").exists():
                (folder / "forget").unlink()
                longest = 0.0
            told = time.monotonic()


@dataclass(frozen=True)
class Held:
    """What holding them came to."""

    episodes: int
    mb: float
    """Resident memory of env_manager, with all of them asleep."""

    empty_mb: float
    """The same before the first."""

    server_mb: float
    """The same of the environment server, with all of them asleep; 0 without one."""

    ramp_seconds: float
    """Until all slept."""

    gap_ms: float
    """Longest time that the loop on which they sleep was late, while all slept."""

    ramp_gap_ms: float
    """The same while they came, each with a lease, a reset and a generation."""

    handed_in: int
    """Of them, those that the trainer got after all were woken."""


def hold(folder: Path, episodes: int, *, on_server: bool) -> Held:
    """Hold so many episodes for a while. Raises TimeoutError when they do not come."""
    naps = folder / "naps"
    naps.mkdir()
    with ExitStack() as stack:
        services = stack.enter_context(Services(folder).running())
        environment, flags, server = f"{__name__}:Sleeper", {}, 0
        if on_server:
            address = f"127.0.0.1:{free_port()}"
            command = [sys.executable, "-m", __name__, "--port", address.rpartition(":")[2]]
            command += ["--max-sessions", str(episodes)]
            log = folder / "environment.log"
            ready = lambda: asyncio.run(rpc.is_serving(address, timeout=0.5))  # noqa: E731
            server = stack.enter_context(serving(command, log, ready))
            environment, flags = "sleeper", {"env_manager.servers": json.dumps([address])}
        flags["env_manager.environment_seconds"] = str(ENVIRONMENT_SECONDS)
        manager = stack.enter_context(services.playing(episodes, flags))
        return asyncio.run(_hold(services, naps, environment, episodes, (manager, server)))


async def _hold(services: Services, naps: Path, environment: str, episodes: int, pids: tuple[int, int]) -> Held:
    manager, server = pids
    async with rpc.channel(services.address("sample_buffer")) as channel:
        buffer = sample_buffer_pb2_grpc.SampleBufferServiceStub(channel)
        empty_mb = _mb(manager)
        began = time.monotonic()
        run = f"held-{'server' if server else 'local'}"
        trainer = Trainer(buffer, run)
        await trainer.begin(_spec(run, naps, environment, episodes))
        ramp = await _until(naps, episodes)
        ramp_seconds = time.monotonic() - began
        (naps / "forget").touch()
        await asyncio.sleep(HELD_SECONDS)
        mb, server_mb, held = _mb(manager), _mb(server), await _until(naps, episodes)
        (naps / "wake").touch()
        batch = await trainer.take(RAMP_SECONDS)
    return Held(
        episodes=episodes,
        mb=mb,
        empty_mb=empty_mb,
        server_mb=server_mb,
        ramp_seconds=ramp_seconds,
        gap_ms=1000 * held["longest_gap_s"],
        ramp_gap_ms=1000 * ramp["longest_gap_s"],
        handed_in=GROUP_SIZE * batch.group_count if batch else 0,
    )


async def _until(naps: Path, episodes: int) -> Mapping[str, Any]:
    """The report once so many sleep."""
    async with asyncio.timeout(RAMP_SECONDS):
        while True:
            if (naps / "report").exists():
                report = json.loads((naps / "report").read_text())
                if report["sleeping"] >= episodes:
                    return report
            await asyncio.sleep(REPORT_SECONDS)


def _mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 1e6 if pid else 0.0


def _spec(run: str, naps: Path, environment: str, episodes: int) -> pb.RunSpec:
    sampling = trajectory_pb2.Sampling(max_tokens=1, temperature=1.0, top_p=1.0)
    settings = json.dumps({"folder": str(naps)})
    return pb.RunSpec(
        run_id=run,
        seed=7,
        alpha=0.0,
        batch_groups=episodes // GROUP_SIZE,
        group_size=GROUP_SIZE,
        step_count=1,
        domains=[pb.Domain(name=DOMAIN, environment=environment, weight=1.0, settings_json=settings)],
        sampling=sampling,
        validation_sampling=sampling,
        lease_duration=times.duration(LEASE_SECONDS),
        max_attempts=100,
    )


if __name__ == "__main__":
    serve(Sleeper)
