"""Whether models mean the same by a token: those that judge the policy's tokens, and those that sampled them."""

from transformers import AutoConfig, AutoTokenizer

from rollfarm.config import ConfigError
from rollfarm.run import ModelConfig
from trainer.config import TrainerConfig


def vocabulary_of(path: str) -> int:
    """How many tokens the model of a folder or of the hub knows. Raises ConfigError."""
    try:
        return AutoConfig.from_pretrained(path).get_text_config().vocab_size
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} cannot be loaded: {error}") from None


def check_vocabularies(model: ModelConfig, config: TrainerConfig) -> None:
    """Raise ConfigError where a model that is asked about the policy's tokens gives them other meanings."""
    asked = {
        "kl.reference": config.kl.reference if config.needs_reference else "",
        "teacher.path": config.teacher.path if config.teacher else "",
        "critic.path": config.critic.path if config.critic else "",
    }
    for key, path in asked.items():
        if path and path != model.path and _meanings(path, key) != _meanings(model.path, key):
            raise ConfigError(
                f"trainer.{key}: {path!r} has another vocabulary than model.path ({model.path!r}), so it cannot say "
                "anything of the policy's tokens. Choose a model with the same tokenizer."
            )


def _meanings(path: str, key: str) -> dict[str, int]:
    try:
        return AutoTokenizer.from_pretrained(path).get_vocab()
    except (OSError, ValueError) as error:
        raise ConfigError(f"trainer.{key}: the tokenizer of {path!r} cannot be loaded: {error}") from None
