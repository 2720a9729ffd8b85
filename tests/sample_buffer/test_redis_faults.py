"""Whatever happens to Redis, the service refuses at once what it cannot keep, and goes on by itself afterwards."""

import asyncio
import contextlib
import random
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import asyncio as aioredis

from rollfarm import rpc, service
from rollfarm.config import ConfigError, Listen
from rollfarm.errors import JournalUnavailable
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import sample_buffer_pb2_grpc
from rollfarm.v1 import trajectory_pb2 as tp
from sample_buffer.__main__ import make_journal, open_ledger
from sample_buffer.config import SampleBufferConfig
from sample_buffer.ledger import Ledger
from sample_buffer.server import SERVICE, SampleBufferServicer
from tests.sample_buffer import servers
from tests.sample_buffer.support import (
    Valkey,
    complete_all,
    lease_all,
    make_spec,
    play,
    request_id,
    spawn,
    take_batch,
)

AT_ONCE = 0.5
"""Seconds within which a call that waits for nothing answers on a busy machine."""


@dataclass
class Served:
    """A service at work on a real Redis."""

    ledger: Ledger
    stub: "sample_buffer_pb2_grpc.SampleBufferServiceAsyncStub"

    async def configure(self) -> None:
        request = pb.ConfigureRunRequest(request_id=request_id(), trainer_id="trainer", spec=make_spec())
        await rpc.call(self.stub.ConfigureRun, request, timeout=10)

    async def fail(self, held: pb.EpisodeLease, *, retry: bool = False) -> None:
        """Change the state a little; raises what the service answers."""
        request = pb.FailEpisodeRequest(
            request_id=request_id(), lease_id=held.lease_id, outcome=tp.OUTCOME_ABORTED, detail="x"
        )
        await rpc.call(self.stub.FailEpisode, request, timeout=20, retry=retry)

    async def refused(self, held: pb.EpisodeLease) -> tuple[str, float]:
        """What a change of state is refused with, and after how many seconds."""
        began = time.monotonic()
        with pytest.raises(JournalUnavailable) as error:
            await self.fail(held)
        return str(error.value), time.monotonic() - began

    async def heals(self, held: pb.EpisodeLease) -> None:
        """A change of state succeeds, within a while, if it is repeated."""
        await self.fail(held, retry=True)

    async def status(self) -> pb.GetStatusResponse:
        return await rpc.call(self.stub.GetStatus, pb.GetStatusRequest(), timeout=5, retry=False)


@asynccontextmanager
async def serving(url: str, *, append_seconds: float = 5.0) -> AsyncIterator[Served]:
    """The service until the block ends."""
    config = SampleBufferConfig(journal=url, append_seconds=append_seconds)
    ledger = Ledger(config, make_journal(config))
    await open_ledger(config, ledger)
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    buffer = SampleBufferServicer(ledger, stop, max_trajectory_bytes=config.max_trajectory_bytes)
    loops = (ledger.run, ledger.tick, buffer.wake_on_stop)
    task = asyncio.create_task(
        service.serve(buffer.register, Listen(), *loops, services=[SERVICE], stop=stop, started=port.set_result)
    )
    try:
        async with rpc.channel(f"127.0.0.1:{await port}") as channel:
            yield Served(ledger, sample_buffer_pb2_grpc.SampleBufferServiceStub(channel))
    finally:
        stop.set()
        await task
        await ledger.close()


async def as_read(url: str) -> bytes:
    """The state that a service which starts now would find."""
    config = SampleBufferConfig(journal=url)
    ledger = Ledger(config, make_journal(config))
    await ledger.open()
    dump = ledger.runs.dump()
    await ledger.close()
    return dump


