"""New weights: received or read by the engines while they generate, then put to use by all in one short pause.

Begin stages the version on each engine by itself; Commit closes the gate, applies on every engine that holds it, and
opens the gate. Invariant: the gate is open again whatever happens, and an engine is only said to serve a version once
it has answered so itself. Commits are carried out one at a time, and to their end even when the caller has gone.
"""

import asyncio
import math
import time
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from google.protobuf import duration_pb2

from llm_proxy.engines import Fleet
from llm_proxy.routing import DRAINING, SERVING, SUSPENDED
from rollfarm import rpc
from rollfarm.error_wire import to_failure
from rollfarm.errors import (
    DeadlineExceeded,
    EngineFailed,
    FarmError,
    VersionOutOfOrder,
    WeightsFailed,
    WeightsMismatch,
    WeightsNotStaged,
)
from rollfarm.v1 import engine_pb2, llm_proxy_pb2

log = structlog.get_logger()

T = TypeVar("T")

SERVES = (SERVING, SUSPENDED, DRAINING)
"""States of an engine whose version counts, whether or not it gets requests."""

_ANSWER_MARGIN_SECONDS = 0.25
"""Left of the caller's deadline to answer with what became of each engine."""


@dataclass(frozen=True)
class Change:
    """A version that is put to use."""

    version: int
    mode: "engine_pb2.UpdateMode.ValueType"
    instances: dict[str, str]
    """The instance of each engine that holds it."""

    drain_seconds: float
    """How long requests of an engine that is to change may go on under the old weights in UPDATE_MODE_DRAIN."""

    drain_until: float
    """And until when at most, monotonic."""

    @property
    def drains(self) -> bool:
        return self.mode == engine_pb2.UPDATE_MODE_DRAIN


Pauses = dict[str, duration_pb2.Duration]
"""How long each engine that took a version stood still."""


