"""Routing under every order of events, in virtual time: engines die, fail, stall, lag, drain and are updated."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llm_proxy.breakers import Phase
from llm_proxy.requests import OpenRequest
from llm_proxy.routing import BEHIND, CONNECTING, DRAINING, SERVING, SUSPENDED, Effects, Router
from llm_proxy.settings import RoutingSettings
from llm_proxy.tenants import TenantSettings
from rollfarm import tokens
from rollfarm.error_wire import to_failure
from rollfarm.errors import EngineFailed, QuotaExceeded, VersionUnavailable
from rollfarm.testing import simulated_logprob, simulated_token
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, trajectory_pb2

LENGTH = trajectory_pb2.FINISH_REASON_LENGTH
ABORT = trajectory_pb2.FINISH_REASON_ABORT
ENGINES = ["e0", "e1", "e2"]
PROMPT = 2
QUOTAS = {"b": TenantSettings(weight=2.0, most_running=1), "c": TenantSettings(most_open=3)}
VERSION_WAIT = 50.0


@dataclass
class Engine:
    """What an engine host knows."""

    slots: int
    version: int = 0
    instance: int = 0
    is_up: bool = False
    is_attached: bool = True
    open: dict[str, Any] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)

    def forget(self) -> None:
        self.open.clear()
        self.made.clear()


class Farm(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(
            RoutingSettings(
                affinity_bound_tokens=8,
                max_fruitless_attempts=10_000,
                version_wait_seconds=VERSION_WAIT,
                stuck_seconds=20,
                stall_seconds=30,
                suspend_failures=2,
                suspend_seconds=5,
                most_suspend_seconds=20,
                tenants=QUOTAS,
            )
        )
        self.engines: dict[str, Engine] = {}
        self.open: dict[str, Any] = {}
        self.opened: dict[str, float] = {}
        self.answers: dict[str, Any] = {}
        self.unconfirmed: set[tuple[str, str]] = set()
        self.roll: tuple[int, int] | None = None
        """The versions that it leads from and to."""

        self.turns: set[str] = set()
        """Engines that take weights in the roll."""

        self.now = 0.0
        self.count = 0

    @initialize(slots=st.lists(st.integers(1, 3), min_size=3, max_size=3))
    def attach_all(self, slots: list[int]) -> None:
        for name, slot_count in zip(ENGINES, slots, strict=True):
            self.engines[name] = Engine(slot_count)
            self.router.attach(name, name)

    # --- what clients do ---

    @rule(
        tenant=st.sampled_from(["", "b", "c"]),
        priority=st.integers(0, 3),
        max_tokens=st.integers(1, 5),
        session=st.sampled_from(["", "s", "t"]),
        demand=st.sampled_from(["none", "min", "exact"]),
        ahead=st.integers(-1, 2),
    )
    def submit(self, tenant: str, priority: int, max_tokens: int, session: str, demand: str, ahead: int) -> None:
        self.count += 1
        request_id = f"r{self.count}"
        asked = llm_proxy_pb2.ProxiedGeneration(
            tenant=tenant,
            priority=priority,
            generation=engine_pb2.Generation(
                request_id=request_id,
                session_id=session,
                prompt_token_ids=tokens.pack_ids([1] * PROMPT),
                sampling=trajectory_pb2.Sampling(max_tokens=max_tokens),
            ),
        )
        version = self.router.policy_version + ahead
        if demand == "min":
            asked.min_version = version
        if demand == "exact":
            asked.exact_version = version
        try:
            self.router.submit(asked, self, self.now)
        except VersionUnavailable:
            assert demand == "exact"
            assert not self.is_served(version)
            return
        except QuotaExceeded:
            assert sum(other.tenant == tenant for other in self.open.values()) == QUOTAS[tenant].most_open
            return
        self.open[request_id] = asked
        self.opened[request_id] = self.now
        self.settle()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), withdraw=st.booleans())
    def leave(self, data: st.DataObject, withdraw: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        if withdraw:
            del self.open[request_id]
            self.router.withdraw(request_id, self, self.now)
        else:
            self.router.cancel(request_id, self.now)
        self.settle()

    # --- what engines do ---

    @rule(name=st.sampled_from(ENGINES))
    def start_or_kill(self, name: str) -> None:
        engine = self.engines[name]
        engine.forget()
        if engine.is_up:
            engine.is_up = False
            if engine.is_attached:
                self.router.lost(name, "killed", self.now)
        else:
            engine.is_up, engine.version = True, 0
            engine.instance += 1
            if engine.is_attached:
                self.connect(name)
        self.settle()

    @rule(name=st.sampled_from(ENGINES), count=st.integers(1, 3), share=st.integers(1, 3))
    def decode(self, name: str, count: int, share: int) -> None:
        """Some of the engine's requests advance by some tokens."""
        for wire_id in list(self.engines[name].open)[::share]:
            self.advance(name, wire_id, count)
        self.settle()

    @precondition(lambda self: any(engine.open for engine in self.engines.values()))
    @rule(data=st.data(), fails=st.booleans())
    def give_back(self, data: st.DataObject, fails: bool) -> None:
        """An engine fails a request, or aborts it by itself."""
        name = data.draw(st.sampled_from([name for name in ENGINES if self.engines[name].open]))
        self.end(name, data.draw(st.sampled_from(sorted(self.engines[name].open))), fails=fails)
        self.settle()

    @rule()
    def confirm(self) -> None:
        """Engines confirm what was cancelled."""
        for name, wire_id in sorted(self.unconfirmed):
            if wire_id in self.engines[name].open:
                self.end(name, wire_id)
        self.unconfirmed.clear()
        self.settle()

    @rule(seconds=st.integers(1, 60))
    def wait(self, seconds: int) -> None:
        """Time passes as the fleet's timer lets it: with a step at every deadline."""
        until = self.now + seconds
        while (deadline := self.router.next_deadline) is not None and deadline < until:
            assert deadline >= self.now - 1
            self.now = max(self.now, deadline)
            self.settle()
        self.now = max(self.now, until)
        self.settle()

    @rule(name=st.sampled_from(ENGINES))
    def drain_or_attach(self, name: str) -> None:
        engine = self.engines[name]
        if not engine.is_attached:
            engine.is_attached = True
            self.router.attach(name, name)
            if engine.is_up:
                self.connect(name)
        elif self.router.engine(name).is_draining:
            self.router.attach(name, name)
        else:
            self.router.drain(name)
        self.settle()

    # --- what the trainer does ---

    @precondition(lambda self: self.roll is None)
    @rule(
        names=st.sets(st.sampled_from(ENGINES), min_size=1),
        resume=st.booleans(),
        ahead=st.integers(0, 1),
        restarted=st.sets(st.sampled_from(ENGINES)),
    )
    def update(self, names: set[str], resume: bool, ahead: int, restarted: set[str]) -> None:
        """These engines apply the current version or the next, with the gate closed; some restart before it opens."""
        version = self.router.policy_version + ahead
        self.router.close_gate()
        updated = [name for name in sorted(names) if self.engines[name].is_up and self.engines[name].is_attached]
        for name in updated:
            if resume:
                for wire_id in list(self.engines[name].open):
                    self.end(name, wire_id)
            self.engines[name].version = version
        self.settle()
        instances = {name: self.instance(name) for name in updated}
        for name in sorted(restarted & set(updated)):
            self.start_or_kill(name)
            self.start_or_kill(name)
        self.router.served(instances, version, self.now)
        self.router.open_gate()
        self.settle()

    @precondition(lambda self: self.roll is None)
    @rule()
    def begin_roll(self) -> None:
        self.roll = self.router.policy_version, self.router.policy_version + 1
        self.router.begin_roll()

    @precondition(lambda self: self.roll is not None)
    @rule(name=st.sampled_from(ENGINES), succeeds=st.booleans())
    def roll_on(self, name: str, succeeds: bool) -> None:
        """An engine's turn begins; or ends, with the new version or without."""
        assert self.roll is not None
        engine = self.engines[name]
        if name not in self.turns:
            self.router.hold(name)
            self.turns |= {name} if engine.is_attached else set()
        else:
            self.turns.discard(name)
            if succeeds and engine.is_up and engine.is_attached:
                engine.version = self.roll[1]
                self.router.served({name: self.instance(name)}, self.roll[1], self.now)
            self.router.release(name, self.now)
        self.settle()

    @precondition(lambda self: self.roll is not None)
    @rule()
    def end_roll(self) -> None:
        for name in sorted(self.turns):
            self.router.release(name, self.now)
        self.turns.clear()
        self.roll = None
        self.router.end_roll(self.now)
        self.settle()

    # --- what must hold ---

    @invariant()
    def every_open_request_is_waiting_or_with_one_engine(self) -> None:
        assert self.router.waiting_count + self.router.running_count == len(self.open)
        live = [wire for name in self.engines for wire in self.live(name)]
        assert len(live) == self.router.running_count == len({self.request_of(wire) for wire in live})
        assert not set(self.open) & set(self.answers)

    @invariant()
    def no_slot_idles_while_a_request_may_run(self) -> None:
        for engine in self.router.engines:
            known = self.engines[engine.engine_id]
            assert len(engine.attempts) == len(known.open) <= known.slots
            assert engine.load == sum(attempt.load for attempt in engine.attempts.values()) >= 0
            is_trusted = engine.state == SERVING or (engine.state == SUSPENDED and engine.breaker.phase is Phase.READY)
            if is_trusted and len(known.open) < known.slots and engine.engine_id not in self.turns:
                assert not [asked for asked in self.waiting() if self.may_go(asked, known) and self.within_quota(asked)]

    @invariant()
    def quotas_hold(self) -> None:
        for tenant in self.router.tenants:
            of_tenant = [asked for asked in self.open.values() if asked.tenant == tenant.name]
            assert tenant.open_count == len(of_tenant)
            assert tenant.waiting_count == sum(asked.tenant == tenant.name for asked in self.waiting())
        assert self.slots_of("b") <= 1

    @invariant()
    def states_are_what_the_engines_are(self) -> None:
        for engine in self.router.engines:
            known = self.engines[engine.engine_id]
            assert (engine.state == CONNECTING) == (not known.is_up)
            assert (engine.state == DRAINING) == (known.is_up and engine.is_draining)
            if engine.state in (SERVING, SUSPENDED, BEHIND):
                assert (engine.state != BEHIND) == self.is_served(known.version)
            if engine.breaker.phase is Phase.OPEN:
                assert self.now < engine.breaker.reopens_at <= self.now + 20

    @invariant()
    def nobody_waits_too_long_for_a_version(self) -> None:
        for asked in self.waiting():
            if self.demand(asked) > self.router.policy_version:
                assert self.now < self.opened[asked.generation.request_id] + VERSION_WAIT

    def teardown(self) -> None:
        """Whatever happened, every request that can be served is answered, with exactly the right tokens."""
        if not self.engines:
            return
        if self.roll is not None:
            self.end_roll()
        top = max([self.router.policy_version, *(self.demand(asked) for asked in self.open.values())])
        self.finish_all(top)
        assert not self.open
        assert self.router.waiting_count == self.router.running_count == 0

    def finish_all(self, top: int) -> None:
        for version in range(self.router.policy_version, top + 1):
            for name in ENGINES:
                if not self.engines[name].is_up:
                    self.start_or_kill(name)
                if not self.engines[name].is_attached or self.router.engine(name).is_draining:
                    self.drain_or_attach(name)
            self.update(set(ENGINES), False, version - self.router.policy_version, set())
            for _ in range(10 * self.count):
                if not self.open:
                    return
                self.confirm()
                self.wait(1)
                for name in ENGINES:
                    self.decode(name, 5, 1)

    # --- what the test knows ---

    @staticmethod
    def demand(asked: Any) -> int:
        return max(asked.min_version, asked.exact_version)

    @staticmethod
    def request_of(wire_id: str) -> str:
        return wire_id.split("~")[0]

    def is_served(self, version: int) -> bool:
        return version == self.router.policy_version or (self.roll is not None and version == self.roll[0])

    def live(self, name: str) -> list[str]:
        """Ids on the wire that count."""
        if not self.engines[name].is_attached:
            return []
        cancelled = self.router.unconfirmed_cancels(name)
        return [wire for wire in self.engines[name].open if wire not in cancelled]

    def waiting(self) -> list[Any]:
        running = {self.request_of(wire) for name in self.engines for wire in self.live(name)}
        return [asked for request_id, asked in self.open.items() if request_id not in running]

    def may_go(self, asked: Any, engine: Engine) -> bool:
        if asked.HasField("exact_version"):
            return engine.version == asked.exact_version
        request = self.router._open[asked.generation.request_id]  # pyright: ignore[reportPrivateUsage]
        return engine.version >= max(self.demand(asked), request.latest_version)

    def slots_of(self, tenant: str) -> int:
        """Slots that the tenant holds."""
        attempts = [attempt for engine in self.router.engines for attempt in engine.attempts.values()]
        return sum(attempt.tenant.name == tenant for attempt in attempts)

    def within_quota(self, asked: Any) -> bool:
        return asked.tenant != "b" or self.slots_of("b") < 1

    def instance(self, name: str) -> str:
        return f"{name}.{self.engines[name].instance}"

    # --- how engines and clients behave ---

    def connect(self, name: str) -> None:
        engine = self.engines[name]
        engine.forget()
        status = engine_pb2.EngineServiceGetStatusResponse(
            instance_id=self.instance(name), policy_version=engine.version, slot_count=engine.slots
        )
        self.router.connected(name, status, self.now)

    def settle(self) -> None:
        """Carry out what routing says, as the fleet does after every transition."""
        self.now += 1
        if self.now % 2:
            self.carry_out(self.router.hand_out(self.now))
        self.carry_out(self.router.step(self.now))

    def carry_out(self, effects: Effects) -> None:
        for waiter, request in effects.answers:
            assert waiter is self
            self.answer(request)
        for name in effects.left:
            assert not self.engines[name].open
            self.engines[name].is_attached = False
            self.turns.discard(name)
        for name, generations in effects.sends.items():
            assert self.router.engine(name).state in (SERVING, SUSPENDED)
            assert name not in self.turns
            assert not self.router.gate_closed
            for generation in generations:
                self.engines[name].open[generation.request_id] = generation
                self.engines[name].made[generation.request_id] = 0
        for name, generations in effects.sends.items():
            for generation in generations:
                self.check_sent(name, self.open[self.request_of(generation.request_id)])
        for name, wire_ids in effects.cancels.items():
            self.unconfirmed |= {(name, wire_id) for wire_id in wire_ids}

    def check_sent(self, name: str, asked: Any) -> None:
        engine, state = self.engines[name], self.router.engine(name)
        assert self.may_go(asked, engine)
        assert state.state == SERVING or state.breaker.phase is Phase.PROBING
        for other in self.waiting():
            if other.tenant == asked.tenant and self.may_go(other, engine):
                assert asked.priority <= other.priority

    def advance(self, name: str, wire_id: str, count: int) -> None:
        engine = self.engines[name]
        generation = engine.open[wire_id]
        made = engine.made[wire_id]
        new = min(count, generation.sampling.max_tokens - made)
        start = tokens.token_count(generation.prompt_token_ids) + made
        ids = [simulated_token(start + at, engine.version) for at in range(new)]
        engine.made[wire_id] += new
        is_last = engine.made[wire_id] == generation.sampling.max_tokens
        chunk = engine_pb2.GenerationChunk(
            request_id=wire_id,
            token_ids=tokens.pack_ids(ids),
            logprobs=tokens.pack_logprobs([simulated_logprob(token, engine.version) for token in ids]),
            version_spans=[trajectory_pb2.VersionSpan(policy_version=engine.version, token_count=new)],
        )
        if is_last:
            chunk.finish_reason = LENGTH
            del engine.open[wire_id]
        self.router.receive(name, chunk, self.now)

    def end(self, name: str, wire_id: str, *, fails: bool = False) -> None:
        del self.engines[name].open[wire_id]
        chunk = engine_pb2.GenerationChunk(request_id=wire_id, finish_reason=ABORT)
        if fails:
            chunk.failure.CopyFrom(to_failure(EngineFailed("Out of memory.")))
        self.router.receive(name, chunk, self.now)

    def answer(self, request: OpenRequest) -> None:
        result = request.result()
        asked = self.open.pop(result.request_id)
        self.answers[result.request_id] = result
        if result.HasField("failure"):
            self.check_refusal(asked, result.failure.reason)
            return
        made = tokens.versions_of(result.version_spans).tolist()
        assert made == sorted(made)
        assert tokens.unpack_ids(result.token_ids).tolist() == [
            simulated_token(PROMPT + at, version) for at, version in enumerate(made)
        ]
        assert len(result.logprobs) == len(result.token_ids)
        if result.finish_reason == LENGTH:
            assert len(made) == asked.generation.sampling.max_tokens
        if asked.HasField("exact_version"):
            assert set(made) <= {asked.exact_version}

    def check_refusal(self, asked: Any, reason: str) -> None:
        if reason == "VERSION_NOT_SERVED":
            assert self.demand(asked) > self.router.policy_version
            assert self.now >= self.opened[asked.generation.request_id] + VERSION_WAIT
        else:
            assert reason == "VERSION_UNAVAILABLE"
            assert asked.HasField("exact_version")


TestFarm = Farm.TestCase
TestFarm.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
