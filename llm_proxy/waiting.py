"""Requests without an engine: by turns of their tenants; in each least priority first, then those already begun, then
by arrival.

A request whose version is not served yet waits apart, until it is or until its time is up. Those that just came and may
go anywhere line up when it turns out that somebody has to wait. Invariant: every request here is WAITING, and just came
or is in exactly one lane, the one that the versions served give it.
"""

from collections.abc import Collection, Iterator
from operator import attrgetter

from llm_proxy.heaps import Heap
from llm_proxy.requests import DONE, WAITING, OpenRequest
from llm_proxy.tenants import Tenant, Tenants
from llm_proxy.versions import Lane, Served

Order = tuple[int, bool, int]

_ORDER = attrgetter("order")


class WaitingLine:
    """The central queue."""

    def __init__(self, tenants: Tenants, version_wait_seconds: float) -> None:
        self._tenants = tenants
        self._version_wait_seconds = version_wait_seconds
        self._lines: dict[Tenant, dict[Lane, Heap[Order, OpenRequest]]] = {}
        self._arrived: dict[OpenRequest, None] = {}
        """Requests that may go anywhere and are in no lane yet, as they came."""

        self._demanding: dict[OpenRequest, Lane] = {}
        """Requests that may not go anywhere, with their lanes, which change with the versions served."""

        self._version_waits: Heap[float, OpenRequest] = Heap()
        self._count = 0
        self.served = Served()

    def __len__(self) -> int:
        return self._count

    @property
    def next_deadline(self) -> float | None:
        """When the first request has waited long enough for its version."""
        return self._version_waits.first_key

    def put(self, request: OpenRequest, now: float) -> None:
        """Add a request whose version is not gone."""
        lane = self.served.lane(request)
        assert lane is not None
        request.place = WAITING
        request.tenant.waiting_count += 1
        self._count += 1
        if lane is Lane.ANY:
            self._arrived[request] = None
            return
        if lane is Lane.LATER:
            self._version_waits.put(request, now + self._version_wait_seconds)
        self._enter(request, lane)

    def pop_arrived(self, room: int) -> Iterator[OpenRequest]:
        """Take those that just came, in order, if nobody else waits and there is room for all; otherwise they line up.

        Whose turn it is does not matter then. One whose tenant may have no further slot lines up all the same.
        """
        arrived, self._arrived = self._arrived, {}
        all_may_go = not self._lines and len(arrived) <= room
        for request in sorted(arrived, key=_ORDER):
            tenant = request.tenant
            if all_may_go and tenant.may_start:
                self._tenants.goes_ahead(tenant)
                self._taken(request)
                yield request
            else:
                self._enter(request, Lane.ANY)

    def pop(self, lanes: Collection[Lane]) -> tuple[OpenRequest, Lane] | None:
        """Take the request that goes next to engines that serve these lanes, and say which it was in."""
        request = self._tenants.turn(lambda tenant: self._first(tenant, lanes))
        return None if request is None else (request, self.remove(request))

    def remove(self, request: OpenRequest) -> Lane:
        """Take a request out of its lane, whichever it is in. The caller gives it its next place."""
        lane = self._demanding.pop(request, Lane.ANY) if self._demanding else Lane.ANY
        if request in self._arrived:
            del self._arrived[request]
        else:
            self._leave(request, lane)
        self._taken(request)
        return lane

    def serve(self, served: Served) -> list[OpenRequest]:
        """Other versions are served from now on. Returns requests whose exact version is gone, still in line."""
        self.served = served
        gone: list[OpenRequest] = []
        for request, before in list(self._demanding.items()):
            lane = served.lane(request)
            if lane is None:
                gone.append(request)
            elif lane is not before:
                self._leave(request, self._demanding.pop(request))
                self._enter(request, lane)
        return gone

    def overdue(self, now: float) -> list[OpenRequest]:
        """Requests that have waited long enough for their version, still in line."""
        overdue: list[OpenRequest] = []
        while (due := self._version_waits.first_key) is not None and due <= now:
            request = self._version_waits.first
            assert request is not None
            self._version_waits.discard(request)
            overdue.append(request)
        return overdue

    def _taken(self, request: OpenRequest) -> None:
        request.place = DONE
        request.tenant.waiting_count -= 1
        self._count -= 1

    def _enter(self, request: OpenRequest, lane: Lane) -> None:
        if lane is not Lane.ANY:
            self._demanding[request] = lane
        if lane is not Lane.LATER:
            lines = self._lines.setdefault(request.tenant, {})
            if (line := lines.get(lane)) is None:
                line = lines[lane] = Heap()
            line.put(request, request.order)
            self._tenants.became_ready(request.tenant)

    def _leave(self, request: OpenRequest, lane: Lane) -> None:
        if lane is Lane.LATER:
            self._version_waits.discard(request)
            return
        lines = self._lines[request.tenant]
        line = lines[lane]
        line.discard(request)
        if not line:
            del lines[lane]
            if not lines:
                del self._lines[request.tenant]
        self._tenants.became_unready(request.tenant)

    def _first(self, tenant: Tenant, lanes: Collection[Lane]) -> OpenRequest | None:
        first = None
        for lane, line in self._lines[tenant].items():
            head = line.first if lane in lanes else None
            if head is not None and (first is None or head.order < first.order):
                first = head
        return first
