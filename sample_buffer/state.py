"""What a ledger remembers of a run: plain data, so that a snapshot is these classes as JSON.

Invariants: group k is in `groups` from its admission until it leaves retention; credits in use are the open and ready
groups plus `charged`; a member is on at most one lease, and `leases` holds exactly the leases of members in "leased".
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter, with_config

MemberStage = Literal["pending", "leased", "done", "failed", "cancelled"]
GroupStage = Literal["open", "ready", "taken", "committed", "dropped"]
Ending = Literal["completed", "failed", "expired", "surplus", "stale"]

HANDED_IN: tuple[Ending, ...] = ("completed", "failed")
"""How a lease ends by its worker's own word."""

STALE = "stale"
FAILED = "failed"
REDUNDANT = "redundant"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a run remembers. Part of the state: a replay must forget what was forgotten."""

    retained_trajectories: int = 0
    """Trajectories of committed and dropped groups that stay readable."""

    remembered_requests: int = 0
    """Answers, and endings of leases, kept for callers that ask again."""

    kept_validations: int = 16
    """Rounds of validation whose results stay readable."""


IDLE = Limits(retained_trajectories=0, remembered_requests=100, kept_validations=1)
"""The bounds of a run while another is the current one: it keeps its counts, and what it needs to go on."""


class Lease(NamedTuple):
    """An episode on loan."""

    lease_id: str
    worker_id: str
    at: float
    validation_id: str
    """Empty for a training episode."""
    position: int
    """The group's k, or the episode's position in the validation."""
    member: int
    attempt: int
    version: int
    """The newest version at the time."""
    domain: int
    """Position in the spec's domains."""
    task_index: int
    """Position of the task in its domain."""


class Note(NamedTuple):
    """One line of a group's history."""

    at: float
    event: str
    member: int
    """-1: the whole group."""
    version: int
    lease_id: str = ""
    worker_id: str = ""
    detail: str = ""


@dataclass(slots=True)
class Member:
    """One episode of a group or of a validation."""

    stage: MemberStage = "pending"
    attempts: int = 0
    """Leases so far."""
    failures: int = 0
    """Leases that ended in failure or silence; max_attempts ends the member."""
    lease_id: str = ""
    """The lease it is on, or was completed under: names its payload."""
    trajectory_id: str = ""
    outcome: int = 0
    reward: float = 0.0
    oldest_version: int = 0
    token_count: int = 0


@dataclass(slots=True)
class Group:
    """Siblings of one task."""

    index: int
    domain: int
    """Position in the spec's domains."""
    task_index: int
    members: list[Member]
    stage: GroupStage = "open"
    step: int = -1
    """The step that took it; -1 before."""
    history: list[Note] = field(default_factory=list[Note])

    def done(self) -> list[Member]:
        """Members that count, in member order."""
        return [member for member in self.members if member.stage == "done"]

    def oldest_version(self) -> int:
        """The oldest version that sampled any token of it. The group has a member that is done."""
        return min(member.oldest_version for member in self.done())


@dataclass(slots=True)
class Batch:
    """Groups taken for one step and not yet committed."""

    step: int
    batch_id: str
    version: int
    """The newest version at the take."""
    groups: list[int]


@dataclass(slots=True)
class Sums:
    """Running totals of one domain of a validation."""

    scored: int = 0
    failed: int = 0
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    metric_counts: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class Validation:
    """One round of validation episodes."""

    order: int
    """Rounds before it."""
    episodes: list[Member]
    domains: list[int]
    """[episode] its domain."""
    task_indexes: list[int]
    """[episode] its task's position in the domain."""
    sums: dict[int, Sums]
    """By domain."""

    @property
    def finished(self) -> bool:
        return sum(sums.scored + sums.failed for sums in self.sums.values()) == len(self.episodes)


@with_config(ConfigDict(ser_json_inf_nan="constants"))
@dataclass(slots=True)
class RunState:
    """Everything about one run that a restart must not lose."""

    run_id: str
    nonce: str
    spec: str
    balances: list[int]
    """Of the domains' interleaving."""
    domain_counts: list[int]
    """Groups ever admitted, by domain."""
    trainer_id: str = ""
    """The trainer that configured the run last. Batches are on loan to it alone."""
    next_group: int = 0
    version: int = 0
    next_commit_step: int = 0
    next_batch_step: int = 0
    trained_steps: int = 0
    """Steps whose credits a publication has freed; never falls."""
    lease_count: int = 0
    groups: dict[int, Group] = field(default_factory=dict[int, Group])
    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])
    ended: OrderedDict[str, Ending] = field(default_factory=OrderedDict[str, Ending])
    """How leases ended, the latest ones."""
    batches: dict[int, Batch] = field(default_factory=dict[int, Batch])
    """By step, uncommitted."""
    charged: dict[int, int] = field(default_factory=dict[int, int])
    """Credits of taken groups by step, until a version trained on the step is published."""
    retired: deque[int] = field(default_factory=deque[int])
    """Committed and dropped groups that are retained, oldest first."""
    retired_trajectories: int = 0
    finished: OrderedDict[str, tuple[int, int, int]] = field(default_factory=OrderedDict[str, tuple[int, int, int]])
    """trajectory_id -> (sequence number, group, member) of every retained trajectory, oldest first."""
    finished_count: int = 0
    validations: OrderedDict[str, Validation] = field(default_factory=OrderedDict[str, Validation])
    validation_count: int = 0
    answers: OrderedDict[str, int | list[Lease]] = field(default_factory=OrderedDict[str, int | list[Lease]])
    """"METHOD/request_id" -> the first answer."""

    pools: dict[str, int] = field(default_factory=dict[str, int])
    """Complete groups that the filter "pools" saw, by pool."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    dropped_lengths: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    """Finished trajectories lost with their group, by reason, then by `lengths.rounded` policy tokens."""
    accepted_lengths: dict[int, int] = field(default_factory=dict[int, int])
    """Accepted trajectories, those lost later included, by `lengths.rounded` policy tokens."""
    outcomes: dict[int, int] = field(default_factory=dict[int, int])
    staleness: dict[int, int] = field(default_factory=dict[int, int])
    expired_leases: int = 0
    last_batch_mean_reward: float | None = None
    committed_trajectories: int = 0
    policy_tokens: int = 0
    last_failure: str = ""
    """Why the newest failed episode failed."""


@dataclass(slots=True)
class Snapshot:
    """Every run of a journal."""

    limits: Limits
    current: str
    runs: dict[str, RunState]


SNAPSHOT: TypeAdapter[Snapshot] = TypeAdapter(Snapshot)
"""Snapshots as JSON, both ways."""
