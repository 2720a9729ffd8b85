"""From an environment's words to tokens, and from the policy's tokens to an action.

A conversation is rendered by the model's own chat template when it begins. What the environment answers is appended as
a suffix: what the template puts after what the policy wrote, tokenised alone. So tokens only ever grow, what the policy
wrote is never tokenised again, and a prompt begins with every token before it. A template that renders otherwise what
was said before, for example strips earlier thoughts, is found out at that turn: the conversation is then rendered anew,
whole, and that begins a new segment.
"""

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import structlog
from jinja2 import TemplateError

from rollfarm import images, tokens
from rollfarm.chat import LONG, SENTINEL, ChatTemplate, Tokenizer
from rollfarm.chat.messages import ASSISTANT, SYSTEM, TOOL, USER, Call, Message, Tool
from rollfarm.chat.replies import Reader, Reading
from rollfarm.chat.suffixes import Rendering, Rewritten, Suffixes
from rollfarm.env import Action, Image, Observation, Step, ToolCall
from rollfarm.errors import EnvironmentFailed
from rollfarm.images import ImageTokens, PlacedImage
from rollfarm.v1 import trajectory_pb2

log = structlog.get_logger()

REMEMBERED = 4096
"""Renderings kept of each kind."""

SHORT = 1024
"""Characters up to which a rendering is worth keeping, and bytes up to which a decoding is."""

MOST_IMAGE_BYTES = 14 * 1024 * 1024
"""Of an episode's images together: a trajectory carries all of them, and sample_buffer takes none above 16 MiB unless
it is told to."""

EXCERPT = 200
"""Characters of a tool that an error shows."""

Rewriting = Literal["segment", "append"]
"""What is done where the template rewrites what was said."""

REFUSED = (TemplateError, TypeError, ValueError)
"""What a template raises of messages that it does not take."""

Seen = tuple[bytes, str, int]
"""An image as the model sees it: its bytes, its media type and its tokens."""

SYSTEM_AUTHOR, ENVIRONMENT = trajectory_pb2.AUTHOR_SYSTEM, trajectory_pb2.AUTHOR_ENVIRONMENT


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that the policy did not write."""

    author: "trajectory_pb2.Author.ValueType"
    """AUTHOR_SYSTEM or AUTHOR_ENVIRONMENT."""

    token_ids: bytes
    """[T] "<i4"; the last span of a prompt ends with the generation prompt."""

    text: str
    """The words alone, for people: of a new segment, those that were not said before."""

    images: Sequence[PlacedImage] = ()
    """Offsets are in the span."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the policy is shown next."""

    spans: Sequence[Span]

    begins_segment: bool = False
    """Whether it is shown that alone, and none of the tokens before."""

    @property
    def token_count(self) -> int:
        return sum(tokens.token_count(span.token_ids) for span in self.spans)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy wrote."""

    text: str
    """All of it, for people and rewards."""

    action: Action
    """As the environment takes it."""


class Renderer:
    """Renders for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] | None = None,
        *,
        rewriting: Rewriting = "segment",
        eyes: ImageTokens | None = None,
    ) -> None:
        """`variables` go to the chat template; `eyes` is what the model makes of images, if it takes any. Raises
        ConfigError when the template cannot hold a conversation."""
        self.chat = ChatTemplate(tokenizer, variables)
        self.reading = Reading(self.chat)
        self.suffixes = Suffixes(self.chat)
        self.rewriting: Rewriting = rewriting
        self.eyes = eyes
        self.stop_token_ids = self.chat.stop_token_ids
        self._encoded = functools.lru_cache(REMEMBERED)(self._encode)
        self._heard = functools.lru_cache(REMEMBERED)(self._hear)

    def begin(self, shown: Observation) -> "Conversation":
        """One episode's conversation. Raises EnvironmentFailed where the template cannot hold it."""
        if shown.tools:
            _check_tools(shown.tools)
            if self._tools_problem:
                raise EnvironmentFailed(
                    f"The environment has tools, and {self._tools_problem}. Use a model that was made to call tools."
                )
        return Conversation(self, shown)

    async def encode(self, text: str) -> bytes:
        """The text's tokens, [T] "<i4"; of a long one without holding up the others."""
        if len(text) <= SHORT:
            return self._encoded(text)
        return await asyncio.to_thread(self._encode, text) if len(text) > LONG else self._encode(text)

    async def look(self, shown: Sequence[Image]) -> list[Seen]:
        """The images as large as the model sees them. Raises EnvironmentFailed."""
        eyes = self.eyes
        if not shown:
            return []
        if eyes is None:
            kinds = ", ".join(images.MODEL_TYPES)
            raise EnvironmentFailed(f"The environment shows images, and the model takes none. Use one of {kinds}.")
        try:
            return await asyncio.to_thread(lambda: [_seen(eyes, image) for image in shown])
        except images.BadImage as problem:
            raise EnvironmentFailed(f"The environment shows what is no image to take: {problem}.") from None

    def hear(self, written: bytes) -> tuple[str, Message | None]:
        """What the policy wrote, special tokens left out; and the message that it is, where that is words alone."""
        return (self._heard if len(written) <= SHORT else self._hear)(written)

    def system_text(self, system: Message, tools: Sequence[Tool], whole: str) -> str:
        """The part of `whole` that is instructions; empty where the template does not keep them apart."""
        try:
            alone = self.chat.render([system.shown], tools=tools or None, prompt=False)
        except REFUSED:
            return ""
        return alone if whole.startswith(alone) else ""

    def _encode(self, text: str) -> bytes:
        return tokens.pack_ids(self.chat.encode(text))

    def _hear(self, written: bytes) -> tuple[str, Message | None]:
        ids = tokens.unpack_ids(written).tolist()
        text: str = self.chat.tokenizer.decode(ids, skip_special_tokens=True)
        said = self.reading.decode(ids)
        return text, Message(ASSISTANT, said) if self.reading.format.is_words(said) else None

    @functools.cached_property
    def _tools_problem(self) -> str:
        """Why the model is none for environments with tools; empty where it is."""
        if not self.reading.format.reads_calls:
            return (
                "nothing says how the model calls tools: its tokenizer has no response_template, and its chat template "
                "no <tool_call>"
            )
        call = Call(call_id(0), "f", "{}")
        asked = [Message(USER).shown]
        answer = Message(TOOL, SENTINEL, call_id=call.call_id, name=call.name)
        answered = [*asked, Message(ASSISTANT, calls=(call,)).shown, answer.shown]
        try:
            if SENTINEL not in self.chat.render(asked, tools=[_tool(SENTINEL)]):
                return "the model's chat template does not show them"
            if SENTINEL not in self.chat.render(answered, tools=[_tool(call.name)]):
                return "the model's chat template does not show what they give"
        except REFUSED as error:
            return f"the model's chat template does not take them: {error}"
        return ""


