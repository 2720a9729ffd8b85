"""`rollfarm status`: one look at a running farm, asked of the services themselves."""

import argparse
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollfarm import where

if TYPE_CHECKING:
    from rollfarm.up.farm import Addresses

ANSWER_SECONDS = 2.0


def main(argv: Sequence[str]) -> int:
    """Print the table; 1 when nothing answers."""
    parser = argparse.ArgumentParser(
        prog="rollfarm status",
        description="One look at a running farm.",
        epilog="rollfarm status examples/demo.toml --up.base_port 7800 looks at a farm on this machine. Services that "
        "are deployed one by one are asked at the addresses that the file or the flags give, such as "
        "--trainer.sample_buffer_address buffer:7703 --trainer.llm_proxy_address proxy:7701.",
        usage="rollfarm status [--help] [CONFIG.toml ...] [--table.key value ...]",
    )
    _, farm = where.parse(parser, argv)
    return asyncio.run(_status(where.find_or_exit(farm, prog=parser.prog)))


async def _status(addresses: "Addresses") -> int:
    from rich.table import Table

    from rollfarm import status_tables as tables
    from rollfarm.rpc import is_serving
    from rollfarm.up.console import flow, make_console, phase_text
    from rollfarm.up.watch import Watcher

    async with Watcher(addresses) as watcher:
        managers, rewards, serving, _ = await asyncio.gather(
            _managers(addresses.env_managers),
            _rewards(addresses.reward_gateway),
            asyncio.gather(*(is_serving(address, timeout=ANSWER_SECONDS) for address in addresses.named().values())),
            watcher.look(),
        )
    picture = watcher.picture
    up = dict(zip(addresses.named(), serving, strict=True))
    console = make_console()
    if not any(up.values()):
        console.print(
            f"No service answers, sample_buffer at {addresses.sample_buffer} for one. Start a farm with `rollfarm up`, "
            "or give the file and the flags that it was started with."
        )
        return 1

    services = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("service", "address", "state"):
        services.add_column(name)
    for name, address in addresses.named().items():
        alone = not name.rpartition("-")[2].isdigit()
        if up[name] or alone or name.endswith("-0"):
            services.add_row(name, address, "[green]serving[/]" if up[name] else "[bold red]no answer[/]")
    console.print(services)
    if picture.proxy is not None:
        console.print()
        console.print(tables.engines(picture.proxy.engines))
        if any(tenant.tenant for tenant in picture.proxy.tenants):
            console.print()
            console.print(tables.tenants(picture.proxy.tenants))
    for table in (tables.environments(managers), tables.hosts(managers), tables.rewards(rewards)):
        if table.row_count:
            console.print()
            console.print(table)
    console.print()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    if picture.progress is not None:
        total = picture.progress.total_step_count or "∞"
        facts.add_row("run", picture.progress.run_id)
        facts.add_row("trainer", f"{phase_text(picture)}, step {picture.progress.step_count} of {total}")
    for name, value in flow(picture, rates=False):
        facts.add_row(name, value)
    console.print(facts)
    return 0


async def _managers(addresses: Sequence[str]) -> list[Any]:
    """What every env_manager says that answers."""
    from rollfarm.v1 import environment_pb2, environment_pb2_grpc

    request = environment_pb2.EnvManagerServiceGetStatusRequest()
    asked = (_ask(address, environment_pb2_grpc.EnvManagerServiceStub, request) for address in addresses)
    return [answer for answer in await asyncio.gather(*asked) if answer is not None]


async def _rewards(address: str) -> Any:
    """What reward_gateway says; None when it does not answer."""
    from rollfarm.v1 import reward_gateway_pb2, reward_gateway_pb2_grpc

    request = reward_gateway_pb2.RewardGatewayServiceGetStatusRequest()
    return await _ask(address, reward_gateway_pb2_grpc.RewardGatewayServiceStub, request)


async def _ask(address: str, stub: Any, request: Any) -> Any:
    from rollfarm import rpc
    from rollfarm.errors import FarmError

    async with rpc.channel(address) as channel:
        try:
            return await rpc.call(stub(channel).GetStatus, request, timeout=ANSWER_SECONDS, retry=False)
        except FarmError:
            return None
