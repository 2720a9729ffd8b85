# ruff: noqa: ASYNC110, ASYNC220 - processes of other programs cannot notify a test
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from rollfarm.ports import free_port
from rollfarm.rpc import is_serving
from rollfarm.service import SUPERVISED
from rollfarm.up.config import UpConfig
from rollfarm.up.farm import ProcessSpec
from rollfarm.up.process import Child, ProcessFailed, State
from rollfarm.up.supervisor import Supervisor
from rollfarm.valkey import valkey_answers

CHILD = str(Path(__file__).parent / "child.py")
ENV = {SUPERVISED: "1", "PYTHONPATH": str(Path(__file__).parents[2])}
UP = UpConfig(drain_seconds=10, start_seconds=30)


def spec(
    name: str, *arguments: object, stage: int = 0, port: int = 0, once: bool = False, gang: str = ""
) -> ProcessSpec:
    return ProcessSpec(
        name,
        (sys.executable, CHILD, *map(str, arguments)),
        stage=stage,
        address=f"127.0.0.1:{port}" if port else "",
        once=once,
        gang=gang,
        env=ENV,
    )


def supervisor(tmp_path: Path, *specs: ProcessSpec, up: UpConfig = UP) -> Supervisor:
    return Supervisor(specs, up, logs=tmp_path, say=lambda text: None)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


async def nothing() -> None:
    return None


def pid_of(child: Child) -> int:
    assert child.pid is not None
    return child.pid


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_service_killed_for_real_is_started_again_and_serves_on_its_port(tmp_path) -> None:
    port = free_port()
    farm = supervisor(tmp_path, spec("service", "serve", port, port=port))
    (child,) = farm.children

    async def work() -> tuple[int, int]:
        first = pid_of(child)
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.state is State.RUNNING and child.pid != first)
        assert await is_serving(f"127.0.0.1:{port}", timeout=5)
        return first, pid_of(child)

    first, second = await farm.run(work)

    assert farm.restarts == child.restarts == 1
    assert gone(first)
    assert gone(second)
    assert not await is_serving(f"127.0.0.1:{port}", timeout=1)


async def test_what_a_dead_service_left_in_its_group_is_killed(tmp_path) -> None:
    pids = tmp_path / "pids"
    farm = supervisor(tmp_path, spec("parent", "parent", pids))
    (child,) = farm.children

    async def work() -> int:
        await until(pids.exists)
        await until(lambda: pids.read_text().endswith("\n"))
        grandchild = int(pids.read_text())
        os.kill(pid_of(child), signal.SIGKILL)
        await until(lambda: gone(grandchild))
        return grandchild

    assert gone(await farm.run(work))


async def test_processes_are_drained_in_the_opposite_order_of_their_start(tmp_path) -> None:
    order = tmp_path / "order"
    farm = supervisor(
        tmp_path,
        spec("store", "drained", order, "store"),
        spec("buffer", "drained", order, "buffer", stage=1),
        spec("trainer", "drained", order, "trainer", stage=1),
    )

    async def work() -> None:
        # A child that has not yet set its signal handler would die without a note.
        await until(lambda: all(catches_sigterm(child) for child in farm.children))

    await farm.run(work)

    assert order.read_text().split() == ["trainer", "buffer", "store"]
    assert [child.state for child in farm.children] == [State.STOPPED] * 3


def catches_sigterm(child: Child) -> bool:
    for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


async def test_a_process_that_ignores_sigterm_is_killed_when_its_time_to_drain_is_over(tmp_path) -> None:
    pids = tmp_path / "pids"
    farm = supervisor(tmp_path, spec("stubborn", "stubborn", pids), up=UpConfig(drain_seconds=0.2))

    await farm.run(lambda: until(lambda: pids.exists() and pids.read_text().endswith("\n")))

    assert gone(int(pids.read_text()))


@pytest.mark.parametrize("status", [2, 3, 1])
async def test_a_service_that_cannot_start_ends_the_farm_with_its_status_and_its_last_words(tmp_path, status) -> None:
    farm = supervisor(tmp_path, spec("store", "sleep"), spec("buffer", "exit", status, stage=1, port=free_port()))

    with pytest.raises(ProcessFailed, match=f"buffer ended with exit status {status}") as failed:
        await farm.run(nothing)

    assert failed.value.status == status
    assert failed.value.tail == "the reason is in the log"
    assert all(not child.alive for child in farm.children)


