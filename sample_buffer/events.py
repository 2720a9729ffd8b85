"""Every transition of a run, as data: the state of a ledger is the fold of its events.

An event holds decisions, never recomputes them, so replaying it needs neither a clock nor the trajectory. Encoded as a
JSON array of its name and fields; payloads (trajectories) lie beside the events and are never inside.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import orjson


class RunConfigured(NamedTuple):
    """A run was created, or found again by another trainer or with another step count; it is the current one now."""

    at: float
    run_id: str
    request_id: str
    nonce: str
    """Minted when the run is created; keeps ids of an earlier run of the same name apart."""
    spec: str
    """RunSpec, base64."""
    trainer_id: str = ""


class LimitsChanged(NamedTuple):
    """The settings bound what is remembered differently from here on."""

    at: float
    retained_trajectories: int
    remembered_requests: int


class Admitted(NamedTuple):
    """The next group took a credit."""

    at: float
    run_id: str
    group: int


class Leased(NamedTuple):
    """A worker took episodes."""

    at: float
    run_id: str
    request_id: str
    worker_id: str
    picks: Sequence[tuple[str, int, int]]
    """(validation_id, group or episode index, member)."""


class Completed(NamedTuple):
    """A worker handed in an episode, which was accepted or too old."""

    at: float
    run_id: str
    request_id: str
    lease_id: str
    disposition: int
    trajectory_id: str
    outcome: int
    reward: float
    oldest_version: int
    token_count: int
    metrics: dict[str, float]
    """Only of a validation episode."""


class Failed(NamedTuple):
    """A worker gave an episode back."""

    at: float
    run_id: str
    request_id: str
    lease_id: str
    outcome: int
    detail: str
    retried: bool


class Expired(NamedTuple):
    """A worker was silent for longer than its lease."""

    at: float
    run_id: str
    lease_id: str
    retried: bool


class Pooled(NamedTuple):
    """A complete group was found to be easy, normal or hard; it is ready or dropped next."""

    at: float
    run_id: str
    pool: str


class Ready(NamedTuple):
    """A group is complete; its other members are cancelled."""

    at: float
    run_id: str
    group: int


class Dropped(NamedTuple):
    """A group will not be trained on; its credit is free."""

    at: float
    run_id: str
    group: int
    reason: str
    detail: str


class Taken(NamedTuple):
    """The trainer took the batch of a step."""

    at: float
    run_id: str
    step: int
    indexes: Sequence[int]


class Published(NamedTuple):
    """The clock advanced."""

    at: float
    run_id: str
    request_id: str
    version: int
    trained_step_count: int
    stale_groups: Sequence[int]
    """Dropped with reason "stale"."""
    stale_leases: Sequence[str]
    """Ended; their episodes are leased again."""


class Committed(NamedTuple):
    """A checkpoint holds the step and every earlier one."""

    at: float
    run_id: str
    request_id: str
    step: int


class ValidationStarted(NamedTuple):
    """Validation episodes were asked for."""

    at: float
    run_id: str
    request_id: str
    validation_id: str
    episode_count: int


RunEvent = (
    Admitted
    | Leased
    | Completed
    | Failed
    | Expired
    | Pooled
    | Ready
    | Dropped
    | Taken
    | Published
    | Committed
    | ValidationStarted
)

Event = RunEvent | RunConfigured | LimitsChanged

_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__args__}


def encode(events: Iterable[Event]) -> bytes:
    """The events as one record of the journal."""
    return orjson.dumps([(type(event).__name__, *event) for event in events])


def decode(record: bytes) -> list[Event]:
    """The events of one record, in order."""
    return [_KINDS[name](*fields) for name, *fields in orjson.loads(record)]
