"""What all adapters have in common: names, settings, and what is told where a package is missing."""

import inspect
import subprocess
import sys
from typing import Any

import pytest

from env_manager.adapters import ADAPTERS, find
from env_manager.adapters.adapter import Adapter
from env_manager.config import EnvManagerRoot
from env_manager.environments import ENVIRONMENTS
from env_manager.hosts import Hosts
from env_manager.servers import Server
from rollfarm.config import ConfigError
from rollfarm.env import name_of
from rollfarm.errors import PackageMissing, UnknownEnvironment
from rollfarm.playing import Play
from rollfarm.v1.trajectory_pb2 import Task
from tests.env_manager.fakes import worlds_of

SETTINGS: dict[str, dict[str, Any]] = {
    "gem": {"id": "game:GuessTheNumber-v0-easy"},
    "dataset": {"source": "somebody/something"},
    "gymnasium": {"id": "FrozenLake-v1"},
    "mcp": {"url": "http://127.0.0.1:1/mcp", "task": "operator:add"},
    "openenv": {"url": "http://127.0.0.1:1"},
    "reasoning_gym": {"dataset": "chain_sum"},
    "textarena": {"id": "GuessTheNumber-v0"},
    "textworld": {},
    "verifiers": {"id": "anything"},
}


def root(name: str, settings: dict[str, Any], **env_manager: Any) -> EnvManagerRoot:
    return EnvManagerRoot.model_validate(
        {
            "run": {"domains": [{"name": "theirs", "environment": name, "settings": settings}]},
            "model": {"path": "/nowhere", "create": {"words": "any"}},
            "env_manager": env_manager,
        }
    )


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """Makes a package as good as not installed."""

    def block(package: str) -> None:
        for module in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
            monkeypatch.setitem(sys.modules, module, None)

    return block


def test_no_adapter_and_no_package_is_imported_before_an_episode_needs_it():
    packages = {find({}, name).package for name in ADAPTERS} - {"aiohttp"}
    modules = {place.partition(":")[0] for place in ADAPTERS.values()}
    program = f"import sys, env_manager.worlds; print(*({packages | modules!r} & set(sys.modules)))"

    imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert imported.stdout.split() == []


@pytest.mark.parametrize("name", ADAPTERS)
async def test_a_missing_package_is_named_with_the_extra_that_brings_it(name: str, without: Any):
    kind = find({}, name)
    without(kind.package)
    episode = Play(kind, SETTINGS[name])

    with pytest.raises(PackageMissing) as missing:
        await episode.reset(0, 0)
    await episode.close()

    assert f"pip install 'rollfarm[{name}]'" in str(missing.value)
    assert missing.value.facts["package"] == kind.package


@pytest.mark.parametrize("name", ADAPTERS)
def test_settings_are_checked_when_the_configuration_is_read(name: str):
    setting = next(iter(inspect.signature(find({}, name)).parameters))

    with pytest.raises(ConfigError, match=rf"{name}: unknown setting '{setting}x'. Did you mean '?{setting}"):
        root(name, {**SETTINGS[name], f"{setting}x": 1}, servers=["elsewhere:1"]).check()


def test_a_missing_package_is_told_when_the_configuration_is_read(without: Any):
    without("gymnasium")

    with pytest.raises(ConfigError, match=r"pip install 'rollfarm\[gymnasium\]'"):
        root("gymnasium", SETTINGS["gymnasium"]).check()
    root("gymnasium", SETTINGS["gymnasium"], servers=["elsewhere:1"]).check()


async def test_an_adapter_without_its_package_is_looked_for_at_servers_that_may_have_it(without: Any):
    without("gymnasium")
    hosts = Hosts()
    task = Task(environment="gymnasium", settings_json='{"id": "FrozenLake-v1"}')

    async with worlds_of(hosts, environment_seconds=30).open("session", task) as world:
        with pytest.raises(PackageMissing):
            await world.reset()

    hosts.add(Server("nowhere:1", hosts.changed, None))
    with pytest.raises(UnknownEnvironment, match="No server has said within"):
        async with worlds_of(hosts, environment_seconds=0.01).open("session", task):
            pass


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_s_name_leads_to_it(name: str):
    kind = find(ENVIRONMENTS, name)

    assert issubclass(kind, Adapter)
    assert name_of(kind) == name
    assert name not in ENVIRONMENTS


def test_an_unknown_name_gets_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"Did you mean '?gymnasium"):
        find(ENVIRONMENTS, "gymnasum")


def test_serving_what_nobody_knows_lists_what_there_is():
    served = subprocess.run(
        [sys.executable, "-m", "env_manager.adapters", "chess"], capture_output=True, text=True, check=False
    )

    assert served.returncode == 1
    assert all(name in served.stderr for name in ADAPTERS)
