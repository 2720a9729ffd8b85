"""Routing under every order of events, in virtual time, with engines that die, lag, abort and are updated."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llm_proxy.routing import CONNECTING, SERVING, Router, RoutingSettings
from rollfarm import tokens
from rollfarm.errors import VersionUnavailable
from rollfarm.testing import simulated_logprob, simulated_token
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, trajectory_pb2

LENGTH = trajectory_pb2.FINISH_REASON_LENGTH
ABORT = trajectory_pb2.FINISH_REASON_ABORT
ENGINES = ["e0", "e1", "e2"]
PROMPT = 2


@dataclass
class Engine:
    """What an engine host knows."""

    slots: int
    version: int = 0
    instance: int = 0
    is_up: bool = False
    open: dict[str, Any] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)


class Farm(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(RoutingSettings(affinity_bound_tokens=8, max_fruitless_attempts=10_000))
        self.engines: dict[str, Engine] = {}
        self.open: dict[str, Any] = {}
        self.answers: dict[str, Any] = {}
        self.now = 0.0
        self.count = 0

    @initialize(slots=st.lists(st.integers(1, 3), min_size=3, max_size=3))
    def attach(self, slots: list[int]) -> None:
        for name, slot_count in zip(ENGINES, slots, strict=True):
            self.engines[name] = Engine(slot_count)
            self.router.attach(name, name)

    # --- what may happen ---

    @rule(
        priority=st.integers(0, 3),
        max_tokens=st.integers(1, 5),
        session=st.sampled_from(["", "s", "t"]),
        demand=st.sampled_from(["none", "min", "exact"]),
        ahead=st.integers(-1, 2),
    )
    def submit(self, priority: int, max_tokens: int, session: str, demand: str, ahead: int) -> None:
        self.count += 1
        request_id = f"r{self.count}"
        asked = llm_proxy_pb2.ProxiedGeneration(
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
            assert ahead < 0
            return
        self.open[request_id] = asked
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

    @rule(name=st.sampled_from(ENGINES))
    def start_or_kill(self, name: str) -> None:
        engine = self.engines[name]
        engine.open.clear()
        engine.made.clear()
        if engine.is_up:
            engine.is_up = False
            self.router.lost(name, "killed", self.now)
        else:
            engine.is_up, engine.version = True, 0
            engine.instance += 1
            self.connect(name)
        self.settle()

    @rule(name=st.sampled_from(ENGINES), count=st.integers(1, 3), share=st.integers(1, 3))
    def decode(self, name: str, count: int, share: int) -> None:
        """Some of the engine's requests advance by some tokens."""
        engine = self.engines[name]
        for wire_id in list(engine.open)[::share]:
            self.advance(name, wire_id, count)
        self.settle()

    @precondition(lambda self: any(engine.open for engine in self.engines.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """An engine aborts a request by itself."""
        name = data.draw(st.sampled_from([name for name in ENGINES if self.engines[name].open]))
        self.abort(name, data.draw(st.sampled_from(sorted(self.engines[name].open))))
        self.settle()

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
        updated = [name for name in sorted(names) if self.engines[name].is_up]
        for name in updated:
            if resume:
                for wire_id in list(self.engines[name].open):
                    self.abort(name, wire_id)
            self.engines[name].version = version
        self.settle()
        instances = {name: self.instance(name) for name in updated}
        for name in sorted(restarted & set(updated)):
            self.start_or_kill(name)
            self.start_or_kill(name)
        self.router.served(instances, version, self.now)
        self.router.open_gate()
        self.settle()

    # --- what must hold ---

    @invariant()
    def every_open_request_is_waiting_or_with_one_engine(self) -> None:
        assert self.router.waiting_count + self.router.running_count == len(self.open)
        live = [wire for engine in self.engines.values() for wire in engine.open]
        cancelled = [wire for name in self.engines for wire in self.router.unconfirmed_cancels(name)]
        assert len(live) - len(cancelled) == self.router.running_count
        assert not set(self.open) & set(self.answers)

    @invariant()
    def no_slot_idles_while_a_request_may_run(self) -> None:
        line = self.router._line  # pyright: ignore[reportPrivateUsage]
        for engine in self.router.engines:
            assert len(engine.attempts) <= self.engines[engine.engine_id].slots
            assert engine.load == sum(attempt.load for attempt in engine.attempts.values()) >= 0
            if engine.state == SERVING and len(engine.attempts) < self.engines[engine.engine_id].slots:
                assert line.queued_count == 0

    @invariant()
    def only_engines_of_the_policy_version_serve(self) -> None:
        for engine in self.router.engines:
            known = self.engines[engine.engine_id]
            assert (engine.state != CONNECTING) == known.is_up
            assert (engine.state == SERVING) == (known.is_up and known.version == self.router.policy_version)

    def teardown(self) -> None:
        """Whatever happened, every request that can be served is answered, with exactly the right tokens."""
        if not self.engines:
            return
        top = max([self.router.policy_version, *(self.demand(asked) for asked in self.open.values())])
        self.finish_all(top)
        assert not self.open
        assert self.router.waiting_count == self.router.running_count == 0

    def finish_all(self, top: int) -> None:
        for version in range(self.router.policy_version, top + 1):
            for name in ENGINES:
                if not self.engines[name].is_up:
                    self.start_or_kill(name)
            self.update(set(ENGINES), False, version - self.router.policy_version, set())
            for _ in range(10 * self.count):
                for name in ENGINES:
                    self.decode(name, 5, 1)

    # --- how engines and clients behave ---

    @staticmethod
    def demand(asked: Any) -> int:
        return max(asked.min_version, asked.exact_version)

    def instance(self, name: str) -> str:
        return f"{name}.{self.engines[name].instance}"

    def connect(self, name: str) -> None:
        engine = self.engines[name]
        status = engine_pb2.EngineServiceGetStatusResponse(
            instance_id=self.instance(name), policy_version=engine.version, slot_count=engine.slots
        )
        self.router.connected(name, status, self.now)

    def settle(self) -> None:
        """Carry out what routing says, as the fleet does at the end of a loop turn."""
        self.now += 1
        effects = self.router.step(self.now)
        waiting = self.router._line._heap  # pyright: ignore[reportPrivateUsage]
        for name, generations in effects.sends.items():
            assert self.router.engine(name).state == SERVING
            assert not self.router.gate_closed
            for generation in generations:
                self.receive(name, generation, waiting)
        for name, wire_ids in effects.cancels.items():
            for wire_id in wire_ids:
                if wire_id in self.engines[name].open:
                    self.abort(name, wire_id)
        for waiter, result in effects.answers:
            assert waiter is self
            self.answer(result)
        if effects.cancels:
            self.settle()

    def receive(self, name: str, generation: Any, waiting: list[Any]) -> None:
        engine = self.engines[name]
        assert generation.request_id not in engine.open
        asked = self.open[generation.request_id.split("~")[0]]
        assert self.demand(asked) <= engine.version or not (
            asked.HasField("min_version") or asked.HasField("exact_version")
        )
        assert not asked.HasField("exact_version") or asked.exact_version == engine.version
        for (priority, _, _), request in waiting:
            assert asked.priority <= priority or request.request_id not in self.open
        engine.open[generation.request_id] = generation
        engine.made[generation.request_id] = 0

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

    def abort(self, name: str, wire_id: str) -> None:
        del self.engines[name].open[wire_id]
        self.router.receive(name, engine_pb2.GenerationChunk(request_id=wire_id, finish_reason=ABORT), self.now)

    def answer(self, result: Any) -> None:
        asked = self.open.pop(result.request_id)
        self.answers[result.request_id] = result
        if result.HasField("failure"):
            assert result.failure.reason == "VERSION_UNAVAILABLE"
            assert asked.HasField("exact_version")
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


TestFarm = Farm.TestCase
TestFarm.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
