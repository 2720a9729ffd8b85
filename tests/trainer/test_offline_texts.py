"""Records as rows: what is shown, what of it is learnt, and what is said of a record that is wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollfarm.config import ConfigError
from rollfarm.records import Source
from trainer.offline.data import Sieve
from trainer.rows import Row
from trainer.texts import Item, Renderer, demonstration, preference

SOURCE = Source("data.jsonl")

GO = [{"role": "user", "content": "go"}]


def said(*turns: str) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(turns)]


def words(path: Path, row: Row) -> tuple[str, list[str]]:
    """A row as text, and what of it is learnt."""
    tokens = AutoTokenizer.from_pretrained(path).convert_ids_to_tokens(row.ids_T.tolist())
    return " ".join(tokens), [token for token, learnt in zip(tokens, row.mask_T, strict=True) if learnt]


def templated(path: Path, to: Path, template: str) -> Renderer:
    """Like that model's, with another chat template."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(to)
    (to / "config.json").write_text((path / "config.json").read_text())
    return Renderer(str(to))


def test_every_turn_of_the_assistant_is_learnt_up_to_its_end(model_path: Path) -> None:
    item = demonstration({"messages": said("ice 0", "left", "hole", "up 1")}, SOURCE, 0)

    ((row,),) = Renderer(str(model_path)).rows(item)

    text, learnt = words(model_path, row)
    assert text == "<user> ice 0 <end> <assistant> left <end> <user> hole <end> <assistant> up 1 <end>"
    assert learnt == ["left", "<end>", "up", "1", "<end>"]


def test_an_answer_to_a_conversation_is_learnt_alone(model_path: Path) -> None:
    record = {
        "prompt": said("ice", "left", "hole"),
        "chosen": "up",
        "rejected": [{"role": "assistant", "content": "go"}],
    }

    (chosen,), (rejected,) = Renderer(str(model_path)).rows(preference(record, SOURCE, 0))

    assert words(model_path, chosen)[1] == ["up", "<end>"]
    assert words(model_path, rejected)[1] == ["go", "<end>"]
    assert words(model_path, chosen)[0].startswith("<user> ice <end> <assistant> left <end> <user> hole <end>")


def test_plain_text_asks_no_template(model_path: Path) -> None:
    item = demonstration({"prompt": "ice 0", "completion": "left up"}, SOURCE, 0)

    ((row,),) = Renderer(str(model_path)).rows(item)

    assert words(model_path, row) == ("ice 0 left up <end>", ["left", "up", "<end>"])


def test_an_answer_after_what_the_template_renders_otherwise_has_a_row_of_its_own(
    model_path: Path, tmp_path: Path
) -> None:
    # As of models that think: of what was said earlier only the end is shown.
    template = (
        "{% for m in messages %}<{{ m.role }}> "
        "{{ m.content if loop.last else m.content.split(' ')[-1] }} <end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )

    ((first, second),) = templated(model_path, tmp_path, template).rows(
        demonstration({"messages": said("ice", "0 1 left", "hole", "2 up")}, SOURCE, 0)
    )

    assert words(tmp_path, first) == ("<user> ice <end> <assistant> 0 1 left <end>", ["0", "1", "left", "<end>"])
    text, learnt = words(tmp_path, second)
    assert text == "<user> ice <end> <assistant> left <end> <user> hole <end> <assistant> 2 up <end>"
    assert learnt == ["2", "up", "<end>"]


@pytest.mark.parametrize("tools", [[{"name": "hole", "strict": None}], '[{"name": "hole"}]'])
def test_tools_are_shown_and_what_is_null_is_not_there(model_path: Path, tmp_path: Path, tools: object) -> None:
    """As from a table, where every row has the keys of all others."""
    template = (
        "{% for t in tools or [] %}{{ t.name }}{{ ' stop' if 'strict' in t }} {% endfor %}"
        "{% for m in messages %}<{{ m.role }}> "
        "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.name }}{{ ' stop' if 'id' in c }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %} <end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    messages = [
        {"role": "user", "content": "go", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "up", "id": None}]},
    ]
    renderer = templated(model_path, tmp_path, template)

    ((row,),) = renderer.rows(demonstration({"messages": messages, "tools": tools}, SOURCE, 0))
    ((bare,),) = renderer.rows(demonstration({"messages": messages, "tools": None}, SOURCE, 0))

    assert words(tmp_path, row) == ("hole <user> go <end> <assistant> up <end>", ["up", "<end>"])
    assert words(tmp_path, bare)[0] == "<user> go <end> <assistant> up <end>"


