"""Rows end to end, against each row alone through the plain Hugging Face model."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    Gemma3TextConfig,
    GPT2Config,
    InklingForCausalLM,
    InklingTextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    OPTConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from rollfarm.last_layer import spare
from rollfarm.run import ModelConfig
from tests.trainer.conftest import random_rows
from trainer.backends.build import build_models
from trainer.backends.packed_attention import NAME, is_packed, pack, why_not
from trainer.backends.scoring import TokenLogprobs, TokenModel, TokenValues, load_model
from trainer.config import TrainerConfig
from trainer.micro_batches import MicroBatch, micro_batch
from trainer.ranks import Role
from trainer.rows import Row

CPU = torch.device("cpu")
LENGTHS = (13, 7, 7, 7, 2, 11)
VOCABULARY = 50

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**SMALL),
    "qwen3 with a sliding window": lambda: Qwen3Config(**SMALL, **SLIDING, use_sliding_window=True),
    "qwen3 of experts": lambda: Qwen3MoeConfig(**SMALL, **EXPERTS),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "llama": lambda: LlamaConfig(**SMALL),
    "mistral with a sliding window": lambda: MistralConfig(**SMALL, sliding_window=4),
    "mixtral": lambda: MixtralConfig(**SMALL, **EXPERTS, sliding_window=4),
    "gemma": lambda: Gemma3TextConfig(**SMALL, **SLIDING),
    "gpt2, of learnt positions": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
    "opt, whose positions begin at 2": lambda: OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32),
    "phimoe, which keeps its sliding window from its attention": lambda: PhimoeConfig(
        **SMALL, num_local_experts=4, sliding_window=4
    ),
}


def continued(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Eight tokens more."""
    return model.generate(ids, max_new_tokens=8, do_sample=False)  # pyright: ignore[reportCallIssue]


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    """Weights that are large enough for a wrong neighbour to be seen."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" not in name:
                param.normal_(0, 0.2)
    return model


def some_rows() -> list[Row]:
    dice = np.random.default_rng(0)
    rows: list[Row] = []
    for length in LENGTHS:
        mask = dice.random(length) < 0.6
        mask[0], mask[-1] = False, True
        rows.append(Row(dice.integers(1, VOCABULARY, length).astype(np.int32), mask))
    return rows


def batch_of(rows: list[Row]) -> MicroBatch:
    return micro_batch(rows, range(len(rows)), CPU)


def gradients(model: TokenModel, batch: MicroBatch) -> dict[str, Tensor]:
    """Of a sum that weighs tokens differently."""
    model.zero_grad()
    found_P, _ = model(batch, 0.9)
    (found_P * torch.linspace(-1, 1, len(found_P))).sum().backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_of_packed_rows_are_those_of_each_row_alone(name: str) -> None:
    model, rows = model_of(CONFIGS[name]()), some_rows()
    expected: list[Tensor] = []
    for row in rows:
        ids = torch.from_numpy(row.ids_T).long()
        with torch.no_grad():
            logp = (model(ids[None]).logits[0, :-1] / 0.9).log_softmax(-1)
        expected.append(logp.gather(-1, ids[1:, None])[row.mask_T[1:], 0])

    assert pack(model)
    with torch.no_grad():
        found_P, _ = TokenLogprobs(model)(batch_of(rows), 0.9)

    assert torch.allclose(found_P, torch.cat(expected), atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_packed_rows_are_those_of_padded_ones(name: str) -> None:
    model, batch = model_of(CONFIGS[name]()), batch_of(some_rows())
    padded = gradients(TokenLogprobs(model), batch)

    pack(model)
    packed = gradients(TokenLogprobs(model), batch)

    assert packed.keys() == padded.keys()
    for each, gradient in packed.items():
        assert torch.allclose(gradient, padded[each], atol=1e-5 * max(1.0, float(padded[each].abs().max()))), each


def test_the_last_layer_works_where_a_token_is_predicted_and_the_others_everywhere() -> None:
    model, batch = model_of(CONFIGS["llama"]()), batch_of(some_rows())
    pack(model)
    seen: list[int] = []
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            module.register_forward_hook(lambda module, given, made: seen.append(len(given[0][0])))

    TokenLogprobs(model)(batch, 1.0)

    assert 0 < len(batch.at_P) < len(batch.ids_T) == 47
    assert seen == [47, 47, 47, len(batch.at_P)]


def test_a_last_layer_is_spared_once_however_often_that_is_asked_for() -> None:
    model, batch = model_of(CONFIGS["llama"]()), batch_of(some_rows())
    pack(model)
    once_P, _ = TokenLogprobs(model)(batch, 1.0)

    pack(model)

    assert torch.equal(TokenLogprobs(model)(batch, 1.0)[0], once_P)


def test_a_last_layer_that_looks_around_after_its_attention_works_everywhere() -> None:
    dense: dict[str, Any] = {"layer_types": ["hybrid"] * 2, "mlp_layer_types": ["dense"] * 2}
    model = InklingForCausalLM(InklingTextConfig(**SMALL, **dense))

    spare(model)

    assert "forward" not in vars(model.model.layers[-1].mlp)


def test_a_critic_sees_packed_rows_alike() -> None:
    model, batch = TokenValues(model_of(CONFIGS["qwen3"]())), batch_of(some_rows())
    with torch.no_grad():
        model.value.weight.normal_()
        padded_P, _ = model(batch, 1.0)

        pack(model.model)
        packed_P, _ = model(batch, 1.0)

    assert torch.allclose(packed_P, padded_P, atol=1e-5)


def test_activation_checkpointing_makes_packed_rows_again_as_they_were() -> None:
    model, batch = model_of(CONFIGS["mistral with a sliding window"]()), batch_of(some_rows())
    pack(model)
    plain = gradients(TokenLogprobs(model), batch)

    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    again = gradients(TokenLogprobs(model), batch)

    assert all(torch.allclose(again[name], gradient, atol=1e-6) for name, gradient in plain.items())


@pytest.mark.parametrize("name", ["llama", "mistral with a sliding window"])
def test_a_model_that_takes_packed_rows_still_is_a_plain_one(name: str) -> None:
    model = model_of(CONFIGS[name]())
    ids = torch.arange(1, 25).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        plain, with_mask = model(ids).logits, model(ids, attention_mask=mask).logits
        generated = continued(model, ids)

        pack(model)
        assert torch.allclose(model(ids).logits, plain, atol=1e-5)
        assert torch.allclose(model(ids, attention_mask=mask).logits[mask.bool()], with_mask[mask.bool()], atol=1e-5)
        assert torch.equal(continued(model, ids), generated)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: BartConfig(vocab_size=VOCABULARY, d_model=32, decoder_layers=1, is_decoder=True), "cannot be told"),
        (lambda: NemotronConfig(**SMALL), "cannot be told"),
        (
            lambda: Qwen3NextConfig(**SMALL, **EXPERTS, layer_types=["linear_attention", "full_attention"]),
            "cannot be told|linear_attention",
        ),
    ],
)
def test_a_model_that_cannot_take_packed_rows_has_them_padded(
    config: Callable[[], PreTrainedConfig], reason: str
) -> None:
    model = model_of(config())

    assert re.search(reason, why_not(model) or "")
    assert not pack(model)
    assert not is_packed(model)


def test_packing_may_be_turned_off_and_log_probabilities_stay(model_path: Path) -> None:
    config = TrainerConfig(packing=False, device="cpu", micro_batch_tokens=40)
    padding = build_models(ModelConfig(path=str(model_path)), config)
    packing = build_models(ModelConfig(path=str(model_path)), config.model_copy(update={"packing": True}))
    rows = random_rows(9)

    padded_P, packed_P = (each.scorer(Role.POLICY).score(rows, temperature=0.8) for each in (padding, packing))

    assert torch.allclose(padded_P, packed_P, atol=1e-5)
    assert [TokenLogprobs(load_model(str(model_path), packing=packing)).padded for packing in (False, True)] == [
        True,
        False,
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["qwen3", "mistral with a sliding window", "gemma"])
def test_variable_length_attention_on_a_gpu_is_that_of_each_row_alone(name: str) -> None:
    model, rows = model_of(CONFIGS[name]()), some_rows()
    with torch.no_grad():
        expected_P, _ = TokenLogprobs(model)(batch_of(rows), 1.0)

        nn.Module.to(model, "cuda")
        pack(model)
        with torch.autocast("cuda", torch.bfloat16):
            found_P, _ = TokenLogprobs(model)(micro_batch(rows, range(len(rows)), torch.device("cuda")), 1.0)

    assert (found_P.cpu() - expected_P).abs().mean() < 0.05


def test_a_model_that_does_not_hand_on_where_rows_end_says_so() -> None:
    model, batch = model_of(NemotronConfig(**SMALL)), batch_of(some_rows())

    model.set_attn_implementation(NAME)

    with pytest.raises(NotImplementedError, match=r"set trainer\.packing to false"):
        TokenLogprobs(model)(batch, 1.0)
