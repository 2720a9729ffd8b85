"""A conversation's messages, as every API here says them and as chat templates take them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tool = Mapping[str, Any]
"""A function in OpenAI's form, which is what chat templates take."""

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the assistant calls."""

    call_id: str
    name: str
    arguments: str
    """As they travel: JSON, unless the agent made them up."""

    @property
    def parsed(self) -> Any:
        """The arguments as a template takes them: an object, or the text itself where it is none."""
        try:
            return json.loads(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


@dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    role: str
    content: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    """The call that a tool's message answers."""

    name: str = ""
    """The tool whose message it is, where that is known."""

    images: int = 0
    """How many are shown before the content."""

    thought: str = ""
    """What the model thought before it answered."""

    thought_field: str = "reasoning_content"
    """What the model's chat template calls its thoughts."""

    @property
    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.images:
            words = [{"type": "text", "text": self.content}] if self.content else []
            shown["content"] = [*({"type": "image"} for _ in range(self.images)), *words]
        if self.calls:
            shown["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.parsed}}
                for call in self.calls
            ]
        if self.call_id:
            shown["tool_call_id"] = self.call_id
        if self.name:
            shown["name"] = self.name
        if self.thought:
            shown[self.thought_field] = self.thought
        return shown
