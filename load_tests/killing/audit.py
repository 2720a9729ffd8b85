"""Holds what was acknowledged against what became of it: pure functions from evidence to findings.

Nothing here believes the ledger where the wire can be asked. The ledger's own word counts in two places alone: why a
group was dropped, checked against the rewards and versions that passed the tap, and what is left of it in the end.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from load_tests.killing.evidence import Delivery, Drop, Evidence, Publication, Remains, Sample

Kind = Literal["lost", "duplicated", "stale", "credits_leaked"]
KINDS: tuple[Kind, ...] = ("lost", "duplicated", "stale", "credits_leaked")

CLOCK_SECONDS = 0.02
"""How far the ledger's clock may be from the auditor's, on the same machine."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the run promises."""

    alpha: float
    batch_groups: int
    group_size: int

    @property
    def capacity(self) -> int:
        """Groups that may be outstanding."""
        return math.floor((1 + self.alpha) * self.batch_groups)

    @property
    def bound(self) -> int:
        """Versions that a sample may lag."""
        return math.ceil(self.alpha)


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise."""

    kind: Kind
    count: int
    """How many samples, groups, steps or credits."""
    what: str


def audit(evidence: Evidence, remains: Remains, rules: Rules) -> list[Finding]:
    """Every broken promise of a run."""
    auditor = _Auditor(evidence, remains, rules)
    checks = (
        auditor.lost_samples(),
        auditor.false_drops(),
        auditor.lost_groups(),
        auditor.changed_batches(),
        auditor.forgotten_acknowledgements(),
        auditor.lost_and_repeated_steps(),
        auditor.repeated_samples(),
        auditor.rebuilt_batches(),
        auditor.stale_samples(),
        auditor.credits_over_capacity(),
        auditor.credits_in_the_end(),
    )
    return [finding for check in checks for finding in check]


def totals(findings: list[Finding]) -> dict[Kind, int]:
    """The sum of each kind."""
    return {kind: sum(finding.count for finding in findings if finding.kind == kind) for kind in KINDS}


def by_group(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """The samples by their group's k."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.index, []).append(sample)
    return groups


