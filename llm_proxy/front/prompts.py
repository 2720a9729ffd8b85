"""From a conversation to the tokens that an engine is asked to continue.

Where a conversation goes on from a recorded reply, its prompt is the recorded tokens and then what the model's chat
template puts after that reply, tokenised alone: nothing that was said is ever tokenised again. This holds only where
the template does not rewrite what it rendered before, so that is looked at each time: the rendering of the whole
conversation has to begin with the rendering of what was recorded, and that with what the policy wrote. Else the
conversation is rendered anew, and the record says why. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from jinja2 import TemplateError

from llm_proxy.front.messages import Conversation, digests
from llm_proxy.front.record import Cause, Origin, Record, Reply, Span
from rollfarm import tokens
from rollfarm.chat import ChatTemplate
from rollfarm.chat.messages import ASSISTANT, SYSTEM, Message, Tool
from rollfarm.chat.suffixes import Rendering, Rewritten, Suffixes
from rollfarm.errors import InvalidArgument
from rollfarm.v1 import trajectory_pb2

REMEMBERED = 4096
"""Texts whose tokens are kept: siblings of a group begin alike."""

SHORT = 2048
"""Characters up to which a text's tokens are worth keeping."""

FIRST = Origin(Cause.FIRST)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an engine is asked to continue, and where that stands in the record."""

    token_ids: bytes
    """[T] "<i4", all of it."""

    parent: Reply | None
    """The reply that it goes on from."""

    origin: Origin
    """Why it goes on from none."""

    history: bytes
    """Digest of everything that is shown."""

    asked: tuple[bytes, ...]
    """Of the history up to and with each message beyond the parent's."""

    shown: tuple[Span, ...]
    """Beyond the parent's tokens."""

    messages: tuple[Message, ...] = ()
    """Beyond the parent's."""

    rendered: str = ""

    @property
    def token_count(self) -> int:
        return tokens.token_count(self.token_ids)

    def answered(self, written: trajectory_pb2.Turn, text: str, message: Message | None = None) -> Reply:
        """The reply to it, for the record."""
        if message is None:
            history = tokens_digest(self.token_ids + written.token_ids)
        else:
            (history,) = digests(self.history, [message])
        return Reply(
            parent=self.parent,
            origin=self.origin,
            history=history,
            asked=self.asked,
            messages=(*self.messages, message) if message is not None else (),
            shown=self.shown,
            written=written,
            text=text,
            rendering=Rendering.of(self.rendered),
        )


