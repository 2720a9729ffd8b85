"""Environments of verifiers 0.1, by their module: the policy stands where verifiers asks its model.

verifiers plays an episode by itself and asks a client for each completion. Here that client is the policy: `reset` and
`step` hand over what is new in the prompt, and wait until verifiers asks again or has scored. Later releases have only
the v1 API, which runs an agent program against an endpoint: play those as agents.

The task's index chooses the row of the environment's data set, and nothing else is drawn: verifiers' environments take
no seed, so that what one draws for itself is not repeated.
"""

import asyncio
import functools
import json
import signal
from collections.abc import Sequence
from typing import Any

from env_manager.adapters.adapter import Adapter, wrong_setting
from rollfarm.env import Action, Observation, Step, ToolResult
from rollfarm.errors import PackageMissing


class Verifiers(Adapter):
    """One rollout. It runs in a process: verifiers loads environments in the main thread alone, whose signals it takes,
    and rewards are often long stretches of pure Python on the event loop."""

    name = "verifiers"
    package = "verifiers"
    runs = "process"

    def __init__(self, *, id: str, options: dict[str, Any] = {}) -> None:  # noqa: B006
        """`id` is the environment's module, which has to be installed, and `options` go to its load_environment."""
        self._id, self._options = id, options
        self._rollout: asyncio.Task[Any] | None = None
        self._prompts: asyncio.Queue[tuple[Sequence[Any], Sequence[Any]]] = asyncio.Queue()
        self._replies: asyncio.Queue[Any] = asyncio.Queue()
        self._seen = 0

    async def reset(self, seed: int, index: int) -> Observation:
        package = self._load()
        try:
            environment, rows = _environment(package, self._id, json.dumps(self._options, sort_keys=True))
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise wrong_setting(type(self), f"load_environment({self._id!r}) failed: {error}") from None
        row = dict(rows[index % len(rows)])
        self._rollout = asyncio.create_task(environment.run_rollout(row, self._client(package), "policy", {}))
        turn = await self._next()
        if turn is None:
            raise RuntimeError(f"{self._id} ended before its first turn: {self._rollout.result().get('error')}")
        messages, tools = turn
        return Observation(
            "\n".join(_line(message) for message in messages if message.role != "system"),
            reference=str(row.get("answer") or ""),
            system="\n".join(_text(message) for message in messages if message.role == "system"),
            tools=[_as_openai(tool) for tool in tools],
        )

    async def step(self, action: Action) -> Step:
        if action.tool_problem:
            return Step(action.tool_problem)
        self._replies.put_nowait(self._response(action))
        turn = await self._next()
        if turn is None:
            return self._scored()
        results, texts = [], []
        for message in turn[0]:
            if message.role == "tool":
                results.append(ToolResult(message.tool_call_id, self._names[message.tool_call_id], _text(message)))
            else:
                texts.append(_text(message))
        return Step("\n".join(texts), tool_results=results)

    async def close(self) -> None:
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait([self._rollout])

    async def _next(self) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """What is new in the next prompt, and the tools; None when the rollout is over."""
        assert self._rollout is not None
        asked = asyncio.create_task(self._prompts.get())
        try:
            await asyncio.wait([asked, self._rollout], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return None
            prompt, tools = asked.result()
        finally:
            asked.cancel()
        new, self._seen = prompt[self._seen :], len(prompt) + 1
        return new, tools

    def _scored(self) -> Step:
        assert self._rollout is not None
        output = self._rollout.result()
        if output.get("error"):
            raise RuntimeError(f"{self._id}: {output['error']}")
        metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
        return Step(
            reward=float(output["reward"]), done=True, truncated=bool(output.get("is_truncated")), metrics=metrics
        )

    def _response(self, action: Action) -> Any:
        types = self.load("verifiers.types")
        calls = [
            types.ToolCall(id=call.tool_call_id, name=call.name, arguments=json.dumps(dict(call.arguments)))
            for call in action.tool_calls
        ]
        self._names = {call.tool_call_id: call.name for call in action.tool_calls}
        message = types.ResponseMessage(
            content=str(action),
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return types.Response(id="", created=0, model="policy", message=message)

    def _client(self, package: Any) -> Any:
        """A client of verifiers that asks the policy."""
        prompts, replies = self._prompts, self._replies

        class Policy(package.Client):
            async def get_response(
                self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **more: Any
            ) -> Any:
                prompts.put_nowait((prompt, tools or ()))
                return await replies.get()

        Policy.__abstractmethods__ = frozenset()  # the rest is how get_response is made of a provider's API
        return Policy(None)

    def _load(self) -> Any:
        package = self.load()
        if not hasattr(package, "load_environment"):
            raise PackageMissing(
                f"verifiers {package.__version__} is installed, which has only the v1 API; its environments before "
                "that need 0.1: `pip install 'verifiers<0.2'`.",
                package="verifiers",
            )
        return package


@functools.lru_cache(maxsize=32)
def _environment(package: Any, name: str, options_json: str) -> tuple[Any, Any]:
    """The environment and its rows, which all episodes of the process share: verifiers keeps episodes apart.

    verifiers would end the process at its first signal, and services drain first: the handlers stay theirs.
    """
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment = package.load_environment(name, **json.loads(options_json))
    for number, handler in kept.items():
        signal.signal(number, handler)
    return environment, environment.get_dataset()


def _as_openai(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def _line(message: Any) -> str:
    """A message of the first prompt: examples of the policy's side are marked as such."""
    return f"Assistant: {_text(message)}" if message.role == "assistant" else _text(message)


def _text(message: Any) -> str:
    content = message.content or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if getattr(part, "type", "") == "text")
