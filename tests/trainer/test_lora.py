"""Adapters by peft, in one process: held whole, and in shards."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollfarm.config import ConfigError
from rollfarm.run import ModelConfig
from tests.trainer.conftest import random_rows
from trainer.backend_config import LoraConfig, check_backend
from trainer.backends.build import build_models
from trainer.backends.module import ModuleBackend
from trainer.config import TrainerConfig
from trainer.objective import policy_objective
from trainer.ranks import Models, Role

peft = pytest.importorskip("peft")

OBJECTIVE = policy_objective(TrainerConfig())
ROWS = random_rows(8)
LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(params=["torch", "fsdp2"])
def models(request: pytest.FixtureRequest, model_path: Path) -> Iterator[Models]:
    yield build(model_path, request.param)
    if dist.is_initialized():
        dist.destroy_process_group()


def build(path: Path, backend: str = "torch", **lora: object) -> Models:
    config = {"backend": backend, "device": "cpu", "lora": LORA | lora, "kl": {"penalty": 0.1}}
    return build_models(ModelConfig(path=str(path)), TrainerConfig.model_validate(config))


def policy_of(models: Models) -> ModuleBackend:
    policy = models.learners[Role.POLICY]
    assert isinstance(policy, ModuleBackend)
    return policy


def step(policy: ModuleBackend) -> dict[str, float]:
    return policy.train_step(ROWS, OBJECTIVE, temperature=1.0, norm=OBJECTIVE.norm(ROWS), lr=1e-2)


def engines_weights(policy: ModuleBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_tensors()}


def test_only_adapters_learn_and_engines_get_whole_weights_under_their_own_names(
    models: Models, model_path: Path
) -> None:
    policy = policy_of(models)
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).state_dict()
    assert {name: tensor.tolist() for name, tensor in policy.named_tensors()} == {
        name: tensor.tolist() for name, tensor in base.items()
    }

    step(policy)
    after = engines_weights(policy)

    assert list(after) == list(base)
    changed = {name for name in after if not torch.equal(after[name], base[name])}
    assert changed == {name for name in base if "_proj" in name}


def test_a_forward_of_the_merged_weights_says_what_the_policy_says(models: Models, tmp_path: Path) -> None:
    policy = policy_of(models)
    step(policy)

    policy.export(tmp_path)
    (alone,) = build_models(ModelConfig(path=str(tmp_path)), TrainerConfig(device="cpu")).learners.values()

    found, expected = (each.score(ROWS, temperature=1.0) for each in (alone, policy))
    assert torch.allclose(found, expected, atol=1e-5)


def test_without_its_adapters_the_policy_is_the_reference_and_learns_on_afterwards(models: Models) -> None:
    policy, reference = policy_of(models), models.scorers[Role.REFERENCE]
    before = policy.score(ROWS, temperature=1.0)
    assert torch.equal(reference.score(ROWS, temperature=1.0), before)

    step(policy)
    learnt = policy.score(ROWS, temperature=1.0)

    assert torch.equal(reference.score(ROWS, temperature=1.0), before)
    assert not torch.equal(learnt, before)
    assert torch.equal(policy.score(ROWS, temperature=1.0), learnt)


def test_peft_itself_loads_the_adapter_and_agrees(models: Models, model_path: Path, tmp_path: Path) -> None:
    policy = policy_of(models)
    step(policy)

    policy.export_adapter(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path)).merge_and_unload().state_dict()

    assert {file.name for file in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model_path)
    for name, tensor in engines_weights(policy).items():
        assert torch.allclose(loaded[name], tensor, atol=1e-6), name


def test_a_checkpoint_holds_adapters_and_their_moments_alone_and_is_gone_on_from(
    models: Models, model_path: Path, tmp_path: Path
) -> None:
    policy = policy_of(models)
    step(policy)
    policy.save(tmp_path)()
    step(policy)

    resumed = policy_of(build(model_path))
    resumed.load(tmp_path)
    step(resumed)

    held = json.loads((tmp_path / "index.json").read_text())["tensors"]
    assert held
    assert all(".lora_" in name for name in held)
    one, other = engines_weights(resumed), engines_weights(policy)
    assert all(torch.allclose(one[name], other[name], atol=1e-7) for name in other)


@pytest.fixture(scope="module")
def saved(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of adapters on the model."""
    folder = tmp_path_factory.mktemp("adapters")
    policy_of(build(model_path)).save(folder)()
    return folder


def test_adapters_are_refused_on_a_base_model_with_other_weights(model_path: Path, saved: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model_path, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"another base model: .* has other weights\. Restore model\.path"):
        policy_of(build(other)).load(saved)


def test_adapters_are_refused_on_a_base_model_that_computes_otherwise(
    model_path: Path, saved: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(model_path, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))

    with pytest.raises(ConfigError, match=r"another base model: .* has other config\.json"):
        policy_of(build(other)).load(saved)


def test_adapters_are_taken_on_a_copy_of_their_base_model(model_path: Path, saved: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model_path, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"transformers_version": "5.0.0"}))

    policy_of(build(copy)).load(saved)


def test_adapters_are_refused_with_another_alpha(model_path: Path, saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.alpha = 8\.0, and it is 16\.0 now. Restore it"):
        policy_of(build(model_path, alpha=16)).load(saved)


def test_targets_choose_the_layers(model_path: Path) -> None:
    policy = policy_of(build(model_path, targets=["q_proj"]))
    before = engines_weights(policy)

    step(policy)

    after = engines_weights(policy)
    assert {name.split(".")[-2] for name in after if not torch.equal(after[name], before[name])} == {"q_proj"}


@pytest.mark.parametrize("target", ["no_such_layer", "embed_tokens"])
def test_targets_that_are_no_linear_layers_are_refused(model_path: Path, target: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets.*Name linear layers"):
        build(model_path, targets=[target])


def test_backends_without_adapters_refuse_them() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora: the backend 'megatron'"):
        check_backend("megatron", "adamw", LoraConfig())
