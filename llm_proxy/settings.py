"""What an operator may choose about routing. The configuration explains each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llm_proxy.tenants import TenantSettings


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Settings of one router."""

    oversubscription: float = 1.0
    affinity_bound_tokens: int = 2048
    session_count: int = 100_000
    prefix_tokens: int = 256
    prefix_count: int = 100_000
    prefill_token_share: float = 0.1
    max_fruitless_attempts: int = 8
    version_wait_seconds: float = 300.0
    stuck_seconds: float = 0.0
    stall_seconds: float = 600.0
    suspend_failures: int = 5
    suspend_seconds: float = 5.0
    most_suspend_seconds: float = 300.0
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict[str, TenantSettings])
