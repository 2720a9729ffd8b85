"""How a model marks thoughts and tool calls in what it writes.

A tokenizer says it in its `response_template`, which transformers parses. For the many that have none, the common form
of Hermes and Qwen is known here: `<think>...</think>` and `<tool_call>{json}</tool_call>`, each where the chat template
speaks of it. What does not parse stays text, and the parser says what was wrong with it.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollfarm.chat import ChatTemplate, without_torch
from rollfarm.chat.messages import Call, Tool

with without_torch():
    from transformers.utils.chat_parsing import ResponseParser
    from transformers.utils.chat_parsing.response_templates import load_response_template

CONTENT, CALLS = "content", "tool_calls"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""What chat templates call the model's thoughts."""

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_WORDS = {"content": "text", "content_args": {"strip": False}, "repeats": True}
_COMMON: dict[str, dict[str, Any]] = {
    CONTENT: {**_WORDS, "join": ""},
    THOUGHTS[0]: {**_WORDS, "join": "", "open": "<think>", "close": "</think>"},
    CALLS: {**_WORDS, "open": "<tool_call>", "close": "</tool_call>"},
}


@dataclass(frozen=True, slots=True)
class Said:
    """More of the answer's words."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """More of what the model thought."""

    text: str


Part = Said | Thought | Call

NO_CALL = "A tool call is no object with a name and an object of arguments."

UNPARSED = (ValueError, KeyError, TypeError, RecursionError)
"""What parsing raises of a text that nobody foresaw; a model may nest brackets without end."""


class Format:
    """One model's way of writing."""

    def __init__(self, chat: ChatTemplate) -> None:
        tokenizer: Any = chat.tokenizer
        given: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
        fields = given["fields"] if given else _common_fields(str(tokenizer.chat_template))
        self.is_common = not given
        self.thought_field = next((name for name in THOUGHTS if name in fields), THOUGHTS[0])
        self.marks = () if given else tuple(mark for mark in MARKS if mark in str(tokenizer.chat_template))
        self._opening = _opening(chat)
        frame = given or {"start_anchor_pattern": r"\A"}
        without_calls = {name: field for name, field in fields.items() if name != CALLS}
        self.reads_calls = CALLS in fields
        """Whether it is known how the model calls tools."""

        self._is_plain = not given and not without_calls.keys() - {CONTENT}
        self._with_calls = load_response_template({**frame, "fields": fields})
        self._without_calls = load_response_template({**frame, "fields": without_calls})

    def is_words(self, text: str) -> bool:
        """Whether the reply is certainly neither thought nor call, so that it need not be parsed."""
        return self.is_common and not any(mark in text or mark in self._opening for mark in self.marks)

    def parser(self, tools: Sequence[Tool]) -> "Parser | None":
        """Reads one reply; calls are looked for where there are tools. None where it is text and nothing else."""
        if self._is_plain and not tools:
            return None
        spec = self._with_calls if tools else self._without_calls
        known: Any = list(tools)
        return Parser(ResponseParser(spec, self._opening, tools=known), is_common=self.is_common)


class Parser:
    """Reads one reply as it comes."""

    def __init__(self, parser: ResponseParser, *, is_common: bool) -> None:
        self._parser: ResponseParser | None = parser
        self._is_common = is_common
        self._raw = ""
        self._said = ""
        self.problem = ""
        """Why the first that looks like a tool call could not be read; empty where all could."""

    def feed(self, text: str) -> list[Part]:
        self._raw += text
        if self._parser is None:
            return self._say(text)
        try:
            return self._parts(self._parser.feed(text))
        except UNPARSED as error:
            return self._give_up(error)

    def finish(self) -> list[Part]:
        """What is left when no more text comes."""
        if self._parser is None:
            return []
        try:
            return self._parts(self._parser.finalize()[1], is_last=True)
        except UNPARSED as error:
            return self._give_up(error)

    def _parts(self, events: Sequence[dict[str, Any]], *, is_last: bool = False) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_close" and field == CALLS:
                parts += self._calls(event["value"], is_closed=not is_last)
            elif kind == "region_chunk" and field == CONTENT:
                parts += self._say(event["text"])
            elif kind == "region_chunk" and field in THOUGHTS:
                parts.append(Thought(event["text"]))
        return parts

    def _calls(self, value: Any, *, is_closed: bool) -> list[Part]:
        if not self._is_common:
            calls = [_call(item) for item in (value if isinstance(value, list) else [value])]
            self._note(NO_CALL if None in calls else "")
            return [call for call in calls if call]
        try:
            call = _call(json.loads(value))
            self._note("" if call else NO_CALL)
        except UNPARSED as error:
            call = None
            self._note(f"What is called is no JSON: {error}." if is_closed else "A tool call is not closed.")
        return [call] if call else self._say(f"<tool_call>{value}" + "</tool_call>" * is_closed)

    def _say(self, text: str) -> list[Part]:
        self._said += text
        return [Said(text)]

    def _note(self, problem: str) -> None:
        self.problem = self.problem or problem

    def _give_up(self, error: Exception) -> list[Part]:
        """Something did not parse: what was not told yet is text, and so is everything after."""
        self._note(f"What was written cannot be parsed: {error}.")
        self._parser = None
        return self._say(self._raw[self._raw.find(self._said) + len(self._said) :])


def _call(value: Any) -> Call | None:
    """The call that an object describes, bare or as OpenAI nests it. Raises ValueError where no JSON could carry it."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return None
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + told).encode()  # halves of characters
    return Call(f"call_{uuid.uuid4().hex[:24]}", name, told)


def _common_fields(template: str) -> dict[str, dict[str, Any]]:
    return {name: field for name, field in _COMMON.items() if field.get("open", "") in template}


def _opening(chat: ChatTemplate) -> str:
    """What the template writes of the assistant's message before the model does: it may begin a thought."""
    asked = [{"role": "user", "content": ""}]
    return chat.render(asked).removeprefix(chat.render(asked, prompt=False))