class WeightUpdates:
    """Every weight update of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._router = fleet.router
        self._config = fleet.config
        self._staged: dict[str, tuple[str, int]] = {}
        """By engine: the instance and the version that it holds in memory."""

        self._sender_id = ""
        """Who staged that."""

        self._one_at_a_time = asyncio.Lock()
        self._unfinished: set[asyncio.Task[Any]] = set()

    async def begin(self, request: llm_proxy_pb2.BeginWeightUpdateRequest) -> llm_proxy_pb2.BeginWeightUpdateResponse:
        """Stage the version on every engine named, in place of what was staged there before. Raises VersionOutOfOrder.

        A commit that is under way, perhaps of a trainer that died, ends first: it counts on what is staged.
        """
        async with self._one_at_a_time:
            self._check_order(request.policy_version)
            if not request.sender_id or request.sender_id != self._sender_id:
                # A trainer that died may have left other weights under the same number: no engine may apply those.
                self._staged.clear()
                self._sender_id = request.sender_id
            for transfer in request.transfers:
                if self._staged.get(transfer.engine_id, ("", 0))[0] == transfer.instance_id:
                    del self._staged[transfer.engine_id]
        results = await asyncio.gather(*(self._begin_one(request, transfer) for transfer in request.transfers))
        return llm_proxy_pb2.BeginWeightUpdateResponse(results=results)

    async def commit(
        self, request: llm_proxy_pb2.CommitWeightUpdateRequest
    ) -> llm_proxy_pb2.CommitWeightUpdateResponse:
        """Put the staged version to use.

        Raises WeightsNotStaged, VersionOutOfOrder and, where it cannot drain, DeadlineExceeded.
        """
        self._check_order(request.policy_version)
        drain_until = time.monotonic() + rpc.remaining(math.inf) - _ANSWER_MARGIN_SECONDS
        return await self._to_the_end(self._commit_alone(request, drain_until))

    async def abort(self, policy_version: int) -> None:
        """Forget a staged version everywhere; an engine that cannot be told forgets when it stages the next."""
        await asyncio.gather(*(self._discard(engine_id, policy_version) for engine_id in self._holders(policy_version)))

    # --- begin ---

    async def _begin_one(
        self, request: llm_proxy_pb2.BeginWeightUpdateRequest, transfer: llm_proxy_pb2.EngineTransfer
    ) -> llm_proxy_pb2.EngineTransferResult:
        began = time.monotonic()
        try:
            await self._stage(request, transfer)
        except FarmError as error:
            log.warning("engine did not take weights", engine_id=transfer.engine_id, cause=str(error))
            return llm_proxy_pb2.EngineTransferResult(engine_id=transfer.engine_id, failure=to_failure(error))
        seconds = round(time.monotonic() - began, 3)
        log.debug(
            "weights staged", engine_id=transfer.engine_id, policy_version=request.policy_version, seconds=seconds
        )
        return llm_proxy_pb2.EngineTransferResult(engine_id=transfer.engine_id)

    async def _stage(
        self, request: llm_proxy_pb2.BeginWeightUpdateRequest, transfer: llm_proxy_pb2.EngineTransfer
    ) -> None:
        engine_id, group = transfer.engine_id, transfer.group
        connection = self._fleet.connection(engine_id)
        connection.check_reached()
        if (there := self._instance(engine_id)) != transfer.instance_id:
            raise EngineFailed(
                f"Instance {transfer.instance_id!r} of engine {engine_id} is gone; {there!r} runs in its place.",
                engine_id=engine_id,
                instance_id=there,
            )
        if transfer.join:
            join = engine_pb2.JoinWeightsRequest(group=group)
            await connection.ask("JoinWeights", join, timeout=_within(self._config.join_timeout_seconds))
        stage = engine_pb2.StageWeightsRequest(
            group_name=group.group_name,
            policy_version=request.policy_version,
            tensors=request.tensors,
            bucket_size_bytes=request.bucket_size_bytes,
            checksums=request.checksums,
        )
        if transfer.HasField("stored"):
            stage.stored.CopyFrom(transfer.stored)
        elif request.HasField("stored"):
            stage.stored.CopyFrom(request.stored)
        elif request.HasField("shared"):
            stage.shared.CopyFrom(request.shared)
        await connection.ask("StageWeights", stage, timeout=_within(self._config.stage_timeout_seconds))
        self._staged[engine_id] = (transfer.instance_id, request.policy_version)

    # --- commit ---

    async def _commit_alone(
        self, request: llm_proxy_pb2.CommitWeightUpdateRequest, drain_until: float
    ) -> llm_proxy_pb2.CommitWeightUpdateResponse:
        async with self._one_at_a_time:
            version = request.policy_version
            self._check_order(version)
            holders = self._holders(version)
            if not holders:
                if serving := self._serving(version):
                    return llm_proxy_pb2.CommitWeightUpdateResponse(engine_ids=serving)
                raise WeightsNotStaged(f"No engine holds version {version}.", policy_version=version)
            mode = request.mode or engine_pb2.UPDATE_MODE_KEEP
            change = Change(version, mode, holders, self._config.drain_timeout_seconds, drain_until)
            if version > self._router.policy_version:
                return self._committed(change, await self._put_to_use(change, request.concurrent_engine_count))
            for engine_id in holders:
                self._staged.pop(engine_id, None)
        # They catch up with the others, whose next version does not wait for that.
        return self._committed(change, await self._change_all(change))

    async def _put_to_use(self, change: Change, concurrent_engine_count: int) -> Pauses:
        if concurrent_engine_count > 0:
            return await self._roll(change, concurrent_engine_count)
        self._router.close_gate()
        try:
            return await self._change_all(change)
        finally:
            self._router.open_gate()
            self._fleet.wake()

    def _committed(self, change: Change, pauses: Pauses) -> llm_proxy_pb2.CommitWeightUpdateResponse:
        version, serving = change.version, self._serving(change.version)
        if not pauses.keys() & set(serving):
            problem = f"None of {len(change.instances)} engines applied version {version}."
            raise WeightsNotStaged(problem, policy_version=version)
        longest = max(pauses.values(), key=lambda pause: pause.ToNanoseconds())
        log.info(
            "weights committed", policy_version=version, engines=len(pauses), pause_s=longest.ToNanoseconds() / 1e9
        )
        return llm_proxy_pb2.CommitWeightUpdateResponse(engine_ids=serving, pause_duration=longest)

    async def _change_all(self, change: Change) -> Pauses:
        """All together: whichever applied it serve it from one moment on."""
        for engine_id in change.instances:
            self._router.hold(engine_id)
        try:
            if change.drains and (busy := await self._still_busy(change.instances, change)):
                raise DeadlineExceeded(f"{busy} requests still run; the old weights keep serving.", running_count=busy)
            applied = await asyncio.gather(*(self._apply(engine_id, change) for engine_id in change.instances))
            engine_ids = change.instances.keys()
            pauses = {name: pause for name, pause in zip(engine_ids, applied, strict=True) if pause is not None}
            self._serve(change, pauses)
        finally:
            self._release(change.instances)
        return pauses

    async def _roll(self, change: Change, concurrent_engine_count: int) -> Pauses:
        """A few at a time, those first that do not serve anyway, then those with least to do; the others serve on."""
        pauses: Pauses = {}
        places = asyncio.Semaphore(concurrent_engine_count)

        async def take_turn(engine_id: str) -> None:
            async with places:
                if (pause := await self._change_one(engine_id, change)) is not None:
                    pauses[engine_id] = pause

        order = sorted(self._router.engines, key=lambda engine: (engine.state == SERVING, engine.load))
        self._router.begin_roll()
        try:
            await asyncio.gather(*(take_turn(each.engine_id) for each in order if each.engine_id in change.instances))
        finally:
            self._router.end_roll(time.monotonic())
            self._fleet.wake()
        return pauses

    async def _change_one(self, engine_id: str, change: Change) -> duration_pb2.Duration | None:
        """How long the engine stood still, or None where it failed."""
        self._router.hold(engine_id)
        try:
            if change.drains and (busy := await self._still_busy([engine_id], change)):
                log.warning("engine did not drain", engine_id=engine_id, running=busy)
                return None
            pause = await self._apply(engine_id, change)
            if pause is not None:
                self._serve(change, [engine_id])
            return pause
        finally:
            self._release([engine_id])

    def _serve(self, change: Change, engine_ids: Collection[str]) -> None:
        instances = {engine_id: change.instances[engine_id] for engine_id in engine_ids}
        self._router.served(instances, change.version, time.monotonic())

    def _release(self, engine_ids: Collection[str]) -> None:
        for engine_id in engine_ids:
            self._router.release(engine_id, time.monotonic())
        self._fleet.wake()

    async def _apply(self, engine_id: str, change: Change) -> duration_pb2.Duration | None:
        """How long the engine stood still, or None where it failed. One that did not say why is looked at anew."""
        request = engine_pb2.ApplyWeightsRequest(policy_version=change.version, mode=change.mode)
        timeout = self._config.apply_timeout_seconds
        self._staged.pop(engine_id, None)
        connection = self._fleet.find(engine_id)
        if connection is None:
            return None
        with connection.updating():
            try:
                return (await connection.ask("ApplyWeights", request, timeout=timeout)).pause_duration
            except (WeightsNotStaged, WeightsMismatch, WeightsFailed) as error:
                log.warning("engine refused to apply weights", engine_id=engine_id, cause=str(error))
            except FarmError as error:
                log.warning("engine did not apply weights", engine_id=engine_id, cause=str(error))
                connection.give_up(f"it did not apply version {change.version}: {error.problem}")
        return None

    async def _still_busy(self, engine_ids: Collection[str], change: Change) -> int:
        """Requests that these engines still run when they should have none; 0 as soon as they have."""
        until = min(time.monotonic() + change.drain_seconds, change.drain_until)
        engines = [engine for engine in self._router.engines if engine.engine_id in engine_ids]

        def is_idle() -> bool | None:
            return None if any(engine.attempts for engine in engines) else True

        await self._fleet.progressed.first(is_idle, max(0.0, until - time.monotonic()))
        return sum(len(engine.attempts) for engine in engines)

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, which goes on when the caller is cancelled, and is not bound by the caller's deadline."""
        task = asyncio.get_running_loop().create_task(work, context=rpc.detached())
        self._unfinished.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._unfinished.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("commit failed", cause=str(error))

    # --- abort and what is held ---

    async def _discard(self, engine_id: str, policy_version: int) -> None:
        self._staged.pop(engine_id, None)
        request = engine_pb2.DiscardWeightsRequest(policy_version=policy_version)
        connection = self._fleet.connection(engine_id)
        try:
            await connection.ask("DiscardWeights", request, timeout=self._config.health_timeout_seconds)
        except FarmError as error:
            log.warning("engine did not discard weights", engine_id=engine_id, cause=str(error))

    def _holders(self, version: int) -> dict[str, str]:
        """The instances with the version in memory, by engine. Those that were restarted or detached are forgotten."""
        here = {engine.engine_id: engine.status.instance_id for engine in self._router.engines}
        self._staged = {name: held for name, held in self._staged.items() if here.get(name) == held[0]}
        return {engine_id: held[0] for engine_id, held in self._staged.items() if held[1] == version}

    def _instance(self, engine_id: str) -> str:
        return self._router.engine(engine_id).status.instance_id

    def _serving(self, version: int) -> list[str]:
        engines = self._router.engines
        return [engine.engine_id for engine in engines if engine.state in SERVES and engine.version == version]

    def _check_order(self, version: int) -> None:
        newest = self._router.policy_version
        if version < newest:
            raise VersionOutOfOrder(
                f"Version {version} is older than {newest}, which is served.",
                policy_version=version,
                newest_version=newest,
            )


def _within(seconds: float) -> float:
    """`seconds`, or what the caller's deadline leaves for an answer."""
    return min(seconds, rpc.remaining(seconds + _ANSWER_MARGIN_SECONDS) - _ANSWER_MARGIN_SECONDS)