def _seen(eyes: ImageTokens, image: Image) -> Seen:
    data, media_type = eyes.fitted(image.data, image.media_type)
    return data, media_type, eyes.count(data, media_type)


class Conversation:
    """One episode's, message by message."""

    def __init__(self, renderer: Renderer, shown: Observation) -> None:
        self._renderer = renderer
        self._tools = tuple(shown.tools)
        self._system = Message(SYSTEM, shown.system)
        self._shown = shown
        self._seen: list[Seen] = []
        """Every image so far."""

        instructions = [self._system.shown] if shown.system else []
        self._messages = [*instructions, Message(USER, shown.text, images=len(shown.images)).shown]
        self._rendering: Rendering | None = None
        """The latest prompt; None where the template refused to render it."""

        self._said = Message(ASSISTANT)
        """What the policy said last."""

        self._last_token = b""
        self._call_count = 0

    async def opening(self) -> Prompt:
        """The first prompt. Raises EnvironmentFailed."""
        seen = await self._look(self._shown.images)
        try:
            rendered = self._render(self._messages)
            self._rendering = Rendering.of(rendered)
        except REFUSED as error:
            raise EnvironmentFailed(f"The model's chat template cannot render the observation: {error}.") from error
        encode = self._renderer.encode
        ids, system, text = await encode(rendered), self._system, self._shown.text
        alone = await encode(self._renderer.system_text(system, self._tools, rendered)) if system.content else b""
        if alone and len(alone) < len(ids) and ids.startswith(alone):
            instructions = Span(SYSTEM_AUTHOR, alone, system.content)
            return Prompt((instructions, self._span(ids[len(alone) :], text, seen)))
        return Prompt((self._span(ids, f"{system.content}\n\n{text}" if system.content else text, seen),))

    def read(self, written: bytes) -> Reply:
        """What the policy wrote, which the conversation goes on from."""
        self._last_token = written[-4:]
        text, message, problem = self._read(written)
        self._said = message
        self._messages.append(message.shown)
        if not self._tools:
            return Reply(text, Action(text))
        calls = [ToolCall(call.call_id, call.name, call.parsed) for call in message.calls]
        return Reply(text, Action(message.content, calls, problem))

    async def answer(self, step: Step) -> Prompt:
        """What the policy is shown of the environment's answer. Raises EnvironmentFailed."""
        new = [
            *(Message(TOOL, each.text, call_id=each.tool_call_id, name=each.name) for each in step.tool_results),
            *(
                [Message(USER, step.text, images=len(step.images))]
                if step.text or step.images or not step.tool_results
                else []
            ),
        ]
        seen = await self._look(step.images)
        before, rendered = self._messages, ""
        self._messages = [*before, *(message.shown for message in new)]
        try:
            rendered = self._render(self._messages)
            suffix = self._suffix(before, rendered)
        except Rewritten as how:
            if self._renderer.rewriting == "segment":
                return await self._anew(rendered, step, str(how))
            suffix = self._stand_in_suffix(new)
        except REFUSED as how:
            log.debug("the template refuses what the policy wrote", cause=str(how))
            suffix = self._stand_in_suffix(new)
        self._rendering = Rendering.of(rendered) if rendered else None
        ids = await self._renderer.encode(suffix)
        if ids.startswith(self._last_token):  # the policy ended its turn as the template does
            ids = ids[4:]
        return Prompt((self._span(ids, words(step), seen),))

    async def _look(self, shown: Sequence[Image]) -> list[Seen]:
        """The images, which are remembered. Raises EnvironmentFailed."""
        seen = await self._renderer.look(shown)
        self._seen += seen
        size = sum(map(len, {data for data, _, _ in self._seen}))
        if size > MOST_IMAGE_BYTES:
            raise EnvironmentFailed(
                f"The environment showed images of {size:,} bytes; an episode may show {MOST_IMAGE_BYTES:,}.", size=size
            )
        return seen

    def _span(self, ids: bytes, text: str, seen: Sequence[Seen]) -> Span:
        """What the environment shows: each image's placeholder as often as the image has tokens. Raises
        EnvironmentFailed."""
        if not self._seen or self._renderer.eyes is None:
            return Span(ENVIRONMENT, ids, text)
        try:
            expanded, placed = images.expand(tokens.unpack_ids(ids), seen, self._renderer.eyes.token_id)
        except images.BadImage as problem:
            raise EnvironmentFailed(f"The model's chat template cannot render the images: {problem}.") from None
        return Span(ENVIRONMENT, tokens.pack_ids(expanded), text, placed)

    def _read(self, written: bytes) -> tuple[str, Message, str]:
        """The text, the message that it is, and what was wrong with its tool calls."""
        text, words_alone = self._renderer.hear(written)
        if words_alone is not None:
            return text, words_alone, ""
        reader = Reader(self._renderer.reading, self._tools)
        reader.feed(written)
        reader.finish()
        calls = [replace(call, call_id=self._next_call_id()) for call in reader.message.calls]
        message = replace(reader.message, calls=tuple(calls))
        return reader.text if self._tools else text, message, reader.problem

    def _suffix(self, before: list[dict[str, Any]], rendered: str) -> str:
        if self._rendering is None:
            raise Rewritten("The model's chat template refused what was said before.")
        return self._renderer.suffixes.after(
            self._said,
            len(before),
            prompt=self._rendering,
            rendered=rendered,
            recorded=lambda: self._render(before, prompt=False),
        )

    def _stand_in_suffix(self, new: Sequence[Message]) -> str:
        try:
            return self._renderer.suffixes.after_stand_in(self._said.calls, new, self._tools)
        except (*REFUSED, Rewritten) as error:
            raise EnvironmentFailed(f"The model's chat template cannot render the answer: {error}.") from error

    async def _anew(self, rendered: str, step: Step, why: str) -> Prompt:
        log.debug("the template rewrites what was said: a new segment", cause=why)
        self._rendering = Rendering.of(rendered)
        ids = await self._renderer.encode(rendered)
        return Prompt((self._span(ids, words(step), self._seen),), begins_segment=True)

    def _render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = True) -> str:
        return self._renderer.chat.render(messages, tools=self._tools or None, prompt=prompt)

    def _next_call_id(self) -> str:
        self._call_count += 1
        return call_id(self._call_count)


def call_id(number: int) -> str:
    """Equal for equal episodes, and of the nine letters and digits that some chat templates insist on."""
    return f"call{number:05d}"


def words(step: Step) -> str:
    """What the environment said, results of tools first."""
    return "\n\n".join([*(each.text for each in step.tool_results), *([step.text] if step.text else [])])


def _tool(name: str) -> Tool:
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def _check_tools(tools: Sequence[Tool]) -> None:
    """Raise EnvironmentFailed unless each is one as OpenAI's chat completions describe them."""
    for tool in tools:
        function: Any = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping):
            problem = 'is not {"type": "function", "function": {...}}'
        elif not (name := cast(Tool, function).get("name")) or not isinstance(name, str):
            problem = "has no name"
        elif not isinstance(cast(Tool, function).get("parameters", {}), Mapping):
            problem = "has parameters that are no JSON schema"
        else:
            continue
        raise EnvironmentFailed(f"The tool {json.dumps(tool, default=str)[:EXCERPT]} {problem}.")
