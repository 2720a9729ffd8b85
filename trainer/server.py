"""TrainerService: what the trainer tells and is told, for people and their tools."""

import asyncio
from typing import Any

from grpc import aio

from rollfarm.errors import DeadlineExceeded, Unsupported
from rollfarm.service import poll_seconds
from rollfarm.v1 import trainer_pb2, trainer_pb2_grpc
from trainer.controls import Controls
from trainer.progress import Progress

SERVICE = "rollfarm.v1.TrainerService"

Context = aio.ServicerContext[Any, Any]


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers from Progress, passes requests on to Controls."""

    def __init__(self, progress: Progress, controls: Controls | None) -> None:
        """Without `controls` nothing is learnt here."""
        self._progress = progress
        self._controls = controls

    async def GetProgress(
        self, request: trainer_pb2.GetProgressRequest, context: Context
    ) -> trainer_pb2.GetProgressResponse:
        return self._progress.to_proto(request.from_step if request.HasField("from_step") else None)

    async def WaitForVersion(
        self, request: trainer_pb2.WaitForVersionRequest, context: Context
    ) -> trainer_pb2.WaitForVersionResponse:
        def newer() -> int | None:
            return self._progress.policy_version if self._progress.policy_version > request.after_version else None

        await self._progress.changed.first(newer, poll_seconds(context))
        return trainer_pb2.WaitForVersionResponse(policy_version=self._progress.policy_version)

    async def Pause(
        self, request: trainer_pb2.TrainerServicePauseRequest, context: Context
    ) -> trainer_pb2.TrainerServicePauseResponse:
        self._require_controls().pause(True)
        return trainer_pb2.TrainerServicePauseResponse()

    async def Resume(
        self, request: trainer_pb2.TrainerServiceResumeRequest, context: Context
    ) -> trainer_pb2.TrainerServiceResumeResponse:
        self._require_controls().pause(False)
        return trainer_pb2.TrainerServiceResumeResponse()

    async def Checkpoint(
        self, request: trainer_pb2.CheckpointRequest, context: Context
    ) -> trainer_pb2.CheckpointResponse:
        try:
            async with asyncio.timeout(poll_seconds(context, most=600)):
                path, step_count = await self._require_controls().checkpoint()
        except TimeoutError:
            raise DeadlineExceeded("The step at hand is not done yet; its checkpoint will be saved.") from None
        return trainer_pb2.CheckpointResponse(path=str(path), step_count=step_count)

    def _require_controls(self) -> Controls:
        """Raises Unsupported."""
        if self._controls is None:
            raise Unsupported("Nothing is learnt here, so there is nothing to pause or to save.")
        return self._controls
