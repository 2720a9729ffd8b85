"""Where events become durable.

A record is what one append wrote: events, payloads and deletions together, or nothing of them. `append` returns once
they are durable; after it raised, nobody knows whether the record is there, and only `open` tells.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Record:
    """What one append makes durable."""

    events: bytes
    payloads: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    garbage: Sequence[str] = ()
    """Payloads to forget."""
    snapshot: bytes | None = None
    """The state after these events; earlier records are then forgotten."""


class Journal(Protocol):
    """An ordered log of records with binary values beside it. It has one writer."""

    async def open(self) -> bytes | None:
        """Become the writer, fencing off every earlier one, and answer the snapshot if there is one.

        Raises JournalUnavailable, or JournalFenced when another writer came after this one.
        """
        ...

    def records(self) -> AsyncIterator[bytes]:
        """The events of every record since the snapshot, in order."""
        ...

    async def payloads(self, ids: Sequence[str]) -> dict[str, bytes]:
        """Payloads by id; those that are not there are left out."""
        ...

    async def append(self, record: Record) -> None:
        """Make the record durable. Raises JournalUnavailable or JournalFenced."""
        ...

    async def close(self) -> None:
        """Give up what `open` took hold of."""
        ...


class MemoryJournal:
    """Forgets with the process. For unit tests and simulation; `open` reads back like any other journal."""

    def __init__(self) -> None:
        self._snapshot: bytes | None = None
        self._records: list[bytes] = []
        self._payloads: dict[str, bytes] = {}

    async def open(self) -> bytes | None:
        return self._snapshot

    async def records(self) -> AsyncIterator[bytes]:
        for record in list(self._records):
            yield record

    async def payloads(self, ids: Sequence[str]) -> dict[str, bytes]:
        return {name: self._payloads[name] for name in ids if name in self._payloads}

    async def append(self, record: Record) -> None:
        self._payloads.update(record.payloads)
        for name in record.garbage:
            self._payloads.pop(name, None)
        if record.snapshot is None:
            self._records.append(record.events)
        else:
            self._snapshot = record.snapshot
            self._records.clear()

    async def close(self) -> None:
        pass
