"""What env_manager needs of the model: its tokenizer and its context. Never its weights, and so never torch."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from env_manager.rendering import Renderer
from rollfarm.config import ConfigError

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def load(path: str, variables: dict[str, Any], context_tokens: int) -> tuple[Renderer, int]:
    """The model's renderer, and most tokens of an episode: `context_tokens`, or the model's own where that is 0.

    Raises ConfigError with the remedy.
    """
    with _without_torch():
        from transformers import AutoConfig, AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model_tokens = AutoConfig.from_pretrained(path).get_text_config().max_position_embeddings
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"model.path: no usable model at {path!r}: {str(error).splitlines()[0]} Correct the path; where "
            "[model.create] shall make the model, start `rollfarm up`, or run `python -m trainer.create_model` first."
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(f"model.path: the tokenizer at {path!r} has no chat template. Add a chat_template.jinja.")
    if context_tokens > model_tokens:
        raise ConfigError(
            f"env_manager.context_tokens: {context_tokens} is more than the model's {model_tokens}. Lower it, or set 0."
        )
    return Renderer(tokenizer, variables), context_tokens or model_tokens


@contextmanager
def _without_torch() -> Iterator[None]:
    """Let transformers believe that torch is not installed: it costs 260 MB and three seconds, and is not used."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["torch"]
