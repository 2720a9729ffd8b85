"""Models as backends call them: micro-batch in, a number for each token that the policy wrote out.

They are modules, so that a backend may shard or wrap them as a whole. Logits are made only where the mask asks for
them, a chunk of positions at a time, and made again in the backward pass when there is more than one chunk.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from rollfarm.config import ConfigError
from trainer.micro_batches import MicroBatch

CHUNK_ELEMENTS = 16 * 1024 * 1024
"""Most logits that exist at once: 64 MiB in float32, and a few times that while they are worked on."""


class TokenModel(nn.Module):
    """What a backend trains: `model`, in Hugging Face's format, and whatever it has besides."""

    model: PreTrainedModel

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """f32[P] of each token in the mask, row by row: its log-probability given those before it, and the entropy
        there (without gradient), of the policy at `temperature`, as engines sample from it. Or, by a critic, what it
        expects before the token, and zeros."""
        raise NotImplementedError


class TokenLogprobs(TokenModel):
    """A causal language model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        _check_head(model)

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        head = self.model.get_output_embeddings()
        assert head is not None
        ids_P = batch.ids_RT[:, 1:][batch.mask_RT[:, 1:]]
        return _chunked(head, _hidden_before(self.model, batch), ids_P, temperature)


class TokenValues(TokenModel):
    """A critic: a language model without its head, and one number for each position."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.value = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        del temperature
        value_P = self.value(_hidden_before(self.model, batch)).float().squeeze(-1)
        return value_P, torch.zeros_like(value_P)


def load_model(path: str) -> PreTrainedModel:
    """The causal language model of a folder or of the hub, in float32. Raises ConfigError."""
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} cannot be loaded: {error}") from None


def _check_head(model: PreTrainedModel) -> None:
    """Raises ConfigError unless the logits are exactly head(decoder(ids))."""
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"model.path: this architecture changes its logits ({name}), which is not supported yet.")
    if model.get_output_embeddings() is None:
        raise ConfigError("model.path: not a causal language model: it has no output head. Choose another.")


def _hidden_before(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """[P, hidden], where each token in the mask is predicted.

    Rows are padded on the right, so causal attention needs no mask. Position 0 has nothing before it and is never in
    the mask.
    """
    hidden_RTH = model.base_model(input_ids=batch.ids_RT, use_cache=False).last_hidden_state
    return hidden_RTH[:, :-1][batch.mask_RT[:, 1:]]


def _chunked(head: nn.Module, hidden_PH: Tensor, ids_P: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    vocabulary = next(head.parameters()).shape[0]
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    if len(ids_P) <= size:
        return _logp_and_entropy(head, hidden_PH, ids_P, temperature)
    parts = [
        checkpoint(_logp_and_entropy, head, *chunk, temperature, use_reentrant=False)
        for chunk in zip(hidden_PH.split(size), ids_P.split(size), strict=True)
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _logp_and_entropy(head: nn.Module, hidden_PH: Tensor, ids_P: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits_PV = head(hidden_PH).float() / temperature
    normalizer_P = torch.logsumexp(logits_PV, dim=-1)
    logp_P = logits_PV.gather(-1, ids_P[:, None]).squeeze(-1) - normalizer_P
    with torch.no_grad():
        entropy_P = normalizer_P - (torch.softmax(logits_PV, dim=-1) * logits_PV).sum(-1)
    return logp_P, entropy_P
