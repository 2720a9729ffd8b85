"""What env_managers and a trainer ask of a sample_buffer, at full speed or paced, over real gRPC.

Each function here runs in a client process of its own and opens its own channel. Samples are built before the clock
starts, so that what is measured is the service.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import psutil
from grpc import aio

from load_tests.buffering import servers
from load_tests.buffering.samples import Size, completion, completions
from rollfarm import rpc
from rollfarm.run import DomainConfig, RunConfig
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import sample_buffer_pb2_grpc

TRAINER = "load"
CALL_SECONDS = 120.0
POLL_SECONDS = 1.0
"""A worker asks anew after this long: the run may have no work left."""
LEASES_AT_ONCE = 512
SERVICE = pb.DESCRIPTOR.services_by_name["SampleBufferService"].full_name


@dataclass(frozen=True)
class Load:
    """A run of `steps` batches, and how its samples travel."""

    address: str
    journal: str
    """The URL of the Valkey behind it."""
    run_id: str
    steps: int
    batch_groups: int
    group_size: int
    alpha: float
    size: Size
    calls: int
    """CompleteEpisodes calls under way at once."""
    call_samples: int
    """Most samples of a call."""
    linger_seconds: float
    """How long a paced sample waits for others to share its call."""
    pids: Mapping[str, int]
    """Processes whose CPU time is counted, by name."""

    @property
    def batch_samples(self) -> int:
        return self.batch_groups * self.group_size

    @property
    def samples(self) -> int:
        return self.steps * self.batch_samples

    @property
    def spec(self) -> pb.RunSpec:
        return RunConfig(
            name=self.run_id,
            steps=self.steps,
            alpha=self.alpha,
            batch_groups=self.batch_groups,
            group_size=self.group_size,
            lease_seconds=600,
            domains=[DomainConfig(name="maths", environment="sums")],
        ).to_proto()


@dataclass(frozen=True)
class Flow:
    """Samples that went in or out."""

    samples: int
    seconds: float
    latencies: list[float]
    """Seconds: of each sample from hand-in to acknowledgement, or of each batch from the call to the parsed batch."""
    cpu: dict[str, float]
    """CPU seconds by process."""
    commits: int = 0
    """Group commits that made the samples durable."""

    @property
    def per_second(self) -> float:
        return self.samples / self.seconds


class Clocks:
    """Wall time and the CPU time of several processes, from here on."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()} | {"client": psutil.Process()}
        self._before = self._cpu()
        self.began = time.perf_counter()

    def _cpu(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}

    def flow(self, samples: int, latencies: list[float]) -> Flow:
        seconds = time.perf_counter() - self.began
        cpu = {name: after - self._before[name] for name, after in self._cpu().items()}
        return Flow(samples, seconds, latencies, cpu)


def put(load: Load, rate: float) -> Flow:
    """Lease every episode of the run and hand all of them in, `rate` a second; infinity is as fast as it goes."""
    return asyncio.run(_put(load, rate))


def take(load: Load) -> Flow:
    """Take, publish and commit every step of the run."""
    return asyncio.run(_take(load))


def cycle(load: Load) -> Flow:
    """Lease and hand in, for as long as the run has work."""
    return asyncio.run(_cycle(load))


def due(elapsed: float, rate: float, samples: int) -> int:
    """How many samples were handed in after `elapsed` seconds, the first one at once."""
    return samples if rate == float("inf") else min(samples, int(elapsed * rate) + 1)


class Client:
    """The calls, with requests that are serialised already."""

    def __init__(self, channel: aio.Channel, load: Load) -> None:
        self.stub: Any = sample_buffer_pb2_grpc.SampleBufferServiceStub(channel)
        self._load = load
        self._many = channel.unary_unary(
            f"/{SERVICE}/CompleteEpisodes", response_deserializer=pb.CompleteEpisodesResponse.FromString
        )

    async def configure(self) -> pb.ConfigureRunResponse:
        request = pb.ConfigureRunRequest(request_id=str(uuid.uuid4()), trainer_id=TRAINER, spec=self._load.spec)
        return await rpc.call(self.stub.ConfigureRun, request, timeout=CALL_SECONDS)

    async def lease(self, count: int) -> list[bytes]:
        """Serialised completions of at most `count` episodes."""
        request = pb.LeaseEpisodesRequest(request_id=str(uuid.uuid4()), worker_id="load", max_leases=count)
        leases = (await rpc.call(self.stub.LeaseEpisodes, request, timeout=POLL_SECONDS)).leases
        return [completion(lease, self._load.size) for lease in leases]

    async def complete(self, requests: list[bytes]) -> None:
        """Hand in, and check that all were accepted."""
        answer: pb.CompleteEpisodesResponse = await rpc.call(
            self._many, completions(requests), timeout=CALL_SECONDS, retry=False
        )
        accepted = sum(result.completed.disposition == pb.DISPOSITION_ACCEPTED for result in answer.results)
        if accepted < len(requests):
            raise RuntimeError(f"{len(requests) - accepted} of {len(requests)} samples were not accepted: {answer}")


