"""An agent as it is, trained: sample_buffer, llm_proxy, env_manager, reward_gateway and the trainer are the real ones.

They share a process, so that they start in no time, and talk through sockets. The engine is simulated, because a random
model calls no tools; it writes what a script says, and receives the trainer's weights as a real one does.
"""

import asyncio
import itertools
import re
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from env_manager.config import EnvManagerConfig
from env_manager.rendering import Renderer
from env_manager.wiring import open_worker
from llm_proxy.engine.groups import Group
from llm_proxy.engine.layout import Layout, check_sums, table_for
from reward_gateway.config import RewardGatewayConfig
from reward_gateway.wiring import open_gateway
from rollfarm import rpc, tokens
from rollfarm.run import DomainConfig, ModelConfig, RunConfig, SamplingConfig
from rollfarm.testing import SimulatedEngine, simulated_logprob
from rollfarm.threads import in_thread
from rollfarm.v1 import llm_proxy_pb2_grpc, sample_buffer_pb2, sample_buffer_pb2_grpc, trajectory_pb2
from sample_buffer.config import SampleBufferConfig
from sample_buffer.journal import MemoryJournal
from sample_buffer.ledger import Ledger
from sample_buffer.server import SampleBufferServicer
from tests.env_manager.fakes import serving
from tests.farm.conftest import CHECKOUT, StartFarm
from tests.llm_proxy import models
from tests.llm_proxy.fronts import POLICY, World, scripted
from tests.trainer.farms import Farm
from trainer.config import TrainerConfig, TrainerRoot

AGENT = Path(__file__).parents[1] / "env_manager" / "tool_agent.py"

SECONDS = 60.0


class ReceivingEngine(SimulatedEngine):
    """Meets the trainer and takes in its weights."""

    async def JoinWeights(self, request: Any, context: Any) -> Any:
        self.group = await in_thread(lambda: Group(request.group, seconds=SECONDS))
        return await super().JoinWeights(request, context)

    async def StageWeights(self, request: Any, context: Any) -> Any:
        layout = Layout(request.tensors, request.bucket_size_bytes)
        room = layout.buffers(torch.empty(layout.size_bytes, dtype=torch.uint8))
        table = table_for(room)
        await in_thread(lambda: check_sums(self.group.receive([*room, table]), table))
        return await super().StageWeights(request, context)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(tmp_path_factory.mktemp("model") / "policy")


def calls_then_tells(prompt: str, tries: "itertools.count[int]") -> str:
    """Has the tool work it out; every second answer is the right one."""
    if "<tool_response>" not in prompt:
        question = re.findall(r"what is (\d+ \w+ \d+)", prompt)[0]
        call = f'{{"name": "calculate", "arguments": {{"question": "{question}"}}}}'
        return f"Let me see.\n<tool_call>\n{call}\n</tool_call><|im_end|>"
    right = re.findall(r"<tool_response>\n(-?\d+)", prompt)[0]
    return (right if next(tries) % 2 else "I know it not") + "<|im_end|>"


def run_of(model: Path, folder: Path) -> TrainerRoot:
    """Two steps of one group of two, each wholly of the newest version."""
    return TrainerRoot(
        run=RunConfig(
            name=f"run-{uuid.uuid4().hex[:8]}",
            folder=folder,
            steps=2,
            alpha=0.0,
            batch_groups=1,
            group_size=2,
            domains=[DomainConfig(name="sums", environment="arithmetic")],
            sampling=SamplingConfig(max_tokens=200),
        ),
        model=ModelConfig(path=str(model)),
        trainer=TrainerConfig(device="cpu", checkpoint_every=2, validation_episodes=0, exit_when_finished=True),
    )


