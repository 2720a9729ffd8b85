"""A policy beside a frozen model, its teacher or its reference: their whole distributions are compared where each token
stands.

Neither model's logits are ever held whole: both are made a chunk of positions at a time, and made again in the backward
pass when there is more than one chunk.

Legend: P tokens that are asked for, H and J hidden widths of policy and other, V words that both know.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rollfarm.config import ConfigError
from trainer.algorithms.divergence import Comparison
from trainer.backends import Settings
from trainer.backends.logprobs import CHUNK_ELEMENTS
from trainer.backends.scoring import TokenLogprobs, hidden_before, load_model
from trainer.micro_batches import MicroBatch

_LEAST = -1e30
"""Taken for the logarithm of 0, so that p log p is 0 there."""


class Compared(TokenLogprobs):
    """A causal language model that learns with another beside it.

    With gradients, what the comparison finds stands in place of the entropy. Without them it is a TokenLogprobs, and
    the other rests.
    """

    def __init__(self, model: PreTrainedModel, other: TokenLogprobs, compare: Comparison) -> None:
        super().__init__(model)
        # In a tuple, so that it is no part of what learns, is sharded or saved.
        self._beside = (other,)
        self._compare = compare

    @property
    def padded(self) -> bool:
        """Whether one of the two has to have rows padded."""
        return super().padded or self._beside[0].padded

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return super().forward(batch, temperature)
        (other,) = self._beside
        head, other_head = self.model.get_output_embeddings(), other.model.get_output_embeddings()
        assert head is not None
        assert other_head is not None
        with torch.no_grad():
            other_PJ = hidden_before(other.model, batch)
        return logp_and_comparison(
            head,
            hidden_before(self.model, batch),
            other_head,
            other_PJ,
            batch.ids_T[batch.at_P],
            self._compare,
            temperature=temperature,
            # Heads may be padded, each to a size of its own.
            vocabulary=min(each.config.get_text_config().vocab_size for each in (self.model, other.model)),
        )


def load_teacher(path: str, settings: Settings) -> TokenLogprobs:
    """The frozen teacher, in the compute dtype; every rank has all of it. Raises ConfigError."""
    try:
        model = load_model(path, packing=settings.packing)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "trainer.teacher.path", 1)) from None
    teacher = TokenLogprobs(model.to(settings.device, settings.compute_dtype))  # pyright: ignore[reportArgumentType]
    return teacher.requires_grad_(False).eval()


def logp_and_comparison(
    head: nn.Module,
    hidden_PH: Tensor,
    other_head: nn.Module,
    other_PJ: Tensor,
    ids_P: Tensor,
    compare: Comparison,
    *,
    temperature: float,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """f32[P] log-probability of each token and f32[..., P] what is found where it stands, both of softmax(logits /
    temperature) over the words that both know, and with gradient for the policy alone.

    hidden_PH, other_PJ   from which the heads make the logits that predict the token
    ids_P                 i64, the tokens
    vocabulary            V
    """
    size = max(1, CHUNK_ELEMENTS // (2 * vocabulary))
    chunks = list(zip(hidden_PH.split(size), other_PJ.split(size), ids_P.split(size), strict=True))
    if len(chunks) == 1:
        return _of_chunk(head, other_head, compare, *chunks[0], temperature, vocabulary)
    again = partial(checkpoint, _of_chunk, use_reentrant=False, preserve_rng_state=False)
    parts = [again(head, other_head, compare, *chunk, temperature, vocabulary) for chunk in chunks]
    return torch.cat([logp_P for logp_P, _ in parts]), torch.cat([found for _, found in parts], dim=-1)


def _of_chunk(
    head: nn.Module,
    other_head: nn.Module,
    compare: Comparison,
    hidden_PH: Tensor,
    other_PJ: Tensor,
    ids_P: Tensor,
    temperature: float,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    lp_PV = _log_softmax(head(hidden_PH), temperature, vocabulary)
    with torch.no_grad():
        lq_PV = _log_softmax(other_head(other_PJ), temperature, vocabulary)
    return lp_PV.gather(-1, ids_P[:, None]).squeeze(-1), compare(lp_PV, lq_PV)


def _log_softmax(logits_PV: Tensor, temperature: float, vocabulary: int) -> Tensor:
    return torch.log_softmax(logits_PV[:, :vocabulary].float() / temperature, dim=-1).clamp(min=_LEAST)
