"""Records to rows: what the policy is shown, and what it is to have said.

A conversation becomes the tokens that an engine would see and sample: each prompt as the model's chat template renders
it, then the assistant's words up to the token that ends them, tokenised alone. As long as the template renders what was
said before as it did then, the conversation is one row; where it does not, the answer begins a row of its own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer

from rollfarm.chat import ChatTemplate
from rollfarm.config import ConfigError
from rollfarm.records import Record, Source, column
from trainer.rows import Row

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions that the assistant may call, as chat templates take them."""

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, of which some are the policy's to learn."""

    messages: Messages

    first: int = 0
    """The assistant's messages from this number on are learnt."""

    tools: Tools | None = None
    """What the template shows before the messages; None where there are none."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Plain text that goes on; no chat template is asked."""

    prompt: str
    answer: str
    """Followed by the token that ends a sequence."""


Text = Conversation | Completion


@dataclass(frozen=True, slots=True)
class Item:
    """A record, read and not yet tokenised."""

    source: Source
    number: int
    """Of the record, from 0."""

    texts: tuple[Text, ...]
    """One; of a preference two, what is chosen and what is rejected."""

    @property
    def where(self) -> str:
        """For messages."""
        return where(self.source, self.number)


def where(source: Source, number: int) -> str:
    """Which record, for messages."""
    return f"{source.name}, record {number + 1}"


def demonstration(record: Record, source: Source, number: int) -> Item:
    """{"messages": [{"role", "content"}, ...]}, or {"prompt", "completion"} of two texts or two lists of messages; with
    messages perhaps "tools".

    Raises ConfigError, which names the record.
    """
    place = where(source, number)
    tools = _tools(record.get("tools"), place)
    if "messages" not in record and "completion" in record:
        prompt = column(record, "prompt", source, number)
        answer = column(record, "completion", source, number)
        return Item(source, number, (_answered(prompt, answer, tools, place),))
    messages = _messages(column(record, "messages", source, number), place)
    if all(message["role"] != ASSISTANT for message in messages):
        raise ConfigError(f"{place}: the assistant says nothing. Remove the record.")
    return Item(source, number, (Conversation(messages, tools=tools),))


def preference(record: Record, source: Source, number: int) -> Item:
    """{"prompt", "chosen", "rejected"}, all of them texts, or the prompt a list of messages and each answer a list or
    the assistant's words; with messages perhaps "tools". Raises ConfigError, which names the record."""
    place = where(source, number)
    tools = _tools(record.get("tools"), place)
    prompt = column(record, "prompt", source, number)
    chosen, rejected = (
        _answered(prompt, column(record, name, source, number), tools, f"{place}: {name}")
        for name in ("chosen", "rejected")
    )
    return Item(source, number, (chosen, rejected))


def _answered(prompt: object, answer: object, tools: Tools | None, place: str) -> Text:
    if isinstance(prompt, str):
        if tools:
            raise ConfigError(f"{place}: there are tools, and the prompt is plain text. Give a list of messages.")
        if not isinstance(answer, str):
            raise ConfigError(f"{place}: the prompt is a text and the answer is not. Give both alike.")
        if not answer.strip():
            raise ConfigError(f"{place}: the answer is empty. Remove the record.")
        return Completion(prompt, answer)
    before = _messages(prompt, place)
    said = [{"role": ASSISTANT, "content": answer}] if isinstance(answer, str) else answer
    after = _messages(said, place)
    if all(message["role"] != ASSISTANT for message in after):
        raise ConfigError(f"{place}: the answer has no message of the assistant. Remove the record.")
    return Conversation([*before, *after], first=len(before), tools=tools)


def _tools(value: object, place: str) -> Tools | None:
    """A list, or its JSON, as tables often have it."""
    try:
        found = json.loads(value) if isinstance(value, str) and value else value
    except ValueError as error:
        raise ConfigError(f"{place}: tools is no JSON: {error}. Correct the record.") from None
    if not found:
        return None
    if not isinstance(found, Sequence) or not all(isinstance(each, Mapping) for each in found):
        raise ConfigError(f"{place}: tools is no list of objects. Correct the record.")
    return [_given(each) for each in found]


