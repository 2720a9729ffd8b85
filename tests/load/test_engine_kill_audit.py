"""The audit of load_tests/engine_kill.py finds each broken promise in records made by hand, and none in a sound run."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from load_tests.engine_killing.audit import Finding, audit, totals
from load_tests.engine_killing.chaos import Blow
from load_tests.engine_killing.evidence import Answer, Asked, Attempt, Evidence, Progress, Update
from load_tests.engine_killing.report import went_on
from rollfarm.testing import simulated_logprob, simulated_token

CHECKOUT = Path(__file__).parents[2]
VOCABULARY = 1000

ASKED = Asked(at=10.0, prompt_count=3, max_tokens=4)


def answer(spans: Sequence[tuple[int, int]], *, at: float = 30.0, prompt_count: int = 3) -> Answer:
    """What an honest farm answers to "r" when these versions made its tokens."""
    claimed = [version for version, count in spans for _ in range(count)]
    ids = [simulated_token(prompt_count + place, version, VOCABULARY) for place, version in enumerate(claimed)]
    logprobs = [simulated_logprob(token, version) for token, version in zip(ids, claimed, strict=True)]
    return Answer(at, "r", ids, logprobs, spans, is_whole=True)


def sound_run() -> Evidence:
    """Version 1 was served before the request, version 2 while it ran; its second engine continued it."""
    evidence = Evidence()
    evidence.updates += [Update(1, 1.0, 2.0), Update(2, 15.0, 20.0), Update(3, 40.0)]
    evidence.asked["r"] = ASKED
    evidence.attempts += [
        Attempt("r", 0, 10.0, ended_at=18.0, tokens=1, oldest_version=1),
        Attempt("r", 1, 22.0, ended_at=29.0, tokens=3, oldest_version=2),
    ]
    evidence.answers.append(answer([(1, 1), (2, 3)]))
    return evidence


def answered(*answers: Answer, asked: Asked = ASKED) -> Evidence:
    """The sound run with other answers."""
    evidence = sound_run()
    evidence.asked["r"] = asked
    evidence.answers[:] = answers
    return evidence


def refused(reason: str, at: float = 30.0) -> Answer:
    return Answer(at, "r", [], [], [], is_whole=False, refusal=reason)


def found(evidence: Evidence) -> dict[str, int]:
    """What the audit counts, but for zeros."""
    return {kind: count for kind, count in totals(audit(evidence, VOCABULARY)).items() if count}


def test_nothing_is_found_in_a_sound_run():
    assert audit(sound_run(), VOCABULARY) == []


def test_findings_of_a_kind_are_added_up():
    findings = [Finding("lost", 2, "a"), Finding("wrong_version", 1, "b"), Finding("lost", 3, "c")]

    assert totals(findings) == {"lost": 5, "duplicated": 0, "wrong_version": 1}


# Lost.


def test_a_request_that_is_never_answered_is_lost():
    assert found(answered()) == {"lost": 1}


def test_a_request_with_too_few_tokens_is_lost():
    assert found(answered(answer([(1, 3)]))) == {"lost": 1}


def test_a_request_that_was_given_up_at_its_full_length_is_lost():
    assert found(answered(replace(answer([(1, 4)]), is_whole=False))) == {"lost": 1}


def test_a_request_that_was_refused_though_it_demanded_nothing_is_lost():
    assert found(answered(refused("ENGINE_FAILED"))) == {"lost": 1}
    assert found(answered(refused("VERSION_UNAVAILABLE"))) == {"lost": 1}
    assert found(answered(refused("VERSION_NOT_SERVED"))) == {"lost": 1}


def test_an_exact_version_may_be_refused_once_a_newer_one_is_under_way():
    demanding = replace(ASKED, exact_version=1)

    assert found(answered(refused("VERSION_UNAVAILABLE", at=16.0), asked=demanding)) == {}
    assert found(answered(refused("VERSION_UNAVAILABLE", at=14.0), asked=demanding)) == {"lost": 1}


def test_a_version_that_is_not_served_may_be_refused_and_one_that_is_may_not():
    assert found(answered(refused("VERSION_NOT_SERVED"), asked=replace(ASKED, min_version=2))) == {}
    assert found(answered(refused("VERSION_NOT_SERVED"), asked=replace(ASKED, min_version=1))) == {"lost": 1}
    assert found(answered(refused("VERSION_NOT_SERVED"), asked=replace(ASKED, exact_version=3))) == {}


# Duplicated.


def test_a_second_answer_is_a_duplicate_even_if_it_is_the_same():
    right = answer([(1, 1), (2, 3)])

    assert found(answered(right, right, right)) == {"duplicated": 2}


def test_an_answer_that_nobody_asked_for_is_a_duplicate():
    evidence = sound_run()
    evidence.answers.append(replace(answer([(1, 4)]), request_id="other"))

    assert found(evidence) == {"duplicated": 1}


def test_more_tokens_than_were_asked_for_are_duplicated():
    assert found(answered(answer([(1, 5)]))) == {"duplicated": 1}


# Wrong versions.


def test_a_token_of_another_version_than_the_one_claimed_is_found():
    right, other = answer([(1, 1), (2, 3)]), answer([(1, 2), (2, 2)])

    mixed = replace(right, token_ids=other.token_ids, logprobs=other.logprobs)

    assert found(answered(mixed)) == {"wrong_version": 1}


def test_weights_with_a_wrong_content_are_found_behind_the_right_label():
    labelled, made = answer([(2, 4)]), answer([(1, 4)])

    assert found(answered(replace(labelled, token_ids=made.token_ids, logprobs=made.logprobs))) == {"wrong_version": 4}


def test_a_continuation_that_repeats_or_skips_a_token_is_found():
    right = answer([(1, 4)])
    ids = [right.token_ids[0], right.token_ids[0], *right.token_ids[1:3]]

    assert found(answered(replace(right, token_ids=ids))) == {"wrong_version": 3}


def test_a_logprob_of_another_version_is_found():
    right = answer([(1, 4)])

    assert found(answered(replace(right, logprobs=[*right.logprobs[:3], -9.0]))) == {"wrong_version": 1}


def test_spans_that_do_not_describe_the_tokens_are_found():
    right = answer([(1, 4)])

    assert found(answered(replace(right, spans=[(1, 3)]))) == {"wrong_version": 1}
    assert found(answered(replace(right, spans=[(1, 4), (2, 0)]))) == {"wrong_version": 1}
    assert found(answered(replace(right, logprobs=right.logprobs[:2]))) == {"wrong_version": 2}


def test_a_version_that_goes_back_within_a_request_is_found():
    assert found(answered(answer([(2, 3), (1, 1)]))) == {"wrong_version": 1}


def test_a_version_that_nobody_had_published_is_found():
    assert found(answered(answer([(1, 2), (3, 2)], at=39.0))) == {"wrong_version": 2}
    assert found(answered(answer([(1, 2), (3, 2)], at=41.0))) == {}


def test_a_version_older_than_what_was_served_when_the_request_was_made_is_found():
    assert found(answered(answer([(0, 1), (1, 3)]))) == {"wrong_version": 1}
    assert found(answered(answer([(0, 1), (1, 3)]), asked=replace(ASKED, at=1.9))) == {}


def test_a_version_that_the_request_forbade_is_found():
    mixed = answer([(1, 1), (2, 3)])

    assert found(answered(mixed, asked=replace(ASKED, min_version=2))) == {"wrong_version": 1}
    assert found(answered(mixed, asked=replace(ASKED, exact_version=1))) == {"wrong_version": 3}
    assert found(answered(answer([(2, 4)]), asked=replace(ASKED, exact_version=2))) == {}


def test_what_an_engine_makes_with_an_old_version_after_the_commit_is_found_though_it_was_not_answered():
    evidence = sound_run()
    evidence.attempts.append(Attempt("r", 2, given_at=21.5, tokens=7, oldest_version=1))

    assert found(evidence) == {"wrong_version": 7}

    evidence.attempts[-1] = replace(evidence.attempts[-1], given_at=20.5)
    assert found(evidence) == {}


# What is measured.


def test_a_victim_goes_on_with_its_first_token_or_its_answer_after_the_blow():
    evidence = sound_run()
    attempts = [Attempt(name, 1, 0.0) for name in ("r", "other", "never")]
    evidence.progress += [Progress(at, attempts[0]) for at in (16.0, 18.0, 18.5)] + [Progress(19.5, attempts[1])]
    blow = Blow("kill", 0, at=17.0, victims=frozenset({"r", "other", "never"}), recovery_seconds=5.0)

    assert sorted(went_on(evidence, blow)) == [1.0, 2.5]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_real_engine_is_killed_and_nothing_is_lost():
    command = [sys.executable, "load_tests/engine_kill.py", "--kills", "1", "--seed", "3", "--update-seconds", "1"]

    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=170)

    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    assert (figures["lost"], figures["duplicated"], figures["wrong_version"]) == (0, 0, 0)
    assert figures["kills"] == 1
    assert figures["resumptions"] > 0
    assert figures["updates"] > 1
