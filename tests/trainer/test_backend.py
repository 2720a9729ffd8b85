import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BertConfig, Gemma3TextConfig, RobertaConfig

from rollfarm.config import ConfigError
from rollfarm.run import ModelConfig, TinyModelConfig
from tests.trainer.conftest import WORDS, make_backend, random_rows
from trainer.algorithms.losses import Metrics
from trainer.backends import logprobs
from trainer.backends.passes import Measured
from trainer.backends.replicated import ReplicatedBackend
from trainer.backends.scoring import TokenValues, empty_model, load_model
from trainer.config import TrainerConfig
from trainer.create_model import ensure_model
from trainer.micro_batches import MicroBatch
from trainer.objective import policy_objective
from trainer.rows import Row

OBJECTIVE = policy_objective(TrainerConfig())


def step(backend: ReplicatedBackend, rows: list[Row], *, temperature: float = 1.0) -> dict[str, float]:
    return backend.train_step(rows, OBJECTIVE, temperature=temperature, norm=OBJECTIVE.norm(rows), lr=1e-2)


def weights(backend: ReplicatedBackend) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in backend.named_tensors()])


def with_logp(backend: ReplicatedBackend, rows: list[Row], *, temperature: float = 1.0) -> list[tuple[Row, np.ndarray]]:
    """Each row with f32[P], the log-probabilities of its tokens."""
    parts = backend.score(rows, temperature=temperature).split([row.policy_tokens for row in rows])
    return [(row, part.numpy()) for row, part in zip(rows, parts, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_a_hugging_face_forward(
    model_path: Path, backend: ReplicatedBackend, temperature: float
) -> None:
    rows = random_rows(9)
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    found = with_logp(backend, rows, temperature=temperature)

    for row, logp_P in found:
        ids = torch.from_numpy(row.ids_T).long()[None]
        with torch.no_grad():
            all_logp = (reference(ids).logits[0, :-1] / temperature).log_softmax(-1)
        expected = all_logp.gather(-1, ids[0, 1:, None])[:, 0].numpy()
        assert logp_P == pytest.approx(expected[row.mask_T[1:]], abs=1e-5)


class Reads(TorchDispatchMode):
    """Counts the tensors that Python reads as one number, for each of which it waits until an accelerator is done."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_metrics_of_a_micro_batch(model_path: Path) -> None:
    rows = random_rows(24)

    def reads(more: int) -> int:
        def loss_fn(logp_P: Tensor, entropy_P: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
            loss, metrics = OBJECTIVE(logp_P, entropy_P, batch)
            return loss, {**metrics, **{f"more_{index}": loss + index for index in range(more)}}

        backend = make_backend(model_path, 30)
        with Reads() as counted:
            backend.train_step(rows, loss_fn, temperature=1.0, norm=OBJECTIVE.norm(rows), lr=1e-2)
        return counted.count

    assert reads(100) == reads(0)


def test_metrics_of_micro_batches_add_up_but_for_maxima() -> None:
    measured = Measured()

    measured.add({"loss": torch.tensor(0.5), "tokens": torch.tensor(3), "ratio_max": torch.tensor(-2.0)})
    measured.add({"loss": torch.tensor(0.25), "tokens": torch.tensor(4), "ratio_max": torch.tensor(-1.0)})

    assert measured.totals() == {"loss": 0.75, "tokens": 7.0, "ratio_max": -1.0}


def test_micro_batches_do_not_change_the_result(model_path: Path) -> None:
    rows = random_rows(24)
    whole, split = make_backend(model_path, 10_000), make_backend(model_path, 30)

    at_once, in_parts = step(whole, rows), step(split, rows)

    assert in_parts == pytest.approx(at_once, abs=1e-5)
    # Adam's first step magnifies what is left of gradients that cancel.
    assert torch.allclose(weights(whole), weights(split), atol=1e-4)


def test_logits_made_in_chunks_give_the_same_gradient(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(12)
    whole, chunked = make_backend(model_path), make_backend(model_path)

    at_once = step(whole, rows)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 40)
    in_parts = step(chunked, rows)

    assert in_parts == pytest.approx(at_once, abs=1e-5)


def test_tokens_with_a_good_advantage_become_likelier(backend: ReplicatedBackend) -> None:
    rows = [
        replace(row, behavior_logp_P=logp_P, advantage_P=np.ones_like(logp_P))
        for row, logp_P in with_logp(backend, random_rows(8))
    ]
    before = sum(logp_P.sum() for _, logp_P in with_logp(backend, rows))

    first = step(backend, rows)

    assert first["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert sum(logp_P.sum() for _, logp_P in with_logp(backend, rows)) > before


def test_a_very_hot_policy_finds_every_token_equally_likely(backend: ReplicatedBackend) -> None:
    measured = step(backend, random_rows(8), temperature=1e6)

    vocabulary = dict(backend.named_tensors())["lm_head.weight"].shape[0]
    assert measured["entropy"] == pytest.approx(math.log(vocabulary), abs=1e-4)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_learns(
    backend: ReplicatedBackend, poison: float
) -> None:
    rows = random_rows(8)
    before = weights(backend)
    poisoned = [replace(rows[0], advantage_P=np.full_like(rows[0].advantage_P, poison)), *rows[1:]]

    assert step(backend, poisoned)["skipped"] == 1
    assert torch.equal(weights(backend), before)

    assert step(backend, rows)["skipped"] == 0
    assert not torch.equal(weights(backend), before)


def test_training_goes_on_from_a_checkpoint_as_if_never_interrupted(model_path: Path, tmp_path: Path) -> None:
    batches = [random_rows(6, seed=seed) for seed in range(4)]
    straight, stopped = make_backend(model_path), make_backend(model_path)
    for rows in batches:
        step(straight, rows)
    for rows in batches[:2]:
        step(stopped, rows)
    stopped.save(tmp_path)()

    resumed = make_backend(model_path)
    resumed.load(tmp_path)
    for rows in batches[2:]:
        step(resumed, rows)

    assert torch.equal(weights(resumed), weights(straight))


def test_a_checkpoint_of_another_model_is_refused(backend: ReplicatedBackend, tmp_path: Path) -> None:
    other = tmp_path / "other"
    create = TinyModelConfig(words=WORDS, hidden_size=32, layers=2, context_tokens=64)
    ensure_model(ModelConfig(path=str(other), create=create))
    backend.save(tmp_path)()

    with pytest.raises(ConfigError, match="holds another model"):
        make_backend(other).load(tmp_path)


def test_an_export_loads_anywhere_with_its_tokenizer(backend: ReplicatedBackend, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    step(backend, random_rows(4))
    backend.export(tmp_path)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert np.allclose(torch.cat([each.flatten() for each in loaded.state_dict().values()]), weights(backend))
    assert AutoTokenizer.from_pretrained(tmp_path).decode([6, 7]) == "left right"


SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 18,
}


BOTH_WAYS = {
    "bert": BertConfig,
    "roberta": RobertaConfig,
    "gemma": partial(Gemma3TextConfig, use_bidirectional_attention=True),
}


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_models_whose_tokens_see_those_after_them_are_refused(tmp_path: Path, name: str) -> None:
    AutoModelForCausalLM.from_config(BOTH_WAYS[name](**SMALL)).save_pretrained(tmp_path)

    for load in (load_model, empty_model):
        with pytest.raises(ConfigError, match=r"not a causal language model: the tokens of .* see those after them"):
            load(str(tmp_path))


def test_bert_that_was_trained_as_a_decoder_is_taken(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(BertConfig(**SMALL, is_decoder=True)).save_pretrained(tmp_path)

    assert load_model(str(tmp_path)).config.model_type == "bert"


def test_a_critic_has_no_head(model_path: Path) -> None:
    critic = TokenValues(load_model(str(model_path)))

    assert critic.model.get_output_embeddings() is None
    assert not [name for name, _ in critic.named_parameters() if "lm_head" in name]
    assert [name for name, _ in critic.named_parameters() if name.startswith("value.")] == [
        "value.weight",
        "value.bias",
    ]
