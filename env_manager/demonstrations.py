"""Writes how an expert plays a built-in environment, as chat JSONL for the trainer's supervised warm start.

`python -m env_manager.demonstrations --environment arithmetic --count 1000 --out demonstrations.jsonl --noise 0.2`

Each line is one episode, {"messages": [{"role", "content"}, ...]}. With noise, that share of the actions is random, so
that reinforcement learning has something left to improve.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from env_manager.environments import ENVIRONMENTS
from env_manager.environments.solvable import Solvable
from env_manager.playthrough import play
from rollfarm.config import ConfigError, exit_bad_config
from rollfarm.registry import check_settings

PROG = "python -m env_manager.demonstrations"

Message = dict[str, str]


async def demonstrate(kind: type[Solvable], settings: Mapping[str, Any], seed: int, noise: float) -> list[Message]:
    """One episode; equal arguments give an equal one."""
    chance = random.Random(seed)

    def act(environment: Solvable) -> str:
        return chance.choice(environment.actions()) if chance.random() < noise else environment.solve()

    episode = await play(kind(**settings), seed, act)
    messages = [{"role": "system", "content": episode.shown.system}] if episode.shown.system else []
    text = episode.shown.text
    for action, step in episode.turns:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": action}]
        text = step.text
    return messages


async def write(out: Path, kind: type[Solvable], settings: Mapping[str, Any], options: argparse.Namespace) -> None:
    """As many episodes as the options ask for, one a line."""
    with out.open("w") as lines:
        for index in range(options.count):
            messages = await demonstrate(kind, settings, options.seed + index, options.noise)
            lines.write(json.dumps({"messages": messages}) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--environment", required=True, choices=sorted(ENVIRONMENTS), help="a built-in environment")
    parser.add_argument("--settings", default="{}", help="its settings, one JSON object (default: %(default)s)")
    parser.add_argument("--count", type=int, required=True, help="episodes")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file, which is replaced")
    parser.add_argument("--noise", type=float, default=0.0, help="share of random actions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1 << 40, help="of the first episode; far from a run's own tasks")
    options = parser.parse_args(argv)
    kind = ENVIRONMENTS[options.environment]
    try:
        settings = check_settings(kind, json.loads(options.settings), owner=options.environment)
    except (ConfigError, json.JSONDecodeError) as error:
        exit_bad_config(PROG, error)
    asyncio.run(write(options.out, kind, settings, options))
    print(f"{options.out}: {options.count} episodes of {options.environment}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
