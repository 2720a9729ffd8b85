"""What the megatron backend does without Megatron-Core: names and shares of tensors, packs, sizes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollfarm.config import ConfigError
from tests.trainer.conftest import random_rows
from trainer.backend_config import MegatronConfig
from trainer.backends.megatron.architecture import Architecture, architecture_of, check_fits, rotary_frequencies
from trainer.backends.megatron.layout import layout
from trainer.backends.megatron.names import EMBEDDING, Parameter, Part, Share, parameters, whole
from trainer.backends.megatron.packing import pack

SMALL: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 2,
    "max_position_embeddings": 64,
}
NO_WIDTH = {key: value for key, value in SMALL.items() if key != "head_dim"}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MIXTURE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "qwen2-tied": Qwen2Config(**NO_WIDTH, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=False),
    "qwen3-mixture": Qwen3MoeConfig(**SMALL, **MIXTURE, tie_word_embeddings=False),
}


def arch_of(name: str) -> Architecture:
    return architecture_of(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_a_saved_hugging_face_model(name: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}

    ours = {part.name: part.shape for parameter in whole(arch_of(name)) for part in parameter.parts}

    assert ours == saved


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_shares_put_together_and_taken_apart_are_the_tensors_to_the_bit(name: str, ranks: int) -> None:
    arch = arch_of(name)
    for parameter in whole(arch):
        originals = [torch.randn(part.shape) for part in parameter.parts]
        blocks = [
            [tensor[part.block(rank, ranks)] for tensor, part in zip(originals, parameter.parts, strict=True)]
            for rank in range(ranks)
        ]

        shares = [parameter.put_together(each, arch, rows_of(parameter, each, ranks), ranks) for each in blocks]
        found = [parameter.take_apart(share, arch, rank, ranks) for rank, share in enumerate(shares)]

        assert len({share.shape for share in shares}) == 1
        for index, (original, part) in enumerate(zip(originals, parameter.parts, strict=True)):
            pieces = [each[index] for each in found]
            assert torch.equal(pieces[0] if part.axis is None else torch.cat(pieces, dim=part.axis), original)


def rows_of(parameter: Parameter, blocks: list[torch.Tensor], ranks: int) -> int:
    """Megatron's, whose vocabulary is padded until it divides."""
    if parameter.form == "plain" and parameter.parts[0].axis == 0:
        return -(-parameter.parts[0].shape[0] // ranks)
    return sum(map(len, blocks))


def test_queries_keys_and_values_lie_group_by_group() -> None:
    arch = Architecture(
        layers=1, hidden=1, heads=4, groups=2, head_dim=1, feed_forward=1, vocabulary=1, norm_eps=1e-6, tied=False
    )
    parts = (Part("q", (4, 1), 0), Part("k", (2, 1), 0), Part("v", (2, 1), 0))
    q, k, v = (torch.tensor(values)[:, None] for values in ([0.0, 1, 2, 3], [10.0, 11], [20.0, 21]))

    fused = Parameter("qkv", parts, "grouped").put_together([q, k, v], arch, 8, 1)

    assert fused.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@pytest.mark.parametrize("name", CONFIGS)
def test_stages_and_expert_ranks_have_every_tensor_once_and_a_tied_embedding_at_both_ends(name: str) -> None:
    arch = arch_of(name)
    expert_ranks = 2 if arch.experts else 1

    found: list[str] = []
    for stage in range(2):
        for rank in range(expert_ranks):
            for parameter in parameters(arch, Share(stage, 2, rank, expert_ranks)):
                if parameter.expert is not None or rank == 0:
                    found += [part.name for part in parameter.parts]

    expected = [part.name for parameter in whole(arch) for part in parameter.parts]
    assert sorted(found) == sorted(expected + [EMBEDDING] * arch.tied)


@pytest.mark.parametrize("name", CONFIGS)
def test_rotary_frequencies_are_those_of_hugging_face(name: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[name])

    assert torch.equal(rotary_frequencies(CONFIGS[name]), model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (GPT2Config(), "gpt2"),
        (LlamaConfig(**SMALL, attention_bias=True), "biases"),
        (Qwen2Config(**NO_WIDTH, use_sliding_window=True, sliding_window=8, max_window_layers=1), "sliding"),
        (Qwen3MoeConfig(**SMALL, **MIXTURE, decoder_sparse_step=2), "dense"),
        (Qwen3Config(**SMALL, hidden_act="gelu"), "gelu"),
    ],
)
def test_a_model_that_it_cannot_build_exactly_is_refused_by_name(config: PretrainedConfig, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"{what}.*llama, qwen2, qwen3, qwen3_moe"):
        architecture_of(config)


def test_rotary_embeddings_that_change_with_the_row_are_refused() -> None:
    config = LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})

    with pytest.raises(ConfigError, match="dynamic"):
        rotary_frequencies(config)


@pytest.mark.parametrize(
    ("sizes", "ranks", "key"),
    [
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, 6, "does not divide the 6"),
        ({"expert_parallel": 3}, 4, "expert_parallel"),
        ({"sequence_parallel": True}, 2, "sequence_parallel"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(sizes: dict[str, Any], ranks: int, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        layout(MegatronConfig(**sizes), ranks)


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"tensor_parallel": 8}, "key-value heads"),
        ({"pipeline_parallel": 3}, "layers"),
        ({"expert_parallel": 2}, "experts"),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_refused(sizes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check_fits(arch_of("qwen3"), MegatronConfig(**sizes))


def test_ranks_that_are_left_over_hold_copies_of_the_model() -> None:
    assert layout(MegatronConfig(tensor_parallel=2, context_parallel=2), 8).data == 2


@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_context_parallel_ranks_together_predict_each_token_once_from_the_one_before(ranks: int, multiple: int) -> None:
    rows = random_rows(5)

    packs = [pack(rows, rank=rank, size=ranks, multiple=multiple, device=torch.device("cpu")) for rank in range(ranks)]

    assert len({len(each.ids_T) for each in packs}) == 1
    assert len(packs[0].ids_T) % multiple == 0
    assert torch.stack([each.mine_P for each in packs]).sum(0).tolist() == [1] * sum(row.policy_tokens for row in rows)
    before_P = np.concatenate([row.ids_T[:-1][row.mask_T[1:]] for row in rows])
    place_P = np.concatenate([row.mask_T.nonzero()[0] - 1 for row in rows])
    for each in packs:
        mine_P = each.mine_P.numpy()
        assert each.ids_T[each.sources].tolist() == before_P[mine_P].tolist()
        assert each.positions_T[each.sources].tolist() == place_P[mine_P].tolist()
        assert each.ids_P.tolist() == np.concatenate([row.ids_T[row.mask_T] for row in rows]).tolist()


def test_a_micro_batch_without_rows_has_something_to_compute_and_nothing_to_predict() -> None:
    packed = pack([], rank=0, size=2, multiple=2, device=torch.device("cpu"))

    assert len(packed.ids_T) > 0
    assert len(packed.ids_P) == 0
