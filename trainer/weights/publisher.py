"""Publishes versions: engines receive, the buffer's clock advances, the proxy switches, in that order.

Whatever engine lacks the last published version afterwards (it restarted, joined late or failed, or llm_proxy
restarted) is brought up to date in the background, from a copy of the weights kept in memory.

An instance that failed to take a version is a suspect: publications leave it out, so it holds up at most one of them.
It is tried by itself, beside publications and other suspects, until it took a version.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import structlog

from rollfarm import rpc
from rollfarm.config import ConfigError
from rollfarm.errors import DeadlineExceeded, FarmError, WeightsNotStaged
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, llm_proxy_pb2_grpc
from trainer.weights.snapshot import Snapshot
from trainer.weights.transport import Transport

log = structlog.get_logger()

CALL_SECONDS = 10.0
POLL_SECONDS = 20.0
FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 5.0

MOST_DRAIN_SECONDS = 3600.0
"""Room in a commit's deadline for requests to finish; llm_proxy.drain_timeout_seconds ends a drain earlier."""

REACHABLE = (
    llm_proxy_pb2.Engine.STATE_BEHIND,
    llm_proxy_pb2.Engine.STATE_SERVING,
    llm_proxy_pb2.Engine.STATE_SUSPENDED,
)


class Publisher:
    """Owns what engines serve."""

    def __init__(
        self,
        proxy: llm_proxy_pb2_grpc.LlmProxyServiceAsyncStub,
        transport: Transport,
        *,
        mode: str,
        transfer_timeout_seconds: float,
        concurrent_engine_count: int = 0,
    ) -> None:
        """`concurrent_engine_count` engines change at a time; 0 is all at once."""
        self._proxy = proxy
        self._transport = transport
        self._mode = engine_pb2.UpdateMode.Value(f"UPDATE_MODE_{mode.upper()}")
        self._drains = self._mode == engine_pb2.UPDATE_MODE_DRAIN
        self._timeout = transfer_timeout_seconds
        self._concurrent_engine_count = concurrent_engine_count
        self._sender_id = uuid.uuid4().hex
        self._published: Snapshot | None = None
        self._undrained = False
        """Whether requests ran for too long at the last commit: engines may still hold its version."""

        self._suspects: dict[str, int] = {}
        """Instances that failed to take a version and have taken none since: the version that each failed to take."""

        self._being_tried: set[str] = set()
        """Suspects that a version is on its way to."""

        self._turn = asyncio.Lock()
        """Held while versions go to engines that are no suspects: those take one at a time."""

        self._left_behind = asyncio.Event()
        self._suspected = asyncio.Event()
        self.may_catch_up = asyncio.Event()
        """Cleared by whoever wants no engine to take weights until the next publication, which sets it."""

        self.may_catch_up.set()

    async def publish(self, snapshot: Snapshot, announce: Callable[[], Awaitable[None]]) -> None:
        """Bring a new version to the engines; `announce` tells sample_buffer, between transfer and switch.

        Never waits for an engine that is away or a suspect: it gets the version when it is back, and requests wait for
        it meanwhile. Raises ConfigError when the engines serve another run.
        """
        async with self._turn:
            staged: list[llm_proxy_pb2.Engine] = []
            try:
                listed = await self._list()
                _check_older(listed, snapshot.policy_version)
                staged = await self._transfer(snapshot, self._trusted(listed))
            except FarmError as error:
                log.warning("engines not reached", policy_version=snapshot.policy_version, cause=str(error))
            await announce()
            self._published = snapshot
            if not (staged and await self._commit(snapshot, staged)):
                self._left_behind.set()
        self.may_catch_up.set()

    async def watch(self) -> None:
        """Keep every engine at the published version, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_trusted())
            group.create_task(self._watch_suspects(group))

    async def _watch_trusted(self) -> None:
        revision: int | None = None
        backoff = FIRST_RETRY_SECONDS
        while True:
            try:
                revision = await self._until_changed(revision)
                await self.may_catch_up.wait()
                settled = await self._catch_up()
            except FarmError as error:
                log.info("engines not listed", cause=str(error))
                settled = False
            if settled:
                backoff = FIRST_RETRY_SECONDS
            else:
                revision = None
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LAST_RETRY_SECONDS)

    async def _watch_suspects(self, group: asyncio.TaskGroup) -> None:
        backoff = FIRST_RETRY_SECONDS
        while True:
            if not self._suspects:
                backoff = FIRST_RETRY_SECONDS
                self._suspected.clear()
                await self._suspected.wait()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_RETRY_SECONDS)
            await self.may_catch_up.wait()
            try:
                await self._try_suspects(group)
            except FarmError as error:
                log.info("engines not listed", cause=str(error))

    async def _until_changed(self, revision: int | None) -> int:
        """Wait until engines changed since the revision, or a publication left one behind. The newest revision."""
        polling = asyncio.ensure_future(self._list(revision))
        alarm = asyncio.ensure_future(self._left_behind.wait())
        try:
            await asyncio.wait({polling, alarm}, return_when=asyncio.FIRST_COMPLETED)
            self._left_behind.clear()
            return (polling.result() if polling.done() else await self._list()).revision
        finally:
            for task in (polling, alarm):
                task.cancel()
            await asyncio.gather(polling, alarm, return_exceptions=True)

    async def _catch_up(self) -> bool:
        """Send the published version to those who lack it and are no suspects. False when there is more to do."""
        async with self._turn:
            snapshot = self._published
            if snapshot is None:
                return True
            listed = await self._list()
            version = snapshot.policy_version
            trusted = self._trusted(listed)
            behind = [each for each in trusted if each.policy_version != version]
            if not behind and (listed.policy_version == version or not trusted):
                return True
            log.info("bringing engines up to date", policy_version=version, engines=[each.engine_id for each in behind])
            if self._undrained and self.may_catch_up.is_set():
                await self._commit(snapshot, [])
                return False
            staged = await self._transfer(snapshot, behind)
            if (behind and not staged) or not self.may_catch_up.is_set():
                return False
            return await self._commit(snapshot, staged)

    async def _try_suspects(self, group: asyncio.TaskGroup) -> None:
        """Each by itself, and without the turn, so that one that hangs holds up nobody."""
        listed = await self._list()
        here = {each.instance_id for each in listed.engines}
        self._suspects = {name: version for name, version in self._suspects.items() if name in here}
        untried = self._suspects.keys() - self._being_tried
        for engine in listed.engines:
            if engine.instance_id not in untried:
                continue
            if engine.policy_version >= self._suspects[engine.instance_id]:
                self._trust(engine)
            elif engine.state in REACHABLE and self._published is not None:
                self._being_tried.add(engine.instance_id)
                trying = self._try_suspect(engine, self._published)
                group.create_task(trying, name=f"weights to {engine.engine_id}")

    async def _try_suspect(self, engine: llm_proxy_pb2.Engine, snapshot: Snapshot) -> None:
        try:
            if not await self._takes(engine, snapshot):
                return
        except FarmError as error:
            log.info("engine not reached", engine_id=engine.engine_id, cause=str(error))
            return
        finally:
            self._being_tried.discard(engine.instance_id)
        self._trust(engine)

    async def _takes(self, engine: llm_proxy_pb2.Engine, snapshot: Snapshot) -> bool:
        """Whether a suspect applies the version or, where a newer one is published meanwhile, at least receives it."""
        if not await self._transfer(snapshot, [engine]):
            return False
        if snapshot is not self._published:
            return True
        if not self.may_catch_up.is_set():
            return False
        if await self._commit(snapshot, [engine]):
            return True
        # llm_proxy does not count a version that was replaced by a newer one while the engine applied it.
        listed = await self._list()
        version = snapshot.policy_version
        return any(each.instance_id == engine.instance_id and each.policy_version == version for each in listed.engines)

    def _trusted(self, listed: llm_proxy_pb2.ListEnginesResponse) -> list[llm_proxy_pb2.Engine]:
        """Engines that can be reached and are no suspects."""
        return [each for each in listed.engines if each.state in REACHABLE and each.instance_id not in self._suspects]

    def _suspect(self, snapshot: Snapshot, engines: Collection[llm_proxy_pb2.Engine], *, but: Collection[str]) -> None:
        """Those of the engines that are not `but`: they failed to take the version."""
        failed = [each for each in engines if each.engine_id not in but]
        if failed:
            self._suspects.update(dict.fromkeys((each.instance_id for each in failed), snapshot.policy_version))
            self._suspected.set()
            log.warning("engines left out of publications", engines=[each.engine_id for each in failed])

    def _trust(self, engine: llm_proxy_pb2.Engine) -> None:
        """A suspect took a version, though perhaps not the last one."""
        log.info("engine takes weights again", engine_id=engine.engine_id)
        self._suspects.pop(engine.instance_id, None)
        self._left_behind.set()

    async def _list(self, after_revision: int | None = None) -> llm_proxy_pb2.ListEnginesResponse:
        request = llm_proxy_pb2.ListEnginesRequest(after_revision=after_revision)
        timeout = CALL_SECONDS if after_revision is None else POLL_SECONDS
        listed = await rpc.call(self._proxy.ListEngines, request, timeout=timeout)
        self._transport.forget_all_but({each.instance_id for each in listed.engines})
        return listed

    async def _transfer(self, snapshot: Snapshot, engines: list[llm_proxy_pb2.Engine]) -> list[llm_proxy_pb2.Engine]:
        """The engines that have the version now; the others are suspects."""

        async def begin(request: llm_proxy_pb2.BeginWeightUpdateRequest) -> Any:
            request.sender_id = self._sender_id
            # Not retried: a second try would meet links whose other end has given up.
            return await rpc.call(self._proxy.BeginWeightUpdate, request, timeout=self._timeout, retry=False)

        if not engines:
            return []
        try:
            staged = await self._transport.transfer(snapshot, engines, begin)
        except DeadlineExceeded:
            self._suspect(snapshot, engines, but=())
            raise
        self._suspect(snapshot, engines, but=staged)
        return [each for each in engines if each.engine_id in staged]

    async def _commit(self, snapshot: Snapshot, staged: list[llm_proxy_pb2.Engine]) -> bool:
        """Whether all of `staged` serve the version now; those that do not are suspects."""
        request = llm_proxy_pb2.CommitWeightUpdateRequest(
            policy_version=snapshot.policy_version,
            mode=self._mode,
            concurrent_engine_count=self._concurrent_engine_count,
        )
        self._undrained = False
        try:
            answer = await rpc.call(self._proxy.CommitWeightUpdate, request, timeout=self._commit_seconds(len(staged)))
        except FarmError as error:
            log.warning("version not switched", policy_version=snapshot.policy_version, cause=str(error))
            too_late = isinstance(error, DeadlineExceeded)
            self._undrained = too_late and self._drains
            if (too_late and not self._drains) or isinstance(error, WeightsNotStaged):
                self._suspect(snapshot, staged, but=())
            return False
        log.info(
            "version served",
            policy_version=snapshot.policy_version,
            engines=len(answer.engine_ids),
            pause_ms=round(answer.pause_duration.ToMicroseconds() / 1000, 1),
        )
        self._suspect(snapshot, staged, but=answer.engine_ids)
        return all(each.engine_id in answer.engine_ids for each in staged)

    def _commit_seconds(self, engine_count: int) -> float:
        """Time for every engine that changes, where they take turns."""
        turns = math.ceil(engine_count / self._concurrent_engine_count) if self._concurrent_engine_count else 1
        return max(1, turns) * (self._timeout + (MOST_DRAIN_SECONDS if self._drains else 0.0))


def _check_older(listed: llm_proxy_pb2.ListEnginesResponse, version: int) -> None:
    """Refuse engines that already serve the version or a later one: it is not this run's."""
    newest = max([listed.policy_version, *(engine.policy_version for engine in listed.engines)])
    if newest >= version:
        raise ConfigError(
            f"trainer.llm_proxy_address: its engines serve version {newest}, and this run is about to publish its "
            f"version {version}: they served another run. Restart llm_proxy and its engines."
        )
