"""Log-probabilities and entropies of tokens, against plain autograd in float64 where numbers are compared."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.backends import logprobs
from trainer.backends.logprobs import token_logprobs

HIDDEN, VOCABULARY, TOKENS = 8, 30, 17


def plain(head: nn.Module, hidden_PH: Tensor, ids_P: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp_PV = (head(hidden_PH) / temperature).log_softmax(-1)
    return logp_PV.gather(-1, ids_P[:, None])[:, 0], -(logp_PV.exp() * logp_PV).sum(-1)


def example(*, bias: bool = True, tokens: int = TOKENS) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    return head, torch.randn(tokens, HIDDEN, requires_grad=True), torch.randint(0, VOCABULARY, (tokens,))


def gradients(loss: Tensor, head: nn.Linear, hidden_PH: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [hidden_PH, *head.parameters()]))


def weighed(logp_P: Tensor, entropy_P: Tensor, kind: str) -> Tensor:
    weight_P = torch.linspace(-1, 2, len(logp_P), dtype=logp_P.dtype)
    by_logp, by_entropy = (logp_P * weight_P).sum(), (entropy_P * weight_P.flip(0)).sum()
    return {"logp": by_logp, "entropy": by_entropy, "both": by_logp + 0.3 * by_entropy}[kind]


@pytest.mark.parametrize("chunk", [1, 5 * VOCABULARY, 10_000])
@pytest.mark.parametrize("kind", ["logp", "entropy", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_log_softmax(
    monkeypatch: pytest.MonkeyPatch, chunk: int, kind: str, temperature: float
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    head, hidden_PH, ids_P = example()
    twin, hidden64_PH = nn.Linear(HIDDEN, VOCABULARY).double(), hidden_PH.detach().double().requires_grad_()
    twin.load_state_dict(head.state_dict())
    expected = plain(twin, hidden64_PH, ids_P, temperature)

    found = token_logprobs(head, hidden_PH, ids_P, temperature=temperature, vocabulary=VOCABULARY)

    for value_P, expected_P in zip(found, expected, strict=True):
        assert torch.allclose(value_P.double(), expected_P, atol=1e-5)
    wanted = gradients(weighed(*expected, kind), twin, hidden64_PH)
    for gradient, want in zip(gradients(weighed(*found, kind), head, hidden_PH), wanted, strict=True):
        assert torch.allclose(gradient.double(), want, atol=1e-5)


def test_a_word_that_cannot_be_has_no_part_in_the_entropy_nor_in_its_gradient() -> None:
    head, hidden_PH, ids_P = example()
    with torch.no_grad():
        head.bias[ids_P.bincount(minlength=VOCABULARY).argmin()] = -torch.inf

    logp_P, entropy_P = token_logprobs(head, hidden_PH, ids_P, temperature=1.0, vocabulary=VOCABULARY)

    assert torch.isfinite(entropy_P).all()
    assert all(torch.isfinite(each).all() for each in gradients((logp_P + entropy_P).sum(), head, hidden_PH))


def test_under_autocast_nothing_is_lost_but_what_the_head_loses() -> None:
    head, hidden_PH, ids_P = example(bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        logits_PV = head(hidden_PH)
        found = token_logprobs(head, hidden_PH, ids_P, temperature=1.0, vocabulary=VOCABULARY)

    assert logits_PV.dtype == torch.bfloat16
    expected = plain(nn.Identity(), logits_PV.double(), ids_P, 1.0)
    for value_P, expected_P in zip(found, expected, strict=True):
        assert torch.allclose(value_P.double(), expected_P, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 10_000])
def test_where_nothing_is_asked_for_the_head_is_called_all_the_same_and_gets_gradients_of_zero(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    head, hidden_PH, ids_P = example(tokens=0)

    logp_P, entropy_P = token_logprobs(head, hidden_PH, ids_P, temperature=1.0, vocabulary=VOCABULARY)
    logp_P.sum().backward()

    assert (len(logp_P), len(entropy_P)) == (0, 0)
    assert head.weight.grad is not None
    assert not head.weight.grad.any()


def kept_between_passes(head: nn.Linear, hidden_PH: Tensor, ids_P: Tensor) -> int:
    """Elements that autograd keeps for the backward pass, the head's own aside."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_logprobs(head, hidden_PH, ids_P, temperature=1.0, vocabulary=VOCABULARY)
    kept.pop(head.weight.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def test_no_logits_are_kept_for_the_backward_pass_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden_PH, ids_P = example(tokens=400)
    assert kept_between_passes(head, hidden_PH, ids_P) >= 400 * VOCABULARY

    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 20 * VOCABULARY)

    assert kept_between_passes(head, hidden_PH, ids_P) <= 400 * HIDDEN + 4 * 400


def test_it_may_itself_be_made_again_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 5 * VOCABULARY)
    head, hidden_PH, ids_P = example()

    def forward(hidden_PH: Tensor) -> Tensor:
        return token_logprobs(head, hidden_PH, ids_P, temperature=1.0, vocabulary=VOCABULARY)[0].sum()

    once = gradients(forward(hidden_PH), head, hidden_PH)
    again = gradients(checkpoint(forward, hidden_PH, use_reentrant=False), head, hidden_PH)

    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
