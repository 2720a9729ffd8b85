"""The same environment as OpenEnv has it: uvicorn serves `app`. Runs in OpenEnv's own environment."""

# pyright: reportMissingImports=false

import os
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

MOST_SESSIONS = 1000


class EchoAction(Action):
    """What the policy wrote."""

    message: str


class EchoObservation(Observation):
    """What it sees."""

    text: str


class Echo(Environment):
    """In a thread of the session's own, as OpenEnv runs methods that are not async."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, chars: int = 0, **options: Any
    ) -> EchoObservation:
        self._text = "x" * chars
        return EchoObservation(text="go", reward=0.0)

    def step(self, action: EchoAction, timeout_s: float | None = None, **options: Any) -> EchoObservation:
        return EchoObservation(text=self._text, reward=0.0)

    @property
    def state(self) -> State:
        return State(episode_id="echo", step_count=0)


class EchoOnLoop(Echo):
    """On the event loop."""

    async def step_async(self, action: EchoAction, timeout_s: float | None = None, **options: Any) -> EchoObservation:
        return self.step(action)


app = create_app(
    EchoOnLoop if os.environ.get("ECHO") == "loop" else Echo,
    EchoAction,
    EchoObservation,
    env_name="echo",
    max_concurrent_envs=MOST_SESSIONS,
)
