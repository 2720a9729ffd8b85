"""Something under load: the engine alone, llm_proxy, or a peer, each asked in its own way and in the same patterns."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

from load_tests.proxying.flow import Flow
from load_tests.proxying.patterns import Pattern
from load_tests.proxying.servers import Engine

Ask = partial[Flow]
"""Takes a pattern; runs in a client process."""

Plan = Mapping[str, Pattern]
"""What is measured, in order, by name."""


@dataclass(frozen=True)
class System:
    """How it is started before an engine, and what of it is measured."""

    name: str
    protocol: Literal["grpc", "http"]
    """Of its engines."""

    start: Callable[[Engine], AbstractContextManager[Ask]]
    plans: Mapping[float, Plan]
    """By the seconds that the engine takes."""
