"""Anthropic's messages: a request's JSON to what is asked, and answers to their JSON. Pure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llm_proxy.front import errors, jsons
from llm_proxy.front.door import Answer, Ask, News
from llm_proxy.front.errors import Refusal
from llm_proxy.front.fields import Fields
from llm_proxy.front.ids import unique
from llm_proxy.front.messages import Conversation
from llm_proxy.front.openai import CANNOT_ENFORCE, read_stops
from llm_proxy.front.sampling import Wishes
from rollfarm import tokens
from rollfarm.chat.formats import Part, Said, Thought
from rollfarm.chat.messages import ASSISTANT, SYSTEM, TOOL, USER, Call, Message, Tool
from rollfarm.errors import InvalidArgument
from rollfarm.v1 import trajectory_pb2

# fmt: off
KNOWN = frozenset({
    "model", "messages", "system", "max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream",
    "tools", "tool_choice", "metadata", "service_tier", "cache_control",
})
# fmt: on
NEUTRAL: dict[str, Any] = {"thinking": {"type": "disabled"}}
COUNTED = frozenset(["model", "messages", "system", "tools", "tool_choice", "cache_control"])
"""What counting tokens takes."""


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A message that is asked for."""

    model: str
    ask: Ask


def read(body: Fields) -> MessagesRequest:
    """Raises InvalidArgument with the field."""
    body.accept(KNOWN, NEUTRAL)
    conversation, may_call = _conversation(body)
    most = body.integer("max_tokens", 1)
    if most is None:
        raise body.wrong("max_tokens", "an integer")
    wishes = Wishes(
        max_tokens=most,
        temperature=body.number("temperature", 0, 1),
        top_p=body.number("top_p", 0, 1),
        top_k=body.integer("top_k", 0),
    )
    stops = read_stops(body, "stop_sequences")
    ask = Ask(conversation, wishes, stops=stops, finds_calls=may_call, streams=body.flag("stream"))
    return MessagesRequest(body.text("model"), ask)


def read_count(body: Fields) -> tuple[str, Conversation]:
    """The model and what is to be counted. Raises InvalidArgument with the field."""
    body.accept(COUNTED, NEUTRAL)
    return body.text("model"), _conversation(body)[0]


def _conversation(body: Fields) -> tuple[Conversation, bool]:
    """What the model is shown, and whether it may call the tools."""
    system = _text(body, "system")
    messages = [Message(SYSTEM, system)] if system else []
    for item in body.items("messages"):
        messages += _messages(item)
    choice = body.inner("tool_choice")
    kind = choice.text("type") if choice else "auto"
    if kind not in ("auto", "none") or (choice and choice.flag("disable_parallel_tool_use")):
        raise InvalidArgument(f"{CANNOT_ENFORCE}: only auto and none are known.", field="tool_choice")
    return Conversation(tuple(messages), tuple(_tool(item) for item in body.items("tools"))), kind == "auto"


def _tool(item: Fields) -> Tool:
    """In OpenAI's form, which is what chat templates take."""
    if item.text("type", "custom") != "custom":
        raise InvalidArgument(f"Anthropic's own tool {item.text('type')!r} is not supported.", field=item.path("type"))
    schema = item.inner("input_schema")
    if schema is None:
        raise item.wrong("input_schema", "an object")
    function = {"name": item.text("name"), "description": item.text("description", ""), "parameters": schema.table}
    return {"type": "function", "function": function}


def _messages(item: Fields) -> list[Message]:
    """One of Anthropic's messages as ours: each tool's result is a message of its own."""
    role = item.text("role")
    if role not in (USER, ASSISTANT):
        raise item.wrong("role", f"{USER} or {ASSISTANT}")
    if not isinstance(item.table.get("content"), list):
        return [Message(role, item.text("content"))]
    blocks = list(item.items("content"))
    return [_assistant(blocks)] if role == ASSISTANT else _user(blocks)


def _assistant(blocks: list[Fields]) -> Message:
    words: list[str] = []
    thoughts: list[str] = []
    calls: list[Call] = []
    for block in blocks:
        kind = block.text("type")
        if kind == "text":
            words.append(block.text("text"))
        elif kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif kind == "tool_use":
            given = block.inner("input")
            arguments = json.dumps(given.table if given else {}, ensure_ascii=False)
            calls.append(Call(block.text("id"), block.text("name"), arguments))
        else:
            raise _unsupported(block)
    return Message(ASSISTANT, "".join(words), tuple(calls), thought="".join(thoughts))


