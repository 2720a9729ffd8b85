"""What the auditor saw of a run: at the client's end, at the trainer's, and between llm_proxy and each engine.

Times are the auditor's, monotonic seconds. Nothing here is llm_proxy's own account of what it did.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollfarm.service import Changed


@dataclass(frozen=True, slots=True)
class Asked:
    """A request was handed in."""

    at: float
    prompt_count: int
    """Tokens of the prompt."""
    max_tokens: int
    """What the answer has, exactly: no simulated token stops it."""
    min_version: int | None = None
    exact_version: int | None = None

    @property
    def least_version(self) -> int:
        """The oldest version that may serve it."""
        return self.min_version or self.exact_version or 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A result arrived."""

    at: float
    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[tuple[int, int]]
    """(policy version, tokens), as claimed."""
    is_whole: bool
    """It ended because its length was reached."""
    refusal: str = ""
    """The reason, where the request was refused."""
    resumptions: int = 0


@dataclass(slots=True)
class Update:
    """The trainer published a version."""

    version: int
    began: float
    committed_at: float | None = None
    """When llm_proxy said that the version is served; None if it never did."""


@dataclass(slots=True)
class Attempt:
    """A request was given to an engine."""

    request_id: str
    engine: int
    given_at: float
    ended_at: float | None = None
    """When the engine was done with it or its stream broke."""
    tokens: int = 0
    oldest_version: int | None = None
    """Of the tokens that the engine made for it, as the engine claims."""


@dataclass(frozen=True, slots=True)
class Progress:
    """An engine made tokens."""

    at: float
    attempt: Attempt


@dataclass
class Evidence:
    """Everything, in the order in which it was seen."""

    asked: dict[str, Asked] = field(default_factory=dict[str, Asked])
    answers: list[Answer] = field(default_factory=list[Answer])
    updates: list[Update] = field(default_factory=list[Update])
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    progress: list[Progress] = field(default_factory=list[Progress])
    changed: Changed = field(default_factory=Changed)
    """Notified when anything is added."""

    @property
    def committed_version(self) -> int:
        """The newest version that llm_proxy said is served."""
        return max((update.version for update in self.updates if update.committed_at is not None), default=0)

    def progress_after(self, at: float) -> Sequence[Progress]:
        """What was seen later than `at`."""
        return self.progress[bisect_right(self.progress, at, key=lambda progress: progress.at) :]
