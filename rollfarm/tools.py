"""For authors of environments with tools: methods that the policy may call.

    class Shop(ToolEnvironment):
        def reset(self, seed: int, index: int) -> Observation:
            self.wanted = random.Random(seed).choice(list(PRICES))
            return Observation(f"What does the {self.wanted} cost?", tools=self.tools)

        @tool
        def price(self, item: str) -> str:
            "Look up the price of an item."
            return str(PRICES.get(item, "not sold here"))

        def answer(self, text: str) -> Step:
            return Step(reward=float(text == str(PRICES[self.wanted])), done=True)

The docstring describes the tool to the policy, and the type hints are the schema of its parameters. A tool returns what
the policy sees of it, or a Step that also pays or ends the episode. Calls that make no sense (an unknown tool, wrong
arguments) are answered in words, and cost the policy a turn; what a tool raises fails the episode. Tools may be async;
where one is, all of its class run on the event loop.
"""

import inspect
import typing
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from rollfarm.config import nearest
from rollfarm.env import Action, Environment, Step, ToolCall, ToolResult

F = TypeVar("F", bound=Callable[..., str | Step | Awaitable[str | Step]])


def tool(method: F) -> F:
    """Let the policy call this method."""
    method.__dict__["is_tool"] = True
    return method


class ToolEnvironment(Environment):
    """An environment whose tools are its methods. See the module for how to write one."""

    tools: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Its tools, for the observation that reset returns."""

    _parameters: ClassVar[Mapping[str, type[BaseModel]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        names = [name for name in dir(cls) if getattr(inspect.getattr_static(cls, name), "is_tool", False)]
        cls._parameters = {name: _parameters(name, getattr(cls, name)) for name in names}
        cls.tools = [_described(name, getattr(cls, name), model) for name, model in cls._parameters.items()]

    @abstractmethod
    def answer(self, text: str) -> Step | Awaitable[Step]:
        """Answer what the policy wrote without calling a tool."""

    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Make the calls in order, until one ends the episode."""
        if not action.tool_calls:
            return Step(f"Error: {action.tool_problem}") if action.tool_problem else self.answer(action)
        called = _Called(f"Error: {action.tool_problem}" if action.tool_problem else "")
        if any(inspect.iscoroutinefunction(getattr(self, name)) for name in self._parameters):
            return self._call_all_later(action.tool_calls, called)
        for call in action.tool_calls:
            called.take(call, self._call(call))
            if called.is_over:
                break
        return called.step

    async def _call_all_later(self, calls: Sequence[ToolCall], called: "_Called") -> Step:
        for call in calls:
            returned = self._call(call)
            called.take(call, await returned if inspect.isawaitable(returned) else returned)
            if called.is_over:
                break
        return called.step

    def _call(self, call: ToolCall) -> Any:
        """What the tool returned, or what is wrong with the call."""
        model = self._parameters.get(call.name)
        if model is None:
            return f"Error: unknown tool {call.name!r}.{nearest(call.name, list(self._parameters))}"
        try:
            given = model.model_validate(dict(call.arguments))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            return f"Error: wrong arguments of {call.name}: {problems}."
        return getattr(self, call.name)(**{name: getattr(given, name) for name in given.model_fields_set})


@dataclass
class _Called:
    """What the calls of one action gave so far."""

    text: str
    results: list[ToolResult] = field(default_factory=list)
    step: Step = field(default_factory=Step)

    def take(self, call: ToolCall, returned: object) -> None:
        step = Step(returned) if isinstance(returned, str) else returned
        if not isinstance(step, Step):
            raise TypeError(f"tool {call.name} returned {type(returned).__name__}, not a str or a Step")
        self.results.append(ToolResult(call.tool_call_id, call.name, step.text))
        self.step = replace(
            step,
            text=self.text,
            reward=self.step.reward + step.reward,
            state_hash=step.state_hash or self.step.state_hash,
            metrics={**self.step.metrics, **step.metrics},
            tool_results=self.results,
        )

    @property
    def is_over(self) -> bool:
        return self.step.done or self.step.truncated


class _Untitled(GenerateJsonSchema):
    """Titles only repeat the names, and cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _parameters(name: str, method: Callable[..., Any]) -> type[BaseModel]:
    """The method's parameters as a closed table."""
    hints = typing.get_type_hints(method, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"Tool {name}: a policy cannot give {parameter}. Name every parameter.")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    return create_model(name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)


def _described(name: str, method: Callable[..., Any], model: type[BaseModel]) -> dict[str, Any]:
    """The tool as OpenAI's chat completions describe it."""
    schema = model.model_json_schema(schema_generator=_Untitled)
    schema.pop("title", None)
    function = {"name": name, "description": inspect.getdoc(method) or "", "parameters": schema}
    return {"type": "function", "function": function}
