"""Broadcasts weights to engines while they generate: one process group of two for each engine.

So a dead or slow engine holds up nobody but itself. A group is kept from one version to the next while llm_proxy lists
the engine, and met anew when the engine or the trainer restarted or a transfer failed. Which buffer holds which tensor
follows from the specs alone, by rollfarm.buckets; the last broadcast holds the checksums of all before it.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2, llm_proxy_pb2
from trainer.weights.snapshot import Snapshot
from trainer.weights.transport import Begin

log = structlog.get_logger()

CONNECTIONS = 2
"""That gloo's broadcasts take turns on: while one waits for its socket, the other goes on."""


class Group(Protocol):
    """This trainer, rank 0, and one engine."""

    under_way: int
    """Broadcasts begun at a time, so that the other end never waits for this one to begin the next."""

    def begin(self, part: Tensor) -> Any:
        """Start a broadcast of host memory, which has to stay as it is until the work that is returned was waited for.
        Raises RuntimeError when the engine is gone, as waiting does."""
        ...


class GlooGroup:
    """From host memory to host memory."""

    under_way = 2 * CONNECTIONS

    def __init__(self, store: PrefixStore, host: str, timeout: timedelta) -> None:
        """Block until the engine is there. Raises RuntimeError."""
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timeout
        # Left to itself, gloo listens where the machine's own name leads: on a stock Debian to 127.0.1.1.
        options._devices = [ProcessGroupGloo.create_device(hostname=host) for _ in range(CONNECTIONS)]
        options._threads = self.under_way
        self._group: Any = ProcessGroupGloo(store, 0, 2, options)
        self._options = BroadcastOptions()
        self._options.rootRank = 0
        self._options.timeout = timeout

    def begin(self, part: Tensor) -> Any:
        return self._group.broadcast([part], self._options)


class Link:
    """The process group that this trainer and one engine instance share."""

    def __init__(
        self, engine: llm_proxy_pb2.Engine, host: str, port: int, timeout_seconds: float, gpu: torch.device | None
    ) -> None:
        """`gpu`: where NCCL sends from; without one, gloo sends."""
        self.instance_id = engine.instance_id
        self.group_name = f"weights-{engine.engine_id}-{uuid.uuid4().hex[:12]}"
        self.joined = False
        self._host = host
        self._port = port
        self._timeout = timedelta(seconds=timeout_seconds)
        self._gpu = gpu
        self._group: Group | None = None

    def send(self, snapshot: Snapshot) -> None:
        """Meet the engine if that has not happened, and broadcast. Blocks; raises RuntimeError when it is gone."""
        if self._group is None:
            self._group = self._meet()
        under_way: deque[Any] = deque()
        for part in snapshot.parts():
            if len(under_way) == self._group.under_way:
                under_way.popleft().wait()
            under_way.append(self._group.begin(part))
        for work in under_way:
            work.wait()
        self.joined = True

    def _meet(self) -> Group:
        # A connection of its own: a store's client serves one waiting thread at a time.
        store = TCPStore(self._host, self._port, is_master=False, timeout=self._timeout)
        prefix = PrefixStore(self.group_name, store)
        if self._gpu is not None:
            from trainer.weights.nccl import NcclGroup

            return NcclGroup(prefix, self._timeout, self._gpu)
        return GlooGroup(prefix, self._host, self._timeout)


class Links:
    """The links to every engine that weights were sent to, until it leaves, and the store in which both ends meet."""

    def __init__(self, *, host: str, port: int, timeout_seconds: float, gpu: torch.device | None = None) -> None:
        """`host`: this machine as engines reach it. `gpu`, with its index: where NCCL sends from; without one, gloo
        sends. Raises RuntimeError where host and port cannot be listened on."""
        self._host = host
        self._timeout_seconds = timeout_seconds
        self._gpu = gpu
        ProcessGroupGloo.create_device(hostname=host)  # Refuses an address that is not this machine's.
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds)
        )
        self._links: dict[str, Link] = {}

    @property
    def address(self) -> str:
        """host:port of the store, as engines reach it."""
        return f"{self._host}:{self._store.port}"

    async def transfer(self, snapshot: Snapshot, engines: Sequence[llm_proxy_pb2.Engine], begin: Begin) -> list[str]:
        """Send while llm_proxy lets the engines join and receive."""
        links = {engine.engine_id: self._link_to(engine) for engine in engines}
        request = llm_proxy_pb2.BeginWeightUpdateRequest(
            policy_version=snapshot.policy_version,
            transfers=[self._transfer_to(engine_id, link) for engine_id, link in links.items()],
            tensors=snapshot.specs,
            bucket_size_bytes=snapshot.bucket_size_bytes,
            checksums=True,
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
                if self._links.get(engine_id) is links[engine_id]:  # and not of an instance that came after it
                    del self._links[engine_id]
        return staged

    def forget_all_but(self, instance_ids: Collection[str]) -> None:
        left = [link for link in self._links.values() if link.instance_id not in instance_ids]
        self._links = {name: link for name, link in self._links.items() if link.instance_id in instance_ids}
        if left:
            in_thread(left.clear)  # Closing a group takes its time.

    def _link_to(self, engine: llm_proxy_pb2.Engine) -> Link:
        link = self._links.get(engine.engine_id)
        if link is None or link.instance_id != engine.instance_id:
            link = Link(engine, self._host, self._store.port, self._timeout_seconds, self._gpu)
            self._links[engine.engine_id] = link
        return link

    def _transfer_to(self, engine_id: str, link: Link) -> llm_proxy_pb2.EngineTransfer:
        return llm_proxy_pb2.EngineTransfer(
            engine_id=engine_id,
            instance_id=link.instance_id,
            group=engine_pb2.WeightGroup(
                group_name=link.group_name,
                store_address=self.address,
                rank=1,
                world_size=2,
                backend="nccl" if self._gpu else "gloo",
                connection_count=0 if self._gpu else CONNECTIONS,
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
