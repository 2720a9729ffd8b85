"""The services under load, and the trainer that stands in: it takes one batch of each run, and trains on nothing."""

import asyncio
import contextlib
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from load_tests.buffering.servers import serving
from load_tests.proxying import payload
from load_tests.proxying.agents import write_model
from load_tests.straggling.plan import GROUP_SIZE, Case, Way
from rollfarm import rpc, times
from rollfarm.errors import DeadlineExceeded
from rollfarm.ports import free_port
from rollfarm.v1 import environment_pb2, environment_pb2_grpc, sample_buffer_pb2_grpc, trajectory_pb2
from rollfarm.v1 import sample_buffer_pb2 as pb

DOMAIN = "play"
ENVIRONMENT = "load_tests.straggling.world:Straggler"
CALLED = ("sample_buffer", "llm_proxy", "reward_gateway")
"""Services that env_manager calls."""

SLOTS = 1024
LEASE_SECONDS = 30.0
CALL_SECONDS = 10.0
POLL_SECONDS = 15.0
LOCKSTEP_SECONDS = 600.0


@dataclass(frozen=True)
class Played:
    """What one run came to."""

    seconds: float
    """From the first lease that was possible until the batch was there."""

    trained: int
    """Episodes in the batch."""

    begun: int
    failed: int
    """Episodes that their environment failed, because a step was cut."""

    cancel_seconds: float
    """From the end of the batch until env_manager played nothing any more."""

    cpu_seconds: float
    """Of all services."""

    wedged: bool
    """The batch did not come."""

    @property
    def dropped_share(self) -> float:
        """Of what was begun, what was not trained on."""
        return 1 - self.trained / self.begun if self.begun else 0.0


