"""A router with its clock, its client and engines that are played by the test."""

from typing import Any

from llm_proxy.requests import OpenRequest
from llm_proxy.routing import Router
from llm_proxy.settings import RoutingSettings
from rollfarm import tokens
from rollfarm.error_wire import to_failure
from rollfarm.errors import EngineFailed
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, trajectory_pb2

STOP = trajectory_pb2.FINISH_REASON_STOP
LENGTH = trajectory_pb2.FINISH_REASON_LENGTH
ABORT = trajectory_pb2.FINISH_REASON_ABORT


OWN_FIELDS = ("min_version", "exact_version", "priority", "tenant")
"""Fields of ProxiedGeneration, beside the generation."""


class Client:
    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def answer(self, request: OpenRequest) -> None:
        assert request.request_id not in self.results
        self.results[request.request_id] = request.result()


class World:
    """A router with its clock and its client; what was sent to engines, what was cancelled there, and which left."""

    def __init__(self, **settings: Any) -> None:
        self.router = Router(RoutingSettings(**settings))
        self.client = Client()
        self.now = 0.0
        self.sent: list[tuple[str, Any]] = []
        self.cancelled: list[tuple[str, str]] = []
        self.left: list[str] = []

    def engine(self, name: str, *, version: int = 0, slots: int = 1, context: int = 100, instance: str = "") -> None:
        status = engine_pb2.EngineServiceGetStatusResponse(
            instance_id=instance or name,
            policy_version=version,
            slot_count=slots,
            context_token_count=context,
            vocabulary_size=50,
        )
        self.router.attach(name, name)
        self.router.connected(name, status, self.now)
        self.step()

    def ask(self, request_id: str, *, client: Client | None = None, tokens_: int = 4, **more: Any) -> None:
        self.router.submit(asked(request_id, tokens_, **more), client or self.client, self.now)

    def step(self) -> list[str]:
        """What was sent now, as request@engine."""
        effects = self.router.step(self.now)
        new = [(engine, generation) for engine, batch in effects.sends.items() for generation in batch]
        self.sent += new
        self.cancelled += [(engine, wire) for engine, wires in effects.cancels.items() for wire in wires]
        self.left += effects.left
        for waiter, request in effects.answers:
            waiter.answer(request)
        return [f"{generation.request_id.split('~')[0]}@{engine}" for engine, generation in new]

    def wait(self, seconds: float) -> list[str]:
        """What was sent when so much time had passed, with a step at every deadline as the fleet makes them."""
        sent: list[str] = []
        until = self.now + seconds
        while (deadline := self.router.next_deadline) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            sent += self.step()
        self.now = until
        return sent + self.step()

    def fail(self, engine: str, wire_id: str) -> list[str]:
        """The engine fails a request in a way that may pass."""
        broken = engine_pb2.GenerationChunk(request_id=wire_id)
        broken.failure.CopyFrom(to_failure(EngineFailed("Out of memory.")))
        self.router.receive(engine, broken, self.now)
        return self.step()

    def last_wire_id(self) -> str:
        """Of what was sent last."""
        return self.sent[-1][1].request_id

    def tell(self, engine: str, wire_id: str, ids: list[int], *, version: int = 0, reason: int = 0) -> list[str]:
        self.router.receive(engine, chunk(wire_id, ids, version=version, reason=reason), self.now)
        return self.step()


def asked(request_id: str, max_tokens: int = 4, **more: Any) -> Any:
    own = {name: more.pop(name) for name in OWN_FIELDS if name in more}
    prompt = more.pop("prompt", [1, 2])
    session_id = more.pop("session_id", "")
    return llm_proxy_pb2.ProxiedGeneration(
        generation=engine_pb2.Generation(
            request_id=request_id,
            prompt_token_ids=tokens.pack_ids(prompt),
            sampling=trajectory_pb2.Sampling(max_tokens=max_tokens, **more),
            session_id=session_id,
        ),
        **own,
    )


def chunk(wire_id: str, ids: list[int], *, version: int = 0, reason: int = 0) -> Any:
    spans = [trajectory_pb2.VersionSpan(policy_version=version, token_count=len(ids))] if ids else []
    return engine_pb2.GenerationChunk(
        request_id=wire_id,
        token_ids=tokens.pack_ids(ids),
        logprobs=tokens.pack_logprobs([-token / 4 for token in ids]),
        version_spans=spans,
        finish_reason=reason,  # pyright: ignore[reportArgumentType]
    )


def ids_of(result: Any) -> list[int]:
    return tokens.unpack_ids(result.token_ids).tolist()


def spans_of(result: Any) -> list[tuple[int, int]]:
    return [(span.policy_version, span.token_count) for span in result.version_spans]
