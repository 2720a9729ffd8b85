"""Agents as real processes: what they read, print and find, and that nothing of them is left."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from env_manager.agent_process import ProcessRunner
from env_manager.runners import Ran

LONG = 60.0


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program]


async def run(
    program: str, text: str = "", *, seconds: float = LONG, output_bytes: int = 1000, **variables: str
) -> Ran:
    return await ProcessRunner(python(program), variables, output_bytes=output_bytes).run(text, {}, seconds)


async def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not ready():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_it_reads_the_task_and_what_it_prints_is_the_answer():
    ran = await run("import sys; print('and', sys.stdin.read().upper())", "what is one\n\nör two")

    assert ran == Ran(answer="and WHAT IS ONE\n\nÖR TWO", status=0)


async def test_an_agent_that_never_reads_a_long_task_is_not_waited_for():
    assert (await run("print('done')", "x" * 1_000_000)).answer == "done"


async def test_one_that_fails_tells_its_status_and_its_last_complaint():
    ran = await run("import sys; sys.stderr.write('x' * 5000 + ' no luck'); sys.exit(3)")

    assert (ran.status, len(ran.complaint)) == (3, 2000)
    assert ran.complaint.endswith("x no luck")


async def test_one_that_is_killed_has_the_signals_status():
    assert (await run("import os; os.kill(os.getpid(), 9)")).status == 128 + signal.SIGKILL


async def test_one_that_cannot_be_started_says_why():
    ran = await ProcessRunner(["no-such-agent"], {}, output_bytes=100).run("", {}, LONG)

    assert ran.status == 127
    assert "cannot be started: " in ran.complaint
    assert "no-such-agent" in ran.complaint


async def test_of_huge_output_the_end_is_kept():
    ran = await run("import sys\nfor _ in range(200): sys.stdout.write('x' * 100_000)\nprint('end')", output_bytes=10)

    assert ran.answer == "xxxxxxend"


LEAVES_CHILDREN = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
child = subprocess.Popen(sleeper)
stranger = subprocess.Popen(sleeper, start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, stranger.pid, os.getpid(), flush=True)
if os.environ.get("STAYS"):
    time.sleep(1000)
"""
"""Leaves one child in its group and one in a session of its own."""


async def test_children_that_it_leaves_behind_are_killed():
    ran = await run(LEAVES_CHILDREN)

    assert ran.status == 0
    assert all(is_gone(int(pid)) for pid in ran.answer.split())


async def test_one_that_hangs_is_killed_with_its_children_and_what_it_printed_so_far_is_kept():
    ran = await run(LEAVES_CHILDREN, seconds=1.5, STAYS="yes")

    assert (ran.status, len(ran.answer.split())) == (None, 3)
    assert all(is_gone(int(pid)) for pid in ran.answer.split())


async def test_a_cancelled_one_is_killed_before_the_cancellation_is_over(tmp_path: Path):
    pids = tmp_path / "pids"
    program = LEAVES_CHILDREN.replace("print(", f"print(file=open({str(pids)!r}, 'w'), *(").replace("flush=True)", "))")
    running = asyncio.create_task(run(program, STAYS="yes"))
    await until(lambda: pids.exists() and len(pids.read_text().split()) == 3)

    running.cancel()
    await asyncio.wait([running])

    assert running.cancelled()
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())


async def test_nothing_of_it_outlives_a_killed_env_manager(tmp_path: Path):
    pids = tmp_path / "pids"
    program = LEAVES_CHILDREN.replace("print(", f"print(file=open({str(pids)!r}, 'w'), *(").replace("flush=True)", "))")
    owner = (
        "import asyncio\nfrom env_manager.agent_process import ProcessRunner\n"
        f"runner = ProcessRunner({python(program)!r}, {{'STAYS': 'yes'}}, output_bytes=10)\n"
        "asyncio.run(runner.run('', {}, 1000))"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", owner)
    await until(lambda: pids.exists() and len(pids.read_text().split()) == 3)

    process.kill()
    await process.wait()

    await until(lambda: all(is_gone(int(pid)) for pid in pids.read_text().split()))


async def test_it_finds_nothing_of_env_managers_environment_but_what_it_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("TZ", "UTC")

    ran = await run("import os; print(sorted(os.environ), os.environ['GIVEN'])", GIVEN="this")

    assert "SECRET_TOKEN" not in ran.answer
    assert ran.answer.endswith("this")
    found = set(ran.answer.partition("]")[0].strip("[").replace("'", "").split(", "))
    assert found - {"LANG", "LC_ALL", "SSL_CERT_FILE", "LC_CTYPE"} == {"GIVEN", "HOME", "PATH", "TMPDIR", "TZ"}


async def test_it_works_in_a_new_folder_of_its_own_that_is_deleted():
    looking = "print(os.getcwd(), os.path.realpath(os.environ['HOME']), *os.listdir())"
    ran = await run(f"import os; open('note', 'w'); {looking}")

    folder, home, *files = ran.answer.split()
    assert (home, files) == (folder, ["note"])
    await until(lambda: not Path(folder).exists())


async def test_a_file_of_the_command_is_found_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_agent.py").write_text("print('found')")
    monkeypatch.chdir(tmp_path)
    runner = ProcessRunner(["python", "my_agent.py"], {}, output_bytes=100)

    assert (await runner.run("", {}, LONG)).answer == "found"