async def test_while_redis_is_dead_changes_are_refused_at_once_and_looks_go_on(valkey: Valkey) -> None:
    async with serving(valkey.url) as served:
        await served.configure()
        leases = await lease_all(served.stub)
        await complete_all(served.stub, leases[:4])
        await take_batch(served.stub, 0)
        valkey.kill()

        first, first_seconds = await served.refused(leases[4])
        again, seconds = await served.refused(leases[4])
        with pytest.raises(JournalUnavailable):
            await take_batch(served.stub, 0)
        status = await served.status()
        page = await rpc.call(served.stub.ListTrajectories, pb.ListTrajectoriesRequest(), timeout=5, retry=False)
        request = pb.GetLineageRequest(trajectory_id=page.trajectories[0].trajectory_id)
        lineage = await rpc.call(served.stub.GetLineage, request, timeout=5, retry=False)

        assert "does not answer" in first
        assert "resumes by itself" in again
        assert max(first_seconds, seconds) < AT_ONCE
        assert status.next_batch_step == 1
        assert len(page.trajectories) == 4
        assert lineage.trajectory == page.trajectories[0]
        await valkey.start()
        await served.heals(leases[5])
        (batch,) = await take_batch(served.stub, 0)
        assert batch.batch.redelivered
        assert [len(group.trajectories) for group in batch.groups] == [2, 2]


async def test_a_redis_that_hangs_is_waited_for_once_and_for_append_seconds(valkey: Valkey) -> None:
    async with serving(valkey.url, append_seconds=0.6) as served:
        await served.configure()
        leases = await lease_all(served.stub)
        with valkey.stopped():
            in_flight = await asyncio.gather(*(served.refused(held) for held in leases[:3]))
            _, later = await served.refused(leases[3])
            status = await served.status()

        assert all(0.3 < seconds < 0.6 + AT_ONCE for _, seconds in in_flight)
        assert later < AT_ONCE
        assert status.policy_version == 0
        await served.heals(leases[4])
        dump = served.ledger.runs.dump()
    assert await as_read(valkey.url) == dump


async def test_a_redis_without_memory_writes_nothing_by_halves_and_heals_when_it_has_some(valkey: Valkey) -> None:
    async with serving(valkey.url) as served, servers.client(valkey) as admin:
        await served.configure()
        leases = await lease_all(served.stub)
        await complete_all(served.stub, leases[:2])
        before = await admin.hkeys("{rollfarm}:payloads"), await admin.xlen("{rollfarm}:events")
        await admin.config_set("maxmemory", "1mb")

        with pytest.raises(JournalUnavailable, match="Raise its maxmemory"):
            await complete(served, leases[2])
        said, seconds = await served.refused(leases[3])

        assert "Raise its maxmemory" in said
        assert seconds < AT_ONCE
        assert (await admin.hkeys("{rollfarm}:payloads"), await admin.xlen("{rollfarm}:events")) == before
        await admin.config_set("maxmemory", "0")
        await served.heals(leases[3])
        await complete_all(served.stub, [leases[2]])
        dump = served.ledger.runs.dump()
    assert await as_read(valkey.url) == dump


async def complete(served: Served, held: pb.EpisodeLease, *, tokens: int = 3) -> None:
    played = play(held.episode, tokens=tokens)
    request = pb.CompleteEpisodeRequest(request_id=request_id(), lease_id=held.lease_id, trajectory=played)
    await rpc.call(served.stub.CompleteEpisode, request, timeout=5, retry=False)


Spoil = Callable[[aioredis.Redis], Awaitable[Any]]


async def forbid(admin: aioredis.Redis) -> None:
    await admin.execute_command("ACL", "SETUSER", "default", "-eval")


async def ask_for_a_password(admin: aioredis.Redis) -> None:
    await admin.config_set("requirepass", "hush")
    await admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def demote(admin: aioredis.Redis) -> None:
    await admin.execute_command("REPLICAOF", "127.0.0.1", "1")


async def demand_replicas(admin: aioredis.Redis) -> None:
    await admin.config_set("min-replicas-to-write", "1")


@pytest.mark.parametrize(
    ("spoil", "mend", "remedy"),
    [
        (forbid, ("ACL", "SETUSER", "default", "+eval"), "Let the user run EVAL"),
        (ask_for_a_password, ("CONFIG", "SET", "requirepass", ""), "Correct the user and the password"),
        (demote, ("REPLICAOF", "NO", "ONE"), "It is a replica"),
        (demand_replicas, ("CONFIG", "SET", "min-replicas-to-write", "0"), "Fewer replicas keep up"),
    ],
)
async def test_a_redis_that_refuses_says_why_and_the_service_goes_on_when_it_is_mended(
    valkey: Valkey, spoil: Spoil, mend: tuple[str, ...], remedy: str
) -> None:
    async with serving(valkey.url) as served, servers.client(valkey) as admin:
        await served.configure()
        leases = await lease_all(served.stub)
        await spoil(admin)

        said, seconds = await served.refused(leases[0])
        later, _ = await served.refused(leases[0])

        assert remedy in said
        assert remedy in later
        assert seconds < AT_ONCE
        await admin.execute_command(*mend)
        await served.heals(leases[0])
        dump = served.ledger.runs.dump()
    assert await as_read(valkey.url) == dump


