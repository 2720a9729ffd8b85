"""With adapters and files, the adapter is all that is published."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollfarm.run import ModelConfig
from trainer.config import TrainerConfig, TrainerRoot
from trainer.learner import Learner, build_learner


def learner(model_path: Path, transport: str) -> Learner:
    settings = {"device": "cpu", "lora": {"rank": 2, "targets": ["q_proj"]}, "transport": transport}
    return build_learner(
        TrainerRoot(model=ModelConfig(path=str(model_path)), trainer=TrainerConfig.model_validate(settings))
    )


@pytest.mark.parametrize("transport", ["store", "gloo"])
def test_only_files_carry_an_adapter_alone(model_path: Path, transport: str) -> None:
    pytest.importorskip("peft")

    snapshot = learner(model_path, transport).snapshot(1)

    if transport == "gloo":
        assert snapshot.adapter is None
        assert "model.layers.0.self_attn.q_proj.weight" in {spec.name for spec in snapshot.specs}
        return
    assert snapshot.adapter is not None
    shapes: dict[str, Tensor] = dict(snapshot.adapter.tensors)
    assert sorted(name.rpartition("q_proj.")[2] for name in shapes) == ["lora_A.weight", "lora_B.weight"]
    assert all(2 in tensor.shape for tensor in shapes.values())
    assert not any(tensor.dtype != torch.float32 for tensor in shapes.values())
    assert list(snapshot.parts()) == []
