"""Mixtures of experts: whoever trains one, engines and files get it as checkpoints on the hub have it."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from llm_proxy.engine.attention import NAME
from llm_proxy.engine.receiver import check
from llm_proxy.engine.runner import Runner
from rollfarm.run import ModelConfig
from tests.trainer.conftest import random_rows
from trainer.backends import Backend
from trainer.backends.build import build_models
from trainer.config import TrainerConfig
from trainer.objective import policy_objective
from trainer.ranks import Role
from trainer.weights.snapshot import take_snapshot

OBJECTIVE = policy_objective(TrainerConfig())
ROWS = random_rows(4)

SIZES: dict[str, Any] = {
    "vocab_size": 18,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

LIBRARIES = {"deepspeed": "deepspeed", "megatron": "megatron.core"}


@pytest.fixture(scope="module")
def mixture(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture") / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES)).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_path).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["torch", "fsdp2", "deepspeed", "megatron"])
def trained(request: pytest.FixtureRequest, mixture: Path) -> Iterator[Backend]:
    """A policy after a step."""
    if request.param in LIBRARIES and importlib.util.find_spec(LIBRARIES[request.param].partition(".")[0]) is None:
        pytest.skip(f"{request.param} is not installed")
    config = {"backend": request.param, "device": "cpu", "deepspeed": {"stage": 3}}
    models = build_models(ModelConfig(path=str(mixture)), TrainerConfig.model_validate(config))
    policy = models.learners[Role.POLICY]
    policy.train_step(ROWS, OBJECTIVE, temperature=1.0, norm=OBJECTIVE.norm(ROWS), lr=1e-2)
    yield policy
    if dist.is_initialized():
        dist.destroy_process_group()


def published(policy: Backend) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.named_tensors()}


def test_experts_are_published_and_exported_one_by_one_as_in_the_files_of_the_hub(
    trained: Backend, mixture: Path, tmp_path: Path
) -> None:
    before = load_file(mixture / "model.safetensors")

    tensors = published(trained)
    trained.export(tmp_path)

    exported = load_file(tmp_path / "model.safetensors")
    down = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert set(tensors) == set(exported) == set(before)
    assert all(tensor.shape == before[name].shape for name, tensor in tensors.items())
    assert all(torch.equal(tensors[name], exported[name]) for name in tensors)
    assert not torch.equal(tensors[down], before[down])


def test_the_embedded_engine_takes_what_is_published(trained: Backend, mixture: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32, attn_implementation=NAME).eval()
    runner = Runner(model, slots=1, context_tokens=64, kv_cache_bytes=1 << 20)
    snapshot = take_snapshot(trained.named_tensors(), policy_version=1, dtype=torch.float32, bucket_size_bytes=4096)

    check(snapshot.specs, runner.parameters())
    runner.load(published(trained).items())

    trained.export(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
