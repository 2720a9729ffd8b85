"""Settings of the front door for agents: the table [llm_proxy.http]."""

from typing import Any

from pydantic import Field, field_validator

from rollfarm.config import Config, Listen
from rollfarm.secret import SOURCE


class HttpConfig(Config):
    """The front door for agents that speak OpenAI's or Anthropic's HTTP: docs/agents.md."""

    enabled: bool = False
    """Whether it is open. It loads the model's tokenizer, some 100 MB."""

    listen: Listen = Listen(port=7702)
    """Where agents call."""

    base_url: str = ""
    """What OpenSession tells agents to call, without the /v1, for example "http://farm.example:7702". Empty is the
    address that it listens at, which suits agents on this machine."""

    model_names: list[str] = []
    """Names of the model that requests may give. Empty is the last part of model.path alone."""

    template: dict[str, Any] = {}
    """Variables for the model's chat template, for example {enable_thinking = false}."""

    keys: dict[str, str] = {}
    """Keys of people and programs that are not recorded, by the tenant that they count as; each is "env:NAME" or
    "file:/path", where the key itself is kept."""

    session_count: int = Field(default=10_000, ge=1)
    """Sessions kept at once, the closed ones of late included."""

    session_idle_seconds: float = Field(default=3600.0, gt=0)
    """A session that is not used for this long is forgotten with its record, unless OpenSession said otherwise."""

    session_tokens: int = Field(default=2_000_000, ge=1)
    """Tokens that a session may record in all its branches, about 16 bytes each; it is refused more. Two of the
    likeliest tokens that it asks for at a place count as one. Above 4 million, a record may not fit into one answer."""

    max_choices: int = Field(default=16, ge=1)
    """Most choices (n) of a request."""

    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    """Longest body of a request."""

    request_seconds: float = Field(default=600.0, gt=0)
    """How long a request may take, waiting included."""

    @field_validator("keys")
    @classmethod
    def _keys_lie_elsewhere(cls, keys: dict[str, str]) -> dict[str, str]:
        for name, source in keys.items():
            if not SOURCE.fullmatch(source):
                raise ValueError(f"{name}: a key is not kept in files. Write env:NAME or file:/path, where it lies.")
        return keys
