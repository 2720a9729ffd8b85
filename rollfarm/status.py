"""`rollfarm status`: one look at a running farm, asked of the services themselves."""

import argparse
import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rollfarm import where

if TYPE_CHECKING:
    from rich.table import Table

    from rollfarm.up.farm import Addresses
    from rollfarm.v1 import llm_proxy_pb2


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

    from rollfarm.rpc import is_serving
    from rollfarm.up.console import flow, make_console, phase_text
    from rollfarm.up.watch import Watcher

    async with Watcher(addresses) as watcher:
        *serving, _ = await asyncio.gather(
            *(is_serving(address, timeout=2.0) for address in addresses.named().values()), watcher.look()
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
        console.print(_engines(picture.proxy.engines))
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


def _engines(engines: "Iterable[llm_proxy_pb2.Engine]") -> "Table":
    from rich.table import Table

    from rollfarm.v1 import llm_proxy_pb2

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("engine", "adapter", "address", "state", "version", "slots", "running", "tokens"):
        table.add_column(name, justify="right" if name in ("version", "slots", "running", "tokens") else "left")
    for engine in engines:
        state = llm_proxy_pb2.Engine.State.Name(engine.state).removeprefix("STATE_").lower()
        table.add_row(
            engine.engine_id,
            engine.adapter,
            engine.address,
            f"{state} {engine.detail}".strip(),
            str(engine.policy_version),
            str(engine.slot_count),
            str(engine.running_count),
            str(engine.generated_token_count),
        )
    return table
