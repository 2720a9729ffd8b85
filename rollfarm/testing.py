"""Public test doubles: an engine whose tokens are known beforehand, behind the real contract and a real socket.

    engine = SimulatedEngine(slots=4)
    async with engine.serve() as address:
        ...  # point llm_proxy at the address

A token is a function of the tokens before it and of the policy version, so a test knows exactly what a generation that
moved between engines or versions has to contain.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from rollfarm import rpc, tokens
from rollfarm.error_wire import to_failure
from rollfarm.errors import FarmError, InvalidArgument, WeightsFailed, WeightsNotStaged
from rollfarm.generation import check_prompt
from rollfarm.service import Changed, ErrorInterceptor
from rollfarm.v1 import engine_pb2, engine_pb2_grpc, trajectory_pb2

Policy = Callable[[Sequence[int], int], int]
"""The next token after these ones, under this version."""

UNSPECIFIED = trajectory_pb2.FINISH_REASON_UNSPECIFIED
STOP = trajectory_pb2.FINISH_REASON_STOP
LENGTH = trajectory_pb2.FINISH_REASON_LENGTH
ABORT = trajectory_pb2.FINISH_REASON_ABORT


def simulated_token(position: int, version: int, vocabulary_size: int = 256) -> int:
    """The token at `position` of prompt and output together, by the default policy."""
    return (7 * position + 13 * version + 1) % vocabulary_size


def simulated_logprob(token: int, version: int) -> float:
    """Its log-probability; exact in float32."""
    return -(1 + token % 16) / 16 - version


@dataclass(eq=False)
class _Running:
    generation: engine_pb2.Generation
    outbox: asyncio.Queue[engine_pb2.GenerationChunk]
    ids: list[int]
    made: int = 0


@dataclass(eq=False)
class SimulatedEngine(engine_pb2_grpc.EngineServiceServicer):
    """Decodes `slots` requests at once, `chunk_tokens` each a step. Fields may be changed while it serves."""

    slots: int = 8
    version: int = 0
    vocabulary_size: int = 256
    context_tokens: int = 4096
    policy: Policy | None = None
    """Unset is `simulated_token`."""

    chunk_tokens: int = 1
    """Tokens of each request in a step."""

    step_seconds: float = 0.0
    """Pause after each step."""

    token_limit: int | None = None
    """A request waits after this many tokens, until the limit is raised with `allow`."""

    is_hung: bool = False
    """GetStatus does not answer."""

    join_error: FarmError | None = None
    """JoinWeights raises it."""

    stage_error: FarmError | None = None
    """StageWeights raises it."""

    apply_error: FarmError | None = None
    """ApplyWeights raises it."""

    sleep_error: FarmError | None = None
    """Sleep raises it."""

    stage_seconds: float = 0.0
    """Duration of StageWeights."""

    apply_seconds: float = 0.0
    """Duration of ApplyWeights, in which nothing is decoded."""

    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    staged: int | None = None
    group_name: str = ""
    most_running: int = 0
    """Most requests that were open at once."""

    generated_count: int = 0
    """Tokens generated."""

    is_staging: bool = False
    is_applying: bool = False
    is_asleep: bool = False
    has_weights: bool = True
    applied_modes: list[int] = field(default_factory=list)
    """Of every ApplyWeights that changed the version."""

    _open: dict[str, _Running] = field(default_factory=dict)
    _paused: bool = False
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: Changed = field(default_factory=Changed)

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Serve on loopback and yield host:port. Leaving cuts every stream, as a crash would."""
        server = aio.server(interceptors=[ErrorInterceptor()], options=[*rpc.MESSAGE_OPTIONS, ("grpc.so_reuseport", 0)])
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        decoding = asyncio.create_task(self._decode())
        try:
            yield f"127.0.0.1:{bound}"
        finally:
            decoding.cancel()
            await server.stop(grace=None)
            self._open.clear()

    def allow(self, token_limit: int | None) -> None:
        """Change `token_limit` and go on."""
        self.token_limit = token_limit
        self._work.set()

    async def until(self, reached: Callable[[], bool], seconds: float = 20.0) -> None:
        """Wait until `reached()`, looked at after every change. Raises TimeoutError."""
        if not await self._changed.first(lambda: reached() or None, seconds):
            raise TimeoutError("the simulated engine did not get there")

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests that it has."""
        return list(self._open)

    @property
    def traces(self) -> dict[str, str]:
        """The trace of each request that it has."""
        return {request_id: running.generation.trace_id for request_id, running in self._open.items()}

    @property
    def is_stalled(self) -> bool:
        """Whether it has requests and each has used up `token_limit`."""
        return bool(self._open) and all(not self._may_go_on(running) for running in self._open.values())

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        outbox: asyncio.Queue[engine_pb2.GenerationChunk] = asyncio.Queue()
        reading = asyncio.create_task(self._read(request_iterator, outbox))
        try:
            while True:
                chunks = [await outbox.get()]
                while not outbox.empty():
                    chunks.append(outbox.get_nowait())
                yield engine_pb2.EngineServiceGenerateResponse(chunks=chunks)
        finally:
            reading.cancel()
            self._open = {name: running for name, running in self._open.items() if running.outbox is not outbox}
            self._changed.notify()

    async def Cancel(self, request: engine_pb2.EngineServiceCancelRequest, context: Any) -> Any:
        self._abort(request.request_ids)
        return engine_pb2.EngineServiceCancelResponse()

    async def Pause(self, request: engine_pb2.EngineServicePauseRequest, context: Any) -> Any:
        self._paused = True
        return engine_pb2.EngineServicePauseResponse()

    async def Resume(self, request: engine_pb2.EngineServiceResumeRequest, context: Any) -> Any:
        self._paused = False
        self._work.set()
        return engine_pb2.EngineServiceResumeResponse()

    async def JoinWeights(self, request: engine_pb2.JoinWeightsRequest, context: Any) -> Any:
        if self.join_error is not None:
            raise self.join_error
        self.group_name = request.group.group_name
        return engine_pb2.JoinWeightsResponse()

    async def StageWeights(self, request: engine_pb2.StageWeightsRequest, context: Any) -> Any:
        if self.stage_error is not None:
            raise self.stage_error
        if request.group_name != self.group_name:
            raise WeightsFailed(f"Not in group {request.group_name!r}.", group_name=request.group_name)
        self.is_staging = True
        self._changed.notify()
        await asyncio.sleep(self.stage_seconds)
        self.staged, self.is_staging = request.policy_version, False
        self._changed.notify()
        return engine_pb2.StageWeightsResponse()

    async def ApplyWeights(self, request: engine_pb2.ApplyWeightsRequest, context: Any) -> Any:
        if self.apply_error is not None:
            raise self.apply_error
        if request.policy_version == self.version:
            return engine_pb2.ApplyWeightsResponse()
        if request.policy_version != self.staged:
            raise WeightsNotStaged(
                f"Version {request.policy_version} is not staged.", policy_version=request.policy_version
            )
        if request.mode == engine_pb2.UPDATE_MODE_RESUME:
            self._abort(list(self._open))
        self.is_applying = True
        self._changed.notify()
        await asyncio.sleep(self.apply_seconds)
        self.is_applying = False
        self.version, self.staged, self.has_weights = request.policy_version, None, True
        self._work.set()
        self.applied_modes.append(request.mode)
        self._changed.notify()
        return engine_pb2.ApplyWeightsResponse()

    async def DiscardWeights(self, request: engine_pb2.DiscardWeightsRequest, context: Any) -> Any:
        if self.staged == request.policy_version:
            self.staged = None
        return engine_pb2.DiscardWeightsResponse()

    async def Sleep(self, request: engine_pb2.SleepRequest, context: Any) -> Any:
        if self.sleep_error is not None:
            raise self.sleep_error
        self._abort(list(self._open))
        self.is_asleep = True
        self.has_weights = self.has_weights and not request.discard_weights
        self._changed.notify()
        return engine_pb2.SleepResponse()

    async def WakeUp(self, request: engine_pb2.WakeUpRequest, context: Any) -> Any:
        if self.sleep_error is not None:
            raise self.sleep_error
        self.is_asleep = False
        self._work.set()
        self._changed.notify()
        return engine_pb2.WakeUpResponse()

    async def GetStatus(self, request: engine_pb2.EngineServiceGetStatusRequest, context: Any) -> Any:
        if self.is_hung:
            await asyncio.Event().wait()
        return engine_pb2.EngineServiceGetStatusResponse(
            instance_id=self.instance_id,
            adapter="simulated",
            policy_version=self.version,
            slot_count=self.slots,
            context_token_count=self.context_tokens,
            vocabulary_size=self.vocabulary_size,
            running_count=min(self.slots, len(self._open)),
            waiting_count=max(0, len(self._open) - self.slots),
            generated_token_count=self.generated_count,
            paused=self._paused,
            sleeping=self.is_asleep or not self.has_weights,
        )

    async def _read(self, request_iterator: Any, outbox: asyncio.Queue[engine_pb2.GenerationChunk]) -> None:
        async for message in request_iterator:
            for generation in message.generations:
                self._admit(_Running(generation, outbox, tokens.unpack_ids(generation.prompt_token_ids).tolist()))
            self.most_running = max(self.most_running, len(self._open))
            self._work.set()
            self._changed.notify()

    def _admit(self, running: _Running) -> None:
        request_id, prompt = running.generation.request_id, running.generation.prompt_token_ids
        limits = {"context_tokens": self.context_tokens, "vocabulary_size": self.vocabulary_size}
        try:
            check_prompt(tokens.unpack_ids(prompt), **limits)
            self._open[request_id] = running
        except InvalidArgument as error:
            running.outbox.put_nowait(engine_pb2.GenerationChunk(request_id=request_id, failure=to_failure(error)))

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if (running := self._open.pop(request_id, None)) is not None:
                running.outbox.put_nowait(engine_pb2.GenerationChunk(request_id=request_id, finish_reason=ABORT))
        self._work.set()
        self._changed.notify()

    async def _decode(self) -> None:
        while True:
            await self._work.wait()
            decoding = [running for running in list(self._open.values())[: self.slots] if self._may_go_on(running)]
            if not decoding or self._stands_still:
                self._work.clear()
            for running in decoding if not self._stands_still else ():
                self._advance(running)
            self._changed.notify()
            await asyncio.sleep(self.step_seconds)

    @property
    def _stands_still(self) -> bool:
        return self._paused or self.is_applying or self.is_asleep or not self.has_weights

    def _may_go_on(self, running: _Running) -> bool:
        return self.token_limit is None or running.made < self.token_limit

    def _advance(self, running: _Running) -> None:
        new: list[int] = []
        reason = UNSPECIFIED
        while not reason and len(new) < self.chunk_tokens and self._may_go_on(running):
            new.append(self._next_token(running.ids))
            running.ids.append(new[-1])
            running.made += 1
            reason = self._finish_reason(running)
        self.generated_count += len(new)
        if reason:
            del self._open[running.generation.request_id]
        running.outbox.put_nowait(
            engine_pb2.GenerationChunk(
                request_id=running.generation.request_id,
                token_ids=tokens.pack_ids(new),
                logprobs=tokens.pack_logprobs([simulated_logprob(token, self.version) for token in new]),
                version_spans=[trajectory_pb2.VersionSpan(policy_version=self.version, token_count=len(new))],
                finish_reason=reason,
            )
        )

    def _next_token(self, ids: list[int]) -> int:
        if self.policy is not None:
            return self.policy(ids, self.version)
        return simulated_token(len(ids), self.version, self.vocabulary_size)

    def _finish_reason(self, running: _Running) -> "trajectory_pb2.FinishReason.ValueType":
        sampling = running.generation.sampling
        if running.ids[-1] in sampling.stop_token_ids:
            return STOP
        if running.made >= sampling.max_tokens or len(running.ids) >= self.context_tokens:
            return LENGTH
        return UNSPECIFIED
