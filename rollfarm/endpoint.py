"""Asks a model behind any OpenAI-compatible endpoint: a judge, a simulated user.

    user = shared(EndpointConfig(base_url="http://127.0.0.1:7702/v1", model="policy", key="env:USER_KEY"))
    words = await user.complete([{"role": "user", "content": "Who are you?"}])

The client is the `openai` package, which is imported when the first question is asked.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import Field, field_validator

from rollfarm import foreign
from rollfarm.config import Config, ConfigError
from rollfarm.errors import EndpointFailed, PackageMissing
from rollfarm.secret import SOURCE, read_secret

KEYLESS = "none"
"""What an endpoint that asks for no key is given: the client insists on one."""

Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": ...}"""


class EndpointConfig(Config):
    """A model that answers OpenAI's chat completions: llm_proxy's own front door, or an outside one."""

    base_url: str
    """What goes before /chat/completions, for example "http://127.0.0.1:7702/v1"."""

    model: str
    """The name of the model there."""

    key: str = ""
    """Where the API key is kept: "env:NAME" or "file:/path". Empty is for an endpoint that asks for none."""

    seconds: float = Field(default=60.0, gt=0)
    """How long one attempt may take. The caller's own limit counts as well."""

    retries: int = Field(default=2, ge=0)
    """More attempts where the endpoint is away, overloaded or late, with growing rests between. 0 fails at once."""

    concurrency: int = Field(default=64, ge=1)
    """Questions asked at once by this process; more wait their turn."""

    @field_validator("key")
    @classmethod
    def _lies_elsewhere(cls, key: str) -> str:
        if key and not SOURCE.fullmatch(key):
            raise ValueError("a key is not kept in files. Write env:NAME or file:/path, where it lies.")
        return key


class Endpoint:
    """One endpoint, for the event loop that asks first. Its questions share connections and a bound."""

    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self._key = ""
        self._client: Any = None
        self._places = asyncio.Semaphore(config.concurrency)

    async def complete(
        self,
        messages: Iterable[Message],
        *,
        max_tokens: int = 512,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> str:
        """What the model says next. Raises EndpointFailed, and PackageMissing without the `openai` package."""
        try:
            import openai
        except ImportError:
            raise PackageMissing("The package openai is not installed: `pip install 'rollfarm[openai]'`.") from None
        if self._client is None:
            self._client = self._connect(openai)
        more = {} if seed is None else {"seed": seed}
        async with self._places:
            try:
                answer = await self._client.chat.completions.create(
                    model=self._config.model,
                    messages=list(messages),
                    max_tokens=max_tokens,
                    temperature=temperature,
                    **more,
                )
            except openai.OpenAIError as error:
                raise self._failed(foreign.cause(error)) from None
        return self._words(answer)

    async def close(self) -> None:
        """Let go of its connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _connect(self, openai: Any) -> Any:
        config = self._config
        try:
            self._key = read_secret("key", config.key, least=1) if config.key else ""
        except ConfigError as error:
            raise EndpointFailed(str(error), endpoint=config.base_url) from None
        return openai.AsyncOpenAI(
            base_url=config.base_url,
            api_key=self._key or KEYLESS,
            timeout=config.seconds,
            max_retries=config.retries,
        )

    def _words(self, answer: Any) -> str:
        try:
            return foreign.text(answer.choices[0].message.content or "", "the message's content")
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise self._failed(f"its answer is no chat completion ({foreign.cause(error)})") from None

    def _failed(self, cause: str) -> EndpointFailed:
        """Some endpoints repeat a key that they refuse."""
        shown = (cause.replace(self._key, "***") if self._key else cause).rstrip(".")
        url = self._config.base_url
        return EndpointFailed(f"{url} did not answer for {self._config.model!r}: {shown}.", endpoint=url)


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[EndpointConfig, Endpoint]] = WeakKeyDictionary()


def shared(config: EndpointConfig) -> Endpoint:
    """The one endpoint of this configuration in the running event loop: whoever asks shares its bound."""
    endpoints = _shared.setdefault(asyncio.get_running_loop(), {})
    return endpoints.setdefault(config, Endpoint(config))
