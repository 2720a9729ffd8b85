"""Episodes and gateways for reward_gateway's tests."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from reward_gateway.config import RewardGatewayConfig
from reward_gateway.wiring import open_gateway
from rollfarm import rpc
from rollfarm.service import ErrorInterceptor
from rollfarm.v1 import reward_gateway_pb2, reward_gateway_pb2_grpc, trajectory_pb2

OWN = "tests.reward_gateway.rewards_of_ones_own"

POLICY = trajectory_pb2.AUTHOR_POLICY


def episode(*answers: str, reference: str = "", domain: str = "d", steps: tuple[float, ...] = ()) -> Any:
    turns = [reward_gateway_pb2.ScoredTurn(author=POLICY, text=answer) for answer in answers]
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


Score = Callable[[Any], Any]


@asynccontextmanager
async def scoring(config: RewardGatewayConfig) -> AsyncIterator[Score]:
    """A gateway on a socket; yields how to ask it."""
    async with open_gateway(config) as gateway, serving(gateway.register) as address, rpc.channel(address) as channel:
        stub = reward_gateway_pb2_grpc.RewardGatewayServiceStub(channel)

        async def score(episode: Any) -> reward_gateway_pb2.ScoreResponse:
            return await rpc.call(stub.Score, reward_gateway_pb2.ScoreRequest(episode=episode), timeout=30)

        yield score
