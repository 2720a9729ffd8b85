"""From an environment's words to tokens, exactly once.

A conversation is rendered by the model's own chat template when it begins. Later words of the environment are appended
as a suffix: what the template puts after an assistant's message, tokenised on its own. So the tokens of an episode only
ever grow, what the policy wrote is never tokenised again, and the prompt of the next turn begins with every token of
this one. Pure: equal words give equal tokens, so they are remembered.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError

from rollfarm import tokens
from rollfarm.config import ConfigError
from rollfarm.env import Observation
from rollfarm.v1 import trajectory_pb2

SENTINEL = "rollfarmCutsHere"
"""Stands for what the policy wrote, where a template has to be shown something."""

REMEMBERED = 4096
"""Renderings kept of each kind."""

SHORT = 1024
"""Characters up to which a rendering is worth keeping, and bytes up to which a decoding is."""

Message = dict[str, str]


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    def apply_chat_template(
        self, conversation: list[Message], *, add_generation_prompt: bool, tokenize: bool, **variables: Any
    ) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that the policy did not write."""

    author: "trajectory_pb2.Author.ValueType"
    """AUTHOR_SYSTEM or AUTHOR_ENVIRONMENT."""

    token_ids: bytes
    """[T] "<i4"; the last span of a rendering ends with the generation prompt."""

    text: str
    """The words alone, for people."""


class Renderer:
    """Renders for one model."""

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None) -> None:
        """`variables` go to the chat template. Raises ConfigError when the template cannot hold a conversation."""
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._opening = functools.lru_cache(REMEMBERED)(self._render_opening)
        self._suffix = functools.lru_cache(REMEMBERED)(self._render_suffix)
        self._decoded = functools.lru_cache(REMEMBERED)(self._decode)
        self.stop_token_ids = self._find_stop_tokens()

    def opening(self, shown: Observation) -> Sequence[Span]:
        """The prompt of the first turn."""
        short = len(shown.system) + len(shown.text) <= SHORT
        return (self._opening if short else self._render_opening)(shown.system, shown.text)

    def continuation(self, text: str, last_token: int) -> Span:
        """What follows the policy's words when the environment answers `text`.

        `last_token` is the last one that the policy wrote: when it ended its turn as the template does, the end is not
        repeated.
        """
        whole, without_end, end = (self._suffix if len(text) <= SHORT else self._render_suffix)(text)
        return without_end if last_token == end else whole

    def decode(self, token_ids: bytes) -> str:
        """The words of the policy, special tokens left out."""
        return (self._decoded if len(token_ids) <= SHORT else self._decode)(token_ids)

    def _render_opening(self, system: str, text: str) -> Sequence[Span]:
        messages = [{"role": "user", "content": text}]
        if not system:
            return (self._span(trajectory_pb2.AUTHOR_ENVIRONMENT, self._encode(self._render(messages)), text),)
        instructions = [{"role": "system", "content": system}]
        whole = self._encode(self._render(instructions + messages))
        cut = self._system_length(instructions, whole)
        if not cut:
            return (self._span(trajectory_pb2.AUTHOR_ENVIRONMENT, whole, f"{system}\n\n{text}"),)
        return (
            self._span(trajectory_pb2.AUTHOR_SYSTEM, whole[:cut], system),
            self._span(trajectory_pb2.AUTHOR_ENVIRONMENT, whole[cut:], text),
        )

    def _system_length(self, instructions: list[Message], whole: list[int]) -> int:
        """How many tokens of `whole` are instructions; 0 where the template does not keep them apart."""
        try:
            alone = self._encode(self._render(instructions, prompt=False))
        except TemplateError:
            return 0
        return len(alone) if whole[: len(alone)] == alone else 0

    def _render_suffix(self, text: str) -> tuple[Span, Span, int]:
        """The suffix, the same without its first token, and that token."""
        ids = self._encode(self._after_policy(text))
        author = trajectory_pb2.AUTHOR_ENVIRONMENT
        return self._span(author, ids, text), self._span(author, ids[1:], text), ids[0]

    def _after_policy(self, text: str) -> str:
        rendered = self._render(
            [
                {"role": "user", "content": ""},
                {"role": "assistant", "content": SENTINEL},
                {"role": "user", "content": text},
            ]
        )
        _, found, suffix = rendered.partition(SENTINEL)
        if not found or not suffix:
            raise ConfigError("The model's chat template leaves out what the assistant said. Give the model another.")
        return suffix

    def _find_stop_tokens(self) -> tuple[int, ...]:
        """The tokenizer's end of sequence, and what the template ends an assistant's message with."""
        end = self._encode(self._after_policy(""))[0]
        stops = {self._tokenizer.eos_token_id, end if end in self._tokenizer.all_special_ids else None}
        return tuple(sorted(token for token in stops if token is not None))

    def _render(self, messages: list[Message], *, prompt: bool = True) -> str:
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=prompt, tokenize=False, **self._variables
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, token_ids: bytes) -> str:
        return self._tokenizer.decode(tokens.unpack_ids(token_ids).tolist(), skip_special_tokens=True)

    @staticmethod
    def _span(author: "trajectory_pb2.Author.ValueType", ids: Sequence[int], text: str) -> Span:
        return Span(author, tokens.pack_ids(ids), text)
