"""A tap on sample_buffer: passes every call on unchanged, byte for byte, and notes what was asked and answered.

env_manager and trainer reach sample_buffer through it. It runs in the auditor's process, so it outlives every kill.
"""

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

import grpc
from grpc import aio

from load_tests.killing.evidence import Accepted, Commit, Delivery, Evidence, Leased, Publication, Sample
from rollfarm import rpc, telemetry
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2 as tp

Context = aio.ServicerContext[Any, Any]
Note = Callable[[bytes, bytes, float], None]

Keep = Callable[[list[pb.LeaseBatchResponse]], None]
"""Is given every batch that was delivered whole."""

READS = ("Heartbeat", "GetStatus", "ListTrajectories", "GetLineage", "WaitValidation")
"""Calls whose answers need no journal."""


class Tap(grpc.GenericRpcHandler):
    """Serves whatever sample_buffer serves, from `upstream`, a channel to it."""

    def __init__(self, upstream: aio.Channel, evidence: Evidence, keep: Keep | None = None) -> None:
        self._upstream = upstream
        self._keep = keep
        self._evidence = evidence
        self._notes: dict[str, Note] = {
            "LeaseEpisodes": self._leased,
            "CompleteEpisode": self._completed,
            "CompleteEpisodes": self._completed_many,
            "CommitStep": self._committed,
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        path = handler_call_details.method
        name = path.rpartition("/")[2]
        if name == "LeaseBatch":
            return grpc.unary_stream_rpc_method_handler(self._stream(path))  # pyright: ignore[reportArgumentType]
        call = self._publish(path) if name == "PublishVersion" else self._call(path, name)
        return grpc.unary_unary_rpc_method_handler(call)  # pyright: ignore[reportArgumentType]

    def _call(self, path: str, name: str) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def call(request: bytes, context: Context) -> bytes:
            began = time.time()
            self._asked(name, request)
            answer = await self._pass_on(path, request, context)
            if note := self._notes.get(name):
                note(request, answer, began)
            if name not in READS and (name != "LeaseEpisodes" or answer):
                self._evidence.writes.append((began, time.time()))
            self._evidence.changed.notify()
            return answer

        return call

    def _publish(self, path: str) -> Callable[[bytes, Context], Awaitable[bytes]]:
        """A publication counts from the moment when it is asked for: it may happen and never be acknowledged."""

        async def call(request: bytes, context: Context) -> bytes:
            asked = pb.PublishVersionRequest.FromString(request)
            publication = Publication(asked.request_id, time.time(), asked.policy_version, asked.trained_step_count)
            self._evidence.publications.append(publication)
            answer = await self._pass_on(path, request, context)
            publication.at = time.time()
            self._evidence.writes.append((publication.began, publication.at))
            self._evidence.changed.notify()
            return answer

        return call

    async def _pass_on(self, path: str, request: bytes, context: Context) -> bytes:
        try:
            return await self._upstream.unary_unary(path)(request, **_as_asked(context))
        except aio.AioRpcError as refused:
            await _refuse(context, refused)
            raise

    def _stream(self, path: str) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
        async def call(request: bytes, context: Context) -> AsyncIterator[bytes]:
            began = time.time()
            parts: list[bytes] = []
            try:
                async for part in self._upstream.unary_stream(path)(request, **_as_asked(context)):
                    parts.append(part)
                    yield part
            except aio.AioRpcError as refused:
                await _refuse(context, refused)
            if parts:
                trainer_id = pb.LeaseBatchRequest.FromString(request).trainer_id
                self._evidence.deliveries.append(delivery(parts, trainer_id, began))
                if self._keep is not None:
                    self._keep([pb.LeaseBatchResponse.FromString(part) for part in parts])
                self._evidence.writes.append((began, time.time()))
                self._evidence.changed.notify()

        return call

    def _leased(self, request: bytes, answer: bytes, began: float) -> None:
        asked = pb.LeaseEpisodesRequest.FromString(request)
        leases = pb.LeaseEpisodesResponse.FromString(answer).leases
        training = {lease.lease_id: lease.episode.task.index for lease in leases if not lease.episode.validation_id}
        if training:
            self._evidence.leased.append(Leased(asked.request_id, time.time(), asked.worker_id, training))

    def _asked(self, name: str, request: bytes) -> None:
        """Note what counts even if it is never answered."""
        if name == "LeaseEpisodes":
            self._evidence.workers.add(pb.LeaseEpisodesRequest.FromString(request).worker_id)
        elif name == "CompleteEpisode":
            self._handed_in([pb.CompleteEpisodeRequest.FromString(request)])
        elif name == "CompleteEpisodes":
            self._handed_in(pb.CompleteEpisodesRequest.FromString(request).completions)

    def _handed_in(self, completions: Iterable[pb.CompleteEpisodeRequest]) -> None:
        for completion in completions:
            self._evidence.handed_in[completion.trajectory.trajectory_id] = sample(completion.trajectory)

    def _completed(self, request: bytes, answer: bytes, began: float) -> None:
        asked, answered = pb.CompleteEpisodeRequest.FromString(request), pb.CompleteEpisodeResponse.FromString(answer)
        self._accept(asked, answered.disposition)

    def _completed_many(self, request: bytes, answer: bytes, began: float) -> None:
        asked, answered = pb.CompleteEpisodesRequest.FromString(request), pb.CompleteEpisodesResponse.FromString(answer)
        for completion, result in zip(asked.completions, answered.results, strict=True):
            if result.HasField("completed"):
                self._accept(completion, result.completed.disposition)

    def _accept(self, asked: pb.CompleteEpisodeRequest, disposition: int) -> None:
        if disposition == pb.DISPOSITION_ACCEPTED:
            handed_in = self._evidence.handed_in[asked.trajectory.trajectory_id]
            self._evidence.accepted.append(Accepted(time.time(), asked.lease_id, handed_in))

    def _committed(self, request: bytes, answer: bytes, began: float) -> None:
        self._evidence.commits.append(Commit(time.time(), pb.CommitStepRequest.FromString(request).step))


def delivery(parts: list[bytes], trainer_id: str, began: float) -> Delivery:
    """The batch that a whole stream of LeaseBatchResponses brought."""
    messages = [pb.LeaseBatchResponse.FromString(part) for part in parts]
    batch = messages[-1].batch
    groups: dict[int, tuple[Sample, ...]] = {}
    for group in (group for message in messages for group in message.groups):
        groups[group.index] = groups.get(group.index, ()) + tuple(map(sample, group.trajectories))
    return Delivery(
        began, time.time(), trainer_id, batch.step, batch.batch_id, batch.policy_version, batch.redelivered, groups
    )


def sample(trajectory: tp.Trajectory) -> Sample:
    """What the audit needs of a trajectory. Its task's index is its group's k, as the farm has one domain."""
    return Sample(
        trajectory_id=trajectory.trajectory_id,
        index=trajectory.task.index,
        member=trajectory.member,
        oldest_version=min(_versions(trajectory), default=trajectory.lease_policy_version),
        reward=trajectory.reward,
        digest=hashlib.blake2b(trajectory.SerializeToString(deterministic=True), digest_size=16).digest(),
    )


def _versions(trajectory: tp.Trajectory) -> Iterator[int]:
    return (span.policy_version for turn in trajectory.turns for span in turn.version_spans)


def _as_asked(context: Context) -> dict[str, Any]:
    """The deadline and the trace of the caller, who waits for a service that is away, as every caller in a farm."""
    trace = [(name, value) for name, value in context.invocation_metadata() or () if name == telemetry.TRACE_METADATA]
    return {"timeout": context.time_remaining(), "metadata": trace, "wait_for_ready": True}


async def _refuse(context: Context, refused: aio.AioRpcError) -> None:
    trailing = tuple(refused.trailing_metadata() or ())
    await context.abort(refused.code(), refused.details() or "", trailing)


async def serve(tap: Tap) -> tuple[aio.Server, int]:
    """A server of the tap that has started, and its port."""
    server = aio.server(options=[*rpc.MESSAGE_OPTIONS, ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((tap,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port