class _Auditor:
    """What several checks share."""

    def __init__(self, evidence: Evidence, remains: Remains, rules: Rules) -> None:
        self.evidence = evidence
        self.remains = remains
        self.rules = rules

    @cached_property
    def batches(self) -> dict[int, Delivery]:
        """The first delivery of each step."""
        first: dict[int, Delivery] = {}
        for delivery in self.evidence.deliveries:
            first.setdefault(delivery.step, delivery)
        return first

    @cached_property
    def accepted(self) -> dict[str, Sample]:
        return {accepted.sample.trajectory_id: accepted.sample for accepted in self.evidence.accepted}

    @cached_property
    def delivered(self) -> dict[str, Sample]:
        return {sample.trajectory_id: sample for batch in self.batches.values() for sample in batch.samples}

    @cached_property
    def dropped_groups(self) -> dict[int, Drop]:
        """By k, those of which any sample was accepted."""
        drops = self.evidence.drops
        return {sample.index: drops[name] for name, sample in self.accepted.items() if name in drops}

    # Lost.

    def lost_samples(self) -> Iterator[Finding]:
        """An accepted sample is in a batch, dropped, or still there; and it is what it was when it was handed in."""
        groups = {index for batch in self.batches.values() for index in batch.groups}
        for name, sample in self.accepted.items():
            trained = self.delivered.get(name)
            where = f"sample {name} of group {sample.index}"
            if trained is not None and trained.digest != sample.digest:
                yield Finding("lost", 1, f"{where} was delivered with another content than was handed in")
            elif trained is None and name in self.remains.unknown:
                yield Finding("lost", 1, f"{where} was accepted, and the ledger does not know it")
            elif trained is None and name not in self.evidence.drops and sample.index in groups:
                yield Finding("lost", 1, f"{where} was accepted, and its group was delivered without it")

    def false_drops(self) -> Iterator[Finding]:
        """A dropped group has a reason, and the reason is true."""
        accepted = by_group(self.accepted.values())
        handed_in = by_group(self.evidence.handed_in.values())
        for index, drop in self.dropped_groups.items():
            if not self._is_true(drop, accepted[index], handed_in[index]):
                detail = f"group {index} was dropped as {drop.reason!r}, which its samples do not bear out"
                yield Finding("lost", len(accepted[index]), detail)

    def _is_true(self, drop: Drop, accepted: list[Sample], handed_in: list[Sample]) -> bool:
        reason = drop.reason.partition(":")[0]
        if reason == "zero_variance":
            return len({sample.reward for sample in accepted}) == 1
        if reason == "stale":
            end = drop.at + CLOCK_SECONDS
            newest = max((each.version for each in self.evidence.publications if each.began < end), default=0)
            return newest - min(sample.oldest_version for sample in handed_in) > self.rules.bound
        return bool(reason)

    def lost_groups(self) -> Iterator[Finding]:
        """Groups 0, 1, 2, ... are all trained on, dropped or outstanding; and a batch is whole."""
        remains, rules = self.remains, self.rules
        seen = max((index for leased in self.evidence.leased for index in leased.leases.values()), default=-1)
        if seen >= remains.next_group_index:
            vanished = seen + 1 - remains.next_group_index
            yield Finding("lost", vanished, f"group {seen} was leased, and the ledger knows {remains.next_group_index}")
        committed = sum(len(batch.groups) for step, batch in self.batches.items() if step < remains.next_commit_step)
        known = committed + remains.dropped + remains.outstanding
        if known != remains.next_group_index:
            counts = f"{committed} committed, {remains.dropped} dropped, {remains.outstanding} outstanding"
            detail = f"{remains.next_group_index} groups were admitted; {counts}"
            yield Finding("lost", abs(remains.next_group_index - known), detail)
        for step, batch in self.batches.items():
            missing = rules.batch_groups * rules.group_size - len(batch.samples)
            if missing > 0 or len(batch.groups) < rules.batch_groups:
                yield Finding("lost", max(1, missing), f"the batch of step {step} lacks {missing} samples")

    def changed_batches(self) -> Iterator[Finding]:
        """A batch that is delivered again is the same, byte for byte."""
        for again in self.evidence.deliveries:
            now = {sample.trajectory_id: sample.digest for sample in again.samples}
            before = self.batches[again.step].samples
            lost = [sample for sample in before if now.get(sample.trajectory_id) != sample.digest]
            if lost:
                yield Finding("lost", len(lost), f"step {again.step} was delivered again without {len(lost)} samples")

    def forgotten_acknowledgements(self) -> Iterator[Finding]:
        """What was committed, published and lent stays so."""
        committed = self.evidence.committed()
        if self.remains.next_commit_step < committed:
            forgotten = committed - self.remains.next_commit_step
            yield Finding("lost", forgotten, f"step {committed - 1} was committed; {forgotten} steps are no more")
        acknowledged = {each.request_id: each.version for each in self.evidence.publications if each.at is not None}
        published = list(acknowledged.values())
        if repeated := len(published) - len(set(published)):
            yield Finding("lost", repeated, "a version was published twice: the clock went back")
        if published and self.remains.policy_version < max(published):
            forgotten = max(published) - self.remains.policy_version
            yield Finding("lost", forgotten, f"version {max(published)} was published and is no more")
        asked: dict[str, str] = {}
        for leased in self.evidence.leased:
            again = [
                lease for lease in leased.leases if asked.setdefault(lease, leased.request_id) != leased.request_id
            ]
            for lease in again:
                yield Finding("lost", 1, f"lease {lease} was given out anew: the first loan was forgotten")

    def lost_and_repeated_steps(self) -> Iterator[Finding]:
        """The trainer tells of each committed step once."""
        told = Counter(self.remains.steps)
        for step in range(self.remains.next_commit_step):
            if told[step] == 0:
                yield Finding("lost", 1, f"the trainer does not tell of step {step}")
            elif told[step] > 1:
                yield Finding("duplicated", 1, f"the trainer tells of step {step} {told[step]} times")

    # Duplicated.

    def repeated_samples(self) -> Iterator[Finding]:
        """A sample and a group are in one step alone, and a member is in its group once."""
        steps_of_samples: dict[str, set[int]] = {}
        steps_of_groups: dict[int, set[int]] = {}
        for delivery in self.evidence.deliveries:
            for index, group in delivery.groups.items():
                steps_of_groups.setdefault(index, set()).add(delivery.step)
                yield from self._repeated_members(delivery.step, index, group)
            for sample in delivery.samples:
                steps_of_samples.setdefault(sample.trajectory_id, set()).add(delivery.step)
        for what, places in (("sample", steps_of_samples), ("group", steps_of_groups)):
            for name, steps in places.items():
                if len(steps) > 1:
                    yield Finding("duplicated", len(steps) - 1, f"{what} {name} is in the steps {sorted(steps)}")

    def _repeated_members(self, step: int, index: int, group: tuple[Sample, ...]) -> Iterator[Finding]:
        members = Counter(sample.member for sample in group)
        if repeated := sum(count - 1 for count in members.values()):
            yield Finding("duplicated", repeated, f"group {index} in step {step} has a member more than once")
        if strangers := sum(sample.index != index for sample in group):
            yield Finding("duplicated", strangers, f"group {index} in step {step} has samples of another group")

    def rebuilt_batches(self) -> Iterator[Finding]:
        """A step has one batch, and a committed one is never delivered again."""
        for again in self.evidence.deliveries:
            first = self.batches[again.step]
            if again.batch_id != first.batch_id or set(again.groups) != set(first.groups):
                yield Finding("duplicated", 1, f"step {again.step} was delivered with two different batches")
            acknowledged = [commit.at for commit in self.evidence.commits if commit.step >= again.step]
            if acknowledged and min(acknowledged) < again.began:
                yield Finding("duplicated", 1, f"step {again.step} was delivered again after its commit")
        for step in sorted({again.step for again in self.evidence.recommitted}):
            yield Finding("duplicated", 1, f"step {step} was delivered again to whoever asked after its commit")

    # Stale.

    def stale_samples(self) -> Iterator[Finding]:
        """No sample lags more than alpha allows, by its own tokens and the versions that were acknowledged."""
        for step, batch in self.batches.items():
            newest = batch.policy_version
            if not batch.redelivered:  # else it may have been taken long before it was seen
                newest = max([newest, *self._published_before(batch.began)])
            for sample in batch.samples:
                lag = newest - sample.oldest_version
                if lag > self.rules.bound:
                    yield Finding("stale", 1, f"sample {sample.trajectory_id} of step {step} lagged {lag} versions")

    def _published_before(self, at: float) -> Iterator[int]:
        return (each.version for each in self.evidence.publications if each.at is not None and each.at < at)

    # Credits.

    def credits_over_capacity(self) -> Iterator[Finding]:
        """At no time were more groups outstanding than alpha allows, counted from what was leased and published."""
        freed = self._freed()
        # A group whose end nobody saw was dropped with no sample, nobody knows when.
        spans = [(at, freed[index]) for index, at in self._admitted().items() if index in freed]
        changes = sorted([*((begin, 1) for begin, _ in spans), *((end, -1) for _, end in spans)])
        outstanding = most = 0
        for _, change in changes:
            outstanding += change
            most = max(most, outstanding)
        if most > self.rules.capacity:
            detail = f"{most} groups were outstanding at once, and {self.rules.capacity} credits are all there are"
            yield Finding("credits_leaked", most - self.rules.capacity, detail)

    def _admitted(self) -> dict[int, float]:
        """When each group was first leased, by k."""
        first: dict[int, float] = {}
        for leased in self.evidence.leased:
            for index in leased.leases.values():
                first[index] = min(first.get(index, math.inf), leased.at)
        return first

    def _freed(self) -> dict[int, float]:
        """The earliest moment at which each group's credit may have been free again, by k."""
        freed = {index: math.inf for batch in self.batches.values() for index in batch.groups}
        trained = 0
        for publication in self.evidence.publications:
            for step in range(trained, publication.trained_step_count):
                freed |= dict.fromkeys(self.batches[step].groups if step in self.batches else (), publication.began)
            trained = max(trained, publication.trained_step_count)
        dropped = {index: drop.at - CLOCK_SECONDS for index, drop in self.dropped_groups.items()}
        return freed | dropped

    def credits_in_the_end(self) -> Iterator[Finding]:
        """Credits in use are the groups that are neither dropped nor trained on; a finished run uses none."""
        acknowledged = [each for each in self.evidence.publications if each.at is not None]
        counts = {self._in_use(publications) for publications in (acknowledged, self.evidence.publications)}
        if self.remains.credits_in_use not in counts:
            off = min(abs(self.remains.credits_in_use - count) for count in counts)
            detail = f"{self.remains.credits_in_use} credits are in use, and by count it is {sorted(counts)}"
            yield Finding("credits_leaked", off, detail)
        elif self.remains.finished and self.remains.credits_in_use:
            detail = f"{self.remains.credits_in_use} credits are in use, and the run is finished"
            yield Finding("credits_leaked", self.remains.credits_in_use, detail)

    def _in_use(self, publications: list[Publication]) -> int:
        trained = max((each.trained_step_count for each in publications), default=0)
        published = sum(len(batch.groups) for step, batch in self.batches.items() if step < trained)
        return self.remains.next_group_index - self.remains.dropped - published