@pytest.mark.parametrize("cannot", ["{{ raise_exception('no') }}", "{{ 1 + m.content }}", "{{ m.content.a.b }}"])
def test_a_record_that_the_template_cannot_show_is_named(model_path: Path, tmp_path: Path, cannot: str) -> None:
    template = "{% for m in messages %}{% if m.content == 'ice' %}" + cannot + "{% endif %}"
    template += "<{{ m.role }}> {{ m.content }} <end>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant> {% endif %}"
    item = demonstration({"messages": said("ice", "up")}, SOURCE, 6)

    with pytest.raises(ConfigError, match=r"data\.jsonl, record 7: the model's chat template cannot show it: "):
        templated(model_path, tmp_path, template).rows(item)


@pytest.mark.parametrize(
    ("read", "record", "problem"),
    [
        (demonstration, {"messages": said("go")}, "record 3: the assistant says nothing"),
        (demonstration, {"messages": said("go", " ")}, "record 3: message 2, the assistant's, is empty"),
        (demonstration, {"messages": "go"}, "record 3: str in place of a list of messages"),
        (demonstration, {"messages": [{"content": "go"}]}, "record 3: message 1 has no role"),
        (demonstration, {"messages": [{"role": "user", "content": 1}]}, "record 3: message 1 has no text"),
        (demonstration, {"prompt": "go", "completion": ""}, "record 3: the answer is empty"),
        (demonstration, {"mesages": []}, "record 3: the column 'messages' is missing. Did you mean 'mesages'"),
        (demonstration, {"messages": said("go", "up"), "tools": "[{"}, "record 3: tools is no JSON"),
        (demonstration, {"messages": said("go", "up"), "tools": {"a": 1}}, "record 3: tools is no list of objects"),
        (demonstration, {"prompt": "go", "completion": "up", "tools": [{}]}, "record 3: there are tools"),
        (preference, {"prompt": GO, "chosen": "up"}, "record 3: the column 'rejected' is missing"),
        (preference, {"prompt": GO, "chosen": "up", "rejected": ""}, "record 3: rejected: message 1"),
        (preference, {"prompt": "go", "chosen": GO, "rejected": "up"}, "record 3: chosen: the prompt is a text"),
    ],
)
def test_a_wrong_record_is_named(read: Callable[..., Item], record: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=r"data.jsonl, ") as refused:
        read(record, SOURCE, 2)

    assert problem in str(refused.value)


def test_a_record_without_a_prompt_is_named(model_path: Path) -> None:
    item = demonstration({"prompt": "", "completion": "left"}, SOURCE, 4)

    with pytest.raises(ConfigError, match="record 5: nothing comes before the answer"):
        Renderer(str(model_path)).rows(item)


def test_what_is_too_long_is_left_out_and_nothing_is_cut(model_path: Path) -> None:
    items = [demonstration({"prompt": "go " * count, "completion": "up"}, SOURCE, count) for count in (3, 4, 70)]
    renderer = Renderer(str(model_path))

    assert [len(rows[0]) for (rows,) in Sieve(renderer, 5).rendered(items)] == [5]
    # The model's context is 64.
    assert [len(rows[0]) for (rows,) in Sieve(renderer, 0).rendered(items)] == [5, 6]
