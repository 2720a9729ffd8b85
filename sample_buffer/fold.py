"""Applies events to the state of a run. The only code that changes it, so replay and service cannot differ.

Beside the state lie indexes that a restart rebuilds from it: what is pending, which groups are open or ready, when
leases expire, and which payloads nobody needs any more.
"""

import base64
import heapq
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from statistics import fmean
from typing import Any

from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from sample_buffer import events, lengths, tasks
from sample_buffer.state import (
    HANDED_IN,
    STALE,
    Batch,
    Ending,
    Group,
    GroupStage,
    Lease,
    Limits,
    Member,
    MemberStage,
    Note,
    RunState,
    Sums,
    Validation,
)

ACCEPTED = sample_buffer_pb2.DISPOSITION_ACCEPTED

OUTCOMES = {int(value): name for name, value in trajectory_pb2.Outcome.items()}
"""Their names."""

Key = tuple[int, int]


class Pending:
    """Episodes to lease, by environment, lowest key first. A key may have gone stale: the taker looks."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[Key]] = {}

    def push(self, environment: str, key: Key) -> None:
        heapq.heappush(self._heaps.setdefault(environment, []), key)

    def pop(self, plays: Callable[[str], bool], wanted: Callable[[Key], bool]) -> Key | None:
        """The lowest key that is still wanted, of an environment that the caller `plays`."""
        heaps = [heap for name, heap in self._heaps.items() if plays(name)]
        for heap in heaps:
            while heap and not wanted(heap[0]):
                heapq.heappop(heap)
        heap = min((heap for heap in heaps if heap), key=lambda heap: heap[0], default=None)
        return heapq.heappop(heap) if heap else None


def ahead(alpha: float, batch_groups: int) -> tuple[int, int]:
    """What alpha means: the most groups that are outstanding, and the most versions that one lags at the take.

    Alpha is how many batches of work may run ahead of the trainer. At most floor((1 + alpha) * batch_groups) groups are
    outstanding, and a group lags at most ceil(alpha) versions at the take: versions are integers, and where a fraction
    of a batch runs ahead, that fraction was begun one version early. 0 is exactly synchronous.
    """
    exact = Fraction(repr(alpha))  # as it was written: 1.13 * 100 is less than 113 in binary
    return math.floor((1 + exact) * batch_groups), math.ceil(exact)


class Fold:
    """The state of one run and its indexes."""

    def __init__(self, state: RunState, limits: Limits) -> None:
        self.state = state
        self.limits = limits
        self.garbage: list[str] = []
        """Lease ids whose payloads nobody needs any more; whoever keeps payloads empties it."""
        self.expiry: dict[str, float] = {}
        """When each lease ends. Not an event: a restart gives every lease its full duration again."""
        self.revoked_count = 0
        """Leases that ended otherwise than by their worker's word, since the process began."""
        self.set_spec(state.spec)
        self._apply: dict[type[Any], Callable[[Any], None]] = {
            events.Admitted: self._admitted,
            events.Leased: self._leased,
            events.Completed: self._completed,
            events.Failed: self._failed,
            events.Expired: self._expired,
            events.Pooled: self._pooled,
            events.Ready: self._ready,
            events.Dropped: self._dropped,
            events.Taken: self._taken,
            events.Published: self._published,
            events.Committed: self._committed,
            events.ValidationStarted: self._validation_started,
        }
        self.reindex(0.0)

    def set_spec(self, spec: str) -> None:
        """Take the spec, which may only differ in its step count."""
        self.state.spec = spec
        self.spec = sample_buffer_pb2.RunSpec.FromString(base64.b64decode(spec))
        self.lease_seconds = self.spec.lease_duration.ToNanoseconds() / 1e9
        self.capacity, self.bound = ahead(self.spec.alpha, self.spec.batch_groups)
        self._shares = tasks.shares([domain.weight for domain in self.spec.domains])
        self.environments = [domain.environment for domain in self.spec.domains]
        """[domain] what plays it."""

    def reindex(self, now: float) -> None:
        """Rebuild every index from the state; leases get their full duration from `now`."""
        self.pending = Pending()
        self.validation_pending = Pending()
        self.open: dict[int, Group] = {}
        self.ready: dict[int, Group] = {}
        self.taken_count = 0
        self.episodes: Counter[MemberStage] = Counter()
        for group in self.state.groups.values():
            self._index(group, +1)
            if group.stage == "open":
                for number, member in enumerate(group.members):
                    if member.stage == "pending":
                        self._push(group, number)
        for validation in self.state.validations.values():
            for number, episode in enumerate(validation.episodes):
                if episode.stage == "pending":
                    self._push_validation(validation, number)
        self.expiry = dict.fromkeys(self.state.leases, now + self.lease_seconds)

    def keep_within(self, limits: Limits) -> None:
        """Remember no more than `limits`, now and from here on."""
        self.limits = limits
        self._forget_requests()
        self._forget_retired()
        self._forget_validations()

    def apply(self, event: events.RunEvent) -> None:
        """Change the state by one event."""
        self._apply[type(event)](event)

    # What an event does.

    def configured(self, event: events.RunConfigured, *, created: bool) -> None:
        """The run began, or goes on."""
        self.set_spec(event.spec)
        self.state.trainer_id = event.trainer_id
        self._answer("configure", event.request_id, int(created))

    def _admitted(self, event: events.Admitted) -> None:
        state = self.state
        domain = tasks.interleave(state.balances, self._shares)
        members = [Member() for _ in range(self.spec.group_size + self.spec.redundant_members)]
        group = Group(event.group, domain, state.domain_counts[domain], members)
        state.domain_counts[domain] += 1
        state.next_group = event.group + 1
        state.groups[event.group] = group
        self._index(group, +1)
        self._note(group, event.at, "admitted")
        for number in range(len(members)):
            self._push(group, number)

    def _leased(self, event: events.Leased) -> None:
        state = self.state
        leases: list[Lease] = []
        for validation_id, index, number in event.picks:
            member = self.member(validation_id, index, number)
            member.attempts += 1
            member.lease_id = f"{state.nonce}-{state.lease_count}"
            state.lease_count += 1
            domain, task_index = self._task(validation_id, index)
            lease = Lease(
                lease_id=member.lease_id,
                worker_id=event.worker_id,
                at=event.at,
                validation_id=validation_id,
                position=index,
                member=number,
                attempt=member.attempts,
                version=state.version,
                domain=domain,
                task_index=task_index,
            )
            state.leases[lease.lease_id] = lease
            self.expiry[lease.lease_id] = event.at + self.lease_seconds
            self._move(lease, "leased")
            self._note_lease(lease, event.at, "leased")
            leases.append(lease)
        self._answer("lease", event.request_id, leases)

    def _completed(self, event: events.Completed) -> None:
        lease = self._end(event.lease_id, "completed")
        accepted = event.disposition == ACCEPTED
        outcome = event.outcome if accepted else int(trajectory_pb2.OUTCOME_STALE)
        _count(self.state.outcomes, outcome)
        if accepted:
            self._accept(lease, event)
        else:
            self._note_lease(lease, event.at, "failed", "older than the freshness bound")
            self._retry(lease)
        self._answer("complete", event.request_id, event.disposition)

    def _accept(self, lease: Lease, event: events.Completed) -> None:
        state = self.state
        member = self._move(lease, "done")
        member.trajectory_id = event.trajectory_id
        member.outcome = event.outcome
        member.reward = event.reward
        member.oldest_version = event.oldest_version
        member.token_count = event.token_count
        if lease.validation_id:
            validation = state.validations[lease.validation_id]
            _add(validation.sums[validation.domains[lease.position]], event.reward, event.metrics)
            return
        state.policy_tokens += event.token_count
        _count(state.accepted_lengths, lengths.rounded(event.token_count))
        state.finished[event.trajectory_id] = (state.finished_count, lease.position, lease.member)
        state.finished_count += 1
        self._note_lease(lease, event.at, "completed", OUTCOMES[event.outcome])

    def _failed(self, event: events.Failed) -> None:
        lease = self._end(event.lease_id, "failed")
        _count(self.state.outcomes, event.outcome)
        detail = f"{OUTCOMES[event.outcome]}: {event.detail}"
        self._note_lease(lease, event.at, "failed", detail)
        if event.outcome != trajectory_pb2.OUTCOME_CANCELLED:
            self._count_failure(lease)
            self.state.last_failure = detail
        self._retry_or_give_up(lease, event.retried)
        self._answer("fail", event.request_id, int(event.retried))

    def _expired(self, event: events.Expired) -> None:
        lease = self._end(event.lease_id, "expired")
        self.state.expired_leases += 1
        self._note_lease(lease, event.at, "expired", f"{lease.worker_id} was silent")
        self._count_failure(lease)
        self._retry_or_give_up(lease, event.retried)

    def _pooled(self, event: events.Pooled) -> None:
        _count(self.state.pools, event.pool)

    def _ready(self, event: events.Ready) -> None:
        group = self.state.groups[event.group]
        self._cancel_rest(group, event.at, "surplus")
        self._stage(group, "ready")
        self._note(group, event.at, "ready")

    def _dropped(self, event: events.Dropped) -> None:
        self._drop(self.state.groups[event.group], event.at, event.reason, event.detail)

    def _drop(self, group: Group, at: float, reason: str, detail: str) -> None:
        self._cancel_rest(group, at, "stale" if reason == STALE else "surplus")
        _count(self.state.dropped, reason)
        dropped = self.state.dropped_lengths.setdefault(reason, {})
        for member in group.done():
            _count(dropped, lengths.rounded(member.token_count))
        self._stage(group, "dropped")
        self._note(group, at, "dropped", detail=f"{reason}: {detail}" if detail else reason)
        self._retire(group)

    def _taken(self, event: events.Taken) -> None:
        state = self.state
        rewards: list[float] = []
        for index in event.indexes:
            group = state.groups[index]
            self._stage(group, "taken")
            group.step = event.step
            self._note(group, event.at, "taken")
            for member in group.done():
                _count(state.staleness, state.version - member.oldest_version)
                rewards.append(member.reward)
        state.last_batch_mean_reward = fmean(rewards)
        state.batches[event.step] = Batch(event.step, self.batch_id(event.step), state.version, list(event.indexes))
        state.charged[event.step] = len(event.indexes)
        state.next_batch_step = event.step + 1

    def _published(self, event: events.Published) -> None:
        state = self.state
        state.version = event.version
        for lease_id in event.stale_leases:
            lease = self._end(lease_id, "stale")
            _count(state.outcomes, int(trajectory_pb2.OUTCOME_STALE))
            self._note_lease(lease, event.at, "expired", f"version {event.version} made it stale")
            self._retry(lease)
        for index in event.stale_groups:
            self._drop(state.groups[index], event.at, STALE, f"version {event.version}")
        for step in range(state.trained_steps, event.trained_step_count):
            state.charged.pop(step, None)
            for index in state.batches[step].groups if step in state.batches else ():
                self._note(state.groups[index], event.at, "published")
        state.trained_steps = max(state.trained_steps, event.trained_step_count)
        self._answer("publish", event.request_id, len(event.stale_groups))

    def _committed(self, event: events.Committed) -> None:
        state = self.state
        for step in range(state.next_commit_step, event.step + 1):
            for index in state.batches.pop(step).groups:
                group = state.groups[index]
                self._stage(group, "committed")
                self._note(group, event.at, "committed")
                state.committed_trajectories += len(group.done())
                self._retire(group)
        state.next_commit_step = event.step + 1
        self._answer("commit", event.request_id, state.next_commit_step)

    def _validation_started(self, event: events.ValidationStarted) -> None:
        picks = tasks.spread(self._shares, event.episode_count)
        validation = Validation(
            order=self.state.validation_count,
            episodes=[Member() for _ in picks],
            domains=[domain for domain, _ in picks],
            task_indexes=[index for _, index in picks],
            sums={domain: Sums() for domain in sorted({domain for domain, _ in picks})},
        )
        self.state.validation_count += 1
        self.state.validations[event.validation_id] = validation
        for number in range(len(picks)):
            self._push_validation(validation, number)
        self._forget_validations()
        self._answer("validate", event.request_id, event.episode_count)

    # What several events share.

    def batch_id(self, step: int) -> str:
        """Names the batch of a step."""
        return f"{self.state.nonce}-step-{step}"

    def member(self, validation_id: str, index: int, number: int) -> Member:
        """The member that a lease is for."""
        if validation_id:
            return self.state.validations[validation_id].episodes[index]
        return self.state.groups[index].members[number]

    def _answer(self, method: str, request_id: str, answer: int | list[Lease]) -> None:
        self.state.answers[f"{method}/{request_id}"] = answer
        self._forget_requests()

    def _end(self, lease_id: str, ending: Ending) -> Lease:
        self.expiry.pop(lease_id, None)
        self.state.ended[lease_id] = ending
        self.revoked_count += ending not in HANDED_IN
        return self.state.leases.pop(lease_id)

    def _task(self, validation_id: str, index: int) -> tuple[int, int]:
        if validation_id:
            validation = self.state.validations[validation_id]
            return validation.domains[index], validation.task_indexes[index]
        group = self.state.groups[index]
        return group.domain, group.task_index

    def _move(self, lease: Lease, stage: MemberStage) -> Member:
        member = self.member(lease.validation_id, lease.position, lease.member)
        if lease.validation_id:
            member.stage = stage
        else:
            self._move_member(member, stage)
        return member

    def _move_member(self, member: Member, stage: MemberStage) -> None:
        self.episodes[member.stage] -= 1
        self.episodes[stage] += 1
        member.stage = stage

    def _count_failure(self, lease: Lease) -> None:
        self.member(lease.validation_id, lease.position, lease.member).failures += 1

    def _retry_or_give_up(self, lease: Lease, retried: bool) -> None:
        if retried:
            self._retry(lease)
            return
        self._move(lease, "failed")
        if lease.validation_id:
            validation = self.state.validations[lease.validation_id]
            validation.sums[validation.domains[lease.position]].failed += 1

    def _retry(self, lease: Lease) -> None:
        self._move(lease, "pending")
        if lease.validation_id:
            self._push_validation(self.state.validations[lease.validation_id], lease.position)
        else:
            self._push(self.state.groups[lease.position], lease.member)

    def _cancel_rest(self, group: Group, at: float, ending: Ending) -> None:
        for member in group.members:
            if member.stage == "leased":
                lease = self._end(member.lease_id, ending)
                _count(self.state.outcomes, int(trajectory_pb2.OUTCOME_CANCELLED))
                self._note_lease(lease, at, "expired", "cancelled")
            if member.stage in ("leased", "pending"):
                self._move_member(member, "cancelled")

    def _retire(self, group: Group) -> None:
        state = self.state
        if not group.done():
            del state.groups[group.index]
            return
        state.retired.append(group.index)
        state.retired_trajectories += len(group.done())
        self._forget_retired()

    def _forget_requests(self) -> None:
        for remembered in (self.state.answers, self.state.ended):
            while len(remembered) > self.limits.remembered_requests:
                remembered.popitem(last=False)

    def _forget_retired(self) -> None:
        state = self.state
        while state.retired_trajectories > self.limits.retained_trajectories:
            oldest = state.groups.pop(state.retired.popleft())
            for member in oldest.done():
                state.retired_trajectories -= 1
                del state.finished[member.trajectory_id]
                self.garbage.append(member.lease_id)

    def _forget_validations(self) -> None:
        finished = [name for name, validation in self.state.validations.items() if validation.finished]
        for name in finished[: -self.limits.kept_validations]:
            del self.state.validations[name]

    def _stage(self, group: Group, stage: GroupStage) -> None:
        self._index(group, -1)
        group.stage = stage
        self._index(group, +1)

    def _index(self, group: Group, sign: int) -> None:
        if group.stage in ("committed", "dropped"):
            return
        for member in group.members:
            self.episodes[member.stage] += sign
        if group.stage == "taken":
            self.taken_count += sign
            return
        groups = self.open if group.stage == "open" else self.ready
        if sign > 0:
            groups[group.index] = group
        else:
            del groups[group.index]

    def _push(self, group: Group, number: int) -> None:
        self.pending.push(self.environments[group.domain], (group.index, number))

    def _push_validation(self, validation: Validation, number: int) -> None:
        self.validation_pending.push(self.environments[validation.domains[number]], (validation.order, number))

    def _note_lease(self, lease: Lease, at: float, event: str, detail: str = "") -> None:
        if not lease.validation_id:
            note = Note(at, event, lease.member, self.state.version, lease.lease_id, lease.worker_id, detail)
            self.state.groups[lease.position].history.append(note)

    def _note(self, group: Group, at: float, event: str, detail: str = "") -> None:
        group.history.append(Note(at, event, -1, self.state.version, detail=detail))


def _count(counts: dict[Any, int], key: object) -> None:
    counts[key] = counts.get(key, 0) + 1


def _add(sums: Sums, reward: float, metrics: dict[str, float]) -> None:
    sums.scored += 1
    sums.reward += reward
    for name, value in metrics.items():
        sums.metrics[name] = sums.metrics.get(name, 0.0) + value
        sums.metric_counts[name] = sums.metric_counts.get(name, 0) + 1
