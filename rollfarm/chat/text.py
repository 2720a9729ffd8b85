"""From tokens to text as they come: no character is ever split, and a stop string is found where it ends."""

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes the beginning of a character to."""

MOST_HELD = 16
"""Tokens held back for a character to be completed; a longer run of broken ones is told as far as it is decided."""

LONGEST = 3
"""Bytes, thus tokens, that complete a character at most."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes token by token. The pieces, joined, are the text of the whole."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0
        """How many of the ids are told; they are kept because what follows may be decoded otherwise alone."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        self._ids += ids
        told, end = self._read, len(self._ids)
        text = self._beyond(end)
        if text.endswith(INCOMPLETE):
            text, end = self._decided(text) if end - told > MOST_HELD else ("", told)
        if not text:
            return ""
        self._ids, self._read = self._ids[told:], end - told
        return text

    def flush(self) -> str:
        """What is left when no more tokens come."""
        text = self._beyond(len(self._ids))
        self._ids, self._read = [], 0
        return text

    def _decided(self, text: str) -> tuple[str, int]:
        """Of the text that was not told, what no further token changes; and the tokens up to there."""
        latest = len(self._ids) - LONGEST
        for end in range(latest, latest - LONGEST - 1, -1):
            if text.startswith(head := self._beyond(end)):
                return head, end
        return "", self._read

    def _beyond(self, end: int) -> str:
        """The text that was not told, of the tokens before `end`."""
        if self._read == end:
            return ""
        before = self._decode(self._ids[: self._read]) if self._read else ""
        return self._decode(self._ids[:end])[len(before) :]


class StopFinder:
    """Looks for the first of some strings in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = ""
        """The one that was found; nothing is told after it."""

    def feed(self, piece: str) -> str:
        """The text that is certainly before any of them."""
        if self.found:
            return ""
        text = self._held + piece
        at, stop = min(((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=(-1, ""))
        if stop:
            self.found, self._held = stop, ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is left when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Most characters at the end of `text` with which `stop` begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
