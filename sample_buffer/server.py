"""Adapts gRPC to the ledger: each handler decodes, makes one transition, waits until it is durable, encodes."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any, TypeVar

import grpc
import structlog
from grpc import aio

from rollfarm.error_wire import to_failure
from rollfarm.errors import FarmError
from rollfarm.service import POLL_SECONDS, poll_seconds
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import sample_buffer_pb2_grpc
from sample_buffer import checks, views, wire
from sample_buffer.ledger import Ledger
from sample_buffer.runs import Runs
from sample_buffer.state import Batch, Lease

log = structlog.get_logger()
T = TypeVar("T")

SERVICE = pb.DESCRIPTOR.services_by_name["SampleBufferService"].full_name

Context = aio.ServicerContext[Any, Any]


class SampleBufferServicer(sample_buffer_pb2_grpc.SampleBufferServiceServicer):
    """The service."""

    def __init__(self, ledger: Ledger, stop: asyncio.Event, *, max_trajectory_bytes: int) -> None:
        self._ledger = ledger
        self._max_trajectory_bytes = max_trajectory_bytes
        self._stop = stop

    async def wake_on_stop(self) -> None:
        """Let long polls answer at once when the service stops; the drain would wait for them."""
        await self._stop.wait()
        self._ledger.changed.notify()

    async def _first(self, ready: Callable[[], T | None], context: Context, *, most: float = POLL_SECONDS) -> T | None:
        """The first answer before the caller's deadline or the end of the service, and within `most` seconds."""

        def look() -> T | asyncio.Event | None:
            answer = ready()
            return self._stop if answer is None and self._stop.is_set() else answer

        answer = await self._ledger.changed.first(look, poll_seconds(context, most=most))
        return None if isinstance(answer, asyncio.Event) else answer

    def register(self, server: aio.Server) -> None:
        """Serve. The calls that carry trajectories get handlers of their own, to which they are bytes.

        Among generic handlers the first of a name wins, and among registered ones the last.
        """
        complete_episode = grpc.unary_unary_rpc_method_handler(
            self.CompleteEpisode,
            request_deserializer=wire.COMPLETION.FromString,
            response_serializer=pb.CompleteEpisodeResponse.SerializeToString,
        )
        complete_episodes = grpc.unary_unary_rpc_method_handler(
            self.CompleteEpisodes,
            request_deserializer=wire.COMPLETIONS.FromString,
            response_serializer=pb.CompleteEpisodesResponse.SerializeToString,
        )
        lease_batch = grpc.unary_stream_rpc_method_handler(
            self.LeaseBatch, request_deserializer=pb.LeaseBatchRequest.FromString, response_serializer=bytes
        )
        handlers = {
            "CompleteEpisode": complete_episode,
            "CompleteEpisodes": complete_episodes,
            "LeaseBatch": lease_batch,
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        sample_buffer_pb2_grpc.add_SampleBufferServiceServicer_to_server(self, server)
        server.add_registered_method_handlers(SERVICE, handlers)  # pyright: ignore[reportAttributeAccessIssue]

    async def ConfigureRun(self, request: pb.ConfigureRunRequest, context: Context) -> pb.ConfigureRunResponse:
        now = self._ledger.now()
        created, groups = self._ledger.execute(
            lambda runs: runs.configure(request.request_id, request.trainer_id, request.spec, secrets.token_hex(4), now)
        )
        state = groups.state
        answer = pb.ConfigureRunResponse(
            created=created,
            policy_version=state.version,
            next_commit_step=state.next_commit_step,
            next_batch_step=state.next_batch_step,
            next_group_index=state.next_group,
        )
        await self._ledger.durable()
        log.info(
            "run configured",
            run_id=state.run_id,
            trainer_id=state.trainer_id,
            created=created,
            policy_version=state.version,
        )
        return answer

    async def LeaseEpisodes(self, request: pb.LeaseEpisodesRequest, context: Context) -> pb.LeaseEpisodesResponse:
        leases = await self._first(lambda: self._lease(request), context)
        if leases is None:
            return pb.LeaseEpisodesResponse()
        answer = pb.LeaseEpisodesResponse(leases=leases)
        await self._ledger.durable()
        return answer

    def _lease(self, request: pb.LeaseEpisodesRequest) -> list[pb.EpisodeLease] | None:
        ledger = self._ledger
        if not ledger.runs.current:
            return None
        groups = ledger.runs.run("")
        leases: list[Lease] = ledger.execute(
            lambda runs: runs.run("").lease(
                request.request_id,
                request.worker_id,
                request.max_leases,
                request.environments,
                ledger.now(),
                excluded=request.excluded_environments,
            )
        )
        return [views.episode_lease(groups, lease) for lease in leases] or None

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        now = self._ledger.now()
        lease_ids = list(request.lease_ids)
        cancelled = self._ledger.execute(lambda runs: runs.heartbeat(request.worker_id, lease_ids, now))
        if not cancelled and request.HasField("wait_duration"):
            seconds = request.wait_duration.ToNanoseconds() / 1e9
            watch = self._watch(request.worker_id, lease_ids)
            cancelled = await self._first(watch, context, most=seconds) or []
        await self._ledger.durable()
        return pb.HeartbeatResponse(cancelled=cancelled)

    def _watch(self, worker_id: str, lease_ids: list[str]) -> Callable[[], list[pb.CancelledLease] | None]:
        """Looks for leases to cancel. Every change wakes it, and few are worth a look at each lease."""
        seen = (self._ledger.runs, self._ledger.runs.revoked_count)

        def look() -> list[pb.CancelledLease] | None:
            nonlocal seen
            runs = self._ledger.runs
            if seen == (runs, runs.revoked_count):
                return None
            seen = (runs, runs.revoked_count)
            return self._ledger.execute(lambda runs: runs.cancelled(worker_id, lease_ids)) or None

        return look

    async def CompleteEpisode(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: wire.Completion, context: Context
    ) -> pb.CompleteEpisodeResponse:
        now = self._ledger.now()
        disposition = self._ledger.execute(lambda runs: self._complete(runs, request, now))
        await self._ledger.durable()
        return pb.CompleteEpisodeResponse(disposition=disposition)

    async def CompleteEpisodes(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: wire.Completions, context: Context
    ) -> pb.CompleteEpisodesResponse:
        now = self._ledger.now()
        results = self._ledger.execute(lambda runs: [self._result(runs, one, now) for one in request.completions])
        await self._ledger.durable()
        return pb.CompleteEpisodesResponse(results=results)

    def _result(self, runs: Runs, request: wire.Completion, now: float) -> pb.CompletionResult:
        try:
            return _completed(self._complete(runs, request, now))
        except FarmError as error:
            return pb.CompletionResult(failure=to_failure(error))

    def _complete(self, runs: Runs, request: wire.Completion, now: float) -> pb.Disposition.ValueType:
        lease_id, payload = request.lease_id, request.trajectory
        checks.check_size(len(payload), self._max_trajectory_bytes)
        trajectory = checks.parse(payload)
        disposition, keep = runs.of_lease(lease_id).complete(request.request_id, lease_id, trajectory, now)
        if keep:
            self._ledger.keep(lease_id, payload)
        return disposition

    async def FailEpisode(self, request: pb.FailEpisodeRequest, context: Context) -> pb.FailEpisodeResponse:
        now = self._ledger.now()
        retried = self._ledger.execute(
            lambda runs: runs.of_lease(request.lease_id).fail(
                request.request_id, request.lease_id, request.outcome, request.detail, now
            )
        )
        await self._ledger.durable()
        return pb.FailEpisodeResponse(retried=retried)

    async def LeaseBatch(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.LeaseBatchRequest, context: Context
    ) -> AsyncIterator[bytes]:
        ledger = self._ledger
        taken = await self._first(lambda: self._take(request), context)
        if taken is None:
            return
        batch, redelivered = taken
        head = pb.Batch(
            batch_id=batch.batch_id,
            step=batch.step,
            policy_version=batch.version,
            group_count=len(batch.groups),
            redelivered=redelivered,
        )
        groups = views.raw_groups(ledger.runs.run(request.run_id), batch, ledger.payload)
        await ledger.durable()
        log.info(
            "batch leased",
            step=batch.step,
            groups=len(batch.groups),
            redelivered=redelivered,
            trainer_id=request.trainer_id,
        )
        for message in wire.messages(head, groups):
            yield message

    def _take(self, request: pb.LeaseBatchRequest) -> tuple[Batch, bool] | None:
        now = self._ledger.now()
        return self._ledger.execute(
            lambda runs: runs.of_trainer(request.run_id, request.trainer_id).take(request.step, now)
        )

    async def CommitStep(self, request: pb.CommitStepRequest, context: Context) -> pb.CommitStepResponse:
        now = self._ledger.now()
        next_step = self._ledger.execute(
            lambda runs: runs.of_trainer(request.run_id, request.trainer_id).commit(
                request.request_id, request.step, request.batch_id, now
            )
        )
        await self._ledger.durable()
        return pb.CommitStepResponse(next_commit_step=next_step)

    async def PublishVersion(self, request: pb.PublishVersionRequest, context: Context) -> pb.PublishVersionResponse:
        now = self._ledger.now()
        stale = self._ledger.execute(
            lambda runs: runs.of_trainer(request.run_id, request.trainer_id).publish(
                request.request_id, request.policy_version, request.trained_step_count, now
            )
        )
        await self._ledger.durable()
        log.info("version published", policy_version=request.policy_version, stale_groups=stale)
        return pb.PublishVersionResponse(stale_group_count=stale)

    async def StartValidation(self, request: pb.StartValidationRequest, context: Context) -> pb.StartValidationResponse:
        now = self._ledger.now()
        self._ledger.execute(
            lambda runs: runs.run(request.run_id).start_validation(
                request.request_id, request.validation_id, request.episode_count, now
            )
        )
        await self._ledger.durable()
        return pb.StartValidationResponse()

    async def WaitValidation(self, request: pb.WaitValidationRequest, context: Context) -> pb.WaitValidationResponse:
        def results() -> pb.WaitValidationResponse:
            return views.validation_results(self._ledger.runs.run(request.run_id), request.validation_id)

        def finished() -> pb.WaitValidationResponse | None:
            return answer if (answer := results()).finished else None

        answer = await self._first(finished, context)
        if answer is not None:
            await self._ledger.durable()
        return answer or results()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return views.status(self._ledger.runs.run(request.run_id), self._ledger.now())

    async def ListTrajectories(
        self, request: pb.ListTrajectoriesRequest, context: Context
    ) -> pb.ListTrajectoriesResponse:
        return views.list_trajectories(self._ledger.runs.run(request.run_id), request, self._ledger.payload)

    async def GetLineage(self, request: pb.GetLineageRequest, context: Context) -> pb.GetLineageResponse:
        groups = self._ledger.runs.of_trajectory(request.trajectory_id)
        return views.lineage(groups, request.trajectory_id, self._ledger.payload)


@cache
def _completed(disposition: pb.Disposition.ValueType) -> pb.CompletionResult:
    """One of many was taken. The answer is copied from it."""
    return pb.CompletionResult(completed=pb.CompleteEpisodeResponse(disposition=disposition))
