"""Whether tokens can be generated at all: the same checks, in the same words, wherever a generation is asked for.

A limit of 0 is unknown, and not checked.
"""

import math

from rollfarm.errors import InvalidArgument
from rollfarm.tokens import Ids
from rollfarm.v1 import trajectory_pb2


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
    if prompt.min() < 0 or 0 < vocabulary_size <= prompt.max():
        wrong = int(prompt.min() if prompt.min() < 0 else prompt.max())
        raise InvalidArgument(
            f"Token id {wrong} is outside of the vocabulary of {vocabulary_size or 'unknown size'}.",
            token_id=wrong,
            vocabulary_size=vocabulary_size,
        )


def check_sampling(sampling: trajectory_pb2.Sampling, *, vocabulary_size: int) -> None:
    """Raise InvalidArgument unless every number is finite and in its range."""
    ranges = (
        ("max_tokens", 1, math.inf),
        ("temperature", 0, math.inf),
        ("top_p", 0, 1),
        ("top_k", 0, math.inf),
        ("top_logprobs", 0, vocabulary_size or math.inf),
    )
    for name, least, most in ranges:
        value = getattr(sampling, name)
        if not (math.isfinite(value) and least <= value <= most):
            allowed = f"at least {least}" if most == math.inf else f"between {least} and {most}"
            raise InvalidArgument(f"{name} is {value}; it must be {allowed}.", **{name: value})
