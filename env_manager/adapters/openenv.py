"""Environments behind an OpenEnv server, spoken to by its WebSocket: one connection is one episode.

The protocol is JSON, and small: this is a client of its own, because the openenv package brings a web interface whose
pins conflict with much else. OpenEnv's HTTP routes are not used: they keep no episode between calls. Equal seeds give
equal episodes where the server's environment obeys the seed that reset gives it.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from env_manager.adapters.adapter import SEEDS, Adapter, wrong_setting
from rollfarm.env import Action, Observation, Step

MOST_BYTES = 100 << 20
"""Of a message, as in OpenEnv's own client."""


class OpenEnv(Adapter):
    """One episode. Its methods are asynchronous: a turn is a message each way."""

    name = "openenv"
    package = "aiohttp"

    def __init__(
        self,
        *,
        url: str,
        action: str = "message",
        observation: str = "",
        options: dict[str, Any] = {},  # noqa: B006
        turns: Annotated[int, Field(ge=0)] = 0,
        connect_seconds: Annotated[float, Field(gt=0)] = 10.0,
    ) -> None:
        """`url` is the server's, http:// or ws://. `action` is the field of its action that takes what the policy
        wrote; empty takes that as a JSON object of all fields. `observation` is the field to show; empty shows the
        only text there is, and else all fields as JSON. `options` go to reset, beside the seed. 0 `turns` leaves the
        limit to the server."""
        self._url = f"{url.rstrip('/')}/ws"
        self._action, self._shown = action, observation
        self._options = options
        self._turns_left = turns or -1
        self._connect_seconds = connect_seconds
        self._session: Any = None
        self._socket: Any = None

    async def reset(self, seed: int, index: int) -> Observation:
        aiohttp = self.load()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_connect=self._connect_seconds))
        try:
            self._socket = await self._session.ws_connect(self._url, max_msg_size=MOST_BYTES, heartbeat=20)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionError(f"no OpenEnv server answers at {self._url}: {error}") from None
        answer = await self._ask("reset", {"seed": seed % SEEDS, **self._options})
        return Observation(self._tell(answer))

    async def step(self, action: Action) -> Step:
        fields = self._fields(str(action))
        if fields is None:
            return self._taken({"observation": {"error": "The action is not a JSON object."}})
        try:
            answer = await self._ask("step", fields)
        except ActionRefused as refused:
            answer = {"observation": {"error": f"The action is refused: {refused}"}}
        return self._taken(answer)

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_str(json.dumps({"type": "close"}))
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    def _fields(self, text: str) -> dict[str, Any] | None:
        if self._action:
            return {self._action: text}
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return fields if isinstance(fields, dict) else None

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        received = await self._socket.receive()
        if not isinstance(received.data, str):
            raise ConnectionError(f"the OpenEnv server at {self._url} hung up: {received.data!r}")
        answer = json.loads(received.data)
        told = answer.get("data") or {}
        if answer.get("type") == "error":
            if told.get("code") == "VALIDATION_ERROR" and kind == "step":
                problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in told.get("errors", ())]
                raise ActionRefused("; ".join(problems) or told.get("message", ""))
            raise RuntimeError(f"OpenEnv's {kind} failed: {told.get('message')} ({told.get('code')})")
        return told

    def _taken(self, answer: Mapping[str, Any]) -> Step:
        self._turns_left -= 1
        done = bool(answer.get("done"))
        cut = not done and self._turns_left == 0
        return Step(self._tell(answer), reward=float(answer.get("reward") or 0.0), done=done or cut, truncated=cut)

    def _tell(self, answer: Mapping[str, Any]) -> str:
        observation = {
            name: value
            for name, value in (answer.get("observation") or {}).items()
            if value is not None and name not in ("done", "reward", "metadata")
        }
        if self._shown and "error" not in observation:
            if self._shown not in observation:
                raise wrong_setting(type(self), f"the observation has no {self._shown!r}, but {sorted(observation)}")
            value = observation[self._shown]
            return value if isinstance(value, str) else json.dumps(value)
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 and len(observation) == 1 else json.dumps(observation)


class ActionRefused(Exception):
    """The action does not fit the server's schema: what the policy is told."""
