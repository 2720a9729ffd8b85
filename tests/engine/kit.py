"""What the engine tests share: a host behind a real socket, a client, a sender, and a plain forward to agree with."""

from __future__ import annotations

import asyncio
import datetime
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
from transformers import AutoModelForCausalLM

from llm_proxy.engine import adapters
from llm_proxy.engine.config import EngineConfig, EngineRoot
from llm_proxy.engine.server import SERVICE, EngineServicer
from rollfarm import buckets, rpc, service
from rollfarm.config import Listen
from rollfarm.errors import FarmError
from rollfarm.run import ModelConfig
from rollfarm.threads import in_thread
from rollfarm.tokens import pack_ids, unpack_ids, unpack_logprobs, versions_of
from rollfarm.v1 import engine_pb2, engine_pb2_grpc, trajectory_pb2

SECONDS = 60.0
BUCKET_BYTES = 50_000
VOCABULARY = 97
CONTEXT = 256


def embedded_root(model: Path, **engine: Any) -> EngineRoot:
    return EngineRoot(
        model=ModelConfig(path=str(model)),
        engine=EngineConfig(device="cpu", listen=Listen(drain_seconds=0), **engine),
    )


@dataclass
class Answer:
    """The chunks of one request, put together."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    finish: int = 0
    failure: trajectory_pb2.Failure | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, chunk: engine_pb2.GenerationChunk) -> None:
        self.ids += unpack_ids(chunk.token_ids).tolist()
        self.logprobs += unpack_logprobs(chunk.logprobs).tolist()
        self.versions += versions_of(chunk.version_spans).tolist()
        if width := chunk.top_logprobs.width:
            self.top_ids += unpack_ids(chunk.top_logprobs.token_ids).reshape(-1, width).tolist()
            self.top_logprobs += unpack_logprobs(chunk.top_logprobs.logprobs).reshape(-1, width).tolist()
        if self.ids:
            self.started.set()
        if chunk.finish_reason or chunk.HasField("failure"):
            self.finish = chunk.finish_reason
            self.failure = chunk.failure if chunk.HasField("failure") else None
            self.ended.set()


class Client:
    """One Generate stream."""

    def __init__(self, stub: engine_pb2_grpc.EngineServiceAsyncStub) -> None:
        self._call = stub.Generate(wait_for_ready=True)
        self.answers: dict[str, Answer] = {}
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._call:
            for chunk in message.chunks:
                self.answers[chunk.request_id].add(chunk)

    async def send(
        self, prompts: Sequence[Sequence[int]], *, sessions: Sequence[str] = (), **sampling: Any
    ) -> list[str]:
        sampling = {"max_tokens": 16, "temperature": 1.0} | sampling
        ids = [uuid.uuid4().hex for _ in prompts]
        self.answers |= {request_id: Answer() for request_id in ids}
        seeds = sampling.pop("seeds", None)
        await self._call.write(
            engine_pb2.EngineServiceGenerateRequest(
                generations=[
                    engine_pb2.Generation(
                        request_id=request_id,
                        prompt_token_ids=pack_ids(prompt),
                        session_id=sessions[i] if sessions else "",
                        sampling=trajectory_pb2.Sampling(**sampling, **({"seed": seeds[i]} if seeds else {})),
                    )
                    for i, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True))
                ]
            )
        )
        return ids

    async def finished(self, ids: Iterable[str]) -> list[Answer]:
        async with asyncio.timeout(SECONDS):
            for request_id in ids:
                await self.answers[request_id].ended.wait()
        return [self.answers[request_id] for request_id in ids]

    async def generate(self, prompts: Sequence[Sequence[int]], **how: Any) -> list[Answer]:
        return await self.finished(await self.send(prompts, **how))

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.wait([self._reading])


@dataclass
class Host:
    """A served engine, and the test's connections to it."""

    address: str
    model: Path
    stub: engine_pb2_grpc.EngineServiceAsyncStub
    client: Client
    version: int = 0
    """The newest that the test published."""

    async def status(self) -> engine_pb2.EngineServiceGetStatusResponse:
        return await rpc.call(self.stub.GetStatus, engine_pb2.EngineServiceGetStatusRequest(), timeout=SECONDS)

    async def until(self, ready: Any) -> None:
        """Ask for the status until it is `ready`."""
        async with asyncio.timeout(SECONDS):
            while not ready(await self.status()):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.01)

    async def apply(self, version: int, mode: int = engine_pb2.UPDATE_MODE_KEEP) -> float:
        request = engine_pb2.ApplyWeightsRequest(policy_version=version, mode=mode)  # pyright: ignore
        answer = await rpc.call(self.stub.ApplyWeights, request, timeout=SECONDS)
        return answer.pause_duration.ToTimedelta().total_seconds()

    async def stage(self, tensors: dict[str, Tensor]) -> int:
        """Stage `tensors` as the next version, and say which it is."""
        self.version += 1
        sender = await Sender.meet(self)
        await sender.stage(self, self.version, tensors)
        return self.version

    async def publish(self, tensors: dict[str, Tensor], mode: int = engine_pb2.UPDATE_MODE_KEEP) -> int:
        version = await self.stage(tensors)
        await self.apply(version, mode)
        return version

    async def pause(self) -> None:
        await rpc.call(self.stub.Pause, engine_pb2.EngineServicePauseRequest(), timeout=SECONDS)

    async def resume(self) -> None:
        await rpc.call(self.stub.Resume, engine_pb2.EngineServiceResumeRequest(), timeout=SECONDS)

    async def sleep(self, *, discard_weights: bool = False) -> None:
        request = engine_pb2.SleepRequest(discard_weights=discard_weights)
        await rpc.call(self.stub.Sleep, request, timeout=SECONDS)

    async def wake_up(self) -> None:
        await rpc.call(self.stub.WakeUp, engine_pb2.WakeUpRequest(), timeout=SECONDS)

    async def cancel(self, ids: list[str]) -> None:
        request = engine_pb2.EngineServiceCancelRequest(request_ids=ids)
        await rpc.call(self.stub.Cancel, request, timeout=SECONDS)

    async def busy(self, prompts: Sequence[Sequence[int]], **how: Any) -> list[str]:
        """Begin long requests, and return when each has a few tokens and is still running."""
        ids = await self.client.send(prompts, **how)
        await self.client.generate([[1]], max_tokens=8)
        assert not any(self.client.answers[request_id].ended.is_set() for request_id in ids)
        return ids


