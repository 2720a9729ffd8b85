"""Requests without a slot: least priority first, then those already begun, then by arrival.

A request whose version is not served yet is parked by that version and costs nothing until it is. Invariant: every
request here is PARKED or QUEUED, exactly once, and every QUEUED one may go to any serving engine.
"""

import heapq

from llm_proxy.requests import OpenRequest, Place

_COMPACT_AT = 64


class WaitingLine:
    """The central queue."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, bool, int], OpenRequest]] = []
        self._queued = 0
        self._parked: dict[int, dict[OpenRequest, None]] = {}
        self._versions: list[int] = []
        self._parked_count = 0
        self._exact: dict[int, dict[OpenRequest, None]] = {}

    def __len__(self) -> int:
        return self._queued + self._parked_count

    @property
    def queued_count(self) -> int:
        """Requests that wait for nothing but a slot."""
        return self._queued

    def put(self, request: OpenRequest, policy_version: int) -> None:
        """Add a request; the served version is `policy_version`."""
        if request.asked.HasField("exact_version"):
            self._exact.setdefault(request.asked.exact_version, {})[request] = None
        needed = needed_version(request)
        if needed <= policy_version:
            self._queue(request)
            return
        request.place = Place.PARKED
        if needed not in self._parked:
            self._parked[needed] = {}
            heapq.heappush(self._versions, needed)
        self._parked[needed][request] = None
        self._parked_count += 1

    def pop(self) -> OpenRequest | None:
        """Take the first request that may run."""
        while self._heap:
            _, request = heapq.heappop(self._heap)
            if request.place is Place.QUEUED:
                self._queued -= 1
                self._forget_exact(request)
                return request
        return None

    def remove(self, request: OpenRequest) -> None:
        """Take a request out, wherever in the line it is. The caller gives it its next place."""
        self._forget_exact(request)
        if request.place is Place.PARKED:
            del self._parked[needed_version(request)][request]
            self._parked_count -= 1
            request.place = Place.DONE
            return
        self._queued -= 1
        request.place = Place.DONE
        if len(self._heap) > _COMPACT_AT and self._queued < len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[1].place is Place.QUEUED]
            heapq.heapify(self._heap)

    def advance(self, policy_version: int) -> list[OpenRequest]:
        """Queue what waited for versions up to this one. Returns those whose exact version is gone, still in line."""
        while self._versions and self._versions[0] <= policy_version:
            for request in self._parked.pop(heapq.heappop(self._versions)):
                self._parked_count -= 1
                self._queue(request)
        gone = [version for version in self._exact if version < policy_version]
        return [request for version in gone for request in self._exact[version]]

    def _queue(self, request: OpenRequest) -> None:
        request.place = Place.QUEUED
        heapq.heappush(self._heap, (request.order, request))
        self._queued += 1

    def _forget_exact(self, request: OpenRequest) -> None:
        if request.asked.HasField("exact_version"):
            version = request.asked.exact_version
            del self._exact[version][request]
            if not self._exact[version]:
                del self._exact[version]


def needed_version(request: OpenRequest) -> int:
    """The least served version under which the request may run. Without a demand, any."""
    asked = request.asked
    if asked.HasField("exact_version"):
        return asked.exact_version
    return asked.min_version if asked.HasField("min_version") else 0
