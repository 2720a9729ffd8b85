"""Whose turn it is: tenants that wait share the engines by their weights.

The rule is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with
length prediction, a start-time fair queueing (Goyal, Vin and Cheng, 1996) for requests of unknown length: the tenant
that spent least, by its weight, goes first; an attempt is charged in advance for its prompt and for as many tokens as
the tenant's requests lately had, and what it did not use is given back. A tenant that comes to wait is lifted to the
least spent of those that wait: idle time earns no credit. Invariant: a tenant has a turn exactly while it has a request
that waits for nothing but a slot, and may have a further slot.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from llm_proxy.heaps import Heap
from rollfarm.errors import QuotaExceeded

T = TypeVar("T")

_LATEST_SHARE = 0.2
"""Weight of the latest length in the mean that predicts the next."""


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """What an operator grants a tenant. The configuration explains each."""

    weight: float = 1.0
    most_running: int = 0
    most_open: int = 0


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's account."""

    name: str
    settings: TenantSettings
    open_count: int = 0
    """Requests that are not answered."""

    waiting_count: int = 0
    """Those without an engine."""

    ready_count: int = 0
    """Those that wait for nothing but a slot."""

    slot_count: int = 0
    """Slots that it holds, those of cancelled requests included until the engine confirms."""

    spent: float = 0.0
    """Tokens that it was charged, divided by its weight."""

    usual_tokens: float | None = None
    """Mean length of its latest outputs; None until there is one."""

    @property
    def may_start(self) -> bool:
        """Whether its quota allows a further slot."""
        return not 0 < self.settings.most_running <= self.slot_count


class Tenants:
    """Every tenant that has something open, or spent more than those that wait."""

    def __init__(self, settings: Mapping[str, TenantSettings] | None = None) -> None:
        self._settings = settings or {}
        self._tenants: dict[str, Tenant] = {}
        self._turns: Heap[float, Tenant] = Heap()
        self._last: Tenant | None = None

    @property
    def open(self) -> list[Tenant]:
        """Every tenant with open requests."""
        return [tenant for tenant in self._tenants.values() if tenant.open_count]

    def enter(self, name: str) -> Tenant:
        """Count a request that is opened. Raises QuotaExceeded."""
        if name not in self._tenants:
            self._forget_idle()
            self._tenants[name] = Tenant(name, self._settings.get(name, TenantSettings()))
        tenant = self._tenants[name]
        most = tenant.settings.most_open
        if 0 < most <= tenant.open_count:
            raise QuotaExceeded(f"Tenant {name!r} has {most} requests open, its most.", tenant=name, most_open=most)
        tenant.open_count += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """A request is answered or withdrawn."""
        tenant.open_count -= 1

    def became_ready(self, tenant: Tenant) -> None:
        """One of its requests waits for nothing but a slot."""
        tenant.ready_count += 1
        if tenant.ready_count == 1:
            self._refresh(tenant)

    def became_unready(self, tenant: Tenant) -> None:
        """One that did no longer does."""
        tenant.ready_count -= 1
        if not tenant.ready_count:
            self._refresh(tenant)

    def turn(self, offer: Callable[[Tenant], T | None]) -> T | None:
        """What the first tenant in turn accepts. One that is offered nothing keeps its place."""
        passed: list[Tenant] = []
        accepted = None
        while accepted is None and (tenant := self._turns.first) is not None:
            accepted = offer(tenant)
            if accepted is None:
                passed.append(tenant)
                self._turns.discard(tenant)
            else:
                self._last = tenant
        for tenant in passed:
            self._turns.put(tenant, tenant.spent)
        return accepted

    def goes_ahead(self, tenant: Tenant) -> None:
        """One of its requests needs no turn, since nobody waits."""
        last = self._last
        if last is not tenant:
            self._last = tenant
            if last is not None:
                tenant.spent = max(tenant.spent, last.spent)

    def started(self, tenant: Tenant, prompt_cost: int, most_tokens: int) -> int:
        """Take a slot and charge for it in advance. Returns the output tokens that are paid for."""
        usual = tenant.usual_tokens
        prepaid = most_tokens if usual is None or usual > most_tokens else round(usual)
        tenant.slot_count += 1
        self._charge(tenant, prompt_cost + prepaid)
        if not tenant.may_start:
            self._refresh(tenant)
        return prepaid

    def generated(self, tenant: Tenant, beyond: int) -> None:
        """An attempt made this many tokens beyond those paid for."""
        self._charge(tenant, beyond)

    def ended(self, tenant: Tenant, unused: int) -> None:
        """Leave a slot, and take back what was paid and not used."""
        could_start = tenant.may_start
        tenant.slot_count -= 1
        self._charge(tenant, -unused)
        if not could_start:
            self._refresh(tenant)

    def learn(self, tenant: Tenant, output_tokens: int) -> None:
        """One of its requests finished with this many tokens."""
        before = tenant.usual_tokens
        tenant.usual_tokens = output_tokens if before is None else before + _LATEST_SHARE * (output_tokens - before)

    def _charge(self, tenant: Tenant, cost: int) -> None:
        tenant.spent += cost / tenant.settings.weight
        if cost and tenant.ready_count and tenant in self._turns:
            self._turns.put(tenant, tenant.spent)

    def _refresh(self, tenant: Tenant) -> None:
        """Give or take its turn, as its state says."""
        if not (tenant.ready_count and tenant.may_start):
            self._turns.discard(tenant)
        elif tenant not in self._turns:
            tenant.spent = max(tenant.spent, self._level())
            self._turns.put(tenant, tenant.spent)

    def _level(self) -> float:
        """Least spent of the tenants that wait or, when none does, spent by the one whose turn was last."""
        if (first := self._turns.first) is not None:
            return first.spent
        return 0.0 if self._last is None else self._last.spent

    def _forget_idle(self) -> None:
        """Forget accounts that would be lifted anyway."""
        level = self._level()
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.open_count or tenant.slot_count or tenant.spent > level
        }
