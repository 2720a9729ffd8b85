"""Who runs where: the central queue, the engines' slots and the weight gate, as one state machine.

No clock and no sockets: time is an argument, and what is to be done comes out of `step`, which has to be called after
every change and at `next_deadline`. `hand_out` is the urgent part of it, for before that. Invariants:

- An open request is in the line or with exactly one engine, and is answered once to each of its waiters.
- A request is only given to an engine that serves, satisfies the request's demand of a version and has a free slot, and
  to none while the gate is closed; after `step` no such engine is idle while a request that may run waits.
- A request that loses its engine goes before those of its priority that were not begun, and continues from the tokens
  that it has.
"""

from collections.abc import Mapping

from llm_proxy.choice import Choice, Chosen
from llm_proxy.histograms import Histogram
from llm_proxy.pool import (
    BEHIND,
    CONNECTING,
    DRAINING,
    SERVING,
    SUSPENDED,
    Attempt,
    EngineState,
    EngineStatus,
    Pool,
)
from llm_proxy.requests import ABORT, DONE, LENGTH, RUNNING, STOP, FinishReason, OpenRequest, Waiter, Watch
from llm_proxy.settings import RoutingSettings
from llm_proxy.stuck import StuckAttempts
from llm_proxy.tenants import Tenant, Tenants
from llm_proxy.versions import Lane
from llm_proxy.waiting import WaitingLine
from rollfarm.error_wire import from_failure
from rollfarm.errors import EngineFailed, FarmError, InvalidArgument, is_retryable
from rollfarm.tokens import token_count
from rollfarm.v1 import engine_pb2, llm_proxy_pb2

__all__ = ["BEHIND", "CONNECTING", "DRAINING", "SERVING", "SUSPENDED", "EngineState", "Router"]

_QUEUE_SECONDS = (0.0005, 0.002, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0, 120.0)


class Effects:
    """What a step asks for."""

    def __init__(self) -> None:
        self.sends: dict[str, list[engine_pb2.Generation]] = {}
        """New generations by engine, in order."""

        self.cancels: dict[str, list[str]] = {}
        """Ids on the wire by engine."""

        self.answers: list[tuple[Waiter, OpenRequest]] = []
        self.left: list[str] = []
        """Engines that drained, and are detached."""


