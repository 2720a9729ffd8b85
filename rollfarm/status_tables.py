"""The tables of `rollfarm status`."""

from collections import Counter
from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from rollfarm.up.console import number_text
from rollfarm.v1 import environment_pb2, llm_proxy_pb2, reward_gateway_pb2

ENGINE_STYLES = {"serving": "green", "behind": "yellow", "draining": "yellow"}
"""Of the states of an engine; of others, bold red."""

Managers = Iterable[environment_pb2.EnvManagerServiceGetStatusResponse]


def engines(listed: Iterable[llm_proxy_pb2.Engine]) -> Table:
    """Every engine: whether it gets requests and why not, and how busy it is."""
    table = _table("engine", "adapter", "state")
    for name in ("version", "slots", "running", "waiting", "KV", "tok/s", "tokens"):
        table.add_column(name, justify="right")
    for engine in listed:
        state = llm_proxy_pb2.Engine.State.Name(engine.state).removeprefix("STATE_").lower()
        why = f": {escape(engine.detail)}" if engine.detail else ""
        adapter = f"{engine.adapter} {engine.server_version}".strip()
        address = "" if engine.address == engine.engine_id else f" at {engine.address}"
        table.add_row(
            f"{engine.engine_id}{address}",
            adapter,
            f"[{ENGINE_STYLES.get(state, 'bold red')}]{state}[/]{why}",
            str(engine.policy_version),
            str(engine.slot_count),
            str(engine.running_count),
            str(engine.waiting_count),
            f"{engine.kv_cache_usage:.0%}",
            number_text(engine.tokens_per_second),
            number_text(engine.generated_token_count),
        )
    return table


def tenants(listed: Iterable[llm_proxy_pb2.TenantStatus]) -> Table:
    """Every tenant with open requests."""
    table = _table("tenant")
    for name in ("queued", "running"):
        table.add_column(name, justify="right")
    for tenant in sorted(listed, key=lambda tenant: tenant.tenant):
        table.add_row(tenant.tenant or "(none)", str(tenant.queued_count), str(tenant.running_count))
    return table


def environments(managers: Managers) -> Table:
    """Every environment that was played, by all env_managers together."""
    table = _table("environment", "state")
    for name in ("playing", "ok", "cut short", "failed", "unscored", "aborted", "cancelled"):
        table.add_column(name, justify="right")
    table.add_column("latest failure")
    found: dict[str, list[environment_pb2.EnvironmentStatus]] = {}
    for manager in managers:
        for status in manager.environments:
            if status.running_count or status.ended_count_by_outcome:
                found.setdefault(status.name, []).append(status)
    for name, statuses in sorted(found.items()):
        ended = sum((Counter(status.ended_count_by_outcome) for status in statuses), Counter[str]())
        outcomes = ("OK", "TRUNCATED", "ENV_FAILED", "REWARD_FAILED", "ABORTED")
        suspended = any(status.suspended for status in statuses)
        table.add_row(
            escape(name),
            "[bold red]suspended[/]" if suspended else "[green]plays[/]",
            str(sum(status.running_count for status in statuses)),
            *(number_text(ended[f"OUTCOME_{outcome}"]) for outcome in outcomes),
            number_text(ended["OUTCOME_CANCELLED"] + ended["OUTCOME_STALE"]),
            escape(next((status.detail for status in statuses if status.detail), "")),
        )
    return table


def hosts(managers: Managers) -> Table:
    """Every server, every worker that dialled in, and every process of env_manager's own."""
    table = _table("host", "kind", "state")
    table.add_column("playing", justify="right")
    table.add_column("environments")
    for manager in managers:
        for host in manager.hosts:
            table.add_row(
                escape(host.address),
                environment_pb2.EnvironmentHost.Kind.Name(host.kind).removeprefix("KIND_").lower(),
                "[green]well[/]" if host.healthy else "[bold red]no answer[/]",
                str(host.running_count),
                escape(", ".join(host.environments)),
            )
    return table


def rewards(gateway: reward_gateway_pb2.RewardGatewayServiceGetStatusResponse | None) -> Table:
    """Every reward of every domain."""
    table = _table("domain", "reward")
    for name in ("scoring", "waiting", "scored", "remembered", "failed", "timeout"):
        table.add_column(name, justify="right")
    table.add_column("latest failure")
    for domain in gateway.domains if gateway is not None else ():
        for number, reward in enumerate(domain.rewards):
            first = number == 0
            table.add_row(
                escape(domain.domain) if first else "",
                escape(reward.name),
                str(domain.running_count) if first else "",
                str(domain.waiting_count) if first else "",
                number_text(reward.scored_count),
                number_text(reward.cached_count),
                number_text(reward.failed_count),
                f"{reward.timeout_duration.ToNanoseconds() / 1e9:.3g} s",
                escape(reward.detail),
            )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name)
    return table