@pytest.mark.parametrize("name", ["fence", "events", "payloads", "snapshot"])
async def test_keys_of_somebody_else_are_left_alone(valkey: Valkey, name: str) -> None:
    config = SampleBufferConfig(journal=valkey.url, connect_seconds=0)
    async with servers.client(valkey) as admin:
        await admin.sadd(f"{{rollfarm}}:{name}", "theirs")  # pyright: ignore[reportGeneralTypeIssues]
        ledger = Ledger(config, make_journal(config))

        with pytest.raises(ConfigError, match=r"choose another sample_buffer\.journal_key"):
            await open_ledger(config, ledger)

        assert await admin.keys() == [f"{{rollfarm}}:{name}".encode()]
        await ledger.close()


async def test_a_string_of_somebody_else_is_no_fence(valkey: Valkey) -> None:
    config = SampleBufferConfig(journal=valkey.url, connect_seconds=0)
    async with servers.client(valkey) as admin:
        await admin.set("{rollfarm}:fence", "theirs")
        ledger = Ledger(config, make_journal(config))

        with pytest.raises(ConfigError, match=r"choose another sample_buffer\.journal_key"):
            await open_ledger(config, ledger)

        assert await admin.get("{rollfarm}:fence") == b"theirs"
        await ledger.close()


@pytest.mark.slow
async def test_a_program_with_a_wrong_password_ends_with_2_and_does_not_say_it(valkey: Valkey) -> None:
    async with servers.client(valkey) as admin:
        await ask_for_a_password(admin)
    url = f"unix://:wr0ng@{valkey.socket}"

    process = spawn("--sample_buffer.journal", url, "--sample_buffer.connect_seconds", "0.2")
    _, stderr = await asyncio.to_thread(process.communicate)

    assert process.returncode == 2
    assert b"Correct the user and the password" in stderr
    assert b"wr0ng" not in stderr
    assert b"Traceback" not in stderr


async def test_a_journal_that_was_deleted_is_refused_until_it_is_restored(valkey: Valkey) -> None:
    async with serving(valkey.url) as served, servers.client(valkey) as admin:
        await served.configure()
        leases = await lease_all(served.stub)
        await complete_all(served.stub, leases[:2])
        saved = {key: await kept(admin, key) for key in await admin.keys()}
        await admin.flushall()

        said, _ = await served.refused(leases[2])
        await asyncio.sleep(0.6)  # it tries to open the journal meanwhile
        later, _ = await served.refused(leases[2])

        assert "restore its data" in said
        assert "restore its data" in later
        assert await admin.keys() == []
        assert (await served.status()).episode_counts["done"] == 2
        for key, value in saved.items():
            await admin.restore(key, 0, value)
        await served.heals(leases[2])
        dump = served.ledger.runs.dump()
    assert await as_read(valkey.url) == dump


async def kept(admin: aioredis.Redis, key: str | bytes) -> bytes:
    """A key as RESTORE takes it."""
    value = await admin.dump(key)
    assert isinstance(value, bytes)
    return value


async def test_trajectories_that_were_deleted_are_missed_without_a_crash(valkey: Valkey) -> None:
    async with serving(valkey.url) as served, servers.client(valkey) as admin:
        await served.configure()
        leases = await lease_all(served.stub)
        await complete_all(served.stub, leases[:2])
        saved = await kept(admin, "{rollfarm}:payloads")
        await admin.delete("{rollfarm}:payloads")
        await admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with contextlib.suppress(JournalUnavailable):
            await served.fail(leases[2])
        valkey.kill()
        await served.refused(leases[3])
        await valkey.start()

        async with asyncio.timeout(10):
            while "has lost 2" not in (await served.refused(leases[3]))[0]:  # noqa: ASYNC110 - it tries for itself
                await asyncio.sleep(0.05)
        await admin.restore("{rollfarm}:payloads", 0, saved)

        await served.heals(leases[3])


