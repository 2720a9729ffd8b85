"""Supervised warm start: the conversations of a file, and which of them each step learns from."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rollfarm.config import ConfigError
from rollfarm.records import Source
from trainer.rows import Row
from trainer.texts import Conversation, Item, Renderer


def load_conversations(path: Path) -> list[list[dict[str, Any]]]:
    """The conversations of a JSONL file. Raises ConfigError for a file or a line that is wrong."""
    conversations: list[list[dict[str, Any]]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                conversations.append(_messages(path, number, line))
    if not conversations:
        raise ConfigError(f"trainer.warm_start.data: {path} is empty. Give it a conversation on each line.")
    return conversations


def rows_of(renderer: Renderer, data: Path) -> list[Row]:
    """The rows of all conversations of the file. Raises ConfigError."""
    source = Source(str(data))
    items = [
        Item(source, number, (Conversation(messages),)) for number, messages in enumerate(load_conversations(data))
    ]
    return [row for item in items for rows in renderer.rows(item) for row in rows]


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
