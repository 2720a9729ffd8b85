"""Which world an episode gets."""

import pytest

from env_manager.hosts import Hosts
from env_manager.servers import Server
from rollfarm.env import Environment, Step
from rollfarm.errors import EnvironmentFailed, UnknownEnvironment
from rollfarm.v1.trajectory_pb2 import Task
from tests.env_manager.fakes import worlds_of


async def test_an_environment_that_no_server_offers_in_time_is_named_with_the_time():
    hosts = Hosts()
    hosts.add(Server("nowhere:1", hosts.changed, None))
    worlds = worlds_of(hosts, environment_seconds=0.01)

    with pytest.raises(UnknownEnvironment, match="No server has said within") as refused:
        async with worlds.open("session", Task(environment="chess")):
            pass

    assert refused.value.facts == {"environment": "chess", "seconds": "0.01"}


class InAProcess(Environment):
    runs = "process"

    def reset(self, seed: int, index: int) -> str:
        return ""

    def step(self, action: str) -> Step:
        return Step()


@pytest.mark.parametrize("name", ["reasoning_gym", f"{__name__}:InAProcess"])
async def test_an_environment_whose_processes_do_not_come_up_is_no_unknown_one(name: str):
    worlds = worlds_of(Hosts(), environment_seconds=0.01)

    with pytest.raises(EnvironmentFailed, match="Nobody who plays"):
        async with worlds.open("session", Task(environment=name)):
            pass
