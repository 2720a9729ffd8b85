"""The decoder, made of Megatron-Core's parts.

Rows come packed, and logits are made only where the policy wrote: that is why this is not Megatron-Core's GPTModel,
which wants rows of one length and returns every logit.
"""

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from trainer.backend_config import MegatronConfig
from trainer.backends.megatron.architecture import Architecture
from trainer.backends.megatron.head import logp_and_entropy
from trainer.backends.megatron.layers import PackedAttention, RMSNorm
from trainer.backends.megatron.packing import Packed


class Decoder(LanguageModule):
    """This rank's part of the model: some of its layers, and of each a share. Its weights are not set yet."""

    def __init__(
        self, config: TransformerConfig, arch: Architecture, frequencies: Tensor, groups: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config, pg_collection=groups)
        # Megatron-Core finds these by name, when it sums the gradients of a tied embedding over stages.
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = arch.tied
        self.pre_process = groups.pp.rank() == 0
        self.post_process = groups.pp.rank() == groups.pp.size() - 1
        self._vocabulary = arch.vocabulary
        self._padding = arch.padding
        self._frequencies = frequencies
        padded = -(-arch.vocabulary // groups.tp.size()) * groups.tp.size()
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=padded,
                max_sequence_length=0,
                position_embedding_type="rope",
                tp_group=groups.tp,
            )
        self.decoder = TransformerBlock(
            config=config,
            spec=_layers(arch, config.num_layers // groups.pp.size()),
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=groups,
        )
        if self.post_process:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                padded,
                # It is given the hidden states of chosen positions, all of which every rank has.
                config=replace(config, sequence_parallel=False),
                init_method=torch.nn.init.zeros_,
                bias=False,
                skip_weight_param_allocation=self.pre_process and arch.tied,
                tp_group=groups.tp,
            )
        self.setup_embeddings_and_output_layer()

    def set_input_tensor(self, input_tensor: list[Tensor]) -> None:
        """What the stage before handed over; by Megatron-Core's schedules."""
        self.decoder.set_input_tensor(input_tensor[0])

    def forward(self, packed: Packed, temperature: float) -> Tensor | tuple[Tensor, Tensor]:
        """Hidden states for the next stage, or from the last f32[P] log-probabilities and entropies, on every rank."""
        hidden = self._embed(packed.ids_T) if self.pre_process else None
        angles = packed.positions_T[:, None].float() * self._frequencies
        hidden = self.decoder(
            hidden, attention_mask=packed.lengths, rotary_pos_emb=torch.cat((angles, angles), dim=-1)[:, None, None]
        )
        return self._scores(hidden, packed, temperature) if self.post_process else hidden

    def _embed(self, ids_T: Tensor) -> Tensor:
        """[T, 1, hidden], or this rank's share of T. As in Hugging Face's models, padding takes no gradient here."""
        hidden = self.embedding(ids_T[None], None)
        if self._padding is None:
            return hidden
        ranks = self.pg_collection.tp
        if self.config.sequence_parallel:
            ids_T = ids_T.chunk(ranks.size())[ranks.rank()]
        return torch.where((ids_T == self._padding)[:, None, None], hidden.detach(), hidden)

    def _scores(self, hidden: Tensor, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        if self.config.sequence_parallel:
            # Every rank goes on with the same positions, and the head sums their gradients: each keeps its share.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        found = logp_and_entropy(
            self.output_layer,
            self.pg_collection.tp,
            self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None,
            hidden[packed.sources, 0],
            packed.ids_P[packed.mine_P],
            vocabulary=self._vocabulary,
            temperature=temperature,
        )
        logp_P, entropy_P = (self._of_all_positions(each, packed) for each in found)
        return logp_P, entropy_P

    def _of_all_positions(self, mine: Tensor, packed: Packed) -> Tensor:
        """Every context-parallel rank makes the same loss of all, and carries the gradient of its own back."""
        spread_P = mine.new_zeros(len(packed.ids_P)).masked_scatter(packed.mine_P, mine)
        return reduce_from_tensor_model_parallel_region(spread_P, group=self.pg_collection.cp)


def transformer_config(arch: Architecture, config: MegatronConfig, dtype: torch.dtype) -> TransformerConfig:
    """Megatron-Core's name for each setting. What is random or fused is off: the one would make the ratio to the
    behaviour policy differ from 1 while the weights are the same, and the other needs libraries beside it."""
    mixture = {
        "num_moe_experts": arch.experts,
        "moe_ffn_hidden_size": arch.feed_forward,
        "moe_router_topk": arch.experts_per_token,
        "moe_router_pre_softmax": not arch.renormalized,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": config.expert_parallel,
    }
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.groups,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.feed_forward,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        sequence_parallel=config.sequence_parallel,
        # Weights are read from a checkpoint, whole rows at a time, so nothing is drawn.
        use_cpu_initialization=True,
        perform_initialization=False,
        # Gradients are sums: whoever makes the loss says what it is divided by.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **(mixture if arch.experts else {}),
        **(recompute if config.recompute else {}),
    )


def _layers(arch: Architecture, count: int) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(
        num_experts=arch.experts or None, qk_layernorm=arch.qk_norm, normalization="RMSNorm"
    )
    norm = ModuleSpec(module=RMSNorm)
    parts = cast(TransformerLayerSubmodules, layer.submodules)
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    attention = cast(SelfAttentionSubmodules, cast(ModuleSpec, parts.self_attention).submodules)
    attention.core_attention = PackedAttention
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)