class Router:
    """Every request and every engine of one policy."""

    def __init__(self, settings: RoutingSettings | None = None) -> None:
        self._settings = settings or RoutingSettings()
        self._tenants = Tenants(self._settings.tenants)
        self._line = WaitingLine(self._tenants, self._settings.version_wait_seconds)
        self._pool = Pool(self._settings)
        self._choice = Choice(self._settings)
        self._stuck = StuckAttempts(self._settings.stuck_seconds)
        self._open: dict[str, OpenRequest] = {}
        self._effects = Effects()
        self._arrivals = 0
        self._wire_ids = 0
        self.gate_closed = False
        self.generated_count = 0
        self.finished_count = 0
        self.resumption_count = 0
        self.moved_count = 0
        """Stuck requests taken from their engine."""

        self.queue_seconds = Histogram(_QUEUE_SECONDS)
        """What each request spent in the line, each time it did."""

    # --- what clients do ---

    def submit(
        self, asked: llm_proxy_pb2.ProxiedGeneration, waiter: Waiter, now: float, *, watch: Watch | None = None
    ) -> OpenRequest:
        """Open a request, or join the open one of the same id. The one who opens it may `watch` its tokens come.

        Raises VersionUnavailable when the exact version is gone, QuotaExceeded when the tenant has too many open, and
        InvalidArgument when the open one is different.
        """
        generation = asked.generation
        request_id = generation.request_id
        first = self._open.get(request_id)
        if first is not None:
            if first.asked != asked:
                raise InvalidArgument(f"Request {request_id!r} is open and different.", request_id=request_id)
            if waiter not in first.waiters:
                first.waiters.append(waiter)
            return first
        if self._pool.served.is_gone(asked):
            raise self._pool.served.gone(asked)
        tenant = self._tenants.enter(asked.tenant)
        self._arrivals += 1
        request = OpenRequest(asked, generation, request_id, self._arrivals, [waiter], tenant, now, watch)
        self._open[request_id] = request
        self._line.put(request, now)
        return request

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

    # --- what operators do ---

    def attach(self, engine_id: str, address: str) -> None:
        """Add an engine, or keep one that drains. Idempotent."""
        self._pool.attach(engine_id, address)

    def detach(self, engine_id: str, now: float) -> None:
        """Remove an engine; its requests continue elsewhere. Raises UnknownEngine."""
        engine = self.engine(engine_id)
        self._lose(engine, "detached", now)
        self._pool.remove(engine)

    def drain(self, engine_id: str) -> None:
        """Give an engine nothing more; it leaves when it has nothing left. Raises UnknownEngine."""
        self._pool.drain(self.engine(engine_id))

    # --- what engines do ---

    def connected(self, engine_id: str, status: EngineStatus, now: float) -> None:
        """An engine is reachable and has none of our requests."""
        self._pool.connected(self.engine(engine_id), status, now)
        self._follow_versions(now)

    def reported(self, engine_id: str, status: EngineStatus, now: float) -> None:
        """A reachable engine said how it is."""
        self._pool.reported(self.engine(engine_id), status, now)
        self._follow_versions(now)

    def lost(self, engine_id: str, detail: str, now: float) -> None:
        """An engine cannot be reached, or its stream broke: its requests continue elsewhere."""
        self._lose(self.engine(engine_id), detail, now)

    def receive(self, engine_id: str, chunk: engine_pb2.GenerationChunk, now: float) -> None:
        """An engine generated tokens, or is done with a request. Raises EngineMisbehaved."""
        engine = self._pool.engine(engine_id)
        attempt = engine.attempts.get(chunk.request_id)
        if attempt is None:
            return
        if chunk.token_ids or chunk.version_spans:
            self._take_tokens(engine, attempt, chunk, now)
        error = from_failure(chunk.failure) if chunk.HasField("failure") else None
        if chunk.finish_reason or error is not None:
            self._conclude(engine, attempt, chunk.finish_reason, error, now)
        elif attempt.request is not None and attempt.request.broke_exact_version():
            self._refuse_version(attempt.request, now)

    # --- what the trainer does ---

    def close_gate(self) -> None:
        """Give out nothing until the gate opens."""
        self.gate_closed = True

    def open_gate(self) -> None:
        self.gate_closed = False

    def begin_roll(self) -> None:
        """From now on engines change one after another, and serve the newest version of now until it is their turn."""
        self._pool.begin_roll()

    def end_roll(self, now: float) -> None:
        """An engine that does not serve the newest version now is behind."""
        self._pool.end_roll()
        self._follow_versions(now)

    def hold(self, engine_id: str) -> None:
        """Give an engine nothing, and expect nothing, while it takes weights."""
        if (engine := self._pool.find(engine_id)) is not None:
            self._pool.hold(engine)

    def release(self, engine_id: str, now: float) -> None:
        if (engine := self._pool.find(engine_id)) is not None:
            self._pool.release(engine, now)

    def served(self, instances: Mapping[str, str], policy_version: int, now: float) -> None:
        """These engines, each named with the instance that said so, serve the version now.

        It becomes the policy's unless a newer one is. An engine that was restarted since has lost it.
        """
        for engine_id, instance_id in instances.items():
            engine = self._pool.find(engine_id)
            if engine is not None and engine.is_reached and engine.status.instance_id == instance_id:
                self._pool.set_version(engine, policy_version)
        self._follow_versions(now)

    # --- what is to be done ---

    def step(self, now: float) -> Effects:
        """Do what time demands and give waiting requests to free engines; everything to do since the last step."""
        self._look_at_time(now)
        if not self.gate_closed:
            self._give_out(now)
            self._move_stuck(now)
        for engine in self._pool.drained():
            self._pool.remove(engine)
            self._effects.left.append(engine.engine_id)
        return self._take_effects()

    def hand_out(self, now: float) -> Effects:
        """The part of a step that requests wait for: the first one is given out as soon as it is there."""
        if not self.gate_closed:
            self._give_out(now)
        return self._take_effects()

    def _take_effects(self) -> Effects:
        effects, self._effects = self._effects, Effects()
        return effects

    @property
    def next_deadline(self) -> float | None:
        """When to step although nothing happened; None is never."""
        deadlines = (self._line.next_deadline, self._pool.next_check, self._stuck.next_check)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # --- how things are ---

    @property
    def policy_version(self) -> int:
        """The newest version that an engine serves; it only grows. Every engine has to serve it.

        In a roll it is the new version from the first engine that changed; those whose turn is yet to come go on with
        the one that the roll began with, and are not behind before the roll ends.
        """
        return self._pool.served.newest

    @property
    def revision(self) -> int:
        """Grows when an engine joins, leaves, restarts or changes state or version."""
        return self._pool.revision

    @property
    def engines(self) -> list[EngineState]:
        return self._pool.engines

    def engine(self, engine_id: str) -> EngineState:
        """Raises UnknownEngine."""
        return self._pool.engine(engine_id)

    @property
    def tenants(self) -> list[Tenant]:
        """Every tenant with open requests."""
        return self._tenants.open

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
        return self._pool.context_tokens

    @property
    def vocabulary_size(self) -> int:
        """Token ids that every engine known has. 0 is unknown."""
        return self._pool.vocabulary_size

    def unconfirmed_cancels(self, engine_id: str) -> list[str]:
        """Requests that left the engine, whose slots it still holds, by id on the wire."""
        return [wire_id for wire_id, attempt in self.engine(engine_id).attempts.items() if attempt.request is None]

    # --- how requests come to engines ---

    def _look_at_time(self, now: float) -> None:
        for request in self._line.overdue(now):
            self._close(request, now)
            self._refuse(request, self._pool.served.not_served(request.asked))
        for engine in self._pool.check(now):
            for attempt in engine.attempts.values():
                if attempt.request is not None:
                    self._stuck.add(attempt)
        self._stuck.check(now)

    def _give_out(self, now: float) -> None:
        if not self._line:
            return
        for request in self._line.pop_arrived(self._pool.free_slots):
            self._start(request, self._choice.choose(request, self._pool.candidates(Lane.ANY)), now)
        while self._line and (lanes := self._pool.free_lanes()) and (popped := self._line.pop(lanes)) is not None:
            request, lane = popped
            self._start(request, self._choice.choose(request, self._pool.candidates(lane)), now)

    def _move_stuck(self, now: float) -> None:
        """Let stuck requests continue on engines that nobody waits for."""
        for attempt in self._stuck.attempts:
            request = attempt.request
            assert request is not None
            engine = self.engine(request.engine_id)
            others = self._others(request, engine)
            if others and attempt.tenant.may_start and not engine.stands_still:
                self._leave_engine(request, now)
                self.moved_count += 1
                if self._goes_on(request, attempt, engine, cause=f"engine {engine.engine_id} brought no token"):
                    self._start(request, self._choice.choose(request, others), now)

    def _others(self, request: OpenRequest, engine: EngineState) -> list[EngineState]:
        lane = self._pool.served.lane(request)
        return [] if lane is None else [other for other in self._pool.free_for(lane) if other is not engine]

    def _start(self, request: OpenRequest, chosen: Chosen, now: float) -> None:
        engine, prompt_cost = chosen
        wire_id = self._wire_id(request, engine)
        self.queue_seconds.observe(now - request.since)
        request.leave_place(now)
        request.place, request.engine_id, request.wire_id = RUNNING, engine.engine_id, wire_id
        self.resumption_count += request.attempts > 0
        request.attempts += 1
        left = request.left
        prepaid = self._tenants.started(request.tenant, prompt_cost, left)
        attempt = Attempt(request, wire_id, request.tenant, prompt_cost + left, prepaid, request.made, now)
        self._pool.start(engine, attempt, now)
        self._stuck.watch(attempt)
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

    # --- how they come back ---

    def _take_tokens(
        self, engine: EngineState, attempt: Attempt, chunk: engine_pb2.GenerationChunk, now: float
    ) -> None:
        request = attempt.request
        count = token_count(chunk.token_ids) if request is None else request.append(chunk)
        self.generated_count += count
        self._pool.progressed(engine, attempt, count, now)
        self._stuck.progressed(attempt)
        paid = min(count, attempt.prepaid)
        attempt.prepaid -= paid
        if count > paid:
            self._tenants.generated(attempt.tenant, count - paid)

    def _conclude(
        self,
        engine: EngineState,
        attempt: Attempt,
        reason: "FinishReason.ValueType",
        error: FarmError | None,
        now: float,
    ) -> None:
        """An attempt is over: answer its request, or let that continue elsewhere."""
        if error is not None and is_retryable(error):
            self._pool.failed(engine, attempt, str(error), now)
        elif reason in (STOP, LENGTH):
            engine.breaker.finished()
        self._pool.end(engine, attempt)
        self._settle(attempt)
        request = attempt.request
        if request is None:
            return
        request.leave_place(now)
        request.place = DONE
        if request.broke_exact_version():
            self._refuse(request, self._pool.served.gone(request.asked))
        elif error is not None and not is_retryable(error):
            self._refuse(request, error)
        elif error is None and reason in (STOP, LENGTH):
            self._tenants.learn(request.tenant, request.made)
            self._finish(request, reason)
        else:
            cause = str(error) if error is not None else f"engine {request.engine_id} gave it back"
            self._requeue(request, attempt, engine, now, cause=cause)

    def _lose(self, engine: EngineState, detail: str, now: float) -> None:
        """Take everything back from an engine."""
        self._effects.cancels.pop(engine.engine_id, None)
        attempts = list(engine.attempts.values())
        self._pool.lost(engine, detail, now)
        for attempt in attempts:
            self._settle(attempt)
            if attempt.request is not None:
                attempt.request.leave_place(now)
                self._requeue(attempt.request, attempt, engine, now, cause=f"engine {engine.engine_id}: {detail}")

    def _settle(self, attempt: Attempt) -> None:
        """An attempt holds no slot any more."""
        self._stuck.forget(attempt)
        self._tenants.ended(attempt.tenant, attempt.prepaid)

    def _requeue(self, request: OpenRequest, attempt: Attempt, engine: EngineState, now: float, *, cause: str) -> None:
        request.place = DONE
        if self._goes_on(request, attempt, engine, cause=cause):
            self._line.put(request, now)

    def _goes_on(self, request: OpenRequest, attempt: Attempt, engine: EngineState, *, cause: str) -> bool:
        """Whether there is more to generate, by whoever is next. Answers the request if not."""
        if request.made > attempt.made_before:
            request.fruitless_attempts = 0
        elif not (self.gate_closed or engine.stands_still):
            request.fruitless_attempts += 1
        reason = request.completed(self.context_tokens)
        if reason is not None:
            self._finish(request, reason)
        elif request.fruitless_attempts > self._settings.max_fruitless_attempts:
            problem = f"{request.fruitless_attempts} engines in a row added no token; the last one: {cause}."
            self._refuse(request, EngineFailed(problem, request_id=request.request_id, cause=cause))
        elif self._pool.served.is_gone(request.asked):
            self._refuse(request, self._pool.served.gone(request.asked))
        else:
            return True
        return False

    # --- how they end ---

    def _close(self, request: OpenRequest, now: float) -> None:
        """Take an open request from where it is."""
        if request.place is RUNNING:
            self._leave_engine(request, now)
        else:
            request.leave_place(now)
            self._line.remove(request)
        self._forget(request)

    def _leave_engine(self, request: OpenRequest, now: float) -> None:
        """Cancel a running request at its engine, which holds its slot until it confirms."""
        request.leave_place(now)
        request.place = DONE
        attempt = self.engine(request.engine_id).attempts[request.wire_id]
        attempt.request = None
        self._stuck.forget(attempt)
        self._effects.cancels.setdefault(request.engine_id, []).append(request.wire_id)

    def _finish(self, request: OpenRequest, reason: "FinishReason.ValueType") -> None:
        request.finish_reason = reason
        self._answer(request)

    def _refuse(self, request: OpenRequest, error: FarmError) -> None:
        request.refusal = error
        self._answer(request)

    def _refuse_version(self, request: OpenRequest, now: float) -> None:
        self._close(request, now)
        self._refuse(request, self._pool.served.gone(request.asked))

    def _answer(self, request: OpenRequest) -> None:
        self._forget(request)
        request.place = DONE
        self.finished_count += 1
        for waiter in request.waiters:
            self._effects.answers.append((waiter, request))

    def _forget(self, request: OpenRequest) -> None:
        if self._open.pop(request.request_id, None) is not None:
            self._tenants.leave(request.tenant)

    def _follow_versions(self, now: float) -> None:
        """The line learns which versions are served; whose exact version is gone is refused."""
        if self._pool.served != self._line.served:
            for request in self._line.serve(self._pool.served):
                self._refuse_version(request, now)
