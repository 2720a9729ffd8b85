"""Feeds a tracker from a thread of its own, so that one that fails or hangs never stops training.

A feed remembers in RUN/trackers/NAME.json how far the tracker was told. What lies before that is never told again, so
the steps that a crash repeats appear once; what lies behind it and was measured before is told when the feed starts.
Steps only go up, as some trackers want them: what was refused or dropped before one that was taken is never told.
"""

import json
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import prometheus_client
import structlog

from trainer.sample_table import Sample
from trainer.trackers.tracker import TrackedRun, Tracker

log = structlog.get_logger()

CAPACITY = 1000
"""Entries that wait for a slow tracker; more are dropped. One has a few kB, with samples some tens."""

CLOSE_SECONDS = 10.0
"""How long trackers may send what is left when the trainer ends."""

LOST = prometheus_client.Counter(
    "rollfarm_trainer_tracker_lost_count", "Entries that a tracker was not told, or did not take.", ["tracker"]
)


class Kind(IntEnum):
    """What happens at one number of steps, in order."""

    STEP = 0
    SAMPLES = 1
    VALIDATION = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing to tell."""

    step: int
    """Steps done."""

    kind: Kind
    """What."""

    time: float
    """Seconds since 1970."""

    metrics: Mapping[str, float]
    """Empty of samples."""

    samples: Sequence[Sample] = ()

    @property
    def position(self) -> tuple[int, int]:
        """Grows over a run."""
        return self.step, self.kind


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a tracker was told."""

    tracking_id: str
    """The tracker's id of the run."""

    step: int = 0
    kind: int = -1

    @property
    def position(self) -> tuple[int, int]:
        """The last entry's; before the first of all, one that no entry has."""
        return self.step, self.kind


class Feed:
    """One tracker, its thread and its mark. `start` once, `offer` often, `end` and `close` once; only `close` waits."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        *,
        run: str,
        folder: Path,
        config: Mapping[str, Any],
        capacity: int = CAPACITY,
    ) -> None:
        """`folder` is the run's."""
        self.name = name
        self.lost = 0
        """Entries that the tracker was not told, or did not take."""
        self._tracker = tracker
        self._run = run
        self._folder = folder
        self._config = config
        self._file = folder / "trackers" / f"{name}.json"
        self._queue: queue.Queue[Entry | None] = queue.Queue(capacity)
        self._counting = threading.Lock()
        self._is_off = False
        self._is_hopeless = False
        """So far behind that nobody waits for it in the end."""
        self._thread: threading.Thread | None = None

    def start(self, history: Sequence[Entry]) -> None:
        """Begin. `history` is what was measured before, in order."""
        # A daemon: one that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._feed, args=(history,), name=f"tracker-{self.name}", daemon=True)
        self._thread.start()

    def offer(self, entry: Entry) -> None:
        """Tell the tracker when it has time. Dropped where it is off, or too far behind."""
        if self._is_off:
            self._lose(1)
            return
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._lose(1, cause=f"it is {self._queue.maxsize} entries behind")

    def end(self) -> None:
        """Nothing more will be offered."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._is_hopeless = True

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """After `end`, let it finish for as long as `seconds`."""
        if self._thread is None:
            return
        self._thread.join(0 if self._is_hopeless else seconds)
        if self._thread.is_alive():
            self._lose(max(1, self._drain()), cause=f"it was not done within {seconds:g} s")

    def _feed(self, history: Sequence[Entry]) -> None:
        mark = self._read_mark()
        run = TrackedRun(self._run, mark.tracking_id, self._folder, mark.step)
        if not self._attempt("begin", lambda: self._tracker.begin(run, self._config)):
            self._is_off = True
            log.warning("tracker is off until the trainer starts again", tracker=self.name)
            self._lose(self._drain())
            return
        for entry in history:
            mark = self._tell(entry, mark)
        while (entry := self._queue.get()) is not None:
            mark = self._tell(entry, mark)
        self._attempt("close", self._tracker.close)

    def _tell(self, entry: Entry, mark: Mark) -> Mark:
        """Tell it unless it was told before; how far the tracker knows."""
        if entry.position <= mark.position:
            return mark
        if entry.samples:
            told = self._attempt("table", lambda: self._tracker.table(entry.step, entry.samples, entry.time))
        else:
            told = self._attempt("log", lambda: self._tracker.log(entry.step, entry.metrics, entry.time))
        if not told:
            self._lose(1)
            return mark
        mark = Mark(mark.tracking_id, entry.step, int(entry.kind))
        self._attempt("remember", lambda: self._write_mark(mark))
        return mark

    def _attempt(self, what: str, work: Callable[[], None]) -> bool:
        """Whether it could be done. Whatever a tracker's library raises is its own trouble."""
        try:
            work()
        except (Exception, SystemExit) as error:
            log.warning("tracker failed", tracker=self.name, at=what, cause=f"{type(error).__name__}: {error}")
            return False
        return True

    def _lose(self, count: int, *, cause: str = "") -> None:
        """Count, and say so at the first one and whenever twice as many were lost."""
        if not count:
            return
        with self._counting:
            before, self.lost = self.lost, self.lost + count
            LOST.labels(self.name).inc(count)
        if before.bit_length() != self.lost.bit_length():
            log.warning("tracker lost entries; metrics.jsonl has them", tracker=self.name, lost=self.lost, cause=cause)

    def _drain(self) -> int:
        """Empty the queue; how much was in it."""
        count = 0
        while True:
            try:
                count += self._queue.get_nowait() is not None
            except queue.Empty:
                return count

    def _read_mark(self) -> Mark:
        try:
            return Mark(**json.loads(self._file.read_text()))
        except (OSError, ValueError, TypeError):
            fresh = Mark(f"{self._run}-{uuid.uuid4().hex[:8]}")
            self._attempt("remember", lambda: self._write_mark(fresh))
            return fresh

    def _write_mark(self, mark: Mark) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(mark)))
        partial.replace(self._file)
