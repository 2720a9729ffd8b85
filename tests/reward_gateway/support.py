"""Episodes and gateways for reward_gateway's tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from grpc import aio

from reward_gateway.config import RewardGatewayConfig
from reward_gateway.server import RewardGatewayServicer
from reward_gateway.wiring import open_gateway
from rollfarm import rpc
from rollfarm.service import ErrorInterceptor
from rollfarm.v1 import reward_gateway_pb2, reward_gateway_pb2_grpc, trajectory_pb2

OWN = "tests.reward_gateway.rewards_of_ones_own"

POLICY = trajectory_pb2.AUTHOR_POLICY


def episode(*answers: str, reference: str = "", domain: str = "d", steps: tuple[float, ...] = ()) -> Any:
    turns = [trajectory_pb2.ScoredTurn(author=POLICY, text=answer) for answer in answers]
    for turn, reward in zip(turns, steps, strict=False):
        turn.step_reward = reward
    return reward_gateway_pb2.ScoredEpisode(
        task=trajectory_pb2.Task(domain=domain, environment="quiz"),
        turns=turns,
        reference=reference,
        outcome=trajectory_pb2.OUTCOME_OK,
    )


def config(*rewards: dict[str, Any], **more: Any) -> RewardGatewayConfig:
    return RewardGatewayConfig.model_validate({"domains": {"d": {"rewards": list(rewards)}}, **more})


@asynccontextmanager
async def serving(register: Callable[[aio.Server], None]) -> AsyncIterator[str]:
    server = aio.server(interceptors=[ErrorInterceptor()])
    register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


@dataclass
class Asked:
    """A gateway on a socket."""

    stub: Any

    async def __call__(self, episode: Any, *, timeout: float = 30, **more: Any) -> reward_gateway_pb2.ScoreResponse:
        return await rpc.call(
            self.stub.Score, reward_gateway_pb2.ScoreRequest(episode=episode, **more), timeout=timeout
        )

    async def many(
        self, *episodes: Any, trace_ids: Sequence[str] = (), unwanted: asyncio.Future[list[int]] | None = None
    ) -> AsyncIterator[reward_gateway_pb2.ScoreManyResponse]:
        requests = [
            reward_gateway_pb2.ScoreRequest(episode=episode, trace_id=trace_id)
            for episode, trace_id in zip(episodes, trace_ids or [""] * len(episodes), strict=True)
        ]

        async def asked() -> AsyncIterator[reward_gateway_pb2.ScoreManyRequest]:
            yield reward_gateway_pb2.ScoreManyRequest(requests=requests)
            if unwanted is not None:
                yield reward_gateway_pb2.ScoreManyRequest(cancelled_indexes=await unwanted)

        async for answer in rpc.stream(self.stub.ScoreMany, asked(), timeout=30):
            yield answer

    async def status(self) -> reward_gateway_pb2.RewardGatewayServiceGetStatusResponse:
        request = reward_gateway_pb2.RewardGatewayServiceGetStatusRequest()
        return await rpc.call(self.stub.GetStatus, request, timeout=30)

    async def until(self, ready: Callable[[reward_gateway_pb2.DomainStatus], bool]) -> None:
        """Wait for the first domain to be so."""
        async with asyncio.timeout(30):
            while not ready((await self.status()).domains[0]):  # noqa: ASYNC110 - the contract has no way to wait
                await asyncio.sleep(0.01)


@asynccontextmanager
async def scoring(config: RewardGatewayConfig) -> AsyncIterator[Asked]:
    async with open_gateway(config) as gateway, asking(gateway) as asked:
        yield asked


@asynccontextmanager
async def asking(gateway: RewardGatewayServicer) -> AsyncIterator[Asked]:
    async with serving(gateway.register) as address, rpc.channel(address) as channel:
        yield Asked(reward_gateway_pb2_grpc.RewardGatewayServiceStub(channel))


@asynccontextmanager
async def answering(handler: Callable[[str], str | Awaitable[str]]) -> AsyncIterator[str]:
    """The base URL of an OpenAI-compatible endpoint whose model answers the user's last words as `handler` does."""

    async def complete(request: web.Request) -> web.Response:
        said = handler((await request.json())["messages"][-1]["content"])
        words = said if isinstance(said, str) else await said
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": words}}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()
