"""Whether tokens can be generated at all: the same checks, in the same words, wherever a generation is asked for.

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
_RANGES = (("max_tokens", 1, _FINITE), ("temperature", 0, _FINITE), ("top_p", 0, 1), ("top_k", 0, _FINITE))
"""What is least and most allowed, whatever the model. What is not a number is in no range."""


def check_prompt(prompt: Ids, *, context_tokens: int, vocabulary_size: int) -> None:
    """Raise InvalidArgument unless the prompt is of the vocabulary and leaves room for a token."""
    if not len(prompt):
        raise InvalidArgument("The prompt is empty; at least one token is needed.", field="prompt_token_ids")
    if 0 < context_tokens <= len(prompt):
        raise InvalidArgument(
            f"The prompt has {len(prompt)} tokens, which leaves none for output in a context of {context_tokens}.",
            prompt_token_count=len(prompt),
            context_token_count=context_tokens,
        )
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
    for name, least, most in (*_RANGES, ("top_logprobs", 0, vocabulary_size or _FINITE)):
        value = getattr(sampling, name)
        if not least <= value <= most:
            allowed = f"at least {least}" if most == _FINITE else f"between {least} and {most}"
            raise InvalidArgument(f"{name} is {value}; it must be {allowed}.", **{name: value})
