"""Publishes versions: engines receive, the buffer's clock advances, the proxy switches, in that order.

Whatever engine lacks the last published version afterwards (it restarted, joined late or failed, or llm_proxy
restarted) is brought up to date in the background, from a copy of the weights kept in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from rollfarm import rpc
from rollfarm.config import ConfigError
from rollfarm.errors import FarmError
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, llm_proxy_pb2_grpc
from trainer.weights.snapshot import Snapshot
from trainer.weights.transport import Transport

log = structlog.get_logger()

CALL_SECONDS = 10.0
POLL_SECONDS = 20.0
FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 5.0

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
        self._timeout = transfer_timeout_seconds
        self._concurrent_engine_count = concurrent_engine_count
        self._published: Snapshot | None = None
        self._turn = asyncio.Lock()
        self._left_behind = asyncio.Event()

    async def publish(self, snapshot: Snapshot, announce: Callable[[], Awaitable[None]]) -> None:
        """Bring a new version to the engines; `announce` tells sample_buffer, between transfer and switch.

        Never waits for an engine that is away: it gets the version when it is back, and requests wait for it meanwhile.
        Raises ConfigError when the engines serve another run.
        """
        async with self._turn:
            staged: list[str] = []
            reachable: list[llm_proxy_pb2.Engine] = []
            try:
                listed = await self._list()
                _check_older(listed, snapshot.policy_version)
                reachable = [each for each in listed.engines if each.state in REACHABLE]
                staged = await self._transfer(snapshot, reachable)
            except FarmError as error:
                log.warning("engines not reached", policy_version=snapshot.policy_version, cause=str(error))
            await announce()
            self._published = snapshot
            switched = bool(staged) and await self._commit(snapshot)
            if not (switched and len(staged) == len(reachable)):
                self._left_behind.set()

    async def watch(self) -> None:
        """Keep every engine at the published version, until cancelled."""
        revision: int | None = None
        backoff = FIRST_RETRY_SECONDS
        while True:
            try:
                revision = await self._until_changed(revision)
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
        """Send the published version to whoever lacks it. False when there is more to do."""
        async with self._turn:
            snapshot = self._published
            if snapshot is None:
                return True
            listed = await self._list()
            version = snapshot.policy_version
            reachable = [each for each in listed.engines if each.state in REACHABLE]
            behind = [each for each in reachable if each.policy_version != version]
            if not behind and (listed.policy_version == version or not reachable):
                return True
            log.info("bringing engines up to date", policy_version=version, engines=[each.engine_id for each in behind])
            staged = await self._transfer(snapshot, behind)
            if behind and not staged:
                return False
            return await self._commit(snapshot) and len(staged) == len(behind)

    async def _list(self, after_revision: int | None = None) -> llm_proxy_pb2.ListEnginesResponse:
        request = llm_proxy_pb2.ListEnginesRequest(after_revision=after_revision)
        timeout = CALL_SECONDS if after_revision is None else POLL_SECONDS
        return await rpc.call(self._proxy.ListEngines, request, timeout=timeout)

    async def _transfer(self, snapshot: Snapshot, engines: list[llm_proxy_pb2.Engine]) -> list[str]:
        async def begin(request: llm_proxy_pb2.BeginWeightUpdateRequest) -> Any:
            # Not retried: a second try would meet links whose other end has given up.
            return await rpc.call(self._proxy.BeginWeightUpdate, request, timeout=self._timeout, retry=False)

        return await self._transport.transfer(snapshot, engines, begin) if engines else []

    async def _commit(self, snapshot: Snapshot) -> bool:
        request = llm_proxy_pb2.CommitWeightUpdateRequest(
            policy_version=snapshot.policy_version,
            mode=self._mode,
            concurrent_engine_count=self._concurrent_engine_count,
        )
        try:
            answer = await rpc.call(self._proxy.CommitWeightUpdate, request, timeout=self._timeout)
        except FarmError as error:
            log.warning("version not switched", policy_version=snapshot.policy_version, cause=str(error))
            return False
        log.info(
            "version served",
            policy_version=snapshot.policy_version,
            engines=len(answer.engine_ids),
            pause_ms=round(answer.pause_duration.ToMicroseconds() / 1000, 1),
        )
        return True


def _check_older(listed: llm_proxy_pb2.ListEnginesResponse, version: int) -> None:
    """Refuse engines that already serve the version or a later one: it is not this run's."""
    newest = max([listed.policy_version, *(engine.policy_version for engine in listed.engines)])
    if newest >= version:
        raise ConfigError(
            f"trainer.llm_proxy_address: its engines serve version {newest}, and this run is about to publish its "
            f"version {version}: they served another run. Restart llm_proxy and its engines."
        )
