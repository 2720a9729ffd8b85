"""The tools of an MCP server, for a question to be answered with them.

The policy sees the tools in OpenAI's format and calls them; what it writes without a call is its answer, which ends the
episode. The server is a command, started for each episode and ended with it, or a URL, which episodes share. Equal
seeds give equal questions; what tools answer is the server's to say.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from env_manager.adapters.adapter import Adapter, function, wrong_setting
from rollfarm import foreign
from rollfarm.env import Action, Observation, Step, ToolCall, ToolResult


class Question(BaseModel):
    """What is asked, and what is right."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str
    """Shown to the policy."""

    answer: str = ""
    """Compared with the policy's, and a reference for rewards."""


class Mcp(Adapter):
    """One question. Its methods are asynchronous, as the mcp package is: a call is a message each way."""

    name = "mcp"
    package = "mcp"

    def __init__(
        self,
        *,
        command: list[str] = [],  # noqa: B006
        url: str = "",
        environment: dict[str, str] = {},  # noqa: B006
        questions: list[Question] = [],  # noqa: B006
        task: str = "",
        reward: str = "",
        system: str = "",
        turns: Annotated[int, Field(ge=1)] = 20,
        call_seconds: Annotated[float, Field(gt=0)] = 30.0,
    ) -> None:
        """Give one of `command`, whose `environment` variables come on top of a few safe ones, and `url`; and one of
        `questions`, which tasks take in turn by their index, and `task`, a "module:function" of seed and index that
        returns a question and its answer. `reward` is a "module:function" of the policy's answer and the right one;
        empty pays 1 where they are equal but for case and space. After `turns` the episode is cut short. A tool that
        takes longer than `call_seconds` has failed, which the policy is told."""
        if bool(command) == bool(url) or bool(questions) == bool(task):
            raise wrong_setting(Mcp, "give one of command and url, and one of questions and task")
        self._command, self._url, self._variables = command, url, environment
        self._questions, self._task_function = questions, task
        self._reward = function(Mcp, "reward", reward) if reward else _equal
        self._system = system
        self._turns_left = turns
        self._call_seconds = call_seconds
        self._connection: asyncio.Task[None] | None = None
        self._client: Any = None
        self._over = asyncio.Event()
        self._tools: Sequence[Any] = ()

    async def reset(self, seed: int, index: int) -> Observation:
        package = await asyncio.to_thread(self.load)
        self._question = self._ask(seed, index)
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._connection = asyncio.create_task(self._hold(package, ready))
        self._client = await ready
        self._tools = await self._list_tools()
        shown = [_as_openai(tool) for tool in self._tools]
        return Observation(self._question.question, reference=self._question.answer, system=self._system, tools=shown)

    async def step(self, action: Action) -> Step:
        self._turns_left -= 1
        cut = self._turns_left == 0
        if action.tool_problem:
            return Step(action.tool_problem, done=cut, truncated=cut, metrics={"success": 0.0})
        if not action.tool_calls:
            reward = float(self._reward(str(action), self._question.answer))
            return Step(reward=reward, done=True, metrics={"success": float(reward >= 1)})
        results = [await self._call(call) for call in action.tool_calls]
        return Step(tool_results=results, done=cut, truncated=cut, metrics={"success": 0.0})

    async def close(self) -> None:
        if self._connection is None:
            return
        self._over.set()
        if self._client is None:
            self._connection.cancel()
        await asyncio.wait([self._connection])

    async def _hold(self, package: Any, ready: asyncio.Future[Any]) -> None:
        """Keep the connection open until the episode is over, in one task, as its scopes ask."""
        server = self._url or package.StdioServerParameters(
            command=self._command[0], args=self._command[1:], env=self._variables or None
        )
        try:
            async with package.Client(server, read_timeout_seconds=self._call_seconds) as client:
                ready.set_result(client)
                await self._over.wait()
        except Exception as error:  # whatever the transport raises, wrapped in groups
            if not ready.done():
                ready.set_exception(ConnectionError(f"no MCP server at {self._url or self._command}: {_first(error)}"))

    async def _list_tools(self) -> Sequence[Any]:
        tools: list[Any] = []
        cursor: str | None = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    async def _call(self, call: ToolCall) -> ToolResult:
        known = [tool.name for tool in self._tools]
        if call.name not in known:
            text = f"Error: no tool is called {call.name}. There are: {', '.join(known)}."
        else:
            try:
                result = await self._client.call_tool(call.name, dict(call.arguments))
                text = ("Error: " if result.is_error else "") + _text(result.content)
            except self.load().MCPError as error:
                text = f"Error: {foreign.cause(error)}"
        return ToolResult(call.tool_call_id, call.name, text)

    def _ask(self, seed: int, index: int) -> Question:
        if self._questions:
            return self._questions[index % len(self._questions)]
        question, answer = function(Mcp, "task", self._task_function)(seed, index)
        return Question(question=question, answer=answer)


def _as_openai(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema or {"type": "object", "properties": {}},
        },
    }


def _text(content: Sequence[Any]) -> str:
    """A tool's answer as text; of images and sounds no more than what they are."""
    return "\n".join(part.text if part.type == "text" else json.dumps({"type": part.type}) for part in content)


def _equal(answer: str, reference: str) -> float:
    return float(" ".join(answer.split()).casefold() == " ".join(reference.split()).casefold())


def _first(error: BaseException) -> str:
    """The first cause within groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return foreign.cause(error)