class Services:
    """The farm but for env_manager, which each case has to itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder)
        self.ports = {name: free_port() for name in (*CALLED, "engine")}
        self.pids: list[int] = []

    @contextmanager
    def running(self) -> Iterator["Services"]:
        """Until the block ends."""
        engine = {
            "engine.adapter": "simulated",
            "engine.slots": str(SLOTS),
            "engine.simulated.step_seconds": "0.01",
            "engine.simulated.request_seconds": "0",
            "engine.simulated.prefill_seconds": "0",
            "engine.simulated.vocabulary_size": str(payload.VOCABULARY),
        }
        rewards = {"reward_gateway.domains": json.dumps({DOMAIN: {"rewards": [{"name": "environment"}]}})}
        with ExitStack() as stack:
            stack.enter_context(self._service("llm_proxy.engine", "engine", engine))
            stack.enter_context(self._service("llm_proxy", "llm_proxy", {"llm_proxy.engines": self._list("engine")}))
            stack.enter_context(self._service("sample_buffer", "sample_buffer", {"sample_buffer.journal": "memory"}))
            stack.enter_context(self._service("reward_gateway", "reward_gateway", rewards))
            yield self

    @contextmanager
    def env_manager(self, case: Case, *, in_lockstep: bool) -> Iterator[str]:
        """An env_manager that cuts steps where the case says; its address.

        In lock-step a step may wait for the others, which nobody shall cut: there the environment does it itself.
        """
        seconds = LOCKSTEP_SECONDS if in_lockstep else case.scale * case.cut_seconds
        with self.playing(SLOTS, {"env_manager.environment_seconds": str(seconds)}):
            yield self.address("env_manager")

    @contextmanager
    def playing(self, slots: int, flags: dict[str, str]) -> Iterator[int]:
        """An env_manager with so many slots; its process."""
        told = {
            **{f"env_manager.{name}_address": self.address(name) for name in CALLED},
            "env_manager.slots": str(slots),
            "model.path": str(self.model),
        }
        self.ports["env_manager"] = free_port()
        with self._service("env_manager", "env_manager", told | flags) as pid:
            yield pid

    def cpu_seconds(self) -> float:
        """Spent by all of them so far."""
        spent = [psutil.Process(pid).cpu_times() for pid in self.pids if psutil.pid_exists(pid)]
        return sum(one.user + one.system for one in spent)

    @contextmanager
    def _service(self, module: str, table: str, flags: dict[str, str]) -> Iterator[int]:
        flags = flags | {f"{table}.listen.port": str(self.ports[table])}
        command = [
            sys.executable,
            "-m",
            module,
            *(word for key, value in flags.items() for word in (f"--{key}", value)),
        ]
        log = self.folder / f"{table}-{self.ports[table]}.log"
        with serving(command, log, lambda: asyncio.run(rpc.is_serving(self.address(table), timeout=0.5))) as pid:
            self.pids.append(pid)
            yield pid
            self.pids.remove(pid)

    def address(self, table: str) -> str:
        """Where a service listens."""
        return f"127.0.0.1:{self.ports[table]}"

    def _list(self, table: str) -> str:
        return json.dumps([self.address(table)])

    def play(self, way: Way, name: str, deadline: float) -> Played:
        """One run."""
        return asyncio.run(self._play(way, name, deadline))

    async def _play(self, way: Way, name: str, deadline: float) -> Played:
        async with self._stubs() as (buffer, manager):
            trainer = Trainer(buffer, name)
            before = self.cpu_seconds()
            began = time.monotonic()
            await trainer.configure(way)
            batch = await trainer.take(deadline)
            seconds = time.monotonic() - began
            spent = self.cpu_seconds() - before
            if batch is not None:
                await trainer.commit(batch)
            idle_seconds = await _idle(manager)
            status: pb.GetStatusResponse = await rpc.call(
                buffer.GetStatus, pb.GetStatusRequest(run_id=name), timeout=CALL_SECONDS
            )
        return Played(
            seconds=seconds,
            trained=status.committed_trajectory_count,
            begun=sum(status.outcome_counts.values()),
            failed=status.outcome_counts.get(trajectory_pb2.Outcome.Name(trajectory_pb2.OUTCOME_ENV_FAILED), 0),
            cancel_seconds=idle_seconds,
            cpu_seconds=spent,
            wedged=batch is None,
        )

    @asynccontextmanager
    async def _stubs(self) -> AsyncIterator[tuple[Any, Any]]:
        buffer, manager = self.address("sample_buffer"), self.address("env_manager")
        async with rpc.channel(buffer) as one, rpc.channel(manager) as other:
            yield (
                sample_buffer_pb2_grpc.SampleBufferServiceStub(one),
                environment_pb2_grpc.EnvManagerServiceStub(other),
            )


class Trainer:
    """Takes the one batch of a run."""

    def __init__(self, buffer: Any, run_id: str) -> None:
        self._buffer = buffer
        self._run_id = run_id
        self._name = uuid.uuid4().hex

    async def configure(self, way: Way) -> None:
        """Begin the run: env_manager has waited for it."""
        case = way.case
        settings = {
            "run": self._run_id,
            "latency": case.latency,
            "scale": case.scale,
            "turns": case.turns,
            "together": case.environments if way.in_lockstep else 0,
            "cut_seconds": case.cut_seconds if way.in_lockstep else 0.0,
        }
        sampling = trajectory_pb2.Sampling(max_tokens=1, temperature=1.0, top_p=1.0)
        domain = pb.Domain(name=DOMAIN, environment=ENVIRONMENT, weight=1.0, settings_json=json.dumps(settings))
        spec = pb.RunSpec(
            run_id=self._run_id,
            seed=7,
            alpha=0.0,
            batch_groups=case.groups,
            group_size=GROUP_SIZE,
            redundant_members=way.redundant_members,
            redundant_groups=way.redundant_groups,
            step_count=1,
            domains=[domain],
            sampling=sampling,
            validation_sampling=sampling,
            lease_duration=times.duration(LEASE_SECONDS),
            max_attempts=100,
        )
        await self.begin(spec)

    async def begin(self, spec: pb.RunSpec) -> None:
        """Begin a run of this one's name."""
        request = pb.ConfigureRunRequest(request_id=uuid.uuid4().hex, spec=spec, trainer_id=self._name)
        await rpc.call(self._buffer.ConfigureRun, request, timeout=CALL_SECONDS)

    async def take(self, deadline: float) -> pb.Batch | None:
        """Wait for the batch; None when the deadline came first."""
        request = pb.LeaseBatchRequest(run_id=self._run_id, trainer_id=self._name, step=0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                while True:
                    # On a busy machine the empty answer may come too late.
                    with contextlib.suppress(DeadlineExceeded):
                        async for part in rpc.stream(self._buffer.LeaseBatch, request, timeout=POLL_SECONDS):
                            if part.last:
                                return part.batch
        return None

    async def commit(self, batch: pb.Batch) -> None:
        """As if a version had been trained on it, and a checkpoint held it."""
        publish = pb.PublishVersionRequest(
            request_id=uuid.uuid4().hex,
            run_id=self._run_id,
            trainer_id=self._name,
            policy_version=1,
            trained_step_count=1,
        )
        await rpc.call(self._buffer.PublishVersion, publish, timeout=CALL_SECONDS)
        commit = pb.CommitStepRequest(
            request_id=uuid.uuid4().hex,
            run_id=self._run_id,
            trainer_id=self._name,
            step=batch.step,
            batch_id=batch.batch_id,
        )
        await rpc.call(self._buffer.CommitStep, commit, timeout=CALL_SECONDS)


async def _idle(manager: Any) -> float:
    """Wait until nothing is played; returns how long that took."""
    began = time.monotonic()
    request = environment_pb2.EnvManagerServiceGetStatusRequest()
    while (await rpc.call(manager.GetStatus, request, timeout=CALL_SECONDS)).running_count:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return time.monotonic() - began
