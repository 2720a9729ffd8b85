from pathlib import Path

import pytest

from rollfarm.config import ConfigError
from rollfarm.service import SUPERVISED
from rollfarm.up.config import as_used, load_farm, write_toml
from rollfarm.up.farm import Addresses, Plan, plan


def planned(farm_file: Path, *flags: str, environ: dict[str, str] | None = None) -> Plan:
    farm = load_farm([str(farm_file), *flags])
    return plan(farm, sockets=Path("/tmp/s"), environ=environ or {}, python="python")


def names(farm: Plan) -> list[str]:
    return [spec.name for spec in farm.specs]


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_a_farm_is_a_store_a_model_and_then_every_service(farm_file) -> None:
    farm = planned(farm_file)

    first = [spec.name for spec in farm.specs if spec.stage == 0]
    assert first == ["valkey", "create_model"]
    assert names(farm)[2:] == ["reward_gateway", "sample_buffer", "engine-0", "llm_proxy", "env_manager-0", "trainer"]


def test_every_service_reads_the_config_as_used_and_is_told_its_ports(farm_file, tmp_path) -> None:
    farm = planned(farm_file, "--up.base_port", "7800")

    buffer = farm.specs[3]
    assert buffer.argv[:4] == ("python", "-m", "sample_buffer", f"{tmp_path}/runs/small/config.toml")
    assert flag(buffer.argv, "--sample_buffer.listen.port") == "7803"
    assert flag(buffer.argv, "--sample_buffer.telemetry.metrics_port") == "7853"
    assert flag(buffer.argv, "--sample_buffer.journal") == "unix:///tmp/s/valkey.sock"
    assert buffer.address == "127.0.0.1:7803"
    trainer = farm.specs[-1]
    assert flag(trainer.argv, "--trainer.sample_buffer_address") == "127.0.0.1:7803"
    assert flag(trainer.argv, "--trainer.llm_proxy_address") == "127.0.0.1:7801"


def test_agents_find_llm_proxy_at_a_port_of_the_farm_s_own_where_its_http_is_enabled(farm_file) -> None:
    without = planned(farm_file, "--up.base_port", "7800")
    farm = planned(farm_file, "--up.base_port", "7800", "--llm_proxy.http.enabled", "true")

    llm_proxy = next(spec for spec in farm.specs if spec.name == "llm_proxy")
    assert flag(llm_proxy.argv, "--llm_proxy.http.listen.port") == "7802"
    assert set(farm.ports()) - set(without.ports()) == {(7802, "llm_proxy")}


def test_a_trainer_that_is_done_goes_on_serving_since_a_service_that_ends_counts_as_crashed(farm_file) -> None:
    farm = planned(farm_file, "--trainer.exit_when_finished", "true", "--up.trainer_ranks", "2")

    assert [flag(spec.argv, "--trainer.exit_when_finished") for spec in farm.specs[-2:]] == ["false", "false"]


def test_engines_env_managers_and_ranks_are_numbered_and_never_share_a_port(farm_file) -> None:
    farm = planned(farm_file, "--up.engines", "2", "--up.env_managers", "2", "--up.trainer_ranks", "2")

    ports = [port for port, _ in farm.ports()]
    assert len(set(ports)) == len(ports)
    assert names(farm)[4:] == [
        "engine-0",
        "engine-1",
        "llm_proxy",
        "env_manager-0",
        "env_manager-1",
        "trainer-0",
        "trainer-1",
    ]
    assert flag(farm.specs[6].argv, "--llm_proxy.engines") == "127.0.0.1:7710,127.0.0.1:7711"


def test_ports_of_the_largest_farm_never_collide(farm_file) -> None:
    farm = planned(farm_file, "--up.engines", "10", "--up.env_managers", "10", "--up.trainer_ranks", "4")

    ports = [port for port, _ in farm.ports()]
    assert len(set(ports)) == len(ports)
    assert all(7700 < port < 7800 for port in ports)


def test_ranks_find_each_other_as_those_of_torchrun_do_and_only_the_first_serves(farm_file) -> None:
    farm = planned(farm_file, "--up.trainer_ranks", "2")

    leader, follower = farm.specs[-2:]
    assert [spec.env["RANK"] for spec in (leader, follower)] == ["0", "1"]
    assert {spec.env["WORLD_SIZE"] for spec in (leader, follower)} == {"2"}
    assert {spec.env["MASTER_PORT"] for spec in (leader, follower)} == {"7706"}
    assert leader.gang == follower.gang == "trainer"
    assert leader.address == "127.0.0.1:7705"
    assert follower.address == ""
    assert flag(follower.argv, "--trainer.telemetry.metrics_port") == "0"


def test_a_trainer_on_the_engines_devices_starts_once_they_are_there(farm_file) -> None:
    colocated = planned(farm_file, "--trainer.colocated", "true", "--up.trainer_ranks", "2")

    assert [spec.stage for spec in colocated.specs[-4:]] == [1, 1, 2, 2]
    assert {spec.stage for spec in planned(farm_file).specs} == {0, 1}


