import math
from typing import Any

import pytest

from rollfarm.errors import InvalidArgument
from rollfarm.generation import check_prompt, check_sampling
from rollfarm.tokens import pack_ids, unpack_ids
from rollfarm.v1.trajectory_pb2 import Sampling


@pytest.mark.parametrize(
    ("prompt", "problem", "facts"),
    [
        ([], "prompt is empty", {"field": "prompt_token_ids"}),
        ([1] * 8, "8 tokens, which leaves none", {"prompt_token_count": "8", "context_token_count": "8"}),
        ([1, 100, 2], "Token id 100 is outside", {"token_id": "100", "vocabulary_size": "100"}),
        ([1, -2], "Token id -2 is outside", {"token_id": "-2", "vocabulary_size": "100"}),
    ],
)
def test_a_prompt_that_no_model_could_go_on_from_is_refused(prompt: list[int], problem: str, facts: dict[str, str]):
    with pytest.raises(InvalidArgument, match=problem) as refused:
        check_prompt(unpack_ids(pack_ids(prompt)), context_tokens=8, vocabulary_size=100)

    assert refused.value.facts == facts


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"temperature": -0.5}, "temperature is -0.5; it must be at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be between 0 and 1"),
        ({"top_k": -1}, "top_k is -1; it must be at least 0"),
        ({"top_logprobs": 101}, "top_logprobs is 101; it must be between 0 and 100"),
    ],
)
def test_sampling_out_of_range_is_refused(wrong: dict[str, Any], problem: str):
    with pytest.raises(InvalidArgument, match=problem) as refused:
        check_sampling(Sampling(**{"max_tokens": 1, **wrong}), vocabulary_size=100)

    assert refused.value.facts == {name: str(value) for name, value in wrong.items()}


def test_unknown_limits_are_not_checked():
    check_prompt(unpack_ids(pack_ids([10**6] * 100)), context_tokens=0, vocabulary_size=0)
    check_sampling(Sampling(max_tokens=1, top_logprobs=10**6), vocabulary_size=0)
