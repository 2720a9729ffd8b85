"""OpenAI's chat completions: a request's JSON to what is asked, and answers to their JSON. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llm_proxy.front import errors, jsons
from llm_proxy.front.door import Answer, Ask, News
from llm_proxy.front.errors import Refusal
from llm_proxy.front.fields import Fields
from llm_proxy.front.ids import unique
from llm_proxy.front.messages import Conversation
from llm_proxy.front.sampling import Wishes
from llm_proxy.front.turns import Scored, scored
from rollfarm import tokens
from rollfarm.chat.formats import Said, Thought
from rollfarm.chat.messages import ASSISTANT, SYSTEM, TOOL, USER, Call, Message, Tool
from rollfarm.chat.replies import Reading
from rollfarm.errors import InvalidArgument
from rollfarm.v1 import trajectory_pb2

MOST_TOP_LOGPROBS = 20
MOST_STOPS = 16

# fmt: off
KNOWN = frozenset({
    "model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "seed", "n", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "user", "metadata",
    "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options",
})
# fmt: on
"""What is heeded, and what only says who asks or how OpenAI keeps it."""

NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}

CANNOT_ENFORCE = "How tools are called cannot be enforced"

ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}

FINISH = {trajectory_pb2.FINISH_REASON_STOP: "stop", trajectory_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion that is asked for."""

    model: str
    ask: Ask
    top_logprobs: int | None
    """Likeliest tokens told at each place; None tells no log-probabilities at all."""

    tells_usage: bool
    """Whether a stream ends with the usage."""


def read(body: Fields, *, most_choices: int) -> ChatRequest:
    """Raises InvalidArgument with the field."""
    body.accept(KNOWN, NEUTRAL)
    tools, may_call = read_tools(body)
    width = body.integer("top_logprobs", 0, MOST_TOP_LOGPROBS)
    if width is not None and not body.flag("logprobs"):
        raise InvalidArgument("top_logprobs needs logprobs to be true.", field="top_logprobs")
    return ChatRequest(
        model=body.text("model"),
        ask=Ask(
            prompt=Conversation(tuple(read_message(item) for item in body.items("messages")), tools),
            wishes=read_wishes(body, "max_completion_tokens", "max_tokens"),
            choices=body.integer("n", 1, most_choices) or 1,
            stops=read_stops(body, "stop"),
            top_logprobs=width or 0,
            finds_calls=may_call,
            streams=body.flag("stream"),
        ),
        top_logprobs=(width or 0) if body.flag("logprobs") else None,
        tells_usage=(options := body.inner("stream_options")) is not None and options.flag("include_usage"),
    )


def read_wishes(body: Fields, *limits: str) -> Wishes:
    """How to sample; the first of `limits` that is given is the most tokens."""
    given = [limit for name in limits if (limit := body.integer(name, 1)) is not None]
    return Wishes(
        max_tokens=given[0] if given else None,
        temperature=body.number("temperature", 0, 2),
        top_p=body.number("top_p", 0, 1),
        top_k=body.integer("top_k", 0),
        seed=body.integer("seed", 0, 2**63 - 1),
    )


def read_stops(body: Fields, name: str) -> tuple[str, ...]:
    stops = body.strings(name)
    if len(stops) > MOST_STOPS or "" in stops:
        raise body.wrong(name, f"at most {MOST_STOPS} strings, none of them empty")
    return stops


def read_tools(body: Fields) -> tuple[tuple[Tool, ...], bool]:
    """The tools, and whether they may be called."""
    tools: list[Tool] = []
    for item in body.items("tools"):
        function = item.inner("function")
        if item.text("type") != "function" or function is None:
            raise item.wrong("type", '"function", with a function')
        function.text("name")
        tools.append(item.table)
    choice = body.table.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise InvalidArgument(f"{CANNOT_ENFORCE}: only auto and none are known.", field="tool_choice")
    return tuple(tools), choice != "none"


def read_message(item: Fields) -> Message:
    role = ROLES.get(item.text("role"))
    if role is None:
        raise item.wrong("role", "one of " + ", ".join(ROLES))
    return Message(
        role,
        content=read_content(item, "content"),
        calls=tuple(_call(call) for call in item.items("tool_calls")) if role == ASSISTANT else (),
        call_id=item.text("tool_call_id") if role == TOOL else "",
        thought=item.text("reasoning_content", "") if role == ASSISTANT else "",
    )


