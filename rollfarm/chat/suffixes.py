"""What a chat template puts after what the policy wrote, and whether it rewrote anything before that.

A conversation that goes on is shown as the tokens so far and then a suffix, tokenised alone: nothing that was said is
ever tokenised again. This holds only where the template renders what was said before as it did then, so that is looked
at each time: the rendering of the whole has to begin with the prompt that the policy saw, and go on with what it wrote.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from rollfarm.chat import SENTINEL, ChatTemplate
from rollfarm.chat.messages import ASSISTANT, USER, Call, Message, Tool

EXCERPT = 60
"""Characters of a rendering that a difference quotes."""


class Rewritten(Exception):
    """The template renders otherwise what was said; says how."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A prompt as the template rendered it: as much of it as tells whether another text begins with it."""

    length: int
    """Characters."""

    digest: bytes
    """Of them."""

    @classmethod
    def of(cls, text: str) -> "Rendering":
        return cls(len(text), _digest(text))

    def begins(self, text: str) -> bool:
        return _digest(text[: self.length]) == self.digest


def _digest(text: str) -> bytes:
    """By sha256, which long texts pass through in half the time."""
    return sha256(text.encode()).digest()


NOTHING = Rendering.of("")


class Suffixes:
    """Finds suffixes for one model."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self._stop_texts = [chat.decode([token]) for token in chat.stop_token_ids]

    def after(
        self, said: Message, number: int, *, prompt: Rendering, rendered: str, recorded: Callable[[], str]
    ) -> str:
        """What follows the words of `said`, which the policy wrote as message `number`. Raises Rewritten.

        `prompt` is what it answered; `rendered` is how the template renders the conversation once more messages
        follow, and `recorded` how it does as long as none do.
        """
        if not prompt.begins(rendered):
            raise Rewritten(f"The model's chat template renders what message {number} answered otherwise after it.")
        plain = said.content + self._chat.end
        if not said.calls and not said.thought and rendered.startswith(plain, prompt.length):
            return rendered[prompt.length + len(said.content) :]
        alone = recorded()
        if not alone.startswith(rendered[: prompt.length]):
            raise Rewritten(f"The model's chat template renders what message {number} answered otherwise after it.")
        written = alone[prompt.length :]
        _check_written(said, written, number)
        if not rendered.startswith(alone):
            raise Rewritten(
                f"The model's chat template renders the first {number} messages otherwise once more follow: "
                f"{_difference(alone, rendered)}."
            )
        return self._end(written) + rendered[len(alone) :]

    def after_stand_in(self, calls: Sequence[Call], new: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """What follows the policy's words when `new` answers them, whatever was said before.

        The template is shown a stand-in for those words, with as many calls. Raises Rewritten, and what it raises.
        """
        stand_ins = [replace(call, arguments="{}") for call in calls]
        if stand_ins:
            stand_ins[-1] = replace(stand_ins[-1], arguments=json.dumps({SENTINEL: ""}))
        said = Message(ASSISTANT, "" if stand_ins else SENTINEL, tuple(stand_ins))
        rendered = self._chat.render([each.shown for each in (Message(USER), said, *new)], tools=tools or None)
        _, found, suffix = rendered.partition(SENTINEL)
        end = suffix.find(self._chat.end) if stand_ins else 0
        if not found or end < 0 or (stand_ins and not self._chat.end):
            raise Rewritten("The model's chat template leaves out what the assistant said, or does not end it.")
        return suffix[end:]

    def _end(self, written: str) -> str:
        """How the template ended the assistant's message. Raises Rewritten where that cannot be told."""
        if written.endswith(self._chat.end):
            return self._chat.end
        cut = max((written.rfind(stop) for stop in self._stop_texts), default=-1)
        if cut < 0:
            raise Rewritten("The model's chat template ends the assistant's message in a way of its own.")
        return written[cut:]


def _check_written(message: Message, written: str, number: int) -> None:
    """Raise Rewritten unless the template rendered all of what the policy wrote, in order."""
    at = 0
    parts = [("thoughts", message.thought), ("words", message.content)]
    for what, part in [*parts, *(("tool calls", call.name) for call in message.calls)]:
        found = written.find(part.strip(), at)
        if found < 0:
            raise Rewritten(f"The model's chat template leaves out or changes the {what} of message {number}.")
        at = found + len(part.strip())


def _difference(one: str, other: str) -> str:
    at = next((i for i, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs), len(other))
    begin = max(0, at - EXCERPT // 3)
    return f"{other[begin : begin + EXCERPT]!r} instead of {one[begin : begin + EXCERPT]!r} at character {at + 1}"
