"""Whether a request can be generated at all, as far as that is cheap to see, decided before it is queued.

Token ids are looked at by the engine host that gets them, which knows its vocabulary.
"""

from rollfarm.errors import InvalidArgument
from rollfarm.generation import check_length, check_sampling
from rollfarm.tokens import whole_count
from rollfarm.v1 import llm_proxy_pb2


def check(asked: llm_proxy_pb2.ProxiedGeneration, *, context_tokens: int, vocabulary_size: int) -> None:
    """Raise InvalidArgument when it is clear that no engine could serve the request. Limits of 0 are unknown."""
    generation = asked.generation
    if not generation.request_id:
        raise InvalidArgument("request_id is empty; choose a unique one.", field="generation.request_id")
    check_length(whole_count(generation.prompt_token_ids), context_tokens=context_tokens)
    check_sampling(generation.sampling, vocabulary_size=vocabulary_size)
    if asked.HasField("exact_version") and asked.HasField("min_version") and asked.exact_version < asked.min_version:
        raise InvalidArgument(
            f"exact_version {asked.exact_version} is less than min_version {asked.min_version}.",
            exact_version=asked.exact_version,
            min_version=asked.min_version,
        )
