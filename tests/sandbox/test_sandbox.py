"""Programs that do what they should: what they see, how they end, and that runs do not meet."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from load_tests.escapes.host import left, marked
from rollfarm import sandbox
from rollfarm.errors import InvalidArgument, SandboxFailed, SandboxUnavailable
from rollfarm.sandbox import PYTHON, Limits, Program, Sandbox, SandboxConfig
from rollfarm.sandbox.cells import Cells
from rollfarm.v1 import trajectory_pb2
from tests.sandbox.levels import LEVELS, opened

AMPLE = Limits(seconds=60.0, cpu_seconds=30)
NAMED = "import ctypes; ctypes.CDLL(None).prctl(15, b'{}', 0, 0, 0)\n"


@pytest.fixture(params=LEVELS)
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with opened(request.param) as sandbox:
        yield sandbox


def script(code: str, *arguments: str, stdin: str | bytes = "", **files: str) -> Program:
    return Program({"main.py": code, **files}, [PYTHON, "main.py", *arguments], stdin)


async def test_a_script_sees_its_arguments_its_input_and_its_files(box: Sandbox):
    program = Program(
        {"main.py": "import sys, helper\nprint(sys.argv, input(), helper.word, __name__)", "helper.py": "word = 'är'"},
        [PYTHON, "main.py", "one"],
        "typed\n",
    )

    finished = await box.run(program, AMPLE)

    assert finished.stdout == "['main.py', 'one'] typed är __main__\n"
    assert (finished.ending, finished.exit_code, finished.succeeded) == ("exited", 0, True)


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [
        ("raise SystemExit", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit('bad')", 1, "bad\n"),
        ("exit(3)", 3, ""),
        (
            "1/0",
            1,
            'Traceback (most recent call last):\n  File "main.py", line 1, in <module>\n    1/0\n    ~^~\n'
            "ZeroDivisionError: division by zero\n",
        ),
        ("import os; os._exit(9)", 9, ""),
    ],
)
async def test_a_script_ends_as_under_a_python_of_its_own(box: Sandbox, code: str, exit_code: int, stderr: str):
    finished = await box.run(script(code), AMPLE)

    assert (finished.ending, finished.exit_code) == ("exited", exit_code)
    assert finished.stderr == stderr


async def test_what_a_script_leaves_for_its_end_is_done(box: Sandbox):
    code = """
import atexit, subprocess, sys, threading, time
atexit.register(lambda: print("at exit", open("file").read()))
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
unclosed = open("file", "w", buffering=1)
unclosed.write("written\\n")
print("main")
"""

    finished = await box.run(script(code), AMPLE)

    assert finished.stdout == "main\nthread\nat exit written\n\n"


async def test_other_commands_run_too_and_a_missing_one_is_127(box: Sandbox):
    module = await box.run(Program({"shown.py": "print('as a module')"}, [PYTHON, "-m", "shown"]), AMPLE)
    shell = await box.run(Program({}, ["sh", "-c", "cat; exit 4"], "typed"), AMPLE)
    missing = await box.run(Program({}, ["no-such-program"]), AMPLE)

    # -I, by which the sandbox's Python starts, is not handed on: -m finds what is in the folder.
    assert module.stdout == "as a module\n"
    assert (shell.stdout, shell.exit_code) == ("typed", 4)
    assert (missing.exit_code, missing.stderr) == (127, "no-such-program: No such file or directory\n")


async def test_output_that_is_no_utf_8_is_replaced_and_long_input_arrives(box: Sandbox):
    binary = await box.run(script("import os; os.write(1, b'a\\xff\\x00b'); os.write(2, '\\u20ac'.encode())"), AMPLE)
    long = await box.run(script("import sys; print(len(sys.stdin.read()))", stdin="x" * 3_000_000), AMPLE)
    unread = await box.run(script("print('done')", stdin="x" * 3_000_000), AMPLE)

    assert (binary.stdout, binary.stderr) == ("a\N{REPLACEMENT CHARACTER}\0b", "€")
    assert long.stdout == "3000000\n"
    assert unread.stdout == "done\n"


async def test_output_is_kept_up_to_the_limit(box: Sandbox):
    finished = await box.run(script("print('x' * 5000)"), AMPLE.model_copy(update={"output_bytes": 1000}))

    assert (finished.ending, finished.stdout) == ("output", "x" * 1000)


async def test_what_a_program_wrote_before_its_time_was_up_is_kept(box: Sandbox):
    finished = await box.run(script("import time; print('begun', flush=True); time.sleep(99)"), Limits(seconds=2.0))

    assert (finished.ending, finished.exit_code, finished.stdout) == ("timeout", None, "begun\n")


async def test_a_program_ends_with_its_first_process_though_others_hold_its_output(box: Sandbox):
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(99)\nprint('done')"

    finished = await box.run(script(code), AMPLE)

    assert (finished.ending, finished.stdout) == ("exited", "done\n")
    assert finished.seconds < 30


async def test_a_run_finds_nothing_of_the_one_before(box: Sandbox):
    places = "[os.getcwd(), os.environ['TMPDIR'], '/tmp', '/var/tmp', '/dev/shm']"
    leave = f"""
import os
for place in {places}:
    try:
        open(place + "/left-behind", "w").write("secret")
        print("left in", place)
    except OSError:
        pass
"""
    find = f"""
