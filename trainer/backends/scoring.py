"""Models as backends call them: micro-batch in, a number for each token that the policy wrote out.

They are modules, so that a backend may shard or wrap them as a whole. Rows go through a model end to end where its
attention can be told where they end, and padded where it cannot: the numbers are the same.
"""

from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from rollfarm import images
from rollfarm.config import ConfigError
from rollfarm.last_layer import ASKED
from trainer.backends.logprobs import token_logprobs
from trainer.backends.packed_attention import is_packed, lengths_for, pack
from trainer.backends.vision import decoder_inputs, decoder_of, eyes_of
from trainer.micro_batches import MicroBatch


class TokenModel(nn.Module):
    """What a backend trains: `model`, in Hugging Face's format, and whatever it has besides."""

    model: PreTrainedModel

    @property
    def padded(self) -> bool:
        """Whether it has to have rows padded, so that a token budget is one of padded tokens."""
        return not is_packed(self.model)

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """f32[P] of each token in the mask, row by row: its log-probability given those before it, and the entropy
        there, of the policy at `temperature`, as engines sample from it. Or, by a critic, what it expects before the
        token, and zeros."""
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
        return token_logprobs(
            head,
            hidden_before(self.model, batch),
            batch.ids_T[batch.at_P],
            temperature=temperature,
            vocabulary=self.model.config.get_text_config().vocab_size,
        )


class TokenValues(TokenModel):
    """A critic: a language model without its head, and one number for each position."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = cast(PreTrainedModel, model.base_model)
        self.value = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        del temperature
        value_P = self.value(hidden_before(self.model, batch)).float().squeeze(-1)
        return value_P, torch.zeros_like(value_P)


def load_model(path: str, *, packing: bool = True) -> PreTrainedModel:
    """The language model of a folder or of the hub, with its vision tower where it has one, in float32; with `packing`
    it takes rows end to end if it can. Raises ConfigError."""
    logging.disable_progress_bar()
    try:
        auto = images.auto_class(AutoConfig.from_pretrained(path).model_type)
        model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} cannot be loaded: {error}") from None
    _check_causal(model)
    if packing:
        pack(model)
    return model


def empty_model(path: str, *, packing: bool = True) -> PreTrainedModel:
    """The same on the meta device, without a number in it. Raises ConfigError."""
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = images.auto_class(config.model_type).from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} cannot be loaded: {error}") from None
    _check_causal(model)
    if packing:
        pack(model)
    return model


def _check_causal(model: PreTrainedModel) -> None:
    """Raises ConfigError for an encoder, whose tokens see those after them: transformers makes a causal language model
    even of BERT, and only warns."""
    config = model.config.get_text_config()
    is_causal = {bool(getattr(module, "is_causal")) for module in model.modules() if hasattr(module, "is_causal")}  # noqa: B009
    is_decoder = getattr(config, "is_decoder", None)
    is_encoder = True not in is_causal and not is_decoder and (False in is_causal or is_decoder is False)
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if is_encoder or both_ways:
        raise ConfigError(
            f"model.path: not a causal language model: the tokens of {type(model).__name__} see those after them. "
            "Choose another; one of the kind that was trained as a decoder says so by is_decoder in its config.json."
        )


def _check_head(model: PreTrainedModel) -> None:
    """Raises ConfigError unless the logits are exactly head(decoder(ids))."""
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"model.path: this architecture changes its logits ({name}), which is not supported yet.")
    if model.get_output_embeddings() is None:
        raise ConfigError("model.path: not a causal language model: it has no output head. Choose another.")


def hidden_before(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """[P, H], where each token in the mask is predicted: one position before it, which is in the same row. Raises
    ConfigError where the policy saw images, and the model takes none."""
    packed, eyes = is_packed(model), eyes_of(model)
    told = {**lengths_for(batch.lengths_R, batch.longest), ASKED: batch.at_P - 1} if packed else {}
    if eyes is not None:
        inputs = decoder_inputs(model, eyes, batch, packed=packed)
        hidden = decoder_of(model)(**inputs, use_cache=False, **told).last_hidden_state
    elif batch.images:
        raise ConfigError(f"model.path: the policy saw images, and {type(model).__name__} takes none. Choose another.")
    elif packed:
        ids, places = batch.ids_T[None], batch.position_T[None]
        hidden = model.base_model(input_ids=ids, position_ids=places, use_cache=False, **told).last_hidden_state
    else:
        # Rows are padded on the right, so causal attention needs no mask.
        hidden = model.base_model(input_ids=batch.ids_RT, use_cache=False).last_hidden_state
    return hidden[0, batch.at_P - 1] if packed else hidden[batch.row_P, batch.position_T[batch.at_P] - 1]
