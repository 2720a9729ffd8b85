"""`rollfarm train` as it is run: the examples, a kill, ranks, and what it says when something is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollfarm import train
from rollfarm.config import ConfigError
from rollfarm.ports import free_port
from rollfarm.run import ModelConfig
from rollfarm.up.config import write_toml
from tests.trainer.conftest import ROOT
from tests.trainer.test_offline import loaded_by, moved
from trainer.backends.build import build_models
from trainer.config import TrainerConfig
from trainer.offline.pipelines import OBJECTIVES, pipeline_of
from trainer.ranks import Leader
from trainer.texts import Renderer

EXAMPLES = ROOT / "examples" / "offline"
SECONDS = 100.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("records") / "preferences.jsonl"
    pairs = [("left", "right"), ("up", "down"), ("go", "stop"), ("ice 0", "hole"), ("1 2", "3")]
    records = [
        {"prompt": [{"role": "user", "content": f"{number} {asked}"}], "chosen": chosen, "rejected": rejected}
        for number in range(4)
        for asked in ("ice", "hole", "go")
        for chosen, rejected in pairs
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def flags(folder: Path, model: Path, records: Path, *, steps: int) -> list[str]:
    settings: dict[str, Any] = {
        "run.name": "run",
        "run.folder": folder,
        "run.steps": steps,
        "model.path": model,
        "trainer.device": "cpu",
        "trainer.lr": 1e-3,
        "trainer.checkpoint_every": 10,
        "trainer.validation_every": 25,
        "trainer.offline.pipeline": "dpo",
        "trainer.offline.records": json.dumps([{"source": str(records), "weight": 0.7}]),
        "trainer.offline.batch_size": 7,
        "trainer.offline.validation_share": 0.1,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def start(*arguments: object, cwd: Path = ROOT, **environ: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "rollfarm", *map(str, arguments)],
        cwd=cwd,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **{name: str(value) for name, value in environ.items()},
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: "subprocess.Popen[str]", *, status: int = 0) -> dict[str, Any]:
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == status, errors
    return json.loads(output.splitlines()[-1])


def result_of_two_ranks(*arguments: object) -> dict[str, Any]:
    meeting = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [start("train", *arguments, RANK=rank, LOCAL_RANK=rank, **meeting) for rank in range(2)]
    try:
        found = result(ranks[0])
        assert ranks[1].wait(timeout=SECONDS) == 0
    finally:
        for rank in ranks:
            rank.kill()
        ranks[1].communicate()
    return found


def until_step(process: "subprocess.Popen[str]", step: int) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if (done := re.search(r"step done .*step=(\d+)", line)) and int(done[1]) >= step:
            return
    raise AssertionError(f"It ended before step {step}.")


def divergence_before(run: Path) -> float:
    """The loss of the first step."""
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[1])["metrics"]["loss"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "model" / "model.safetensors")


def measured(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl tells, but for times."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [{name: line[name] for name in line if "time" not in name and "seconds" not in name} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(model_path: Path, preferences: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps on preferences."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    result(start("train", *flags(folder, model_path, preferences, steps=60)))
    return folder


def test_a_run_that_is_stopped_and_then_killed_ends_with_the_same_weights(
    uninterrupted: Path, model_path: Path, preferences: Path, tmp_path: Path
) -> None:
    """It is to have far more steps at first, so that it is not over before it hears the signals."""
    arguments = flags(tmp_path, model_path, preferences, steps=100_000)
    stopped = start("train", *arguments)
    until_step(stopped, 2)
    stopped.send_signal(signal.SIGTERM)
    _, errors = stopped.communicate(timeout=SECONDS)
    assert stopped.returncode == 130
    assert f"resume {tmp_path / 'run'}" in errors
    killed = start("train", *arguments)
    until_step(killed, 14)
    killed.kill()
    killed.communicate()

    resumed = result(start("resume", tmp_path / "run", "--run.steps", "60"))

    assert resumed["finished"]
    assert resumed["steps"] == 60
    expected, found = weights(uninterrupted), weights(tmp_path)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert measured(tmp_path) == measured(uninterrupted)


def test_two_ranks_learn_what_one_learns(
    uninterrupted: Path, model_path: Path, preferences: Path, tmp_path: Path
) -> None:
    found = result_of_two_ranks(*flags(tmp_path, model_path, preferences, steps=60))

    assert found["finished"]
    for mine, theirs in zip(measured(tmp_path), measured(uninterrupted), strict=True):
        # Of seven pairs, one whose margin is all but 0 is a seventh of the accuracy.
        assert mine["metrics"].pop("accuracy") == pytest.approx(theirs["metrics"].pop("accuracy"), abs=0.15)
        assert mine["metrics"] == pytest.approx(theirs["metrics"], abs=2e-3)
    expected, found = weights(uninterrupted), weights(tmp_path)
    assert all(torch.allclose(expected[name], found[name], atol=1e-3) for name in expected)


def test_a_policy_in_the_shards_of_two_ranks_is_distilled_as_a_whole_one_is(model_path: Path, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps({"prompt": f"ice {n}", "completion": "left up go"}) + "\n" for n in range(4)))
    teacher = moved(model_path, tmp_path / "teacher")
    settings: dict[str, Any] = {"device": "cpu", "lr": 1e-2, "teacher": {"path": str(teacher)}}
    settings["offline"] = {"pipeline": "distillation", "records": [{"source": str(records)}], "batch_size": 3}
    file = tmp_path / "farm.toml"
    write_toml(
        {
            "run": {"name": "run", "folder": str(tmp_path), "steps": 3},
            "model": {"path": str(model_path)},
            "trainer": {**settings, "backend": "fsdp2"},
        },
        file,
    )

    result_of_two_ranks(file)

    config = TrainerConfig.model_validate(settings)
    data, renderer = loaded_by(config), Renderer(str(model_path))
    assert config.offline is not None
    leader = Leader(build_models(ModelConfig(path=str(model_path)), config), OBJECTIVES)
    pipeline = pipeline_of(config.offline, leader)
    batches = [[renderer.rows(data.items[number]) for number in data.deck.batch(step, 3)] for step in range(3)]
    expected = [pipeline.step(batch, lr=1e-2)["loss"] for batch in batches]
    found = [line["metrics"]["loss"] for line in measured(tmp_path) if line["kind"] == "step"]
    assert found == pytest.approx(expected, abs=1e-5)


def test_the_examples_learn(tmp_path: Path) -> None:
    """In their order: the second and the third need the model of the first."""
    subprocess.run([sys.executable, EXAMPLES / "data.py"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, dict[str, Any]] = {}

    for name in ("sft", "dpo", "distillation"):
        found[name] = result(start("train", EXAMPLES / f"{name}.toml", "--trainer.device", "cpu", cwd=tmp_path))

    before, after = ({name: each[f"validation_{when}"] for name, each in found.items()} for when in ("before", "after"))
    assert after["sft"]["nll"] < before["sft"]["nll"] / 2
    assert before["dpo"]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert found["dpo"]["loss"] < 0.6
    assert after["dpo"]["margin"] > 0
    assert after["distillation"]["nll"] < before["distillation"]["nll"] / 2
    assert found["distillation"]["loss"] < divergence_before(tmp_path / "runs" / "distillation") / 5


def test_adapters_alone_learn_and_are_merged_into_the_model(
    model_path: Path, preferences: Path, tmp_path: Path
) -> None:
    """Their reference is the same model without them."""
    arguments = flags(tmp_path, model_path, preferences, steps=8)

    found = result(start("train", *arguments, "--trainer.lora.rank", "4", "--trainer.lr", "0.02"))

    assert found["validation_before"]["margin"] == 0
    assert found["validation_after"]["margin"] > 0
    assert weights(tmp_path).keys() == load_file(model_path / "model.safetensors").keys()


def test_a_file_without_the_table_is_refused(model_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.offline: missing"):
        train.start(["--model.path", str(model_path)], prog="rollfarm train")


def test_a_run_is_not_taken_up_with_another_aim_and_stays_as_it_is(
    uninterrupted: Path, model_path: Path, preferences: Path
) -> None:
    config = uninterrupted / "run" / "config.toml"
    before = config.read_text()
    arguments = flags(uninterrupted, model_path, preferences, steps=70)

    refused = start("train", *arguments, "--trainer.offline.beta", "0.3")

    assert "beta was 0.1 and is 0.3" in refusal(refused)
    assert config.read_text() == before


def test_a_farm_s_folder_is_refused_and_stays_as_it_is(model_path: Path, preferences: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    config = tmp_path / "run" / "config.toml"
    config.write_text('[run]\nname = "run"\n')

    refused = start("train", *flags(tmp_path, model_path, preferences, steps=60))

    assert "is a run of `rollfarm up`. Choose another --run.name" in refusal(refused)
    assert config.read_text() == '[run]\nname = "run"\n'


def test_a_record_that_cannot_be_shown_ends_the_command_before_anything_is_written(
    model_path: Path, tmp_path: Path
) -> None:
    records = tmp_path / "records.jsonl"
    shown, not_shown = ({"prompt": prompt, "chosen": "up", "rejected": "go"} for prompt in ("ice", ""))
    records.write_text("".join(json.dumps(record) + "\n" for record in (*[shown] * 50, not_shown)))

    refused = start("train", *flags(tmp_path, model_path, records, steps=1))

    assert f"{records}, record 51: nothing comes before the answer" in refusal(refused)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock"}


def test_steps_that_epochs_would_overrule_are_refused(model_path: Path, preferences: Path, tmp_path: Path) -> None:
    arguments = flags(tmp_path, model_path, preferences, steps=60)

    with pytest.raises(ConfigError, match=r"Give --trainer\.offline\.epochs instead"):
        train.start([*arguments, "--trainer.offline.epochs", "2"], prog="rollfarm train")
    assert not (tmp_path / "run").exists()


def refusal(process: "subprocess.Popen[str]") -> str:
    """What it says of a wrong configuration."""
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, errors
    return errors