import os
found = []
for place in {places}:
    if os.path.exists(place + "/left-behind"):
        found.append(place)
print(found)
"""

    first = [await box.run(script(leave), AMPLE) for _ in range(3)]
    then = [await box.run(script(find), AMPLE) for _ in range(3)]

    assert all("left in" in finished.stdout for finished in first)
    assert {finished.stdout for finished in then} == {"[]\n"}


async def test_runs_at_the_same_time_cannot_read_or_signal_each_other(box: Sandbox):
    hold = (
        "import os, time\nopen('file', 'w').write('secret')\nprint(os.getpid(), os.getcwd(), flush=True)\ntime.sleep(2)"
    )
    search = """
import os, time
time.sleep(0.5)
found = []
home = os.getcwd()
parts = home.split("/")
others = [home]
for number in range(20):
    others.append("/".join([*parts[:-2], str(number), parts[-1]]))
for other in others[1:]:
    if other != home:
        try:
            found.append(open(other + "/file").read())
        except OSError:
            pass
for pid in range(2, 100000):
    if pid != os.getpid():
        try:
            os.kill(pid, 0)
            found.append(pid)
        except OSError:
            pass
print(found)
"""

    holding, searching = await asyncio.gather(box.run(script(hold), AMPLE), box.run(script(search), AMPLE))

    assert holding.succeeded
    assert searching.stdout == "[]\n"


async def test_a_cancelled_run_is_ended(box: Sandbox):
    marker = "cancelled-run"
    running = asyncio.create_task(
        box.run(script(NAMED.format(marker) + "import time, os\nos.fork()\ntime.sleep(99)"), AMPLE)
    )
    await _begun(marker)

    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running

    assert await left(marker) == []
    assert (await box.run(script("print(1)"), AMPLE)).succeeded


async def test_many_runs_share_few_workers(box: Sandbox):
    finished = await asyncio.gather(*[box.run(script(f"print({number})"), AMPLE) for number in range(12)])

    assert [run.stdout for run in finished] == [f"{number}\n" for number in range(12)]


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_left_of_a_service_that_is_killed(level: str):
    with opened(level):
        pass  # skips where there is none
    service = f"""
import asyncio
from rollfarm.sandbox import *
from tests.sandbox.levels import opened
async def main():
    with opened({level!r}) as box:
        code = {NAMED.format("killed-service")!r} + "import os, time\\nos.fork() or os.setsid()\\ntime.sleep(99)"
        await box.run(Program({{"main.py": code}}, [PYTHON, "main.py"]), Limits(seconds=90.0))
asyncio.run(main())
"""
    before = _folders()
    process = subprocess.Popen([sys.executable, "-c", service], env=_environment())
    asyncio.run(_begun("killed-service"))

    process.kill()
    process.wait()

    assert asyncio.run(left("killed-service")) == []
    deadline = time.monotonic() + 10
    while _folders() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _folders() - before


async def test_a_keeper_that_dies_costs_the_runs_that_it_had_and_no_more(box: Sandbox):
    marker = "keeper-dies"
    code = NAMED.format(marker) + "import time; time.sleep(99)"
    running = asyncio.create_task(box.run(script(code), Limits(seconds=1.5)))
    await _begun(marker)
    assert isinstance(box._cells, Cells)

    os.kill(box._cells._keeper.pid, signal.SIGKILL)

    with contextlib.suppress(SandboxFailed):
        assert (await running).ending == "timeout"
    assert (await box.run(script("print(1)"), AMPLE)).succeeded


def test_one_sandbox_serves_one_event_loop_after_the_other(box: Sandbox):
    async def run() -> str:
        return (await box.run(script("print(1)"), AMPLE)).stdout

    assert [asyncio.run(run()), asyncio.run(run())] == ["1\n", "1\n"]


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b", "", "nul\0"])
def test_a_file_outside_of_the_folder_is_refused(name: str):
    with pytest.raises(InvalidArgument, match="within the program's folder"):
        Program({name: ""}, ["true"])


async def test_more_files_than_the_sandbox_has_room_for_are_refused(box: Sandbox):
    with pytest.raises(InvalidArgument, match="of 67108864 at most"):
        await box.run(script(""), Limits(file_bytes=2**30))


async def test_a_machine_without_any_level_refuses_and_says_what_each_lacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("rollfarm.sandbox.inside.landlock.version", lambda: 0)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    box = Sandbox(SandboxConfig())

    assert box.level == trajectory_pb2.SANDBOX_LEVEL_REFUSED
    with pytest.raises(SandboxUnavailable, match=r"apt-get install bubblewrap.*no Landlock.*docker"):
        await box.run(script("print(1)"))


def test_the_shared_sandbox_is_one_and_as_configured():
    sandbox.configure(SandboxConfig(workers=3))
    try:
        assert sandbox.shared() is sandbox.shared()
        assert sandbox.shared()._config.workers == 3
    finally:
        sandbox.configure(SandboxConfig())


async def _begun(marker: str) -> None:
    """Wait for a program that calls itself so."""
    async with asyncio.timeout(60):
        while not marked(marker):  # noqa: ASYNC110 (nobody tells of it)
            await asyncio.sleep(0.02)


def _folders() -> set[str]:
    return {path.name for path in Path("/tmp").glob("rollfarm-sandbox-*")}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path.cwd())}