@asynccontextmanager
async def serve(root: EngineRoot) -> AsyncIterator[Host]:
    adapter = adapters.make(root)
    server = EngineServicer(adapter)
    await adapter.start(server.deliver)
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(
        service.serve(
            lambda grpc_server: engine_pb2_grpc.add_EngineServiceServicer_to_server(server, grpc_server),
            Listen(drain_seconds=0),
            adapter.watch,
            services=[SERVICE],
            stop=stop,
            started=port.set_result,
        )
    )
    try:
        async with connect(f"127.0.0.1:{await port}", Path(root.model.path)) as host:
            yield host
    finally:
        stop.set()
        try:
            await serving
        finally:
            await adapter.stop()


@asynccontextmanager
async def connect(address: str, model: Path) -> AsyncIterator[Host]:
    async with rpc.channel(address) as channel:
        stub: Any = engine_pb2_grpc.EngineServiceStub(channel)
        client = Client(stub)
        host = Host(address, model, stub, client)
        host.version = (await host.status()).policy_version
        yield host
        await client.close()


class Sender:
    """The trainer's end: rank 0 of a group with one engine."""

    def __init__(self, group: engine_pb2.WeightGroup, store: TCPStore) -> None:
        self.group = group
        self._store = store
        self.process_group: Any = None

    @classmethod
    def invite(cls) -> Sender:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return cls(
            engine_pb2.WeightGroup(
                group_name=uuid.uuid4().hex,
                store_address=f"127.0.0.1:{store.port}",
                rank=1,
                world_size=2,
                backend="gloo",
            ),
            store,
        )

    @classmethod
    async def meet(cls, host: Host) -> Sender:
        sender = cls.invite()
        join = engine_pb2.JoinWeightsRequest(group=sender.group)
        await asyncio.gather(
            in_thread(sender.join), rpc.call(host.stub.JoinWeights, join, timeout=SECONDS, retry=False)
        )
        return sender

    def join(self) -> None:
        self.process_group = ProcessGroupGloo(
            PrefixStore(self.group.group_name, self._store), 0, 2, datetime.timedelta(seconds=SECONDS)
        )

    def request(self, version: int, tensors: dict[str, Tensor]) -> engine_pb2.StageWeightsRequest:
        return engine_pb2.StageWeightsRequest(
            group_name=self.group.group_name,
            policy_version=version,
            tensors=[
                engine_pb2.TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tensor.shape)
                for name, tensor in tensors.items()
            ],
            bucket_size_bytes=BUCKET_BYTES,
        )

    def send(
        self, request: engine_pb2.StageWeightsRequest, tensors: dict[str, Tensor], *, which: slice = slice(None)
    ) -> None:
        for bucket in buckets.plan(request.tensors, request.bucket_size_bytes)[which]:
            flat = torch.cat([tensors[slot.name].reshape(-1) for slot in bucket.slots]).view(torch.uint8)
            for piece in buckets.pieces(flat.numel(), request.bucket_size_bytes):
                self.process_group.broadcast(flat[piece], 0).wait()

    async def stage(self, host: Host, version: int, tensors: dict[str, Tensor]) -> int:
        request = self.request(version, tensors)
        sending = in_thread(lambda: self.send(request, tensors))
        try:
            answer = await rpc.call(host.stub.StageWeights, request, timeout=SECONDS, retry=False)
        except FarmError:
            await asyncio.wait([sending])  # which may fail too: the group is given up
            raise
        await sending
        return answer.size_bytes

    async def vanish_during(
        self, staging: Any, request: engine_pb2.StageWeightsRequest, tensors: dict[str, Tensor]
    ) -> None:
        """Send the first bucket, then close every connection; await `staging`."""
        answer = asyncio.ensure_future(staging)
        await in_thread(lambda: self.send(request, tensors, which=slice(1)))
        self.process_group = None
        await answer


class Reference:
    """The model as transformers alone computes it."""

    def __init__(self, path: Path, tensors: dict[str, Tensor] | None = None) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        if tensors is not None:
            with torch.no_grad():
                own = self.model.state_dict(keep_vars=True)
                for name, tensor in tensors.items():
                    own[name].copy_(tensor)

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """[T, V] before each token of the output."""
        logits = self.model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1).numpy()

    def chosen(self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """[T] log-probability of each token of the output."""
        return self.logprobs(prompt, output, temperature)[np.arange(len(output)), output]

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()


def other_weights(path: Path, seed: int) -> dict[str, Tensor]:
    """Values for the parameters, unlike those of the folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {
        name: parameter.detach() + 0.05 * torch.randn_like(parameter) for name, parameter in model.named_parameters()
    }


def prompts(count: int, *, seed: int = 0, shortest: int = 1, longest: int = 40) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, random.integers(shortest, longest + 1)).tolist() for _ in range(count)]
