"""Tools in the format of OpenAI's chat completions, whose every argument is a string."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollfarm.env import Action, ToolCall


def tool(name: str, description: str, **arguments: str) -> Mapping[str, Any]:
    """The schema of a tool that needs each of `arguments`, described by name."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": text} for key, text in arguments.items()},
                "required": list(arguments),
            },
        },
    }


def calls_of(action: str) -> Sequence[ToolCall]:
    """The tools that an action calls."""
    return action.tool_calls if isinstance(action, Action) else ()


def problem_of(action: str) -> str:
    """Why what looks like a tool call could not be read; empty where nothing is wrong."""
    return action.tool_problem if isinstance(action, Action) else ""


def argument(call: ToolCall, name: str) -> str:
    """One argument as text; empty where it is missing."""
    return str(call.arguments.get(name, ""))
