"""What passed between a farm and its sample_buffer: the auditor's own memory of a run, which no kill reaches.

Times are seconds since 1970, by the auditor's clock. What was acknowledged is what sample_buffer answered, whether or
not the caller lived to hear it.
"""

from dataclasses import dataclass, field

from rollfarm.service import Changed


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, as far as the audit needs it."""

    trajectory_id: str
    index: int
    """Its group's k."""
    member: int
    oldest_version: int
    """The oldest version that sampled a token of it, by its version spans."""
    reward: float
    digest: bytes
    """Of its serialised bytes."""


@dataclass(frozen=True, slots=True)
class Leased:
    """An env_manager was told to play episodes."""

    request_id: str
    at: float
    worker_id: str
    leases: dict[str, int]
    """lease_id -> its group's k."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A trajectory was acknowledged as accepted."""

    at: float
    lease_id: str
    sample: Sample


@dataclass(frozen=True, slots=True)
class Delivery:
    """A whole batch was sent to a trainer."""

    began: float
    """When the trainer asked."""
    at: float
    trainer_id: str
    step: int
    batch_id: str
    policy_version: int
    """The newest version when the batch was first taken, by sample_buffer's account."""
    redelivered: bool
    groups: dict[int, tuple[Sample, ...]]
    """Samples by their group's k."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups.values() for sample in group]


@dataclass(slots=True)
class Publication:
    """The trainer asked to advance the clock."""

    request_id: str
    began: float
    version: int
    trained_step_count: int
    at: float | None = None
    """When that was acknowledged; None if it never was."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A step was acknowledged as committed."""

    at: float
    step: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Why the ledger says that a trajectory will not be trained on."""

    at: float
    reason: str
    policy_version: int
    """The newest version at the time, by the ledger's account."""


@dataclass
class Evidence:
    """Everything seen, in order. `changed` wakes whoever waits for more."""

    workers: set[str] = field(default_factory=set[str])
    """Every env_manager that ever asked for episodes."""
    leased: list[Leased] = field(default_factory=list[Leased])
    handed_in: dict[str, Sample] = field(default_factory=dict[str, Sample])
    """By trajectory_id, whatever came of it."""
    accepted: list[Accepted] = field(default_factory=list[Accepted])
    deliveries: list[Delivery] = field(default_factory=list[Delivery])
    publications: list[Publication] = field(default_factory=list[Publication])
    commits: list[Commit] = field(default_factory=list[Commit])
    writes: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(asked, acknowledged) of every call that changed something."""
    recommitted: list[Delivery] = field(default_factory=list[Delivery])
    """Deliveries of a committed step, to the auditor, who asked for it in the trainer's name."""
    drops: dict[str, Drop] = field(default_factory=dict[str, Drop])
    """By trajectory_id."""
    changed: Changed = field(default_factory=Changed)

    def delivered(self) -> set[str]:
        """Ids of the trajectories in any batch."""
        return {sample.trajectory_id for delivery in self.deliveries for sample in delivery.samples}

    def committed(self) -> int:
        """The first step that is not acknowledged as committed."""
        return max((commit.step + 1 for commit in self.commits), default=0)


@dataclass(frozen=True, slots=True)
class Remains:
    """What a ledger says that was opened anew, when the farm was over, on what the farm left on disk."""

    policy_version: int
    next_commit_step: int
    next_group_index: int
    credits_in_use: int
    dropped: int
    """Groups."""
    outstanding: int
    """Groups that are open, ready, or taken and not committed."""
    unknown: frozenset[str]
    """Trajectories that were accepted, and neither delivered nor dropped, and that it does not know."""
    finished: bool
    """Whether the run was over."""
    steps: tuple[int, ...]
    """The steps that the trainer's metrics.jsonl tells of."""