def test_one_rank_is_an_ordinary_process(farm_file) -> None:
    assert "RANK" not in planned(farm_file).specs[-1].env


def test_a_ledger_waits_for_the_store_that_died_with_it(farm_file) -> None:
    farm = planned(farm_file, "--up.start_seconds", "90", "--sample_buffer.connect_seconds", "5")

    assert float(flag(farm.specs[3].argv, "--sample_buffer.connect_seconds")) == 90


def test_a_journal_elsewhere_needs_no_store(farm_file) -> None:
    farm = planned(farm_file, "--sample_buffer.journal", "redis://db:6379")

    assert "valkey" not in names(farm)
    buffer = next(spec for spec in farm.specs if spec.name == "sample_buffer")
    assert "--sample_buffer.journal" not in buffer.argv


def test_a_model_that_is_there_is_not_made(farm_file, tmp_path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    assert "create_model" not in names(planned(farm_file))


def test_children_run_one_thread_unless_the_environment_says_otherwise(farm_file) -> None:
    ours = planned(farm_file).specs[-1].env
    theirs = planned(farm_file, environ={"OMP_NUM_THREADS": "4"}).specs[-1].env

    assert ours["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in theirs
    assert ours[SUPERVISED] == "1"


def test_engines_that_run_elsewhere_are_named_and_none_is_started(farm_file) -> None:
    farm = planned(farm_file, "--up.engines", "0", "--llm_proxy.engines", "gpu:7710")

    assert not any(name.startswith("engine") for name in names(farm))
    proxy = next(spec for spec in farm.specs if spec.name == "llm_proxy")
    assert "--llm_proxy.engines" not in proxy.argv


def test_the_config_as_used_reads_back_as_the_same_farm(farm_file, tmp_path) -> None:
    farm = load_farm([str(farm_file), "--trainer.lr", "0.002", "--up.engines", "3"])

    write_toml(as_used(farm), tmp_path / "used.toml")

    again = load_farm([str(tmp_path / "used.toml")])
    assert again.model_dump() == farm.model_dump()
    assert again.up.engines == 3


def test_what_came_from_the_environment_is_not_written_down(farm_file, monkeypatch) -> None:
    monkeypatch.setenv("ROLLFARM_SAMPLE_BUFFER__JOURNAL", "redis://:secret@db")

    farm = load_farm([str(farm_file)])

    assert farm.model_dump()["sample_buffer"]["journal"] == "redis://:secret@db"
    assert "secret" not in str(as_used(farm))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.lrr", "1"], r"--trainer\.lrr: unknown flag\. Did you mean --trainer\.lr"),
        (["--up.engine", "2"], r"Did you mean --up\.engines"),
        (["--run.alpha", "-1"], r"run\.alpha: .*greater than or equal to 0"),
        (["--model.path", ""], r"model\.path: missing\. Give a model's folder"),
        (["--up.engines", "11"], r"up\.engines: .*less than or equal to 10"),
    ],
)
def test_a_wrong_flag_is_named_with_a_remedy(farm_file, flags, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load_farm([str(farm_file), *flags])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sample_bufer]\n", r"unknown table \[sample_bufer\]. Did you mean 'sample_buffer'"),
        ("[env_manager]\nslot = 3\n", r"env_manager\.slot: unknown key\. Did you mean 'slots'"),
        ("[engine]\nadaptor = 'vllm'\n", r"engine\.adaptor: unknown key\. Did you mean 'adapter'"),
    ],
)
def test_a_wrong_key_of_any_service_is_named_with_the_nearest_one(farm_file, tmp_path, text, message) -> None:
    (tmp_path / "more.toml").write_text(text)

    with pytest.raises(ConfigError, match=message):
        load_farm([str(farm_file), str(tmp_path / "more.toml")])


def test_a_model_that_is_nowhere_is_said_before_anything_starts(tmp_path) -> None:
    (tmp_path / "farm.toml").write_text(
        f"[model]\npath = '{tmp_path}/none'\n[[run.domains]]\nname = 'a'\nenvironment = 'arithmetic'\n"
    )

    with pytest.raises(ConfigError, match=r"model\.path: .*none does not exist"):
        load_farm([str(tmp_path / "farm.toml")])


def test_a_run_without_tasks_is_refused(tmp_path) -> None:
    (tmp_path / "farm.toml").write_text("[model]\npath = 'owner/name'\n")

    with pytest.raises(ConfigError, match=r"run\.domains: empty"):
        load_farm([str(tmp_path / "farm.toml")])


def test_addresses_follow_the_base_port() -> None:
    addresses = Addresses.of(8000, engines=2, env_managers=1)

    assert addresses.engines == ("127.0.0.1:8010", "127.0.0.1:8011")
    assert addresses.named()["env_manager-0"] == "127.0.0.1:8020"
