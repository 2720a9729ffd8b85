import argparse
from pathlib import Path

import pytest

from rollfarm import where
from rollfarm.up.config import as_used, read_farm, write_toml
from rollfarm.up.farm import Addresses

DEPLOYED = (
    *("--trainer.sample_buffer_address", "buffer:7703", "--trainer.llm_proxy_address", "proxy:7701"),
    *("--trainer.listen.host", "10.0.0.5", "--llm_proxy.engines", '["gpu-0:7710","gpu-1:7710"]'),
    *("--env_manager.reward_gateway_address", "reward:7704"),
)


def found(*argv: str) -> Addresses:
    return where.find(read_farm(argv, prog="test"))


def test_a_farm_of_this_machine_is_found_by_its_base_port() -> None:
    addresses = found("--up.base_port", "7800")

    assert (addresses.sample_buffer, addresses.trainer) == ("127.0.0.1:7803", "127.0.0.1:7805")
    assert addresses.engines[1] == "127.0.0.1:7811"
    assert addresses.env_managers[0] == "127.0.0.1:7820"


def test_services_deployed_by_themselves_are_found_by_the_flags_of_those_who_call_them() -> None:
    addresses = found(*DEPLOYED)

    assert (addresses.sample_buffer, addresses.llm_proxy) == ("buffer:7703", "proxy:7701")
    assert (addresses.reward_gateway, addresses.trainer) == ("reward:7704", "10.0.0.5:7705")
    assert addresses.engines == ("gpu-0:7710", "gpu-1:7710")
    assert addresses.env_managers == ()


def test_the_engines_of_a_deployed_farm_are_left_to_llm_proxy() -> None:
    assert found("--trainer.sample_buffer_address", "buffer:7703").engines == ()


def test_an_interface_is_no_address() -> None:
    assert found("--trainer.listen.host", "0.0.0.0").trainer == "127.0.0.1:7705"


def test_the_config_as_used_leads_to_the_same_farm(tmp_path: Path) -> None:
    write_toml(as_used(read_farm(["--up.base_port", "7800"], prog="test")), tmp_path / "config.toml")

    assert found(str(tmp_path / "config.toml")) == found("--up.base_port", "7800")


@pytest.mark.parametrize(
    ("argv", "farm"),
    [
        (["a.toml", "--up.base_port", "7800", "b.toml"], ["a.toml", "b.toml", "--up.base_port", "7800"]),
        (["--config", "a.toml", "--run.alpha=0", "b.toml"], ["b.toml", "a.toml", "--run.alpha=0"]),
        (["--up.min_gain", "-1"], ["--up.min_gain", "-1"]),
    ],
)
def test_files_and_dotted_flags_say_which_farm(argv: list[str], farm: list[str]) -> None:
    assert where.parse(argparse.ArgumentParser(), argv)[1] == farm


def test_what_a_command_reads_itself_stays_its_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trajectory", nargs="?")
    parser.add_argument("--run")

    chosen, farm = where.parse(
        parser, ["t-1", "--run", "demo", "--run.alpha", "2", "--config", "a.toml"], positional=False
    )

    assert (chosen.trajectory, chosen.run) == ("t-1", "demo")
    assert farm == ["a.toml", "--run.alpha", "2"]
