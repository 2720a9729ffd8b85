"""What these tests share: small specs, whole trajectories, and the service as a process."""

import asyncio
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollfarm import rpc
from rollfarm.ports import free_port
from rollfarm.run import DomainConfig, FilterConfig, RunConfig
from rollfarm.tokens import pack_ids, pack_logprobs
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import sample_buffer_pb2_grpc
from rollfarm.v1 import trajectory_pb2 as tp
from rollfarm.valkey import valkey_answers, valkey_command
from sample_buffer import views
from sample_buffer.groups import Groups
from sample_buffer.runs import Runs
from sample_buffer.state import Lease

ROOT = Path(__file__).parents[2]


def make_spec(
    *,
    domains: Sequence[tuple[str, str, float]] = (("maths", "sums", 1.0),),
    filters: Sequence[FilterConfig] = (),
    **settings: object,
) -> pb.RunSpec:
    """A run of groups of two in batches of two, unless the settings say otherwise."""
    chosen = {"name": "run", "seed": 7, "batch_groups": 2, "group_size": 2, "alpha": 1.0, "steps": 0, **settings}
    return RunConfig.model_validate(
        {
            **chosen,
            "domains": [DomainConfig(name=name, environment=world, weight=weight) for name, world, weight in domains],
            "filters": list(filters),
        }
    ).to_proto()


def make_runs(spec: pb.RunSpec, *, retained: int = 1000, remembered: int = 1000) -> Runs:
    """The state with one run."""
    runs = Runs()
    runs.limit(retained, remembered, 0.0)
    runs.configure("configure", "trainer", spec, "nonce", 0.0)
    return runs


def make_groups(spec: pb.RunSpec, **limits: int) -> Groups:
    """The ledger of one run."""
    return make_runs(spec, **limits).run("")


def request_id() -> str:
    return str(uuid.uuid4())


def play(
    episode: pb.Episode, *, reward: float | None = 1.0, versions: Sequence[int] = (), tokens: int = 3
) -> tp.Trajectory:
    """A whole trajectory for the episode; `versions` of its policy turns, by default the lease's."""
    spoken = versions or (episode.policy_version,)
    turns = [tp.Turn(author=tp.AUTHOR_ENVIRONMENT, token_ids=pack_ids([1, 2]))]
    turns += [
        tp.Turn(
            author=tp.AUTHOR_POLICY,
            token_ids=pack_ids(range(tokens)),
            logprobs=pack_logprobs([-0.5] * tokens),
            version_spans=[tp.VersionSpan(policy_version=version, token_count=tokens)],
            finish_reason=tp.FINISH_REASON_STOP,
        )
        for version in spoken
    ]
    trajectory = tp.Trajectory(
        trajectory_id=f"{episode.group_id}.{episode.member}.{episode.attempt}",
        run_id=episode.run_id,
        group_id=episode.group_id,
        member=episode.member,
        task=episode.task,
        turns=turns,
        outcome=tp.OUTCOME_OK,
        lease_policy_version=episode.policy_version,
        oldest_policy_version=min(spoken),
        metrics={"success": 1.0, "turns": 2.0},
        worker_id="worker",
    )
    if reward is not None:
        trajectory.reward = reward
    return trajectory


def lease(groups: Groups, count: int = 100, *, now: float = 0.0, worlds: Sequence[str] = ()) -> list[Lease]:
    return groups.lease(request_id(), "worker", count, worlds, now)


def complete(
    groups: Groups, held: Lease, *, now: float = 0.0, reward: float = 1.0, versions: Sequence[int] = ()
) -> "pb.Disposition.ValueType":
    episode = views.episode_lease(groups, held).episode
    played = play(episode, reward=reward, versions=versions)
    disposition, _ = groups.complete(request_id(), held.lease_id, played, now)
    return disposition


def publish(groups: Groups, *, trained: int = 0, now: float = 0.0) -> int:
    return groups.publish(request_id(), groups.state.version + 1, trained, now)


def fill(groups: Groups, *, now: float = 0.0) -> None:
    """Lease and complete everything that there are credits for."""
    for held in lease(groups, 10_000, now=now):
        complete(groups, held, now=now, reward=float(held.member))


@dataclass
class Process:
    """A sample_buffer of its own process."""

    popen: subprocess.Popen[bytes]
    stub: "sample_buffer_pb2_grpc.SampleBufferServiceAsyncStub"
    port: int

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()


def spawn(*flags: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "sample_buffer", *flags], cwd=ROOT, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )


@asynccontextmanager
async def process(*flags: str, port: int = 0) -> AsyncIterator[Process]:
    """`python -m sample_buffer` until the block ends, answering calls."""
    port = port or free_port()
    popen = spawn("--sample_buffer.listen.port", str(port), *flags)
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        try:
            while not await rpc.is_serving(f"127.0.0.1:{port}", timeout=0.5):
                assert popen.poll() is None, popen.stderr and popen.stderr.read().decode()
            yield Process(popen, sample_buffer_pb2_grpc.SampleBufferServiceStub(channel), port)
        finally:
            popen.kill()
            popen.communicate()


class Valkey:
    """A real Valkey on a unix socket in `folder`, with flags besides those of a farm's own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.data = folder / "data"
        self.socket = folder / "v.sock"
        self._flags = flags
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    async def start(self) -> None:
        command = [*valkey_command(self.data, self.socket), *self._flags]
        self._popen = subprocess.Popen(  # noqa: ASYNC220
            command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        async with asyncio.timeout(10):
            while not await valkey_answers(self.socket):  # noqa: ASYNC110 - a program of others notifies nobody
                await asyncio.sleep(0.02)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It hangs until the block ends, and then reads what it was sent."""
        assert self._popen is not None
        self._popen.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
            self._popen = None


async def take_batch(
    stub: "sample_buffer_pb2_grpc.SampleBufferServiceAsyncStub", step: int, *, trainer: str = "trainer"
) -> list[pb.LeaseBatchResponse]:
    request = pb.LeaseBatchRequest(run_id="run", trainer_id=trainer, step=step)
    return [message async for message in rpc.stream(stub.LeaseBatch, request, timeout=10)]


async def lease_all(stub: "sample_buffer_pb2_grpc.SampleBufferServiceAsyncStub") -> list[pb.EpisodeLease]:
    request = pb.LeaseEpisodesRequest(request_id=request_id(), worker_id="worker", max_leases=1000)
    return list((await rpc.call(stub.LeaseEpisodes, request, timeout=10)).leases)


async def complete_all(
    stub: "sample_buffer_pb2_grpc.SampleBufferServiceAsyncStub", leases: Sequence[pb.EpisodeLease]
) -> list[pb.CompleteEpisodeResponse]:
    requests = [
        pb.CompleteEpisodeRequest(request_id=request_id(), lease_id=held.lease_id, trajectory=play(held.episode))
        for held in leases
    ]
    return await asyncio.gather(*(rpc.call(stub.CompleteEpisode, request, timeout=10) for request in requests))
