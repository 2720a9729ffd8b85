"""What is wrong with a farm's configuration is said before anything starts; what is secret in it stays so."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from rollfarm import doctor
from rollfarm.config import ConfigError, load, table_of
from rollfarm.run import RECIPE, TinyModelConfig
from rollfarm.up import folder, report
from rollfarm.up.command import main
from rollfarm.up.config import FarmRoot, as_used, carried, describe, farm_root, load_farm, read_farm
from rollfarm.up.farm import plan
from rollfarm.up.summary import Ending, Summary, summarise
from rollfarm.up.watch import Picture
from sample_buffer.config import SampleBufferRoot

ROOT = Path(__file__).parents[2]
WORDS = "at left down right up ice hole goal wall 0 1 2 3"


def changed(farm_file: Path, old: str, new: str) -> str:
    """Another file, beside the farm's, where `old` is replaced by `new`; with an empty `old`, `new` is added."""
    text = farm_file.read_text()
    assert old in text
    other = farm_file.with_name("changed.toml")
    other.write_text(text.replace(old, new) if old else text + new)
    return str(other)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "frozen_lake",
            "frozen_pond",
            "run.domains: 'lake': Unknown environment 'frozen_pond'. Did you mean 'frozen_lake",
        ),
        ("frozen_lake", "tests.farm.broken:Rises", "Environment 'tests.farm.broken:Rises' cannot be imported"),
        ("frozen_lake", "tests.farm.broken:not_a_number", "not a subclass of rollfarm.env.Environment"),
        ("[model]", "settings = { sise = 3 }\n[model]", "unknown setting 'sise'. Did you mean 'size'?"),
        ("[model]", 'settings = { size = "big" }\n[model]', "frozen_lake: wrong setting size: "),
        (
            '_lake"',
            '_lake"\n[[run.domains]]\nname = "lake"\nenvironment = "arithmetic"',
            "run.domains: two are named 'lake'.",
        ),
        ("domains.lake", "domains.pond", "run.domains: nothing scores 'lake'. Add [reward_gateway.domains.lake]"),
        ('"environment"', '"enviroment"', "lake: reward 'enviroment' is unknown. Did you mean 'environment'?"),
        (
            '"environment"',
            '"exact", settings = { case_sensitve = true }',
            "lake: reward 'exact': unknown setting 'case_sensitve'. Did you mean 'case_sensitive'?",
        ),
        (WORDS, "at left down right up ice goal 0 1 3", "model.create.words: wall, 2, hole missing"),
        ("[model.create]", "[model.create]\nhead_dim = 3", "model.create.head_dim"),
        (
            "",
            '[[run.filters]]\nname = "zero_varience"',
            "run.filters: Unknown filter 'zero_varience'. Did you mean 'zero_v",
        ),
        (
            "",
            '[[run.filters]]\nname = "difficulty"\nsettings = { min = 1 }',
            "run.filters: Filter 'difficulty' has no setting 'min'. Did you mean 'min_mean'?",
        ),
        ("", "[trainer]\nloss = 'cliped'", "trainer.loss: Unknown loss 'cliped'. Did you mean 'clipped'?"),
        (
            "",
            "[trainer]\nloss_settings = { clip_hig = 0.3 }",
            "trainer.loss: clipped: unknown setting 'clip_hig'. Did you mean 'clip_high'?",
        ),
        ("", "[trainer]\nadvantage = 'gpro'", "trainer.advantage: Unknown advantage 'gpro'. Did you mean 'grpo'?"),
        (
            "",
            "[trainer]\naggregation = 'token_men'",
            "trainer.aggregation: Unknown aggregation 'token_men'. Did you mean",
        ),
        ("", "[trainer]\ndevice = 'cdua'", "trainer.device: 'cdua' is no device. Did you mean 'cuda'?"),
        ("", "[trainer.warm_start]\ndata = 'nowhere'", "trainer.warm_start.data: nowhere: no such file."),
        (
            "",
            "[env_manager.agents.lake]\ncommand = ['agent']",
            "env_manager.agents: agents speak HTTP, which llm_proxy does not serve.",
        ),
        (
            "",
            "[llm_proxy.http]\nenabled = true\n[env_manager.agents.lak]\ncommand = ['agent']",
            "env_manager.agents: 'lak' is no domain of the run. Did you mean 'lake'?",
        ),
        ("", "[env_manager.agents.lake]\nseconds = 5", "name a command, an image, or both."),
        ("", "[engine]\nadapter = 'vlm'", "engine.adapter: unknown value 'vlm'. Did you mean 'vllm'?"),
        ("", "[engine]\nadapter = 'vllm'\nvllm.python = '/nope'", "engine.vllm.python: /nope does not exist."),
        ("", "[sample_buffer]\njournal = 'redsi://x'", "'redsi:' is no journal. Did you mean 'redis://'?"),
    ],
)
def test_what_no_service_could_use_is_named_before_anything_starts(
    farm_file: Path,
    old: str,
    new: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = changed(farm_file, old, new)

    with pytest.raises(SystemExit) as ended:
        main([file])

    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert {path.suffix for path in farm_file.parent.iterdir()} == {".toml"}


def test_an_unknown_flag_names_the_nearest_one_and_where_all_are_listed(farm_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean --trainer\.lr\? `rollfarm up --flags` lists them all\."):
        load_farm([str(farm_file), "--trainer.lrr", "1"])


def test_vllm_s_interpreter_is_looked_for_where_vllm_is_asked_for(farm_file: Path) -> None:
    assert load_farm([str(farm_file), "--engine.vllm.python", "/nope"])


def test_what_a_server_plays_is_for_the_server_to_know(farm_file: Path) -> None:
    file = changed(farm_file, '"frozen_lake"', '"chess"\nsettings = { clock = 5 }')

    assert load_farm([file, "--env_manager.servers", '["127.0.0.1:7730"]']).run.domains[0].environment == "chess"


def test_words_are_asked_of_a_model_that_is_made_and_of_no_other(farm_file: Path, tmp_path: Path) -> None:
    file = changed(farm_file, WORDS, "one two")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    assert load_farm([file]).model.is_there


def test_a_farm_is_only_looked_at_without_its_model_or_its_journal(farm_file: Path, tmp_path: Path) -> None:
    file = changed(farm_file, "[model.create]", '[sample_buffer]\njournal = "redis://***@db"\n[model.create]')

    assert read_farm([file, "--model.path", "/nowhere"], prog="test").model.path == "/nowhere"


def test_the_check_imports_no_torch(farm_file: Path) -> None:
    code = (
        "import sys\nfrom rollfarm.up.config import load_farm\n"
        f"load_farm([{str(farm_file)!r}])\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )

    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert said == "set()\n"


SECRET = "redis://me:hush@db:6379/0"


def some_summary(run: Path) -> Summary:
    return summarise(
        Picture(), Ending.INTERRUPTED, metric="reward", wall_s=1, learning_s=1, restarts=0, resumed=False, run=run
    )


def test_a_password_is_not_written_down_and_sample_buffer_gets_it_all_the_same(
    farm_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    farm = load_farm([str(farm_file), "--sample_buffer.journal", SECRET])

    with folder.opened(farm):
        specs = plan(farm, sockets=tmp_path, environ={}).specs
        report.write(some_summary(farm.run.path), farm.run.path)

    written = [path.read_text(errors="replace") for path in farm.run.path.rglob("*") if path.is_file()]
    assert sum("redis://***@db:6379/0" in text for text in written) == 2  # config.toml and report.html
    assert not any("hush" in text for text in written)
    buffer = next(spec for spec in specs if spec.name == "sample_buffer")
    assert not any("hush" in word for word in buffer.argv)
    for name, value in buffer.env.items():
        monkeypatch.setenv(name, value)
    assert load(SampleBufferRoot, buffer.argv[3:], prog="test").sample_buffer.journal == SECRET


def test_a_run_whose_password_is_not_at_hand_is_not_begun_elsewhere(farm_file: Path, tmp_path: Path) -> None:
    farm = load_farm([str(farm_file), "--sample_buffer.journal", SECRET])
    with folder.opened(farm):
        pass

    with pytest.raises(ConfigError, match=r"not kept in files.* environment, as ROLLFARM_SAMPLE_BUFFER__JOURNAL"):
        load_farm([str(farm.run.path / "config.toml")])


def test_a_password_inside_a_list_is_carried_with_the_whole_list(
    farm_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = 'settings = { url = "https://me:hush@judge/v1?model=a@b" }'
    file = changed(farm_file, 'name = "environment"', f'name = "tests.up.judge:judge", {settings}')
    farm = load_farm([file])

    assert "hush" not in str(as_used(farm))
    assert list(carried(farm)) == ["ROLLFARM_REWARD_GATEWAY__DOMAINS"]
    monkeypatch.setenv("ROLLFARM_REWARD_GATEWAY__DOMAINS", carried(farm)["ROLLFARM_REWARD_GATEWAY__DOMAINS"])
    assert "hush" not in str(as_used(load_farm([str(farm_file)])))
    assert load_farm([str(farm_file)]).model_dump()["reward_gateway"] == farm.model_dump()["reward_gateway"]


def test_a_flag_over_the_environment_reaches_the_services(farm_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFARM_TRAINER__LR", "0.1")

    farm = load_farm([str(farm_file), "--trainer.lr", "0.2"])

    assert "lr" not in as_used(farm)["trainer"]
    assert carried(farm)["ROLLFARM_TRAINER__LR"] == "0.2"


def remade(farm_file: Path, *flags: str) -> bool:
    """Whether the farm makes its model, which was made from other settings."""
    farm = load_farm([changed(farm_file, "[model.create]", "[model.create]\nlayers = 3"), *flags])
    with folder.opened(farm):
        return any(spec.name == "create_model" for spec in plan(farm, sockets=Path("/tmp"), environ={}).specs)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A model that was made from the settings of the file."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / RECIPE).write_text(TinyModelConfig(words=WORDS).model_dump_json())
    return model


def test_a_fresh_start_makes_a_model_again_whose_recipe_has_changed(farm_file: Path, made: Path) -> None:
    assert remade(farm_file, "--up.fresh", "true")
    assert not made.exists()


def test_a_model_whose_recipe_has_changed_is_otherwise_refused(farm_file: Path, made: Path) -> None:
    with pytest.raises(ConfigError, match=r"made with other settings\. .*--up\.fresh true"):
        remade(farm_file)

    assert (made / "config.json").exists()


@pytest.mark.usefixtures("made")
def test_doctor_says_how_a_changed_recipe_is_followed(farm_file: Path) -> None:
    farm = load_farm([changed(farm_file, "[model.create]", "[model.create]\nlayers = 3")])

    assert "--up.fresh true" in doctor.model(farm.model).remedy


def test_a_model_that_was_not_made_here_is_never_made_again(farm_file: Path, made: Path) -> None:
    (made / RECIPE).unlink()

    assert not remade(farm_file, "--up.fresh", "true")
    assert (made / "config.json").exists()


@pytest.mark.parametrize(
    "line",
    [
        '--run.folder  = "runs"',
        "--sample_buffer.listen.port  = 7703",
        "--engine.listen.port  = 7710",
        "--trainer.betas  = [0.9, 0.95]",
        "--up.engines  = 1",
        "--engine.kv_cache  = 256000000",
        "--run.validation_sampling  unset",
        "--run.validation_sampling.temperature  = 1.0",
        "--model.create.words  required",
        "--model.create.layers  = 2",
        "  run.domains[].environment  required",
        "  run.filters[].settings  = {}",
        "  reward_gateway.domains.NAME.rewards[].weight  = 1.0",
    ],
)
def test_every_key_is_listed_with_the_default_that_it_really_has(line: str) -> None:
    assert line in describe(farm_root()).splitlines()


def tables(table: type[BaseModel]) -> set[type[BaseModel]]:
    """`table` and every table in it."""
    inner = (table_of(field.annotation, containers=True) for field in table.model_fields.values())
    return {table}.union(*(tables(found) for found in inner if found))


def test_every_table_and_every_key_of_a_farm_is_described() -> None:
    found = {*tables(farm_root()), FarmRoot}

    assert len(found) > 20
    assert [table for table in found if not table.__doc__] == []
    missing = [(table, name) for table in found for name, field in table.model_fields.items() if not field.description]
    assert missing == []
