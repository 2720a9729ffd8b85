"""A policy beside a frozen teacher: how far its whole distribution is from the teacher's, where each token stands.

Neither model's logits are ever held whole: both are made a chunk of positions at a time, and made again in the backward
pass when there is more than one chunk.

Legend: P tokens that are asked for, H and J hidden widths of policy and teacher, V words that both know.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rollfarm.config import ConfigError
from trainer.backends import Settings
from trainer.backends.logprobs import CHUNK_ELEMENTS
from trainer.backends.scoring import TokenLogprobs, hidden_before, load_model
from trainer.micro_batches import MicroBatch

_LEAST = -1e30
"""Taken for the logarithm of 0, so that p log p is 0 there."""


class Distilled(TokenLogprobs):
    """A causal language model that learns from a teacher.

    With gradients, what stands in place of the entropy is KL(teacher || policy) in nats. Without them it is a
    TokenLogprobs, and the teacher rests.
    """

    def __init__(self, model: PreTrainedModel, teacher: TokenLogprobs) -> None:
        super().__init__(model)
        # In a tuple, so that it is no part of what learns, is sharded or saved.
        self._beside = (teacher,)

    @property
    def padded(self) -> bool:
        """Whether one of the two has to have rows padded."""
        return super().padded or self._beside[0].padded

    def forward(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return super().forward(batch, temperature)
        (teacher,) = self._beside
        policys, teachers = self.model.get_output_embeddings(), teacher.model.get_output_embeddings()
        assert policys is not None
        assert teachers is not None
        with torch.no_grad():
            teacher_PJ = hidden_before(teacher.model, batch)
        return logp_and_divergence(
            policys,
            hidden_before(self.model, batch),
            teachers,
            teacher_PJ,
            batch.ids_T[batch.at_P],
            temperature=temperature,
            # Heads may be padded, each to a size of its own.
            vocabulary=min(each.config.get_text_config().vocab_size for each in (self.model, teacher.model)),
        )


def load_teacher(path: str, settings: Settings) -> TokenLogprobs:
    """The frozen teacher, in the compute dtype; every rank has all of it. Raises ConfigError."""
    try:
        model = load_model(path, packing=settings.packing)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "trainer.teacher.path", 1)) from None
    teacher = TokenLogprobs(model.to(settings.device, settings.compute_dtype))  # pyright: ignore[reportArgumentType]
    return teacher.requires_grad_(False).eval()


def logp_and_divergence(
    head: nn.Module,
    hidden_PH: Tensor,
    teacher_head: nn.Module,
    teacher_PJ: Tensor,
    ids_P: Tensor,
    *,
    temperature: float,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """f32[P] log-probability of each token and f32[P] KL(teacher || policy) where it stands, in nats, both of
    softmax(logits / temperature) over the words that both know, and with gradient for the policy alone.

    hidden_PH, teacher_PJ   from which the heads make the logits that predict the token
    ids_P                   i64, the tokens
    vocabulary              V
    """
    size = max(1, CHUNK_ELEMENTS // (2 * vocabulary))
    chunks = list(zip(hidden_PH.split(size), teacher_PJ.split(size), ids_P.split(size), strict=True))
    if len(chunks) == 1:
        return _of_chunk(head, teacher_head, *chunks[0], temperature, vocabulary)
    again = partial(checkpoint, _of_chunk, use_reentrant=False, preserve_rng_state=False)
    parts = [again(head, teacher_head, *chunk, temperature, vocabulary) for chunk in chunks]
    return torch.cat([logp_P for logp_P, _ in parts]), torch.cat([kl_P for _, kl_P in parts])


def _of_chunk(
    head: nn.Module,
    teacher_head: nn.Module,
    hidden_PH: Tensor,
    teacher_PJ: Tensor,
    ids_P: Tensor,
    temperature: float,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    lp_PV = _log_softmax(head(hidden_PH), temperature, vocabulary)
    with torch.no_grad():
        lq_PV = _log_softmax(teacher_head(teacher_PJ), temperature, vocabulary)
        q_PV = lq_PV.exp()
    return lp_PV.gather(-1, ids_P[:, None]).squeeze(-1), (q_PV * (lq_PV - lp_PV)).sum(-1)


def _log_softmax(logits_PV: Tensor, temperature: float, vocabulary: int) -> Tensor:
    return torch.log_softmax(logits_PV[:, :vocabulary].float() / temperature, dim=-1).clamp(min=_LEAST)
