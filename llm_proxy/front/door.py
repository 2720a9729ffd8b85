"""Asks the engines for an agent: one request becomes one generation for each choice, and each is recorded.

A generation goes through the router like any other. Invariant: when an agent is told the last of an answer, the record
holds it; an answer that the agent did not wait for is not recorded.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from llm_proxy.engines import Fleet
from llm_proxy.front.config import HttpConfig
from llm_proxy.front.errors import Refusal
from llm_proxy.front.ids import unique
from llm_proxy.front.messages import Conversation
from llm_proxy.front.metrics import NEW_HISTORIES
from llm_proxy.front.prompts import Prompt, Prompter
from llm_proxy.front.record import Cause, Record
from llm_proxy.front.sampling import FREE, Wishes, bind
from llm_proxy.front.sessions import Session
from llm_proxy.front.turns import turn_of
from llm_proxy.requests import OpenRequest
from llm_proxy.validation import check
from rollfarm.chat import ChatTemplate
from rollfarm.chat.formats import Part
from rollfarm.chat.messages import Message
from rollfarm.chat.replies import Reader, Reading
from rollfarm.error_wire import from_failure
from rollfarm.generation import check_ids
from rollfarm.tokens import unpack_ids
from rollfarm.v1 import llm_proxy_pb2, trajectory_pb2

log = structlog.get_logger()

NO_WISHES = Wishes()
ABORT = trajectory_pb2.FINISH_REASON_ABORT


@dataclass(frozen=True, slots=True)
class Tenant:
    """Someone with a fixed key, whose requests are not recorded."""

    name: str


Caller = Session | Tenant


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for."""

    prompt: Conversation | bytes
    """[T] "<i4" where it is tokens."""

    wishes: Wishes = NO_WISHES
    choices: int = 1
    stops: tuple[str, ...] = ()
    top_logprobs: int = 0
    finds_calls: bool = True
    """Whether the tools may be called."""

    streams: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, complete."""

    message: Message
    text: str
    """What the policy wrote, tool calls and all, without the tokens that are no text."""

    turn: trajectory_pb2.Turn
    stop: str
    """The stop string that ended it, if any."""


class Choice:
    """One generation of a request. It waits for the router's answer."""

    def __init__(self, index: int, request_id: str, reader: Reader, news: asyncio.Queue["Choice | None"]) -> None:
        self.index = index
        self.request_id = request_id
        self.reader = reader
        self.result: llm_proxy_pb2.GenerationResult | None = None
        self.bug: Exception | None = None
        """Why what the engine made could not be read. The request's own: the engines go on."""

        self._news = news
        self._parts: list[Part] = []

    def answer(self, request: OpenRequest) -> None:
        self.result = request.result()
        self._news.put_nowait(self)

    def progress(self, token_ids: bytes) -> None:
        """The engine made these tokens."""
        try:
            self._parts += self.reader.feed(token_ids)
        except Exception as bug:
            self.bug = bug
        if self._parts or self.reader.stop or self.bug:
            self._news.put_nowait(self)

    def take_parts(self) -> list[Part]:
        """What there is to tell since the last time."""
        parts, self._parts = self._parts, []
        return parts

    def finish(self, result: llm_proxy_pb2.GenerationResult) -> list[Part]:
        """Read what no progress told, to the end."""
        told = self.take_parts()
        return told + self.reader.feed(result.token_ids[4 * self.reader.token_count :]) + self.reader.finish()


@dataclass(frozen=True, slots=True)
class News:
    """What became known of one choice."""

    index: int
    parts: Sequence[Part]
    answer: Answer | None = None
    """Set with the last of it."""


class Running:
    """A request with the engines."""

    def __init__(self, door: "Door", caller: Caller, ask: Ask, prompt: Prompt) -> None:
        self.prompt = prompt
        self._door = door
        self._caller = caller
        self._streams = ask.streams
        self._news: asyncio.Queue[Choice | None] = asyncio.Queue()
        """None says that the time is up."""

        tools = (ask.prompt.tools if ask.finds_calls else ()) if isinstance(ask.prompt, Conversation) else None
        prefix = f"{caller.session_id}/" if isinstance(caller, Session) else ""
        self.choices = [
            Choice(index, f"{prefix}{unique()}", Reader(door.reading, tools, ask.stops), self._news)
            for index in range(ask.choices)
        ]
        self._timer = asyncio.get_running_loop().call_later(door.request_seconds, self._news.put_nowait, None)

    async def news(self) -> AsyncIterator[News]:
        """Everything as it comes, until each choice has its answer. Raises the failure of the first that has none."""
        pending = set(self.choices)
        while pending:
            choice = await self._next()
            if choice not in pending:
                continue
            if choice.bug is not None:
                raise choice.bug
            if choice.result is not None:
                pending.remove(choice)
                parts = choice.finish(choice.result)
                answer = self._door.conclude(self._caller, choice, choice.result)
                if self._streams:
                    self._door.record(self._caller, self.prompt, answer)
                yield News(choice.index, parts, answer)
            elif choice.reader.stop:
                self._door.stop(choice)
            elif parts := choice.take_parts():
                yield News(choice.index, parts)
        if isinstance(self._caller, Session):
            self._caller.record.request_count += 1

    async def _next(self) -> Choice:
        choice = await self._news.get()
        if choice is None:
            raise Refusal(504, f"No answer in {self._door.request_seconds:g} seconds.")
        return choice

    async def answers(self) -> list[Answer]:
        """All of them, in order. None is recorded where one fails: the agent is told of none."""
        found = {news.index: news.answer async for news in self.news() if news.answer is not None}
        answers = [found[choice.index] for choice in self.choices]
        for answer in answers:
            self._door.record(self._caller, self.prompt, answer)
        return answers

    def leave(self) -> None:
        """Nobody waits any more."""
        self._timer.cancel()


