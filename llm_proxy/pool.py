"""The engines as routing sees them: state, version, breaker, slots, and who may be given a request now.

Invariants: an engine is known as free, or as free for a probe, exactly while it may be given a request, the gate aside;
an attempt holds its slot until its engine says that it is over, or is lost.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from llm_proxy.breakers import Breaker, Phase
from llm_proxy.heaps import Heap
from llm_proxy.requests import OpenRequest
from llm_proxy.settings import RoutingSettings
from llm_proxy.tenants import Tenant
from llm_proxy.versions import Lane, Served
from rollfarm.errors import UnknownEngine
from rollfarm.v1 import engine_pb2, llm_proxy_pb2

CONNECTING = llm_proxy_pb2.Engine.STATE_CONNECTING
BEHIND = llm_proxy_pb2.Engine.STATE_BEHIND
SERVING = llm_proxy_pb2.Engine.STATE_SERVING
SUSPENDED = llm_proxy_pb2.Engine.STATE_SUSPENDED
DRAINING = llm_proxy_pb2.Engine.STATE_DRAINING

State = llm_proxy_pb2.Engine.State
EngineStatus = engine_pb2.EngineServiceGetStatusResponse

_ALL_LANES = (Lane.ANY, Lane.NEWEST)
"""What every engine may take while one version is served."""

UNTRIED = "not reached yet"
"""Detail of an engine until it was reached, or could not be, for the first time."""

RATE_SECONDS = 10.0
"""Over how long tokens per second are averaged: what is older weighs less than 1/e."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One request's stay with one engine. It holds a slot until the engine says that it is over."""

    request: OpenRequest | None
    """None once the request left, and the engine has not confirmed it."""

    wire_id: str
    """Its id at the engine."""

    tenant: Tenant
    load: int
    """Tokens that it may still cost the engine."""

    prepaid: int
    """Tokens that the tenant has paid for and that are not made."""

    made_before: int
    """Tokens that the request brought along."""

    progress_at: float
    """When it last brought a token, or began."""


@dataclass(slots=True, eq=False)
class EngineState:
    """An engine as routing sees it."""

    engine_id: str
    address: str
    breaker: Breaker
    state: "State.ValueType" = CONNECTING
    detail: str = UNTRIED
    status: EngineStatus = field(default_factory=EngineStatus)
    """Its last word about itself, except the version."""

    capacity: int = 0
    """Requests that it may be given at once."""

    version: int = 0
    is_reached: bool = False
    lost_because: str = UNTRIED
    is_draining: bool = False
    is_held: bool = False
    """It takes weights, and is given nothing meanwhile."""

    attempts: dict[str, Attempt] = field(default_factory=dict[str, Attempt])
    """By id on the wire."""

    probe: Attempt | None = None
    """The attempt that its breaker waits for."""

    load: int = 0
    """Outstanding tokens of the attempts."""

    generated: int = 0
    """Tokens generated through this llm_proxy."""

    sign_of_life_at: float = 0.0
    """When it last brought a token, or began to owe one."""

    tokens_per_second: float = 0.0
    """Averaged over the last seconds, by its own count."""

    reported_at: float = 0.0
    """When it last said how it is."""

    @property
    def is_untried(self) -> bool:
        """Whether nobody knows yet if it can be reached."""
        return not self.is_reached and self.lost_because == UNTRIED

    @property
    def stands_still(self) -> bool:
        """Whether it owes no token for now."""
        return self.is_held or self.status.paused or self.status.sleeping


