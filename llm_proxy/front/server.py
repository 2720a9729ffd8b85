"""The HTTP server: it knows who asks, hands the body to the API's module, and carries what that says back.

It runs in llm_proxy's own loop. An agent that hangs up cancels its handler, and with it what the engines still do for
it. Nothing that a request contains, keys least of all, is written to the log.
"""

import asyncio
import json
import socket
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import structlog
from aiohttp import web

from llm_proxy.front import anthropic, completions, errors, jsons, openai
from llm_proxy.front.config import HttpConfig
from llm_proxy.front.door import Answer, Ask, Caller, Door, News, Running, Tenant
from llm_proxy.front.errors import Api, Refusal
from llm_proxy.front.fields import Fields
from llm_proxy.front.keys import Keys
from llm_proxy.front.metrics import HTTP_SECONDS
from llm_proxy.front.sessions import Sessions
from rollfarm.errors import FarmError
from rollfarm.service import PortInUse

log = structlog.get_logger()

SWEEP_SECONDS = 30.0
"""How often expired sessions are forgotten."""

JSON = {"Content-Type": "application/json"}
STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Writer(Protocol):
    """Writes the answers to one request as its API does."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """All of them in one piece."""
        ...

    def begin(self) -> bytes:
        """How a stream begins."""
        ...

    def news(self, news: News) -> bytes:
        """What is new, as a stream tells it."""
        ...

    def end(self) -> bytes:
        """How a stream ends."""
        ...

    def failed(self, error: Refusal) -> bytes:
        """How a stream tells that it failed."""
        ...


Handler = Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]


class HttpServer:
    """One port for both APIs."""

    def __init__(
        self, config: HttpConfig, door: Door, sessions: Sessions, keys: Keys[Tenant], model_names: list[str]
    ) -> None:
        self._config = config
        self._door = door
        self._sessions = sessions
        self._keys = keys
        self._model_names = model_names
        self._created = int(time.time())
        self._socket: socket.socket | None = None
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=config.listen.drain_seconds,
        )

    def bind(self) -> None:
        """Take the port. Raises PortInUse."""
        listen = self._config.listen
        try:
            self._socket = socket.create_server((listen.host, listen.port), family=_family(listen.host), backlog=1024)
        except OSError as error:
            raise PortInUse(f"Cannot listen on {listen.address} for HTTP (llm_proxy.http.listen).") from error

    @property
    def base_url(self) -> str:
        """What agents call, without the /v1."""
        if self._config.base_url:
            return self._config.base_url.rstrip("/")
        assert self._socket is not None
        host = self._config.listen.host
        named = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"http://{named}:{self._socket.getsockname()[1]}"

    async def run(self) -> None:
        """Serve until cancelled."""
        assert self._socket is not None
        await self._runner.setup()
        try:
            await web.SockSite(self._runner, self._socket, backlog=1024).start()
            log.info("serving agents", base_url=self.base_url)
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                self._sessions.expire(time.monotonic())
        finally:
            await self.drain()

    async def drain(self) -> None:
        """Take no more requests, and let those that are open finish within llm_proxy.http.listen.drain_seconds."""
        await self._runner.cleanup()

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=self._config.max_body_bytes)
        add = app.router.add_route
        add("POST", "/v1/chat/completions", self._guarded("openai", self._chat))
        add("POST", "/v1/completions", self._guarded("openai", self._complete))
        add("POST", "/v1/messages", self._guarded("anthropic", self._messages))
        add("POST", "/v1/messages/count_tokens", self._guarded("anthropic", self._count))
        add("GET", "/v1/models", self._guarded(None, self._models))
        add("GET", "/v1/models/{name:.+}", self._guarded(None, self._model))
        add("*", "/{path:.*}", self._guarded(None, self._unknown))
        return app

    def _guarded(self, api: Api | None, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """`handler` for those with a key; every error in the API's form. Where it serves both, the headers tell."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            spoken: Api = api or ("anthropic" if "anthropic-version" in request.headers else "openai")
            began = time.perf_counter()
            status = 499
            try:
                response = await handler(request, self._caller(request))
                status = response.status
            except (Refusal, FarmError, web.HTTPException, RecursionError) as error:
                response = _refused(spoken, _refusal(error))
                status = response.status
            except (asyncio.CancelledError, ConnectionResetError):
                raise
            except Exception as bug:
                _log_bug(bug)
                response = _refused(spoken, errors.refusal(bug))
                status = response.status
            finally:
                path = resource.canonical if (resource := request.match_info.route.resource) else ""
                HTTP_SECONDS.labels(path, status).observe(time.perf_counter() - began)
            return response

        return guarded

    def _caller(self, request: web.Request) -> Caller:
        """Who asks. Raises Refusal."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        caller = self._sessions.find(key, time.monotonic()) or self._keys.find(key)
        if caller is None:
            raise Refusal(401, "The API key is missing, wrong, or of a session that is over.", code="invalid_api_key")
        return caller

    async def _chat(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        asked = openai.read(Fields.parse(await request.read()), most_choices=self._config.max_choices)

        def writer(prompt_tokens: int) -> Writer:
            return openai.ChatWriter(asked, self._door.reading, prompt_tokens, time.time())

        return await self._answer(request, caller, asked.model, asked.ask, writer)

    async def _complete(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        body = Fields.parse(await request.read())
        asked = completions.read(body, self._door.encode, most_choices=self._config.max_choices)

        def writer(prompt_tokens: int) -> Writer:
            return completions.CompletionWriter(asked, self._door.reading, prompt_tokens, time.time())

        return await self._answer(request, caller, asked.model, asked.ask, writer)

    async def _messages(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        asked = anthropic.read(Fields.parse(await request.read()))

        def writer(prompt_tokens: int) -> Writer:
            return anthropic.MessageWriter(asked, prompt_tokens)

        return await self._answer(request, caller, asked.model, asked.ask, writer)

    async def _answer(
        self, request: web.Request, caller: Caller, model: str, ask: Ask, writer_for: Callable[[int], "Writer"]
    ) -> web.StreamResponse:
        """In one piece, or as it comes. `writer_for` makes the writer for a prompt of so many tokens."""
        self._check_model(model)
        with self._door.ask(caller, ask) as running:
            writer = writer_for(running.prompt.token_count)
            if ask.streams:
                return await _stream(request, running, writer)
            return _json(writer.whole(await running.answers()))

    async def _count(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        model, conversation = anthropic.read_count(Fields.parse(await request.read()))
        self._check_model(model)
        return _json({"input_tokens": self._door.prompt(caller, conversation).token_count})

    async def _models(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        models = [self._told_model(name) for name in self._model_names]
        ends = {"first_id": self._model_names[0], "last_id": self._model_names[-1], "has_more": False}
        return _json({"object": "list", "data": models, **ends})

    async def _model(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        name = request.match_info["name"]
        self._check_model(name)
        return _json(self._told_model(name))

    async def _unknown(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        raise Refusal(404, f"There is no {request.method} {request.path} here.")

    def _told_model(self, name: str) -> dict[str, Any]:
        """One model as both APIs tell it."""
        own = {"id": name, "object": "model", "created": self._created, "owned_by": "rollfarm"}
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._created))
        return {**own, "type": "model", "display_name": name, "created_at": created}

    def _check_model(self, name: str) -> None:
        if name not in self._model_names:
            known = ", ".join(self._model_names)
            raise Refusal(404, f"There is no model {name!r}. Known: {known}.", "model", "model_not_found")


async def _stream(request: web.Request, running: Running, writer: Writer) -> web.StreamResponse:
    """Tell the answer as it comes. What fails after the first byte is told in the stream."""
    response = web.StreamResponse(headers=STREAM)
    await response.prepare(request)
    try:
        await response.write(writer.begin())
        async for news in running.news():
            if told := writer.news(news):
                await response.write(told)
        await response.write(writer.end())
    except ConnectionResetError:
        raise
    except Exception as error:
        if not isinstance(error, Refusal | FarmError):
            _log_bug(error)
        await response.write(writer.failed(errors.refusal(error)))
    await response.write_eof()
    return response


def _log_bug(bug: Exception) -> None:
    """Where it happened, without what the variables held: that may be an agent's words, or its key."""
    log.error(
        "an agent's request failed", error=type(bug).__name__, stack="".join(traceback.format_tb(bug.__traceback__))
    )


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return Refusal(413, "The body is larger than llm_proxy.http.max_body_bytes.", code="request_too_large")
    if isinstance(error, RecursionError):
        return Refusal(400, "The body is nested too deep.")
    if isinstance(error, web.HTTPException):
        return Refusal(error.status, error.reason)
    return errors.refusal(error)


def _refused(api: Api, refused: Refusal) -> web.Response:
    request_id = f"req_{uuid.uuid4().hex}"
    body = json.dumps(errors.body(api, refused, request_id=request_id)).encode()
    return web.Response(status=refused.status, body=body, content_type="application/json")


def _json(told: dict[str, Any]) -> web.Response:
    return web.Response(body=jsons.write(told), headers=JSON)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
