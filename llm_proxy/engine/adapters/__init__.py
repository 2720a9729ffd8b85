"""The seam between the host and an engine. A new engine is one file in this folder and one line in `make`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from llm_proxy.engine.config import EngineRoot
from llm_proxy.engine.requests import Chunk, Limits, Request
from rollfarm.v1 import engine_pb2

UpdateMode = engine_pb2.UpdateMode.ValueType

Deliver = Callable[[Sequence[Chunk]], None]
"""Takes what requests added. Called in the event loop, at most once for each step of the engine."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How an engine stands."""

    policy_version: int = 0
    """The version served; 0 is the base model."""

    running_count: int = 0
    waiting_count: int = 0
    generated_token_count: int = 0
    paused: bool = False
    kv_cache_usage: float = 0.0
    """Share of the KV cache in use."""

    sleeping: bool = False
    """Whether it can generate nothing: its memory is given away, or it woke up and has no weights yet."""

    server_version: str = ""
    """Of the inference server; empty where there is none."""


class Adapter(Protocol):
    """One engine. Every method belongs to the event loop; none blocks it."""

    name: str
    """As configured."""

    limits: Limits
    """Known after `start`."""

    async def start(self, deliver: Deliver) -> None:
        """Load the model and be ready. Raises ConfigError."""
        ...

    async def watch(self) -> None:
        """Return when the engine was stopped; raise when it died by itself."""
        ...

    async def stop(self) -> None:
        """End the engine. Open requests get no more chunks."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin requests. Each ends with a chunk that has `finish` or `failure`."""
        ...

    def cancel(self, keys: Sequence[str]) -> None:
        """Stop requests. Each that is open still ends with a chunk, ABORT."""
        ...

    async def pause(self) -> None:
        """Stand still at the next token boundary; answers when it does."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def join_weights(self, group: engine_pb2.WeightGroup) -> None:
        """Raises WeightsFailed."""
        ...

    async def stage_weights(self, request: engine_pb2.StageWeightsRequest) -> int:
        """Bytes received. Raises WeightsMismatch and WeightsFailed."""
        ...

    async def apply_weights(self, policy_version: int, mode: UpdateMode) -> float:
        """Seconds that decoding stood still. The version already served costs none. Raises WeightsNotStaged."""
        ...

    async def discard_weights(self, policy_version: int) -> None:
        """Forget a staged version; others are left alone."""
        ...

    async def sleep(self, *, discard_weights: bool) -> None:
        """Give open requests back, ABORT, and free the memory of the KV cache, and of the weights where asked.

        Later requests wait. Asleep already, only what is still held is freed. Raises Unsupported.
        """
        ...

    async def wake_up(self) -> None:
        """Take the memory back and go on; where the weights were discarded, once a version has been applied since.

        Awake, it does nothing. Raises Unsupported.
        """
        ...

    async def check(self) -> None:
        """Raises EngineFailed where the engine does not answer, though its process lives."""
        ...

    def status(self) -> EngineStatus:
        """How it stands, not older than the last step."""
        ...


def make(root: EngineRoot) -> Adapter:
    """The adapter that is configured. Imports only what it needs."""
    if root.engine.adapter == "vllm":
        from llm_proxy.engine.adapters.served import ServedAdapter
        from llm_proxy.engine.adapters.vllm_server import VllmServer

        return ServedAdapter("vllm", VllmServer(root.model, root.engine), root.model, root.engine)
    if root.engine.adapter == "sglang":
        from llm_proxy.engine.adapters.served import ServedAdapter
        from llm_proxy.engine.adapters.sglang_server import SglangServer

        return ServedAdapter("sglang", SglangServer(root.model, root.engine), root.model, root.engine)
    if root.engine.adapter == "simulated":
        from llm_proxy.engine.adapters.simulated import SimulatedAdapter

        return SimulatedAdapter(root.engine)
    from llm_proxy.engine.adapters.embedded import EmbeddedAdapter

    return EmbeddedAdapter(root.model, root.engine)
