"""A real llm_proxy on a real socket, in the test's own loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from llm_proxy.config import LlmProxyConfig
from llm_proxy.engines import Fleet
from llm_proxy.server import SERVICE, LlmProxyServicer
from rollfarm import rpc, times, tokens
from rollfarm.config import Listen
from rollfarm.service import serve
from rollfarm.testing import simulated_logprob, simulated_token
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, llm_proxy_pb2_grpc, trajectory_pb2

SECONDS = 20.0
OWN_FIELDS = ("min_version", "exact_version", "priority", "tenant")
"""Fields of ProxiedGeneration, beside the generation."""


def asked(request_id: str, *, prompt: list[int] | None = None, max_tokens: int = 4, **more: Any) -> Any:
    """A request; `more` are fields of Sampling, of Generation (session_id, trace_id) or of ProxiedGeneration."""
    own = {name: more.pop(name) for name in OWN_FIELDS if name in more}
    ids = {name: more.pop(name) for name in ("session_id", "trace_id") if name in more}
    table: dict[str, Any] = {"temperature": 1.0, **more}
    sampling = trajectory_pb2.Sampling(max_tokens=max_tokens, **table)
    generation = engine_pb2.Generation(
        request_id=request_id,
        prompt_token_ids=tokens.pack_ids([1, 2, 3] if prompt is None else prompt),
        sampling=sampling,
        **ids,
    )
    return llm_proxy_pb2.ProxiedGeneration(generation=generation, **own)


def versions(result: Any) -> list[int]:
    return tokens.versions_of(result.version_spans).tolist()


def assert_exact(result: Any, prompt_length: int = 3) -> None:
    """Every token and log-probability is what the simulated policy gives at its position and version."""
    ids = tokens.unpack_ids(result.token_ids).tolist()
    expected = [simulated_token(prompt_length + at, version) for at, version in enumerate(versions(result))]
    assert ids == expected
    logprobs = [simulated_logprob(token, version) for token, version in zip(ids, versions(result), strict=True)]
    assert tokens.unpack_logprobs(result.logprobs).tolist() == logprobs


@dataclass
class Proxy:
    """A running llm_proxy, as a client sees it."""

    stub: Any
    fleet: Fleet
    address: str = ""

    async def generate(self, generation: Any, timeout: float = SECONDS) -> Any:
        request = llm_proxy_pb2.GenerateRequest(generation=generation)
        return (await rpc.call(self.stub.Generate, request, timeout=timeout)).result

    async def status(self) -> Any:
        return await rpc.call(self.stub.GetStatus, llm_proxy_pb2.LlmProxyServiceGetStatusRequest(), timeout=SECONDS)

    async def engines_when(self, ready: Callable[[Any], bool]) -> Any:
        """The engines once `ready` says so, by long polls."""
        async with asyncio.timeout(SECONDS):
            listed = await self.list_engines()
            while not ready(listed):
                listed = await self.list_engines(after_revision=listed.revision)
            return listed

    async def serving(self, count: int = 1) -> Any:
        """The engines once this many serve."""
        return await self.engines_when(
            lambda listed: sum(engine.state == llm_proxy_pb2.Engine.STATE_SERVING for engine in listed.engines) == count
        )

    async def list_engines(self, **request: Any) -> Any:
        return await rpc.call(self.stub.ListEngines, llm_proxy_pb2.ListEnginesRequest(**request), timeout=SECONDS)

    async def attach(self, address: str) -> None:
        await rpc.call(self.stub.AttachEngine, llm_proxy_pb2.AttachEngineRequest(address=address), timeout=SECONDS)

    async def abort(self, version: int) -> None:
        request = llm_proxy_pb2.AbortWeightUpdateRequest(policy_version=version)
        await rpc.call(self.stub.AbortWeightUpdate, request, timeout=SECONDS)

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until the fleet got there, looked at after every loop turn that did something."""
        assert await self.fleet.progressed.first(lambda: ready() or None, SECONDS)

    async def sleep(self, *, lease_seconds: float = 60.0, **request: Any) -> list[str]:
        """Put the engines to sleep; those that do."""
        sleep = llm_proxy_pb2.SleepEnginesRequest(lease_duration=times.duration(lease_seconds), **request)
        return list((await rpc.call(self.stub.SleepEngines, sleep, timeout=SECONDS)).engine_ids)

    async def wake(self) -> list[str]:
        """Wake the engines; those that are awake."""
        answer = await rpc.call(self.stub.WakeEngines, llm_proxy_pb2.WakeEnginesRequest(), timeout=SECONDS)
        return list(answer.engine_ids)

    async def begin(self, version: int, *engines: Any, sender_id: str = "") -> list[str]:
        """Stage a version; the reason of each engine's failure, or "" ."""
        request = llm_proxy_pb2.BeginWeightUpdateRequest(
            policy_version=version, transfers=transfers_to(engines), sender_id=sender_id
        )
        answer = await rpc.call(self.stub.BeginWeightUpdate, request, timeout=SECONDS)
        return [result.failure.reason for result in answer.results]

    async def commit(self, version: int, **request: Any) -> Any:
        commit = llm_proxy_pb2.CommitWeightUpdateRequest(policy_version=version, **request)
        return await rpc.call(self.stub.CommitWeightUpdate, commit, timeout=SECONDS)


def transfers_to(engines: Iterable[Any]) -> list[llm_proxy_pb2.EngineTransfer]:
    """A way for weights to each, by which nothing comes: simulated engines need no bytes."""
    return [
        llm_proxy_pb2.EngineTransfer(
            engine_id=engine.engine_id,
            instance_id=engine.instance_id,
            group=engine_pb2.WeightGroup(group_name="g"),
            join=True,
        )
        for engine in engines
    ]


@asynccontextmanager
async def run_proxy(*engines: str, port: int = 0, **settings: Any) -> AsyncIterator[Proxy]:
    """llm_proxy over these engine addresses."""
    table: dict[str, Any] = {"engines": list(engines), "health_seconds": 0.1, **settings}
    fleet = Fleet(LlmProxyConfig(**table))
    stop, bound = asyncio.Event(), asyncio.get_running_loop().create_future()
    servicer = LlmProxyServicer(fleet, stop)
    serving = asyncio.create_task(
        serve(
            lambda server: llm_proxy_pb2_grpc.add_LlmProxyServiceServicer_to_server(servicer, server),
            Listen(port=port, drain_seconds=0),
            fleet.run,
            servicer.wake_on_stop,
            servicer.watch_sleep,
            services=[SERVICE],
            stop=stop,
            started=bound.set_result,
        )
    )
    try:
        address = f"127.0.0.1:{await bound}"
        async with rpc.channel(address) as channel:
            yield Proxy(llm_proxy_pb2_grpc.LlmProxyServiceStub(channel), fleet, address)
    finally:
        stop.set()
        await serving
