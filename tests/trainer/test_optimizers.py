from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rollfarm.config import ConfigError
from trainer.backends.optimizers import Decay, Optimizer, hidden_matrices


class Tiny(nn.Module):
    """An embedding, a hidden layer and a head."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, hidden)
        self.hidden = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 12, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(ids))))


def optimizer_of(model: Tiny, name: str, weight_decay: float = 0.0) -> Optimizer:
    hidden = hidden_matrices(model, {*model.embedding.parameters(), *model.head.parameters()})
    return Optimizer(name, dict(model.named_parameters()), hidden, Decay(weight_decay, (0.9, 0.95)))  # pyright: ignore[reportArgumentType]


def learn(model: Tiny, optimizer: Optimizer, steps: int = 1, lr: float = 1e-2) -> float:
    ids = torch.arange(12)
    for _ in range(steps):
        nn.functional.cross_entropy(model(ids), ids).backward()
        optimizer.step(lr)
        optimizer.zero_grad()
    return float(nn.functional.cross_entropy(model(ids), ids).detach())


def test_muon_steps_hidden_matrices_by_an_orthogonal_matrix_and_the_rest_as_adamw_does() -> None:
    by_muon, by_adamw = Tiny(), Tiny()
    before = by_muon.hidden.weight.detach().clone()

    learn(by_muon, optimizer_of(by_muon, "muon"), lr=1e-2)
    learn(by_adamw, optimizer_of(by_adamw, "adamw"), lr=1e-2)

    # The step's size is 0.2 sqrt(8) (Liu et al. 2025, equation 4); Newton and Schulz come near singular values of 1.
    sizes = torch.linalg.svdvals((by_muon.hidden.weight - before) / (1e-2 * 0.2 * 8**0.5))
    assert sizes.min() > 0.5
    assert sizes.max() < 1.3
    for name in ("embedding.weight", "hidden.bias", "head.weight"):
        assert torch.equal(by_muon.get_parameter(name), by_adamw.get_parameter(name)), name


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_that_is_filled_in_is_gone_on_from(name: str) -> None:
    straight, resumed = Tiny(), Tiny()
    optimizer = optimizer_of(straight, name)
    learn(straight, optimizer, 2)
    resumed.load_state_dict(straight.state_dict())
    other = optimizer_of(resumed, name)

    state = other.state()
    for key, tensor in optimizer.state().items():
        state[key].copy_(tensor)
    other.take(state)

    assert learn(resumed, other, 2) == learn(straight, optimizer, 2)


def test_vectors_are_never_decayed() -> None:
    model = Tiny()
    optimizer = optimizer_of(model, "adamw", weight_decay=0.5)
    with torch.no_grad():
        model.hidden.bias.fill_(1.0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    before = model.hidden.weight.detach().clone()

    optimizer.step(1e-1)

    assert torch.allclose(model.hidden.weight, before * (1 - 0.5 * 1e-1))
    assert torch.equal(model.hidden.bias, torch.ones(8))


def test_a_reset_forgets_the_gradients_that_were() -> None:
    model = Tiny()
    optimizer = optimizer_of(model, "muon")
    learn(model, optimizer, 2)
    assert any(tensor.any() for tensor in optimizer.state().values())

    optimizer.reset()

    assert not any(tensor.any() for tensor in optimizer.state().values())


def test_8_bit_moments_without_their_library_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)

    with pytest.raises(ConfigError, match=r"adamw_8bit.*pip install 'rollfarm\[torchao\]'"):
        optimizer_of(Tiny(), "adamw_8bit")


@pytest.fixture
def _uncompiled() -> Iterator[None]:
    """torchao compiles its steps, which takes minutes on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("_uncompiled")
def test_8_bit_moments_learn_as_well_and_come_back_as_they_were_saved() -> None:
    pytest.importorskip("torchao.optim", reason="torchao is an extra")
    small, whole = Tiny(64), Tiny(64)
    optimizer = optimizer_of(small, "adamw_8bit")

    after = learn(small, optimizer, 20), learn(whole, optimizer_of(whole, "adamw"), 20)

    assert after[0] == pytest.approx(after[1], rel=0.05)
    fresh = optimizer_of(Tiny(64), "adamw_8bit")
    filled, state = fresh.state(), optimizer.state()
    assert all(type(tensor) is torch.Tensor and tensor.dtype is torch.float32 for tensor in state.values())
    for name, tensor in state.items():
        filled[name].copy_(tensor)
    fresh.take(filled)
    assert all(torch.allclose(fresh.state()[name], tensor, rtol=1e-6, atol=0) for name, tensor in state.items())
