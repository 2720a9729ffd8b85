"""The ledger of one run: decides, and says every decision as an event.

A command checks its request against the state, raises a FarmError or emits events, and changes nothing otherwise. Time
arrives as an argument. Invariants: taken groups never use more credits than there are, and everything outstanding at
most `redundant_groups` more; a lease is of a member that is still wanted; nothing older than the freshness bound is
taken; a trajectory is taken at most once.
"""

from collections.abc import Collection, Sequence

from rollfarm.errors import (
    InvalidArgument,
    InvalidTrajectory,
    LeaseExpired,
    StepOutOfOrder,
    UnknownBatch,
    UnknownValidation,
    VersionOutOfOrder,
)
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from sample_buffer import checks, events, filters
from sample_buffer.fold import ACCEPTED, Fold, Key
from sample_buffer.state import (
    FAILED,
    HANDED_IN,
    REDUNDANT,
    STALE,
    Batch,
    Group,
    Lease,
    Limits,
    Member,
    RunState,
    Validation,
)

SURPLUS = sample_buffer_pb2.DISPOSITION_SURPLUS
TOO_OLD = sample_buffer_pb2.DISPOSITION_STALE


class Groups:
    """One run. `outbox` receives every event, already applied, in order."""

    def __init__(self, state: RunState, limits: Limits, outbox: list[events.Event]) -> None:
        self.state = state
        self.fold = Fold(state, limits)
        self._outbox = outbox

    @property
    def spec(self) -> sample_buffer_pb2.RunSpec:
        return self.fold.spec

    # Episodes.

    def lease(
        self,
        request_id: str,
        worker_id: str,
        max_leases: int,
        environments: Sequence[str],
        now: float,
        *,
        excluded: Collection[str] = (),
    ) -> list[Lease]:
        """Episodes for a worker: validation first, then retries of the oldest groups, then new groups.

        Of `environments` (none: of any), and never of `excluded` ones.
        """
        checks.require(request_id=request_id, worker_id=worker_id)
        if max_leases < 1:
            raise InvalidArgument(f"max_leases is {max_leases}; it is at least 1.", max_leases=max_leases)
        known = self.state.answers.get(f"lease/{request_id}")
        if isinstance(known, list):
            return known
        picks = self._pick(max_leases, environments, excluded, now)
        if not picks:
            return []
        self._emit(events.Leased(now, self.state.run_id, request_id, worker_id, picks))
        leased = self.state.answers[f"lease/{request_id}"]
        assert isinstance(leased, list)
        return leased

    def _pick(
        self, most: int, environments: Sequence[str], excluded: Collection[str], now: float
    ) -> list[tuple[str, int, int]]:
        def plays(name: str) -> bool:
            return (not environments or name in environments) and name not in excluded

        names = {validation.order: name for name, validation in self.state.validations.items()}
        picks: list[tuple[str, int, int]] = []
        while len(picks) < most:
            if key := self.fold.validation_pending.pop(plays, lambda key: key[0] in names):
                picks.append((names[key[0]], key[1], 0))
            elif key := self.fold.pending.pop(plays, self._is_wanted):
                picks.append(("", *key))
            elif self._admissible > 0:
                self._emit(events.Admitted(now, self.state.run_id, self.state.next_group))
            elif group := self._neglected(excluded, now):
                self._drop(group, FAILED, f"{self._environment(group)} is suspended", now)
            else:
                break
        return picks

    def _neglected(self, excluded: Collection[str], now: float) -> Group | None:
        """The oldest group that a broken environment keeps from moving, for as long as a lease lasts.

        Its credit is missing to the other environments. Where there is no other, nothing is gained by its end.
        """
        others = set(self.fold.environments) - set(excluded)
        if not excluded or not others or self._waiting > self._room:
            return None
        return next((group for group in self._outstanding() if self._is_neglected(group, excluded, now)), None)

    def _is_neglected(self, group: Group, excluded: Collection[str], now: float) -> bool:
        return (
            group.stage == "open"
            and self._environment(group) in excluded
            and group.history[-1].at <= now - self.fold.lease_seconds
            and not any(member.stage == "leased" for member in group.members)
        )

    def _environment(self, group: Group) -> str:
        return self.fold.environments[group.domain]

    def _is_wanted(self, key: Key) -> bool:
        group = self.fold.open.get(key[0])
        return group is not None and group.members[key[1]].stage == "pending"

    @property
    def capacity(self) -> int:
        """Groups that may be outstanding: those that are, and those that may be admitted now."""
        return self.credits_in_use + self._admissible

    @property
    def credits_in_use(self) -> int:
        """Groups that are open, ready, or taken for a step that no published version was trained on."""
        return self._waiting + self._charged

    @property
    def _admissible(self) -> int:
        return max(0, self._room - self._waiting)

    @property
    def _room(self) -> int:
        """Redundant groups need a free credit to compete for: while none is free, nothing is admitted."""
        return self._free + self.spec.redundant_groups if self._free else 0

    @property
    def _free(self) -> int:
        """Credits that no taken group uses, and no more than the remaining steps need."""
        free = max(0, self.fold.capacity - self._charged)
        if not self.spec.step_count:
            return free
        return min(free, max(0, self.spec.step_count - self.state.next_batch_step) * self.spec.batch_groups)

    @property
    def _charged(self) -> int:
        return sum(self.state.charged.values())

    @property
    def _waiting(self) -> int:
        return len(self.fold.open) + len(self.fold.ready)

    def heartbeat(self, worker_id: str, lease_ids: Sequence[str], now: float) -> list[sample_buffer_pb2.CancelledLease]:
        """Extends the worker's leases. Answers those that it should stop playing."""
        for lease_id in lease_ids:
            if self._is_out(worker_id, lease_id):
                self.fold.expiry[lease_id] = now + self.fold.lease_seconds
        return self.cancelled(worker_id, lease_ids)

    def cancelled(self, worker_id: str, lease_ids: Sequence[str]) -> list[sample_buffer_pb2.CancelledLease]:
        """Those of the leases that the worker should stop playing: not out, and it has not handed them in itself."""
        return [
            self._cancelled(lease_id)
            for lease_id in lease_ids
            if not self._is_out(worker_id, lease_id) and self.state.ended.get(lease_id) not in HANDED_IN
        ]

    def _is_out(self, worker_id: str, lease_id: str) -> bool:
        lease = self.state.leases.get(lease_id)
        return lease is not None and lease.worker_id == worker_id

    def _cancelled(self, lease_id: str) -> sample_buffer_pb2.CancelledLease:
        ending = self.state.ended.get(lease_id)
        stale = ending == "stale"
        detail = {
            "stale": "the version advanced and made it too old",
            "surplus": "its group was completed or dropped",
            "expired": "the lease expired and the episode was leased again",
        }.get(ending or "", "the lease is not out")
        outcome = trajectory_pb2.OUTCOME_STALE if stale else trajectory_pb2.OUTCOME_CANCELLED
        return sample_buffer_pb2.CancelledLease(lease_id=lease_id, outcome=outcome, detail=detail)

    def complete(
        self, request_id: str, lease_id: str, trajectory: trajectory_pb2.Trajectory, now: float
    ) -> tuple[sample_buffer_pb2.Disposition.ValueType, bool]:
        """Takes a finished episode. Answers what became of it, and whether its payload is to be kept."""
        checks.require(request_id=request_id, lease_id=lease_id)
        state = self.state
        known = state.answers.get(f"complete/{request_id}")
        if isinstance(known, int):
            return sample_buffer_pb2.Disposition.ValueType(known), False
        lease = state.leases.get(lease_id)
        if lease is None:
            return self._late(lease_id), False
        tokens = checks.check_trajectory(trajectory, lease, state.run_id, newest_version=state.version)
        trajectory_id, oldest_version = trajectory.trajectory_id, trajectory.oldest_policy_version
        if trajectory_id in state.finished:
            raise InvalidTrajectory(
                f"trajectory_id {trajectory_id!r} was handed in before.", trajectory_id=trajectory_id
            )
        counted = not lease.validation_id
        stale = counted and self._is_stale(oldest_version)
        disposition = TOO_OLD if stale else ACCEPTED
        self._emit(
            events.Completed(
                now,
                state.run_id,
                request_id,
                lease_id,
                int(disposition),
                trajectory_id,
                int(trajectory.outcome),
                trajectory.reward,
                oldest_version,
                tokens,
                {} if counted else checks.finite(trajectory.metrics),
            )
        )
        kept = counted and not stale
        if kept:
            self._settle(state.groups[lease.position], now)
        return disposition, kept

    def _late(self, lease_id: str) -> sample_buffer_pb2.Disposition.ValueType:
        ending = self.state.ended.get(lease_id)
        if ending == "surplus":
            return SURPLUS
        if ending == "stale":
            return TOO_OLD
        raise LeaseExpired(f"Lease {lease_id} is not out.", lease_id=lease_id)

    def _is_stale(self, version: int) -> bool:
        return self.state.version - version > self.fold.bound

    def _settle(self, group: Group, now: float) -> None:
        """A group with enough members is ready, or dropped by a filter."""
        done = group.done()
        if len(done) < self.spec.group_size:
            return
        candidate = filters.Candidate(
            rewards_G=[member.reward for member in done],
            lengths_G=[member.token_count for member in done],
            step=self.state.next_batch_step,
            seen=self.state.pools,
        )
        refused, pool = filters.judge(self.spec.filters, candidate)
        if pool:
            self._emit(events.Pooled(now, self.state.run_id, pool))
        if refused:
            self._drop(group, refused, "", now)
        else:
            self._emit(events.Ready(now, self.state.run_id, group.index))

    def fail(
        self, request_id: str, lease_id: str, outcome: trajectory_pb2.Outcome.ValueType, detail: str, now: float
    ) -> bool:
        """Takes an episode back. Answers whether it will be leased again."""
        checks.require(request_id=request_id, lease_id=lease_id)
        known = self.state.answers.get(f"fail/{request_id}")
        if isinstance(known, int):
            return bool(known)
        if outcome not in checks.GIVEN_BACK:
            names = ", ".join(trajectory_pb2.Outcome.Name(known) for known in checks.GIVEN_BACK)
            raise InvalidArgument(f"Outcome {outcome} is no failure. Known: {names}.", outcome=outcome)
        lease = self.state.leases.get(lease_id)
        if lease is None:
            raise LeaseExpired(f"Lease {lease_id} is not out.", lease_id=lease_id)
        counted = outcome != trajectory_pb2.OUTCOME_CANCELLED
        retried = self._may_retry(lease, counted=counted)
        self._emit(events.Failed(now, self.state.run_id, request_id, lease_id, int(outcome), detail[:1000], retried))
        if not retried:
            self._give_up(lease, f"{trajectory_pb2.Outcome.Name(outcome)}: {detail[:1000]}", now)
        return retried

    def tick(self, now: float) -> int:
        """Ends the leases whose workers were silent for too long. Answers how many."""
        late = [lease_id for lease_id, end in self.fold.expiry.items() if end <= now]
        expired = 0
        for lease_id in late:
            lease = self.state.leases.get(lease_id)
            if lease is None:
                continue
            retried = self._may_retry(lease, counted=True)
            self._emit(events.Expired(now, self.state.run_id, lease_id, retried))
            expired += 1
            if not retried:
                self._give_up(lease, f"{lease.worker_id} was silent", now)
        return expired

    def _may_retry(self, lease: Lease, *, counted: bool) -> bool:
        member = self.fold.member(lease.validation_id, lease.position, lease.member)
        return member.failures + counted < self.spec.max_attempts

    def _give_up(self, lease: Lease, detail: str, now: float) -> None:
        """Drops the group of a member that gave up, unless redundant members can still complete it."""
        if lease.validation_id:
            return
        group = self.state.groups[lease.position]
        alive = sum(member.stage != "failed" for member in group.members)
        if alive < self.spec.group_size:
            self._drop(group, FAILED, detail, now)

    def _drop(self, group: Group, reason: str, detail: str, now: float) -> None:
        self._emit(events.Dropped(now, self.state.run_id, group.index, reason, detail))

    # Batches and the clock.

    def take(self, step: int, now: float) -> tuple[Batch, bool] | None:
        """The batch of a step and whether it was delivered before.

        None while too few groups are ready or too few credits are free: redundant groups let nobody run further ahead.
        """
        state = self.state
        if step in state.batches:
            return state.batches[step], True
        if step != state.next_batch_step:
            raise StepOutOfOrder(
                f"Step {step} is neither delivered and uncommitted nor the next, which is {state.next_batch_step}.",
                step=step,
                next_step=state.next_batch_step,
            )
        if self.spec.step_count and step >= self.spec.step_count:
            raise StepOutOfOrder(
                f"The run has {self.spec.step_count} steps.", step=step, next_step=state.next_batch_step
            )
        for group in [group for group in self.fold.ready.values() if self._is_stale(group.oldest_version())]:
            self._drop(group, STALE, "at the take", now)
        if min(len(self.fold.ready), self._free) < self.spec.batch_groups:
            return None
        oldest_first = sorted((group.oldest_version(), group.index) for group in self.fold.ready.values())
        indexes = [index for _, index in oldest_first[: self.spec.batch_groups]]
        self._emit(events.Taken(now, state.run_id, step, indexes))
        if self.fold.bound == 0 or step + 1 == self.spec.step_count:
            for group in self._outstanding():
                self._drop(group, REDUNDANT, "left over at the take", now)
        return state.batches[step], False

    def commit(self, request_id: str, step: int, batch_id: str, now: float) -> int:
        """Never delivers the step nor an earlier one again. Answers the first step that is not committed."""
        checks.require(request_id=request_id, batch_id=batch_id)
        known = self.state.answers.get(f"commit/{request_id}")
        if isinstance(known, int):
            return known
        if batch_id != self.fold.batch_id(step) or not 0 <= step < self.state.next_batch_step:
            raise UnknownBatch(f"Batch {batch_id!r} was never delivered for step {step}.", batch_id=batch_id, step=step)
        if step >= self.state.next_commit_step:
            self._emit(events.Committed(now, self.state.run_id, request_id, step))
        return self.state.next_commit_step

    def publish(self, request_id: str, version: int, trained_step_count: int, now: float) -> int:
        """Advances the clock by one version. Answers how many groups that made too stale."""
        checks.require(request_id=request_id)
        state = self.state
        known = state.answers.get(f"publish/{request_id}")
        if isinstance(known, int):
            return known
        if version != state.version + 1:
            raise VersionOutOfOrder(
                f"Version {version} does not follow the newest one, {state.version}.",
                policy_version=version,
                newest_version=state.version,
            )
        if not 0 <= trained_step_count <= state.next_batch_step:
            raise InvalidArgument(
                f"trained_step_count is {trained_step_count}; {state.next_batch_step} steps were delivered.",
                trained_step_count=trained_step_count,
            )
        oldest = version - self.fold.bound
        groups = self._stale_groups(oldest)
        stale = set(groups)
        leases = [
            lease.lease_id
            for lease in state.leases.values()
            if lease.version < oldest and not lease.validation_id and lease.position not in stale
        ]
        self._emit(events.Published(now, state.run_id, request_id, version, trained_step_count, groups, leases))
        return len(groups)

    def _stale_groups(self, oldest: int) -> list[int]:
        return [
            group.index
            for group in self._outstanding()
            if any(member.oldest_version < oldest for member in group.done())
        ]

    def _outstanding(self) -> list[Group]:
        """Groups that are open or ready, by index."""
        return sorted([*self.fold.open.values(), *self.fold.ready.values()], key=lambda group: group.index)

    # Validation.

    def start_validation(self, request_id: str, validation_id: str, episode_count: int, now: float) -> None:
        """Asks for validation episodes. Asking again for the same changes nothing."""
        checks.require(request_id=request_id, validation_id=validation_id)
        if episode_count < 1:
            raise InvalidArgument(f"episode_count is {episode_count}; it is at least 1.", episode_count=episode_count)
        if f"validate/{request_id}" in self.state.answers:
            return
        known = self.state.validations.get(validation_id)
        if known is None:
            self._emit(events.ValidationStarted(now, self.state.run_id, request_id, validation_id, episode_count))
        elif len(known.episodes) != episode_count:
            raise InvalidArgument(
                f"Validation {validation_id!r} exists with {len(known.episodes)} episodes.", validation_id=validation_id
            )

    def validation(self, validation_id: str) -> Validation:
        """Raises UnknownValidation."""
        found = self.state.validations.get(validation_id)
        if found is None:
            raise UnknownValidation(f"There is no validation {validation_id!r}.", validation_id=validation_id)
        return found

    def winners(self, batch: Batch) -> list[tuple[Group, list[Member]]]:
        """The groups of a batch in training order, each with the members that count."""
        return [(self.state.groups[index], self.state.groups[index].done()) for index in batch.groups]

    def _emit(self, event: events.RunEvent) -> None:
        self.fold.apply(event)
        self._outbox.append(event)