class Door:
    """One model's front door."""

    def __init__(self, fleet: Fleet, chat: ChatTemplate, context_tokens: int, config: HttpConfig) -> None:
        """`context_tokens` is the model's own."""
        self.reading = Reading(chat)
        self._prompter = Prompter(chat)
        self._fleet = fleet
        self._stop_token_ids = chat.stop_token_ids
        self._context_tokens = context_tokens
        self._session_tokens = config.session_tokens
        self.request_seconds = config.request_seconds

    def prompt(self, caller: Caller, asked: Conversation | bytes) -> Prompt:
        """What the engines are shown. Raises InvalidArgument."""
        record = caller.record if isinstance(caller, Session) else Record()
        if isinstance(asked, Conversation):
            return self._prompter.chat(asked, record)
        return self._prompter.tokens(asked, record)

    @property
    def _context(self) -> int:
        """Prompt and output together at most; the model's own until an engine says."""
        return self._fleet.router.context_tokens or self._context_tokens

    def encode(self, text: str) -> list[int]:
        return self._prompter.encode(text)

    @contextmanager
    def ask(self, caller: Caller, ask: Ask) -> Iterator[Running]:
        """Open the request; leaving cancels what is still open of it. Raises FarmErrors and Refusals."""
        _check_open(caller)
        if isinstance(caller, Session) and caller.record.token_count >= self._session_tokens:
            raise Refusal(429, "The session recorded as many tokens as it may.", code="session_full")
        running = Running(self, caller, ask, self.prompt(caller, ask.prompt))
        try:
            for choice in running.choices:
                self._submit(caller, ask, running.prompt, choice)
            self._fleet.wake()
            yield running
        finally:
            self._leave(caller, running)

    def stop(self, choice: Choice) -> None:
        """End a generation whose text has come to a stop string; it is answered with its tokens so far."""
        self._fleet.router.cancel(choice.request_id, time.monotonic())
        self._fleet.wake()

    def conclude(self, caller: Caller, choice: Choice, result: llm_proxy_pb2.GenerationResult) -> Answer:
        """The choice's answer. Raises the failure, and Refusal where somebody cancelled it."""
        _check_open(caller)
        if result.HasField("failure"):
            raise from_failure(result.failure)
        reader = choice.reader
        if result.finish_reason == ABORT and not reader.stop:
            raise Refusal(503, "The generation was cancelled.")
        turn = turn_of(result, reader.token_count)
        if reader.stop:
            turn.finish_reason = trajectory_pb2.FINISH_REASON_STOP
        return Answer(reader.message, reader.text, turn, reader.stop)

    def record(self, caller: Caller, prompt: Prompt, answer: Answer) -> None:
        """Keep the answer where a session asked."""
        if not isinstance(caller, Session):
            return
        message = answer.message if prompt.messages else None
        reply = prompt.answered(answer.turn, answer.text, message)
        cause = caller.record.add(reply)
        if cause is not Cause.FIRST:
            NEW_HISTORIES.labels(cause).inc()
            log.debug("history begun", session_id=caller.session_id, cause=str(cause))

    def _submit(self, caller: Caller, ask: Ask, prompt: Prompt, choice: Choice) -> None:
        asked = self._generation(caller, ask, prompt, choice)
        router = self._fleet.router
        check(asked, context_tokens=self._context, vocabulary_size=router.vocabulary_size)
        check_ids(unpack_ids(asked.generation.prompt_token_ids), vocabulary_size=router.vocabulary_size)
        watches = ask.streams or ask.stops
        router.submit(asked, choice, time.monotonic(), watch=choice.progress if watches else None)
        if isinstance(caller, Session):
            caller.requests.add(choice.request_id)
            caller.request_count += 1

    def _generation(self, caller: Caller, ask: Ask, prompt: Prompt, choice: Choice) -> llm_proxy_pb2.ProxiedGeneration:
        asked = llm_proxy_pb2.ProxiedGeneration()
        generation = asked.generation
        generation.request_id = choice.request_id
        generation.prompt_token_ids = prompt.token_ids
        bound, allow, number = FREE, True, 0
        if isinstance(caller, Session):
            session = caller.asked
            bound, allow, number = session.sampling, session.allow_sampling, caller.request_count
            generation.session_id = session.session_id
            asked.tenant, asked.priority = session.tenant, session.priority
            if session.HasField("min_version"):
                asked.min_version = session.min_version
        else:
            asked.tenant = caller.name
        bind(
            generation.sampling,
            ask.wishes,
            bound,
            allow=allow,
            room=self._context - prompt.token_count,
            number=number,
            index=choice.index,
            stop_token_ids=self._stop_token_ids,
            top_logprobs=ask.top_logprobs,
        )
        return asked

    def _leave(self, caller: Caller, running: Running) -> None:
        now = time.monotonic()
        running.leave()
        for choice in running.choices:
            self._fleet.router.withdraw(choice.request_id, choice, now)
            if isinstance(caller, Session):
                caller.requests.discard(choice.request_id)
                caller.used = now
        self._fleet.wake()


def _check_open(caller: Caller) -> None:
    """Raise Refusal where the session was closed since its key was looked at: its record is with whoever closed it."""
    if isinstance(caller, Session) and caller.is_closed:
        raise Refusal(401, "The session was closed.", code="invalid_api_key")
