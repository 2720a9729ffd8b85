"""An OpenEnv server for tests: it says backwards what it is told, three times. `python openenv_echo.py PORT`"""

import sys
from typing import Any

import uvicorn  # pyright: ignore[reportMissingImports]
from openenv.core.env_server import (  # pyright: ignore[reportMissingImports]
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    text: str = ""


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> EchoObservation:
        self.steps = 0
        return EchoObservation(text=f"seed {seed} {more}", done=False, reward=0.0)

    def step(self, action: EchoAction, **more: Any) -> EchoObservation:
        self.steps += 1
        return EchoObservation(text=action.message[::-1], done=self.steps >= 3, reward=float(len(action.message)))

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
