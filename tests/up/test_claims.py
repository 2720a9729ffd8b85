import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from rollfarm.run import RunConfig
from rollfarm.up import folder
from rollfarm.up.claims import claimed, socket_folder
from rollfarm.up.config import FarmRoot
from tests.up.test_supervisor import CHILD, ENV, gone


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's temporary folder, with a short name and nobody else in it."""
    with tempfile.TemporaryDirectory(prefix="rf") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def abandon(sockets: Path) -> None:
    os.utime(sockets, (0, 0))


def is_claimed(path: Path) -> bool:
    with claimed(path) as claim:
        return claim is None


def test_a_farm_killed_with_9_keeps_its_run_and_its_sockets_until_its_last_process_is_gone(
    tmp_path: Path, temporary: Path
) -> None:
    run, pids = tmp_path / "runs" / "lake", tmp_path / "pids"
    root = FarmRoot(run=RunConfig(folder=run.parent, name=run.name))
    farm = subprocess.Popen([sys.executable, CHILD, "farm", str(run), str(pids)], env={**os.environ, **ENV})
    until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    (sockets,) = temporary.iterdir()
    abandon(sockets)

    farm.kill()
    farm.wait()

    with pytest.raises(folder.RunInUse, match="was killed and its services still drain"), folder.opened(root):
        pass
    with socket_folder():
        assert sockets.exists()
    child = int(pids.read_text())
    os.kill(child, signal.SIGKILL)
    until(lambda: gone(child))
    with socket_folder(), folder.opened(root):
        assert not sockets.exists()


def test_valkey_keeps_the_claims_even_when_its_leash_is_killed(tmp_path: Path, temporary: Path) -> None:
    place = temporary / "s"
    with claimed(tmp_path) as claim:
        assert claim is not None
        argv = [sys.executable, "-m", "rollfarm.up.leash", str(tmp_path / "valkey"), str(place)]
        leash = subprocess.Popen(argv, stdin=subprocess.PIPE, env={**os.environ, **ENV}, pass_fds=[claim])
        until(place.exists)
        (valkey,) = psutil.Process(leash.pid).children()

    leash.kill()
    leash.wait()

    assert is_claimed(tmp_path)
    valkey.kill()
    until(lambda: not is_claimed(tmp_path))


def test_only_what_killed_farms_left_is_removed(temporary: Path) -> None:
    names = ("abandoned", "young", "not-ours", "claimed")
    abandoned, young, not_ours, live = folders = [temporary / f"rollfarm-up-{name}" for name in names]
    with ExitStack() as stack:
        for path in folders:
            path.mkdir()
            bound = stack.enter_context(socket.socket(socket.AF_UNIX))
            bound.bind(str(path / "valkey.sock"))
        (not_ours / "notes").write_text("mine")
        for path in (abandoned, not_ours, live):
            abandon(path)
        stack.enter_context(claimed(live))

        with socket_folder() as (mine, _):
            left = set(temporary.iterdir())

    assert left == {young, not_ours, live, mine}
    assert (not_ours / "notes").exists()
    assert not mine.exists()