def read_content(item: Fields, name: str) -> str:
    """A text, or its parts joined by line ends. Raises InvalidArgument for anything but text."""
    if not isinstance(item.table.get(name), list):
        return item.text(name, "")
    parts: list[str] = []
    for part in item.items(name):
        if part.text("type") != "text":
            raise InvalidArgument(f"Only text is supported, not {part.text('type')!r}.", field=part.path("type"))
        parts.append(part.text("text"))
    return "\n".join(parts)


def _call(item: Fields) -> Call:
    function = item.inner("function")
    if function is None:
        raise item.wrong("function", "an object")
    return Call(item.text("id", ""), function.text("name"), function.text("arguments", ""))


class ChatWriter:
    """Writes the answers to one request."""

    def __init__(self, request: ChatRequest, reading: Reading, prompt_tokens: int, now: float) -> None:
        self._request = request
        self._reading = reading
        self._prompt_tokens = prompt_tokens
        self._frame = {"id": f"chatcmpl-{unique()}", "created": int(now), "model": request.model}
        self._made = 0
        self._begun: set[int] = set()
        self._call_counts: dict[int, int] = {}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer in one piece."""
        self._made = sum(tokens.token_count(answer.turn.token_ids) for answer in answers)
        choices = [
            {
                "index": index,
                "message": _message(answer.message),
                "logprobs": self._logprobs(answer),
                "finish_reason": finish_reason(answer),
            }
            for index, answer in enumerate(answers)
        ]
        return {**self._frame, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    def begin(self) -> bytes:
        return b""

    def news(self, news: News) -> bytes:
        """What is new, as a stream tells it."""
        return b"".join(event(chunk) for chunk in self._chunks(news))

    def end(self) -> bytes:
        """The end of a stream."""
        if not self._request.tells_usage:
            return DONE
        return event({**self._frame, "object": "chat.completion.chunk", "choices": [], "usage": self._usage()}) + DONE

    def failed(self, error: Refusal) -> bytes:
        return event(errors.body("openai", error))

    def _chunks(self, news: News) -> Iterator[dict[str, Any]]:
        if news.index not in self._begun:
            self._begun.add(news.index)
            yield self._chunk(news.index, {"role": "assistant", "content": ""})
        for part in news.parts:
            if isinstance(part, Said):
                yield self._chunk(news.index, {"content": part.text})
            elif isinstance(part, Thought):
                yield self._chunk(news.index, {"reasoning_content": part.text})
            else:
                at = self._call_counts[news.index] = self._call_counts.get(news.index, -1) + 1
                yield self._chunk(news.index, {"tool_calls": [{"index": at, **_told_call(part)}]})
        if news.answer is not None:
            self._made += tokens.token_count(news.answer.turn.token_ids)
            reason, logprobs = finish_reason(news.answer), self._logprobs(news.answer)
            yield self._chunk(news.index, {}, finish_reason=reason, logprobs=logprobs)

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**self._frame, "object": "chat.completion.chunk", "choices": [choice]}

    def _usage(self) -> dict[str, int]:
        return usage(self._prompt_tokens, self._made)

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Of every token that the agent is told of: not of the one that ended the turn."""
        width = self._request.top_logprobs
        if width is None:
            return None
        told = list(scored(answer.turn, width))
        if told and not self._reading.decode([told[-1].token]) and finish_reason(answer) != "length":
            told.pop()
        return {"content": [self._scored(one) for one in told], "refusal": None}

    def _scored(self, one: Scored) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in one.top]
        return {**self._token(one.token, one.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._reading.token(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def finish_reason(answer: Answer) -> str:
    """Why the choice ended."""
    reason = FINISH.get(answer.turn.finish_reason, "stop")
    return "tool_calls" if answer.message.calls and reason == "stop" else reason


def usage(prompt: int, made: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def event(chunk: dict[str, Any]) -> bytes:
    """As a stream carries it."""
    return b"data: " + jsons.write(chunk) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def _message(message: Message) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "assistant", "content": message.content or None, "refusal": None}
    if message.thought:
        told["reasoning_content"] = message.thought
    if message.calls:
        told["tool_calls"] = [_told_call(call) for call in message.calls]
    elif not message.content:
        told["content"] = ""
    return told


def _told_call(call: Call) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
