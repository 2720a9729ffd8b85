"""Every run of one journal. Leases come from the current run: the one that a trainer configured last.

The others keep what they need to go on when they are configured again, and forget what they retained besides.
"""

import base64
from collections.abc import Callable, Sequence

from rollfarm.errors import LeaseExpired, TrainerReplaced, UnknownRun, UnknownTrajectory
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from sample_buffer import checks, events
from sample_buffer.groups import Groups
from sample_buffer.state import IDLE, SNAPSHOT, Limits, RunState, Snapshot


class Runs:
    """The whole state of a sample_buffer. `outbox` receives every event, already applied, in order."""

    def __init__(self) -> None:
        self.outbox: list[events.Event] = []
        self.current = ""
        self._limits = Limits()
        self._runs: dict[str, Groups] = {}
        self._by_nonce: dict[str, Groups] = {}

    def limit(self, retained_trajectories: int, remembered_requests: int, now: float) -> None:
        """Bounds what is remembered, from here on."""
        wanted = Limits(retained_trajectories, remembered_requests)
        if wanted != self._limits:
            self._emit(events.LimitsChanged(now, retained_trajectories, remembered_requests))

    def configure(
        self, request_id: str, trainer_id: str, spec: sample_buffer_pb2.RunSpec, nonce: str, now: float
    ) -> tuple[bool, Groups]:
        """Creates the run or finds it again, makes it the current one and `trainer_id` its one trainer.

        Answers whether it was created.
        """
        checks.require(request_id=request_id, trainer_id=trainer_id)
        checks.check_spec(spec)
        known = self._runs.get(spec.run_id)
        if known is not None:
            answer = known.state.answers.get(f"configure/{request_id}")
            if answer is not None:
                return bool(answer), known
            checks.check_same(known.spec, spec)
            wanted = (spec.run_id, spec.step_count, trainer_id)
            if wanted == (self.current, known.spec.step_count, known.state.trainer_id):
                return False, known
            nonce = known.state.nonce
        encoded = base64.b64encode(spec.SerializeToString(deterministic=True)).decode()
        self._emit(events.RunConfigured(now, spec.run_id, request_id, nonce, encoded, trainer_id))
        return known is None, self._runs[spec.run_id]

    def run(self, run_id: str) -> Groups:
        """A run by id; empty is the current one. Raises UnknownRun."""
        found = self._runs.get(run_id or self.current)
        if found is None:
            raise UnknownRun(f"There is no run {run_id!r}." if run_id else "No run is configured yet.", run_id=run_id)
        return found

    def of_trainer(self, run_id: str, trainer_id: str) -> Groups:
        """A run, for its trainer. Raises UnknownRun, and TrainerReplaced for every other trainer."""
        found = self.run(run_id)
        if found.state.trainer_id != trainer_id:
            raise TrainerReplaced(
                f"Trainer {found.state.trainer_id!r} has taken over run {found.state.run_id!r} from {trainer_id!r}.",
                run_id=found.state.run_id,
                trainer_id=found.state.trainer_id,
                replaced_trainer_id=trainer_id,
            )
        return found

    def of_lease(self, lease_id: str) -> Groups:
        """The run that lent a lease. Raises LeaseExpired."""
        found = self._by_nonce.get(lease_id.rpartition("-")[0])
        if found is None:
            raise LeaseExpired(f"Lease {lease_id!r} is not out.", lease_id=lease_id)
        return found

    def of_trajectory(self, trajectory_id: str) -> Groups:
        """The run that retains a trajectory. Raises UnknownTrajectory."""
        for groups in self._runs.values():
            if trajectory_id in groups.state.finished:
                return groups
        raise UnknownTrajectory(f"Trajectory {trajectory_id!r} is not retained.", trajectory_id=trajectory_id)

    def heartbeat(self, worker_id: str, lease_ids: Sequence[str], now: float) -> list[sample_buffer_pb2.CancelledLease]:
        """Extends the worker's leases, of whichever run. Answers those that it should stop playing."""
        checks.require(worker_id=worker_id)
        return self._of_each(lease_ids, lambda groups, lease_id: groups.heartbeat(worker_id, [lease_id], now))

    def cancelled(self, worker_id: str, lease_ids: Sequence[str]) -> list[sample_buffer_pb2.CancelledLease]:
        """Those of the worker's leases that it should stop playing. Extends none."""
        return self._of_each(lease_ids, lambda groups, lease_id: groups.cancelled(worker_id, [lease_id]))

    @property
    def revoked_count(self) -> int:
        """Grows when a lease ends otherwise than by its worker's word."""
        return sum(groups.fold.revoked_count for groups in self._runs.values())

    def _of_each(
        self, lease_ids: Sequence[str], ask: Callable[[Groups, str], list[sample_buffer_pb2.CancelledLease]]
    ) -> list[sample_buffer_pb2.CancelledLease]:
        cancelled: list[sample_buffer_pb2.CancelledLease] = []
        for lease_id in lease_ids:
            try:
                cancelled += ask(self.of_lease(lease_id), lease_id)
            except LeaseExpired as unknown:
                cancelled.append(
                    sample_buffer_pb2.CancelledLease(
                        lease_id=lease_id, outcome=trajectory_pb2.OUTCOME_CANCELLED, detail=unknown.problem
                    )
                )
        return cancelled

    def tick(self, now: float) -> int:
        """Ends overdue leases. Answers how many."""
        return sum(groups.tick(now) for groups in self._runs.values())

    def garbage(self) -> list[str]:
        """Payloads that nobody needs any more; each is answered once."""
        garbage: list[str] = []
        for groups in self._runs.values():
            garbage += groups.fold.garbage
            groups.fold.garbage.clear()
        return garbage

    def payload_ids(self) -> list[str]:
        """Every payload that is still needed."""
        return [
            member.lease_id
            for groups in self._runs.values()
            for group in groups.state.groups.values()
            for member in group.done()
        ]

    def apply(self, event: events.Event) -> None:
        """Replays one event."""
        if isinstance(event, events.RunConfigured):
            self._configured(event)
        elif isinstance(event, events.LimitsChanged):
            self._limits = Limits(event.retained_trajectories, event.remembered_requests)
            self._forget()
        else:
            self._runs[event.run_id].fold.apply(event)

    def _configured(self, event: events.RunConfigured) -> None:
        created = event.run_id not in self._runs
        if created:
            spec = sample_buffer_pb2.RunSpec.FromString(base64.b64decode(event.spec))
            zeros = [0] * len(spec.domains)
            self._add(RunState(event.run_id, event.nonce, event.spec, zeros, list(zeros)))
        self._runs[event.run_id].fold.configured(event, created=created)
        self.current = event.run_id
        self._forget()

    def _forget(self) -> None:
        for run_id, groups in self._runs.items():
            groups.fold.keep_within(self._limits if run_id == self.current else IDLE)

    def resume(self, now: float) -> None:
        """After a replay: rebuild what is not in the events."""
        for groups in self._runs.values():
            groups.fold.reindex(now)

    def dump(self) -> bytes:
        """Everything, as one snapshot."""
        runs = {name: groups.state for name, groups in self._runs.items()}
        return SNAPSHOT.dump_json(Snapshot(self._limits, self.current, runs))

    def load(self, snapshot: bytes) -> None:
        """Take over a snapshot. Only into a fresh object."""
        loaded = SNAPSHOT.validate_json(snapshot)
        self._limits = loaded.limits
        self.current = loaded.current
        for state in loaded.runs.values():
            self._add(state)
        self._forget()

    def _emit(self, event: events.Event) -> None:
        self.apply(event)
        self.outbox.append(event)

    def _add(self, state: RunState) -> None:
        groups = Groups(state, self._limits, self.outbox)
        self._runs[state.run_id] = groups
        self._by_nonce[state.nonce] = groups
