"""The rules of the ledger once more, said as plainly as they can be: lists, and every question answered by looking.

Slow and obvious on purpose. It knows no events, no indexes and no code of sample_buffer; tests ask it and the ledger
the same, and compare.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from statistics import fmean

from rollfarm.v1.sample_buffer_pb2 import RunSpec


class Refused(Exception):
    """A command that changes nothing; it says the name of the ledger's error."""


@dataclass
class Episode:
    validation: str
    index: int
    """The group's, or the episode's position in the validation."""
    member: int
    domain: int
    task: int
    state: str = "pending"
    attempts: int = 0
    failures: int = 0
    lease: str = ""
    worker: str = ""
    leased_at: int = 0
    """Version."""
    end: float = 0.0
    trajectory: str = ""
    finish: int = 0
    """Position among all that finished."""
    reward: float = 0.0
    tokens: int = 0
    oldest: int = 0


class Model:
    """One run."""

    def __init__(self, spec: RunSpec, retained: int, lease_seconds: float) -> None:
        self.spec, self.retained, self.lease_seconds = spec, retained, lease_seconds
        self.bound = ceil(spec.alpha)
        self.episodes: list[Episode] = []
        self.groups: list[str] = []
        """State of each group ever admitted."""
        self.moved: list[float] = []
        """When something happened to it last, while it is open."""
        self.now = 0.0
        self.batches: list[list[int]] = []
        """Groups of each step ever taken."""
        self.version = self.trained = self.committed = self.lease_count = self.finish_count = 0
        self.ended: dict[str, str] = {}
        self.retired: list[int] = []
        """Groups that were committed or dropped, in that order, while they are retained."""
        self.validations: dict[str, int] = {}
        self.dropped: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.pools: Counter[str] = Counter()

    # Questions.

    def of(self, index: int, *states: str) -> list[Episode]:
        """Members of a group that are in one of the states."""
        return [e for e in self.episodes if not e.validation and e.index == index and e.state in states]

    def in_state(self, *states: str) -> list[int]:
        return [index for index, state in enumerate(self.groups) if state in states]

    def out(self) -> list[Episode]:
        """Episodes on loan, in order of their leases."""
        return sorted((e for e in self.episodes if e.state == "leased"), key=lambda e: int(e.lease.split("-")[1]))

    def charged(self) -> int:
        return (len(self.batches) - self.trained) * self.spec.batch_groups

    def credits_in_use(self) -> int:
        return len(self.in_state("open", "ready")) + self.charged()

    def free(self) -> int:
        free = floor((1 + Fraction(self.spec.alpha)) * self.spec.batch_groups) - self.charged()
        if self.spec.step_count:
            free = min(free, (self.spec.step_count - len(self.batches)) * self.spec.batch_groups)
        return free

    def room(self) -> int:
        """Groups that may be admitted; less than 0 where too many are open or ready."""
        wanted = self.free() + self.spec.redundant_groups if self.free() > 0 else 0
        return wanted - len(self.in_state("open", "ready"))

    def admissible(self) -> int:
        return max(0, self.room())

    def readable(self) -> list[str]:
        """Trajectories that are still retained, oldest first."""
        alive = [*self.in_state("open", "ready", "taken"), *self.retired]
        finished = [e for index in alive for e in self.of(index, "done")]
        return [e.trajectory for e in sorted(finished, key=lambda e: e.finish)]

    # Episodes.

    def lease(self, worker: str, most: int, worlds: list[str], excluded: list[str]) -> list[Episode]:
        leased: list[Episode] = []
        while len(leased) < most:
            known = [e for e in self.episodes if not worlds or self._world(e) in worlds]
            pending = [e for e in known if e.state == "pending" and self._world(e) not in excluded]
            if pending:
                leased.append(min(pending, key=lambda e: not e.validation))
                self._lend(leased[-1], worker, self.now)
            elif self.admissible():
                self._admit()
            elif neglected := self._neglected(excluded):
                self._drop(neglected[0], "failed")
            else:
                break
        return leased

    def _world(self, e: Episode) -> str:
        return self.spec.domains[e.domain].environment

    def _neglected(self, excluded: list[str]) -> list[int]:
        if self.room() < 0 or all(domain.environment in excluded for domain in self.spec.domains):
            return []
        return [
            index
            for index in self.in_state("open")
            if self.moved[index] + self.lease_seconds <= self.now
            and not self.of(index, "leased")
            and self._world(self.of(index, "pending", "done", "failed")[0]) in excluded
        ]

    def _move(self, e: Episode) -> None:
        if not e.validation:
            self.moved[e.index] = self.now

    def _lend(self, e: Episode, worker: str, now: float) -> None:
        e.state, e.attempts, e.lease, e.worker = "leased", e.attempts + 1, f"nonce-{self.lease_count}", worker
        e.leased_at, e.end = self.version, now + self.lease_seconds
        self.lease_count += 1
        self._move(e)

    def _admit(self) -> None:
        index = len(self.groups)
        domains = smooth([domain.weight for domain in self.spec.domains], index + 1)
        self.groups.append("open")
        self.moved.append(self.now)
        for member in range(self.spec.group_size + self.spec.redundant_members):
            self.episodes.append(Episode("", index, member, domains[-1], domains[:-1].count(domains[-1])))

    def heartbeat(self, worker: str, leases: list[str], now: float) -> list[tuple[str, bool]]:
        """Leases to stop playing, and whether it is because they are stale."""
        alive = {e.lease: e for e in self.out() if e.worker == worker}
        for lease in leases:
            if lease in alive:
                alive[lease].end = now + self.lease_seconds
        handed_in = {lease for lease in leases if self.ended.get(lease) in ("completed", "failed")}
        gone = [lease for lease in leases if lease not in alive and lease not in handed_in]
        return [(lease, self.ended.get(lease) == "stale") for lease in gone]

    def complete(self, lease: str, trajectory: str, reward: float, oldest: int, tokens: int) -> str:
        e = next((e for e in self.out() if e.lease == lease), None)
        if e is None:
            if self.ended.get(lease) in ("surplus", "stale"):
                return self.ended[lease]
            raise Refused("LeaseExpired")
        if trajectory in self.readable():
            raise Refused("InvalidTrajectory")
        self.ended[lease] = "completed"
        self._move(e)
        if not e.validation and self.version - oldest > self.bound:
            self.outcomes["OUTCOME_STALE"] += 1
            e.state = "pending"
            return "stale"
        self.outcomes["OUTCOME_OK"] += 1
        e.state, e.trajectory, e.reward, e.oldest, e.tokens = "done", trajectory, reward, oldest, tokens
        self.finish_count += 1
        e.finish = self.finish_count
        if not e.validation and len(self.of(e.index, "done")) == self.spec.group_size:
            reason = self._refused(self.of(e.index, "done"))
            if reason:
                self._drop(e.index, reason)
            else:
                self._cancel_rest(e.index, "surplus")
                self.groups[e.index] = "ready"
        return "accepted"

    def _refused(self, done: list[Episode]) -> str:
        rewards = [e.reward for e in done]
        for chosen in self.spec.filters:
            if not self._keeps(chosen.name, dict(chosen.settings), rewards, [e.tokens for e in done]):
                return chosen.name
        return ""

    def _keeps(self, name: str, settings: dict[str, float], rewards: list[float], lengths: list[int]) -> bool:
        if name == "zero_variance":
            return len(set(rewards)) > 1
        if name == "difficulty":
            return settings["min_mean"] <= fmean(rewards) <= settings["max_mean"]
        if name == "max_length":
            return not any(length > settings["tokens"] for length in lengths)
        if name == "all_failed":
            return any(reward > 0 for reward in rewards)
        assert name == "pools"
        pool = "hard" if fmean(rewards) < settings["hard_below"] else "normal"
        self.pools[pool] += 1
        share = settings["hard_share"] * min(1, len(self.batches) / settings["ramp_steps"])
        return pool == "normal" or floor(self.pools[pool] * share) != floor((self.pools[pool] - 1) * share)

    def fail(self, lease: str, *, counted: bool) -> bool:
        e = next((e for e in self.out() if e.lease == lease), None)
        if e is None:
            raise Refused("LeaseExpired")
        self.outcomes["OUTCOME_ENV_FAILED" if counted else "OUTCOME_CANCELLED"] += 1
        return self._fail(e, "failed", counted=counted)

    def _fail(self, e: Episode, ending: str, *, counted: bool) -> bool:
        self.ended[e.lease] = ending
        self._move(e)
        e.failures += counted
        e.state = "pending" if e.failures < self.spec.max_attempts else "failed"
        if not e.validation and len(self.of(e.index, "pending", "leased", "done")) < self.spec.group_size:
            self._drop(e.index, "failed")
        return e.state == "pending"

    def tick(self, now: float) -> int:
        late = [e for e in self.out() if e.end <= now]
        expired = 0
        for e in late:
            if e.state == "leased":
                self._fail(e, "expired", counted=True)
                expired += 1
        return expired

    def _cancel_rest(self, index: int, ending: str) -> None:
        for e in self.of(index, "leased", "pending"):
            if e.state == "leased":
                self.ended[e.lease] = ending
                self.outcomes["OUTCOME_CANCELLED"] += 1
            e.state = "cancelled"

    def _drop(self, index: int, reason: str) -> None:
        self._cancel_rest(index, "stale" if reason == "stale" else "surplus")
        self.dropped[reason] += 1
        self._retire(index, "dropped")

    def _retire(self, index: int, state: str) -> None:
        self.groups[index] = state
        self.retired.append(index)
        while sum(len(self.of(old, "done")) for old in self.retired) > self.retained:
            self.retired.pop(0)

    # Batches, the clock and validation.

    def take(self, step: int) -> tuple[list[int], bool] | None:
        if self.committed <= step < len(self.batches):
            return self.batches[step], True
        if step != len(self.batches) or (self.spec.step_count and step >= self.spec.step_count):
            raise Refused("StepOutOfOrder")
        ready = sorted((min(e.oldest for e in self.of(k, "done")), k) for k in self.in_state("ready"))
        batch = [index for _, index in ready][: self.spec.batch_groups]
        if len(batch) < self.spec.batch_groups or self.free() < self.spec.batch_groups:
            return None
        for index in batch:
            self.groups[index] = "taken"
            self.staleness.update(self.version - e.oldest for e in self.of(index, "done"))
        self.batches.append(batch)
        if self.bound == 0 or len(self.batches) == self.spec.step_count:
            for index in self.in_state("open", "ready"):
                self._drop(index, "redundant")
        return batch, False

    def commit(self, step: int) -> int:
        if not 0 <= step < len(self.batches):
            raise Refused("UnknownBatch")
        while self.committed <= step:
            for index in self.batches[self.committed]:
                self._retire(index, "committed")
            self.committed += 1
        return self.committed

    def publish(self, version: int, trained: int) -> int:
        if version != self.version + 1:
            raise Refused("VersionOutOfOrder")
        if not 0 <= trained <= len(self.batches):
            raise Refused("InvalidArgument")
        self.version, self.trained = version, max(self.trained, trained)
        oldest = version - self.bound
        stale = [k for k in self.in_state("open", "ready") if any(e.oldest < oldest for e in self.of(k, "done"))]
        for e in self.out():
            if not e.validation and e.leased_at < oldest and e.index not in stale:
                self.ended[e.lease], e.state = "stale", "pending"
                self.outcomes["OUTCOME_STALE"] += 1
                self._move(e)
        for index in stale:
            self._drop(index, "stale")
        return len(stale)

    def start_validation(self, name: str, count: int) -> None:
        if self.validations.setdefault(name, count) != count:
            raise Refused("InvalidArgument")
        if not any(e.validation == name for e in self.episodes):
            domains = smooth([domain.weight for domain in self.spec.domains], count)
            for index, domain in enumerate(domains):
                self.episodes.append(Episode(name, index, 0, domain, domains[:index].count(domain)))

    def restart(self, now: float) -> None:
        for e in self.out():
            e.end = now + self.lease_seconds

    def idle(self, remembered: int) -> None:
        """Another run is the current one for a moment."""
        self.retired.clear()
        self.ended = dict(list(self.ended.items())[-remembered:])


def smooth(weights: list[float], count: int) -> list[int]:
    """The first domains of the interleaving: each earns its weight, the richest is next and pays for all."""
    balances = [0.0 for _ in weights]
    chosen: list[int] = []
    for _ in range(count):
        balances = [balance + weight for balance, weight in zip(balances, weights, strict=True)]
        chosen.append(balances.index(max(balances)))
        balances[chosen[-1]] -= sum(weights)
    return chosen
