"""Holds what was asked against what was answered: pure functions from evidence to findings.

No word of llm_proxy is believed that the client, the trainer or the engines' side of the wire can contradict. A token
is known beforehand: it is a function of its position and of the number that the trainer sent as the weights.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from load_tests.engine_killing.evidence import Answer, Asked, Evidence
from rollfarm.testing import simulated_logprob, simulated_token

Kind = Literal["lost", "duplicated", "wrong_version"]
KINDS: tuple[Kind, ...] = ("lost", "duplicated", "wrong_version")

SETTLE_SECONDS = 1.0
"""How late the auditor may see what passed before something else."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise."""

    kind: Kind
    count: int
    """How many requests, answers or tokens."""
    what: str


def audit(evidence: Evidence, vocabulary_size: int) -> list[Finding]:
    """Every broken promise of a run that is over."""
    findings = [*_unanswered(evidence), *_repeated(evidence)]
    for answer in evidence.answers:
        asked = evidence.asked.get(answer.request_id)
        if asked is None:
            findings.append(Finding("duplicated", 1, f"{answer.request_id} was answered and never asked"))
        elif answer.refusal:
            findings += _false_refusal(evidence, asked, answer)
        else:
            findings += _length(asked, answer)
            findings += _content(asked, answer, vocabulary_size)
            findings += _versions(evidence, asked, answer)
    return [*findings, *_outdated_attempts(evidence)]


def totals(findings: list[Finding]) -> dict[Kind, int]:
    """The sum of each kind."""
    return {kind: sum(finding.count for finding in findings if finding.kind == kind) for kind in KINDS}


def _unanswered(evidence: Evidence) -> Iterator[Finding]:
    answered = {answer.request_id for answer in evidence.answers}
    for request_id in evidence.asked.keys() - answered:
        yield Finding("lost", 1, f"{request_id} was never answered")


def _repeated(evidence: Evidence) -> Iterator[Finding]:
    for request_id, count in Counter(answer.request_id for answer in evidence.answers).items():
        if count > 1:
            yield Finding("duplicated", count - 1, f"{request_id} was answered {count} times")


def _false_refusal(evidence: Evidence, asked: Asked, answer: Answer) -> Iterator[Finding]:
    """A request may be refused for its version alone, and only where that is true.

    VERSION_UNAVAILABLE: a newer one was on its way when the answer came. VERSION_NOT_SERVED: the one that it asks for
    was not served yet when it was asked.
    """
    if answer.refusal == "VERSION_UNAVAILABLE":
        newest = max((update.version for update in evidence.updates if update.began < answer.at), default=0)
        is_true = asked.exact_version is not None and newest > asked.exact_version
    else:
        served = _committed_before(evidence, asked.at)
        is_true = answer.refusal == "VERSION_NOT_SERVED" and asked.least_version > served
    if not is_true:
        yield Finding("lost", 1, f"{answer.request_id} was refused as {answer.refusal}, which is not so")


def _length(asked: Asked, answer: Answer) -> Iterator[Finding]:
    made = len(answer.token_ids)
    if made < asked.max_tokens or not answer.is_whole:
        yield Finding("lost", 1, f"{answer.request_id} has {made} of {asked.max_tokens} tokens")
    elif made > asked.max_tokens:
        yield Finding("duplicated", 1, f"{answer.request_id} has {made} tokens, and {asked.max_tokens} were asked for")


def _content(asked: Asked, answer: Answer, vocabulary_size: int) -> Iterator[Finding]:
    """Each token and log-probability is what the claimed version makes at this position."""
    claimed = [version for version, count in answer.spans for _ in range(count)]
    stamped, made, logged = len(claimed), len(answer.token_ids), len(answer.logprobs)
    if not (stamped == made == logged and all(count > 0 for _, count in answer.spans)):
        detail = f"{answer.request_id} has {made} tokens, {logged} log-probabilities and versions for {stamped}"
        yield Finding("wrong_version", max(1, abs(stamped - made), abs(logged - made)), detail)
        return
    wrong = 0
    for at, (token, logprob, version) in enumerate(zip(answer.token_ids, answer.logprobs, claimed, strict=True)):
        expected = simulated_token(asked.prompt_count + at, version, vocabulary_size)
        wrong += token != expected or logprob != simulated_logprob(expected, version)
    if wrong:
        yield Finding("wrong_version", wrong, f"{wrong} tokens of {answer.request_id} are not of the version claimed")


def _versions(evidence: Evidence, asked: Asked, answer: Answer) -> Iterator[Finding]:
    """The versions claimed existed, were allowed, do not go back, and are no older than what was served when asked."""
    published = {0, *(update.version for update in evidence.updates if update.began < answer.at)}
    served = _committed_before(evidence, asked.at)
    newest = 0
    for version, count in answer.spans:
        if problem := _problem(asked, version, published=published, served=served, newest=newest):
            yield Finding("wrong_version", count, f"{count} tokens of {answer.request_id} claim {version}: {problem}")
        newest = max(newest, version)


def _problem(asked: Asked, version: int, *, published: set[int], served: int, newest: int) -> str:
    if version not in published:
        return "nobody had published it"
    if version < newest:
        return f"{newest} came before it"
    if version < served:
        return f"{served} was served before the request was made"
    if asked.min_version is not None and version < asked.min_version:
        return f"at least {asked.min_version} was demanded"
    if asked.exact_version is not None and version != asked.exact_version:
        return f"exactly {asked.exact_version} was demanded"
    return ""


def _outdated_attempts(evidence: Evidence) -> Iterator[Finding]:
    """What an engine is given once a version is committed, it makes with that version or a later one."""
    for attempt in evidence.attempts:
        served = _committed_before(evidence, attempt.given_at - SETTLE_SECONDS)
        if attempt.oldest_version is not None and attempt.oldest_version < served:
            detail = f"engine {attempt.engine} made tokens of {attempt.request_id} with {attempt.oldest_version}"
            yield Finding("wrong_version", attempt.tokens, f"{detail}, given to it after {served} was served")


def _committed_before(evidence: Evidence, at: float) -> int:
    versions = (each.version for each in evidence.updates if each.committed_at is not None and each.committed_at < at)
    return max(versions, default=0)
