"""A model's own tokenizer and chat template: from messages to text, from text to tokens and back.

Whoever renders conversations shares this: env_manager for environments, llm_proxy for agents. It needs transformers,
which is imported when a tokenizer is loaded, and never torch.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, Protocol

from rollfarm.config import ConfigError
from rollfarm.imports import importing

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

SENTINEL = "rollfarmCutsHere"
"""Stands for what the policy wrote, where a template has to be shown something."""

LONG = 65_536
"""Characters from which on a text is encoded such that other threads go on meanwhile, which costs a little."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...

    def get_chat_template(self, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


def load(path: str) -> tuple[Any, int]:
    """The tokenizer of the model at `path`, and the model's context in tokens. Raises ConfigError with the remedy."""
    with without_torch(), importing():
        from transformers import AutoConfig, AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        context_tokens = AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"model.path: no usable model at {path!r}: {str(error).splitlines()[0]} Correct the path; where "
            "[model.create] shall make the model, start `rollfarm up`, or run `python -m trainer.create_model` first."
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(f"model.path: the tokenizer at {path!r} has no chat template. Add a chat_template.jinja.")
    return tokenizer, context_tokens


class ChatTemplate:
    """A tokenizer with the variables of its chat template."""

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None) -> None:
        """Raises ConfigError when the template cannot hold a conversation."""
        self.tokenizer = tokenizer
        self._fast: Any = getattr(tokenizer, "backend_tokenizer", None)
        """What transformers' own encode and decode come to, at half the cost."""

        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        tidies = getattr(tokenizer, "clean_up_tokenization_spaces", True)
        self._decoder: Any = tokenizer if tidies or self._fast is None else self._fast
        self._variables = {"documents": None, **tokenizer.special_tokens_map, **(variables or {})}
        self._compiled = lru_cache(2)(self._compile)
        self.stop_token_ids = self._find_stop_tokens()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: bool = True,
    ) -> str:
        """The conversation as text; with `prompt` it ends where the assistant begins. Raises jinja2.TemplateError."""
        template = self._compiled(tools is not None)
        return template.render(messages=messages, tools=tools, add_generation_prompt=prompt, **self._variables)

    def encode(self, text: str) -> list[int]:
        """The text's tokens, and no others."""
        if self._fast is not None and len(text) > LONG:
            return self._fast.encode_batch([text], add_special_tokens=False)[0].ids
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The tokens' text."""
        return self._decoder.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def after_policy(self, text: str) -> str:
        """What follows the policy's words when `text` answers them, up to where the policy goes on."""
        conversation = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": SENTINEL},
            {"role": "user", "content": text},
        ]
        _, found, suffix = self.render(conversation).partition(SENTINEL)
        if not found or not suffix:
            raise ConfigError("The model's chat template leaves out what the assistant said. Give the model another.")
        return suffix

    @cached_property
    def end(self) -> str:
        """What the template puts after the assistant's last words."""
        conversation = [{"role": "user", "content": ""}, {"role": "assistant", "content": SENTINEL}]
        return self.render(conversation, prompt=False).partition(SENTINEL)[2]

    def _compile(self, has_tools: bool) -> Any:
        """The template for a conversation, as transformers' own apply_chat_template compiles it."""
        from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template

        template: Any = compile_template(self.tokenizer.get_chat_template(tools=[] if has_tools else None))
        # Copied at each rendering, and a chain of maps takes long to copy.
        template.globals = dict(template.globals)
        template.environment.getattr = _quick_getattr(template.environment)
        return template

    def _find_stop_tokens(self) -> tuple[int, ...]:
        """The tokenizer's end of sequence, and what the template ends an assistant's message with."""
        end = self.encode(self.after_policy(""))[0]
        stops = {self.tokenizer.eos_token_id, end if end in self.tokenizer.all_special_ids else None}
        return tuple(sorted(token for token in stops if token is not None))


def _quick_getattr(environment: Any) -> Callable[[Any, str], Any]:
    """How templates read `message.role`: the sandbox's own way looks for an attribute first, and fails dearly."""
    sandboxed = type(environment).getattr

    def read(owner: Any, name: str) -> Any:
        if type(owner) is not dict or name in _OF_DICTS:
            return sandboxed(environment, owner, name)
        return owner[name] if name in owner else environment.undefined(obj=owner, name=name)

    return read


_OF_DICTS = frozenset(dir(dict))


@contextmanager
def without_torch() -> Iterator[None]:
    """Let transformers believe that torch is not installed: it costs 260 MB and three seconds, and is not used."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["torch"]
