"""Shards of one rank; more ranks are in test_equality.py."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.trainer.conftest import random_rows
from trainer.backend_config import Fsdp2Config
from trainer.backends import Backend, Settings
from trainer.backends.fsdp2 import Fsdp2Backend, Fsdp2Scorer
from trainer.backends.layers import layers_of
from trainer.backends.module import ModuleBackend
from trainer.backends.replicated import ReplicatedBackend
from trainer.backends.scoring import TokenLogprobs, TokenValues, load_model
from trainer.config import TrainerConfig
from trainer.objective import policy_objective
from trainer.rows import Row

OBJECTIVE = policy_objective(TrainerConfig())
ROWS = random_rows(8)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def tied_path(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    """A model whose head is its embedding, of shapes that no number of ranks divides."""
    path = tmp_path_factory.mktemp("tied") / "model"
    config = Qwen3Config(
        vocab_size=19,
        hidden_size=24,
        intermediate_size=44,
        head_dim=8,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(path)
    return path


def settings(path: Path, device: str = "cpu") -> Settings:
    return Settings(path=str(path), device=torch.device(device), micro_batch_tokens=60)


def sharded(path: Path, device: str = "cpu", **config: bool) -> Fsdp2Backend:
    return Fsdp2Backend(TokenLogprobs, settings(path, device), Fsdp2Config(**config))


def replicated(path: Path) -> ReplicatedBackend:
    return ReplicatedBackend(TokenLogprobs(load_model(str(path))), settings(path))


def step(backend: Backend, rows: list[Row] = ROWS) -> dict[str, float]:
    return backend.train_step(rows, OBJECTIVE, temperature=1.0, norm=OBJECTIVE.norm(rows), lr=1e-2)


def weights(backend: ModuleBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.named_tensors()}


def test_a_tied_head_learns_as_in_plain_torch_and_comes_under_both_its_names(tied_path: Path, tmp_path: Path) -> None:
    shards, plain = sharded(tied_path), replicated(tied_path)

    assert step(shards) == pytest.approx(step(plain), abs=1e-5)
    step(shards)
    step(plain)

    found, expected = weights(shards), weights(plain)
    assert list(found) == list(expected)
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert all(torch.allclose(found[name], expected[name], atol=1e-5) for name in expected)
    shards.export(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in found.items()
    }


def test_a_critic_learns_as_in_plain_torch(model_path: Path) -> None:
    rows = [replace(row, return_P=np.ones_like(row.advantage_P)) for row in ROWS]
    shards = Fsdp2Backend(TokenValues, settings(model_path), Fsdp2Config())
    plain = ReplicatedBackend(TokenValues(load_model(str(model_path))), settings(model_path))

    for backend in (shards, plain):
        for _ in range(3):
            backend.train_step(
                rows, lambda value_P, _, batch: (((value_P - batch.return_P) ** 2).sum(), {}), norm=9.0, lr=1e-2,
                temperature=1.0,
            )  # fmt: skip

    found, expected = (backend.score(rows, temperature=1.0) for backend in (shards, plain))
    assert torch.allclose(found, expected, atol=1e-4)
    assert expected.mean() > 0.05


def test_a_frozen_model_says_what_the_policy_says_at_its_beginning(model_path: Path) -> None:
    frozen = Fsdp2Scorer(TokenLogprobs, settings(model_path), Fsdp2Config())

    assert torch.equal(frozen.score(ROWS, temperature=0.7), replicated(model_path).score(ROWS, temperature=0.7))


@pytest.mark.parametrize("reshard", [True, False])
def test_what_was_loaded_after_a_score_is_what_scores_next(model_path: Path, tmp_path: Path, reshard: bool) -> None:
    backend = sharded(model_path, reshard_after_forward=reshard)
    step(backend)
    backend.save(tmp_path)()
    expected = backend.score(ROWS, temperature=1.0)
    step(backend)
    assert not torch.equal(backend.score(ROWS, temperature=1.0), expected)

    backend.load(tmp_path)

    assert torch.equal(backend.score(ROWS, temperature=1.0), expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_learns(model_path: Path, poison: float) -> None:
    backend, fresh = sharded(model_path), sharded(model_path)
    before = weights(backend)
    poisoned = [replace(ROWS[0], advantage_P=np.full_like(ROWS[0].advantage_P, poison)), *ROWS[1:]]

    assert step(backend, poisoned)["skipped"] == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(backend).items())

    assert step(backend) == step(fresh)
    assert all(torch.equal(tensor, weights(fresh)[name]) for name, tensor in weights(backend).items())


def test_a_policy_that_was_away_in_host_memory_goes_on_as_if_it_had_not_been(model_path: Path) -> None:
    away, here = sharded(model_path), sharded(model_path)
    for backend in (away, here):
        step(backend)

    away.offload()
    away.reload()

    assert step(away) == step(here)


@pytest.mark.slow
@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_compiled_layers_learn_the_same(model_path: Path, activation_checkpointing: bool) -> None:
    torch.compiler.reset()
    counters.clear()
    compiled = sharded(model_path, compile=True, activation_checkpointing=activation_checkpointing)
    plain = replicated(model_path)
    layers = layers_of(TokenLogprobs(load_model(str(model_path))))

    for _ in range(2):
        assert step(compiled) == pytest.approx(step(plain), abs=1e-4)

    assert counters["stats"]["unique_graphs"] >= len(layers)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_a_gpu_learns_what_the_cpu_learns_and_is_empty_while_the_policy_is_away(
    model_path: Path, cpu_offload: bool
) -> None:
    gpu, cpu = sharded(model_path, device="cuda", cpu_offload=cpu_offload), replicated(model_path)
    assert step(gpu) == pytest.approx(step(cpu), abs=1e-4)
    before = torch.cuda.memory_allocated()

    gpu.offload()
    assert torch.cuda.memory_allocated() < max(1, before / 2)
    gpu.reload()

    assert step(gpu) == pytest.approx(step(cpu), abs=1e-4)