@asynccontextmanager
async def buffer_at() -> AsyncIterator[str]:
    ledger = Ledger(SampleBufferConfig(), MemoryJournal())
    await ledger.open()
    servicer = SampleBufferServicer(ledger, asyncio.Event(), max_trajectory_bytes=1 << 20)
    loops = [asyncio.create_task(loop()) for loop in (ledger.run, ledger.tick)]
    async with serving(servicer.register) as address:
        yield address
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    await ledger.close()


@asynccontextmanager
async def farm_with_agents(proxy: World, root: TrainerRoot) -> AsyncIterator[Farm]:
    rewards = RewardGatewayConfig.model_validate({"domains": {"sums": {"rewards": [{"name": "environment"}]}}})
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(open_gateway(rewards))
        buffer = await stack.enter_async_context(buffer_at())
        config = EnvManagerConfig.model_validate(
            {
                "sample_buffer_address": buffer,
                "llm_proxy_address": proxy.address,
                "reward_gateway_address": await stack.enter_async_context(serving(gateway.register)),
                "agents": {"sums": {"command": [sys.executable, str(AGENT)], "seconds": SECONDS}},
            }
        )
        worker = await stack.enter_async_context(open_worker(config, Renderer(models.tokenizer()), 2048))
        loops = [asyncio.ensure_future(loop()) for loop in worker.loops]
        channels = [await stack.enter_async_context(rpc.channel(address)) for address in (buffer, proxy.address)]
        try:
            yield Farm(
                root,
                sample_buffer_pb2_grpc.SampleBufferServiceStub(channels[0]),
                llm_proxy_pb2_grpc.LlmProxyServiceStub(channels[1]),
                proxy.address,
            )
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)


def assert_as_the_engine_made_it(trajectory: trajectory_pb2.Trajectory, script: models.Script) -> None:
    before: list[int] = []
    for turn in trajectory.turns:
        ids = tokens.unpack_ids(turn.token_ids).tolist()
        if turn.author == POLICY:
            versions = tokens.versions_of(turn.version_spans).tolist()
            assert ids == script.answer(before)
            expected = [simulated_logprob(token, version) for token, version in zip(ids, versions, strict=True)]
            assert tokens.unpack_logprobs(turn.logprobs).tolist() == expected
            assert min(versions) >= trajectory.lease_policy_version
        before += ids


async def test_an_unmodified_openai_agent_is_trained_for_two_steps_on_the_very_tokens_of_the_engine(
    model: Path, tmp_path: Path
) -> None:
    tries = itertools.count()
    engine = ReceivingEngine(chunk_tokens=16)
    async with (
        scripted(lambda prompt: calls_then_tells(prompt, tries), engine=engine) as (proxy, script),
        farm_with_agents(proxy, run_of(model, tmp_path)) as farm,
    ):
        await asyncio.wait_for(farm.trainer().controller.run(), SECONDS)

        listing = sample_buffer_pb2.ListTrajectoriesRequest(page_size=50)
        trajectories = (await rpc.call(farm.buffer.ListTrajectories, listing, timeout=10)).trajectories
        status = await farm.status()
        assert (status.next_commit_step, status.committed_trajectory_count) == (2, 4)
        assert [line["step"] for line in farm.metrics("step")] == [0, 1]
        assert engine.version == 3
        assert len(script.prompts) == 8
        for trajectory in trajectories:
            assert_as_the_engine_made_it(trajectory, script)
            assert sum(turn.author == POLICY for turn in trajectory.turns) == 2
        assert sorted(trajectory.reward for trajectory in trajectories) == [0.0, 0.0, 1.0, 1.0]
        assert sorted(trajectory.oldest_policy_version for trajectory in trajectories) == [1, 1, 2, 2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_with_an_agent_runs(start_farm: StartFarm) -> None:
    farm = start_farm(CHECKOUT / "examples" / "agent.toml", "--run.steps", "1", "--trainer.validation_episodes", "0")

    status, summary = farm.finish(seconds=300)

    assert (status, summary["samples"]) == (0, 8)
    assert summary["tokens"] >= 2 * summary["samples"], "each episode has two answers of one token"
