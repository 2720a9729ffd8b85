"""Keeps the processes of a plan alive while something else runs, and leaves none behind, whatever happens.

Each unit (a process, or a gang of trainer ranks) has one task that starts it, waits for its health, and starts it again
when it dies. Processes are ended in one place alone, `_drain`, on every way out.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from rollfarm.config import EXIT_BAD_CONFIG
from rollfarm.rpc import is_serving
from rollfarm.up.config import UpConfig
from rollfarm.up.farm import ProcessSpec
from rollfarm.up.process import Child, ProcessFailed, State, describe_status
from rollfarm.up.restarts import RestartPolicy
from rollfarm.valkey import valkey_answers

PROBE_SECONDS = 0.2
"""Between two questions whether a starting process is ready; nothing could notify us before it is."""

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass
class _Unit:
    """What is started and ended as one."""

    children: list[Child]
    policy: RestartPolicy
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def stage(self) -> int:
        return self.children[0].spec.stage

    @property
    def name(self) -> str:
        return self.children[0].spec.gang or self.children[0].name


class Supervisor:
    """Runs the processes of a plan for as long as `run`'s work takes."""

    def __init__(
        self, specs: Sequence[ProcessSpec], up: UpConfig, *, logs: Path, say: Say, claims: Sequence[int] = ()
    ) -> None:
        """`claims` are descriptors that every process inherits."""
        self._up = up
        self._claims = claims
        self._say = say
        self._units = [
            _Unit([Child(spec, logs) for spec in gang], RestartPolicy.of(up))
            for _, gang in groupby(specs, key=lambda spec: spec.gang or spec.name)
        ]
        self._hurry = asyncio.Event()
        self._leash = -1
        self.draining = False
        """Whether every process is being ended."""

    @property
    def children(self) -> list[Child]:
        """Every process, in the order of the plan."""
        return [child for unit in self._units for child in unit.children]

    @property
    def restarts(self) -> int:
        """Restarts of units so far."""
        return sum(unit.children[0].restarts for unit in self._units)

    def hurry(self) -> None:
        """Kill what does not drain by itself, now."""
        self._hurry.set()

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Start everything in stages, do `work`, and drain. Raises ProcessFailed, and whatever `work` raises."""
        self._leash, held = os.pipe()
        try:
            async with asyncio.TaskGroup() as group:
                keepers = [await self._start(group, units) for units in self._stages()]
                result = await work()
                for keeper in [task for stage in keepers for task in stage]:
                    keeper.cancel()
            return result
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            self.draining = True
            await _to_the_end(self._drain())
            os.close(held)
            os.close(self._leash)

    def _stages(self) -> list[list[_Unit]]:
        stages = sorted({unit.stage for unit in self._units})
        return [[unit for unit in self._units if unit.stage == stage] for stage in stages]

    async def _start(self, group: asyncio.TaskGroup, units: list[_Unit]) -> list[asyncio.Task[None]]:
        tasks = [group.create_task(self._keep(unit), name=unit.name) for unit in units]
        for unit in units:
            await unit.ready.wait()
        return tasks

    async def _keep(self, unit: _Unit) -> None:
        """Start the unit again and again. Ends when its work is done; raises ProcessFailed when it is hopeless."""
        while True:
            for child in unit.children:
                child.enter(State.STARTING)
                await child.spawn(self._leash, self._claims)
            dead = await self._first_death(unit)
            if dead is None:
                return
            await self._bury(unit)
            delay = self._verdict(unit, dead)
            await asyncio.sleep(delay)
            for child in unit.children:
                child.restarts += 1

    async def _first_death(self, unit: _Unit) -> Child | None:
        """The first child that ended, or None when all of them have done what they were for."""
        exits = {asyncio.create_task(child.exit()): child for child in unit.children}
        ready = asyncio.create_task(self._until_ready(unit))
        try:
            await asyncio.wait([*exits, ready], timeout=self._up.start_seconds, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                unit.ready.set()
                await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
            dead = next((child for task, child in exits.items() if task.done()), None)
        finally:
            for task in (*exits, ready):
                task.cancel()
        if dead is None:
            slow = unit.children[0]
            raise slow.failed(
                f"{slow.name} was not ready within {self._up.start_seconds:g} s. If it is only slow, raise "
                "up.start_seconds."
            )
        if dead.spec.once and dead.status == 0:
            dead.enter(State.DONE)
            unit.ready.set()
            return None
        return dead

    async def _until_ready(self, unit: _Unit) -> None:
        for child in unit.children:
            await _ready(child.spec)
            child.enter(State.RUNNING)

    async def _bury(self, unit: _Unit) -> None:
        for child in unit.children:
            child.kill()
            await child.exit()
            child.enter(State.RESTARTING)

    def _verdict(self, unit: _Unit, dead: Child) -> float:
        """Seconds until the unit is started again. Raises ProcessFailed where that is useless."""
        status = dead.status or 0
        ended = f"{dead.name} ended with {describe_status(status)}"
        if status == EXIT_BAD_CONFIG or (status > 0 and not unit.ready.is_set()) or dead.spec.once:
            raise dead.failed(f"{ended}.")
        delay = unit.policy.crashed(asyncio.get_running_loop().time())
        if delay is None:
            raise dead.failed(
                f"{ended}, its crash number {self._up.max_restarts + 1} within "
                f"{self._up.restart_window_seconds:g} s. Mend what its log shows, or raise up.max_restarts."
            )
        self._say(f"{ended}; starting it again")
        return delay

    async def _drain(self) -> None:
        """End every process, the last started first; those of one kind together."""
        kinds = groupby(reversed(self.children), key=lambda child: child.name.rpartition("-")[0] or child.name)
        for _, children in kinds:
            await self._end(list(children))

    async def _end(self, children: list[Child]) -> None:
        living = [child for child in children if child.alive]
        for child in living:
            child.enter(State.DRAINING)
            child.terminate()
        exits = [asyncio.create_task(child.exit()) for child in living]
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            if exits:
                everyone = asyncio.gather(*exits)
                await asyncio.wait(
                    [everyone, hurry], timeout=self._up.drain_seconds, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            hurry.cancel()
            for child in living:
                if child.alive:
                    self._say(f"{child.name} did not drain; killed")
                    child.kill()
        for child in living:
            await child.exit()
            child.enter(State.STOPPED)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` even if we are cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


async def _ready(spec: ProcessSpec) -> None:
    """Return once the process can be used. One that does its work and ends never can."""
    if spec.once:
        await asyncio.Event().wait()
    while not await _usable(spec):  # noqa: ASYNC110
        await asyncio.sleep(PROBE_SECONDS)


async def _usable(spec: ProcessSpec) -> bool:
    if spec.address:
        return await is_serving(spec.address, timeout=2.0)
    return spec.socket is None or await valkey_answers(spec.socket)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that people want to see: a failed process before anything that followed from it."""
    failed = errors.subgroup(ProcessFailed)
    found: BaseException = failed or errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
