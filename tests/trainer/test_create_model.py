import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollfarm.config import ConfigError
from rollfarm.run import ModelConfig, TinyModelConfig
from trainer.create_model import ensure_model

CREATE = TinyModelConfig(words="left right 0 1", hidden_size=16, layers=1, context_tokens=32)


def test_text_makes_the_round_trip_and_unknown_words_are_marked(model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)

    assert tokenizer.decode(tokenizer.encode("go left 3 <end>")) == "go left 3 <end>"
    assert tokenizer.decode(tokenizer.encode("go home")) == "go <unk>"
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<end>"


def test_a_longer_conversation_extends_the_tokens_of_a_shorter_one(model_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    messages = [{"role": "user", "content": "ice 0"}, {"role": "assistant", "content": "left"}]

    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)

    assert prompt.split() == ["<user>", "ice", "0", "<end>", "<assistant>"]
    assert whole.split() == [*prompt.split(), "left", "<end>"]


def test_a_model_is_made_once_and_alike_for_a_seed(tmp_path: Path) -> None:
    first, again = (ModelConfig(path=str(tmp_path / name), create=CREATE) for name in ("first", "again"))

    assert [ensure_model(first), ensure_model(first), ensure_model(again)] == [True, False, True]

    weights = [AutoModelForCausalLM.from_pretrained(model.path).state_dict() for model in (first, again)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "first"]


NEEDED = """
import sys
from rollfarm.run import ModelConfig, TinyModelConfig
from trainer.create_model import ensure_model

ensure_model(ModelConfig(path=sys.argv[1], create=TinyModelConfig(words="left", hidden_size=16, layers=1)))
print(*({"transformers", "deepspeed"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_model_is_saved_without_deepspeed_which_takes_long_to_import(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", NEEDED, str(tmp_path / "model")]
    made = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])

    assert made.stdout.split() == ["transformers"]


def test_a_model_made_from_other_settings_is_not_used_in_silence(tmp_path: Path) -> None:
    path = str(tmp_path / "model")
    ensure_model(ModelConfig(path=path, create=CREATE))

    with pytest.raises(ConfigError, match=r"made with other settings\..* --up\.fresh true"):
        ensure_model(ModelConfig(path=path, create=CREATE.model_copy(update={"layers": 3})))


def test_no_model_and_no_way_to_make_one_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing does not exist\. .* add \[model\.create\]"):
        ensure_model(ModelConfig(path=str(tmp_path / "nothing")))


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")

    with pytest.raises(ConfigError, match="is there and holds no model"):
        ensure_model(ModelConfig(path=str(tmp_path), create=CREATE))
    assert (tmp_path / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--trainer.loss", "cliped"), "Did you mean 'clipped'?"),
        (("--trainer.loss_settings", "clip_hig=0.3"), "Did you mean 'clip_high'?"),
        (("--model.path", "./nothing"), "model.path: nothing does not exist"),
        (("--trainer.warm_start.data", "nothing.jsonl"), "no such file"),
        (("--trainer.lrr", "1"), "Did you mean --trainer.lr?"),
    ],
)
@pytest.mark.slow
def test_a_wrong_setting_ends_the_trainer_with_status_2_and_a_remedy(
    flags: tuple[str, str], message: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )

    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
