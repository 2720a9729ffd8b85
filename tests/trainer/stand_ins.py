"""Stand-ins behind real sockets: an llm_proxy whose engines are processes that only receive weights, and players."""

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from rollfarm import rpc
from rollfarm.error_wire import to_failure
from rollfarm.errors import EngineFailed, FarmError, WeightsNotStaged
from rollfarm.service import Changed, ErrorInterceptor, poll_seconds
from rollfarm.v1 import llm_proxy_pb2, llm_proxy_pb2_grpc, sample_buffer_pb2, sample_buffer_pb2_grpc
from tests.trainer.conftest import ROOT, trajectory

Context = aio.ServicerContext[Any, Any]


class Receiver:
    """An engine's end of the wire, as a process: tests/trainer/receiver.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.instance_id = uuid.uuid4().hex

    @classmethod
    async def start(cls, *prefix: str) -> "Receiver":
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-m",
            "tests.trainer.receiver",
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        return cls(process)

    async def ask(self, verb: str, message: Any = None) -> str:
        """One line there, one line back."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        payload = message.SerializeToString().hex() if message is not None else ""
        self._process.stdin.write(f"{verb} {payload}\n".encode())
        answer = (await self._process.stdout.readline()).decode().strip()
        if not answer.startswith("ok"):
            raise EngineFailed(answer or "The engine is gone.")
        return answer.removeprefix("ok").strip()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class StandInProxy(llm_proxy_pb2_grpc.LlmProxyServiceServicer):
    """Knows engines, stages on them and commits; generates nothing."""

    def __init__(self) -> None:
        self.receivers: dict[str, Receiver] = {}
        self.versions: dict[str, int] = {}
        self.begun: list[llm_proxy_pb2.BeginWeightUpdateRequest] = []
        self.committed: list[llm_proxy_pb2.CommitWeightUpdateRequest] = []
        self.policy_version = 0
        self.hung: set[str] = set()
        """Engines that do not take what is sent, until `wake`."""

        self.hang_seconds = 60.0
        """After that a hung engine has failed to take a version."""

        self.staging: set[str] = set()
        self.address = ""
        self.changed = Changed()
        self._staged: dict[str, int] = {}
        self._revision = 1

    def attach(self, engine_id: str, receiver: Receiver) -> None:
        """Add an engine, or replace it by a new instance that has nothing."""
        self.receivers[engine_id], self.versions[engine_id] = receiver, 0
        self._change()

    def wake(self, engine_id: str) -> None:
        """End an engine's hanging."""
        self.hung.discard(engine_id)
        self.changed.notify()

    async def until_staging(self, engine_ids: set[str]) -> None:
        """Wait until exactly these are being sent a version."""
        assert await self.changed.first(lambda: self.staging == engine_ids or None, 30)

    async def until(self, version: int) -> None:
        """Wait until every engine serves the version."""
        await self.changed.first(lambda: all(each == version for each in self.versions.values()) or None, 30)
        assert set(self.versions.values()) == {version}

    async def ListEngines(
        self, request: llm_proxy_pb2.ListEnginesRequest, context: Context
    ) -> llm_proxy_pb2.ListEnginesResponse:
        if request.HasField("after_revision"):
            await self.changed.first(lambda: self._revision > request.after_revision or None, poll_seconds(context))
        return llm_proxy_pb2.ListEnginesResponse(
            engines=[
                llm_proxy_pb2.Engine(
                    engine_id=engine_id,
                    instance_id=receiver.instance_id,
                    state=llm_proxy_pb2.Engine.STATE_SERVING,
                    policy_version=self.versions[engine_id],
                )
                for engine_id, receiver in self.receivers.items()
            ],
            revision=self._revision,
            policy_version=self.policy_version,
        )

    async def BeginWeightUpdate(
        self, request: llm_proxy_pb2.BeginWeightUpdateRequest, context: Context
    ) -> llm_proxy_pb2.BeginWeightUpdateResponse:
        self.begun.append(request)
        results = await asyncio.gather(*(self._stage(request, transfer) for transfer in request.transfers))
        return llm_proxy_pb2.BeginWeightUpdateResponse(results=results)

    async def _stage(
        self, request: llm_proxy_pb2.BeginWeightUpdateRequest, transfer: llm_proxy_pb2.EngineTransfer
    ) -> llm_proxy_pb2.EngineTransferResult:
        receiver = self.receivers[transfer.engine_id]
        self.staging.add(transfer.engine_id)
        self.changed.notify()
        try:
            if not await self.changed.first(lambda: transfer.engine_id not in self.hung or None, self.hang_seconds):
                raise EngineFailed("The engine hangs.")
            if transfer.join:
                await receiver.ask("join", transfer.group)
            await receiver.ask("stage", request)
        except FarmError as error:
            return llm_proxy_pb2.EngineTransferResult(engine_id=transfer.engine_id, failure=to_failure(error))
        finally:
            self.staging.discard(transfer.engine_id)
        self._staged[transfer.engine_id] = request.policy_version
        return llm_proxy_pb2.EngineTransferResult(engine_id=transfer.engine_id)

    async def CommitWeightUpdate(
        self, request: llm_proxy_pb2.CommitWeightUpdateRequest, context: Context
    ) -> llm_proxy_pb2.CommitWeightUpdateResponse:
        holders = [name for name, version in self._staged.items() if version == request.policy_version]
        if not holders:
            raise WeightsNotStaged(f"No engine holds version {request.policy_version}.")
        self.committed.append(request)
        self._staged.clear()
        self.versions.update(dict.fromkeys(holders, request.policy_version))
        self.policy_version = request.policy_version
        self._change()
        return llm_proxy_pb2.CommitWeightUpdateResponse(engine_ids=holders)

    def _change(self) -> None:
        self._revision += 1
        self.changed.notify()


