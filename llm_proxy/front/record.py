"""What one session generated: every reply with the tokens that were shown for it, and the histories that they make.

A reply knows the one whose history it extends, so that histories share what they have in common. Invariant: from the
first reply to any other, the tokens shown and written are exactly the tokens that its engine saw and made.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from llm_proxy.front.messages import Conversation, digests, identity, repeats
from rollfarm.chat.messages import Message
from rollfarm.chat.suffixes import NOTHING, Rendering
from rollfarm.v1 import llm_proxy_pb2, trajectory_pb2

EXCERPT = 60
"""Characters of a message that an origin quotes."""


class Cause(StrEnum):
    """Why a history begins."""

    FIRST = "first"
    """It is the session's first."""

    FORKED = "forked"
    """It shares its beginning with another: the agent asked for several, asked again, or went on otherwise."""

    REWRITTEN = "rewritten"
    """The agent changed, dropped or compacted what was said, or began another conversation."""

    TEMPLATE = "template"
    """The model's chat template renders what was said otherwise than before."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that the policy was shown."""

    author: "trajectory_pb2.Author.ValueType"
    token_ids: bytes
    """[T] "<i4"."""

    text: str
    """The words alone, for people."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Why a reply does not extend the latest of its history."""

    cause: Cause
    detail: str = ""
    """In words."""


@dataclass(slots=True, eq=False)
class Reply:
    """One generation."""

    parent: "Reply | None"
    """The reply whose history it extends."""

    origin: Origin
    history: bytes
    """Digest of the history with this reply."""

    asked: tuple[bytes, ...]
    """Digests of the history up to and with each message beyond the parent's that was shown."""

    messages: tuple[Message, ...]
    """Beyond the parent's: those shown, and the assistant's. Empty where tokens were shown."""

    shown: tuple[Span, ...]
    """Beyond the parent's."""

    written: trajectory_pb2.Turn
    text: str
    """What the policy wrote, for people."""

    rendering: Rendering = NOTHING
    """The prompt as the template rendered it."""

    @property
    def line(self) -> "list[Reply]":
        """From the first reply to this one."""
        line: list[Reply] = []
        reply: Reply | None = self
        while reply is not None:
            line.append(reply)
            reply = reply.parent
        return line[::-1]

    @property
    def token_ids(self) -> bytes:
        """[T] "<i4", every token from the beginning."""
        return b"".join(part for reply in self.line for part in reply.own_tokens)

    @property
    def own_tokens(self) -> Iterator[bytes]:
        """What it adds to its parent's tokens."""
        yield from (span.token_ids for span in self.shown)
        yield self.written.token_ids

    @property
    def histories(self) -> Iterator[tuple[Message, bytes]]:
        """The messages that it adds to its parent's, each with the digest of the history that ends with it."""
        return zip(self.messages, (*self.asked, self.history), strict=False)

    @property
    def turns(self) -> Iterator[tuple[trajectory_pb2.Turn, str]]:
        """What it adds to its parent's turns, with the text of each."""
        for span in self.shown:
            yield trajectory_pb2.Turn(author=span.author, token_ids=span.token_ids), span.text
        yield self.written, self.text


@dataclass(slots=True)
class Branch:
    """One history that the agent kept extending."""

    number: int
    """From 1."""

    replies: list[Reply]
    detail: str
    shared_count: int = 0
    """How many of its first replies another branch had before."""

    @property
    def messages(self) -> list[Message]:
        return [message for reply in self.replies for message in reply.messages]

    def to_proto(self) -> llm_proxy_pb2.SessionBranch:
        turns = [turn for reply in self.replies for turn in reply.turns]
        return llm_proxy_pb2.SessionBranch(
            turns=[turn for turn, _ in turns],
            turn_texts=[text for _, text in turns],
            origin_detail=self.detail,
            shared_turn_count=sum(1 for reply in self.replies[: self.shared_count] for _ in reply.turns),
        )


