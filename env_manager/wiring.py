"""Wires a worker: its channels, its stream to llm_proxy, its environments."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from env_manager.config import EnvManagerConfig
from env_manager.episodes import Limits, Player
from env_manager.generator import Generator
from env_manager.remote import Server
from env_manager.rendering import Renderer
from env_manager.worker import Worker
from env_manager.worlds import Worlds
from rollfarm import rpc
from rollfarm.v1 import (
    environment_pb2_grpc,
    llm_proxy_pb2_grpc,
    reward_gateway_pb2,
    reward_gateway_pb2_grpc,
    sample_buffer_pb2_grpc,
)

Loop = Callable[[], Awaitable[None]]


@asynccontextmanager
async def open_worker(config: EnvManagerConfig, renderer: Renderer, context_tokens: int) -> AsyncIterator[list[Loop]]:
    """The loops that together are the worker. Channels stay open for as long as the context lasts."""
    worker_id = config.worker_id or f"env-manager-{uuid.uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:

        async def dial(address: str):  # noqa: ANN202
            return await stack.enter_async_context(rpc.channel(address))

        buffer = sample_buffer_pb2_grpc.SampleBufferServiceStub(await dial(config.sample_buffer_address))
        proxy = llm_proxy_pb2_grpc.LlmProxyServiceStub(await dial(config.llm_proxy_address))
        rewards = reward_gateway_pb2_grpc.RewardGatewayServiceStub(await dial(config.reward_gateway_address))
        servers = [
            Server(address, environment_pb2_grpc.EnvironmentServiceStub(await dial(address)))
            for address in config.servers
        ]

        async def score(episode: reward_gateway_pb2.ScoredEpisode) -> reward_gateway_pb2.ScoreResponse:
            request = reward_gateway_pb2.ScoreRequest(episode=episode)
            return await rpc.call(rewards.Score, request, timeout=config.score_seconds)

        generator = Generator(proxy)
        worlds = Worlds(servers, environment_seconds=config.environment_seconds, environment_id=worker_id)
        limits = Limits(
            context_tokens=context_tokens,
            turns=config.max_turns,
            episode_seconds=config.episode_seconds,
            turn_seconds=config.turn_seconds,
        )
        player = Player(renderer, worlds, generator.generate, score, limits, worker_id=worker_id)
        worker = Worker(buffer, player.play, worker_id=worker_id, slots=config.slots, environments=config.environments)
        yield [generator.run, worlds.describe, worker.run]
