import json
from pathlib import Path

import pytest

from rollfarm.config import ConfigError
from rollfarm.run import ModelConfig, RunConfig
from trainer.config import TrainerConfig, TrainerRoot, WarmStartConfig
from trainer.learner import build_learner
from trainer.texts import Renderer
from trainer.warm_start import batches, load_conversations, rows_of


def write(path: Path, *conversations: list[tuple[str, str]]) -> Path:
    lines = [
        json.dumps({"messages": [{"role": role, "content": text} for role, text in conversation]})
        for conversation in conversations
    ]
    path.write_text("\n".join(lines))
    return path


def test_every_row_comes_once_before_any_comes_twice(model_path: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", *([("user", str(index)), ("assistant", "go")] for index in range(4)))
    rows = rows_of(Renderer(str(model_path)), data)

    dealt = list(batches(rows, batch_size=2, steps=4, seed=1))

    assert [len(batch) for batch in dealt] == [2, 2, 2, 2]
    for half in (dealt[:2], dealt[2:]):
        assert sorted(id(row) for batch in half for row in batch) == sorted(map(id, rows))


def test_a_line_ends_only_where_a_file_s_does(tmp_path: Path) -> None:
    """JSON may have U+2028 in its texts, which str.splitlines takes for an end."""
    text = "one\u2028two"
    data = tmp_path / "d.jsonl"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "go"}]
    data.write_text(json.dumps({"messages": messages}, ensure_ascii=False))

    assert load_conversations(data) == [messages]


def test_a_line_that_is_no_conversation_is_named(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')

    with pytest.raises(ConfigError, match=r"line 1: .*assistant"):
        load_conversations(data)


def test_the_warm_start_lowers_its_loss(model_path: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", [("user", "0"), ("assistant", "left")], [("user", "1"), ("assistant", "right")])
    warm = WarmStartConfig(data=data, steps=20, lr=1e-2, batch_size=2)
    root = TrainerRoot(
        run=RunConfig(name="warm"),
        model=ModelConfig(path=str(model_path)),
        trainer=TrainerConfig(warm_start=warm, device="cpu"),
    )

    losses = list(build_learner(root).warm_start())

    assert len(losses) == 20
    assert losses[-1] < losses[0] / 4
