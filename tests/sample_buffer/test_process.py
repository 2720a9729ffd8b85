"""The service as a process of its own, killed for real."""

import asyncio

import pytest

from rollfarm import rpc
from rollfarm.errors import JournalFenced, JournalUnavailable
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2 as tp
from tests.sample_buffer.support import (
    Valkey,
    complete_all,
    lease_all,
    make_spec,
    process,
    request_id,
    spawn,
    take_batch,
)


def flags(valkey: Valkey) -> tuple[str, ...]:
    return ("--sample_buffer.journal", valkey.url)


async def configure(stub: object) -> pb.ConfigureRunResponse:
    request = pb.ConfigureRunRequest(request_id=request_id(), trainer_id="trainer", spec=make_spec())
    return await rpc.call(stub.ConfigureRun, request, timeout=10)  # pyright: ignore


@pytest.mark.slow
async def test_a_killed_sample_buffer_delivers_the_same_bytes_again(valkey: Valkey) -> None:
    async with process(*flags(valkey)) as first:
        await configure(first.stub)
        await complete_all(first.stub, await lease_all(first.stub))
        before = await take_batch(first.stub, 0)
        first.kill()
    async with process(*flags(valkey)) as second:
        after = await take_batch(second.stub, 0)
        found = await configure(second.stub)

    assert [group.SerializeToString() for message in after for group in message.groups] == [
        group.SerializeToString() for message in before for group in message.groups
    ]
    assert [message.batch.redelivered for message in before + after] == [False, True]
    assert (found.created, found.next_batch_step, found.next_commit_step) == (False, 1, 0)


@pytest.mark.slow
async def test_a_killed_valkey_refuses_writes_and_loses_nothing_acknowledged(valkey: Valkey) -> None:
    async with process(*flags(valkey)) as server:
        await configure(server.stub)
        leases = await lease_all(server.stub)
        await complete_all(server.stub, leases[:3])
        valkey.kill()
        late = pb.FailEpisodeRequest(
            request_id=request_id(), lease_id=leases[3].lease_id, outcome=tp.OUTCOME_ABORTED, detail="x"
        )
        with pytest.raises(JournalUnavailable):
            await rpc.call(server.stub.FailEpisode, late, timeout=5, retry=False)
        await valkey.start()
        await complete_all(server.stub, leases[3:])
        batch = await take_batch(server.stub, 0)

    assert [len(group.trajectories) for message in batch for group in message.groups] == [2, 2]


@pytest.mark.slow
async def test_a_second_sample_buffer_takes_the_journal_over_and_the_first_one_ends(valkey: Valkey) -> None:
    async with process(*flags(valkey)) as first, process(*flags(valkey)) as second:
        with pytest.raises(JournalFenced):
            await configure(first.stub)
        assert await asyncio.to_thread(first.popen.wait, 20) == 4
        assert (await configure(second.stub)).created


@pytest.mark.slow
async def test_a_second_sample_buffer_on_a_taken_port_leaves_the_first_one_alone(valkey: Valkey) -> None:
    async with process(*flags(valkey)) as first:
        second = spawn("--sample_buffer.listen.port", str(first.port), *flags(valkey))
        _, stderr = await asyncio.to_thread(second.communicate)

        assert second.returncode == 3
        assert b"Cannot listen" in stderr
        assert b"--sample_buffer.listen.port" in stderr
        assert (await configure(first.stub)).created


@pytest.mark.slow
async def test_a_sample_buffer_told_to_stop_does_not_wait_for_long_polls(valkey: Valkey) -> None:
    async with process(*flags(valkey)) as server:
        await configure(server.stub)
        await lease_all(server.stub)
        waiting = asyncio.create_task(lease_all(server.stub))
        await rpc.call(server.stub.GetStatus, pb.GetStatusRequest(), timeout=5)

        server.popen.terminate()

        assert await asyncio.to_thread(server.popen.wait, 4) == 0
        assert await waiting == []
