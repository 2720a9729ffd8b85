"""The service as a process of its own, killed for real."""

import pytest

from rollfarm import rpc
from rollfarm.errors import JournalUnavailable
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2 as tp
from tests.sample_buffer.support import (
    Valkey,
    complete_all,
    lease_all,
    make_spec,
    process,
    request_id,
    take_batch,
)


def flags(valkey: Valkey) -> tuple[str, ...]:
    return ("--sample_buffer.journal", valkey.url)


async def configure(stub: object) -> pb.ConfigureRunResponse:
    request = pb.ConfigureRunRequest(request_id=request_id(), spec=make_spec())
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
