"""`rollfarm evaluate CONFIG... [--table.key value]`: the farm without training, and how well a model plays.

A service in the trainer's place asks for episodes and counts. It has a run of its own beside the training's, so the two
never meet, and goes on where it stopped.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from rollfarm.up.config import FarmRoot

USAGE = """usage: rollfarm evaluate CONFIG.toml [MORE.toml ...] [--table.key value ...]

Plays held-out tasks of every domain with the model at model.path, and trains nothing. Its run is run.name with
"-evaluation" behind it; running it again goes on where it stopped, or shows what was found.

  --model.path runs/demo/model         the model, for example one that a run exported
  --trainer.evaluation.tasks 200       tasks of each domain
  --trainer.evaluation.samples 16      episodes of each task
  --trainer.evaluation.k '[1, 4, 16]'  the k of each pass@k
  --trainer.evaluation.metric success  what is averaged: reward, or what the environment measures
  --trainer.evaluation.threshold 0.5   an episode passes whose metric is at least this
  --up.fresh true                      delete what was found before; another model or other settings need it

Prints a table and, as the last line, the result as JSON, which is also in RUN/evaluation.json. Exit status: 0 done or
drained by up.time_limit_seconds, 1 a service failed, 2 wrong configuration, 3 a port is in use, 130 interrupted.
"""

PROG = "rollfarm evaluate"
SUFFIX = "-evaluation"
MODULE = "trainer.evaluation"
FILE_WIDTH = 200
"""Columns of the table where nobody looks at it yet."""


def main(argv: Sequence[str]) -> int:
    """Evaluate, and return the command's exit status."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2

    from rollfarm.config import ConfigError, exit_bad_config
    from rollfarm.up.command import with_farm

    try:
        return with_farm(argv, evaluate, prog=PROG)
    except ConfigError as error:
        exit_bad_config(PROG, error)


def evaluate(farm: "FarmRoot") -> int:
    """Run the farm as an evaluation. The exit status. Raises ConfigError."""
    from rollfarm.up.session import Session, up
    from rollfarm.up.summary import Ending, Summary

    class Evaluation(Session):
        """A session that ends with what was found."""

        def conclude(self, ending: Ending) -> Summary:
            came_to = self.summary(ending)
            if came_to.finished:
                show(json.loads((self.farm.run.path / "evaluation.json").read_text()))
            else:
                print(f"{PROG}: not finished. Say the same again to go on.", file=sys.stderr)
            return came_to

    return up(as_evaluation(farm), Evaluation, trainer=MODULE)


def as_evaluation(farm: "FarmRoot") -> "FarmRoot":
    """The farm with a run of its own, of which no rise is asked."""
    name = farm.run.name if farm.run.name.endswith(SUFFIX) else farm.run.name + SUFFIX
    run = farm.run.model_copy(update={"name": name})
    return farm.model_copy(update={"run": run, "up": farm.up.model_copy(update={"min_gain": 0.0})})


def show(result: Mapping[str, Any]) -> None:
    """The result for people, and as one line for programs."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else FILE_WIDTH
    Console(file=sys.stdout, width=wide).print(_table(result))
    if dropped := result["dropped_groups"]:
        named = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        print(f"Further tasks took the place of some: {named}.")
    print(json.dumps(result), flush=True)


def _table(result: Mapping[str, Any]) -> "Table":
    from rich.table import Table

    parts = {**result["domains"], "all": result["all"]}
    names = [name for name in result["all"] if "@" in name]
    table = Table(title=f"{result['model']}: {result['metric']}, passed from {result['threshold']:g} on")
    for heading in ("domain", "tasks", "episodes", *names):
        table.add_column(heading, justify="left" if heading == "domain" else "right", no_wrap=True)
    for domain, found in parts.items():
        table.add_row(domain, str(found["tasks"]), str(found["episodes"]), *(_estimate(found[name]) for name in names))
    return table


def _estimate(found: Mapping[str, float | None]) -> str:
    if found["low"] is None:
        return f"{found['value']:.3f}"
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
