"""`rollfarm inspect`: what the policy did, as text, turn by turn, read from sample_buffer."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any

from rollfarm import where

if TYPE_CHECKING:
    from rich.console import Console

    from rollfarm.v1.sample_buffer_pb2 import Transition
    from rollfarm.v1.trajectory_pb2 import Trajectory, Turn

ANSWER_SECONDS = 10.0
AUTHOR_STYLES = {"system": "magenta", "environment": "blue", "policy": "bold green"}


def main(argv: Sequence[str]) -> int:
    """List trajectories, or print one; 1 when the farm does not answer or does not know it."""
    parser = argparse.ArgumentParser(
        prog="rollfarm inspect",
        description="Read what the policy did, as text.",
        usage="rollfarm inspect [--help] [TRAJECTORY] [--run RUN] [--group GROUP] [--count COUNT]\n"
        "                        [--address ADDRESS] [--config CONFIG.toml] [--table.key value ...]",
    )
    parser.add_argument("trajectory", nargs="?", metavar="TRAJECTORY", help="its id, or the beginning of a recent one")
    parser.add_argument("--run", default="", help="the run (default: the newest)")
    parser.add_argument("--group", default="", help="list only this group")
    parser.add_argument("--count", type=int, default=20, help="how many to list (default 20)")
    parser.add_argument("--address", help="sample_buffer's host:port (default: as the farm's file says)")
    chosen, farm = where.parse(parser, argv, positional=False)
    chosen.address = chosen.address or where.find_or_exit(farm, prog=parser.prog).sample_buffer

    from rollfarm.errors import FarmError, Unavailable

    try:
        return asyncio.run(_inspect(chosen))
    except Unavailable:
        print(
            f"rollfarm inspect: sample_buffer does not answer at {chosen.address}; trajectories can be read while the "
            "farm runs. Start it with `rollfarm up`, or give the --config and the flags that it was started with, or "
            "--address.",
            file=sys.stderr,
        )
    except FarmError as error:
        print(f"rollfarm inspect: {error}", file=sys.stderr)
    return 1


async def _inspect(chosen: argparse.Namespace) -> int:
    from rollfarm import rpc
    from rollfarm.up.console import make_console
    from rollfarm.v1 import sample_buffer_pb2, sample_buffer_pb2_grpc

    console = make_console()
    async with rpc.channel(chosen.address) as channel:
        buffer = sample_buffer_pb2_grpc.SampleBufferServiceStub(channel)

        async def ask(method: Any, request: Any) -> Any:
            return await rpc.call(method, request, timeout=ANSWER_SECONDS, retry=False)

        def page(size: int) -> Any:
            return sample_buffer_pb2.ListTrajectoriesRequest(run_id=chosen.run, group_id=chosen.group, page_size=size)

        if chosen.trajectory is None:
            _print_list(console, (await ask(buffer.ListTrajectories, page(chosen.count))).trajectories)
            return 0
        recent = (await ask(buffer.ListTrajectories, page(500))).trajectories
        found = [item.trajectory_id for item in recent if item.trajectory_id.startswith(chosen.trajectory)]
        name = found[0] if len(found) == 1 else chosen.trajectory
        lineage = await ask(buffer.GetLineage, sample_buffer_pb2.GetLineageRequest(trajectory_id=name))
        _print_one(console, lineage)
        return 0


def _print_list(console: "Console", trajectories: "Sequence[Trajectory]") -> None:
    from rich.table import Table

    if not trajectories:
        console.print("No trajectory is retained yet. Wait for the first episode to end.")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("trajectory", "group", "member", "task", "outcome", "reward", "turns", "tokens", "versions"):
        table.add_column(name, justify="right" if name in ("member", "reward", "turns", "tokens") else "left")
    for item in trajectories:
        table.add_row(
            item.trajectory_id,
            item.group_id,
            str(item.member),
            f"{item.task.domain} {item.task.index}",
            outcome_text(item),
            f"{item.reward:.3f}" if item.HasField("reward") else "·",
            str(sum(_by_policy(turn) for turn in item.turns)),
            str(sum(len(turn.token_ids) // 4 for turn in item.turns)),
            versions_text(item.turns),
        )
    console.print(table)
    console.print("\nRead one with `rollfarm inspect TRAJECTORY`; the beginning of its id will do.", style="dim")


def _print_one(console: "Console", lineage: Any) -> None:
    from rich.markup import escape
    from rich.rule import Rule
    from rich.text import Text

    item = lineage.trajectory
    console.print(f"[bold]{item.trajectory_id}[/]  {item.task.domain} {item.task.index}, seed {item.task.seed}")
    played = f"played by {item.worker_id}, versions {versions_text(item.turns)}"
    console.print(f"group {item.group_id}, member {item.member}, {played}", style="dim")
    texts = list(item.turn_texts) + [""] * (len(item.turns) - len(item.turn_texts))
    for number, (turn, text) in enumerate(zip(item.turns, texts, strict=False)):
        author = author_text(turn)
        console.print(Rule(f"{number} {author}", align="left", style=AUTHOR_STYLES.get(author, "dim")))
        console.print(Text(text or f"({len(turn.token_ids) // 4} tokens, no text kept)"))
        console.print(Text(turn_facts(turn), style="dim"))
    console.print(Rule(style="dim"))
    console.print(f"[bold]{outcome_text(item)}[/] {escape(item.outcome_detail)}".rstrip())
    if item.HasField("reward"):
        console.print(f"reward [bold]{item.reward:.4f}[/]")
        for part in item.reward_parts:
            console.print(f"  {part.weight:g} × {part.value:.4f}  {part.name}  {escape(part.detail)}".rstrip())
    for name, value in sorted(item.metrics.items()):
        console.print(f"{name} {value:g}")
    console.print()
    for step in lineage.transitions:
        moment = step.create_time.ToDatetime(UTC).astimezone()
        console.print(f"[dim]{moment:%Y-%m-%d %H:%M:%S.%f}[/]  {step.event:<9}  {escape(transition_facts(step))}")


def turn_facts(turn: "Turn") -> str:
    """What is known of a turn beside its text, on one line."""
    facts = [f"{len(turn.token_ids) // 4} tokens"]
    if turn.begins_segment:
        facts.append("rendered anew")
    if turn.version_spans:
        facts.append("versions " + ", ".join(f"{s.policy_version}×{s.token_count}" for s in turn.version_spans))
    if turn.HasField("step_reward"):
        facts.append(f"step reward {turn.step_reward:g}")
    if turn.engine_id:
        facts.append(f"engine {turn.engine_id}")
    if turn.HasField("generate_duration"):
        facts.append(f"{turn.generate_duration.ToMicroseconds() / 1000:.0f} ms")
    return " · ".join(facts)


def transition_facts(step: "Transition") -> str:
    """What is known of a transition beside its name, on one line."""
    facts = [f"version {step.policy_version}"]
    if step.worker_id:
        facts.append(f"worker {step.worker_id}")
    if step.lease_id:
        facts.append(f"lease {step.lease_id}")
    if step.engine_ids:
        facts.append(f"engine {', '.join(step.engine_ids)}")
    if step.HasField("step"):
        facts.append(f"step {step.step}")
    if step.batch_id:
        facts.append(f"batch {step.batch_id}")
    if step.detail:
        facts.append(step.detail)
    return " · ".join(facts)


def versions_text(turns: "Sequence[Turn]") -> str:
    """The versions that wrote the policy's turns: "3" or "3-4"."""
    versions = sorted({span.policy_version for turn in turns for span in turn.version_spans})
    if not versions:
        return "·"
    return str(versions[0]) if len(versions) == 1 else f"{versions[0]}-{versions[-1]}"


def author_text(turn: "Turn") -> str:
    """Who wrote it, in lower case."""
    from rollfarm.v1 import trajectory_pb2

    return trajectory_pb2.Author.Name(turn.author).removeprefix("AUTHOR_").lower()


def outcome_text(item: "Trajectory") -> str:
    """How it ended, in lower case."""
    from rollfarm.v1 import trajectory_pb2

    return trajectory_pb2.Outcome.Name(item.outcome).removeprefix("OUTCOME_").lower()


def _by_policy(turn: "Turn") -> bool:
    return author_text(turn) == "policy"
