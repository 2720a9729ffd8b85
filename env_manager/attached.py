"""Workers that dialled in: each plays what it said in its hello, and is sent calls on the stream that it opened.

A worker that says nothing for long is taken for lost. So it is sent a call now and then that costs nothing.
"""

import asyncio
import hmac
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import unquote

import structlog
from google.protobuf.message import DecodeError

from env_manager.hosts import Host, Hosts, Request
from rollfarm.error_wire import from_failure
from rollfarm.errors import DeadlineExceeded, EnvironmentFailed, FarmError, InvalidArgument, Unavailable, WrongToken
from rollfarm.service import Changed
from rollfarm.v1 import environment_pb2
from rollfarm.v1.environment_pb2 import AttachRequest, AttachResponse, EnvironmentHost

log = structlog.get_logger()

HELLO_SECONDS = 10.0
"""How long a worker may take to say hello."""

ASK_SECONDS = 10.0
"""How often a worker is asked for a sign of life."""

SILENCE_SECONDS = 30.0
"""How long one may then say nothing at all before it is lost."""

_CONTENTS = {
    environment_pb2.ResetRequest: "reset",
    environment_pb2.StepRequest: "step",
    environment_pb2.EnvironmentServiceScoreRequest: "score",
    environment_pb2.CloseRequest: "close",
}


class Attached(Host):
    """One worker that dialled in."""

    kind = EnvironmentHost.KIND_ATTACHED

    def __init__(self, peer: str, changed: Changed, hello: environment_pb2.DescribeResponse) -> None:
        super().__init__(unquote(peer), changed)
        self._calls: asyncio.Queue[AttachResponse | None] = asyncio.Queue()
        self._answers: dict[str, asyncio.Future[AttachRequest]] = {}
        self._numbers = itertools.count()
        self._heard_at = time.monotonic()
        self._lost = ""
        self.fault: FarmError | None = None
        self.described(hello)

    async def ask(self, request: Request, seconds: float) -> Any:
        try:
            return await self._ask(request, seconds)
        except TimeoutError:
            self.failed()
            raise self._failure(f"no answer in {seconds:g} s.") from None

    async def calls(self) -> AsyncIterator[AttachResponse]:
        """What the worker is to be sent, until it is lost."""
        while (call := await self._calls.get()) is not None:
            yield call

    async def listen(self, said: AsyncIterator[AttachRequest]) -> None:
        """Take its answers until it says no more. `fault` then is what was wrong with it, if anything was."""
        try:
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(self._ask_for_life())
                async for answer in said:
                    self._settle(answer)
                asking.cancel()
        except* DecodeError:
            self.fault = InvalidArgument("It said what is no valid message; text is UTF-8.")
        except* TimeoutError:
            self.fault = DeadlineExceeded(f"It said nothing for {SILENCE_SECONDS:g} s.")
        finally:
            self._lose(self.fault.problem if self.fault else "Its stream ended.")

    def leave(self, why: str) -> None:
        """Let it go. It may dial in again."""
        self.fault = Unavailable(why)
        self._lose(why)

    def _settle(self, answer: AttachRequest) -> None:
        self._heard_at = time.monotonic()
        waiting = self._answers.get(answer.call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def _ask(self, request: Request, seconds: float) -> Any:
        """Send a call and wait for its answer. Raises TimeoutError, too."""
        if self._lost:
            raise self._failure(self._lost)
        content = _CONTENTS[type(request)]
        call = AttachResponse(call_id=str(next(self._numbers)))
        getattr(call, content).CopyFrom(request)
        waiting = self._answers[call.call_id] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait(call)
        try:
            async with asyncio.timeout(seconds):
                answer = await waiting
        finally:
            del self._answers[call.call_id]
        given = answer.WhichOneof("content")
        if given == "failure":
            error = from_failure(answer.failure)
            raise self._failure(str(error)) from error
        if given != content:
            raise self._failure(f"it answered {content} with {given}.")
        return getattr(answer, content)

    async def _ask_for_life(self) -> None:
        """Have it close an episode that it never had, again and again. Raises TimeoutError once it is silent."""
        while True:
            await asyncio.sleep(ASK_SECONDS)
            try:
                await self._ask(environment_pb2.CloseRequest(), SILENCE_SECONDS)
            except EnvironmentFailed:
                continue  # it answered
            except TimeoutError:
                if time.monotonic() - self._heard_at >= SILENCE_SECONDS:
                    raise

    def _lose(self, why: str) -> None:
        """Fail what waits, and send no more. The first cause stays."""
        if self._lost:
            return
        self._lost, self.is_healthy = why, False
        self.changed.notify()
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(self._failure(why))
        self._calls.put_nowait(None)
        log.warning("environment worker lost", worker=self.address, episodes=self.open_count, cause=why)

    def _failure(self, why: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"Environment worker {self.address}: {why}", worker=self.address)


async def serve(peer: str, said: AsyncIterator[AttachRequest], hosts: Hosts) -> AsyncIterator[AttachResponse]:
    """Let a worker in for as long as its stream lasts. Raises InvalidArgument unless it begins with hello."""
    worker = Attached(peer, hosts.changed, await _hello(said))
    listening = asyncio.create_task(worker.listen(said), name="environment-worker")
    listening.add_done_callback(lambda _: hosts.remove(worker))
    log.info("environment worker found", worker=worker.address, environments=sorted(worker.environments))
    hosts.add(worker)
    try:
        async for call in worker.calls():
            yield call
        if worker.fault is None:
            await listening
        if worker.fault is not None:
            raise worker.fault
    finally:
        listening.cancel()


async def _hello(said: AsyncIterator[AttachRequest]) -> environment_pb2.DescribeResponse:
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await anext(said)
    except (StopAsyncIteration, TimeoutError):
        raise InvalidArgument("The worker said no hello.") from None
    if not first.hello.environments:
        raise InvalidArgument("The worker's first message is no hello that names what it plays.")
    return first.hello


def check_token(token: str, metadata: Iterable[tuple[str, str | bytes]], peer: str) -> None:
    """Raise WrongToken unless the caller brings the token; without one, unless it is on this machine."""
    if not token:
        if not _is_loopback(peer):
            raise WrongToken("Without env_manager.attach_token, only workers on the same machine are let in.")
        return
    given = next((value for name, value in metadata if name == "authorization"), "")
    wanted = f"Bearer {token}".encode()
    if not hmac.compare_digest(given.encode() if isinstance(given, str) else given, wanted):
        raise WrongToken("The worker's token is missing or wrong.")


def _is_loopback(peer: str) -> bool:
    kind, _, rest = unquote(peer).partition(":")
    if kind == "unix":
        return True
    try:
        address = ip_address(rest.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
