"""One reply as it is read: from the engine's tokens to the words, thoughts and calls that an agent is told.

Invariant: what was told, put together, is the message that the record keeps.
"""

from collections.abc import Sequence

from rollfarm import tokens
from rollfarm.chat import ChatTemplate
from rollfarm.chat.formats import Format, Part, Said, Thought
from rollfarm.chat.messages import ASSISTANT, Call, Message, Tool
from rollfarm.chat.text import Detokenizer, StopFinder


class Reading:
    """What replies of one model are read with."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.format = Format(chat)
        shown = {tuple(chat.encode(mark)) for mark in self.format.marks}
        special = set(chat.tokenizer.all_special_ids) if self.format.is_common else set[int]()
        self._hidden = (special | set(chat.stop_token_ids)) - {mark[0] for mark in shown if len(mark) == 1}
        self._decode_all = chat.decode

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without the tokens that are none."""
        if not self._hidden.isdisjoint(ids):
            ids = [token for token in ids if token not in self._hidden]
        return self._decode_all(ids)

    def token(self, token: int) -> str:
        """One token alone, whatever it is."""
        return self._decode_all([token])


class Reader:
    """Reads one reply."""

    def __init__(self, reading: Reading, tools: Sequence[Tool] | None = (), stops: Sequence[str] = ()) -> None:
        """`tools` of None: the reply is text and nothing else."""
        self._detokenizer = Detokenizer(reading.decode)
        self._finder = StopFinder(stops) if stops else None
        self._parser = reading.format.parser(tools) if tools is not None else None
        self._thought_field = reading.format.thought_field
        self._spacing = _Spacing()
        self._told: list[Part] = []
        self._pieces: list[str] = []
        self.token_count = 0
        """Tokens read; none is, after the one that completes a stop string."""

    @property
    def stop(self) -> str:
        """The stop string that was found, if any."""
        return self._finder.found if self._finder else ""

    def feed(self, token_ids: bytes) -> list[Part]:
        """Tell what these further tokens add."""
        ids = tokens.unpack_ids(token_ids).tolist()
        if self._finder is None:
            self.token_count += len(ids)
            return self._tell(self._read(ids))
        text = ""
        for token in ids:
            if self._finder.found:
                break
            self.token_count += 1
            text += self._finder.feed(self._read([token]))
        return self._tell(text)

    def finish(self) -> list[Part]:
        """Tell what is left when no more tokens come."""
        text = self._detokenizer.flush()
        self._pieces.append(text)
        if self._finder is not None:
            text = self._finder.feed(text) + self._finder.flush()
        told = self._tell(text)
        if self._parser is None:
            return told
        return told + self._keep(self._spaced(self._parser.finish()) + self._spacing.finish())

    @property
    def text(self) -> str:
        """What was read, tool calls and all, without the tokens that are no text."""
        return "".join(self._pieces)

    @property
    def problem(self) -> str:
        """Why what looks like a tool call could not be read; empty where nothing is wrong."""
        return self._parser.problem if self._parser is not None else ""

    @property
    def message(self) -> Message:
        """Everything that was told."""
        return Message(
            ASSISTANT,
            content="".join(part.text for part in self._told if isinstance(part, Said)),
            calls=tuple(part for part in self._told if isinstance(part, Call)),
            thought="".join(part.text for part in self._told if isinstance(part, Thought)),
            thought_field=self._thought_field,
        )

    def _read(self, ids: Sequence[int]) -> str:
        text = self._detokenizer.feed(ids)
        self._pieces.append(text)
        return text

    def _tell(self, text: str) -> list[Part]:
        if not text:
            return []
        return self._keep([Said(text)] if self._parser is None else self._spaced(self._parser.feed(text)))

    def _spaced(self, parts: Sequence[Part]) -> list[Part]:
        return [told for part in parts for told in self._spacing.feed(part)]

    def _keep(self, parts: list[Part]) -> list[Part]:
        self._told += parts
        return parts


class _Spacing:
    """Leaves out the white space that only sets words, thoughts and calls apart."""

    def __init__(self) -> None:
        self._kind: type[Said | Thought] | None = None
        self._held = ""
        """White space that more of the same has to follow."""

        self._is_fresh = False
        """White space means nothing here."""

    def feed(self, part: Part) -> list[Part]:
        if isinstance(part, Call):
            self._held, self._is_fresh = "", True
            return [part]
        kind = type(part)
        if kind is not self._kind:
            self._is_fresh = self._is_fresh or self._kind is not None or kind is Thought
            self._kind, self._held = kind, ""
        text = self._held + part.text
        text = text.lstrip() if self._is_fresh else text
        body = text.rstrip()
        self._held = text[len(body) :]
        self._is_fresh = self._is_fresh and not body
        return [kind(body)] if body else []

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        return [Said(held)] if held and self._kind is Said else []