def _given(value: Any) -> Any:
    """Without what is null: in a table, every row has the keys of all others."""
    if isinstance(value, Mapping):
        return {key: _given(inner) for key, inner in value.items() if inner is not None}
    return [_given(inner) for inner in value] if isinstance(value, list) else value


def _messages(value: object, place: str) -> Messages:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{place}: {type(value).__name__} in place of a list of messages. Correct the record.")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(
                f'{place}: message {number} has no role. Each message is {{"role", "content"}}. Correct the record.'
            )
        content = message.get("content")
        if not isinstance(content, str) and not message.get("tool_calls"):
            raise ConfigError(f"{place}: message {number} has no text. Correct the record.")
        if message["role"] == ASSISTANT and not (content or "").strip() and not message.get("tool_calls"):
            raise ConfigError(f"{place}: message {number}, the assistant's, is empty. Remove the record.")
    # Templates ask for the content itself even where it is null, and of other keys whether they are there.
    return [{**_given(message), "content": message.get("content")} for message in value]


class Renderer:
    """Texts to rows, as one model has them."""

    def __init__(self, path: str) -> None:
        """`path` is the model's. Raises ConfigError."""
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
            self.context_tokens: int = AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"model.path: {path!r} cannot be loaded: {error}") from None
        self._path = path

    def rows(self, item: Item) -> tuple[list[Row], ...]:
        """For each of its texts the rows, at least one. Raises ConfigError where the template cannot show it."""
        try:
            return tuple(self._rows(text) for text in item.texts)
        except ConfigError as error:
            raise ConfigError(f"{item.where}: {error}") from None
        # Templates are programs: whatever they do with a value that they did not expect.
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{item.where}: the model's chat template cannot show it: {error!r}. Correct the record, remove it, or "
                "give the tokenizer another template."
            ) from None

    def _rows(self, text: Text) -> list[Row]:
        return [self._completed(text)] if isinstance(text, Completion) else self._conversed(text)

    def _completed(self, text: Completion) -> Row:
        end = self._tokenizer.eos_token_id
        given = self._tokenizer.encode(text.prompt, add_special_tokens=True)
        if given and given[-1] == end:
            del given[-1]
        said = self._tokenizer.encode(text.answer, add_special_tokens=False) + ([] if end is None else [end])
        return _row([(given, False), (said, True)])

    def _conversed(self, text: Conversation) -> list[Row]:
        rows: list[Row] = []
        parts: list[tuple[list[int], bool]] = []
        shown = ""
        for number, message in enumerate(text.messages):
            if message["role"] != ASSISTANT or number < text.first:
                continue
            prompt = self._chat.render(text.messages[:number], tools=text.tools)
            whole = self._chat.render(text.messages[: number + 1], tools=text.tools, prompt=False)
            if not whole.startswith(prompt):
                raise ConfigError(
                    f"the model's chat template does not render message {number + 1} after the prompt that asks for "
                    "it, so what is the assistant's cannot be told. Give the tokenizer another template."
                )
            if parts and not prompt.startswith(shown):
                rows.append(_row(parts))
                parts, shown = [], ""
            said = self._said(whole[len(prompt) :])
            parts += [(self._chat.encode(prompt[len(shown) :]), False), (self._chat.encode(said), True)]
            shown = prompt + said
        return [*rows, _row(parts)]

    def _said(self, text: str) -> str:
        """What the policy itself writes of it: up to the token that ends its turn, where the template has one."""
        ends = [text.rfind(stop) + len(stop) for stop in self._stops if stop in text]
        return text[: max(ends, default=len(text))]

    @cached_property
    def _chat(self) -> ChatTemplate:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer at {self._path!r} has no chat template. Add a chat_template.jinja, or give texts as "
                "prompt and completion."
            )
        return ChatTemplate(self._tokenizer)

    @cached_property
    def _stops(self) -> list[str]:
        return [self._chat.decode([token]) for token in self._chat.stop_token_ids]


def _row(parts: Sequence[tuple[list[int], bool]]) -> Row:
    if not parts[0][0]:
        raise ConfigError("nothing comes before the answer, so nothing predicts its first token. Give it a prompt.")
    ids = np.concatenate([np.array(ids, np.int32) for ids, _ in parts])
    return Row(ids, np.concatenate([np.full(len(ids), is_said) for ids, is_said in parts]))
