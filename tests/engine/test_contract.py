"""What every engine promises, against a plain forward of transformers, through the real contract."""

import numpy as np

from tests.engine.kit import Host, Reference, prompts


async def test_greedy_tokens_are_those_of_transformers(host: Host) -> None:
    reference = Reference(host.model)
    asked = prompts(12)

    answers = await host.client.generate(asked, max_tokens=16, temperature=0)

    assert [answer.ids for answer in answers] == [reference.greedy(prompt, 16) for prompt in asked]


async def test_logprobs_are_those_of_a_plain_forward(host: Host) -> None:
    reference = Reference(host.model)
    asked = prompts(24, seed=1)

    answers = await host.client.generate(asked, max_tokens=20, temperature=1.0)

    for prompt, answer in zip(asked, answers, strict=True):
        np.testing.assert_allclose(answer.logprobs, reference.chosen(prompt, answer.ids), atol=1e-4)
