"""Wires a worker: its channels, its stream to llm_proxy, its environments."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from env_manager.agents import agents_of
from env_manager.config import EnvManagerConfig
from env_manager.episodes import Limits, Player, Score, TurnLoop
from env_manager.generator import Generator
from env_manager.hosts import Hosts
from env_manager.processes import Processes
from env_manager.rendering import Renderer
from env_manager.scores import Scores
from env_manager.server import EnvManagerServicer, sandbox_level
from env_manager.servers import Servers
from env_manager.slots import Slots
from env_manager.standings import Standings
from env_manager.worker import Worker
from env_manager.worlds import Worlds
from rollfarm import rpc, sandbox, telemetry
from rollfarm.v1 import (
    environment_pb2,
    llm_proxy_pb2,
    llm_proxy_pb2_grpc,
    reward_gateway_pb2,
    reward_gateway_pb2_grpc,
    sample_buffer_pb2,
    sample_buffer_pb2_grpc,
)

Loop = Callable[[], Awaitable[None]]

HANG_SECONDS = 10.0
"""How much longer than its slowest answer a process of environments may say nothing."""


@dataclass(frozen=True)
class Wired:
    """A worker, ready to run."""

    servicer: EnvManagerServicer
    """What it serves."""

    loops: Sequence[Loop]
    """What it does, for as long as it lives."""

    drain: Loop
    """Gives its leases back, and lets go of the workers that dialled in."""


class _Stoppable:
    """A loop that may be stopped before the others."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        self._task = asyncio.current_task()
        await self._loop()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


@asynccontextmanager
async def open_worker(config: EnvManagerConfig, renderer: Renderer, context_tokens: int) -> AsyncIterator[Wired]:
    """The worker. Channels stay open for as long as the context lasts. Raises ConfigError without its token."""
    sandbox.configure(config.sandbox)
    worker_id = config.worker_id or f"env-manager-{uuid.uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:

        async def dial(address: str):  # noqa: ANN202
            return await stack.enter_async_context(rpc.channel(address))

        buffer = sample_buffer_pb2_grpc.SampleBufferServiceStub(await dial(config.sample_buffer_address))
        proxy = llm_proxy_pb2_grpc.LlmProxyServiceStub(await dial(config.llm_proxy_address))
        rewards = reward_gateway_pb2_grpc.RewardGatewayServiceStub(await dial(config.reward_gateway_address))
        hosts = Hosts()
        if config.attach_token or config.environments:
            hosts.awaited.add("workers that may dial in")
        servers = Servers(config.servers, hosts)
        processes = Processes(
            hosts,
            per_environment=config.processes,
            hang_seconds=config.environment_seconds + HANG_SECONDS,
            telemetry=config.telemetry,
        )

        slots = Slots(
            config.slots,
            least=config.min_slots,
            queue_share=config.queue_share,
            now=asyncio.get_running_loop().time,
        )
        generator = Generator(proxy, seconds=config.turn_seconds)

        async def generate(generation: llm_proxy_pb2.ProxiedGeneration) -> llm_proxy_pb2.GenerationResult:
            result = await generator.generate(generation)
            slots.generated(result)
            return result

        worlds = Worlds(
            hosts,
            processes,
            environment_seconds=config.environment_seconds,
            environment_id=worker_id,
            most_chars=config.max_observation_chars,
        )
        loop = TurnLoop(renderer, generate, _limits(config, context_tokens))
        agents = agents_of(config.agents, proxy)
        scores = Scores(rewards, seconds=config.score_seconds)
        player = Player(worlds, loop.converse, _scorer(scores), worker_id=worker_id, agents=agents)
        standings = Standings(config)
        worker = Worker(
            buffer,
            player.play,
            worker_id=worker_id,
            slots=slots,
            standings=standings,
            environments=config.environments,
        )

        def status() -> environment_pb2.EnvManagerServiceGetStatusResponse:
            return environment_pb2.EnvManagerServiceGetStatusResponse(
                worker_id=worker_id,
                running_count=slots.running,
                slot_count=slots.limit,
                environments=standings.statuses(worlds.known),
                hosts=hosts.hosts(),
                sandbox_level=sandbox_level(),
            )

        servicer = EnvManagerServicer(hosts, status, attach_token=config.read_token())
        playing = _Stoppable(worker.run)

        async def drain() -> None:
            await playing.stop()
            hosts.release("env_manager stops.")

        yield Wired(servicer, [generator.run, scores.run, servers.run, processes.run, playing.run], drain)


def _limits(config: EnvManagerConfig, context_tokens: int) -> Limits:
    return Limits(
        context_tokens=context_tokens,
        turns=config.max_turns,
        episode_seconds=config.episode_seconds,
    )


def _scorer(scores: Scores) -> Score:
    """Asks reward_gateway. An episode of a validation has no siblings to be compared with."""

    async def score(
        episode: reward_gateway_pb2.ScoredEpisode, leased: sample_buffer_pb2.Episode
    ) -> reward_gateway_pb2.ScoreResponse:
        request = reward_gateway_pb2.ScoreRequest(
            episode=episode,
            group_id=leased.group_id,
            member=leased.member,
            group_size=0 if leased.validation_id else leased.group_size,
            trace_id=telemetry.trace_id.get(),
        )
        return await scores.ask(request)

    return score
