"""Any sequence of commands keeps the ledger's promises, and its events rebuild it exactly."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollfarm.errors import TrainerReplaced
from rollfarm.run import FilterConfig
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2 as tp
from sample_buffer import events, views
from sample_buffer.groups import Groups
from sample_buffer.runs import Runs
from sample_buffer.state import IDLE, Lease
from tests.sample_buffer.support import make_spec, play, request_id

WORLDS = st.sampled_from([[], ["sums"], ["maze"], ["sums", "maze"]])


class LedgerMachine(RuleBasedStateMachine):
    """One run under a careless world: workers die, lag and fail, and trainers fall back."""

    @initialize(
        alpha=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        redundant=st.integers(0, 2),
        steps=st.sampled_from([0, 3]),
        retained=st.sampled_from([0, 4, 100]),
    )
    def begin(self, alpha: float, redundant: int, steps: int, retained: int) -> None:
        self.spec = make_spec(
            domains=[("a", "sums", 2.0), ("b", "maze", 1.0)],
            filters=[FilterConfig(name="zero_variance")],
            alpha=alpha,
            redundant_members=redundant,
            steps=steps,
            max_attempts=2,
            lease_seconds=10,
        )
        self.other = make_spec(name="other")
        self.now = 0.0
        self.runs = Runs()
        self.runs.limit(retained, 1000, 0.0)
        self.runs.configure("configure", "trainer 0", self.spec, "nonce", 0.0)
        self.trainers = ["trainer 0"]
        self.held: list[Lease] = []
        self.taken: Counter[str] = Counter()
        self.handed = 0

    @property
    def groups(self) -> Groups:
        return self.runs.of_trainer("", self.trainers[-1])

    @rule(repeat=st.booleans())
    def trainer_restarts(self, repeat: bool) -> None:
        """It takes over at once, and gets what was delivered and not committed, byte for byte."""
        before = dict(self.groups.state.batches)
        self.trainers.append(f"trainer {len(self.trainers)}")
        for _ in range(1 + repeat):
            self.runs.configure(self.trainers[-1], self.trainers[-1], self.spec, "nonce", self.now)
        assert {step: self.groups.take(step, self.now) for step in before} == {
            step: (batch, True) for step, batch in before.items()
        }

    @precondition(lambda self: len(self.trainers) > 1)
    @rule(data=st.data())
    def an_earlier_trainer_lives_on(self, data: st.DataObject) -> None:
        earlier = data.draw(st.sampled_from(self.trainers[:-1]))
        before = self.runs.dump()
        if earlier != "trainer 0":
            self.runs.configure(earlier, earlier, self.spec, "nonce", self.now)
        with pytest.raises(TrainerReplaced):
            self.runs.of_trainer(self.spec.run_id, earlier)
        assert self.runs.dump() == before

    @rule(count=st.integers(1, 8), worlds=WORLDS)
    def lease(self, count: int, worlds: list[str]) -> None:
        self.held += self.groups.lease(request_id(), "worker", count, worlds, self.now)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]), age=st.integers(0, 3))
    def complete(self, data: st.DataObject, reward: float, age: int) -> None:
        lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        trajectory = play(
            views.episode_lease(self.groups, lease).episode,
            reward=reward,
            versions=[max(0, self.groups.state.version - age)],
        )
        self.handed += 1
        trajectory.trajectory_id = f"t{self.handed}"
        live = lease.lease_id in self.groups.state.leases
        try:
            disposition, keep = self.groups.complete(request_id(), lease.lease_id, trajectory, self.now)
        except Exception:
            assert not live
            return
        assert keep <= (disposition == pb.DISPOSITION_ACCEPTED)
        assert live or disposition != pb.DISPOSITION_ACCEPTED

    @precondition(lambda self: self.held)
    @rule(data=st.data(), outcome=st.sampled_from([tp.OUTCOME_ENV_FAILED, tp.OUTCOME_CANCELLED]))
    def fail(self, data: st.DataObject, outcome: "tp.Outcome.ValueType") -> None:
        lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if lease.lease_id in self.groups.state.leases:
            self.groups.fail(request_id(), lease.lease_id, outcome, "broke", self.now)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]), keep=st.booleans())
    def time_passes(self, seconds: float, keep: bool) -> None:
        self.now += seconds
        if keep:
            self.groups.heartbeat("worker", [lease.lease_id for lease in self.held], self.now)
        self.groups.tick(self.now)

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        state = self.groups.state
        trained = data.draw(st.integers(state.next_commit_step, state.next_batch_step))
        self.groups.publish(request_id(), state.version + 1, trained, self.now)

    @rule()
    def take(self) -> None:
        state = self.groups.state
        if self.spec.step_count and state.next_batch_step >= self.spec.step_count:
            return
        taken = self.groups.take(state.next_batch_step, self.now)
        if taken is None:
            return
        batch, redelivered = taken
        assert not redelivered
        assert len(batch.groups) == self.spec.batch_groups
        for group, members in self.groups.winners(batch):
            assert len(members) == self.spec.group_size
            assert state.version - group.oldest_version() <= self.groups.fold.bound
            self.taken.update(member.trajectory_id for member in members)

    @precondition(lambda self: self.groups.state.batches)
    @rule(data=st.data())
    def redeliver(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.groups.state.batches)))
        assert self.groups.take(step, self.now) == (self.groups.state.batches[step], True)

    @precondition(lambda self: self.groups.state.batches)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.groups.state.batches)))
        self.groups.commit(request_id(), step, f"nonce-step-{step}", self.now)

    @rule(count=st.integers(1, 3))
    def validate(self, count: int) -> None:
        self.groups.start_validation(request_id(), f"v{self.groups.state.validation_count}", count, self.now)

    @rule()
    def another_run_has_its_turn(self) -> None:
        self.runs.configure(request_id(), "another", self.other, "other", self.now)
        state = self.runs.run(self.spec.run_id).state
        assert not state.retired
        assert len(state.answers) + len(state.ended) <= 2 * IDLE.remembered_requests
        self.runs.configure(request_id(), self.trainers[-1], self.spec, "nonce", self.now)

    @rule(snapshot_at=st.floats(0, 1))
    def restart(self, snapshot_at: float) -> None:
        log = events.decode(events.encode(self.runs.outbox))
        cut = round(snapshot_at * len(log))
        early, late = Runs(), Runs()
        for event in log[:cut]:
            early.apply(event)
        late.load(early.dump())
        for event in log[cut:]:
            late.apply(event)
        late.resume(self.now)
        assert late.dump() == self.runs.dump()
        late.outbox += self.runs.outbox
        self.runs = late

    @invariant()
    def credits_are_conserved(self) -> None:
        state = self.groups.state
        charged = sum(count for step, count in state.charged.items() if step >= state.trained_steps)
        outstanding = sum(group.stage in ("open", "ready") for group in state.groups.values())
        assert self.groups.credits_in_use == outstanding + charged <= self.groups.capacity

    @invariant()
    def leases_are_of_members_that_wait_for_them(self) -> None:
        state = self.groups.state
        for lease in state.leases.values():
            member = self.groups.fold.member(lease.validation_id, lease.index, lease.member)
            assert (member.stage, member.lease_id) == ("leased", lease.lease_id)
            assert lease.validation_id or state.groups[lease.index].stage == "open"
            assert lease.validation_id or state.version - lease.version <= self.groups.fold.bound
        leased = sum(m.stage == "leased" for group in state.groups.values() for m in group.members)
        assert leased == sum(not lease.validation_id for lease in state.leases.values())
        assert self.groups.fold.expiry.keys() == state.leases.keys()

    @invariant()
    def nothing_outstanding_is_stale(self) -> None:
        state = self.groups.state
        for group in state.groups.values():
            if group.stage in ("open", "ready"):
                assert all(state.version - member.oldest_version <= self.groups.fold.bound for member in group.done())
        assert max(state.staleness, default=0) <= self.groups.fold.bound

    @invariant()
    def groups_are_open_until_they_are_complete(self) -> None:
        for group in self.groups.state.groups.values():
            done = len(group.done())
            assert done < self.spec.group_size if group.stage == "open" else done <= self.spec.group_size

    @invariant()
    def counts_are_what_a_recount_finds(self) -> None:
        fold, state = self.groups.fold, self.groups.state
        alive = [group for group in state.groups.values() if group.stage in ("open", "ready", "taken")]
        assert +fold.episodes == Counter(member.stage for group in alive for member in group.members)
        assert fold.taken_count == sum(len(batch.groups) for batch in state.batches.values())
        assert sum(state.staleness.values()) == sum(self.taken.values())

    @invariant()
    def a_trajectory_is_taken_at_most_once(self) -> None:
        assert max(self.taken.values(), default=1) == 1

    @invariant()
    def retention_is_bounded(self) -> None:
        state = self.groups.state
        retired = sum(len(state.groups[index].done()) for index in state.retired)
        assert retired == state.retired_trajectories
        assert len(state.finished) == sum(len(group.done()) for group in state.groups.values())


LedgerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestLedger = LedgerMachine.TestCase
