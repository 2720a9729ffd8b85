"""Models cut by Megatron-Core beside plain torch in one process: see tests/trainer/megatron_rank.py."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rollfarm.config import ConfigError
from rollfarm.ports import free_port
from tests.trainer.conftest import ROOT
from tests.trainer.megatron_rank import (
    CASES,
    SAVED,
    STEPS,
    logprobs,
    loss_of_entropies,
    settings_for,
    step,
)
from trainer.backend_config import LoraConfig, MegatronConfig
from trainer.backends.megatron.backend import MegatronBackend
from trainer.backends.replicated import ReplicatedBackend
from trainer.backends.scoring import TokenLogprobs, load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECONDS = 800.0

SMALL: dict[str, Any] = {
    # Odd, so that it is padded before it is cut.
    "vocab_size": 19,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
MODELS = {
    "plain": Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=False),
    "tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "mixture": Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
}
NAMES = [name for name, case in CASES.items() if case.dtype is torch.float32]


@dataclass(frozen=True, slots=True)
class Run:
    """What plain torch came to with a model."""

    frozen: list[float]
    steps: list[dict[str, float]]
    logprobs: list[float]
    tensors: dict[str, Tensor]
    after_reset: list[float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    """With a model of each architecture."""
    folder = tmp_path_factory.mktemp("megatron")
    for name, config in MODELS.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        for each, param in model.named_parameters():
            if each.endswith("bias"):
                nn.init.normal_(param, std=0.1)
        model.save_pretrained(folder / "models" / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model_path / file, folder / "models" / name)
    return folder


@pytest.fixture(scope="module")
def torch_runs(folder: Path) -> dict[str, Run]:
    """What plain torch comes to, with its checkpoints in the folder."""
    return {name: torch_run(folder, name) for name in MODELS}


def torch_run(folder: Path, name: str) -> Run:
    backend = torch_backend(folder, name)
    frozen, steps = logprobs(backend), []
    for seed in range(STEPS):
        if seed == SAVED:
            (folder / f"torch-{name}").mkdir()
            backend.save(folder / f"torch-{name}")()
        steps.append(step(backend, seed))
    after = logprobs(backend)
    backend._held.module.model.save_pretrained(folder / f"{name}-saved")
    backend.reset_optimizer()
    tensors = load_file(folder / f"{name}-saved" / "model.safetensors")
    return Run(frozen, steps, after, tensors, [step(backend, seed, loss_of_entropies)["loss"] for seed in (7, 8, 9)])


def torch_backend(folder: Path, name: str) -> ReplicatedBackend:
    model = folder / "models" / name
    return ReplicatedBackend(TokenLogprobs(load_model(str(model))), settings_for(model))


@pytest.fixture(scope="module")
def found(folder: Path, torch_runs: dict[str, Run]) -> dict[str, Any]:
    """What two ranks found."""
    assert torch_runs
    port = free_port()

    def start(number: int) -> "subprocess.Popen[str]":
        meeting = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.megatron_rank", str(folder)],
            cwd=ROOT,
            env={**os.environ, **{name: str(value) for name, value in meeting.items()}, "MASTER_PORT": str(port)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    ranks = [start(number) for number in (0, 1)]
    try:
        outputs = [each.communicate(timeout=SECONDS)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, 0], outputs
    return json.loads((folder / "found.json").read_text())


def losses(steps: list[dict[str, float]]) -> list[float]:
    return [each["loss"] for each in steps]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_learn_what_plain_torch_learns_and_unsound_steps_and_offloading_change_nothing(
    found: dict[str, Any], torch_runs: dict[str, Run], name: str
) -> None:
    expected = torch_runs[CASES[name].model]

    assert [each.keys() for each in found[name]["steps"]] == [each.keys() for each in expected.steps]
    for ours, theirs in zip(found[name]["steps"], expected.steps, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert found[name]["logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert found[name]["skipped"] == [1, 1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_moments_are_forgotten_and_entropies_have_a_gradient_as_in_plain_torch(
    found: dict[str, Any], torch_runs: dict[str, Run], name: str
) -> None:
    expected = torch_runs[CASES[name].model]

    assert found[name]["after_reset"] == pytest.approx(expected.after_reset, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if CASES[name].resumes])
def test_training_goes_on_from_a_checkpoint_that_was_cut_another_way(
    found: dict[str, Any], torch_runs: dict[str, Run], name: str
) -> None:
    expected = torch_runs[CASES[name].model]

    assert found[name]["resumed"] == pytest.approx(losses(expected.steps)[SAVED:], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["copies", "tensor", "pipeline", "tied-pipeline"])
def test_plain_torch_in_one_process_goes_on_from_two_ranks_checkpoint(
    found: dict[str, Any], torch_runs: dict[str, Run], folder: Path, name: str
) -> None:
    model = CASES[name].model
    backend = torch_backend(folder, model)

    backend.load(folder / name)

    assert found
    resumed = [step(backend, seed)["loss"] for seed in range(SAVED, STEPS)]
    assert resumed == pytest.approx(losses(torch_runs[model].steps)[SAVED:], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_published_tensors_and_the_export_are_plain_torchs(
    found: dict[str, Any], torch_runs: dict[str, Run], folder: Path, name: str
) -> None:
    expected = torch_runs[CASES[name].model].tensors
    published = load_file(folder / f"{name}.safetensors")
    exported = load_file(folder / f"{name}-export" / "model.safetensors")

    assert found
    is_tied = CASES[name].model == "tied"
    assert published.keys() - exported.keys() == ({"lm_head.weight"} if is_tied else set())
    assert exported.keys() == expected.keys()
    for each, tensor in expected.items():
        assert torch.allclose(published[each], tensor, atol=2e-5), each
        assert torch.equal(exported[each], published[each]), each
    if is_tied:
        assert torch.equal(published["lm_head.weight"], published["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", CASES)
def test_hugging_face_says_of_the_export_what_the_ranks_say(found: dict[str, Any], folder: Path, name: str) -> None:
    backend = ReplicatedBackend(TokenLogprobs(load_model(str(folder / f"{name}-export"))), settings_for(folder))

    assert logprobs(backend) == pytest.approx(
        found[name]["logprobs"], abs=1e-4 if CASES[name].dtype is torch.float32 else 0.05
    )


@pytest.mark.parametrize("name", ["tensor-bf16", "pipeline-bf16"])
def test_in_bfloat16_losses_stay_near_and_weights_keep_what_it_cannot_hold(
    found: dict[str, Any], torch_runs: dict[str, Run], folder: Path, name: str
) -> None:
    published = load_file(folder / f"{name}.safetensors")["model.layers.1.mlp.down_proj.weight"]

    assert losses(found[name]["steps"]) == pytest.approx(losses(torch_runs["plain"].steps), abs=0.02)
    assert losses(found[name]["steps"]) != losses(torch_runs["plain"].steps)
    assert not torch.equal(published, published.bfloat16().float())


@pytest.mark.parametrize("name", CASES)
def test_a_frozen_model_says_what_plain_torchs_says(
    found: dict[str, Any], torch_runs: dict[str, Run], name: str
) -> None:
    within = 1e-5 if CASES[name].dtype is torch.float32 else 0.05

    assert found[name]["frozen"] == pytest.approx(torch_runs[CASES[name].model].frozen, abs=within)


def test_a_checkpoint_of_another_model_is_refused(found: dict[str, Any], folder: Path) -> None:
    assert found

    with pytest.raises(ConfigError, match="holds another model"):
        torch_backend(folder, "tied").load(folder / "tensor")


@pytest.mark.parametrize(("key", "value"), [("optimizer", "muon"), ("lora", LoraConfig())])
def test_what_it_does_not_have_is_refused(folder: Path, key: str, value: Any) -> None:
    settings = replace(settings_for(folder / "models" / "plain"), **{key: value})

    with pytest.raises(ConfigError, match=rf"trainer\.{key}"):
        MegatronBackend(settings, MegatronConfig())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_learns_what_plain_torch_learns(folder: Path, torch_runs: dict[str, Run]) -> None:
    settings = replace(settings_for(folder / "models" / "plain"), device=torch.device("cuda:0"))
    backend = MegatronBackend(settings, MegatronConfig())

    found = [step(backend, seed)["loss"] for seed in range(STEPS)]
    backend.offload()
    backend.reload()

    assert found == pytest.approx(losses(torch_runs["plain"].steps), rel=1e-3, abs=1e-4)
    assert logprobs(backend) == pytest.approx(torch_runs["plain"].logprobs, abs=1e-3)
