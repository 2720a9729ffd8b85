"""Any sequence of commands is answered as the plain model answers it, keeps the promises and can be replayed.

The numbers of the invariants are those of the farm's list: 1 whole groups, 2 redundancy, 3 freshness, 4 bounded work,
5 oldest first, 6 and 12 what a new version or a filter takes is replaced by the newest, 9 trained on once, 10
validation apart, 11 alpha 0 is synchronous. 7, 8 and 13 are the engines' and the trainer's.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollfarm.errors import FarmError, TrainerReplaced
from rollfarm.run import FilterConfig
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2 as tp
from sample_buffer import events, views
from sample_buffer.groups import Groups
from sample_buffer.runs import Runs
from sample_buffer.state import IDLE, Lease
from tests.sample_buffer.model import Episode, Model, Refused
from tests.sample_buffer.support import make_spec, play, request_id

WORLDS = st.sampled_from([[], [], ["sums"], ["maze"], ["sums", "maze"], ["chess"]])
FILTERS = [
    [],
    [],
    [FilterConfig(name="zero_variance")],
    [
        FilterConfig(name="all_failed"),
        FilterConfig(name="pools", settings={"hard_below": 0.75, "hard_share": 0.6, "ramp_steps": 2}),
    ],
    [
        FilterConfig(name="max_length", settings={"tokens": 2}),
        FilterConfig(name="difficulty", settings={"min_mean": 0.2, "max_mean": 0.9}),
    ],
]
DISPOSITIONS = {
    pb.DISPOSITION_ACCEPTED: "accepted",
    pb.DISPOSITION_SURPLUS: "surplus",
    pb.DISPOSITION_STALE: "stale",
}
LEASE_SECONDS = 10.0


def answer_of(call: Callable[[], object]) -> object:
    """What it returns, or that it raises which error."""
    try:
        return call()
    except FarmError as error:
        return f"raises {type(error).__name__}"
    except Refused as error:
        return f"raises {error}"


def terms(lease: Lease) -> tuple[object, ...]:
    return (
        lease.lease_id, lease.validation_id, lease.position, lease.member, lease.attempt, lease.version, lease.domain,
        lease.task_index,
    )  # fmt: skip


def expected_terms(e: Episode) -> tuple[object, ...]:
    return (e.lease, e.validation, e.index, e.member, e.attempts, e.leased_at, e.domain, e.task)


class LedgerMachine(RuleBasedStateMachine):
    """One run under a careless world: workers die, lag, fail and repeat themselves, and trainers fall back."""

    @initialize(
        alpha=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        redundant_members=st.integers(0, 2),
        redundant_groups=st.integers(0, 2),
        filters=st.sampled_from(FILTERS),
        max_attempts=st.integers(1, 3),
        steps=st.sampled_from([0, 3]),
        retained=st.sampled_from([0, 4, 100]),
    )
    def begin(
        self,
        alpha: float,
        redundant_members: int,
        redundant_groups: int,
        filters: list[FilterConfig],
        max_attempts: int,
        steps: int,
        retained: int,
    ) -> None:
        self.spec = make_spec(
            domains=[("a", "sums", 2.0), ("b", "maze", 1.0)],
            filters=filters,
            alpha=alpha,
            redundant_members=redundant_members,
            redundant_groups=redundant_groups,
            steps=steps,
            max_attempts=max_attempts,
            lease_seconds=LEASE_SECONDS,
        )
        self.most = math.floor((1 + alpha) * self.spec.batch_groups)
        self.other = make_spec(name="other")
        self.now = 0.0
        self.runs = Runs()
        self.runs.limit(retained, 1000, 0.0)
        self.runs.configure("configure", "trainer 0", self.spec, "nonce", 0.0)
        self.model = Model(self.spec, retained, LEASE_SECONDS)
        self.trainers = ["trainer 0"]
        self.held: list[Lease] = []
        self.finished: dict[int, list[str]] = defaultdict(list)
        """[group] its accepted trajectories, in order."""
        self.taken: Counter[str] = Counter()
        self.handed = 0
        self.repeatable: list[tuple[Callable[[], object], object]] = []

    @property
    def groups(self) -> Groups:
        return self.runs.of_trainer("", self.trainers[-1])

    def ask(self, call: Callable[[], object], expected: object) -> object:
        """Ask twice, as one does who heard no answer: both are the model's, and the second changes nothing.

        What changed something is answered so for as long as it is remembered; what did not, by what is so by then.
        """
        before = self.runs.dump()
        answer = answer_of(call)
        assert answer == expected
        self.repeat(call, answer)
        if answer != [] and self.runs.dump() != before:
            self.repeatable.append((call, answer))
        return answer

    def repeat(self, call: Callable[[], object], answer: object) -> None:
        before = self.runs.dump()
        assert answer_of(call) == answer
        assert self.runs.dump() == before

    # Workers.

    @rule(count=st.integers(1, 9), worlds=WORLDS, excluded=st.sampled_from([[], [], ["maze"], ["sums", "maze"]]))
    def lease(self, count: int, worlds: list[str], excluded: list[str]) -> None:
        request, now = request_id(), self.now
        expected = [expected_terms(e) for e in self.model.lease("worker", count, worlds, excluded)]
        free, admitted = self.model.free(), self.groups.state.next_group

        def lease() -> list[Lease]:
            return self.groups.lease(request, "worker", count, worlds, now, excluded=excluded)

        self.ask(lambda: [terms(one) for one in lease()], expected)

        held = lease()
        assert [one.validation_id == "" for one in held] == sorted(one.validation_id == "" for one in held)
        keys = [(one.position, one.member) for one in held if not one.validation_id]
        assert keys == sorted(keys), "5: oldest first"
        assert all(one.version == self.model.version for one in held), "3, 6, 12: leased at the newest version"
        if free <= 0:
            assert self.groups.state.next_group == admitted, "4, 11: nothing is admitted without a free credit"
        self.held += held

    @precondition(lambda self: self.held)
    @rule(
        which=st.integers(0, 1000),
        reward=st.sampled_from([0.0, 0.5, 1.0]),
        age=st.integers(0, 3),
        tokens=st.integers(1, 3),
        twin=st.booleans(),
    )
    def complete(self, which: int, reward: float, age: int, tokens: int, twin: bool) -> None:
        """Perhaps with old tokens, too late, or under the name of another trajectory."""
        lease = self.held.pop(which % len(self.held))
        name = next(iter(self.groups.state.finished), "") if twin else ""
        self._complete(lease, reward, max(0, self.model.version - age), tokens, name)

    def _complete(self, lease: Lease, reward: float, oldest: int, tokens: int, name: str) -> None:
        self.handed += 1
        request, now = request_id(), self.now
        played = play(views.episode_lease(self.groups, lease).episode, reward=reward, versions=[oldest], tokens=tokens)
        played.trajectory_id = name or f"t{self.handed}"
        expected = answer_of(lambda: self.model.complete(lease.lease_id, played.trajectory_id, reward, oldest, tokens))

        answer = self.ask(
            lambda: DISPOSITIONS.get(self.groups.complete(request, lease.lease_id, played, now)[0]), expected
        )

        if answer == "accepted" and not lease.validation_id:
            self.finished[lease.position].append(played.trajectory_id)
        if answer == "raises InvalidTrajectory":
            self.held.append(lease)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 1000), outcome=st.sampled_from([tp.OUTCOME_ENV_FAILED, tp.OUTCOME_CANCELLED]))
    def fail(self, which: int, outcome: "tp.Outcome.ValueType") -> None:
        self._fail(self.held.pop(which % len(self.held)), outcome)

    def _fail(self, lease: Lease, outcome: "tp.Outcome.ValueType") -> None:
        request, now = request_id(), self.now
        counted = outcome != tp.OUTCOME_CANCELLED

        self.ask(
            lambda: self.groups.fail(request, lease.lease_id, outcome, "broke", now),
            answer_of(lambda: self.model.fail(lease.lease_id, counted=counted)),
        )

    @rule(best=st.integers(0, 3), left=st.sampled_from([0, 0, 2, 3, 5]), broken=st.sampled_from([0, 0, 1, 2]))
    def everything_is_played(self, best: int, left: int, broken: int) -> None:
        """But for `left` episodes that go on, and `broken` ones. Which rewards siblings get differs by group."""
        self.lease(20, [], [])
        held, self.held = self.held[left:], self.held[:left]
        for lease in held[:broken]:
            self._fail(lease, tp.OUTCOME_ENV_FAILED)
        for lease in held[broken:]:
            self._complete(lease, float((lease.member + lease.position // 2) % 3 >= best), lease.version, 1, "")

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]), beat=st.sampled_from(["", "worker", "thief"]))
    def time_passes(self, seconds: float, beat: str) -> None:
        self.now = self.model.now = self.now + seconds
        leases = [lease.lease_id for lease in self.held]
        if beat:
            cancelled = self.groups.heartbeat(beat, leases, self.now)
            told = [(one.lease_id, one.outcome == tp.OUTCOME_STALE) for one in cancelled]
            assert told == self.model.heartbeat(beat, leases, self.now)
        assert self.groups.tick(self.now) == self.model.tick(self.now)

    # The trainer.

    @rule(step_behind=st.sampled_from([0, 0, 0, 1, 2, -1]))
    def take(self, step_behind: int) -> None:
        """The next batch, or an earlier one once more, or one that is out of order."""
        step, now = len(self.model.batches) - step_behind, self.now
        ready = dict(self.groups.fold.ready)
        expected = answer_of(lambda: self.model.take(step))

        answer = answer_of(lambda: self._taken(step, now))

        assert answer == expected
        if isinstance(answer, tuple):
            if expected == (self.model.batches[step], False):
                self._check_batch(step, {index: group.oldest_version() for index, group in ready.items()})
            self.repeat(lambda: self._taken(step, now), (self.model.batches[step], True))

    def _taken(self, step: int, now: float) -> object:
        answer = self.groups.take(step, now)
        if answer is None:
            return None
        batch, redelivered = answer
        assert (batch.step, batch.batch_id) == (step, f"nonce-step-{step}")
        return batch.groups, redelivered

    def _check_batch(self, step: int, oldest: dict[int, int]) -> None:
        state = self.groups.state
        batch = state.batches[step]
        assert len(batch.groups) == self.spec.batch_groups
        left = [(version, index) for index, version in oldest.items() if index not in batch.groups]
        assert all((oldest[index], index) < other for index in batch.groups for other in left), "5: oldest first"
        for group, members in self.groups.winners(batch):
            names = [member.trajectory_id for member in members]
            assert len(names) == self.spec.group_size, "1: whole groups"
            assert sorted(names) == sorted(self.finished[group.index][: self.spec.group_size]), "1, 2: the first win"
            assert state.version - group.oldest_version() <= math.ceil(self.spec.alpha), "3: fresh at the take"
            self.taken.update(names)
        assert max(self.taken.values()) == 1, "9: taken once"
        if self.spec.alpha == 0:
            assert set(state.staleness) == {0}, "11: synchronous"
            assert sum(state.charged.values()) == self.spec.batch_groups, "11: one batch at a time"

    @precondition(lambda self: self.model.batches)
    @rule(step_behind=st.sampled_from([1, 1, 2, 3, 0]), known=st.booleans())
    def commit(self, step_behind: int, known: bool) -> None:
        step, now, request = len(self.model.batches) - step_behind, self.now, request_id()
        batch_id = f"nonce-step-{step}" if known else "another"

        self.ask(
            lambda: self.groups.commit(request, step, batch_id, now),
            answer_of(lambda: self.model.commit(step)) if known else "raises UnknownBatch",
        )

    @rule(best=st.integers(0, 3), left=st.sampled_from([0, 0, 2, 3, 5]), takes=st.sampled_from([1, 1, 2]))
    def steps_are_trained(self, best: int, left: int, takes: int) -> None:
        """As it goes on a good day."""
        self.everything_is_played(best, left, broken=0)
        for _ in range(takes):
            self.take(step_behind=0)
        self.publish(trained_behind=0, skip=1)

    @rule(trained_behind=st.sampled_from([0, 0, 0, 1, 2, -1]), skip=st.sampled_from([1, 1, 1, 1, 0, 2]))
    def publish(self, trained_behind: int, skip: int) -> None:
        """The next version, perhaps of a trainer that fell back to a checkpoint, or one that cannot be."""
        trained, version = len(self.model.batches) - trained_behind, self.model.version + skip
        now, request = self.now, request_id()

        self.ask(
            lambda: self.groups.publish(request, version, trained, now),
            answer_of(lambda: self.model.publish(version, trained)),
        )

    @rule(anew=st.booleans(), count=st.integers(1, 3))
    def validate(self, anew: bool, count: int) -> None:
        request, now, before = request_id(), self.now, self.model.credits_in_use()
        name = f"v{len(self.model.validations) - (not anew)}"

        self.ask(
            lambda: self.groups.start_validation(request, name, count, now),
            answer_of(lambda: self.model.start_validation(name, count)),
        )

        assert self.groups.credits_in_use == before, "10: validation uses no credit"

    @rule(repeat=st.booleans())
    def trainer_restarts(self, repeat: bool) -> None:
        """It takes over at once, and gets what was delivered and not committed (9)."""
        before = dict(self.groups.state.batches)
        self.trainers.append(f"trainer {len(self.trainers)}")
        for _ in range(1 + repeat):
            self.runs.configure(self.trainers[-1], self.trainers[-1], self.spec, "nonce", self.now)
        assert {step: self.groups.take(step, self.now) for step in before} == {
            step: (batch, True) for step, batch in before.items()
        }

    @precondition(lambda self: len(self.trainers) > 1)
    @rule(which=st.integers(0, 1000))
    def an_earlier_trainer_lives_on(self, which: int) -> None:
        earlier = self.trainers[which % (len(self.trainers) - 1)]
        before = self.runs.dump()
        # A call that is forgotten is a new one: only so many are remembered.
        if f"configure/{earlier}" in self.groups.state.answers:
            self.runs.configure(earlier, earlier, self.spec, "nonce", self.now)
        with pytest.raises(TrainerReplaced):
            self.runs.of_trainer(self.spec.run_id, earlier)
        assert self.runs.dump() == before

    # Everybody.

    @precondition(lambda self: self.repeatable)
    @rule(which=st.integers(0, 1000))
    def an_earlier_call_is_repeated(self, which: int) -> None:
        self.repeat(*self.repeatable[which % len(self.repeatable)])

    @rule()
    def another_run_has_its_turn(self) -> None:
        self.runs.configure(request_id(), "another", self.other, "other", self.now)
        state = self.runs.run(self.spec.run_id).state
        assert not state.retired
        assert max(len(state.answers), len(state.ended)) <= IDLE.remembered_requests
        self.model.idle(IDLE.remembered_requests)
        self.repeatable.clear()
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
        self.model.restart(self.now)

    @invariant()
    def it_looks_like_the_model(self) -> None:
        model, groups = self.model, self.groups
        state, fold, status = groups.state, groups.fold, views.status(groups, self.now)
        assert sorted(fold.open) == model.in_state("open")
        assert sorted(fold.ready) == model.in_state("ready")
        assert sorted(index for batch in state.batches.values() for index in batch.groups) == model.in_state("taken")
        assert fold.taken_count == status.group_counts["taken"] == len(model.in_state("taken"))
        assert status.credits_in_use_count == model.credits_in_use()
        assert status.credit_count == model.credits_in_use() + model.admissible()
        assert (status.policy_version, status.next_group_index) == (model.version, len(model.groups))
        assert (status.next_commit_step, status.next_batch_step) == (model.committed, len(model.batches))
        assert status.outcome_counts == +model.outcomes
        assert status.dropped_group_counts == +model.dropped
        assert status.staleness_counts == +model.staleness
        assert state.pools == +model.pools
        assert list(state.leases) == [e.lease for e in model.out()]
        assert list(state.finished) == model.readable()
        alive = set(model.in_state("open", "ready", "taken"))
        stages = Counter(e.state for e in model.episodes if not e.validation and e.index in alive)
        assert dict(status.episode_counts) == {name: stages[name] for name in ("pending", "leased", "done")}

    @invariant()
    def promises_are_kept(self) -> None:
        groups, state = self.groups, self.groups.state
        bound = math.ceil(self.spec.alpha)
        charged = sum(state.charged.values())
        assert charged <= self.most, "4: what is taken never exceeds alpha's bound"
        assert groups.credits_in_use <= self.most + self.spec.redundant_groups, "4: bounded work"
        for group in state.groups.values():
            done = len(group.done())
            assert done < self.spec.group_size if group.stage == "open" else done <= self.spec.group_size, "1"
            if group.stage in ("open", "ready"):
                assert all(state.version - member.oldest_version <= bound for member in group.done()), "3: fresh"
        for lease in state.leases.values():
            member = groups.fold.member(lease.validation_id, lease.position, lease.member)
            assert (member.stage, member.lease_id) == ("leased", lease.lease_id)
            if not lease.validation_id:
                assert state.groups[lease.position].stage == "open", "2: losers are cancelled"
                assert state.version - lease.version <= bound, "3, 6: what is played is fresh"
        assert groups.fold.expiry.keys() == state.leases.keys()
        assert max(state.staleness, default=0) <= bound, "3"
        assert sum(state.staleness.values()) == self.taken.total(), "9, 10: what is taken is training's"


class LongLedgerMachine(LedgerMachine):
    """The same, for longer."""


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
LongLedgerMachine.TestCase.settings = settings(max_examples=2000, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
TestLedgerAtLength = pytest.mark.slow(pytest.mark.timeout(600)(LongLedgerMachine.TestCase))
