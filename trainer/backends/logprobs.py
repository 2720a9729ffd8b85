"""Log-probabilities of chosen tokens without ever holding the logits of a whole batch.

Logits are made only where the mask asks for them, a chunk of positions at a time, and made again in the backward pass
when there is more than one chunk.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rollfarm.config import ConfigError

CHUNK_ELEMENTS = 16 * 1024 * 1024
"""Most logits that exist at once: 64 MiB in float32, and a few times that while they are worked on."""


def selected_logprobs(
    model: PreTrainedModel, ids_RT: Tensor, mask_RT: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """f32[P] log-probability of each token in the mask given those before it, row by row, and entropy there (without
    gradient). Both are of the policy at `temperature`, as engines sample from it.

    Rows are padded on the right, so causal attention needs no mask. Position 0 has nothing before it and is never in
    the mask.
    """
    decoder, head = _parts(model)
    hidden_RTH = decoder(input_ids=ids_RT, use_cache=False).last_hidden_state
    chosen_RT = mask_RT[:, 1:]
    hidden_PH, ids_P = hidden_RTH[:, :-1][chosen_RT], ids_RT[:, 1:][chosen_RT]
    return _chunked(head, hidden_PH, ids_P, temperature)


def _parts(model: PreTrainedModel) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The decoder and the head of a causal LM whose logits are exactly head(decoder(ids))."""
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"model.path: this architecture changes its logits ({name}), which is not supported yet.")
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError("model.path: not a causal language model: it has no output head. Choose another.")
    return model.base_model, head


def _chunked(head: torch.nn.Module, hidden_PH: Tensor, ids_P: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    vocabulary = next(head.parameters()).shape[0]
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    if len(ids_P) <= size:
        return _logp_and_entropy(head, hidden_PH, ids_P, temperature)
    parts = [
        checkpoint(_logp_and_entropy, head, *chunk, temperature, use_reentrant=False)
        for chunk in zip(hidden_PH.split(size), ids_P.split(size), strict=True)
    ]
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _logp_and_entropy(
    head: torch.nn.Module, hidden_PH: Tensor, ids_P: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits_PV = head(hidden_PH).float() / temperature
    normalizer_P = torch.logsumexp(logits_PV, dim=-1)
    logp_P = logits_PV.gather(-1, ids_P[:, None]).squeeze(-1) - normalizer_P
    with torch.no_grad():
        entropy_P = normalizer_P - (torch.softmax(logits_PV, dim=-1) * logits_PV).sum(-1)
    return logp_P, entropy_P
