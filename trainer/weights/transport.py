"""The seam between publishing a version and moving its bytes. A new transport is one file in this folder."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from rollfarm.v1 import llm_proxy_pb2
from trainer.weights.snapshot import Snapshot

Begin = Callable[[llm_proxy_pb2.BeginWeightUpdateRequest], Awaitable[llm_proxy_pb2.BeginWeightUpdateResponse]]
"""Calls BeginWeightUpdate: llm_proxy lets the engines that are named take the version, and says which have it."""


class Transport(Protocol):
    """One way to engines. An engine that fails fails alone, and is served anew by the next call that names it."""

    async def transfer(self, snapshot: Snapshot, engines: Sequence[llm_proxy_pb2.Engine], begin: Begin) -> list[str]:
        """Bring the snapshot, which may still be filling, into the host memory of `engines`; the ids of those that have
        it. Raises what `begin` raises."""
        ...

    def forget_all_but(self, instance_ids: Collection[str]) -> None:
        """Free what is kept for engine instances other than these, which have left."""
        ...