@asynccontextmanager
async def serving_proxy(port: int = 0) -> AsyncIterator[StandInProxy]:
    """A stand-in behind a real socket until the block ends."""
    stand_in = StandInProxy()
    server = aio.server(interceptors=[ErrorInterceptor()])
    llm_proxy_pb2_grpc.add_LlmProxyServiceServicer_to_server(stand_in, server)
    stand_in.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield stand_in
    finally:
        await server.stop(grace=None)
        for receiver in stand_in.receivers.values():
            await receiver.kill()


def evenly(episode: sample_buffer_pb2.Episode) -> float:
    """Even members are paid."""
    return 1.0 if episode.member % 2 == 0 else 0.0


async def play_forever(address: str, pay: Callable[[sample_buffer_pb2.Episode], float] = evenly) -> None:
    """Play every episode that the buffer leases, until cancelled: members that are paid act well."""
    async with rpc.channel(address) as channel:
        buffer = sample_buffer_pb2_grpc.SampleBufferServiceStub(channel)
        while True:
            ask = sample_buffer_pb2.LeaseEpisodesRequest(
                request_id=str(uuid.uuid4()), worker_id="player", max_leases=64
            )
            leased = await rpc.call(buffer.LeaseEpisodes, ask, timeout=30)
            for lease in leased.leases:
                await rpc.call(buffer.CompleteEpisode, _complete(lease, pay), timeout=30)


def _complete(
    lease: sample_buffer_pb2.EpisodeLease, pay: Callable[[sample_buffer_pb2.Episode], float]
) -> sample_buffer_pb2.CompleteEpisodeRequest:
    episode = lease.episode
    reward = pay(episode)
    played = trajectory(reward, action=7 if reward > 0 else 6, version=episode.policy_version, name=lease.lease_id)
    for turn in played.turns:
        for span in turn.version_spans:
            span.policy_version = episode.policy_version
    played.run_id, played.group_id, played.member = episode.run_id, episode.group_id, episode.member
    played.lease_policy_version = episode.policy_version
    played.task.CopyFrom(episode.task)
    return sample_buffer_pb2.CompleteEpisodeRequest(
        request_id=str(uuid.uuid4()), lease_id=lease.lease_id, trajectory=played
    )
