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
from rollfarm.imports import end_without_looks, importing
from rollfarm.run import RECIPE, ModelConfig, TinyModelConfig
from trainer.config import TrainerRoot

PROG = "python -m trainer.create_model"

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

    Raises ConfigError when there is neither a model nor a way to make it, and when it was made from other settings.
    """
    model.check()
    model.refuse_outdated()
    if model.create is None or model.is_there:
        return False
    _create(Path(model.path), model.create)
    return True


def _create(path: Path, create: TinyModelConfig) -> None:
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
    with importing():
        import torch
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
        from transformers.utils import logging

        from trainer.backends.unwrapped import unwrapped

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
        head_dim=create.head_dim,
        max_position_embeddings=create.context_tokens,
        tie_word_embeddings=False,
        pad_token_id=vocabulary[PAD],
        eos_token_id=vocabulary[END],
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(create.seed)
        model = Qwen3ForCausalLM(config)
    with unwrapped():
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
    end_without_looks()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
