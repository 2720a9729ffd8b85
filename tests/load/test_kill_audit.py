"""The audit of load_tests/kill.py finds each broken promise in records made by hand, and none in a sound run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from load_tests.killing.audit import KINDS, Finding, Rules, audit, totals
from load_tests.killing.evidence import (
    Accepted,
    Commit,
    Delivery,
    Drop,
    Evidence,
    Leased,
    Publication,
    Remains,
    Sample,
)

CHECKOUT = Path(__file__).parents[2]

RULES = Rules(alpha=1.0, batch_groups=1, group_size=2)
"""Two groups may be outstanding, and a sample may lag by one version."""


def sound_run() -> Evidence:
    """Groups 0 and 2 are the batches of the steps 0 and 1; group 1 agreed and was dropped."""
    evidence = Evidence()
    evidence.publications.append(Publication("request-1.0", 1.0, version=1, trained_step_count=0, at=1.0))
    hand_in(evidence, 10.0, group(0, version=1))
    hand_in(evidence, 11.0, [replace(sample, reward=0.0) for sample in group(1, version=1)])
    for sample in group(1, version=1):
        evidence.drops[sample.trajectory_id] = Drop(12.0, "zero_variance", 1)
    deliver(evidence, 13.0, 0, group(0, version=1), policy_version=1)
    evidence.publications.append(Publication("request-14.0", 14.0, version=2, trained_step_count=1, at=14.1))
    evidence.commits.append(Commit(15.0, 0))
    hand_in(evidence, 16.0, group(2, version=1))
    deliver(evidence, 17.0, 1, group(2, version=1), policy_version=2)
    deliver(evidence, 18.0, 1, group(2, version=1), policy_version=2, redelivered=True)
    evidence.publications.append(Publication("request-19.0", 19.0, version=3, trained_step_count=2, at=19.1))
    evidence.commits.append(Commit(20.0, 1))
    return evidence


REMAINS = Remains(
    policy_version=3,
    next_commit_step=2,
    next_group_index=3,
    credits_in_use=0,
    dropped=1,
    outstanding=0,
    unknown=frozenset(),
    finished=True,
    steps=(0, 1),
)


def group(index: int, version: int) -> list[Sample]:
    return [
        Sample(f"t{index}.{member}", index, member, version, reward=float(member), digest=b"%d.%d" % (index, member))
        for member in range(2)
    ]


def hand_in(evidence: Evidence, at: float, samples: list[Sample]) -> None:
    leases = {f"lease-{sample.trajectory_id}": sample.index for sample in samples}
    evidence.leased.append(Leased(f"request-{at}", at - 1, "worker", leases))
    for sample in samples:
        evidence.handed_in[sample.trajectory_id] = sample
        evidence.accepted.append(Accepted(at, f"lease-{sample.trajectory_id}", sample))


def deliver(
    evidence: Evidence,
    at: float,
    step: int,
    samples: list[Sample],
    *,
    policy_version: int,
    redelivered: bool = False,
    batch_id: str = "",
) -> None:
    groups: dict[int, tuple[Sample, ...]] = {}
    for sample in samples:
        groups[sample.index] = (*groups.get(sample.index, ()), sample)
    name = batch_id or f"batch-{step}"
    evidence.deliveries.append(Delivery(at - 0.5, at, "trainer", step, name, policy_version, redelivered, groups))


def found(evidence: Evidence, remains: Remains = REMAINS) -> dict[str, int]:
    """What the audit counts, but for zeros."""
    return {kind: count for kind, count in totals(audit(evidence, remains, RULES)).items() if count}


def test_nothing_is_found_in_a_sound_run():
    assert audit(sound_run(), REMAINS, RULES) == []


def test_findings_of_a_kind_are_added_up():
    findings = [Finding("lost", 2, "a"), Finding("stale", 1, "b"), Finding("lost", 3, "c")]

    assert totals(findings) == {"lost": 5, "duplicated": 0, "stale": 1, "credits_leaked": 0}


# Lost.


def test_an_accepted_sample_that_the_ledger_does_not_know_is_lost():
    evidence = sound_run()
    hand_in(evidence, 21.0, group(3, version=3))
    remains = replace(REMAINS, next_group_index=4, outstanding=1, credits_in_use=1, finished=False)

    assert found(evidence, remains) == {}
    assert found(evidence, replace(remains, unknown=frozenset({"t3.0"}))) == {"lost": 1}


def test_an_accepted_sample_whose_group_was_delivered_without_it_is_lost():
    evidence = sound_run()
    other = replace(group(0, version=1)[0], trajectory_id="other")
    hand_in(evidence, 9.5, [other])

    assert found(evidence) == {"lost": 1}


def test_a_sample_delivered_with_another_content_than_was_handed_in_is_lost():
    evidence = sound_run()
    evidence.accepted[0] = replace(evidence.accepted[0], sample=replace(evidence.accepted[0].sample, digest=b"else"))

    assert found(evidence) == {"lost": 1}


@pytest.mark.parametrize("reason", ["", "stale: version 2", "zero_variance"])
def test_a_group_dropped_for_a_reason_that_is_not_true_is_lost(reason: str):
    evidence = sound_run()
    hand_in(evidence, 21.0, group(3, version=3))
    for sample in group(3, version=3):
        evidence.drops[sample.trajectory_id] = Drop(22.0, reason, 3)

    assert found(evidence, replace(REMAINS, next_group_index=4, dropped=2)) == {"lost": 2}


def test_a_stale_group_may_be_dropped():
    evidence = sound_run()
    hand_in(evidence, 21.0, group(3, version=1))
    for sample in group(3, version=1):
        evidence.drops[sample.trajectory_id] = Drop(22.0, "stale: version 3", 3)

    assert found(evidence, replace(REMAINS, next_group_index=4, dropped=2)) == {}


def test_a_group_that_was_leased_and_vanished_is_lost():
    evidence = sound_run()
    evidence.leased.append(Leased("late", 21.0, "worker", {"lease": 3}))

    assert found(evidence) == {"lost": 1}


def test_groups_that_are_neither_committed_nor_dropped_nor_outstanding_are_lost():
    remains = replace(REMAINS, next_group_index=5, credits_in_use=2, finished=False)

    assert found(sound_run(), remains) == {"lost": 2}


def test_a_batch_delivered_again_without_a_sample_lost_it():
    evidence = sound_run()
    deliver(evidence, 18.5, 1, group(2, version=1)[:1], policy_version=2, redelivered=True)

    assert found(evidence) == {"lost": 1}


def test_commits_and_versions_that_were_acknowledged_and_are_no_more_are_lost():
    remains = replace(REMAINS, next_commit_step=1, outstanding=1, finished=False)

    assert found(sound_run(), remains) == {"lost": 1}
    assert found(sound_run(), replace(REMAINS, policy_version=1)) == {"lost": 2}


def test_a_version_that_is_published_anew_shows_that_one_was_lost():
    evidence = sound_run()
    evidence.publications.append(evidence.publications[-1])
    evidence.publications.append(Publication("request-21.0", 21.0, version=3, trained_step_count=2, at=21.1))

    assert found(evidence) == {"lost": 1}


def test_a_lease_that_is_given_out_anew_shows_that_its_loan_was_lost():
    asked_again, asked_anew = sound_run(), sound_run()
    asked_again.leased.append(asked_again.leased[-1])
    asked_anew.leased.append(replace(asked_anew.leased[-1], request_id="another", leases={"lease-t2.0": 2}))

    assert found(asked_again) == {}
    assert found(asked_anew) == {"lost": 1}


def test_the_trainer_tells_of_each_step_once():
    assert found(sound_run(), replace(REMAINS, steps=(0, 1, 1))) == {"duplicated": 1}
    assert found(sound_run(), replace(REMAINS, steps=(1,))) == {"lost": 1}


# Duplicated.


def test_a_sample_and_its_group_in_two_steps_are_two_duplicates():
    evidence = sound_run()
    evidence.deliveries[1:] = []
    deliver(evidence, 17.0, 1, [group(2, version=1)[0], group(0, version=1)[0]], policy_version=2)
    evidence.accepted = [each for each in evidence.accepted if each.sample.trajectory_id != "t2.1"]

    assert totals(audit(evidence, REMAINS, RULES))["duplicated"] == 2


def test_a_member_that_is_twice_in_its_group_is_a_duplicate():
    evidence = sound_run()
    twin = replace(group(2, version=1)[0], trajectory_id="twin")
    evidence.deliveries[1:] = []
    deliver(evidence, 17.0, 1, [*group(2, version=1), twin], policy_version=2)

    assert found(evidence) == {"duplicated": 1}


def test_a_step_with_two_batches_is_a_duplicate():
    evidence = sound_run()
    deliver(evidence, 18.5, 1, group(2, version=1), policy_version=2, redelivered=True, batch_id="another")

    assert found(evidence) == {"duplicated": 1}


def test_a_batch_delivered_after_its_commit_is_a_duplicate():
    to_the_trainer, to_the_auditor = sound_run(), sound_run()
    deliver(to_the_trainer, 21.0, 1, group(2, version=1), policy_version=2, redelivered=True)
    to_the_auditor.recommitted.append(to_the_auditor.deliveries[-1])

    assert found(to_the_trainer) == {"duplicated": 1}
    assert found(to_the_auditor) == {"duplicated": 1}


# Stale.


def test_a_sample_that_lags_more_than_alpha_allows_is_stale():
    evidence = sound_run()
    evidence.deliveries[1:] = [replace(each, policy_version=3) for each in evidence.deliveries[1:]]

    assert found(evidence) == {"stale": 2}


def test_the_lag_counts_from_the_version_that_was_acknowledged_whatever_the_batch_says():
    evidence = sound_run()
    evidence.publications.append(Publication("request-16.0", 16.0, version=3, trained_step_count=1, at=16.1))
    evidence.publications[2].version = 4

    assert found(evidence, replace(REMAINS, policy_version=4)) == {"stale": 2}


# Credits.


def test_more_groups_at_once_than_there_are_credits_are_a_leak():
    evidence = sound_run()
    evidence.leased.append(Leased("early", 9.2, "worker", {"early": 2}))

    assert found(evidence) == {"credits_leaked": 1}


def test_credits_in_use_that_no_group_accounts_for_are_a_leak():
    assert found(sound_run(), replace(REMAINS, credits_in_use=2, finished=False)) == {"credits_leaked": 2}


def test_a_finished_run_that_uses_credits_leaks_them():
    remains = replace(REMAINS, next_group_index=4, outstanding=1, credits_in_use=1)

    assert found(sound_run(), replace(remains, finished=False)) == {}
    assert found(sound_run(), remains) == {"credits_leaked": 1}


# The real thing.


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_farm_survives_six_kills_and_its_audit_finds_nothing(tmp_path: Path):
    command = [sys.executable, "load_tests/kill.py", "--kills", "6", "--seed", "3", "--folder", str(tmp_path)]

    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=290, check=False)

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["kills"] == 6
    assert [result[kind] for kind in (*KINDS, "crashes")] == [0, 0, 0, 0, 0]
    assert 0 < result["recovery_p50_s"] <= result["recovery_max_s"]