async def test_a_service_that_crashes_again_and_again_ends_the_farm(tmp_path) -> None:
    farm = supervisor(tmp_path, spec("touchy", "touch", tmp_path / "starts"), up=UpConfig(max_restarts=1))

    with pytest.raises(ProcessFailed, match="crash number 2 within 300 s"):
        await farm.run(asyncio.Event().wait)

    assert len((tmp_path / "starts").read_text().split()) == 2


async def test_a_process_that_does_its_work_and_ends_lets_the_next_stage_start(tmp_path) -> None:
    farm = supervisor(tmp_path, spec("create", "touch", tmp_path / "made", once=True), spec("user", "sleep", stage=1))

    async def work() -> bool:
        return (tmp_path / "made").exists()

    assert await farm.run(work)
    assert [child.state for child in farm.children] == [State.DONE, State.STOPPED]


async def test_ranks_of_a_gang_live_and_die_together(tmp_path) -> None:
    farm = supervisor(tmp_path, *(spec(f"trainer-{rank}", "sleep", gang="trainer") for rank in range(2)))

    async def work() -> None:
        before = [pid_of(child) for child in farm.children]
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: all(child.state is State.RUNNING for child in farm.children) and farm.restarts == 1)
        assert not {child.pid for child in farm.children} & set(before)

    await farm.run(work)

    assert [child.restarts for child in farm.children] == [1, 1]


async def test_cancelling_the_farm_while_it_starts_leaves_no_process(tmp_path) -> None:
    farm = supervisor(tmp_path, spec("slow", "sleep", port=free_port()))
    running = asyncio.create_task(farm.run(nothing))
    await until(lambda: farm.children[0].pid)
    pid = pid_of(farm.children[0])

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert gone(pid)


async def test_a_service_that_never_becomes_ready_is_named(tmp_path) -> None:
    farm = supervisor(tmp_path, spec("slow", "sleep", port=free_port()), up=UpConfig(start_seconds=0.3))

    with pytest.raises(ProcessFailed, match=r"slow was not ready within 0.3 s.*up.start_seconds"):
        await farm.run(nothing)


async def test_hurrying_kills_at_once_what_will_not_drain(tmp_path) -> None:
    pids = tmp_path / "pids"
    farm = supervisor(tmp_path, spec("stubborn", "stubborn", pids), up=UpConfig(drain_seconds=60))
    farm.hurry()

    async with asyncio.timeout(20):
        await farm.run(lambda: until(lambda: pids.exists() and pids.read_text().endswith("\n")))

    assert not farm.children[0].alive


@pytest.fixture
async def orphan() -> AsyncIterator[subprocess.Popen[bytes]]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, CHILD, "serve", str(port)], stdin=subprocess.PIPE, env={**os.environ, **ENV}
    )
    while not await is_serving(f"127.0.0.1:{port}", timeout=1):
        await asyncio.sleep(0.05)
    yield process
    process.kill()


async def test_a_service_drains_when_its_supervisor_is_gone(orphan: subprocess.Popen[bytes]) -> None:
    assert orphan.stdin is not None

    orphan.stdin.close()

    assert await asyncio.to_thread(orphan.wait, 10) == 0


async def test_the_leash_ends_valkey_when_its_supervisor_is_gone(tmp_path) -> None:
    socket = tmp_path / "s"
    leash = subprocess.Popen(
        [sys.executable, "-m", "rollfarm.up.leash", str(tmp_path), str(socket)],
        stdin=subprocess.PIPE,
        env={**os.environ, **ENV},
    )
    assert leash.stdin is not None
    async with asyncio.timeout(10):
        while not await valkey_answers(socket):
            await asyncio.sleep(0.02)

    leash.stdin.close()

    assert await asyncio.to_thread(leash.wait, 10) == 0


async def test_cancelling_the_farm_while_it_drains_does_not_cut_the_drain_short(tmp_path: Path) -> None:
    order = tmp_path / "order"
    specs = spec("store", "drained", order, "store"), spec("slow", "stubborn", tmp_path / "pids")
    farm = supervisor(tmp_path, *specs, up=UpConfig(drain_seconds=1))
    farm_ready = asyncio.Event()

    async def work() -> None:
        await until(lambda: catches_sigterm(farm.children[0]) and (tmp_path / "pids").exists())
        farm_ready.set()

    running = asyncio.create_task(farm.run(work))
    await farm_ready.wait()
    await until(lambda: farm.draining)

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert order.read_text().split() == ["store"]
    assert not any(child.alive for child in farm.children)
