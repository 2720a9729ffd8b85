"""OpenAI's plain completions, of text or of token ids: a request's JSON to what is asked, and back. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from llm_proxy.front import errors
from llm_proxy.front.door import Answer, Ask, News
from llm_proxy.front.errors import Refusal
from llm_proxy.front.fields import Fields
from llm_proxy.front.ids import unique
from llm_proxy.front.openai import DONE, event, finish_reason, read_stops, read_wishes, usage
from llm_proxy.front.prompts import check_text
from llm_proxy.front.turns import scored
from rollfarm import tokens
from rollfarm.chat.formats import Said
from rollfarm.chat.replies import Reading

MOST_LOGPROBS = 20

# fmt: off
KNOWN = frozenset({
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "stream",
    "stream_options", "logprobs", "user",
})
# fmt: on
NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "suffix": "",
}


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A completion that is asked for."""

    model: str
    ask: Ask
    logprobs: int | None
    """Likeliest tokens told at each place; None tells no log-probabilities at all."""

    tells_usage: bool


def read(body: Fields, encode: Callable[[str], list[int]], *, most_choices: int) -> CompletionRequest:
    """Raises InvalidArgument with the field."""
    body.accept(KNOWN, NEUTRAL)
    width = body.integer("logprobs", 0, MOST_LOGPROBS)
    return CompletionRequest(
        model=body.text("model"),
        ask=Ask(
            prompt=_prompt(body, encode),
            wishes=read_wishes(body, "max_tokens"),
            choices=body.integer("n", 1, most_choices) or 1,
            stops=read_stops(body, "stop"),
            top_logprobs=width or 0,
            finds_calls=False,
            streams=body.flag("stream"),
        ),
        logprobs=width,
        tells_usage=(options := body.inner("stream_options")) is not None and options.flag("include_usage"),
    )


def _prompt(body: Fields, encode: Callable[[str], list[int]]) -> bytes:
    """One prompt, of text or of token ids; OpenAI's lists of several are refused."""
    value: Any = body.table.get("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        check_text(value, field="prompt")
        return tokens.pack_ids(encode(value))
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise body.wrong("prompt", "one text, or one list of token ids")
    return tokens.pack_ids(value)


class CompletionWriter:
    """Writes the answers to one request."""

    def __init__(self, request: CompletionRequest, reading: Reading, prompt_tokens: int, now: float) -> None:
        self._request = request
        self._reading = reading
        self._prompt_tokens = prompt_tokens
        self._frame = {
            "id": f"cmpl-{unique()}",
            "object": "text_completion",
            "created": int(now),
            "model": request.model,
        }
        self._made = 0

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer in one piece."""
        self._made = sum(tokens.token_count(answer.turn.token_ids) for answer in answers)
        choices = [self._choice(index, answer.message.content, answer) for index, answer in enumerate(answers)]
        return {**self._frame, "choices": choices, "usage": usage(self._prompt_tokens, self._made)}

    def begin(self) -> bytes:
        return b""

    def news(self, news: News) -> bytes:
        """What is new, as a stream tells it."""
        text = "".join(part.text for part in news.parts if isinstance(part, Said))
        if news.answer is not None:
            self._made += tokens.token_count(news.answer.turn.token_ids)
        return event({**self._frame, "choices": [self._choice(news.index, text, news.answer)]})

    def end(self) -> bytes:
        """The end of a stream."""
        if not self._request.tells_usage:
            return DONE
        return event({**self._frame, "choices": [], "usage": usage(self._prompt_tokens, self._made)}) + DONE

    def failed(self, error: Refusal) -> bytes:
        return event(errors.body("openai", error))

    def _choice(self, index: int, text: str, answer: Answer | None) -> dict[str, Any]:
        logprobs = None if answer is None or self._request.logprobs is None else self._logprobs(answer)
        reason = finish_reason(answer) if answer is not None else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        told = list(scored(answer.turn, self._request.logprobs or 0))
        texts = [self._reading.token(one.token) for one in told]
        offsets = list(accumulate(map(len, texts), initial=0))[:-1]
        top = [{self._reading.token(token): logprob for token, logprob in one.top} for one in told]
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in told],
            "top_logprobs": top if self._request.logprobs else None,
            "text_offset": offsets,
        }
