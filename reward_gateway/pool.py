"""Worker processes for rewards that block or may hang.

Each computes one score at a time. One that is late is killed and replaced, so that a hang costs its own score alone.
Invariant: an idle worker owes no answer. One whose answer or greeting was not awaited to its end is killed.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from reward_gateway.timeouts import Late, Timeout, timed
from reward_gateway.worker import GREETING, HEAD, pack_question, unpack_answer
from rollfarm.errors import RewardFailed
from rollfarm.reward import Score
from rollfarm.v1 import reward_gateway_pb2

START_SECONDS = 60.0
"""How long a worker may take to start and to import its rewards' libraries."""


class WorkerPool:
    """`size` workers that compute `rewards`, spawned on entry and killed on exit."""

    def __init__(self, size: int, rewards: Sequence[str] = (), *, megabytes: int = 0, wait_seconds: float = 60) -> None:
        self._workers = [_Worker([str(megabytes), *rewards]) for _ in range(size)]
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._wait_seconds = wait_seconds

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
        self,
        reward: str,
        settings: Mapping[str, Any],
        episodes: Sequence[reward_gateway_pb2.ScoredEpisode],
        timeout: Timeout,
    ) -> list[Score]:
        """A score for each, or RewardFailed: the reward raised, was late, or took its worker down.

        The wait for an idle worker, and the start of a new one, do not count as the reward's time.
        """
        async with self._idle_worker(reward) as worker:
            with timed(timeout) as seconds:
                try:
                    frame = await worker.ask(pack_question(reward, settings, seconds, episodes), seconds)
                except TimeoutError:
                    raise Late(
                        f"Reward {reward} gave no score in {seconds:g} s; its worker was replaced.", reward=reward
                    ) from None
                except (OSError, EOFError):
                    problem = f"Reward {reward} took its worker down, which was replaced."
                    raise RewardFailed(problem, reward=reward) from None
        return unpack_answer(reward, frame, len(episodes))

    @contextlib.asynccontextmanager
    async def _idle_worker(self, reward: str) -> AsyncIterator["_Worker"]:
        try:
            async with asyncio.timeout(self._wait_seconds):
                worker = await self._idle.get()
        except TimeoutError:
            waited = f"Reward {reward} waited {self._wait_seconds:g} s for one of {len(self._workers)} workers."
            raise RewardFailed(waited, reward=reward) from None
        try:
            await worker.start()
            yield worker
        except _NotStarted as error:
            raise RewardFailed(f"Reward {reward} has no worker: {error}.", reward=reward) from None
        finally:
            self._idle.put_nowait(worker)

    async def _kill(self) -> None:
        for worker in self._workers:
            await worker.kill()


class _NotStarted(Exception):
    """A worker could not import its rewards, or did not greet in time."""


class _Worker:
    """One process, started again before the next question when it has ended, whatever its end was."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self._asked = 0

    async def start(self) -> None:
        """Have a process. Raises _NotStarted."""
        if self._process is not None and self._process.returncode is None:
            return
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "reward_gateway.worker",
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with self._kept(START_SECONDS):
                if trouble := await self._read(self._process, GREETING):
                    raise _NotStarted(trouble.decode())
        except (OSError, EOFError, TimeoutError):
            raise _NotStarted("it did not start; its last words are in this service's log") from None

    async def ask(self, question: bytes, timeout: float) -> bytes:
        """The answer. Raises TimeoutError, OSError and EOFError, and then its process is gone."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._asked += 1
        async with self._kept(timeout):
            try:
                process.stdin.write(HEAD.pack(len(question), self._asked) + question)
            except RuntimeError as error:  # uvloop's word for a pipe that is closed
                raise ConnectionError(str(error)) from None
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
