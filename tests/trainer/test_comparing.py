"""A policy beside its teacher or its reference: against numpy in float64, and by finite differences."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.algorithms.divergence import Comparison, entropy_and_kl, kl_of_teacher
from trainer.backends import comparing
from trainer.backends.comparing import Compared, logp_and_comparison
from trainer.backends.scoring import TokenLogprobs, load_model

F64 = NDArray[np.float64]

VOCABULARY, TEMPERATURE, STEP = 9, 0.7, 1e-6


@dataclass(frozen=True)
class Pair:
    """Hidden states and heads of two models, the second's padded to 11 words, which nobody asks for."""

    hidden: F64
    weight: F64
    other_hidden: F64
    other_weight: F64
    ids: NDArray[np.int64]

    @staticmethod
    def random() -> "Pair":
        dice = np.random.default_rng(0)
        normal = dice.normal
        return Pair(
            normal(size=(5, 4)),
            normal(size=(VOCABULARY, 4)) * 2,
            normal(size=(5, 6)),
            normal(size=(11, 6)) * 2,
            dice.integers(0, VOCABULARY, 5),
        )

    def found(self, hidden_PH: Tensor, head: nn.Linear, compare: Comparison) -> tuple[Tensor, Tensor]:
        return logp_and_comparison(
            head,
            hidden_PH,
            linear(self.other_weight),
            torch.tensor(self.other_hidden, dtype=torch.float32),
            torch.tensor(self.ids),
            compare,
            temperature=TEMPERATURE,
            vocabulary=VOCABULARY,
        )

    def lp(self, hidden: F64, weight: F64) -> F64:
        return log_softmax(hidden @ weight.T / TEMPERATURE)

    @property
    def lq(self) -> F64:
        return log_softmax((self.other_hidden @ self.other_weight.T)[:, :VOCABULARY] / TEMPERATURE)


def from_teacher(lp: F64, lq: F64) -> F64:
    return (np.exp(lq) * (lq - lp)).sum(-1)


def from_reference(lp: F64, lq: F64) -> F64:
    return np.stack([-(np.exp(lp) * lp).sum(-1), (np.exp(lp) * (lp - lq)).sum(-1)])


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(("compare", "formula"), [(kl_of_teacher, from_teacher), (entropy_and_kl, from_reference)])
def test_what_is_found_and_its_gradient_are_those_of_the_formula(
    compare: Comparison, formula: Callable[[F64, F64], F64], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "CHUNK_ELEMENTS", 2 * VOCABULARY * chunk)
    pair = Pair.random()
    head, hidden_PH = linear(pair.weight), torch.tensor(pair.hidden, dtype=torch.float32, requires_grad=True)
    expected = formula(pair.lp(pair.hidden, pair.weight), pair.lq)
    weights = np.random.default_rng(1).normal(size=expected.shape)

    logp_P, found = pair.found(hidden_PH, head, compare)
    (torch.tensor(weights) * found).sum().backward()

    def value(hidden: F64, weight: F64) -> float:
        return float((weights * formula(pair.lp(hidden, weight), pair.lq)).sum())

    lp = pair.lp(pair.hidden, pair.weight)
    assert logp_P.tolist() == pytest.approx(lp[np.arange(5), pair.ids].tolist(), rel=1e-5)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    by_hidden = differences(lambda moved: value(moved, pair.weight), pair.hidden)
    by_weight = differences(lambda moved: value(pair.hidden, moved), pair.weight)
    assert hidden_PH.grad is not None
    assert head.weight.grad is not None
    np.testing.assert_allclose(hidden_PH.grad.numpy(), by_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(head.weight.grad.numpy(), by_weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("compare", "never", "expected"),
    [
        (kl_of_teacher, "teacher", [np.log(2)]),
        (entropy_and_kl, "policy", [0.0, np.log(2)]),
    ],
)
def test_a_word_that_cannot_be_has_no_part_in_it(compare: Comparison, never: str, expected: list[float]) -> None:
    """0 log 0 is 0: the one has only the first of two words, the other finds both alike."""
    only_first, both = nn.Linear(1, 2), nn.Linear(1, 2)
    with torch.no_grad():
        for head, second in ((only_first, -torch.inf), (both, 0.0)):
            head.weight.zero_()
            head.bias.copy_(torch.tensor([0.0, second]))
    heads = (only_first, both) if never == "policy" else (both, only_first)

    here_PH, ids_P = torch.ones(1, 1), torch.tensor([0])
    _, found = logp_and_comparison(heads[0], here_PH, heads[1], here_PH, ids_P, compare, temperature=1, vocabulary=2)
    found.sum().backward()

    assert found.flatten().tolist() == pytest.approx(expected)
    assert heads[0].bias.grad is not None
    assert heads[0].bias.grad.isfinite().all()


def test_rows_are_padded_where_either_wants_them_so(model_path: Path) -> None:
    packed, padding = (load_model(str(model_path), packing=packing) for packing in (True, False))

    assert not Compared(packed, TokenLogprobs(packed), kl_of_teacher).padded
    assert Compared(packed, TokenLogprobs(padding), kl_of_teacher).padded


def linear(weight: F64) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))
    return made


def log_softmax(logits: F64) -> F64:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def differences(value: Callable[[F64], float], at: F64) -> F64:
    def moved(index: int, step: float) -> float:
        other = at.copy()
        other.flat[index] += step
        return value(other)

    found = [(moved(index, STEP) - moved(index, -STEP)) / (2 * STEP) for index in range(at.size)]
    return np.array(found).reshape(at.shape)
