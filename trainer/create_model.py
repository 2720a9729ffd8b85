"""Makes a tiny random decoder with a word-level tokenizer, for demos and tests that may download nothing.

`python -m trainer.create_model farm.toml` makes [model.create] at model.path unless a model is there already. The
folder appears whole or not at all, so that several processes may start at once.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from rollfarm.config import ConfigError, exit_bad_config, load_or_exit
from rollfarm.run import ModelConfig, TinyModelConfig
from trainer.config import TrainerRoot

PROG = "python -m trainer.create_model"

RECIPE = "rollfarm_create.json"
"""The settings that the model was made from, beside it."""

PAD, UNKNOWN, END = "<pad>", "<unk>", "<end>"
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<{{ message['role'] }}> {{ message['content'] }} <end> "
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
"""Each message is rendered alone, so that a longer conversation extends the tokens of a shorter one."""


def ensure_model(model: ModelConfig) -> bool:
    """Make the model where [model.create] asks for one and nothing is there. True when it was made.

    Raises ConfigError when there is neither a model nor a way to make it.
    """
    if not model.path:
        raise ConfigError("model.path: missing. Set it to a model's folder, or to its name on the hub.")
    if (Path(model.path) / "config.json").is_file():
        if model.create is not None:
            _check_recipe(Path(model.path), model.create)
        return False
    if model.create is None:
        if _may_be_hub_name(model.path):
            return False
        raise ConfigError(
            f"model.path: {model.path!r} holds no model (no config.json). Correct the path, or add [model.create] to "
            "make a tiny random one there."
        )
    if model.create.hidden_size % model.create.heads or (model.create.hidden_size // model.create.heads) % 2:
        raise ConfigError(
            f"model.create.heads: {model.create.heads} heads do not divide hidden_size {model.create.hidden_size} "
            "into parts of even width. Choose another number."
        )
    _create(Path(model.path), model.create)
    return True


def _check_recipe(path: Path, create: TinyModelConfig) -> None:
    """A model made from other settings than those asked for now is never used in silence."""
    recipe = path / RECIPE
    if recipe.is_file() and recipe.read_text() != create.model_dump_json():
        raise ConfigError(
            f"model.create: {path} was made with other settings. Remove it, or choose another model.path."
        )


def _may_be_hub_name(path: str) -> bool:
    """Whether the path reads like "owner/name" and nothing local says otherwise."""
    first, slash, rest = path.partition("/")
    return bool(slash and first and rest) and "/" not in rest and first not in (".", "..") and not Path(first).exists()


def _create(path: Path, create: TinyModelConfig) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"model.path: {path} is not empty and holds no model. Empty it, or choose another path.")
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        _write(work, create)
        work.chmod(0o755)
        _move_in(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _move_in(work: Path, path: Path) -> None:
    """Rename `work` to `path`; another process that was faster wins."""
    try:
        os.replace(work, path)  # noqa: PTH105 (Path.replace is the same; this says which error is meant)
    except OSError:
        if not (path / "config.json").is_file():
            raise


def _write(folder: Path, create: TinyModelConfig) -> None:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    special = [PAD, UNKNOWN, END, *(f"<{role}>" for role in ROLES)]
    words = [word for word in dict.fromkeys(create.words.split()) if word not in special]
    vocabulary = {word: index for index, word in enumerate([*special, *words])}

    words_model = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    words_model.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words_model,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[f"<{role}>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        model_max_length=create.context_tokens,
        clean_up_tokenization_spaces=False,
    )
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=create.hidden_size,
        intermediate_size=4 * create.hidden_size,
        num_hidden_layers=create.layers,
        num_attention_heads=create.heads,
        num_key_value_heads=create.heads,
        head_dim=create.hidden_size // create.heads,
        max_position_embeddings=create.context_tokens,
        tie_word_embeddings=False,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[END],
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(create.seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / RECIPE).write_text(create.model_dump_json())


def main(argv: list[str]) -> int:
    root = load_or_exit(TrainerRoot, argv, prog=PROG)
    try:
        made = ensure_model(root.model)
    except ConfigError as error:
        exit_bad_config(PROG, error)
    print(f"{root.model.path}: {'made' if made else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