async def _put(load: Load, rate: float) -> Flow:
    async with rpc.channel(load.address) as channel:
        client = Client(channel, load)
        await client.configure()
        requests: list[bytes] = []
        while len(requests) < load.samples:
            requests += await client.lease(min(LEASES_AT_ONCE, load.samples - len(requests)))
        return await _send(load, client, requests, rate)


async def _send(load: Load, client: Client, requests: list[bytes], rate: float) -> Flow:
    slots = asyncio.Semaphore(load.calls)
    latencies: list[float] = []
    commits = servers.commits(load.journal)
    clocks = Clocks(load.pids)

    async def send(first: int, end: int) -> None:
        await client.complete(requests[first:end])
        slots.release()
        elapsed = time.perf_counter() - clocks.began
        latencies.extend(elapsed - number / rate for number in range(first, end))

    linger = 0.0 if rate == float("inf") else load.linger_seconds
    sent = 0
    async with asyncio.TaskGroup() as group:
        while sent < len(requests):
            await slots.acquire()
            await asyncio.sleep(max(0.0, sent / rate + linger - (time.perf_counter() - clocks.began)))
            end = min(due(time.perf_counter() - clocks.began, rate, len(requests)), sent + load.call_samples)
            group.create_task(send(sent, end))
            sent = end
    flow = clocks.flow(len(requests), latencies)
    return replace(flow, commits=servers.commits(load.journal) - commits)


async def _take(load: Load) -> Flow:
    async with rpc.channel(load.address) as channel:
        client = Client(channel, load)
        await client.configure()
        latencies: list[float] = []
        clocks = Clocks(load.pids)
        for step in range(load.steps):
            began = time.perf_counter()
            batch_id, samples = await _lease_batch(client, load, step)
            latencies.append(time.perf_counter() - began)
            assert samples == load.batch_samples, f"{samples} samples in a batch of {load.batch_samples}"
            await _finish_step(client, load, step, batch_id)
        return clocks.flow(load.samples, latencies)


async def _lease_batch(client: Client, load: Load, step: int) -> tuple[str, int]:
    """The batch, parsed: its name and how many samples it has."""
    request = pb.LeaseBatchRequest(run_id=load.run_id, trainer_id=TRAINER, step=step)
    while True:
        samples = 0
        async for part in rpc.stream(client.stub.LeaseBatch, request, timeout=CALL_SECONDS):
            samples += sum(len(group.trajectories) for group in part.groups)
            if part.last:
                return part.batch.batch_id, samples


async def _finish_step(client: Client, load: Load, step: int, batch_id: str) -> None:
    publish = pb.PublishVersionRequest(
        request_id=str(uuid.uuid4()),
        run_id=load.run_id,
        policy_version=step + 1,
        trained_step_count=step + 1,
        trainer_id=TRAINER,
    )
    await rpc.call(client.stub.PublishVersion, publish, timeout=CALL_SECONDS)
    commit = pb.CommitStepRequest(
        request_id=str(uuid.uuid4()), run_id=load.run_id, step=step, batch_id=batch_id, trainer_id=TRAINER
    )
    await rpc.call(client.stub.CommitStep, commit, timeout=CALL_SECONDS)


async def _cycle(load: Load) -> Flow:
    async with rpc.channel(load.address) as channel:
        client = Client(channel, load)
        await client.configure()
        clocks = Clocks(load.pids)
        left = load.samples

        async def worker() -> None:
            nonlocal left
            while left > 0:
                requests = await client.lease(load.call_samples)
                left -= len(requests)
                if requests:
                    await client.complete(requests)

        async with asyncio.TaskGroup() as group:
            for _ in range(load.calls):
                group.create_task(worker())
        return clocks.flow(load.samples, [])
