"""A journal's URL is understood whole, and the same promises hold at every kind of Redis that it may name."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from rollfarm import doctor
from rollfarm.config import ConfigError, load
from rollfarm.errors import JournalFenced, JournalUnavailable
from rollfarm.ports import free_port
from sample_buffer.config import SampleBufferRoot
from sample_buffer.journal import Record
from sample_buffer.redis_journal import RedisJournal
from sample_buffer.redis_urls import RedisUrl, parse
from tests.sample_buffer import servers
from tests.sample_buffer.support import Valkey

KINDS = {
    "redis": servers.by_port,
    "rediss": servers.by_tls,
    "redis+sentinel": servers.by_sentinel,
    "redis+cluster": servers.by_cluster,
}


@pytest.fixture(params=["unix", *KINDS])
async def url(request: pytest.FixtureRequest, valkey: Valkey) -> AsyncIterator[str]:
    """The URL of a real Redis of each kind."""
    if request.param == "unix":
        yield valkey.url
        return
    if request.param == "rediss" and shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    async with KINDS[request.param]() as url:
        yield url


def journal_at(url: str, seconds: float = 5.0) -> RedisJournal:
    return RedisJournal(url, "farm", timeout_seconds=seconds)


async def read(journal: RedisJournal) -> list[bytes]:
    return [record async for record in journal.records()]


async def until_open(journal: RedisJournal, seconds: float = 30.0) -> bytes | None:
    async with asyncio.timeout(seconds):
        while True:
            with contextlib.suppress(JournalUnavailable):
                return await journal.open()
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("url", "understood"),
    [
        ("redis://h", RedisUrl("server", (("h", 6379),))),
        ("redis://[::1]:7/2", RedisUrl("server", (("::1", 7),), settings={"db": 2})),
        (
            "rediss://me:a%2Fb@h:7?ssl_ca_certs=/ca.pem&ssl_check_hostname=false",
            RedisUrl(
                "server",
                (("h", 7),),
                settings={
                    "username": "me",
                    "password": "a/b",
                    "ssl_ca_certs": "/ca.pem",
                    "ssl_check_hostname": False,
                    "ssl": True,
                },
                sentinel_settings={"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False, "ssl": True},
            ),
        ),
        (
            "unix:///run/r.sock?db=1&password=x",
            RedisUrl("socket", path="/run/r.sock", settings={"password": "x", "db": 1}),
        ),
        (
            "redis+sentinel://:x@a,b:7/main/2?sentinel_password=y",
            RedisUrl(
                "sentinel",
                (("a", 26379), ("b", 7)),
                primary="main",
                settings={"password": "x", "db": 2},
                sentinel_settings={"password": "y"},
            ),
        ),
        ("redis+cluster://a,b:7", RedisUrl("cluster", (("a", 6379), ("b", 7)))),
        (
            "rediss+cluster://a",
            RedisUrl("cluster", (("a", 6379),), settings={"ssl": True}, sentinel_settings={"ssl": True}),
        ),
    ],
)
def test_a_url_says_which_redis_and_how(url: str, understood: RedisUrl) -> None:
    assert parse(url) == understood


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sentinel://:hush@a/m", "Did you mean 'redis+sentinel://'?"),
        ("redis-cluster://:hush@a", "Did you mean 'redis+cluster://'?"),
        ("redis://:hush@", "it names no host"),
        ("redis://:hu/sh@host", "write / as %2F"),
        ("redis://me:12/hush@host", "@ as %40"),
        ("redis://me:12#hush@host", "# as %23"),
        ("redis://me:12?hush@host", "an option that such a URL does not have"),
        ("redis://host/hush", "its database is no number"),
        ("redis://host?db=hush", "its database is no number"),
        ("redis://:hush@a,b", "write redis+sentinel://HOST,HOST/PRIMARY or redis+cluster://HOST,HOST"),
        ("redis://:hush@h?ssl_ca_certs=/x", "By TLS, it begins with rediss."),
        ("rediss://:hush@h?ssl_ca_cert=/x", "Did you mean 'ssl_ca_certs'?"),
        ("rediss://:hush@h?ssl_cert_reqs=no", "Known: none, optional, required."),
        ("redis://:hush@h?retry_on_timeout=true", "Known: db, password, username."),
        ("unix://run/hush.sock", "three slashes"),
        ("unix://", "three slashes"),
        ("redis+sentinel://:hush@a,b", "no name of a primary"),
        ("redis+sentinel://me:12/hush@a/m", "@ as %40"),
        ("redis+sentinel://:hush@a,/m", "it names no host"),
        ("redis+cluster://:hush@a/0", "a cluster has one database"),
        ("redis+cluster://:hush@a:port", "its port is no number"),
    ],
)
def test_a_malformed_url_is_refused_when_it_is_read_and_no_part_of_it_is_said(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(SampleBufferRoot, ["--sample_buffer.journal", url], prog="test")

    assert message in str(refused.value)
    assert "hush" not in str(refused.value)
    assert "hu/sh" not in str(refused.value)


def test_urls_of_several_hosts_come_through_flags_whole() -> None:
    url = "redis+sentinel://a:1,b:2/main"

    assert load(SampleBufferRoot, ["--sample_buffer.journal", url], prog="test").sample_buffer.journal == url


async def test_every_kind_of_redis_reads_back_what_it_was_told(url: str) -> None:
    journal = journal_at(url)
    await journal.open()
    await journal.append(Record(b"lost in the snapshot", {"a": b"\x00A", "b": b"B"}))
    await journal.append(Record(b"", {}, ["a"], b"snapshot"))
    await journal.append(Record(b"one", {"c": b"C"}))
    await journal.close()
    again = journal_at(url)

    assert await again.open() == b"snapshot"
    assert await read(again) == [b"one"]
    assert await again.payloads(["a", "b", "c"]) == {"b": b"B", "c": b"C"}
    await again.close()


async def test_every_kind_of_redis_has_one_writer(url: str) -> None:
    first, second = journal_at(url), journal_at(url)
    await first.open()
    await first.append(Record(b"one"))
    await second.open()

    with pytest.raises(JournalFenced):
        await first.append(Record(b"lost", {"x": b"lost"}))
    with pytest.raises(JournalFenced):
        await first.open()
    await second.append(Record(b"two"))

    assert await read(second) == [b"one", b"two"]
    assert await second.payloads(["x"]) == {}
    await first.close()
    await second.close()


async def test_every_kind_of_redis_satisfies_the_doctor(url: str) -> None:
    found = await asyncio.to_thread(doctor.journal, url)

    assert found.remedy == ""
    assert "answers" in found.found


async def test_the_rights_in_the_docs_are_enough(valkey: Valkey) -> None:
    docs = Path(__file__).parents[2] / "docs" / "deploy.md"
    (rights,) = (line.split() for line in docs.read_text().splitlines() if line.startswith("ACL SETUSER farm "))
    async with servers.client(valkey) as admin:
        await admin.execute_command(*rights)
    url = f"unix://farm:password@{valkey.socket}"
    journal = RedisJournal(url, "rollfarm", timeout_seconds=5)

    await journal.open()
    await journal.append(Record(b"one", {"a": b"A", "b": b"B"}))
    await journal.append(Record(b"", {}, ["a"], b"snapshot"))
    await journal.append(Record(b"two"))

    assert await journal.open() == b"snapshot"
    assert await read(journal) == [b"two"]
    assert await journal.payloads(["a", "b"]) == {"b": b"B"}
    assert (await asyncio.to_thread(doctor.journal, url)).remedy == ""
    await journal.close()


async def test_a_certificate_that_nobody_vouches_for_is_refused() -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    async with servers.by_tls() as url:
        journal = journal_at(url.partition("?")[0])

        with pytest.raises(JournalUnavailable, match="certificate"):
            await journal.open()
        await journal.close()


@pytest.mark.parametrize("url", ["redis+sentinel://127.0.0.1:1/farm", "redis+cluster://127.0.0.1:1,127.0.0.1:2"])
async def test_hosts_of_which_none_answers_are_an_unavailable_journal(url: str) -> None:
    journal = journal_at(url)

    with pytest.raises(JournalUnavailable, match="does not answer"):
        await journal.open()

    await journal.close()


async def test_sentinels_that_know_no_such_primary_say_its_name() -> None:
    async with servers.by_sentinel() as url:
        journal = journal_at(url.replace(servers.PRIMARY, "fram"))

        with pytest.raises(JournalUnavailable, match="No master found for 'fram'"):
            await journal.open()
        await journal.close()


async def test_a_cluster_named_as_one_server_is_told_its_scheme() -> None:
    async with servers.by_cluster() as url:
        journal = journal_at(f"redis://{url.rpartition(',')[2]}")

        with pytest.raises(JournalUnavailable, match="write redis\\+cluster://"):
            await journal.open()
        await journal.close()


async def test_a_replica_and_a_server_that_forgets_are_told_to_the_doctor() -> None:
    primary, port = free_port(), free_port()
    forgetful = ("--port", str(primary), "--appendonly", "no")
    replica = ("--port", str(port), "--replicaof", f"127.0.0.1 {primary}")
    async with servers.valkey(*forgetful), servers.valkey(*replica):
        forgets = await asyncio.to_thread(doctor.journal, f"redis://127.0.0.1:{primary}")
        follows = await asyncio.to_thread(doctor.journal, f"redis://127.0.0.1:{port}")

    assert "appendonly" in forgets.remedy
    assert "Name the primary" in follows.remedy


@pytest.mark.slow
async def test_a_failover_is_followed_and_what_was_replicated_is_there() -> None:
    first, second = free_port(), free_port()
    replica = ("--port", str(second), "--replicaof", f"127.0.0.1 {first}", "--repl-diskless-sync-delay", "0")
    async with (
        servers.valkey("--port", str(first), "--repl-diskless-sync-delay", "0") as primary,
        servers.valkey(*replica) as follower,
        servers.sentinel(first) as url,
        servers.client(primary) as admin,
        servers.client(follower) as promoted,
    ):
        journal, idle = journal_at(url), journal_at(url)
        await idle.open()
        await journal.open()
        await journal.append(Record(b"one", {"a": b"A"}))
        async with asyncio.timeout(20):
            while not await admin.wait(1, 1000):
                pass
            await asyncio.sleep(2)  # the Sentinel asks the primary for its replicas every ten seconds, sooner at start
        primary.kill()

        with pytest.raises(JournalUnavailable):
            await journal.append(Record(b"never acknowledged"))
        await until_open(journal)
        await journal.append(Record(b"two"))

        assert await read(journal) == [b"one", b"two"]
        assert await journal.payloads(["a"]) == {"a": b"A"}
        assert (await promoted.info("replication"))["role"] == "master"
        with pytest.raises(JournalFenced):
            await until_open(idle)
        await journal.close()
        await idle.close()


async def test_a_server_that_comes_back_without_acknowledged_records_is_noticed_before_the_next_one(
    valkey: Valkey,
) -> None:
    journal = journal_at(valkey.url)
    await journal.open()
    await journal.append(Record(b"one"))
    backup = shutil.copytree(valkey.data, valkey.data.parent / "backup")
    await journal.append(Record(b"lost"))
    valkey.kill()
    shutil.rmtree(valkey.data)
    shutil.copytree(backup, valkey.data)
    await valkey.start()

    with pytest.raises(JournalUnavailable, match="without records that it had acknowledged"):
        await journal.append(Record(b"after a gap"))
    with capture_logs() as lines:
        await until_open(journal)

    assert [line["event"] for line in lines] == ["journal lost acknowledged records"]
    assert await read(journal) == [b"one"]
    await journal.close()


async def test_a_server_that_was_away_and_lost_nothing_is_not_accused(valkey: Valkey) -> None:
    journal = journal_at(valkey.url)
    await journal.open()
    await journal.append(Record(b"one"))
    valkey.kill()
    for _ in range(2):
        with pytest.raises(JournalUnavailable):
            await journal.open()
    await valkey.start()

    with capture_logs() as lines:
        await until_open(journal)

    assert lines == []
    await journal.append(Record(b"two"))
    await journal.close()
