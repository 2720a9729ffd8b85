"""Whether a request can be generated at all, decided before it is queued."""

from collections.abc import Iterable

from rollfarm.errors import InvalidArgument
from rollfarm.generation import are_known, check_ids, check_length, check_sampling
from rollfarm.tokens import unpack_ids, whole_count
from rollfarm.v1 import llm_proxy_pb2


def check(
    asked: llm_proxy_pb2.ProxiedGeneration, *, context_tokens: int, vocabulary_size: int, ids_are_known: bool = False
) -> None:
    """Raise InvalidArgument when no engine could serve the request. Limits of 0 are unknown and not checked.

    `ids_are_known` is what `all_known` said of it.
    """
    generation = asked.generation
    if not generation.request_id:
        raise InvalidArgument("request_id is empty; choose a unique one.", field="generation.request_id")
    prompt = generation.prompt_token_ids
    check_length(whole_count(prompt), context_tokens=context_tokens)
    if not ids_are_known:
        check_ids(unpack_ids(prompt), vocabulary_size=vocabulary_size)
    check_sampling(generation.sampling, vocabulary_size=vocabulary_size)
    if asked.HasField("exact_version") and asked.HasField("min_version") and asked.exact_version < asked.min_version:
        raise InvalidArgument(
            f"exact_version {asked.exact_version} is less than min_version {asked.min_version}.",
            exact_version=asked.exact_version,
            min_version=asked.min_version,
        )


def all_known(asked: Iterable[llm_proxy_pb2.ProxiedGeneration], *, vocabulary_size: int) -> bool:
    """Whether the ids of all prompts that are whole are of the vocabulary: one look costs less than one at each."""
    ids = b"".join([one.generation.prompt_token_ids for one in asked])
    return len(ids) > 0 and len(ids) % 4 == 0 and are_known(unpack_ids(ids), vocabulary_size=vocabulary_size)
