"""DeepSpeed's ZeRO beside plain torch in one process: see tests/trainer/zero_rank.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rollfarm.config import ConfigError
from rollfarm.ports import free_port
from rollfarm.run import ModelConfig, TinyModelConfig
from tests.trainer.conftest import ROOT, WORDS
from tests.trainer.zero_rank import (
    RESUMED,
    SAVED,
    STAGES,
    STEPS,
    logprobs,
    published,
    settings_for,
    step,
    value_error,
)
from trainer.backends.replicated import ReplicatedBackend
from trainer.backends.scoring import TokenLogprobs, TokenValues, load_model
from trainer.create_model import ensure_model

pytest.importorskip("deepspeed")
from trainer.backends import zero

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SECONDS = 800.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zero") / "model"
    ensure_model(ModelConfig(path=str(path), create=TinyModelConfig(words=WORDS, hidden_size=32, layers=2)))
    torch.manual_seed(0)
    tied = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, tie_word_embeddings=True))
    tied.save_pretrained(path.with_name("tied"))
    return path


@pytest.fixture(scope="module")
def torch_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What plain torch comes to, with its checkpoint in a folder."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "torch").mkdir()
    backend = torch_backend(model)
    before = logprobs(backend)
    done: list[dict[str, float]] = []
    for seed in range(STEPS):
        if seed == SAVED:
            backend.save(folder / "torch")()
        done.append(step(backend, seed))
    after, tensors = logprobs(backend), published(backend)
    backend.reset_optimizer()
    after_reset = [step(backend, seed)["loss"] for seed in (7, 8, 9)]
    critic = ReplicatedBackend(TokenValues(load_model(str(model))), settings_for(model))
    values = [step(critic, seed, value_error)["loss"] for seed in range(STEPS)]
    tied = torch_backend(model.with_name("tied"))
    return {
        "folder": folder,
        "before": before,
        "losses": [each["loss"] for each in done],
        "grad_norms": [each["grad_norm"] for each in done],
        "logprobs": after,
        "tensors": tensors,
        "after_reset": after_reset,
        "critic": values,
        "next_value": step(critic, STEPS, value_error)["loss"],
        "tied": [step(tied, seed)["loss"] for seed in range(STEPS)],
        "tied_names": sorted(published(tied)),
    }


@pytest.fixture(scope="module")
def found(model: Path, torch_run: dict[str, Any]) -> dict[str, Any]:
    """What two ranks found."""
    folder: Path = torch_run["folder"]
    port = free_port()

    def start(number: int) -> "subprocess.Popen[str]":
        meeting = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.zero_rank", str(model), str(folder)],
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


def torch_backend(model: Path) -> ReplicatedBackend:
    return ReplicatedBackend(TokenLogprobs(load_model(str(model))), settings_for(model))


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", STAGES)
def test_two_ranks_learn_what_plain_torch_learns_and_unsound_steps_and_offloading_change_nothing(
    found: dict[str, Any], torch_run: dict[str, Any], name: str
) -> None:
    assert found[name]["losses"] == close(torch_run["losses"])
    assert found[name]["grad_norms"] == close(torch_run["grad_norms"])
    assert found[name]["logprobs"] == pytest.approx(torch_run["logprobs"], abs=1e-4)
    assert found[name]["skipped"] == [1, 1, 1]


@pytest.mark.parametrize("name", STAGES)
def test_moments_are_forgotten_where_plain_torch_forgets_them(
    found: dict[str, Any], torch_run: dict[str, Any], name: str
) -> None:
    assert found[name]["after_reset"] == close(torch_run["after_reset"])


@pytest.mark.parametrize("name", RESUMED)
def test_training_goes_on_from_the_checkpoint_of_another_stage(
    found: dict[str, Any], torch_run: dict[str, Any], name: str
) -> None:
    assert found[name]["resumed"] == close(torch_run["losses"][SAVED:])


def test_two_ranks_go_on_from_plain_torchs_checkpoint(found: dict[str, Any], torch_run: dict[str, Any]) -> None:
    assert found["from torch"] == close(torch_run["losses"][SAVED:])


@pytest.mark.parametrize("name", STAGES)
def test_plain_torch_in_one_process_goes_on_from_two_ranks_checkpoint(
    found: dict[str, Any], torch_run: dict[str, Any], model: Path, name: str
) -> None:
    backend = torch_backend(model)

    backend.load(torch_run["folder"] / name)

    assert found
    assert [step(backend, seed)["loss"] for seed in range(SAVED, STEPS)] == close(torch_run["losses"][SAVED:])


@pytest.mark.parametrize("name", ["2", "3"])
def test_published_tensors_and_the_export_are_plain_torchs(
    found: dict[str, Any], torch_run: dict[str, Any], name: str
) -> None:
    tensors = load_file(torch_run["folder"] / f"{name}.safetensors")
    exported = AutoModelForCausalLM.from_pretrained(torch_run["folder"] / f"{name}-export", dtype=torch.float32)

    assert found
    assert list(published_shapes(tensors)) == list(published_shapes(torch_run["tensors"]))
    for each, tensor in torch_run["tensors"].items():
        assert torch.allclose(tensors[each], tensor, atol=1e-5), each
        assert torch.equal(exported.state_dict()[each], tensors[each]), each


def published_shapes(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Size]]:
    return sorted((name, tensor.shape) for name, tensor in tensors.items())


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_in_bfloat16_losses_stay_near_and_bfloat16_is_published(
    found: dict[str, Any], torch_run: dict[str, Any], stage: str
) -> None:
    half = found[f"{stage}-bf16"]

    assert half["losses"] == pytest.approx(torch_run["losses"], abs=0.02)
    assert half["losses"] != torch_run["losses"]
    assert half["dtypes"] == ["torch.bfloat16"]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_critic_learns_what_plain_torchs_learns(found: dict[str, Any], torch_run: dict[str, Any], stage: str) -> None:
    assert found[f"{stage}-critic"] == close(torch_run["critic"])


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_plain_torch_goes_on_from_a_critic(
    found: dict[str, Any], torch_run: dict[str, Any], model: Path, stage: str
) -> None:
    assert found
    critic = ReplicatedBackend(TokenValues(load_model(str(model))), settings_for(model))

    critic.load(torch_run["folder"] / f"{stage}-critic")

    assert step(critic, STEPS, value_error)["loss"] == pytest.approx(torch_run["next_value"], rel=1e-3)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_tied_head_learns_as_one_and_comes_under_both_its_names(
    found: dict[str, Any], torch_run: dict[str, Any], stage: str
) -> None:
    assert found[f"{stage}-tied"] == close(torch_run["tied"])
    assert found[f"{stage}-tied-names"] == torch_run["tied_names"]
    assert "lm_head.weight" in torch_run["tied_names"]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_frozen_model_says_what_plain_torchs_says(
    found: dict[str, Any], torch_run: dict[str, Any], stage: str
) -> None:
    assert found[f"{stage}-frozen"] == pytest.approx(torch_run["before"], abs=1e-5)
    assert found[f"{stage}-frozen-bf16"] == pytest.approx(torch_run["before"], abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_stage_3_parameters_are_in_shards_before_deepspeed_moves_any(
    model: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    held: list[int] = []
    initialize = zero.deepspeed.initialize

    def watched(*, model: nn.Module, **settings: Any) -> Any:
        held.append(sum(param.numel() for param in model.parameters()))
        return initialize(model=model, **settings)

    monkeypatch.setattr(zero.deepspeed, "initialize", watched)

    backend = zero.ZeroBackend(TokenLogprobs, settings_for(model, dtype), STAGES["3"])

    tensors, files = published(backend), load_file(model / "model.safetensors")
    assert held == [0]
    assert all(torch.equal(tensors[name], files[name].to(dtype)) for name in files)


def test_a_checkpoint_of_another_model_is_refused(
    found: dict[str, Any], torch_run: dict[str, Any], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    ensure_model(ModelConfig(path=str(other), create=TinyModelConfig(words=WORDS, hidden_size=32, layers=1)))

    with pytest.raises(ConfigError, match="holds another model"):
        torch_backend(other).load(torch_run["folder"] / "3")
    assert found