def _user(blocks: list[Fields]) -> list[Message]:
    found: list[Message] = []
    words: list[str] = []
    for block in blocks:
        kind = block.text("type")
        if kind == "text":
            words.append(block.text("text"))
        elif kind == "tool_result":
            found += _said(words)
            found.append(Message(TOOL, _text(block, "content"), call_id=block.text("tool_use_id")))
        else:
            raise _unsupported(block)
    return found + _said(words)


def _said(words: list[str]) -> list[Message]:
    """The words as the user's message, if there are any; they are taken out."""
    text = "\n".join(words)
    words.clear()
    return [Message(USER, text)] if text else []


def _text(item: Fields, name: str) -> str:
    """A text, or blocks of text joined by line ends."""
    if not isinstance(item.table.get(name), list):
        return item.text(name, "")
    parts: list[str] = []
    for block in item.items(name):
        if block.text("type") != "text":
            raise _unsupported(block)
        parts.append(block.text("text"))
    return "\n".join(parts)


def _unsupported(block: Fields) -> InvalidArgument:
    return InvalidArgument(f"{block.text('type')!r} is not supported here.", field=block.path("type"))


class MessageWriter:
    """Writes the answer to one request."""

    def __init__(self, request: MessagesRequest, prompt_tokens: int) -> None:
        self._frame = {
            "id": f"msg_{unique()}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
        }
        self._prompt_tokens = prompt_tokens
        self._at = -1
        self._open: type[Part] | None = None

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer in one piece."""
        (answer,) = answers
        message = answer.message
        blocks: list[dict[str, Any]] = []
        if message.thought:
            blocks.append({"type": "thinking", "thinking": message.thought, "signature": ""})
        if message.content or not message.calls:
            blocks.append({"type": "text", "text": message.content})
        blocks += [_use(call, call.parsed) for call in message.calls]
        made = tokens.token_count(answer.turn.token_ids)
        return {**self._frame, "content": blocks, **_ended(answer), "usage": self._usage(made)}

    def begin(self) -> bytes:
        """The beginning of a stream."""
        empty: dict[str, Any] = {
            **self._frame,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(0),
        }
        return event({"type": "message_start", "message": empty})

    def news(self, news: News) -> bytes:
        """What is new, as a stream tells it."""
        return b"".join(map(event, self._events(news)))

    def end(self) -> bytes:
        return event({"type": "message_stop"})

    def failed(self, error: Refusal) -> bytes:
        return event(errors.body("anthropic", error))

    def _events(self, news: News) -> Iterator[dict[str, Any]]:
        for part in news.parts:
            if isinstance(part, Call) or self._open is not type(part):
                yield from self._begin_block(part)
            yield {"type": "content_block_delta", "index": self._at, "delta": _delta(part)}
        if news.answer is not None:
            if self._at < 0:
                yield from self._begin_block(Said(""))
            yield from self._end_block()
            made = tokens.token_count(news.answer.turn.token_ids)
            yield {"type": "message_delta", "delta": _ended(news.answer), "usage": self._usage(made)}

    def _begin_block(self, part: Part) -> Iterator[dict[str, Any]]:
        yield from self._end_block()
        self._at, self._open = self._at + 1, type(part)
        block: dict[str, Any] = {"type": "text", "text": ""}
        if isinstance(part, Thought):
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif isinstance(part, Call):
            block = _use(part, {})
        yield {"type": "content_block_start", "index": self._at, "content_block": block}

    def _end_block(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._at}

    def _usage(self, made: int) -> dict[str, int]:
        return {"input_tokens": self._prompt_tokens, "output_tokens": made}


def event(told: dict[str, Any]) -> bytes:
    """As a stream carries it."""
    return b"event: " + told["type"].encode() + b"\ndata: " + jsons.write(told) + b"\n\n"


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, Said):
        return {"type": "text_delta", "text": part.text}
    if isinstance(part, Thought):
        return {"type": "thinking_delta", "thinking": part.text}
    return {"type": "input_json_delta", "partial_json": part.arguments}


def _use(call: Call, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": given}


def _ended(answer: Answer) -> dict[str, Any]:
    if answer.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    if answer.turn.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if answer.message.calls else "end_turn", "stop_sequence": None}
