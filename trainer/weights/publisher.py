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
from rollfarm.errors import FarmError
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, llm_proxy_pb2_grpc
from trainer.weights.gloo import Links
from trainer.weights.snapshot import Snapshot

log = structlog.get_logger()

CALL_SECONDS = 10.0
POLL_SECONDS = 20.0
FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 5.0

REACHABLE = (llm_proxy_pb2.Engine.STATE_BEHIND, llm_proxy_pb2.Engine.STATE_SERVING)


class Publisher:
    """Owns what engines serve."""

    def __init__(
        self,
        proxy: llm_proxy_pb2_grpc.LlmProxyServiceAsyncStub,
        links: Links,
        *,
        mode: str,
        transfer_timeout_seconds: float,
    ) -> None:
        self._proxy = proxy
        self._links = links
        self._mode = engine_pb2.UpdateMode.Value(f"UPDATE_MODE_{mode.upper()}")
        self._timeout = transfer_timeout_seconds
        self._published: Snapshot | None = None
        self._turn = asyncio.Lock()

    async def publish(self, snapshot: Snapshot, announce: Callable[[], Awaitable[None]]) -> None:
        """Bring a new version to the engines; `announce` tells sample_buffer, between transfer and switch.

        Never waits for an engine that is away: it gets the version when it is back, and requests wait for it meanwhile.
        """
        async with self._turn:
            staged: list[str] = []
            try:
                listed = await self._list()
                staged = await self._transfer(snapshot, [each for each in listed.engines if each.state in REACHABLE])
            except FarmError as error:
                log.warning("engines not reached", policy_version=snapshot.policy_version, why=str(error))
            await announce()
            self._published = snapshot
            if staged:
                await self._commit(snapshot)
            else:
                log.warning("no engine has the version yet", policy_version=snapshot.policy_version)

    async def watch(self) -> None:
        """Keep every engine at the published version, until cancelled."""
        revision: int | None = None
        backoff = FIRST_RETRY_SECONDS
        while True:
            try:
                listed = await self._list(revision)
                settled = await self._catch_up()
            except FarmError as error:
                log.info("engines not listed", why=str(error))
                settled = False
            else:
                revision = listed.revision if settled else None
            if settled:
                backoff = FIRST_RETRY_SECONDS
            else:
                revision = None
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LAST_RETRY_SECONDS)

    async def _catch_up(self) -> bool:
        """Send the published version to whoever lacks it. False when there is more to do."""
        async with self._turn:
            snapshot = self._published
            if snapshot is None:
                return False
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

        return await self._links.transfer(snapshot, engines, begin) if engines else []

    async def _commit(self, snapshot: Snapshot) -> bool:
        request = llm_proxy_pb2.CommitWeightUpdateRequest(policy_version=snapshot.policy_version, mode=self._mode)
        try:
            answer = await rpc.call(self._proxy.CommitWeightUpdate, request, timeout=self._timeout)
        except FarmError as error:
            log.warning("version not switched", policy_version=snapshot.policy_version, why=str(error))
            return False
        log.info(
            "version served",
            policy_version=snapshot.policy_version,
            engines=len(answer.engine_ids),
            pause_ms=round(answer.pause_duration.ToMicroseconds() / 1000, 1),
        )
        return True
