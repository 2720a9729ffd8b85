"""`rollfarm train CONFIG... [--table.key value]`: training on records, without a farm."""

import importlib
import sys
from collections.abc import Sequence

USAGE = """usage: rollfarm train CONFIG.toml [MORE.toml ...] [--table.key value ...]

Trains the model at model.path on records: supervised fine-tuning, preferences (DPO) or distillation, as
[trainer.offline] says. Running it again on an unfinished run goes on where it stopped, and so does
`rollfarm resume RUN`, with the weights that it would have had.

  --trainer.offline.epochs 3          times to go through the records
  --trainer.offline.batch_size 32     records of one step
  --trainer.lr 1e-5                   any key of [run], [model] and [trainer] can be set here, over the files

Several ranks: torchrun --nproc-per-node 2 -m rollfarm train CONFIG.toml

The model is in RUN/model, what each step measured in RUN/metrics.jsonl, and the last line on stdout is the result as
JSON. Exit status: 0 done, 1 another program works on the run, 2 wrong configuration or records, 130 interrupted.
"""

PROG = "rollfarm train"


def main(argv: Sequence[str]) -> int:
    """Train, and return the command's exit status."""
    if not argv or "--help" in argv or "-h" in argv:
        print(USAGE, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2

    from rollfarm.config import ConfigError, exit_bad_config

    try:
        return start(argv, prog=PROG)
    except ConfigError as error:
        exit_bad_config(PROG, error)


def start(argv: Sequence[str], *, prog: str) -> int:
    """Train as these files and flags say, in the name of a command. The exit status. Raises ConfigError."""
    from rollfarm.up import folder

    folder.make_importable(folder.checkout())
    try:
        # By its name: the kit imports no service.
        return importlib.import_module("trainer.offline.command").start(argv, prog=prog)
    except folder.RunInUse as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
