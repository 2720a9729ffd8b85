"""What an agent's session recorded, as the turns of a trajectory: each branch becomes a segment.

Invariant: every token that the policy wrote is the policy's in exactly one segment. Where a branch repeats what an
earlier one holds, that is context: part of its prompt, and nobody learns from it again. Pure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollfarm.v1 import llm_proxy_pb2, trajectory_pb2

POLICY = trajectory_pb2.AUTHOR_POLICY


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was said, as tokens and as text."""

    turns: Sequence[trajectory_pb2.Turn]
    """In the order of the branches. The first turn of each branch but the first begins a segment."""

    texts: Sequence[str]
    """Of each turn."""

    @property
    def last_act(self) -> trajectory_pb2.Turn | None:
        """What the policy wrote last; None where it wrote nothing."""
        return next((turn for turn in reversed(self.turns) if turn.author == POLICY), None)


def read_record(record: llm_proxy_pb2.SessionRecord) -> Recorded:
    """The record's turns and their texts."""
    said = [pair for number, branch in enumerate(record.branches) for pair in _segment(branch, is_first=number == 0)]
    return Recorded([turn for turn, _ in said], [text for _, text in said])


def _segment(branch: llm_proxy_pb2.SessionBranch, *, is_first: bool) -> Iterator[tuple[trajectory_pb2.Turn, str]]:
    said = list(zip(branch.turns, branch.turn_texts, strict=True))
    own = range(branch.shared_turn_count, len(said))
    begin = next((at for at in own if said[at][0].author == POLICY), None)
    if begin is None:
        return
    if is_first:
        yield from said
        return
    yield _prompt(said[:begin])
    yield from said[begin:]


def _prompt(shown: Sequence[tuple[trajectory_pb2.Turn, str]]) -> tuple[trajectory_pb2.Turn, str]:
    """All of it as one turn that begins a segment."""
    turn = trajectory_pb2.Turn(
        author=trajectory_pb2.AUTHOR_ENVIRONMENT,
        token_ids=b"".join(turn.token_ids for turn, _ in shown),
        begins_segment=True,
    )
    return turn, "\n\n".join(text for _, text in shown)
