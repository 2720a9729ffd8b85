"""kill -9 of a farm's trainer at random moments, and the question whether anybody can tell from what was learnt.

    .venv/bin/python load_tests/resume.py --kills 20

Starts a small farm (load_tests/kill.toml) whose trainer saves every third step, kills the trainer while it runs, waits
each time until the next one trains again, and lets the run come to its end. A tap between trainer and sample_buffer
records every batch. Then a second trainer, which nobody kills, trains on the recorded batches, each once, in order; and
the final weights of the two are compared.

The last line on stdout is one JSON object; a table and the progress go to stderr. The exit status is 0 only if the farm
went on to the end and

  max_weight_difference   of any weight, between the run that was killed and the one that was not, is at most 1e-6
  lost, trained_twice     and the other figures of load_tests/kill.py are 0
  weight_change           of any weight, from the first step to the last, is at least 1e-3: else nothing was compared
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.killing.audit import Finding, Rules, audit, totals
from load_tests.killing.campaign import Campaign
from load_tests.killing.chaos import Kill
from load_tests.killing.evidence import Evidence
from load_tests.killing.farm import CONFIG, RUN, restarts
from load_tests.killing.inquiry import Inquiry, LedgerUnreadable, read_remains
from load_tests.resuming.straight import Recording, ReplayFailed, differences, last_words, replay, weights_of
from rollfarm.up.config import read_farm

CHECKPOINT_EVERY = 3
MOST_DIFFERENCE = 1e-6
LEAST_CHANGE = 1e-3
REPLAY_SECONDS = 1800.0


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="rf-resume-", dir=options.folder))
    began, outcome = time.monotonic(), Outcome()
    _kill_and_compare(options, folder, outcome)
    result = {
        "benchmark": "resume",
        **outcome.figures(),
        "ranks": options.ranks,
        "backend": options.backend,
        "seed": options.seed,
        "wall_s": round(time.monotonic() - began, 1),
    }
    print("\n".join(f"{name:<24}{value}" for name, value in result.items()), file=sys.stderr)
    for finding in outcome.findings:
        print(f"{finding.kind.upper()} {finding.count}: {finding.what}", file=sys.stderr)
    print(json.dumps(result))
    if outcome.is_sound(options.kills):
        shutil.rmtree(folder)
        return 0
    _say(f"FAILED. {outcome.failure}\nThe runs are kept in {folder}")
    return 1


@dataclass
class Outcome:
    """What came of it, as far as it went."""

    evidence: Evidence = field(default_factory=Evidence)
    kills: list[Kill] = field(default_factory=list[Kill])
    findings: list[Finding] = field(default_factory=list[Finding])
    crashes: int = 0
    difference: float | None = None
    """Between the weights of the two runs; None when it did not come to that."""
    change: float | None = None
    """Of the weights in the run."""
    failure: str = ""

    def is_sound(self, kills: int) -> bool:
        """Whether every kill was survived and made no difference."""
        if self.failure or self.findings or self.crashes or len(self.kills) != kills:
            return False
        if self.difference is None or self.change is None:
            return False
        return self.difference <= MOST_DIFFERENCE and self.change >= LEAST_CHANGE

    def figures(self) -> dict[str, object]:
        """For the line of JSON."""
        counted = totals(self.findings)
        seconds = [kill.seconds for kill in self.kills]
        return {
            "kills": len(self.kills),
            "max_weight_difference": self.difference,
            "weight_change": self.change,
            "lost": counted["lost"],
            "trained_twice": counted["duplicated"],
            "stale": counted["stale"],
            "credits_leaked": counted["credits_leaked"],
            "crashes": self.crashes,
            "recovery_p50_s": round(median(seconds), 2) if seconds else None,
            "recovery_max_s": round(max(seconds), 2) if seconds else None,
            "steps": self.evidence.committed(),
            "redelivered_batches": sum(delivery.redelivered for delivery in self.evidence.deliveries),
            "failure": self.failure.partition("\n")[0],
        }


def _kill_and_compare(options: argparse.Namespace, folder: Path, outcome: Outcome) -> None:
    inquiry, recording, flags = Inquiry(outcome.evidence), Recording(), _flags(options)
    campaign = Campaign(
        folder,
        ["trainer"],
        kills=options.kills,
        seed=options.seed,
        say=_say,
        flags={**flags, "up.trainer_ranks": str(options.ranks)},
        keep=recording.keep,
    )
    outcome.kills, outcome.failure = asyncio.run(campaign.run(outcome.evidence, inquiry))
    outcome.crashes = restarts(folder) - len(outcome.kills)
    if outcome.failure:
        return
    outcome.findings = _audit(folder, outcome.evidence, inquiry)
    _say(f"training on the {len(recording.batches)} batches again, without a kill")
    try:
        outcome.difference, outcome.change = _compare(folder, recording, flags, options.ranks)
    except ReplayFailed as failed:
        outcome.failure = f"{failed}\n{last_words(folder / 'straight')}"


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/resume.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=20, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides when (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer; a kill hits any of them (%(default)s)")
    parser.add_argument("--backend", default="torch", help="of the trainer (%(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="where the runs' folder is made, and kept on failure (the system's)"
    )
    return parser


def _flags(options: argparse.Namespace) -> dict[str, str]:
    """What both trainers are given: one that learns so fast that a batch too many or too few shows, at a learning rate
    that a wrong step count changes."""
    return {
        "run.filters": "[]",
        "trainer.backend": options.backend,
        "trainer.checkpoint_every": str(CHECKPOINT_EVERY),
        "trainer.lr": "1e-3",
        "trainer.lr_warmup_steps": "30",
    }


def _audit(folder: Path, evidence: Evidence, inquiry: Inquiry) -> list[Finding]:
    """What became of every sample."""
    _say("auditing what is left")
    run = read_farm([str(CONFIG)], prog="resume.py").run
    try:
        remains = read_remains(folder, evidence, inquiry)
    except LedgerUnreadable as unreadable:
        return [Finding("lost", inquiry.unresolved, str(unreadable))]
    return audit(evidence, remains, Rules(run.alpha, run.batch_groups, run.group_size))


def _compare(folder: Path, recording: Recording, flags: Mapping[str, str], ranks: int) -> tuple[float, float]:
    """The greatest difference between the weights of the two runs, and from the model that both began with."""
    model = folder / "model"
    straight = folder / "straight"
    replay(recording, straight, {**flags, "model.path": str(model)}, ranks=ranks, seconds=REPLAY_SECONDS)
    killed, unharmed = weights_of(folder / RUN), weights_of(straight / "straight")
    return differences(killed, unharmed), differences(killed, model / "model.safetensors")


def _say(text: str) -> None:
    print(f"resume.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
