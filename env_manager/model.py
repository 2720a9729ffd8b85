"""What env_manager needs of the model: tokenizer, image processor and context. Never weights, and so never torch."""

from typing import Any

from env_manager.rendering import Renderer, Rewriting
from rollfarm import chat, images
from rollfarm.config import ConfigError


def load(
    path: str, variables: dict[str, Any], context_tokens: int, rewriting: Rewriting = "segment"
) -> tuple[Renderer, int]:
    """The model's renderer, and most tokens of an episode: `context_tokens`, or the model's own where that is 0.

    Raises ConfigError with the remedy.
    """
    tokenizer, model_tokens = chat.load(path)
    if context_tokens > model_tokens:
        raise ConfigError(
            f"env_manager.context_tokens: {context_tokens} is more than the model's {model_tokens}. Lower it, or set 0."
        )
    renderer = Renderer(tokenizer, variables, rewriting=rewriting, eyes=images.load(path))
    return renderer, context_tokens or model_tokens