@dataclass(slots=True)
class Record:
    """Every reply of a session."""

    branches: list[Branch] = field(default_factory=list[Branch])
    """In the order in which they began."""

    request_count: int = 0
    """Requests answered."""

    token_count: int = 0
    """Tokens in all branches; what two of them share counts twice, as it does when they are fetched. Of the likeliest
    tokens at a place, two count as one: they take as much room."""

    token_lengths: set[int] = field(default_factory=set[int])
    """Bytes of each history that was shown as tokens."""

    _latest: Reply | None = None
    _line: list[tuple[Message, bytes]] = field(default_factory=list[tuple[Message, bytes]])
    """Every message up to the latest reply, with the digest of the history that ends with it."""

    _replies: dict[bytes, Reply] = field(default_factory=dict[bytes, Reply])
    _tips: dict[Reply, Branch] = field(default_factory=dict[Reply, Branch])
    _homes: dict[Reply, int] = field(default_factory=dict[Reply, int])
    """The branch that each reply was made for, from 1."""

    _places: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """The first branch with each history, from 1."""

    def find(self, history: bytes) -> Reply | None:
        """The latest reply with this history."""
        return self._replies.get(history)

    def digests(self, asked: Conversation) -> list[bytes]:
        """The conversation's own; what begins like the latest reply's line is compared, and not digested again."""
        found = digests(asked.start, asked.messages[:1])
        if self._line and self._line[0][1] == found[0]:
            for message, (known, digest) in zip(asked.messages[1:], self._line[1:], strict=False):
                if not repeats(message, known) and digests(found[-1], [message]) != [digest]:
                    break
                found.append(digest)
        return found + digests(found[-1], asked.messages[len(found) :])

    def difference(self, histories: Sequence[bytes], messages: Sequence[Message]) -> str:
        """Where a conversation leaves the branch that begins most like it, in words."""
        common = next((at for at in range(len(histories), 0, -1) if histories[at - 1] in self._places), 0)
        number = self._places[histories[common - 1]] if common else 1
        return _difference(number, self.branches[number - 1].messages, messages, common)

    def add(self, reply: Reply) -> Cause:
        """Append the reply to its history. Says why that begins a branch; FIRST where it begins none, or the first."""
        branch = self._tips.pop(reply.parent, None) if reply.parent is not None else None
        origin = reply.origin if branch else self._origin(reply)
        if branch is None:
            line = reply.line[:-1]
            branch = Branch(len(self.branches) + 1, line, origin.detail, shared_count=len(line))
            self.branches.append(branch)
            self.token_count += sum(map(_length, branch.replies))
        branch.replies.append(reply)
        self.token_count += _length(reply)
        self._index(reply, branch)
        return origin.cause

    def _index(self, reply: Reply, branch: Branch) -> None:
        self._tips[reply] = branch
        self._homes[reply] = branch.number
        self._replies[reply.history] = reply
        for history in (*reply.asked, reply.history):
            self._places.setdefault(history, branch.number)
        if not reply.messages:
            self.token_lengths.add(len(reply.token_ids))
        if reply.parent is None or reply.parent is not self._latest:
            self._line = [pair for earlier in reply.line[:-1] for pair in earlier.histories]
        self._line += reply.histories
        self._latest = reply

    def _origin(self, reply: Reply) -> Origin:
        """Why the reply begins a branch, seen from now: another may have come first since it was asked for."""
        if reply.parent is not None:
            return Origin(Cause.FORKED, _fork(self.branches[self._homes[reply.parent] - 1], reply))
        number = self._places.get(reply.asked[-1])
        if number is not None and reply.origin.cause is not Cause.TEMPLATE:
            return Origin(Cause.FORKED, f"Branch {number} was shown the same, and it is another reply to it.")
        return reply.origin

    def to_proto(self, session_id: str) -> llm_proxy_pb2.SessionRecord:
        return llm_proxy_pb2.SessionRecord(
            session_id=session_id,
            branches=[branch.to_proto() for branch in self.branches],
            request_count=self.request_count,
        )


def _difference(number: int, recorded: Sequence[Message], messages: Sequence[Message], common: int) -> str:
    """Where `messages` leave those of a branch, of which the first `common` are alike."""
    if common == len(messages):
        return f"It goes back to message {common} of branch {number}."
    new = messages[common]
    if common == len(recorded):
        return f"It goes on after all {common} messages of branch {number}, but with other tools."
    old = recorded[common]
    place = f"Message {common + 1} ({new.role}) is not what branch {number} has there"
    if identity(new) == identity(old):
        return f"It begins with other tools than branch {number}."
    if (old.content, old.role) == (new.content, new.role):
        return f"{place}: its tool calls differ."
    return f"{place}: {_excerpt(new, old)} instead of {_excerpt(old, new)}."


def _fork(branch: Branch, reply: Reply) -> str:
    assert reply.parent is not None
    at = branch.replies.index(reply.parent) + 1
    turn = sum(1 for earlier in branch.replies[:at] for _ in earlier.turns)
    shared = f"It shares branch {branch.number} up to its turn {turn}."
    if branch.replies[at].asked == reply.asked:
        return f"{shared} What follows was shown there too, and it is another reply to it."
    shown = [message for earlier in reply.line for message in earlier.messages][:-1]
    if not shown:
        return shared
    common = _common(branch.messages, shown)
    return f"{shared} {_difference(branch.number, branch.messages, shown, common)}"


def _length(reply: Reply) -> int:
    likeliest = len(reply.written.top_logprobs.token_ids) // 4
    return sum(map(len, reply.own_tokens)) // 4 + likeliest // 2


def _common(one: Sequence[Message], other: Sequence[Message]) -> int:
    common = 0
    for mine, theirs in zip(one, other, strict=False):
        if identity(mine) != identity(theirs):
            break
        common += 1
    return common


def _excerpt(message: Message, beside: Message) -> str:
    """The message around where it begins to differ from the one beside it."""
    text = message.content
    at = next((i for i, (one, two) in enumerate(zip(text, beside.content, strict=False)) if one != two), 0)
    begin = max(0, at - EXCERPT // 3)
    excerpt = text[begin : begin + EXCERPT]
    dots = ("…" if begin else "", "…" if begin + EXCERPT < len(text) else "")
    return (
        f"{message.role} {dots[0]}{excerpt!r}{dots[1]}"
        if message.role != beside.role
        else f"{dots[0]}{excerpt!r}{dots[1]}"
    )
