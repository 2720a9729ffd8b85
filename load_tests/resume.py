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
from collections.abc import Mapping, Sequence
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
    began, evidence, recording = time.monotonic(), Evidence(), Recording()
    inquiry = Inquiry(evidence)
    flags = _flags(options)
    campaign = Campaign(
        folder,
        ["trainer"],
        kills=options.kills,
        seed=options.seed,
        say=_say,
        flags={**flags, "up.trainer_ranks": str(options.ranks)},
        keep=recording.keep,
    )
    kills, failure = asyncio.run(campaign.run(evidence, inquiry))
    crashes = restarts(folder) - len(kills)
    findings: list[Finding] = []
    difference = change = None
    if not failure:
        findings = _audit(folder, evidence, inquiry)
        _say(f"training on the {len(recording.batches)} batches again, without a kill")
        try:
            difference, change = _compare(folder, recording, flags, options.ranks)
        except ReplayFailed as failed:
            failure = f"{failed}\n{last_words(folder / 'straight')}"
    result = {
        "benchmark": "resume",
        "kills": len(kills),
        "max_weight_difference": difference,
        "weight_change": change,
        **_counts(findings),
        "crashes": crashes,
        **_recovery(kills),
        "steps": evidence.committed(),
        "redelivered_batches": sum(delivery.redelivered for delivery in evidence.deliveries),
        "ranks": options.ranks,
        "backend": options.backend,
        "failure": failure.partition("\n")[0],
        "seed": options.seed,
        "wall_s": round(time.monotonic() - began, 1),
    }
    sound = (
        not failure
        and not findings
        and crashes == 0
        and len(kills) == options.kills
        and difference is not None
        and difference <= MOST_DIFFERENCE
        and change is not None
        and change >= LEAST_CHANGE
    )
    print("\n".join(f"{name:<24}{value}" for name, value in result.items()), file=sys.stderr)
    for finding in findings:
        print(f"{finding.kind.upper()} {finding.count}: {finding.what}", file=sys.stderr)
    print(json.dumps(result))
    if sound:
        shutil.rmtree(folder)
        return 0
    _say(f"FAILED. {failure}\nThe runs are kept in {folder}")
    return 1


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
        "trainer.lr": "3e-4",
        "trainer.lr_warmup_steps": "100",
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


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    counted = totals(list(findings))
    return {
        "lost": counted["lost"],
        "trained_twice": counted["duplicated"],
        "stale": counted["stale"],
        "credits_leaked": counted["credits_leaked"],
    }


def _recovery(kills: Sequence[Kill]) -> dict[str, float | None]:
    """From the signal until the next trainer was given a batch."""
    seconds = [kill.seconds for kill in kills]
    return {
        "recovery_p50_s": round(median(seconds), 2) if seconds else None,
        "recovery_max_s": round(max(seconds), 2) if seconds else None,
    }


def _say(text: str) -> None:
    print(f"resume.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
