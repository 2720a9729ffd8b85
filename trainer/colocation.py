"""Whose turn it is on the devices: the trainer's or the engines', where both are on the same ones.

The trainer's turn lasts from a batch until the new version is published and saved: engines sleep, and models are where
they compute. Then models go to host memory, and engines wake. Engines sleep under a lease, so that they wake though the
trainer died; the next one takes its turn before it loads anything. From the beginning of the turn until the version is
published no engine is given weights, which would take memory that the trainer counts on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import structlog

from rollfarm import rpc, times
from rollfarm.config import ConfigError
from rollfarm.errors import DeadlineExceeded, FarmError, Unsupported, is_retryable
from rollfarm.v1 import llm_proxy_pb2, llm_proxy_pb2_grpc
from trainer.controls import Controls

log = structlog.get_logger()

LEASE_SECONDS = 60.0
CALL_SECONDS = 10.0
"""How long one call waits; engines may take longer, and are asked again."""

AGAIN_SECONDS = 0.5
"""Until llm_proxy is asked again where it reached no engine: one that starts may hold the devices."""

Move = Callable[[bool], Awaitable[None]]
"""Moves every model to host memory (true), or to where it computes (false)."""


class Turns(Protocol):
    """What the controller asks."""

    async def take(self, move: Move, *, discard_weights: bool) -> None:
        """Have the devices: at once where they are had already, and else once an engine sleeps. Without
        `discard_weights`, engines go on later with the version that they serve; with it, they need another. Raises
        ConfigError where an engine cannot sleep."""
        ...

    async def give(self, move: Move) -> None:
        """Let the engines have the devices."""
        ...

    async def renew(self) -> None:
        """Keep what was taken, until cancelled."""
        ...


class Apart:
    """Trainer and engines have devices of their own: it is always everybody's turn."""

    async def take(self, move: Move, *, discard_weights: bool) -> None:
        """Nothing."""

    async def give(self, move: Move) -> None:
        """Nothing."""

    async def renew(self) -> None:
        """Nothing."""


class Colocated:
    """They share devices, and llm_proxy lets the engines sleep."""

    def __init__(
        self,
        proxy: llm_proxy_pb2_grpc.LlmProxyServiceAsyncStub,
        controls: Controls,
        may_catch_up: asyncio.Event,
        *,
        drain_seconds: float,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """`may_catch_up`: the publisher's, cleared while engines get no weights. `drain_seconds`: how long running
        requests may go on before engines sleep. 0 interrupts them."""
        self._proxy = proxy
        self._controls = controls
        self._may_catch_up = may_catch_up
        self._drain_seconds = drain_seconds
        self._lease_seconds = lease_seconds
        self._taken: llm_proxy_pb2.SleepEnginesRequest | None = None
        """What renews the engines' sleep; None while it is their turn."""

        self._calling = asyncio.Lock()
        """Held while llm_proxy is called: a renewal never comes after the end of what it renews."""

    async def take(self, move: Move, *, discard_weights: bool) -> None:
        if self._taken is not None:
            return
        request = llm_proxy_pb2.SleepEnginesRequest(
            discard_weights=discard_weights,
            lease_duration=times.duration(self._lease_seconds),
            drain_duration=times.duration(self._drain_seconds),
        )
        self._may_catch_up.clear()
        try:
            async with self._calling:
                await self._put_to_sleep(request)
                # A renewal after llm_proxy restarted puts them to sleep anew: a version may have come since.
                request.discard_weights = False
                self._taken = request
        except Unsupported as error:
            raise ConfigError(
                f"trainer.colocated: {error.problem} Start vLLM with --enable-sleep-mode and SGLang with "
                "--enable-memory-saver, each on a GPU, or give the trainer devices of its own."
            ) from None
        await move(False)

    async def give(self, move: Move) -> None:
        if self._taken is None:
            return
        await move(True)
        async with self._calling:
            self._taken = None
            await self._insist(self._proxy.WakeEngines, llm_proxy_pb2.WakeEnginesRequest())
        self._may_catch_up.set()

    async def renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            async with self._calling:
                if self._taken is not None:
                    await self._renew(self._taken)

    async def _renew(self, request: llm_proxy_pb2.SleepEnginesRequest) -> None:
        try:
            await rpc.call(self._proxy.SleepEngines, request, timeout=self._lease_seconds / 3)
        except FarmError as error:
            log.warning("the engines' sleep is not renewed; they may wake", cause=str(error))

    async def _put_to_sleep(self, request: llm_proxy_pb2.SleepEnginesRequest) -> None:
        """Until an engine sleeps, or the trainer is to stop."""
        for attempt in itertools.count():
            answer = await self._insist(self._proxy.SleepEngines, request)
            if self._controls.draining or answer.engine_ids:
                return
            if attempt == 0:
                log.info("waiting for an engine that sleeps: one that starts may hold the devices")
            await asyncio.sleep(AGAIN_SECONDS)

    async def _insist(self, method: Callable[..., Any], request: Any) -> Any:
        """The answer, once llm_proxy gives one. When the trainer is to stop, None after one more try: llm_proxy may be
        gone for good."""
        while True:
            is_last = self._controls.draining
            try:
                return await rpc.call(method, request, timeout=CALL_SECONDS)
            except FarmError as error:
                if not (is_retryable(error) or isinstance(error, DeadlineExceeded)):
                    raise
                log.info("the devices are not handed over yet", cause=str(error))
                if is_last:
                    return None
