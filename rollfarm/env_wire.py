"""Observations, actions and steps as messages of the contract, and back. What cannot be read raises ValueError."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from rollfarm.env import Action, Image, MediaType, Observation, Step, ToolCall, ToolResult
from rollfarm.reward import Author, Turn
from rollfarm.v1 import environment_pb2, trajectory_pb2


def to_reset(shown: Observation) -> environment_pb2.ResetResponse:
    """What reset returned."""
    messages = [_shown(shown.text, shown.images)]
    if shown.system:
        messages.insert(0, environment_pb2.Message(author=trajectory_pb2.AUTHOR_SYSTEM, text=shown.system))
    return environment_pb2.ResetResponse(
        messages=messages,
        reference=shown.reference,
        state_hash=shown.state_hash,
        tools_json=json.dumps(list(shown.tools), ensure_ascii=False) if shown.tools else "",
    )


def from_reset(answer: environment_pb2.ResetResponse) -> Observation:
    """What reset returned; its tools are a list of whatever was sent."""
    return Observation(
        text=_text(answer.messages, trajectory_pb2.AUTHOR_ENVIRONMENT),
        system=_text(answer.messages, trajectory_pb2.AUTHOR_SYSTEM),
        reference=answer.reference,
        state_hash=answer.state_hash,
        tools=_list(answer.tools_json, "tools_json"),
        images=_images(answer.messages),
    )


def to_step(step: Step) -> environment_pb2.StepResponse:
    """What step returned."""
    messages = [
        environment_pb2.Message(
            author=trajectory_pb2.AUTHOR_ENVIRONMENT,
            text=result.text,
            tool_call_id=result.tool_call_id,
            tool_name=result.name,
        )
        for result in step.tool_results
    ]
    if step.text or step.images:
        messages.append(_shown(step.text, step.images))
    return environment_pb2.StepResponse(
        messages=messages,
        reward=step.reward,
        done=step.done,
        truncated=step.truncated,
        state_hash=step.state_hash,
        metrics=step.metrics,
    )


def from_step(answer: environment_pb2.StepResponse) -> Step:
    """What step returned."""
    return Step(
        text=_text(answer.messages, trajectory_pb2.AUTHOR_ENVIRONMENT),
        reward=answer.reward,
        done=answer.done,
        truncated=answer.truncated,
        state_hash=answer.state_hash,
        metrics=answer.metrics,
        tool_results=[
            ToolResult(message.tool_call_id, message.tool_name, message.text)
            for message in answer.messages
            if message.tool_call_id
        ],
        images=_images(answer.messages),
    )


def to_action(session_id: str, number: int, action: Action) -> environment_pb2.StepRequest:
    """The policy's action as the episode's step of this number."""
    return environment_pb2.StepRequest(
        session_id=session_id,
        step=number,
        action=action,
        tool_calls=[
            environment_pb2.ToolCall(
                tool_call_id=call.tool_call_id, name=call.name, arguments_json=json.dumps(dict(call.arguments))
            )
            for call in action.tool_calls
        ],
        tool_problem=action.tool_problem,
    )


def from_action(request: environment_pb2.StepRequest) -> Action:
    """The policy's action."""
    calls = [
        ToolCall(call.tool_call_id, call.name, _object(call.arguments_json, f"arguments_json of tool {call.name!r}"))
        for call in request.tool_calls
    ]
    return Action(request.action, calls, request.tool_problem)


def to_scored(session_id: str, turns: Sequence[Turn], answer: str) -> environment_pb2.EnvironmentServiceScoreRequest:
    """An episode that an agent played."""
    scored = [
        trajectory_pb2.ScoredTurn(
            author=trajectory_pb2.Author.Value(f"AUTHOR_{turn.author.upper()}"),
            text=turn.text,
            step_reward=turn.step_reward,
        )
        for turn in turns
    ]
    return environment_pb2.EnvironmentServiceScoreRequest(session_id=session_id, turns=scored, answer=answer)


def from_scored(request: environment_pb2.EnvironmentServiceScoreRequest) -> list[Turn]:
    """The turns of an episode that an agent played."""
    return [
        Turn(
            author=cast(Author, trajectory_pb2.Author.Name(turn.author).removeprefix("AUTHOR_").lower()),
            text=turn.text,
            step_reward=turn.step_reward if turn.HasField("step_reward") else None,
        )
        for turn in request.turns
    ]


def to_score(step: Step) -> environment_pb2.EnvironmentServiceScoreResponse:
    """What score returned."""
    return environment_pb2.EnvironmentServiceScoreResponse(reward=step.reward, metrics=step.metrics, detail=step.text)


def from_score(answer: environment_pb2.EnvironmentServiceScoreResponse) -> Step:
    """What score returned."""
    return Step(text=answer.detail, reward=answer.reward, metrics=answer.metrics, done=True)


def _text(messages: Iterable[environment_pb2.Message], author: "trajectory_pb2.Author.ValueType") -> str:
    shown = [message for message in messages if message.author == author and not message.tool_call_id]
    return "\n\n".join(message.text for message in shown)


def _shown(text: str, images: Iterable[Image]) -> environment_pb2.Message:
    parts = [trajectory_pb2.ImagePart(data=image.data, media_type=image.media_type) for image in images]
    return environment_pb2.Message(author=trajectory_pb2.AUTHOR_ENVIRONMENT, text=text, images=parts)


def _images(messages: Iterable[environment_pb2.Message]) -> list[Image]:
    """Those of the environment, in order; which media types there are is checked with the rest of what it shows."""
    found: list[Image] = []
    for message in messages:
        if message.images and (message.tool_call_id or message.author != trajectory_pb2.AUTHOR_ENVIRONMENT):
            raise ValueError("it shows images in instructions, or as what a tool gave; show them beside the text")
        found += [Image(part.data, cast(MediaType, part.media_type)) for part in message.images]
    return found


def _list(text: str, what: str) -> list[Any]:
    value = _parsed(text or "[]", what)
    if not isinstance(value, list):
        raise ValueError(f"{what} is {type(value).__name__}, not a JSON list")
    return value


def _object(text: str, what: str) -> Mapping[str, Any]:
    value = _parsed(text or "{}", what)
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, not a JSON object")
    return value


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON: {error}") from None
