"""Draws, and the log-probabilities of what they were drawn from."""

import math

import numpy as np
import torch

from llm_proxy.engine.requests import Request
from llm_proxy.engine.sampling import sample, uniforms

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.1])


def draw(count: int, **sampling: float) -> tuple[np.ndarray, np.ndarray]:
    request = Request(key="r", prompt=np.zeros(1, dtype=np.int32), max_tokens=1, **sampling)  # pyright: ignore
    sampled = sample(PROBS.log().repeat(count, 1), [request] * count, list(range(count)), [5] * count)
    return np.array(sampled.token_ids), np.array(sampled.logprobs)


def test_draws_follow_the_distribution() -> None:
    ids, logprobs = draw(20_000)

    shares = np.bincount(ids, minlength=4) / 20_000
    np.testing.assert_allclose(shares, PROBS, atol=0.015)
    np.testing.assert_allclose(logprobs, PROBS.log()[ids], atol=1e-6)


def test_temperature_sharpens_what_is_drawn_and_reported() -> None:
    ids, logprobs = draw(20_000, temperature=0.5)

    expected = PROBS**2 / (PROBS**2).sum()
    np.testing.assert_allclose(np.bincount(ids, minlength=4) / 20_000, expected, atol=0.015)
    np.testing.assert_allclose(logprobs, expected.log()[ids], atol=1e-6)


def test_top_k_and_top_p_leave_out_what_they_should() -> None:
    assert set(draw(2_000, top_k=2)[0]) == {0, 1}
    assert set(draw(2_000, top_p=0.75)[0]) == {0, 1}
    assert set(draw(2_000, top_p=0.76)[0]) == {0, 1, 2}
    ids, logprobs = draw(2_000, top_k=3, top_p=0.5)
    assert set(ids) == {0}
    np.testing.assert_allclose(logprobs, 0, atol=1e-6)


def test_greedy_takes_the_likeliest_and_reports_the_plain_logprob() -> None:
    ids, logprobs = draw(3, temperature=0, top_k=1)

    assert ids.tolist() == [0, 0, 0]
    np.testing.assert_allclose(logprobs, math.log(0.5), atol=1e-6)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    alone = uniforms([3], [17])
    among = uniforms([1, 3, -2], [5, 17, 17])

    assert among[1] == alone[0]
    assert len(set(uniforms([1, 2, 1, 2], [1, 1, 2, 2]))) == 4


def test_uniform_numbers_are_uniform() -> None:
    values = uniforms(list(range(1000)) * 20, [p for p in range(20) for _ in range(1000)])

    assert values.min() >= 0
    assert values.max() < 1
    np.testing.assert_allclose(np.histogram(values, bins=10, range=(0, 1))[0] / 20_000, 0.1, atol=0.01)


def test_logits_that_are_not_finite_show_in_the_logprob() -> None:
    request = Request(key="r", prompt=np.zeros(1, dtype=np.int32), max_tokens=1)

    sampled = sample(torch.tensor([[1.0, float("nan"), 0.0]]), [request], [0], [0])

    assert math.isnan(sampled.logprobs[0])
