"""Who runs where: the central queue, the engines' slots, session affinity and the weight gate, as one state machine.

No clock and no sockets: time is an argument, and what is to be done comes out of `step`. Invariants:

- An open request is in the line or with exactly one engine, and is answered once to each of its waiters.
- Only an engine that serves the policy version and has a free slot is given a request, and none while the gate is
  closed; after `step` no such engine is idle while a request that may run waits.
- A request that loses its engine goes to the head of its priority and continues from the tokens that it has.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from llm_proxy.requests import ABORT, LENGTH, STOP, FinishReason, OpenRequest, Place, Waiter
from llm_proxy.waiting import WaitingLine
from rollfarm.errors import (
    EngineFailed,
    FarmError,
    InvalidArgument,
    UnknownEngine,
    VersionUnavailable,
    from_failure,
    is_retryable,
    to_failure,
)
from rollfarm.tokens import token_count
from rollfarm.v1 import engine_pb2, llm_proxy_pb2

CONNECTING = llm_proxy_pb2.Engine.STATE_CONNECTING
BEHIND = llm_proxy_pb2.Engine.STATE_BEHIND
SERVING = llm_proxy_pb2.Engine.STATE_SERVING

EngineStatus = engine_pb2.EngineServiceGetStatusResponse


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """What an operator may choose. The configuration explains each."""

    oversubscription: float = 1.0
    affinity_bound_tokens: int = 2048
    session_count: int = 100_000
    max_fruitless_attempts: int = 8


@dataclass(slots=True, eq=False)
class Attempt:
    """One request's stay with one engine. It holds a slot until the engine says that it is over."""

    request: OpenRequest | None
    """None once the request was cancelled and the engine has not confirmed it."""

    load: int
    """Tokens that it may still cost the engine."""

    made_before: int
    """Tokens that the request brought along."""


@dataclass(slots=True, eq=False)
class EngineState:
    """An engine as routing sees it."""

    engine_id: str
    address: str
    state: "llm_proxy_pb2.Engine.State.ValueType" = CONNECTING
    status: EngineStatus = field(default_factory=EngineStatus)
    """Its last word about itself, except the version."""

    version: int = 0
    detail: str = "not reached yet"
    attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    """By id on the wire."""

    load: int = 0
    """Outstanding tokens of the attempts."""

    generated: int = 0
    """Tokens generated through this llm_proxy."""


