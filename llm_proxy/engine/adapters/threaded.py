"""What the engines that compute in this process have in common. Imports no torch."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llm_proxy.engine.adapters import Deliver, EngineStatus, UpdateMode
from llm_proxy.engine.requests import Limits, Request
from llm_proxy.engine.stepping import Engine, Model, Update, into
from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2

if TYPE_CHECKING:
    from llm_proxy.engine.receiver import Receiver, Staged


class ThreadedAdapter:
    """Runs `Engine` in a thread, and receives weights beside it. A subclass has `name`, `start` and `_receiving`."""

    limits: Limits
    _engine: Engine
    _ended: asyncio.Future[None]

    def _begin(self, model: Model, deliver: Deliver) -> None:
        """Step `model` from now on."""
        self.limits = model.limits
        self._engine = Engine(model, deliver=into(asyncio.get_running_loop(), deliver))
        self._ended = in_thread(self._run)

    def _run(self) -> None:
        """What the thread does."""
        self._engine.run()

    async def _receiving(self) -> "Receiver":
        """Where weights arrive."""
        raise NotImplementedError

    async def watch(self) -> None:
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        self._engine.send(self._engine.stop)
        await asyncio.wait([self._ended])

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.send(lambda: self._engine.submit(requests))

    def cancel(self, keys: Sequence[str]) -> None:
        self._engine.send(lambda: self._engine.cancel(keys))

    async def pause(self) -> None:
        await self._engine.ask(lambda: self._engine.set_paused(True))

    async def resume(self) -> None:
        await self._engine.ask(lambda: self._engine.set_paused(False))

    async def join_weights(self, group: engine_pb2.WeightGroup) -> None:
        await (await self._receiving()).join(group)

    async def stage_weights(self, request: engine_pb2.StageWeightsRequest) -> int:
        return await (await self._receiving()).stage(request)

    async def apply_weights(self, policy_version: int, mode: UpdateMode) -> float:
        async def load(staged: "Staged") -> float:
            update = Update(staged, mode)
            self._engine.send(lambda: self._engine.update(update))
            return await asyncio.wrap_future(update.done)

        return await (await self._receiving()).apply(policy_version, load)

    async def discard_weights(self, policy_version: int) -> None:
        (await self._receiving()).discard(policy_version)

    async def sleep(self, *, discard_weights: bool) -> None:
        async def rest() -> None:
            await self._engine.ask(lambda: self._engine.sleep(discard_weights=discard_weights))

        await (await self._receiving()).sleep(rest, discard_weights=discard_weights)

    async def wake_up(self) -> None:
        await self._engine.ask(self._engine.wake_up)

    async def check(self) -> None:
        """Lives in this process: there is nobody to ask."""

    def status(self) -> EngineStatus:
        return self._engine.status