class Prompter:
    """Makes prompts for one model."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self._encoded = lru_cache(REMEMBERED)(chat.encode)
        self._short_instructions = lru_cache(REMEMBERED)(self._instructions)
        self._suffixes = Suffixes(chat)

    def encode(self, text: str) -> list[int]:
        return (self._encoded if len(text) <= SHORT else self._chat.encode)(text)

    def chat(self, asked: Conversation, record: Record) -> Prompt:
        """The prompt for a conversation. Raises InvalidArgument where the template cannot render it."""
        histories = record.digests(asked)
        parent, known = _deepest(asked, histories, record)
        origin = FIRST
        if parent is not None:
            try:
                return self._continued(asked, parent, known, histories)
            except Rewritten as how:
                origin = Origin(Cause.TEMPLATE, str(how))
        elif record.branches:
            origin = Origin(Cause.REWRITTEN, record.difference(histories, asked.messages))
        rendered = self._render([message.shown for message in asked.messages], asked.tools)
        ids = self.encode(rendered)
        return Prompt(
            token_ids=tokens.pack_ids(ids),
            parent=None,
            origin=origin,
            history=histories[-1],
            asked=tuple(histories),
            shown=self._opening(asked, ids),
            messages=asked.messages,
            rendered=rendered,
        )

    def tokens(self, token_ids: bytes, record: Record) -> Prompt:
        """The prompt that is these tokens."""
        parent, known = None, 0
        for length in sorted(record.token_lengths, reverse=True):
            if length < len(token_ids) and (parent := record.find(tokens_digest(token_ids[:length]))):
                known = length
                break
        is_new = parent is None and record.branches
        new = token_ids[known:]
        text = self._chat.decode(tokens.unpack_ids(new).tolist(), skip_special_tokens=True)
        return Prompt(
            token_ids=token_ids,
            parent=parent,
            origin=Origin(Cause.REWRITTEN, "Its tokens begin like those of no branch.") if is_new else FIRST,
            history=(history := tokens_digest(token_ids)),
            asked=(history,),
            shown=(Span(trajectory_pb2.AUTHOR_ENVIRONMENT, new, text),),
        )

    def _continued(self, asked: Conversation, parent: Reply, known: int, histories: Sequence[bytes]) -> Prompt:
        """The prompt that goes on from `parent`, whose history is the first `known` messages. Raises Rewritten."""
        said = tuple(message for reply in parent.line for message in reply.messages)
        new = asked.messages[known:]
        shown = [message.shown for message in said + new]
        rendered = self._render(shown, asked.tools)
        suffix_text = self._suffixes.after(
            said[-1],
            len(said),
            prompt=parent.rendering,
            rendered=rendered,
            recorded=lambda: self._render(shown[: len(said)], asked.tools, prompt=False),
        )
        suffix = tokens.pack_ids(self.encode(suffix_text))
        if suffix[:4] == parent.written.token_ids[-4:]:
            suffix = suffix[4:]
        return Prompt(
            token_ids=parent.token_ids + suffix,
            parent=parent,
            origin=FIRST,
            history=histories[-1],
            asked=tuple(histories[known:]),
            shown=(Span(trajectory_pb2.AUTHOR_ENVIRONMENT, suffix, _words(new)),),
            messages=new,
            rendered=rendered,
        )

    def _opening(self, asked: Conversation, ids: list[int]) -> tuple[Span, ...]:
        """The first prompt as spans: instructions are one of their own where the template keeps them apart."""
        first, *others = asked.messages
        cut = self._system_length(first, asked.tools, ids) if first.role == SYSTEM else 0
        if not cut:
            return (Span(trajectory_pb2.AUTHOR_ENVIRONMENT, tokens.pack_ids(ids), _words(asked.messages)),)
        return (
            Span(trajectory_pb2.AUTHOR_SYSTEM, tokens.pack_ids(ids[:cut]), first.content),
            Span(trajectory_pb2.AUTHOR_ENVIRONMENT, tokens.pack_ids(ids[cut:]), _words(others)),
        )

    def _system_length(self, first: Message, tools: Sequence[Tool], ids: list[int]) -> int:
        """How many tokens are instructions; 0 where the template does not keep them apart."""
        is_short = not tools and len(first.content) <= SHORT
        alone = self._short_instructions(first) if is_short else self._instructions(first, tools)
        return len(alone) if ids[: len(alone)] == alone and len(alone) < len(ids) else 0

    def _instructions(self, first: Message, tools: Sequence[Tool] = ()) -> list[int]:
        """The tokens of the instructions alone; none where the template does not render them so."""
        try:
            return self.encode(self._chat.render([first.shown], tools=tools or None, prompt=False))
        except TemplateError:
            return []

    def _render(self, shown: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, prompt: bool = True) -> str:
        try:
            rendered = self._chat.render(shown, tools=tools or None, prompt=prompt)
            check_text(rendered)
        except (TemplateError, TypeError) as error:
            problem = f"The model's chat template cannot render the messages: {error}."
            raise InvalidArgument(problem, field="messages") from error
        return rendered


def tokens_digest(token_ids: bytes) -> bytes:
    """Of a history that was shown as tokens."""
    return blake2b(token_ids, digest_size=16, person=b"tokens").digest()


def check_text(text: str, *, field: str = "messages") -> None:
    """Raise InvalidArgument where the text is none: JSON lets halves of characters pass."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field} is no valid Unicode.", field=field) from None


def _deepest(asked: Conversation, histories: Sequence[bytes], record: Record) -> tuple[Reply | None, int]:
    """The reply with the longest history that the conversation goes on from, and how many messages that is."""
    for known in range(len(asked.messages) - 1, 0, -1):
        if asked.messages[known - 1].role == ASSISTANT and (reply := record.find(histories[known - 1])) is not None:
            return reply, known
    return None, 0


def _words(messages: Sequence[Message]) -> str:
    return "\n\n".join(message.content for message in messages if message.content)