@dataclass(slots=True)
class Effects:
    """What a step asks for."""

    sends: dict[str, list[engine_pb2.Generation]] = field(default_factory=dict[str, list[engine_pb2.Generation]])
    """New generations by engine, in order."""

    cancels: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Ids on the wire by engine."""

    answers: list[tuple[Waiter, llm_proxy_pb2.GenerationResult]] = field(
        default_factory=list[tuple[Waiter, llm_proxy_pb2.GenerationResult]]
    )
    waits: list[float] = field(default_factory=list[float])
    """Seconds that each request sent spent in the line, this time."""


class Router:
    """Every request and every engine of one policy."""

    def __init__(self, settings: RoutingSettings | None = None) -> None:
        self._settings = settings or RoutingSettings()
        self._line = WaitingLine()
        self._open: dict[str, OpenRequest] = {}
        self._engines: dict[str, EngineState] = {}
        self._free: dict[str, EngineState] = {}
        self._sessions: dict[str, str] = {}
        self._effects = Effects()
        self._arrivals = 0
        self._wire_ids = 0
        self.policy_version = 0
        """The version that engines must serve; it only grows."""

        self.revision = 0
        """Grows when an engine joins, leaves, restarts or changes state or version."""

        self.gate_closed = False
        self.generated_count = 0
        self.finished_count = 0
        self.resumption_count = 0

    # --- what clients do ---

    def submit(self, asked: llm_proxy_pb2.ProxiedGeneration, waiter: Waiter, now: float) -> None:
        """Open a request, or join the open one of the same id.

        Raises VersionUnavailable when the exact version is gone, and InvalidArgument when the open one is different.
        """
        request_id = asked.generation.request_id
        first = self._open.get(request_id)
        if first is not None:
            if first.asked != asked:
                raise InvalidArgument(f"Request {request_id!r} is open and different.", request_id=request_id)
            if waiter not in first.waiters:
                first.waiters.append(waiter)
            return
        self._check_version(asked)
        self._arrivals += 1
        request = OpenRequest(asked, self._arrivals, [waiter], now)
        self._open[request_id] = request
        self._line.put(request, self.policy_version)

    def withdraw(self, request_id: str, waiter: Waiter, now: float) -> None:
        """A waiter is gone; with the last one goes the request."""
        request = self._open.get(request_id)
        if request is None or waiter not in request.waiters:
            return
        request.waiters.remove(waiter)
        if not request.waiters:
            self._close(request, now)

    def cancel(self, request_id: str, now: float) -> None:
        """Answer an open request with the tokens that it has."""
        if (request := self._open.get(request_id)) is not None:
            self._close(request, now)
            self._finish(request, ABORT)

    # --- what engines do ---

    def attach(self, engine_id: str, address: str) -> None:
        """Add an engine. Idempotent."""
        if engine_id not in self._engines:
            self._engines[engine_id] = EngineState(engine_id, address)
            self.revision += 1

    def detach(self, engine_id: str, now: float) -> None:
        """Remove an engine; its requests continue elsewhere. Raises UnknownEngine."""
        engine = self.engine(engine_id)
        engine.detail = "detached"
        self._give_back_all(engine, now)
        del self._engines[engine_id]
        self._free.pop(engine_id, None)
        self.revision += 1

    def connected(self, engine_id: str, status: EngineStatus, now: float) -> None:
        """An engine is reachable and has none of our requests."""
        engine = self.engine(engine_id)
        engine.state = BEHIND
        engine.status = status
        engine.detail = ""
        self.revision += 1
        self._set_version(engine, status.policy_version, now)

    def reported(self, engine_id: str, status: EngineStatus, now: float) -> None:
        """A reachable engine said how it is."""
        engine = self.engine(engine_id)
        engine.status = status
        if status.policy_version != engine.version:
            self._set_version(engine, status.policy_version, now)
        self._refresh_free(engine)

    def lost(self, engine_id: str, detail: str, now: float) -> None:
        """An engine cannot be reached, or its stream broke: its requests continue elsewhere."""
        engine = self.engine(engine_id)
        engine.detail = detail
        if engine.state != CONNECTING:
            engine.state = CONNECTING
            self.revision += 1
        self._give_back_all(engine, now)
        self._refresh_free(engine)

    def receive(self, engine_id: str, chunk: engine_pb2.GenerationChunk, now: float) -> None:
        """An engine generated tokens, or is done with a request. Raises EngineMisbehaved."""
        engine = self.engine(engine_id)
        attempt = engine.attempts.get(chunk.request_id)
        if attempt is None:
            return
        if chunk.token_ids or chunk.version_spans:
            self._take_tokens(engine, attempt, chunk)
        if not chunk.finish_reason and not chunk.HasField("failure"):
            if attempt.request is not None and attempt.request.broke_exact_version():
                self._refuse_version(attempt.request, now)
            return
        self._end_attempt(engine, chunk.request_id)
        if attempt.request is not None:
            self._conclude(attempt.request, attempt, chunk, now)

    # --- what the trainer does ---

    def close_gate(self) -> None:
        """Give out nothing until the gate opens."""
        self.gate_closed = True

    def open_gate(self) -> None:
        self.gate_closed = False

    def served(self, instances: Mapping[str, str], policy_version: int, now: float) -> None:
        """These engines, each named with the instance that said so, serve the version now.

        It becomes the policy's unless a newer one is. An engine that was restarted since has lost it.
        """
        for engine_id, instance_id in instances.items():
            engine = self._engines.get(engine_id)
            if engine is not None and engine.state != CONNECTING and engine.status.instance_id == instance_id:
                self._set_version(engine, policy_version, now)

    # --- what is to be done ---

    def step(self, now: float) -> Effects:
        """Give waiting requests to free engines; return everything to do since the last step."""
        while self._free and not self.gate_closed and (request := self._line.pop()) is not None:
            self._start(request, self._choose(request), now)
        effects, self._effects = self._effects, Effects()
        return effects

    # --- how things are ---

    @property
    def engines(self) -> list[EngineState]:
        return list(self._engines.values())

    def engine(self, engine_id: str) -> EngineState:
        """Raises UnknownEngine."""
        engine = self._engines.get(engine_id)
        if engine is None:
            raise UnknownEngine(f"No engine {engine_id!r} is attached.", engine_id=engine_id)
        return engine

    @property
    def waiting_count(self) -> int:
        """Requests without an engine."""
        return len(self._line)

    @property
    def running_count(self) -> int:
        """Requests with an engine."""
        return len(self._open) - len(self._line)

    @property
    def context_tokens(self) -> int:
        """Prompt and output together at most: what every engine known takes. 0 is unknown."""
        return _least(engine.status.context_token_count for engine in self._engines.values())

    @property
    def vocabulary_size(self) -> int:
        """Token ids that every engine known has. 0 is unknown."""
        return _least(engine.status.vocabulary_size for engine in self._engines.values())

    def unconfirmed_cancels(self, engine_id: str) -> list[str]:
        """Cancelled requests whose slots the engine still holds, by id on the wire."""
        attempts = self.engine(engine_id).attempts
        return [wire_id for wire_id, attempt in attempts.items() if attempt.request is None]

    # --- how it is done ---

    def _start(self, request: OpenRequest, engine: EngineState, now: float) -> None:
        wire_id = self._wire_id(request, engine)
        self._effects.waits.append(now - request.since)
        request.leave_place(now)
        request.place, request.engine_id, request.wire_id = Place.RUNNING, engine.engine_id, wire_id
        self.resumption_count += request.attempts > 0
        request.attempts += 1
        attempt = Attempt(request, request.outstanding, request.made)
        engine.attempts[wire_id] = attempt
        engine.load += attempt.load
        self._refresh_free(engine)
        self._effects.sends.setdefault(engine.engine_id, []).append(request.continuation(wire_id))

    def _wire_id(self, request: OpenRequest, engine: EngineState) -> str:
        """The request's own id, unless the engine may know it from an earlier attempt."""
        wire_id = request.request_id
        while request.attempts or wire_id in engine.attempts:
            self._wire_ids += 1
            wire_id = f"{request.request_id}~{self._wire_ids}"
            if wire_id not in engine.attempts:
                break
        return wire_id

    def _choose(self, request: OpenRequest) -> EngineState:
        """The free engine with least to do, or the session's while it has little more."""
        best = min(self._free.values(), key=_load)
        session = request.asked.generation.session_id
        if not session:
            return best
        affine = self._free.get(self._sessions.pop(session, ""))
        if affine is not None and affine.load - best.load <= self._settings.affinity_bound_tokens:
            best = affine
        self._sessions[session] = best.engine_id
        if len(self._sessions) > self._settings.session_count:
            del self._sessions[next(iter(self._sessions))]
        return best

    def _take_tokens(self, engine: EngineState, attempt: Attempt, chunk: engine_pb2.GenerationChunk) -> None:
        count = token_count(chunk.token_ids)
        if attempt.request is not None:
            attempt.request.append(chunk)
        spent = min(count, attempt.load)
        attempt.load -= spent
        engine.load -= spent
        engine.generated += count
        self.generated_count += count

    def _conclude(self, request: OpenRequest, attempt: Attempt, chunk: engine_pb2.GenerationChunk, now: float) -> None:
        """A request's attempt is over: answer it, or let it continue elsewhere."""
        request.leave_place(now)
        request.place = Place.DONE
        if request.broke_exact_version():
            self._refuse(request, self._version_gone(request.asked))
        elif chunk.HasField("failure"):
            error = from_failure(chunk.failure)
            if is_retryable(error):
                self._requeue(request, attempt, now, cause=str(error))
            else:
                self._refuse(request, error)
        elif chunk.finish_reason in (STOP, LENGTH):
            self._finish(request, chunk.finish_reason)
        else:
            self._requeue(request, attempt, now, cause=f"engine {request.engine_id} gave it back")

    def _give_back_all(self, engine: EngineState, now: float) -> None:
        self._effects.cancels.pop(engine.engine_id, None)
        attempts, engine.attempts, engine.load = engine.attempts, {}, 0
        for attempt in attempts.values():
            if attempt.request is not None:
                attempt.request.leave_place(now)
                self._requeue(attempt.request, attempt, now, cause=f"engine {engine.engine_id}: {engine.detail}")

    def _requeue(self, request: OpenRequest, attempt: Attempt, now: float, *, cause: str) -> None:
        request.since = now
        if request.made > attempt.made_before:
            request.fruitless_attempts = 0
        elif not self.gate_closed:
            request.fruitless_attempts += 1
        reason = request.completed(self.context_tokens)
        if reason is not None:
            self._finish(request, reason)
        elif request.fruitless_attempts > self._settings.max_fruitless_attempts:
            problem = f"{request.fruitless_attempts} engines in a row added no token; the last one: {cause}."
            self._refuse(request, EngineFailed(problem, request_id=request.request_id, cause=cause))
        elif self._is_version_gone(request.asked):
            self._refuse(request, self._version_gone(request.asked))
        else:
            self._line.put(request, self.policy_version)

    def _close(self, request: OpenRequest, now: float) -> None:
        """Take an open request from where it is; its engine is told, and holds its slot until it confirms."""
        request.leave_place(now)
        if request.place is Place.RUNNING:
            self._engines[request.engine_id].attempts[request.wire_id].request = None
            self._effects.cancels.setdefault(request.engine_id, []).append(request.wire_id)
        else:
            self._line.remove(request)
        request.place = Place.DONE
        del self._open[request.request_id]

    def _finish(self, request: OpenRequest, reason: "FinishReason.ValueType") -> None:
        self._answer(request, request.result(reason))

    def _refuse(self, request: OpenRequest, error: FarmError) -> None:
        self._answer(request, refusal(request.request_id, error))

    def _answer(self, request: OpenRequest, result: llm_proxy_pb2.GenerationResult) -> None:
        self._open.pop(request.request_id, None)
        request.place = Place.DONE
        self.finished_count += 1
        for waiter in request.waiters:
            self._effects.answers.append((waiter, result))

    def _refuse_version(self, request: OpenRequest, now: float) -> None:
        self._close(request, now)
        self._refuse(request, self._version_gone(request.asked))

    def _end_attempt(self, engine: EngineState, wire_id: str) -> None:
        engine.load -= engine.attempts.pop(wire_id).load
        self._refresh_free(engine)

    def _set_version(self, engine: EngineState, version: int, now: float) -> None:
        changed = version != engine.version
        engine.version = version
        if version > self.policy_version:
            self.policy_version = version
            for request in self._line.advance(version):
                self._refuse_version(request, now)
            for other in self._engines.values():
                changed = self._refresh_state(other) or changed
        changed = self._refresh_state(engine) or changed
        self.revision += changed

    def _refresh_state(self, engine: EngineState) -> bool:
        """Whether the state changed."""
        before = engine.state
        if engine.state != CONNECTING:
            engine.state = SERVING if engine.version == self.policy_version else BEHIND
            behind = f"serves version {engine.version}, waits for {self.policy_version}"
            engine.detail = behind if engine.state == BEHIND else ""
        self._refresh_free(engine)
        return engine.state != before

    def _refresh_free(self, engine: EngineState) -> None:
        if engine.state == SERVING and len(engine.attempts) < self._capacity(engine):
            self._free[engine.engine_id] = engine
        else:
            self._free.pop(engine.engine_id, None)

    def _capacity(self, engine: EngineState) -> int:
        return int(engine.status.slot_count * self._settings.oversubscription)

    def _check_version(self, asked: llm_proxy_pb2.ProxiedGeneration) -> None:
        if self._is_version_gone(asked):
            raise self._version_gone(asked)

    def _is_version_gone(self, asked: llm_proxy_pb2.ProxiedGeneration) -> bool:
        return asked.HasField("exact_version") and asked.exact_version < self.policy_version

    def _version_gone(self, asked: llm_proxy_pb2.ProxiedGeneration) -> VersionUnavailable:
        return VersionUnavailable(
            f"Version {asked.exact_version} is gone; {self.policy_version} is served.",
            exact_version=asked.exact_version,
            policy_version=self.policy_version,
        )


def refusal(request_id: str, error: FarmError) -> llm_proxy_pb2.GenerationResult:
    """The answer to a request that is refused."""
    return llm_proxy_pb2.GenerationResult(request_id=request_id, failure=to_failure(error))


def _load(engine: EngineState) -> int:
    return engine.load


def _least(sizes: Iterable[int]) -> int:
    return min((size for size in sizes if size), default=0)
