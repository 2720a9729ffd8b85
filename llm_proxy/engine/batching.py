"""Continuous batching: which tokens of which requests the next forward pass computes. Pure and synchronous.

A sequence is its prompt and what was generated. Its slot holds keys and values of a prefix of it, so what is left to
compute is always tokens[cached:]: one token when it decodes, the prompt when it begins, everything again after the
weights changed. A slot keeps its tokens when its request ends, and the session's next turn begins where they agree.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from llm_proxy.engine.requests import LENGTH, STOP, FinishReason, Request
from rollfarm.tokens import Ids

_NONE = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in progress."""

    request: Request
    tokens: Ids
    """Room for prompt and output; the first `length` are set."""

    length: int
    """Tokens so far."""

    slot: int = -1
    """Where its keys and values are; -1 while it waits."""

    cached: int = 0
    """Tokens whose keys and values are in the slot."""

    stale: bool = False
    """Whether its slot holds values of older weights, which no other request may use."""

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.length - self.cached


@dataclass(frozen=True, slots=True)
class Segment:
    """A share of one forward pass: `count` tokens of a sequence from `start` on."""

    sequence: Sequence
    start: int
    count: int

    samples: bool
    """Whether it reaches the sequence's end, so that its last logits are sampled."""


class Slots:
    """Who holds which row of the KV cache. Idle rows are given away in the order of their last use."""

    def __init__(self, row_count: int) -> None:
        self.row_count = row_count
        self._held: list[tuple[str, Ids]] = [("", _NONE)] * row_count
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(row_count))
        self._sessions: dict[str, int] = {}
        self.kept_token_count = 0
        """Tokens that idle rows keep for their sessions."""

    def acquire(self, session_id: str, prompt: Ids) -> tuple[int, int]:
        """A row for `prompt`, and how many of its tokens the row already holds: never the last one."""
        row = self._sessions.get(session_id, -1) if session_id else -1
        if row not in self._idle:
            row = next(iter(self._idle))
        held = self._held[row][1] if self._held[row][0] == session_id else _NONE
        self._drop(row)
        del self._idle[row]
        return row, _common_prefix(held, prompt[:-1])

    def release(self, row: int, session_id: str, tokens: Ids) -> None:
        """Give the row back; it keeps `tokens` for the session."""
        self._drop(row)
        keep = bool(session_id) and len(tokens) > 0
        if keep:
            older = self._sessions.get(session_id)
            if older is not None:
                self._drop(older)
                self._idle.move_to_end(older, last=False)
            self._sessions[session_id] = row
            self._held[row] = (session_id, tokens)
            self.kept_token_count += len(tokens)
        self._idle[row] = None
        self._idle.move_to_end(row, last=keep)

    def forget(self) -> None:
        """Drop what idle rows keep."""
        for row in self._idle:
            self._drop(row)

    def _drop(self, row: int) -> None:
        session_id, tokens = self._held[row]
        if session_id:
            del self._sessions[session_id]
        self.kept_token_count -= len(tokens)
        self._held[row] = ("", _NONE)


class Batching:
    """Every open request, and the plan of the next forward pass."""

    def __init__(self, *, slot_count: int, row_count: int, step_tokens: int) -> None:
        self.slot_count = min(slot_count, row_count)
        self.slots = Slots(row_count)
        self.admitting = True
        """False holds waiting requests back while running ones go on."""

        self._step_tokens = step_tokens
        self._waiting: deque[Sequence] = deque()
        self._open: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}

    @property
    def running_count(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Requests without one."""
        return len(self._open) - len(self._running)

    @property
    def cached_token_count(self) -> int:
        """Tokens whose keys and values are held, for running requests and for sessions."""
        return self.slots.kept_token_count + sum(sequence.cached for sequence in self._running.values())

    def running(self) -> list[Sequence]:
        """Requests with a slot, oldest first."""
        return list(self._running.values())

    def has_work(self) -> bool:
        """Whether `next_step` would compute anything."""
        return bool(self._running) or (self.admitting and self.waiting_count > 0)

    def add(self, request: Request) -> Sequence:
        """Queue a request."""
        size = len(request.prompt)
        tokens = np.empty(size + request.max_tokens, dtype=np.int32)
        tokens[:size] = request.prompt
        sequence = Sequence(request, tokens, size)
        self._open[request.key] = sequence
        self._waiting.append(sequence)
        return sequence

    def remove(self, key: str) -> Sequence | None:
        """Take a request out, whatever it is doing; None when there is none."""
        sequence = self._open.pop(key, None)
        if sequence is None:
            return None
        if self._running.pop(key, None) is not None:
            kept = 0 if sequence.stale else sequence.cached
            self.slots.release(sequence.slot, sequence.request.session_id, sequence.tokens[:kept].copy())
        return sequence

    def next_step(self) -> list[Segment]:
        """What to compute next: every decoding request's token, then prompts while the step has room.

        A prompt that does not fit goes on in the next step.
        """
        self._admit()
        room = self._step_tokens
        decoding = [s for s in self._running.values() if s.pending == 1]
        prefilling = [s for s in self._running.values() if s.pending > 1]
        segments = [Segment(s, s.cached, 1, True) for s in decoding]
        room -= len(segments)
        for sequence in prefilling:
            count = min(sequence.pending, room)
            if count <= 0:
                break
            segments.append(Segment(sequence, sequence.cached, count, count == sequence.pending))
            room -= count
        return segments

    def computed(self, segments: Iterable[Segment]) -> None:
        """Note that the slots now hold the segments' keys and values."""
        for segment in segments:
            segment.sequence.cached = segment.start + segment.count

    def append(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Add a sampled token. The reason to stop, if there is one: the request is then gone."""
        sequence.tokens[sequence.length] = token
        sequence.length += 1
        reason = None
        if token in sequence.request.stop_token_ids:
            reason = STOP
        elif sequence.length == len(sequence.tokens):
            reason = LENGTH
        if reason is not None:
            self.remove(sequence.request.key)
        return reason

    def recompute(self) -> None:
        """Forget all keys and values, also those of running requests: the weights changed."""
        self.slots.forget()
        for sequence in self._running.values():
            sequence.cached = 0
            sequence.stale = False

    def keep_running(self) -> None:
        """Forget what idle slots keep; running requests go on with what they have: the weights changed."""
        self.slots.forget()
        for sequence in self._running.values():
            sequence.stale = True

    def _admit(self) -> None:
        while self.admitting and self._waiting and len(self._running) < self.slot_count:
            sequence = self._waiting.popleft()
            key = sequence.request.key
            if self._open.get(key) is not sequence:
                continue
            sequence.slot, sequence.cached = self.slots.acquire(sequence.request.session_id, sequence.request.prompt)
            self._running[key] = sequence


def _common_prefix(left: Ids, right: Ids) -> int:
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size
