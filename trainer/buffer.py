"""The trainer's side of sample_buffer: each call idempotent, and tried until the buffer is there to answer it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from rollfarm import rpc
from rollfarm.errors import DeadlineExceeded, FarmError, is_retryable
from rollfarm.v1 import sample_buffer_pb2, sample_buffer_pb2_grpc
from trainer.batch_measures import buffer_measures

log = structlog.get_logger()

CALL_SECONDS = 30.0
POLL_SECONDS = 20.0
RETRY_SECONDS = 0.5
STATUS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """The groups of one step."""

    batch: sample_buffer_pb2.Batch
    """Names the delivery."""

    groups: list[sample_buffer_pb2.Group]
    """In training order."""


class BufferClient:
    """sample_buffer as the trainer of one run uses it."""

    def __init__(
        self, stub: sample_buffer_pb2_grpc.SampleBufferServiceAsyncStub, *, run_id: str, trainer_id: str
    ) -> None:
        self._stub = stub
        self._run_id = run_id
        self._trainer_id = trainer_id

    async def configure(self, spec: sample_buffer_pb2.RunSpec) -> sample_buffer_pb2.ConfigureRunResponse:
        """Create the run, or find it again, and take it over: every other trainer's calls raise TrainerReplaced."""
        request = sample_buffer_pb2.ConfigureRunRequest(request_id=_new_id(), trainer_id=self._trainer_id, spec=spec)
        return await _insist(self._stub.ConfigureRun, request)

    async def lease_batch(self, step: int) -> LeasedBatch:
        """The batch of the step, as soon as there is one. Safe to cancel: it is delivered again."""
        request = sample_buffer_pb2.LeaseBatchRequest(run_id=self._run_id, trainer_id=self._trainer_id, step=step)
        while True:
            try:
                leased = await self._poll_batch(request)
            except FarmError as error:
                _check_worth_retrying(error)
                log.info("batch not leased", step=step, cause=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if leased is not None:
                return leased

    async def _poll_batch(self, request: sample_buffer_pb2.LeaseBatchRequest) -> LeasedBatch | None:
        groups: list[sample_buffer_pb2.Group] = []
        async for part in rpc.stream(self._stub.LeaseBatch, request, timeout=POLL_SECONDS):
            join(groups, part.groups)
            if part.last:
                return LeasedBatch(part.batch, groups)
        return None

    async def commit(self, step: int, batch_id: str) -> None:
        """Say that a checkpoint holds the step."""
        request = sample_buffer_pb2.CommitStepRequest(
            request_id=_new_id(), run_id=self._run_id, trainer_id=self._trainer_id, step=step, batch_id=batch_id
        )
        await _insist(self._stub.CommitStep, request)

    async def publish_version(self, policy_version: int, trained_step_count: int) -> None:
        """Advance the clock."""
        request = sample_buffer_pb2.PublishVersionRequest(
            request_id=_new_id(),
            run_id=self._run_id,
            trainer_id=self._trainer_id,
            policy_version=policy_version,
            trained_step_count=trained_step_count,
        )
        await _insist(self._stub.PublishVersion, request)

    async def measures(self) -> dict[str, float]:
        """What it counted since the run began; nothing where it is away, for nobody waits for figures."""
        request = sample_buffer_pb2.GetStatusRequest(run_id=self._run_id)
        try:
            return buffer_measures(await rpc.call(self._stub.GetStatus, request, timeout=STATUS_SECONDS))
        except FarmError as error:
            log.info("sample_buffer tells no figures", cause=str(error))
            return {}

    async def dropped(self) -> dict[str, int]:
        """Groups that were dropped since the run began, by reason."""
        request = sample_buffer_pb2.GetStatusRequest(run_id=self._run_id)
        return dict((await _insist(self._stub.GetStatus, request)).dropped_group_counts)

    async def validate(self, validation_id: str, episode_count: int) -> list[sample_buffer_pb2.DomainResult]:
        """Play validation episodes, and wait for all of them."""
        start = sample_buffer_pb2.StartValidationRequest(
            request_id=_new_id(), run_id=self._run_id, validation_id=validation_id, episode_count=episode_count
        )
        await _insist(self._stub.StartValidation, start)
        wait = sample_buffer_pb2.WaitValidationRequest(run_id=self._run_id, validation_id=validation_id)
        while True:
            answer = await _insist(self._stub.WaitValidation, wait, timeout=POLL_SECONDS)
            if answer.finished:
                return list(answer.results)


def join(groups: list[sample_buffer_pb2.Group], more: Iterable[sample_buffer_pb2.Group]) -> None:
    """Add the groups of the next message. Its first one may go on with the last one of the message before."""
    for group in more:
        if groups and groups[-1].group_id == group.group_id:
            groups[-1].trajectories.extend(group.trajectories)
        else:
            groups.append(group)


async def _insist(method: Callable[..., Any], request: Any, *, timeout: float = CALL_SECONDS) -> Any:
    """The answer, however long the buffer is away. Every error but its absence is raised."""
    while True:
        try:
            return await rpc.call(method, request, timeout=timeout)
        except FarmError as error:
            _check_worth_retrying(error)
            log.info("sample_buffer is away", cause=str(error))


def _check_worth_retrying(error: FarmError) -> None:
    if not (is_retryable(error) or isinstance(error, DeadlineExceeded)):
        raise error


def _new_id() -> str:
    return str(uuid.uuid4())
