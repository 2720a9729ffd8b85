"""Weights to engines on the trainer's own machine: they copy them out of the memory that the snapshot lies in.

Nothing travels but the path. Engine hosts have to see this process's /proc and run as the same user; in containers they
share the process namespace.
"""

from collections.abc import Collection, Sequence

import structlog

from rollfarm import buckets
from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2, llm_proxy_pb2
from trainer.weights.memory import SharedArena
from trainer.weights.snapshot import Snapshot
from trainer.weights.transport import Begin

log = structlog.get_logger()


class SharedMemory:
    """A Transport within one machine."""

    async def transfer(self, snapshot: Snapshot, engines: Sequence[llm_proxy_pb2.Engine], begin: Begin) -> list[str]:
        """Every engine reads at once. One that reads too late finds that the checksums do not agree."""
        shared = await in_thread(lambda: shared_weights(snapshot))
        request = llm_proxy_pb2.BeginWeightUpdateRequest(
            policy_version=snapshot.policy_version,
            transfers=[
                llm_proxy_pb2.EngineTransfer(engine_id=engine.engine_id, instance_id=engine.instance_id)
                for engine in engines
            ],
            tensors=snapshot.specs,
            bucket_size_bytes=snapshot.bucket_size_bytes,
            checksums=True,
            shared=shared,
        )
        return staged_by(await begin(request))

    def forget_all_but(self, instance_ids: Collection[str]) -> None:
        """Nothing is kept for any."""


def shared_weights(snapshot: Snapshot) -> engine_pb2.SharedWeights:
    """Where each piece of the buckets lies, and the table of their checksums; waits until the snapshot is full."""
    arena, full = snapshot.arena, snapshot.buffers
    assert isinstance(arena, SharedArena)
    offsets = [
        arena.offset(index) + piece.start
        for index, bucket in enumerate(full)
        for piece in buckets.pieces(bucket.numel(), snapshot.bucket_size_bytes)
    ]
    return engine_pb2.SharedWeights(path=arena.path, offsets=[*offsets, arena.offset(len(full))])


def staged_by(answer: llm_proxy_pb2.BeginWeightUpdateResponse) -> list[str]:
    """The engines that have the version; why the others have not is logged."""
    for result in answer.results:
        if result.HasField("failure"):
            log.warning("engine did not take weights", engine_id=result.engine_id, cause=result.failure.message)
    return [result.engine_id for result in answer.results if not result.HasField("failure")]
