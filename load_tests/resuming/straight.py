"""A trainer that nobody kills, on samples that were recorded: through a real sample_buffer, step by step."""

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from load_tests.buffering import servers
from load_tests.killing.farm import CONFIG, ROOT
from rollfarm import rpc
from rollfarm.ports import free_port
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import sample_buffer_pb2_grpc
from rollfarm.v1 import trajectory_pb2 as tp

CALL_SECONDS = 30.0
POLL_SECONDS = 20.0


class ReplayFailed(Exception):
    """The trainer did not come to the end of the recorded batches."""


@dataclass
class Recording:
    """The batches of a run, each as it was first delivered."""

    batches: dict[int, list[pb.Group]] = field(default_factory=dict[int, list[pb.Group]])
    """Groups in training order, by step."""

    def keep(self, parts: list[pb.LeaseBatchResponse]) -> None:
        """Take up a batch, unless it was delivered before."""
        step = parts[0].batch.step
        if step in self.batches:
            return
        groups: list[pb.Group] = []
        for group in (group for part in parts for group in part.groups):
            if groups and groups[-1].group_id == group.group_id:
                groups[-1].trajectories.extend(group.trajectories)
            else:
                groups.append(group)
        self.batches[step] = groups


def replay(recording: Recording, folder: Path, flags: Mapping[str, str], *, ranks: int, seconds: float) -> None:
    """Train on every recorded batch once, in order, in a run named "straight" in `folder`. Raises ReplayFailed."""
    folder.mkdir()
    proxy = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "llm_proxy", "--llm_proxy.listen.port", proxy.rpartition(":")[2]]

    def proxy_serves() -> bool:
        return asyncio.run(rpc.is_serving(proxy, timeout=0.5))

    with servers.buffer(folder, "memory") as buffer, servers.serving(command, folder / "llm_proxy.log", proxy_serves):
        settings = {
            **flags,
            "run.name": "straight",
            "run.folder": str(folder),
            "run.steps": str(len(recording.batches)),
            # Exactly the groups of one step are outstanding at a time: version v asks for those of step v - 1.
            "run.alpha": "0",
            "run.redundant_members": "0",
            "run.lease_seconds": "600",
            "trainer.listen.port": str(free_port()),
            "trainer.sample_buffer_address": buffer.address,
            "trainer.llm_proxy_address": proxy,
            "trainer.exit_when_finished": "true",
        }
        with _trainer(settings, folder / "trainer.log", ranks) as trainer:
            asyncio.run(_play(recording, buffer.address, trainer, seconds))


async def _play(recording: Recording, address: str, trainer: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Hand in the recorded samples whenever episodes are to be played, until the trainer is done."""
    async with rpc.channel(address) as channel:
        playing = asyncio.create_task(_hand_in(recording, sample_buffer_pb2_grpc.SampleBufferServiceStub(channel)))
        ending = asyncio.create_task(asyncio.to_thread(trainer.wait, seconds))
        try:
            await asyncio.wait({playing, ending}, return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                playing.result()
            if status := await ending:
                raise ReplayFailed(f"The trainer ended with status {status}.")
        except subprocess.TimeoutExpired:
            raise ReplayFailed(f"The trainer did not end in {seconds:g} s.") from None
        finally:
            trainer.kill()
            playing.cancel()
            await asyncio.gather(playing, ending, return_exceptions=True)


async def _hand_in(recording: Recording, buffer: "sample_buffer_pb2_grpc.SampleBufferServiceAsyncStub") -> None:
    first: dict[int, int] = {}
    """The k of the first group of each version. What was leased before version 1 is too old to be trained on."""
    while True:
        ask = pb.LeaseEpisodesRequest(request_id=str(uuid.uuid4()), worker_id="recorded", max_leases=256)
        leased = await rpc.call(buffer.LeaseEpisodes, ask, timeout=POLL_SECONDS)
        for lease in leased.leases:
            version, index = lease.episode.policy_version, lease.episode.task.index
            place = index - first.setdefault(version, index)
            if version > 0:
                group = recording.batches[version - 1][place]
                await rpc.call(buffer.CompleteEpisode, _played(lease, group), timeout=CALL_SECONDS)


def _played(lease: pb.EpisodeLease, group: pb.Group) -> pb.CompleteEpisodeRequest:
    """The recorded sample in the place of this episode. Tokens, log-probs and rewards are as they were; versions count
    publications, of which a run that is killed has more."""
    episode = lease.episode
    played = tp.Trajectory()
    played.CopyFrom(group.trajectories[episode.member])
    played.run_id, played.group_id, played.member = episode.run_id, episode.group_id, episode.member
    played.task.CopyFrom(episode.task)
    played.lease_policy_version = played.oldest_policy_version = episode.policy_version
    for turn in played.turns:
        for span in turn.version_spans:
            span.policy_version = episode.policy_version
    return pb.CompleteEpisodeRequest(request_id=str(uuid.uuid4()), lease_id=lease.lease_id, trajectory=played)


@contextmanager
def _trainer(settings: Mapping[str, str], log: Path, ranks: int) -> "Iterator[subprocess.Popen[bytes]]":
    """`python -m trainer`, as many ranks as asked: rank 0."""
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "trainer", str(CONFIG), *words]
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started: list[subprocess.Popen[bytes]] = []
    with log.open("wb") as file:
        try:
            for rank in range(ranks):
                env = {**os.environ, "OMP_NUM_THREADS": "1", **_rank(rank, meeting if ranks > 1 else {})}
                argv = command if rank == 0 else [*command, "--trainer.listen.port", "0"]
                started.append(
                    subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
                )
            yield started[0]
        finally:
            for process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10 if started[0].poll() == 0 else 0)
                process.kill()
                process.wait()


def _rank(rank: int, meeting: Mapping[str, str]) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), **meeting} if meeting else {}


def weights_of(run: Path) -> Path:
    """The file of a run's final weights."""
    return run / "model" / "model.safetensors"


def last_words(folder: Path) -> str:
    """What the log of the trainer ends with."""
    log = folder / "trainer.log"
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:]) if log.exists() else ""


def differences(first: Path, second: Path) -> float:
    """The greatest difference between the weights in two files; infinite where they are not of one model."""
    import numpy as np
    from safetensors.numpy import load_file

    ones, others = load_file(first), load_file(second)
    if ones.keys() != others.keys() or any(ones[name].shape != others[name].shape for name in ones):
        return float("inf")
    names: Sequence[str] = list(ones)
    return max(float(np.abs(ones[name].astype(np.float64) - others[name]).max()) for name in names)
