"""A data set's prompts, one answer each: JSONL, parquet, or a name on the hub. Rewards compare it with the reference.

Which record a task shows is a pure function of its index and of whether it is a validation's. Training goes through the
records in an order of its own in each epoch; validation through the held-out ones, in theirs.
"""

import asyncio
import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from env_manager.adapters.adapter import Adapter, package_missing
from rollfarm.config import ConfigError
from rollfarm.env import Observation, Step
from rollfarm.records import Record, Source, check_available, column, order, parts, read_records


class Dataset(Adapter):
    """One prompt. It pays nothing itself: the domain's rewards score the answer."""

    name = "dataset"
    package = "datasets"
    max_turns = 1

    def __init__(
        self,
        *,
        source: str,
        subset: str = "",
        split: str = "train",
        validation_source: str = "",
        validation_split: str = "",
        validation_share: Annotated[float, Field(ge=0, lt=1)] = 0.05,
        seed: int = 0,
        prompt: str = "prompt",
        answer: str | list[str] = "answer",
        system: str = "",
    ) -> None:
        """`source` is a file that ends in .jsonl or .parquet, or a name on the hub with its `subset` and `split`.

        Validation takes `validation_source` (a file) or `validation_split` (of the same name on the hub); without
        either, a random `validation_share` of the records, drawn by `seed`, which training never shows. With a share
        of 0 it shows what training shows. `seed` also orders each epoch.

        `prompt` is a column of text, or of messages: one user's, after a system's or not. `answer` is the column of the
        reference; several, or one that is not text, become one JSON object or value. "" has none. `system` goes before
        every prompt that brings no system message.
        """
        self._training = Source(source, subset, split)
        self._validation = self._apart(validation_source, validation_split)
        self._share = validation_share
        self._seed = seed
        self._prompt, self._answer = prompt, answer
        self._system = system

    @classmethod
    def is_installed(cls) -> bool:
        """JSONL needs no package, and what does is not known without settings."""
        return True

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError for settings that can never be played. Reads local files whole."""
        made = cls(**settings)
        for source in filter(None, (made._training, made._validation)):
            check_available(source)
            for number, record in enumerate(read_records(source) if source.is_file else ()):
                made._show(record, source, number)

    async def reset(self, seed: int, index: int) -> Observation:
        if not self._training.is_file and importlib.util.find_spec(self.package) is None:
            raise package_missing(type(self))
        # sample_buffer's seeds are odd in validation, and even in training.
        source, number = await asyncio.to_thread(self._find, index, validation=bool(seed % 2))
        return self._show(read_records(source)[number], source, number)

    async def step(self, action: str) -> Step:
        return Step(done=True)

    def _apart(self, source: str, split: str) -> Source | None:
        """Where validation has records of its own."""
        if source and split and source.endswith((".jsonl", ".parquet")):
            raise ConfigError("validation_split: a file is one split. Take it out.")
        if split and self._training.is_file:
            raise ConfigError(f"validation_split: {self._training.name} is one split. Give validation_source instead.")
        if not source and not split:
            return None
        return Source(source or self._training.name, self._training.subset, split or self._training.split)

    def _find(self, index: int, *, validation: bool) -> tuple[Source, int]:
        """The record of a task: where it is, and its number there."""
        if validation and self._validation is not None:
            return self._validation, index % len(read_records(self._validation))
        count = len(read_records(self._training))
        numbers, held = (range(count), ()) if self._validation else _parts(count, self._share, self._seed)
        if validation and held:
            return self._training, held[index % len(held)]
        epoch, position = divmod(index, len(numbers))
        return self._training, numbers[order(len(numbers), self._seed, epoch)[position]]

    def _show(self, record: Record, source: Source, number: int) -> Observation:
        system, text = self._words(column(record, self._prompt, source, number), source, number)
        return Observation(
            text,
            reference=self._reference(record, source, number),
            system=system or self._system,
            state_hash=f"{source.name}/{source.split}/{number}",
        )

    def _words(self, prompt: object, source: Source, number: int) -> tuple[str, str]:
        """The system's words, if any, and the user's."""
        if isinstance(prompt, str) and prompt.strip():
            return "", prompt
        messages = prompt if isinstance(prompt, list) else []
        said = [(each.get("role"), each.get("content")) for each in messages if isinstance(each, Mapping)]
        roles = [role for role, _ in said]
        if len(said) != len(messages) or roles not in (["user"], ["system", "user"]) or not _all_text(said):
            raise ConfigError(
                f"{source.name}, record {number + 1}: the column {self._prompt!r} is neither text nor messages of one "
                "user, after a system's or not. Give a column of one of these."
            )
        words = dict(said)
        return str(words.get("system", "")), str(words["user"])

    def _reference(self, record: Record, source: Source, number: int) -> str:
        if not self._answer:
            return ""
        if isinstance(self._answer, list):
            return _json({name: column(record, name, source, number) for name in self._answer}, source, number)
        value = column(record, self._answer, source, number)
        return value if isinstance(value, str) else _json(value, source, number)


@functools.lru_cache(32)
def _parts(count: int, share: float, seed: int) -> tuple[Sequence[int], Sequence[int]]:
    return parts(count, share, seed)


def _all_text(said: Sequence[tuple[object, object]]) -> bool:
    return all(isinstance(content, str) and content.strip() for _, content in said)


def _json(value: object, source: Source, number: int) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{source.name}, record {number + 1}: the answer cannot be written as JSON: {error}. Choose another column."
        ) from None
