"""Broadcasts weights to engines while they generate: one process group of two for each engine.

So a dead or slow engine holds up nobody but itself. A group is kept from one version to the next, and met anew when the
engine or the trainer restarted or a transfer failed. Which buffer holds which tensor follows from the specs alone, by
rollfarm.buckets.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial

import structlog
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2, llm_proxy_pb2
from trainer.weights.snapshot import Snapshot

log = structlog.get_logger()


class Link:
    """The process group that this trainer and one engine instance share."""

    def __init__(self, engine: llm_proxy_pb2.Engine, host: str, port: int, timeout_seconds: float) -> None:
        self.instance_id = engine.instance_id
        self.group_name = f"weights-{engine.engine_id}-{uuid.uuid4().hex[:12]}"
        self.joined = False
        self._host = host
        self._port = port
        self._timeout = timedelta(seconds=timeout_seconds)
        self._group: ProcessGroupGloo | None = None

    def send(self, snapshot: Snapshot) -> None:
        """Meet the engine if that has not happened, and broadcast. Blocks; raises RuntimeError when it is gone."""
        if self._group is None:
            self._group = self._meet()
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        for buffer in snapshot.buffers:
            self._group.broadcast([buffer], options).wait()  # pyright: ignore[reportAttributeAccessIssue]
        self.joined = True

    def _meet(self) -> ProcessGroupGloo:
        # A connection of its own: a store's client serves one waiting thread at a time.
        store = TCPStore(self._host, self._port, is_master=False, timeout=self._timeout)
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = self._timeout
        # Left to itself, gloo listens where the machine's own name leads: on a stock Debian to 127.0.1.1.
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        return ProcessGroupGloo(PrefixStore(self.group_name, store), 0, 2, options)


class Links:
    """The links to every engine that weights were sent to, and the store in which both ends meet."""

    def __init__(self, *, host: str, port: int, timeout_seconds: float) -> None:
        """`host`: this machine as engines reach it. Raises RuntimeError where host and port cannot be listened on."""
        self._host = host
        self._timeout_seconds = timeout_seconds
        ProcessGroupGloo.create_device(hostname=host)  # Refuses an address that is not this machine's.
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds)
        )
        self._links: dict[str, Link] = {}

    @property
    def address(self) -> str:
        """host:port of the store, as engines reach it."""
        return f"{self._host}:{self._store.port}"

    async def transfer(
        self,
        snapshot: Snapshot,
        engines: Sequence[llm_proxy_pb2.Engine],
        begin: Callable[[llm_proxy_pb2.BeginWeightUpdateRequest], Awaitable[llm_proxy_pb2.BeginWeightUpdateResponse]],
    ) -> list[str]:
        """Bring the snapshot into the host memory of `engines`. The ids of those that have it.

        `begin` calls BeginWeightUpdate, which lets the engines join and receive while this end sends.
        """
        links = {engine.engine_id: self._link_to(engine) for engine in engines}
        request = llm_proxy_pb2.BeginWeightUpdateRequest(
            policy_version=snapshot.policy_version,
            transfers=[self._transfer_to(engine_id, link) for engine_id, link in links.items()],
            tensors=snapshot.specs,
            bucket_size_bytes=snapshot.bucket_size_bytes,
        )
        sends = {engine_id: in_thread(partial(link.send, snapshot)) for engine_id, link in links.items()}
        staged: list[str] = []
        try:
            answer = await begin(request)
            for result in answer.results:
                if result.HasField("failure"):
                    log.warning("engine did not take weights", engine_id=result.engine_id, cause=result.failure.message)
                elif await _sent(sends.get(result.engine_id), result.engine_id):
                    staged.append(result.engine_id)
        finally:
            for engine_id in set(links) - set(staged):
                self._links.pop(engine_id, None)
        return staged

    def _link_to(self, engine: llm_proxy_pb2.Engine) -> Link:
        link = self._links.get(engine.engine_id)
        if link is None or link.instance_id != engine.instance_id:
            link = Link(engine, self._host, self._store.port, self._timeout_seconds)
            self._links[engine.engine_id] = link
        return link

    def _transfer_to(self, engine_id: str, link: Link) -> llm_proxy_pb2.EngineTransfer:
        return llm_proxy_pb2.EngineTransfer(
            engine_id=engine_id,
            instance_id=link.instance_id,
            group=engine_pb2.WeightGroup(
                group_name=link.group_name, store_address=self.address, rank=1, world_size=2, backend="gloo"
            ),
            join=not link.joined,
        )


async def _sent(send: asyncio.Future[None] | None, engine_id: str) -> bool:
    """Whether this end is done too; the engine, which has everything, says so first."""
    try:
        async with asyncio.timeout(5):
            if send is not None:
                await send
            return send is not None
    except (RuntimeError, TimeoutError) as error:
        log.warning("weights not sent", engine_id=engine_id, cause=str(error) or "too late")
        return False
