"""Whether tokens can be generated at all: the checks of a generation, in the same words wherever they are made.

A limit of 0 is unknown, and not checked.
"""

import sys

import numpy as np

from rollfarm.errors import InvalidArgument
from rollfarm.tokens import Ids
from rollfarm.v1 import trajectory_pb2

_NO_ID = 2**31
"""The first number that is no token id in any vocabulary."""

_UNSIGNED = np.dtype("<u4")

_FINITE = sys.float_info.max


def check_prompt(prompt: Ids, *, context_tokens: int, vocabulary_size: int) -> None:
    """Raise InvalidArgument unless the prompt is of the vocabulary and leaves room for a token."""
    check_length(len(prompt), context_tokens=context_tokens)
    check_ids(prompt, vocabulary_size=vocabulary_size)


def check_length(length: int, *, context_tokens: int) -> None:
    """Raise InvalidArgument unless a prompt of so many tokens leaves room for one more, and is not empty."""
    if not length:
        raise InvalidArgument("The prompt is empty; at least one token is needed.", field="prompt_token_ids")
    if 0 < context_tokens <= length:
        raise InvalidArgument(
            f"The prompt has {length} tokens, which leaves none for output in a context of {context_tokens}.",
            prompt_token_count=length,
            context_token_count=context_tokens,
        )


def check_ids(prompt: Ids, *, vocabulary_size: int) -> None:
    """Raise InvalidArgument unless the ids, one at least, are of the vocabulary."""
    # One pass for both ends: read as unsigned, an id below 0 is greater than any vocabulary. `max` begins in Python.
    unsigned = prompt.view(_UNSIGNED)
    if unsigned.item(unsigned.argmax()) >= (vocabulary_size or _NO_ID):
        wrong = int(prompt.min() if prompt.min() < 0 else prompt.max())
        raise InvalidArgument(
            f"Token id {wrong} is outside of the vocabulary of {vocabulary_size or 'unknown size'}.",
            token_id=wrong,
            vocabulary_size=vocabulary_size,
        )


def check_sampling(sampling: trajectory_pb2.Sampling, *, vocabulary_size: int) -> None:
    """Raise InvalidArgument unless every number is finite and in its range."""
    # What is not a number is in no range.
    if (value := sampling.max_tokens) < 1:
        raise _out_of_range("max_tokens", value, "at least 1")
    if not 0 <= (value := sampling.temperature) <= _FINITE:
        raise _out_of_range("temperature", value, "at least 0")
    if not 0 <= (value := sampling.top_p) <= 1:
        raise _out_of_range("top_p", value, "between 0 and 1")
    if (value := sampling.top_k) < 0:
        raise _out_of_range("top_k", value, "at least 0")
    if not 0 <= (value := sampling.top_logprobs) <= (vocabulary_size or _FINITE):
        allowed = f"between 0 and {vocabulary_size}" if vocabulary_size else "at least 0"
        raise _out_of_range("top_logprobs", value, allowed)


def _out_of_range(name: str, value: float, allowed: str) -> InvalidArgument:
    return InvalidArgument(f"{name} is {value}; it must be {allowed}.", **{name: value})
