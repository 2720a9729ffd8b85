"""A tiny real model, and groups as sample_buffer delivers them."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

from rollfarm import rpc
from rollfarm.ports import free_port
from rollfarm.run import ModelConfig, TinyModelConfig
from rollfarm.tokens import pack_ids, pack_logprobs
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from tests.trainer.disks import FullDisk, mounted
from trainer.backends import Settings
from trainer.backends.replicated import ReplicatedBackend
from trainer.backends.scoring import TokenLogprobs, load_model
from trainer.create_model import ensure_model
from trainer.rows import Row

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
START_SECONDS = 60.0

WORDS = "left right up down go stop ice hole 0 1 2 3"


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one narrow layer."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    create = TinyModelConfig(words=WORDS, hidden_size=32, layers=1, context_tokens=64)
    ensure_model(ModelConfig(path=str(path), create=create))
    return path


@pytest.fixture(scope="session")
def buffer_address() -> Iterator[str]:
    """`python -m sample_buffer` with its journal in memory; each test has a run of its own in it."""
    address = f"127.0.0.1:{free_port()}"
    flags = ["--sample_buffer.listen.port", address.split(":")[1], "--sample_buffer.journal", "memory"]
    process = subprocess.Popen([sys.executable, "-m", "sample_buffer", *flags], cwd=ROOT, stdin=subprocess.DEVNULL)
    end = time.monotonic() + START_SECONDS
    while not asyncio.run(rpc.is_serving(address, timeout=1)):
        assert process.poll() is None
        assert time.monotonic() < end
    yield address
    process.kill()
    process.wait()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[FullDisk]:
    with mounted(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def backend(model_path: Path) -> ReplicatedBackend:
    return make_backend(model_path)


def make_backend(path: Path, micro_batch_tokens: int = 4096) -> ReplicatedBackend:
    settings = Settings(path=str(path), device=torch.device("cpu"), micro_batch_tokens=micro_batch_tokens)
    return ReplicatedBackend(TokenLogprobs(load_model(str(path))), settings)


def random_rows(count: int, *, seed: int = 0, vocabulary: int = 18) -> list[Row]:
    """Rows of 4 to 23 tokens, about half of them the policy's."""
    dice = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(count):
        length = int(dice.integers(4, 24))
        mask = dice.random(length) < 0.5
        mask[0], mask[-1] = False, True
        logp_P = dice.normal(-2.9, 0.3, mask.sum()).astype(np.float32)
        advantage_P = np.full_like(logp_P, dice.normal())
        ids = dice.integers(0, vocabulary, length).astype(np.int32)
        rows.append(Row(ids, mask, behavior_logp_P=logp_P, advantage_P=advantage_P))
    return rows


def turn(author: "trajectory_pb2.Author.ValueType", ids: Sequence[int], version: int = 1) -> trajectory_pb2.Turn:
    made = trajectory_pb2.Turn(author=author, token_ids=pack_ids(ids))
    if author == trajectory_pb2.AUTHOR_POLICY:
        made.logprobs = pack_logprobs([-2.9] * len(ids))
        made.version_spans.add(policy_version=version, token_count=len(ids))
    return made


def trajectory(reward: float, *, action: int = 7, version: int = 1, name: str = "t") -> trajectory_pb2.Trajectory:
    """Two turns: it sees 8 9, acts, sees 10, acts."""
    return trajectory_pb2.Trajectory(
        trajectory_id=name,
        turns=[
            turn(trajectory_pb2.AUTHOR_ENVIRONMENT, [8, 9]),
            turn(trajectory_pb2.AUTHOR_POLICY, [action], version),
            turn(trajectory_pb2.AUTHOR_ENVIRONMENT, [10]),
            turn(trajectory_pb2.AUTHOR_POLICY, [action, 2], version + 1),
        ],
        outcome=trajectory_pb2.OUTCOME_OK,
        reward=reward,
        metrics={"success": reward},
        oldest_policy_version=version,
    )


def group(name: str, rewards: Sequence[float]) -> sample_buffer_pb2.Group:
    """A group in which the members that are paid act alike, and so do the others."""
    return sample_buffer_pb2.Group(
        group_id=name, trajectories=[trajectory(reward, action=7 if reward > 0 else 6) for reward in rewards]
    )
