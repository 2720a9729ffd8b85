import json
from pathlib import Path
from typing import Any

import pytest

from env_manager.adapters import find
from env_manager.adapters.dataset import Dataset
from env_manager.config import EnvManagerRoot
from rollfarm.config import ConfigError
from rollfarm.env import Action
from rollfarm.playing import Play
from rollfarm.run import DomainConfig, ModelConfig, RunConfig, TinyModelConfig

TRAINING, VALIDATION = 4, 5
"""Seeds as sample_buffer gives them: even, and odd."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"question {n}", "answer": str(n), "kwargs": [{"n": n}]} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def shown(index: int, seed: int, **settings: Any) -> str:
    return (await Dataset(**settings).reset(seed, index)).text


async def test_tasks_show_every_training_record_once_in_an_epoch_and_validation_the_others(file: Path):
    settings: dict[str, Any] = {"source": str(file), "validation_share": 0.2}
    epochs = [[await shown(index, TRAINING, **settings) for index in range(16 * k, 16 * k + 16)] for k in range(2)]
    held = [await shown(index, VALIDATION, **settings) for index in range(4)]

    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    assert {*epochs[0], *held} == {f"question {n}" for n in range(20)}
    assert len({*held}) == 4
    assert await shown(4, VALIDATION, **settings) == held[0]
    assert [await shown(index, TRAINING + 2, **settings) for index in range(16)] == epochs[0]


async def test_validation_by_a_file_of_its_own_leaves_every_record_to_training(file: Path, tmp_path: Path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "held out", "answer": "x"}\n')
    settings: dict[str, Any] = {"source": str(file), "validation_source": str(other)}

    assert await shown(7, VALIDATION, **settings) == "held out"
    assert len({await shown(index, TRAINING, **settings) for index in range(20)}) == 20


async def test_an_episode_is_one_answer_that_rewards_compare_with_the_reference(file: Path):
    kind = find({}, "dataset")
    play = Play(kind, {"source": str(file), "system": "Be brief.", "answer": ["answer", "kwargs"]})

    observation = await play.reset(TRAINING, 0)
    step = await play.step(Action("anything"))

    number = observation.text.removeprefix("question ")
    assert json.loads(observation.reference) == {"answer": number, "kwargs": [{"n": int(number)}]}
    assert observation.system == "Be brief."
    assert (step.done, step.reward) == (True, 0.0)


async def test_a_prompt_of_messages_brings_its_own_system_message(tmp_path: Path):
    file = tmp_path / "chat.jsonl"
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "one two"}]
    file.write_text(json.dumps({"messages": messages, "label": 3}) + "\n")

    settings: dict[str, Any] = {"source": str(file), "prompt": "messages", "answer": "label", "system": "ignored"}
    observation = await Dataset(**settings).reset(TRAINING, 0)

    assert (observation.system, observation.text, observation.reference) == ("Count.", "one two", "3")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "promt"}, "record 1: the column 'promt' is missing. Did you mean 'prompt'?"),
        ({"answer": ["answer", "id"]}, "record 1: the column 'id' is missing."),
        ({"prompt": "kwargs"}, "is neither text nor messages of one user"),
        ({"source": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"validation_split": "test"}, "is one split. Give validation_source instead"),
        ({"validation_share": 1.0}, "validation_share: Input should be less than 1"),
    ],
)
def test_a_wrong_data_set_is_found_before_anything_starts(
    file: Path, tmp_path: Path, settings: dict[str, Any], message: str
):
    domain = DomainConfig(name="maths", environment="dataset", settings={"source": str(file), **settings})
    model = ModelConfig(path=str(tmp_path / "model"), create=TinyModelConfig(words="a"))
    root = EnvManagerRoot.model_construct(run=RunConfig(domains=[domain]), model=model)

    with pytest.raises(ConfigError, match=r"run\.domains: 'maths': ") as wrong:
        root.check()

    assert message in str(wrong.value)


async def test_a_record_in_the_middle_that_is_wrong_is_named(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "", "answer": "b"}\n')

    with pytest.raises(ConfigError, match=r"record 2: the column 'prompt' is neither text"):
        Dataset.check({"source": str(file)})
