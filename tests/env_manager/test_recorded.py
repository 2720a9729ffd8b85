"""From the records that llm_proxy really makes to turns: each token of the policy is trained on exactly once."""

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings

from env_manager.recorded import POLICY, read_record
from llm_proxy.front.record import Cause, Origin, Record, Reply, Span
from rollfarm import tokens
from rollfarm.v1 import llm_proxy_pb2, trajectory_pb2

SYSTEM, ENVIRONMENT = trajectory_pb2.AUTHOR_SYSTEM, trajectory_pb2.AUTHOR_ENVIRONMENT


@dataclass(frozen=True)
class Said:
    """One generation of a made-up session."""

    parent: int
    """Which of the generations before it goes on from, by remainder; one more than there are begins anew."""

    shown: list[int]
    written: list[int]


few = st.lists(st.integers(0, 2), min_size=1, max_size=3)
"""So few that branches are often alike by chance."""

sessions = st.lists(st.builds(Said, parent=st.integers(0, 100), shown=few, written=few), min_size=1, max_size=12)


def recorded_by_llm_proxy(session: list[Said]) -> tuple[Record, list[Reply]]:
    record, replies = Record(), list[Reply]()
    for number, said in enumerate(session):
        parent = [*replies, None][said.parent % (len(replies) + 1)]
        shown = [Span(ENVIRONMENT, tokens.pack_ids(said.shown), "shown")]
        if parent is None:
            shown.insert(0, Span(SYSTEM, tokens.pack_ids([9]), "instructions"))
        written = trajectory_pb2.Turn(
            author=POLICY,
            token_ids=tokens.pack_ids(said.written),
            logprobs=tokens.pack_logprobs([-float(number)] * len(said.written)),
        )
        origin = Origin(Cause.FIRST if parent is None else Cause.FORKED)
        name = str(number).encode()
        reply = Reply(parent, origin, name, (b"asked" + name,), (), tuple(shown), written, "written")
        record.add(reply)
        replies.append(reply)
    return record, replies


@given(sessions)
@settings(max_examples=200, deadline=None)
def test_each_generation_is_the_policys_once_after_exactly_the_tokens_that_its_engine_saw(session: list[Said]):
    record, replies = recorded_by_llm_proxy(session)

    recorded = read_record(record.to_proto("session"))

    before: list[int] = []
    found: dict[int, tuple[list[int], list[int]]] = {}
    for place, turn in enumerate(recorded.turns):
        ids = tokens.unpack_ids(turn.token_ids).tolist()
        if turn.begins_segment:
            assert turn.author == ENVIRONMENT
            before = []
        if turn.author == POLICY:
            number = int(-tokens.unpack_logprobs(turn.logprobs)[0])
            assert number not in found
            found[number] = (list(before), ids)
        else:
            assert not turn.logprobs
        assert turn.begins_segment or place or not before
        before += ids
    assert len(found) == len(replies)
    for number, reply in enumerate(replies):
        prompt, written = found[number]
        assert prompt + written == tokens.unpack_ids(reply.token_ids).tolist()
        assert len(written) == len(session[number].written)


def turn(author: "trajectory_pb2.Author.ValueType", *ids: int) -> trajectory_pb2.Turn:
    return trajectory_pb2.Turn(author=author, token_ids=tokens.pack_ids(ids))


def test_what_a_branch_shares_is_one_turn_of_context_that_begins_a_segment():
    first = [turn(SYSTEM, 1), turn(ENVIRONMENT, 2), turn(POLICY, 3), turn(ENVIRONMENT, 4), turn(POLICY, 5)]
    second = [*first[:3], turn(ENVIRONMENT, 6), turn(POLICY, 7), turn(ENVIRONMENT, 8), turn(POLICY, 9)]
    record = llm_proxy_pb2.SessionRecord(
        branches=[
            llm_proxy_pb2.SessionBranch(turns=first, turn_texts=list("abcde")),
            llm_proxy_pb2.SessionBranch(turns=second, turn_texts=list("abcfghi"), shared_turn_count=3),
        ]
    )

    recorded = read_record(record)

    context = trajectory_pb2.Turn(author=ENVIRONMENT, token_ids=tokens.pack_ids([1, 2, 3, 6]), begins_segment=True)
    assert list(recorded.turns) == [*first, context, *second[4:]]
    assert list(recorded.texts) == [*"abcde", "a\n\nb\n\nc\n\nf", *"ghi"]
    assert recorded.last_act == second[-1]


def test_a_session_without_a_generation_has_no_act():
    assert read_record(llm_proxy_pb2.SessionRecord()).last_act is None
