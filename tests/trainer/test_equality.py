"""Every backend learns what plain torch in one process learns, and goes on from what any number of ranks left.

CASES is the table: a backend has a few rows in it. Each case is trained once, as real processes and on the same
batches; it saves on the way while it goes on, and the tests look at what came of it.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollfarm.run import ModelConfig, TinyModelConfig
from tests.trainer.backends import Trained, train
from tests.trainer.conftest import WORDS, random_rows
from tests.trainer.rank import PROBE_SEED, TEMPERATURE
from trainer.create_model import ensure_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 20
SAVED = 17
"""Steps that the checkpoint on the way holds: whoever goes on from it takes three more."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train the model."""

    config: dict[str, Any]
    """Of the trainer, beside lr and device."""

    ranks: int = 1
    """Processes."""

    dtype: str = "float32"
    """Of the passes."""

    loss_tolerance: float = 1e-3
    """Of each loss, relative to that of `like`; and absolute, where it is small, to a hundredth of the largest. Muon
    computes in bfloat16, where the order of sums shows."""

    logprob_tolerance: float = 1e-4
    """Between what the backend says of tokens afterwards, and what Hugging Face says of its export. Nats."""

    like: str = "torch-1"
    """The case that it has to equal."""

    needs: str = ""
    """A library that not everybody has."""


FSDP2 = {"backend": "fsdp2"}
MUON = {"optimizer": "muon"}
LORA = {"lora": {"rank": 4}}

ZERO = {"backend": "deepspeed"}
MEGATRON = {"backend": "megatron"}
TENSOR, PIPELINE = {"tensor_parallel": 2}, {"pipeline_parallel": 2}

CASES = {
    "torch-1": Case({}),
    "torch-2": Case({}, ranks=2),
    "fsdp2-1": Case(FSDP2),
    "fsdp2-2": Case(FSDP2, ranks=2),
    "fsdp2-2-checkpointing": Case(FSDP2 | {"fsdp2": {"activation_checkpointing": True}}, ranks=2),
    "fsdp2-2-whole": Case(FSDP2 | {"fsdp2": {"reshard_after_forward": False}}, ranks=2),
    "fsdp2-2-offload": Case(FSDP2 | {"fsdp2": {"cpu_offload": True}}, ranks=2),
    "fsdp2-2-bf16": Case(FSDP2, ranks=2, dtype="bfloat16", loss_tolerance=5e-2, logprob_tolerance=5e-2),
    "torch-1-muon": Case(MUON, like="torch-1-muon"),
    "fsdp2-2-muon": Case(FSDP2 | MUON, ranks=2, like="torch-1-muon", loss_tolerance=5e-3),
    "torch-1-lora": Case(LORA, like="torch-1-lora", needs="peft"),
    "fsdp2-2-lora": Case(FSDP2 | LORA, ranks=2, like="torch-1-lora", needs="peft"),
    "zero1-2": Case(ZERO | {"deepspeed": {"stage": 1}}, ranks=2, needs="deepspeed"),
    "zero2-2": Case(ZERO | {"deepspeed": {"stage": 2}}, ranks=2, needs="deepspeed"),
    "zero3-2": Case(ZERO | {"deepspeed": {"stage": 3, "whole_up_to": 0}}, ranks=2, needs="deepspeed"),
    "zero3-1": Case(ZERO | {"deepspeed": {"stage": 3}}, needs="deepspeed"),
    "megatron-1": Case(MEGATRON, needs="megatron.core"),
    "megatron-tp2": Case(MEGATRON | {"megatron": TENSOR}, ranks=2, needs="megatron.core"),
    "megatron-pp2": Case(MEGATRON | {"megatron": PIPELINE}, ranks=2, needs="megatron.core"),
    "megatron-tp2-pp2": Case(MEGATRON | {"megatron": TENSOR | PIPELINE}, ranks=4, needs="megatron.core"),
}

RESUMES = {
    "torch-1": ("torch-2", "fsdp2-2", "megatron-pp2"),
    "torch-2": ("torch-1", "torch-2"),
    "fsdp2-1": ("fsdp2-2",),
    "fsdp2-2": ("fsdp2-1", "fsdp2-2", "torch-1"),
    "fsdp2-2-muon": ("fsdp2-2-muon",),
    "fsdp2-2-lora": ("torch-1-lora",),
    "zero2-2": ("zero2-2", "zero3-1"),
    "zero3-2": ("torch-1",),
    "megatron-tp2": ("megatron-1", "fsdp2-2"),
    "megatron-tp2-pp2": ("megatron-tp2",),
}
"""Who goes on from whose checkpoint."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("equality") / "model"
    create = TinyModelConfig(words=WORDS, hidden_size=32, layers=2, context_tokens=64)
    ensure_model(ModelConfig(path=str(path), create=create))
    return path


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> "Trainings":
    return Trainings(model, tmp_path_factory.mktemp("trained"))


class Trainings:
    """What came of each case, trained when it is first asked for."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self._model = model
        self._done: dict[str, Trained] = {}

    def __getitem__(self, name: str) -> Trained:
        if name not in self._done:
            folder = Path(mkdtemp(prefix=name, dir=self.folder))
            self._done[name] = self.run(name, folder, f"0-{STEPS}", save_before=SAVED)
        return self._done[name]

    def run(self, name: str, folder: Path, steps: str, *, save_before: int | None = None) -> Trained:
        case = CASES[name]
        if case.needs:
            pytest.importorskip(case.needs)
        config = {"lr": 1e-3, "micro_batch_tokens": 64, **case.config}
        return train(
            self._model, folder, steps, config, world_size=case.ranks, dtype=case.dtype, save_before=save_before
        )


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_plain_torch_in_one_process(trained: Trainings, name: str) -> None:
    done, like = trained[name], trained[CASES[name].like]
    expected, found = np.array(like.losses), np.array(done.losses)

    tolerance = CASES[name].loss_tolerance
    assert len(found) == STEPS
    assert np.allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max() / 100)
    # Adam does not mind how large a gradient is: only its norm tells a sum over ranks from a mean.
    norms, expected_norms = ([each["grad_norm"] for each in one.steps] for one in (done, like))
    assert norms == pytest.approx(expected_norms, rel=10 * tolerance)


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_those_of_hugging_face_for_the_export(trained: Trainings, name: str) -> None:
    done = trained[name]

    model = AutoModelForCausalLM.from_pretrained(done.folder / "export", dtype=torch.float32)
    expected: list[float] = []
    for row in random_rows(9, seed=PROBE_SEED):
        ids = torch.from_numpy(row.ids_T).long()[None]
        with torch.no_grad():
            all_logp = (model(ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        expected += all_logp.gather(-1, ids[0, 1:, None])[:, 0][torch.from_numpy(row.mask_T[1:])].tolist()
    assert done.logprobs == pytest.approx(expected, abs=CASES[name].logprob_tolerance)


@pytest.mark.parametrize(("saved", "resumed"), [(saved, name) for saved in RESUMES for name in RESUMES[saved]])
def test_training_goes_on_from_a_checkpoint_as_if_never_interrupted(
    trained: Trainings, tmp_path: Path, saved: str, resumed: str
) -> None:
    straight = trained[saved]
    (tmp_path / "load").symlink_to(straight.folder / "middle")

    done = trained.run(resumed, tmp_path, f"{SAVED}-{STEPS}")

    assert done.losses == pytest.approx(straight.losses[SAVED:], rel=1e-4, abs=1e-6)
    assert done.logprobs == pytest.approx(straight.logprobs, abs=1e-4)
