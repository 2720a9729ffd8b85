"""What a request shows the model, and how one conversation is told from another.

Two conversations are equal when what the model is shown of them is: a digest runs along the messages, so that a history
is found by its digest, however long it is. What the model thought does not count: agents leave it out as they please.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from llm_proxy.front import jsons
from rollfarm.chat.messages import ASSISTANT, Message, Tool
from rollfarm.errors import InvalidArgument


def repeats(message: Message, other: Message) -> bool:
    """Whether one says the same as the other to the letter, which is quicker to see than that they are identical."""
    return (message.role, message.content, message.calls, message.call_id) == (
        other.role,
        other.content,
        other.calls,
        other.call_id,
    )


def identity(message: Message) -> bytes:
    """Equal for messages that say the same; how arguments are spaced and ordered says nothing."""
    calls = b""
    if message.calls:
        calls = jsons.canonical([[call.call_id, call.name, call.parsed] for call in message.calls])
    head = f"{message.role} {len(calls)} {len(message.call_id)} {message.call_id}{message.content}"
    return calls + head.encode(errors="surrogatepass")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request shows the model."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    def __post_init__(self) -> None:
        if not self.messages:
            raise InvalidArgument("There are no messages.", field="messages")
        if self.messages[-1].role == ASSISTANT:
            raise InvalidArgument(
                "The last message is the assistant's, and continuing it is not supported.", field="messages"
            )

    @property
    def start(self) -> bytes:
        """Where the digests begin: the tools are part of the history."""
        return _digest(jsons.canonical(self.tools)) if self.tools else NO_TOOLS


def digests(start: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Of the history that begins as `start` says, up to and with each message."""
    found: list[bytes] = []
    for message in messages:
        start = _digest(start + identity(message))
        found.append(start)
    return found


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


NO_TOOLS = _digest(b"")
"""Where a history without tools begins."""
