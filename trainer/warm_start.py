"""Supervised warm start: recorded conversations to rows, with a mask on what the assistant said.

The mask is found by rendering: the chat template's tokens of the messages up to the assistant's turn have to be a
prefix of the tokens that include it, which every template satisfies that renders each message alone.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollfarm.config import ConfigError
from trainer.rows import Row


def load_conversations(path: Path) -> list[list[dict[str, Any]]]:
    """The conversations of a JSONL file. Raises ConfigError for a file or a line that is wrong."""
    conversations: list[list[dict[str, Any]]] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            conversations.append(_messages(path, number, line))
    if not conversations:
        raise ConfigError(f"trainer.warm_start.data: {path} is empty. Give it a conversation on each line.")
    return conversations


def conversation_row(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> Row:
    """One conversation as tokens; the mask covers what each assistant turn adds after its generation prompt.

    Raises ConfigError when the template does not extend: then a mask would be guessed.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:index], add_generation_prompt=True)
        whole = _render(tokenizer, messages[: index + 1], add_generation_prompt=False)
        if prompt[: len(ids)] != ids or whole[: len(prompt)] != prompt:
            raise ConfigError(
                "trainer.warm_start: the model's chat template rewrites earlier turns when a conversation goes on. "
                "Give the tokenizer a template that only appends."
            )
        mask += [False] * (len(prompt) - len(ids)) + [True] * (len(whole) - len(prompt))
        ids = whole
    return Row(np.array(ids, np.int32), np.array(mask, np.bool_))


def batches(rows: Sequence[Row], *, batch_size: int, steps: int, seed: int) -> Iterator[list[Row]]:
    """`steps` batches, in an order that is a pure function of the seed: every row once before any row twice."""
    shuffle = random.Random(seed)
    queue: list[Row] = []
    for _ in range(steps):
        while len(queue) < min(batch_size, len(rows)):
            fresh = list(rows)
            shuffle.shuffle(fresh)
            queue += fresh
        yield queue[:batch_size]
        queue = queue[batch_size:]


def _render(tokenizer: Any, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _messages(path: Path, number: int, line: str) -> list[dict[str, Any]]:
    where = f"trainer.warm_start.data: {path}, line {number}"
    try:
        messages = json.loads(line)["messages"]
        roles = [message["role"] for message in messages if isinstance(message["content"], str)]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: {error!r}. Each line is " + '{"messages": [{"role", "content"}, ...]}.') from None
    if len(roles) != len(messages) or "assistant" not in roles[1:]:
        raise ConfigError(f"{where}: there has to be text in each message, and an assistant's turn after another's.")
    return messages
