"""What the services say about themselves, asked about once a second by gRPC and kept as one picture of the farm.

A service that does not answer keeps its last answer; nothing here ever fails because a service is down.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message
from grpc import aio

from rollfarm import rpc
from rollfarm.errors import FarmError
from rollfarm.up.farm import Addresses
from rollfarm.v1 import (
    environment_pb2,
    environment_pb2_grpc,
    llm_proxy_pb2,
    llm_proxy_pb2_grpc,
    sample_buffer_pb2,
    sample_buffer_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)

PERIOD_SECONDS = 1.0
ANSWER_SECONDS = 2.0
RATE_WINDOW_SECONDS = 10.0
PACE_STEPS = 8
"""Steps from which the time that is left is estimated."""
SUSPENDED_SECONDS = 30.0
"""How long environments that never played an episode well may be suspended: a few trials of env_manager."""


class Rate:
    """How fast a counter grows, over the last few seconds; a counter that falls was restarted."""

    def __init__(self, window_seconds: float = RATE_WINDOW_SECONDS) -> None:
        self._window = window_seconds
        self._points: deque[tuple[float, int]] = deque()
        self.total = 0
        """All that was counted, across restarts."""

    def add(self, now: float, count: int) -> None:
        """The counter stood at `count` at `now`."""
        last = self._points[-1][1] if self._points else 0
        self.total += count - last if count >= last else count
        if count < last:
            self._points.clear()
        self._points.append((now, count))
        while self._points[0][0] < now - self._window:
            self._points.popleft()

    def per_second(self) -> float:
        """0 before two points are known."""
        (began, first), (ended, last) = (self._points[0], self._points[-1]) if self._points else ((0, 0), (0, 0))
        return (last - first) / (ended - began) if ended > began else 0.0


class Failures:
    """Counts groups that were dropped because their episodes failed, since the last episode that was played well or,
    before that, since the first look: a run that goes on has its earlier failures behind it."""

    def __init__(self) -> None:
        self._played: int | None = None
        self._dropped_before = 0
        self._dropped = 0
        self.any_played = False
        """Whether an episode was played well since the first look."""

    def add(self, buffer: sample_buffer_pb2.GetStatusResponse) -> None:
        """What sample_buffer counted so far."""
        played = sum(buffer.outcome_counts.get(name, 0) for name in ("OUTCOME_OK", "OUTCOME_TRUNCATED"))
        self._dropped = buffer.dropped_group_counts.get("failed", 0)
        if played != self._played:
            self.any_played = self._played is not None
            self._played, self._dropped_before = played, self._dropped

    @property
    def in_a_row(self) -> int:
        return self._dropped - self._dropped_before


class Standstill:
    """Since when every environment that was asked for is suspended, by the account of the env_managers."""

    def __init__(self) -> None:
        self._since: float | None = None

    def look(self, now: float, env_managers: Iterable[environment_pb2.EnvManagerServiceGetStatusResponse]) -> None:
        """What the env_managers that answered say."""
        asked = [each for manager in env_managers for each in manager.environments if each.ended_count_by_outcome]
        stands_still = bool(asked) and all(each.suspended for each in asked)
        self._since = (self._since if self._since is not None else now) if stands_still else None

    def seconds(self, now: float) -> float:
        """0 while any environment plays."""
        return now - self._since if self._since is not None else 0.0


class EpisodesFail(Exception):
    """Every episode fails, so that the run cannot go on."""

    status = 1
    """What the command exits with."""


@dataclass
class Picture:
    """The farm as its services last described it."""

    progress: trainer_pb2.GetProgressResponse | None = None
    buffer: sample_buffer_pb2.GetStatusResponse | None = None
    proxy: llm_proxy_pb2.LlmProxyServiceGetStatusResponse | None = None
    steps: dict[int, trainer_pb2.StepMetrics] = field(default_factory=dict)
    """Every step seen, the last account of each."""
    begun: bool = False
    """Whether the trainer ever got past loading, so that there is something to tell."""
    first_steps_at: float | None = None
    """When a training step was first seen, monotonic seconds."""
    tokens: Rate = field(default_factory=Rate)
    failures: Failures = field(default_factory=Failures)
    standstill: Standstill = field(default_factory=Standstill)

    @property
    def phase(self) -> int:
        return self.progress.phase if self.progress else trainer_pb2.PHASE_UNSPECIFIED

    @property
    def finished(self) -> bool:
        return self.phase == trainer_pb2.PHASE_FINISHED

    def rewards(self) -> list[float]:
        """Mean reward of each step, in order."""
        return [self.steps[step].mean_reward for step in sorted(self.steps)]

    def seconds_left(self) -> float | None:
        """How long the remaining steps will take at the pace of the last few; None where that is unknown."""
        if self.progress is None or not self.progress.total_step_count or not self.steps:
            return None
        last = [self.steps[number] for number in sorted(self.steps)[-PACE_STEPS:]]
        pace = sum(_seconds(step) for step in last) / len(last)
        return (self.progress.total_step_count - self.progress.step_count) * pace

    def learn(self, progress: trainer_pb2.GetProgressResponse, now: float) -> None:
        """Take in what the trainer said."""
        self.progress = progress
        kept = {number: step for number, step in self.steps.items() if number < progress.step_count}
        self.steps = kept | {step.step: step for step in progress.steps}
        if progress.phase not in (trainer_pb2.PHASE_UNSPECIFIED, trainer_pb2.PHASE_LOADING):
            self.begun = True
        if self.first_steps_at is None and progress.phase in (trainer_pb2.PHASE_WAITING, trainer_pb2.PHASE_TRAINING):
            self.first_steps_at = now


class Watcher:
    """Asks the services and keeps the picture. Use with `async with`."""

    def __init__(self, addresses: Addresses, *, max_failed_groups: int = 0) -> None:
        self.picture = Picture()
        self._over = asyncio.Event()
        self._max_failed_groups = max_failed_groups
        self._why_hopeless = ""
        self._addresses = addresses
        self._channels: list[aio.Channel] = []

    async def __aenter__(self) -> "Watcher":
        def stub(make: Any, address: str) -> Any:
            self._channels.append(rpc.channel(address))
            return make(self._channels[-1])

        self._trainer = stub(trainer_pb2_grpc.TrainerServiceStub, self._addresses.trainer)
        self._buffer = stub(sample_buffer_pb2_grpc.SampleBufferServiceStub, self._addresses.sample_buffer)
        self._proxy = stub(llm_proxy_pb2_grpc.LlmProxyServiceStub, self._addresses.llm_proxy)
        self._env_managers = [
            stub(environment_pb2_grpc.EnvManagerServiceStub, address) for address in self._addresses.env_managers
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def watch(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(PERIOD_SECONDS)

    async def look(self) -> None:
        """Ask every service once."""
        picture = self.picture
        steps = trainer_pb2.GetProgressRequest(from_step=max(picture.steps, default=0))
        progress, buffer, proxy, *env_managers = await asyncio.gather(
            _answer(self._trainer.GetProgress, steps),
            _answer(self._buffer.GetStatus, sample_buffer_pb2.GetStatusRequest()),
            _answer(self._proxy.GetStatus, llm_proxy_pb2.LlmProxyServiceGetStatusRequest()),
            *(
                _answer(each.GetStatus, environment_pb2.EnvManagerServiceGetStatusRequest())
                for each in self._env_managers
            ),
        )
        now = time.monotonic()
        if buffer is not None:
            picture.buffer = buffer
            picture.failures.add(buffer)
        if proxy is not None:
            picture.proxy = proxy
            picture.tokens.add(now, proxy.generated_token_count)
        if progress is not None:
            picture.learn(progress, now)
        picture.standstill.look(now, [answer for answer in env_managers if answer is not None])
        self._why_hopeless = self._why_hopeless or self._hopeless(now)
        if picture.finished or self._why_hopeless:
            self._over.set()

    async def finished(self) -> None:
        """Return once the trainer says that every step is done. Raises EpisodesFail when that will never be."""
        await self._over.wait()
        if not self.picture.finished and self.picture.buffer is not None:
            raise EpisodesFail(
                f"{self._why_hopeless}. "
                f"The last failure was {self.picture.buffer.last_failure or 'not recorded'}\n"
                "Mend the environment or the reward."
            )

    def _hopeless(self, now: float) -> str:
        """Why the run cannot go on; empty while it may."""
        failures, seconds = self.picture.failures, self.picture.standstill.seconds(now)
        if not self._max_failed_groups:
            return ""
        if failures.in_a_row >= self._max_failed_groups:
            return f"{failures.in_a_row} groups in a row were dropped because their episodes failed"
        if seconds >= SUSPENDED_SECONDS and not failures.any_played:
            return f"every environment has been suspended for {seconds:.0f} s, and none has played an episode well"
        return ""


def _seconds(step: trainer_pb2.StepMetrics) -> float:
    parts = (step.wait_duration, step.train_duration, step.publish_duration)
    return sum(part.ToMicroseconds() for part in parts) / 1e6


async def _answer(method: Any, request: Message) -> Any:
    try:
        return await rpc.call(method, request, timeout=ANSWER_SECONDS, retry=False)
    except FarmError:
        return None
