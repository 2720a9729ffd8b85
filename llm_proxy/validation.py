"""Whether a request can be generated at all, decided before it is queued."""

import math

from rollfarm.errors import InvalidArgument
from rollfarm.tokens import token_count, unpack_ids
from rollfarm.v1 import llm_proxy_pb2, trajectory_pb2


def check(asked: llm_proxy_pb2.ProxiedGeneration, *, context_tokens: int, vocabulary_size: int) -> None:
    """Raise InvalidArgument when no engine could serve the request. Limits of 0 are unknown and not checked."""
    generation = asked.generation
    if not generation.request_id:
        raise InvalidArgument("request_id is empty; choose a unique one.", field="generation.request_id")
    _check_prompt(generation.prompt_token_ids, context_tokens, vocabulary_size)
    _check_sampling(generation.sampling)
    if asked.HasField("exact_version") and asked.HasField("min_version") and asked.exact_version < asked.min_version:
        raise InvalidArgument(
            f"exact_version {asked.exact_version} is less than min_version {asked.min_version}.",
            exact_version=asked.exact_version,
            min_version=asked.min_version,
        )


def _check_prompt(prompt: bytes, context_tokens: int, vocabulary_size: int) -> None:
    count = token_count(prompt)
    ids = unpack_ids(prompt)
    if not count:
        raise InvalidArgument("The prompt has no tokens.", field="generation.prompt_token_ids")
    if 0 < context_tokens < count + 1:
        raise InvalidArgument(
            f"The prompt has {count} tokens; with one to generate, {context_tokens} fit the context.",
            prompt_token_count=count,
            context_token_count=context_tokens,
        )
    if ids.min() < 0 or 0 < vocabulary_size <= ids.max():
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise InvalidArgument(
            f"Token id {wrong} is not in the vocabulary of {vocabulary_size or 'unknown size'}.",
            token_id=wrong,
            vocabulary_size=vocabulary_size,
        )


def _check_sampling(sampling: trajectory_pb2.Sampling) -> None:
    if sampling.max_tokens <= 0:
        raise InvalidArgument(
            f"max_tokens is {sampling.max_tokens}; at least 1 is needed.", max_tokens=sampling.max_tokens
        )
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidArgument(
            f"temperature is {sampling.temperature:g}; it is 0 or more.", temperature=sampling.temperature
        )
    if not 0 <= sampling.top_p <= 1:
        raise InvalidArgument(f"top_p is {sampling.top_p:g}; it lies between 0 and 1.", top_p=sampling.top_p)
    if sampling.top_k < 0 or sampling.top_logprobs < 0:
        raise InvalidArgument(
            f"top_k is {sampling.top_k} and top_logprobs {sampling.top_logprobs}; neither may be negative.",
            top_k=sampling.top_k,
            top_logprobs=sampling.top_logprobs,
        )
