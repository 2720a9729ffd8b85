"""Every program of the suite, at every level that this machine has."""

import asyncio
from collections.abc import Iterator

import pytest

from load_tests.escapes import ESCAPES
from load_tests.escapes.escape import PROOF, Escape
from load_tests.escapes.host import Host, Outcome
from tests.sandbox.levels import LEVELS, opened

BY_NAME = {escape.name: escape for escape in ESCAPES}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with Host() as bait:
        yield bait


@pytest.fixture(scope="module", params=LEVELS)
def outcomes(request: pytest.FixtureRequest, host: Host) -> dict[str, Outcome]:
    """How each program fared at one level; all of them run at the same time."""

    async def run() -> dict[str, Outcome]:
        with opened(request.param, workers=8) as sandbox:
            return await host.attempt_all(ESCAPES, sandbox)

    return asyncio.run(run())


@pytest.mark.parametrize("name", BY_NAME)
def test_a_program_does_not_break_out(name: str, outcomes: dict[str, Outcome]):
    escape, outcome = BY_NAME[name], outcomes[name]

    assert PROOF not in outcome.finished.stdout, outcome.finished
    assert outcome.finished.ending in escape.endings, outcome.finished
    assert escape.says in outcome.finished.stdout, outcome.finished
    assert outcome.left == []


def test_the_host_is_unharmed_by_all_of_them(outcomes: dict[str, Outcome], host: Host):
    assert outcomes
    assert host.harm() == []


@pytest.mark.parametrize("escape", [escape for escape in ESCAPES if escape.control], ids=lambda escape: escape.name)
def test_without_a_sandbox_the_program_succeeds(escape: Escape, host: Host):
    assert PROOF in host.attempt_plainly(escape)