class Pool:
    """Every engine of one policy."""

    def __init__(self, settings: RoutingSettings) -> None:
        self._settings = settings
        self._engines: dict[str, EngineState] = {}
        self._checks: Heap[float, EngineState] = Heap()
        """When to look at each: at the end of its suspension, or whether it stalls."""

        self._roll_began_with: int | None = None
        self._free: dict[str, EngineState] = {}
        self._free_for_probe: dict[str, EngineState] = {}
        """Those that may be given one request, to see whether they are well again."""

        self.served = Served()
        self.revision = 0
        self.context_tokens = 0
        """Prompt and output together at most: what every engine known takes. 0 is unknown."""

        self.vocabulary_size = 0
        """Token ids that every engine known has. 0 is unknown."""

    # --- who there is ---

    @property
    def engines(self) -> list[EngineState]:
        return list(self._engines.values())

    def find(self, engine_id: str) -> EngineState | None:
        return self._engines.get(engine_id)

    def engine(self, engine_id: str) -> EngineState:
        """Raises UnknownEngine."""
        engine = self._engines.get(engine_id)
        if engine is None:
            raise UnknownEngine(f"No engine {engine_id!r} is attached.", engine_id=engine_id)
        return engine

    @property
    def free_slots(self) -> int:
        """How many requests the free engines may be given."""
        slots = sum([engine.capacity - len(engine.attempts) for engine in self._free.values()])
        return slots + len(self._free_for_probe)

    def free_lanes(self) -> Collection[Lane]:
        """What the free engines may take."""
        if not (self._free or self._free_for_probe):
            return ()
        if self.served.newest == self.served.oldest:
            return _ALL_LANES
        free = (*self._free.values(), *self._free_for_probe.values())
        return {lane for engine in free for lane in self.served.lanes(engine.version)}

    def free_for(self, lane: Lane) -> Collection[EngineState]:
        """The free engines that serve a lane, without those that wait for a probe."""
        return self._of_lane(lane, self._free.values())

    def candidates(self, lane: Lane) -> Collection[EngineState]:
        """The free engines for the next request of a lane: those that wait for a probe first."""
        if self._free_for_probe and (probed := self._of_lane(lane, self._free_for_probe.values())):
            return probed
        return self._of_lane(lane, self._free.values())

    def _of_lane(self, lane: Lane, engines: Collection[EngineState]) -> Collection[EngineState]:
        if self.served.newest == self.served.oldest:
            return engines
        return [engine for engine in engines if lane in self.served.lanes(engine.version)]

    # --- joining and leaving ---

    def attach(self, engine_id: str, address: str) -> None:
        """Add an engine, or keep one that drains."""
        engine = self._engines.get(engine_id)
        if engine is None:
            settings = self._settings
            breaker = Breaker(settings.suspend_failures, settings.suspend_seconds, settings.most_suspend_seconds)
            self._engines[engine_id] = EngineState(engine_id, address, breaker)
            self.revision += 1
        else:
            engine.is_draining = False
            self.refresh(engine)

    def remove(self, engine: EngineState) -> None:
        """Forget an engine without attempts."""
        del self._engines[engine.engine_id]
        self._free.pop(engine.engine_id, None)
        self._free_for_probe.pop(engine.engine_id, None)
        self._checks.discard(engine)
        self._refresh_limits()
        self.revision += 1

    def drain(self, engine: EngineState) -> None:
        """Give it nothing more."""
        engine.is_draining = True
        self.refresh(engine)

    def drained(self) -> list[EngineState]:
        """Those that may leave."""
        return [engine for engine in self._engines.values() if engine.is_draining and not engine.attempts]

    # --- what they say ---

    def connected(self, engine: EngineState, status: EngineStatus, now: float) -> None:
        engine.is_reached = True
        self._take_status(engine, status, now)
        self.revision += 1
        self.set_version(engine, status.policy_version)

    def reported(self, engine: EngineState, status: EngineStatus, now: float) -> None:
        made = max(0, status.generated_token_count - engine.status.generated_token_count)
        if (seconds := now - engine.reported_at) > 0:
            weight = 1 - math.exp(-seconds / RATE_SECONDS)
            engine.tokens_per_second += weight * (made / seconds - engine.tokens_per_second)
        self._take_status(engine, status, now)
        if made or engine.stands_still:
            engine.sign_of_life_at = now
        self.set_version(engine, status.policy_version)

    def lost(self, engine: EngineState, detail: str, now: float) -> None:
        """It cannot be reached. Its attempts are for the caller to take back."""
        self.revision += engine.is_untried
        engine.lost_because = detail
        if engine.is_reached:
            engine.is_reached = False
            engine.breaker.failed(now, detail, is_probe=engine.probe is not None)
            engine.tokens_per_second = 0.0
        engine.attempts, engine.probe, engine.load = {}, None, 0
        self._watch(engine)
        self.refresh(engine)

    def _take_status(self, engine: EngineState, status: EngineStatus, now: float) -> None:
        engine.status, engine.reported_at = status, now
        engine.capacity = int(status.slot_count * self._settings.oversubscription)
        self._refresh_limits()

    # --- versions ---

    def set_version(self, engine: EngineState, version: int) -> None:
        """The engine serves this version, which becomes the newest unless a newer one is."""
        self.revision += version != engine.version
        engine.version = version
        if version > self.served.newest:
            began_with = self._roll_began_with
            self._serve(Served(newest=version, oldest=version if began_with is None else began_with))
        self.refresh(engine)

    def begin_roll(self) -> None:
        """Engines may go on serving the newest version of now, until the roll ends."""
        self._roll_began_with = self.served.newest

    def end_roll(self) -> None:
        """Only the newest version is served."""
        self._roll_began_with = None
        self._serve(Served(newest=self.served.newest, oldest=self.served.newest))

    def hold(self, engine: EngineState) -> None:
        """Give it nothing until it is released."""
        engine.is_held = True
        self._refresh_free(engine)

    def release(self, engine: EngineState, now: float) -> None:
        engine.is_held = False
        engine.sign_of_life_at = now
        self._refresh_free(engine)

    def _serve(self, served: Served) -> None:
        self.served = served
        for engine in self._engines.values():
            self.refresh(engine)

    # --- slots ---

    def start(self, engine: EngineState, attempt: Attempt, now: float) -> None:
        """The engine is given a request."""
        is_probe = engine.breaker.phase is Phase.READY
        owes_anew = is_probe or not engine.attempts
        engine.attempts[attempt.wire_id] = attempt
        engine.load += attempt.load
        if is_probe:
            engine.breaker.probe()
            engine.probe = attempt
        if owes_anew:
            engine.sign_of_life_at = now
            if engine not in self._checks:
                self._watch(engine)
        if is_probe or len(engine.attempts) >= engine.capacity:
            self._refresh_free(engine)

    def progressed(self, engine: EngineState, attempt: Attempt, count: int, now: float) -> None:
        """An attempt brought tokens."""
        spent = min(count, attempt.load)
        attempt.load -= spent
        engine.load -= spent
        engine.generated += count
        attempt.progress_at = engine.sign_of_life_at = now
        if engine.probe is attempt:
            engine.probe = None
            engine.breaker.close()
            self._watch(engine)
            self.refresh(engine)

    def end(self, engine: EngineState, attempt: Attempt) -> None:
        """The engine is done with a request."""
        del engine.attempts[attempt.wire_id]
        engine.load -= attempt.load
        if engine.probe is attempt:
            engine.probe = None
            engine.breaker.probe_left()
        if engine.engine_id not in self._free:
            self._refresh_free(engine)

    # --- breakers ---

    def failed(self, engine: EngineState, attempt: Attempt, cause: str, now: float) -> None:
        """A request failed at the engine, which still has the attempt."""
        is_probe = engine.probe is attempt
        if is_probe:
            engine.probe = None
        if engine.breaker.failed(now, cause, is_probe=is_probe):
            self._watch(engine)
            self.refresh(engine)

    @property
    def next_check(self) -> float | None:
        """When `check` has something to look at."""
        return self._checks.first_key

    def check(self, now: float) -> list[EngineState]:
        """End suspensions that are over, and suspend engines that stall. Returns the latter."""
        stalled: list[EngineState] = []
        while (due := self._checks.first_key) is not None and due <= now:
            engine = self._checks.first
            assert engine is not None
            self._checks.discard(engine)
            if engine.breaker.phase is Phase.OPEN:
                engine.breaker.let_probe()
            elif self._stalls(engine, now):
                engine.probe = None
                engine.breaker.open(now, f"no token for {self._settings.stall_seconds:g} s")
                stalled.append(engine)
            self._watch(engine)
            self.refresh(engine)
        return stalled

    def _stalls(self, engine: EngineState, now: float) -> bool:
        if engine.stands_still:
            engine.sign_of_life_at = now
        is_watched = engine.breaker.phase in (Phase.CLOSED, Phase.PROBING)
        return is_watched and bool(engine.attempts) and engine.sign_of_life_at + self._settings.stall_seconds <= now

    def _watch(self, engine: EngineState) -> None:
        """Look at the engine again when it may have changed by itself."""
        if engine.breaker.phase is Phase.OPEN:
            self._checks.put(engine, engine.breaker.reopens_at)
        elif self._settings.stall_seconds and engine.attempts and engine.breaker.phase is not Phase.READY:
            self._checks.put(engine, engine.sign_of_life_at + self._settings.stall_seconds)
        else:
            self._checks.discard(engine)

    # --- what follows ---

    def _refresh_limits(self) -> None:
        statuses = [engine.status for engine in self._engines.values()]
        self.context_tokens = _least(status.context_token_count for status in statuses)
        self.vocabulary_size = _least(status.vocabulary_size for status in statuses)

    def refresh(self, engine: EngineState) -> None:
        """Work out the state, and whether the engine may be given a request."""
        before = engine.state
        engine.state, engine.detail = self._judge(engine)
        self.revision += engine.state != before
        self._refresh_free(engine)

    def _judge(self, engine: EngineState) -> "tuple[State.ValueType, str]":
        if not engine.is_reached:
            return CONNECTING, engine.lost_because
        if engine.is_draining:
            return DRAINING, "leaves when its requests are done"
        if not self.served.allows(engine.version):
            return BEHIND, f"serves version {engine.version}, waits for {self.served.newest}"
        if engine.breaker.phase is not Phase.CLOSED:
            return SUSPENDED, f"{engine.breaker.cause}; tried after {engine.breaker.seconds:g} s"
        return SERVING, ""

    def _refresh_free(self, engine: EngineState) -> None:
        has_room = len(engine.attempts) < engine.capacity and not engine.is_held and not engine.status.sleeping
        awaits_probe = engine.state == SUSPENDED and engine.breaker.phase is Phase.READY
        _keep(self._free, engine, has_room and engine.state == SERVING)
        _keep(self._free_for_probe, engine, has_room and awaits_probe)


def _keep(engines: dict[str, EngineState], engine: EngineState, is_one: bool) -> None:
    """Have an engine among these, or not."""
    if is_one:
        engines[engine.engine_id] = engine
    else:
        engines.pop(engine.engine_id, None)


def _least(sizes: Iterable[int]) -> int:
    """The least of those that are known. 0 is unknown."""
    return min((size for size in sizes if size), default=0)
