"""kill -9 of a farm's services at random moments, and an audit of what became of every sample.

    .venv/bin/python load_tests/kill.py --kills 50

Starts a small farm (load_tests/kill.toml), kills sample_buffer, Valkey, env_managers and the trainer while it runs, at
times two at once, and waits each time until what was killed does useful work again. Then it stops the farm, lets
another one go on with the run to its end, and audits: against what was acknowledged to the services, as seen by a tap
between them and sample_buffer, and against what is left on disk.

The last line on stdout is one JSON object; a table and the progress go to stderr. The exit status is 0 only if the farm
went on to the end and each of these is 0:

  lost            samples acknowledged as accepted that are neither in a batch nor dropped for a true reason, nor still
                  there; groups that vanished; batches that changed; commits, versions and leases that were forgotten
  duplicated      samples or groups in two steps, members twice in a group, steps with two batches, steps delivered
                  again after their commit
  stale           samples that lagged more than ceil(alpha) versions, by their own tokens
  credits_leaked  groups outstanding beyond what alpha allows; credits in use that no group accounts for
  crashes         services that ended by themselves when another was killed
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.killing import report
from load_tests.killing.audit import Finding, Rules, audit
from load_tests.killing.campaign import Campaign
from load_tests.killing.evidence import Evidence
from load_tests.killing.farm import CONFIG, SERVICES, restarts
from load_tests.killing.inquiry import Inquiry, LedgerUnreadable, read_remains
from rollfarm.up.config import read_farm


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="rf-kill-", dir=options.folder))
    began, evidence = time.monotonic(), Evidence()
    inquiry = Inquiry(evidence)
    campaign = Campaign(folder, options.services, kills=options.kills, seed=options.seed, say=_say)
    kills, failure = asyncio.run(campaign.run(evidence, inquiry))
    _say("auditing what is left")
    run = read_farm([str(CONFIG)], prog="kill.py").run
    try:
        remains = read_remains(folder, evidence, inquiry)
        findings = audit(evidence, remains, Rules(run.alpha, run.batch_groups, run.group_size))
    except LedgerUnreadable as unreadable:
        findings = [Finding("lost", inquiry.unresolved, str(unreadable))]
        failure = failure or "What the farm left on disk cannot be opened."
    crashes = restarts(folder) - len(kills)
    if crashes and not failure:
        failure = f"{crashes} times a service ended that nobody had killed."
    result = report.figures(kills, findings, evidence, crashes, failure)
    result |= {"seed": options.seed, "wall_s": round(time.monotonic() - began, 1)}
    print(report.table(result, findings), file=sys.stderr)
    print(json.dumps(result))
    if not findings and not failure:
        shutil.rmtree(folder)
        return 0
    _say(f"FAILED. {failure}\nThe run is kept in {folder}")
    return 1


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/kill.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=50, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides which and when (%(default)s)")
    parser.add_argument("--services", nargs="+", choices=SERVICES, default=SERVICES, help="what is killed (all four)")
    parser.add_argument(
        "--folder", type=Path, help="where the run's folder is made, and kept on failure (the system's)"
    )
    return parser


def _say(text: str) -> None:
    print(f"kill.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
