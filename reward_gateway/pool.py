"""Worker processes for rewards that block or may hang.

Each computes one score at a time. One that is late is killed and replaced, so that a hang costs its own score alone.
Invariant: an idle worker owes no answer. One whose answer or greeting was not awaited to its end is killed.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import structlog

from reward_gateway.worker import GREETING, HEAD, OK, pack_question
from rollfarm.errors import RewardFailed
from rollfarm.reward import Score
from rollfarm.v1 import reward_gateway_pb2

log = structlog.get_logger()

START_SECONDS = 60.0
"""How long a worker may take to start. Importing a reward's libraries counts with its first score instead."""


class WorkerPool:
    """`size` workers, spawned on entry and killed on exit."""

    def __init__(self, size: int) -> None:
        self._workers = [_Worker() for _ in range(size)]
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()

    async def __aenter__(self) -> "WorkerPool":
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(worker.start())
        except BaseException:
            await self._kill()
            raise
        for worker in self._workers:
            self._idle.put_nowait(worker)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._kill()

    async def score(
        self, reward: str, settings: Any, episode: reward_gateway_pb2.ScoredEpisode, *, timeout: float
    ) -> Score:
        """The score, or RewardFailed: the reward raised, was late, or took its worker down."""
        worker = await self._idle.get()
        try:
            frame = await worker.ask(pack_question(reward, settings, timeout, episode), timeout)
        except TimeoutError:
            raise RewardFailed(
                f"Reward {reward} gave no score in {timeout:g} s; its worker was replaced.", reward=reward
            ) from None
        except (OSError, EOFError):
            raise RewardFailed(f"Reward {reward} took its worker down, which was replaced.", reward=reward) from None
        finally:
            self._idle.put_nowait(worker)
        if frame[:1] != OK:
            raise RewardFailed(frame[1:].decode(), reward=reward)
        verdict = reward_gateway_pb2.RewardServiceScoreResponse.FromString(frame[1:])
        return Score(verdict.value, verdict.detail)

    async def _kill(self) -> None:
        for worker in self._workers:
            await worker.kill()


class _Worker:
    """One process, started again by the next question when the last one was its end."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._asked = 0

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "reward_gateway.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        async with self._kept(START_SECONDS):
            await self._read(self._process, GREETING)

    async def ask(self, question: bytes, timeout: float) -> bytes:
        if self._process is None:
            await self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._asked += 1
        async with self._kept(timeout):
            process.stdin.write(HEAD.pack(len(question), self._asked) + question)
            await process.stdin.drain()
            return await self._read(process, self._asked)

    async def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    @contextlib.asynccontextmanager
    async def _kept(self, seconds: float) -> AsyncIterator[None]:
        """Keep the process if what is done with it ends well within `seconds`, and if somebody waits for that."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except BaseException:
            await self.kill()
            raise

    @staticmethod
    async def _read(process: asyncio.subprocess.Process, number: int) -> bytes:
        """The frame called `number`, which must be the next. Raises OSError and EOFError."""
        assert process.stdout is not None
        length, given = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
        if given != number:
            raise ConnectionError(f"The worker answered {given} when it was asked {number}.")
        return await process.stdout.readexactly(length)
