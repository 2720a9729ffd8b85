"""The command line: `rollfarm COMMAND ...`. Each command is imported only when it is used."""

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "up": ("rollfarm.up.command", "start, watch and drain a whole farm on this machine"),
    "train": ("rollfarm.train", "train on records, without a farm: fine-tuning, preferences, distillation"),
    "resume": ("rollfarm.up.resume", "go on with a run that is not finished"),
    "evaluate": ("rollfarm.up.evaluate", "play held-out tasks with a model, without training: pass@k and avg@n"),
    "status": ("rollfarm.status", "one look at a running farm"),
    "doctor": ("rollfarm.doctor", "check that this machine can run a farm, with a remedy for what fails"),
    "inspect": ("rollfarm.inspect", "list trajectories, or read one as text"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="rollfarm",
        description="A farm of small services that trains language models by reinforcement learning.",
        epilog="rollfarm COMMAND --help says more about one command.",
        usage="rollfarm [--help] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_argument_group("commands")
    commands.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    commands.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    commands.description = "\n".join(f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items())
    chosen = parser.parse_args(argv)
    if chosen.version:
        from rollfarm import __version__

        print(__version__)
        return 0
    if chosen.command is None:
        parser.print_help()
        return 2
    module, _ = COMMANDS[chosen.command]
    return importlib.import_module(module).main(chosen.arguments)


if __name__ == "__main__":
    sys.exit(main())
