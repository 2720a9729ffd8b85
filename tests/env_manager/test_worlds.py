"""Which world an episode gets."""

import pytest

from env_manager.remote import Server
from env_manager.worlds import Worlds
from rollfarm.errors import UnknownEnvironment
from rollfarm.v1.trajectory_pb2 import Task


async def test_an_environment_that_no_server_offers_in_time_is_named_with_the_time():
    silent = Server("nowhere:1", None)
    worlds = Worlds([silent], environment_seconds=0.01, environment_id="here")

    with pytest.raises(UnknownEnvironment, match="No server has said within") as refused:
        async with worlds.open("session", Task(environment="chess")):
            pass

    assert refused.value.facts == {"environment": "chess", "seconds": "0.01"}
