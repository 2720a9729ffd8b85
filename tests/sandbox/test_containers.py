"""Containers around programs, by a real daemon; skipped where none answers or the image is missing."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import docker
import pytest

from load_tests.escapes import ESCAPES
from load_tests.escapes.escape import PROOF
from load_tests.escapes.host import Host
from rollfarm.sandbox import PYTHON, Limits, Program, Sandbox, SandboxConfig
from rollfarm.sandbox.containers import ContainerRunner, problem
from rollfarm.v1 import trajectory_pb2

IMAGE = SandboxConfig().image
AMPLE = Limits(seconds=60.0, cpu_seconds=30)
BRIEF = Limits(seconds=2.0, output_bytes=100)
SAMPLE = {
    "fork bomb",
    "memory bomb of many processes",
    "TCP to the host",
    "reading /etc/shadow",
    "reading a file that everybody may read",
    "the service's environment",
    "mount",
    "becoming root",
    "killing everybody",
    "a daemon that outlives the run",
}
"""Of the escapes: a container takes a second to start."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(problem(IMAGE)), reason=f"docker: {problem(IMAGE)}")]


@pytest.fixture
def box() -> Iterator[Sandbox]:
    sandbox = Sandbox(SandboxConfig(level="docker", workers=2))
    yield sandbox
    sandbox.close()


async def test_a_program_runs_in_a_container_as_at_any_level(box: Sandbox):
    code = "import os\nprint(input(), os.getuid() > 0)\nraise SystemExit(3)"

    finished = await box.run(Program({"main.py": code}, [PYTHON, "main.py"], "typed"), AMPLE)
    endless = await box.run(Program({}, ["sleep", "99"]), BRIEF)

    assert (finished.ending, finished.exit_code, finished.stdout) == ("exited", 3, "typed True\n")
    assert endless.ending == "timeout"
    assert box.level == trajectory_pb2.SANDBOX_LEVEL_DOCKER


async def test_programs_do_not_break_out_of_a_container(box: Sandbox):
    sample = [escape for escape in ESCAPES if escape.name in SAMPLE]
    with Host() as host:
        outcomes = await host.attempt_all(sample, box)
        harm = host.harm()

    assert {name: outcome.finished for name, outcome in outcomes.items() if PROOF in outcome.finished.stdout} == {}
    assert {name: outcome.left for name, outcome in outcomes.items() if outcome.left} == {}
    assert harm == []


async def test_what_one_command_writes_is_there_for_the_next_in_the_same_container_alone():
    async with ContainerRunner(IMAGE) as first, ContainerRunner(IMAGE) as second:
        made = await first.run(
            Program({"pkg/tool.py": "open('kept', 'w').write(input())"}, [PYTHON, "pkg/tool.py"], "it")
        )
        there = await first.run(Program({}, ["cat", "kept"]))
        elsewhere = await second.run(Program({}, ["cat", "kept"]))

    assert made.succeeded, made
    assert there.stdout == "it"
    assert elsewhere.exit_code == 1


async def test_a_command_that_goes_on_is_killed_and_the_container_takes_the_next():
    async with ContainerRunner(IMAGE) as runner:
        late = await runner.run(Program({}, ["sh", "-c", "echo begun; sleep 98 & sleep 99"]), BRIEF)
        flood = await runner.run(Program({}, ["yes"]), BRIEF)
        crash = await runner.run(Program({}, ["sh", "-c", "kill -9 $$"]), AMPLE)
        left = await runner.run(Program({}, ["sh", "-c", "cat /proc/[0-9]*/cmdline"]), AMPLE)

    assert (late.ending, late.exit_code, late.stdout) == ("timeout", None, "begun\n")
    assert (flood.ending, len(flood.stdout)) == ("output", 100)
    assert (crash.ending, crash.exit_code) == ("killed", -9)
    assert "98" not in left.stdout


async def test_a_container_reaches_no_network_and_gains_no_privilege():
    async with ContainerRunner(IMAGE) as runner:
        links = await runner.run(Program({}, ["cat", "/proc/net/dev"]))
        status = await runner.run(Program({}, ["grep", "-E", "NoNewPrivs|CapEff|^Uid", "/proc/self/status"]))

    assert [line.split(":")[0].strip() for line in links.stdout.splitlines()[2:]] == ["lo"]
    assert "NoNewPrivs:\t1" in status.stdout
    assert "CapEff:\t0000000000000000" in status.stdout
    assert "Uid:\t65534" in status.stdout


def test_a_container_goes_with_the_service_that_is_killed():
    service = f"""
import asyncio
from rollfarm.sandbox import *
from rollfarm.sandbox.containers import ContainerRunner
async def main():
    async with ContainerRunner({IMAGE!r}) as runner:
        print(runner._container.id, flush=True)
        await runner.run(Program({{}}, ["sleep", "99"]), Limits(seconds=90.0))
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", service], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    made = process.stdout.readline().strip()

    process.kill()
    process.wait()

    deadline = time.monotonic() + 60
    with contextlib.closing(docker.from_env()) as client:
        while client.containers.list(all=True, filters={"id": made}) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert client.containers.list(all=True, filters={"id": made}) == []
