"""Refusals are the same whether prompts come alone or many in one message."""

from hypothesis import given
from hypothesis import strategies as st

from llm_proxy.validation import all_known, check
from rollfarm.errors import InvalidArgument
from rollfarm.tokens import pack_ids
from rollfarm.v1 import llm_proxy_pb2
from tests.llm_proxy.world import asked

VOCABULARY = 50
CONTEXT = 6

Asked = llm_proxy_pb2.ProxiedGeneration

ids = st.one_of(st.integers(0, VOCABULARY - 1), st.sampled_from([-1, VOCABULARY, 2**31 - 1]))
good = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=CONTEXT - 1).map(pack_ids)
prompts = st.one_of(good, good, st.lists(ids, max_size=CONTEXT).map(pack_ids), st.binary(max_size=9))


@given(st.lists(prompts, max_size=6), st.sampled_from([0, VOCABULARY]))
def test_prompts_that_are_looked_at_together_are_refused_as_each_alone(told: list[bytes], vocabulary: int) -> None:
    message = [of_prompt(prompt) for prompt in told]

    known = all_known(message, vocabulary_size=vocabulary)

    alone = [refusal(one, vocabulary, known=False) for one in message]
    assert [refusal(one, vocabulary, known=known) for one in message] == alone
    assert known or any(alone) or not told


def of_prompt(prompt: bytes) -> Asked:
    one = asked("r", 4)
    one.generation.prompt_token_ids = prompt
    return one


def refusal(one: Asked, vocabulary: int, *, known: bool) -> str:
    try:
        check(one, context_tokens=CONTEXT, vocabulary_size=vocabulary, ids_are_known=known)
    except InvalidArgument as error:
        return str(error)
    return ""
