"""A real llm_proxy with its front door open, before a simulated engine that writes what a test says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import openai

from llm_proxy.config import LlmProxyConfig
from llm_proxy.engines import Fleet
from llm_proxy.front.config import HttpConfig
from llm_proxy.front.wiring import Front
from llm_proxy.server import SERVICE, LlmProxyServicer
from rollfarm import rpc, tokens
from rollfarm.config import Listen
from rollfarm.service import serve
from rollfarm.testing import SimulatedEngine, simulated_logprob
from rollfarm.v1 import llm_proxy_pb2, llm_proxy_pb2_grpc, trajectory_pb2
from tests.llm_proxy import models

SECONDS = 20.0
MODEL = "policy"
POLICY = trajectory_pb2.AUTHOR_POLICY


@dataclass
class World:
    """A running front door, as callers and agents see it."""

    stub: Any
    fleet: Fleet
    front: Front
    address: str
    """host:port of its gRPC."""

    base_url: str = ""
    api_key: str = ""
    clients: list[Any] = field(default_factory=list)

    async def open(self, session_id: str = "episode", **more: Any) -> llm_proxy_pb2.OpenSessionResponse:
        sampling = trajectory_pb2.Sampling(**{"max_tokens": 256, "temperature": 1.0, **more.pop("sampling", {})})
        request = llm_proxy_pb2.OpenSessionRequest(session_id=session_id, sampling=sampling, **more)
        opened = await rpc.call(self.stub.OpenSession, request, timeout=SECONDS)
        self.base_url, self.api_key = opened.base_url, opened.api_key
        return opened

    async def record(self, session_id: str = "episode") -> llm_proxy_pb2.SessionRecord:
        request = llm_proxy_pb2.GetSessionRequest(session_id=session_id)
        return (await rpc.call(self.stub.GetSession, request, timeout=SECONDS)).record

    async def close(self, session_id: str = "episode") -> llm_proxy_pb2.SessionRecord:
        request = llm_proxy_pb2.CloseSessionRequest(session_id=session_id)
        return (await rpc.call(self.stub.CloseSession, request, timeout=SECONDS)).record

    async def branches(self) -> list[list[int]]:
        """Every token of each branch."""
        return [branch_ids(branch) for branch in (await self.record()).branches]

    def openai(self, **more: Any) -> openai.AsyncOpenAI:
        return self._client(
            openai.AsyncOpenAI, **{"base_url": self.base_url, "api_key": self.api_key, "max_retries": 0, **more}
        )

    def anthropic(self, **more: Any) -> anthropic.AsyncAnthropic:
        url = self.base_url.removesuffix("/v1")
        return self._client(
            anthropic.AsyncAnthropic, **{"base_url": url, "api_key": self.api_key, "max_retries": 0, **more}
        )

    def http(self) -> httpx2.AsyncClient:
        """A plain client, for what no SDK would send."""
        return self._client(
            httpx2.AsyncClient,
            base_url=self.front.http.base_url,
            headers={"Authorization": f"Bearer {self.api_key}"},
            timeout=SECONDS,
        )

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until the fleet got there, looked at after every loop turn that did something."""
        assert await self.fleet.progressed.first(lambda: ready() or None, SECONDS)

    def _client(self, kind: Callable[..., Any], **how: Any) -> Any:
        client = kind(**how)
        self.clients.append(client)
        return client


@asynccontextmanager
async def run_front(
    *engines: str, template: str = models.TEMPLATE, tokenizer: Any = None, **settings: Any
) -> AsyncIterator[World]:
    """llm_proxy over these engines, with a session open. `settings` are those of [llm_proxy.http]."""
    http: dict[str, Any] = {"enabled": True, "listen": Listen(drain_seconds=0), **settings}
    fleet = Fleet(LlmProxyConfig(engines=list(engines), health_seconds=0.1))
    chat = models.ChatTemplate(tokenizer) if tokenizer is not None else models.chat(template)
    front = Front(HttpConfig(**http), fleet, chat, 4096, MODEL)
    front.http.bind()
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    servicer = LlmProxyServicer(fleet, stop, front)
    serving = asyncio.create_task(
        serve(
            lambda server: llm_proxy_pb2_grpc.add_LlmProxyServiceServicer_to_server(servicer, server),
            Listen(drain_seconds=0),
            fleet.run,
            servicer.wake_on_stop,
            front.http.run,
            services=[SERVICE],
            stop=stop,
            started=port.set_result,
            drains=[front.http.drain],
        )
    )
    try:
        address = f"127.0.0.1:{await port}"
        async with rpc.channel(address) as channel:
            world = World(llm_proxy_pb2_grpc.LlmProxyServiceStub(channel), fleet, front, address)
            await world.open()
            await world.until(lambda: fleet.router.context_tokens > 0 or not engines)
            yield world
            for client in world.clients:
                await (client.aclose() if isinstance(client, httpx2.AsyncClient) else client.close())
    finally:
        stop.set()
        await serving


@asynccontextmanager
async def scripted(
    write: Callable[[str], str], *, engine: SimulatedEngine | None = None, **settings: Any
) -> AsyncIterator[tuple[World, models.Script]]:
    """A front door whose policy writes what `write` answers to the text of a prompt."""
    script = models.Script(write)
    engine = engine or SimulatedEngine(chunk_tokens=4)
    engine.policy, engine.vocabulary_size = script, models.VOCABULARY
    async with engine.serve() as address, run_front(address, **settings) as world:
        yield world, script


def branch_ids(branch: Any) -> list[int]:
    return [token for turn in branch.turns for token in tokens.unpack_ids(turn.token_ids).tolist()]


def assert_exact(record: Any, script: models.Script) -> None:
    """Each policy turn is what the engine made of exactly the tokens before it."""
    seen = {tuple(prompt): script.answer(prompt) for prompt in script.prompts}
    turns = 0
    for branch in record.branches:
        before: list[int] = []
        for turn in branch.turns:
            ids = tokens.unpack_ids(turn.token_ids).tolist()
            if turn.author == POLICY:
                turns += 1
                assert seen[tuple(before)][: len(ids)] == ids
                logprobs = tokens.unpack_logprobs(turn.logprobs).tolist()
                assert logprobs == [simulated_logprob(token, 0) for token in ids]
                assert tokens.versions_of(turn.version_spans).tolist() == [0] * len(ids)
                assert turn.engine_id
            else:
                assert not turn.logprobs
            before += ids
    assert turns