async def test_an_answer_that_waits_for_the_journal_is_refused_while_it_is_away(valkey: Valkey) -> None:
    async with serving(valkey.url, append_seconds=0.3) as served:
        await served.configure()
        leases = await lease_all(served.stub)
        ledger = served.ledger
        with valkey.stopped():
            flying = asyncio.create_task(served.refused(leases[0]))
            await asyncio.sleep(0.1)
            lost = leases[1].lease_id
            ledger.execute(lambda runs: runs.of_lease(lost).fail("x", lost, tp.OUTCOME_ABORTED, "x", ledger.now()))
            await flying

            async with asyncio.timeout(AT_ONCE):
                with pytest.raises(JournalUnavailable):
                    await ledger.durable()
        await served.heals(leases[2])


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 8 MB."""
    with tempfile.TemporaryDirectory(prefix="rf") as folder:
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True)
        if mount.returncode != 0:
            pytest.skip(f"a small disk needs the right to mount one: {mount.stderr.decode().strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """The file that takes all the room there is."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return ballast


@pytest.mark.parametrize(("fsync", "message"), [("always", "does not answer"), ("everysec", "make room there")])
async def test_a_full_disk_costs_nothing_that_was_acknowledged(small_disk: Path, fsync: str, message: str) -> None:
    """Where each write is synced, the server ends when one fails. Otherwise it refuses the next, and tries again."""
    async with servers.valkey("--appendfsync", fsync, folder=small_disk) as server:
        async with serving(server.url) as served:
            await served.configure()
            leases = await lease_all(served.stub)
            ballast = fill(small_disk)

            done, said = await complete_until_refused(served, leases)
            ballast.unlink()
            if fsync == "always":
                server.kill()
                await server.start()
            await served.heals(leases[-1])

            assert message in said
            assert (await served.status()).episode_counts["done"] == done
            dump = served.ledger.runs.dump()
        assert await as_read(server.url) == dump


async def complete_until_refused(served: Served, leases: list[pb.EpisodeLease]) -> tuple[int, str]:
    """How many trajectories the journal took, and why it took no more."""
    for done, held in enumerate(leases):
        try:
            await complete(served, held, tokens=1000)
        except JournalUnavailable as refused:
            return done, str(refused)
    raise AssertionError("the disk had room for all of them")


@pytest.mark.slow
async def test_calls_that_are_repeated_across_twenty_deaths_of_redis_have_one_effect_each(valkey: Valkey) -> None:
    dice = random.Random(11)
    taken: list[str] = []
    async with serving(valkey.url) as served:
        await served.configure()
        for step in range(20):
            killer = asyncio.create_task(die(valkey, dice.uniform(0.0, 0.06)))
            taken += await one_step(served, step)
            await killer
        status = await served.status()
        dump = served.ledger.runs.dump()

    assert (status.next_commit_step, status.policy_version, status.committed_trajectory_count) == (20, 20, 80)
    assert len(set(taken)) == len(taken) == 80
    assert await as_read(valkey.url) == dump


async def die(valkey: Valkey, seconds: float) -> None:
    """Kill it after so many seconds, and start it anew."""
    await asyncio.sleep(seconds)
    valkey.kill()
    await asyncio.sleep(0.1)
    await valkey.start()


async def one_step(served: Served, step: int) -> list[str]:
    """Lease, play, take, publish and commit, each repeated until it is answered; the trajectories that were taken."""
    leases: list[pb.EpisodeLease] = []
    while not leases:
        leases = await lease_all(served.stub)
    await complete_all(served.stub, leases)
    batch: list[pb.LeaseBatchResponse] = []
    while not batch:
        with contextlib.suppress(JournalUnavailable):
            batch = await take_batch(served.stub, step)
    publish = pb.PublishVersionRequest(
        request_id=request_id(),
        run_id="run",
        trainer_id="trainer",
        policy_version=step + 1,
        trained_step_count=step + 1,
    )
    await rpc.call(served.stub.PublishVersion, publish, timeout=10)
    commit = pb.CommitStepRequest(
        request_id=request_id(), run_id="run", trainer_id="trainer", step=step, batch_id=batch[0].batch.batch_id
    )
    await rpc.call(served.stub.CommitStep, commit, timeout=10)
    return [one.trajectory_id for message in batch for group in message.groups for one in group.trajectories]
