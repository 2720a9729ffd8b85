"""The trainer's transports to real engine hosts: what arrives is what is served, and what is spoilt is not.

In one process, over real sockets and files; llm_proxy is played by a function that stages on each engine by itself.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from llm_proxy.engine.layout import Layout, copy_shared
from rollfarm import rpc, stored
from rollfarm.error_wire import to_failure
from rollfarm.errors import FarmError, InvalidArgument, WeightsBaseMismatch, WeightsFailed
from rollfarm.v1 import engine_pb2, engine_pb2_grpc, llm_proxy_pb2
from tests.engine.kit import SECONDS, Host, Reference, connect, embedded_root, other_weights, prompts, serve
from tests.engine.process import Process
from trainer.weights import files, groups
from trainer.weights.groups import Links
from trainer.weights.memory import arena_for
from trainer.weights.shared import SharedMemory, shared_weights
from trainer.weights.snapshot import Snapshot, Snapshots, read_adapter
from trainer.weights.store import Store
from trainer.weights.transport import Transport

NAMES = ("gloo", "ipc", "store")
BUCKET_BYTES = 50_000
FULL, DELTA, LORA = (
    engine_pb2.StoredWeights.KIND_FULL,
    engine_pb2.StoredWeights.KIND_DELTA,
    engine_pb2.StoredWeights.KIND_LORA,
)


def transport(name: str, folder: Path) -> Transport:
    if name == "store":
        return Store(folder / "store")
    return SharedMemory() if name == "ipc" else Links(host="127.0.0.1", port=0, timeout_seconds=10)


def snapshots(name: str) -> Snapshots:
    return Snapshots(dtype=torch.float32, bucket_size_bytes=BUCKET_BYTES, make_arena=arena_for(name))


class Stager:
    """What llm_proxy does with BeginWeightUpdate, and the requests that it had."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts = {f"engine-{number}": host for number, host in enumerate(hosts)}
        self.instances: dict[str, str] = {}
        self.begun: list[llm_proxy_pb2.BeginWeightUpdateRequest] = []
        self.failures: list[str] = []

    async def engines(self) -> list[llm_proxy_pb2.Engine]:
        statuses = {name: await host.status() for name, host in self.hosts.items()}
        return [
            llm_proxy_pb2.Engine(engine_id=name, instance_id=status.instance_id, policy_version=status.policy_version)
            for name, status in statuses.items()
        ]

    async def begin(self, request: llm_proxy_pb2.BeginWeightUpdateRequest) -> llm_proxy_pb2.BeginWeightUpdateResponse:
        self.begun.append(request)
        results = await asyncio.gather(*(self._stage(request, each) for each in request.transfers))
        self.failures = [result.failure.reason for result in results]
        return llm_proxy_pb2.BeginWeightUpdateResponse(results=results)

    async def _stage(
        self, request: llm_proxy_pb2.BeginWeightUpdateRequest, transfer: llm_proxy_pb2.EngineTransfer
    ) -> llm_proxy_pb2.EngineTransferResult:
        stub = self.hosts[transfer.engine_id].stub
        stage = engine_pb2.StageWeightsRequest(
            group_name=transfer.group.group_name,
            policy_version=request.policy_version,
            tensors=request.tensors,
            bucket_size_bytes=request.bucket_size_bytes,
            checksums=request.checksums,
            stored=transfer.stored if transfer.HasField("stored") else None,
            shared=request.shared if request.HasField("shared") else None,
        )
        try:
            if transfer.join:
                join = engine_pb2.JoinWeightsRequest(group=transfer.group)
                await rpc.call(stub.JoinWeights, join, timeout=SECONDS, retry=False)
            await rpc.call(stub.StageWeights, stage, timeout=SECONDS, retry=False)
        except FarmError as error:
            return llm_proxy_pb2.EngineTransferResult(engine_id=transfer.engine_id, failure=to_failure(error))
        return llm_proxy_pb2.EngineTransferResult(engine_id=transfer.engine_id)

    async def publish(self, by: Transport, snapshot: Snapshot) -> list[str]:
        """The ids of the engines that serve it."""
        staged = await by.transfer(snapshot, await self.engines(), self.begin)
        for name in staged:
            self.hosts[name].version = snapshot.policy_version
            await self.hosts[name].apply(snapshot.policy_version)
        return staged

    def kinds(self) -> list[int]:
        """Of the files that each engine was told to read last."""
        return [each.stored.kind for each in self.begun[-1].transfers]


async def assert_serves(host: Host, tensors: dict[str, Tensor]) -> None:
    reference, asked = Reference(host.model, tensors), prompts(4, seed=host.version)

    answers = await host.client.generate(asked, temperature=0)

    assert [answer.ids for answer in answers] == [reference.greedy(prompt, 16) for prompt in asked]
    assert {version for answer in answers for version in answer.versions} == {host.version}


@pytest.mark.parametrize("name", NAMES)
async def test_versions_follow_each_other_and_each_is_served(embedded: Host, tmp_path: Path, name: str) -> None:
    by, taker, stager = transport(name, tmp_path), snapshots(name), Stager(embedded)

    for version in (1, 2, 3):
        tensors = other_weights(embedded.model, 200 + version)

        assert await stager.publish(by, taker.take(tensors.items(), policy_version=version)) == ["engine-0"]

        await assert_serves(embedded, tensors)


@pytest.mark.parametrize("name", NAMES)
async def test_what_was_spoilt_on_its_way_is_not_served(
    embedded: Host, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by, taker, stager = transport(name, tmp_path), snapshots(name), Stager(embedded)
    good = other_weights(embedded.model, 210)
    await stager.publish(by, taker.take(good.items(), policy_version=1))
    spoilt = taker.take(other_weights(embedded.model, 211).items(), policy_version=2)
    begin = stager.begin

    async def spoil(request: llm_proxy_pb2.BeginWeightUpdateRequest) -> Any:
        if name == "store":
            (path,) = (tmp_path / "store").glob("v2-*/model-00000.safetensors")
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return await begin(request)

    monkeypatch.setattr(stager, "begin", spoil)
    if name != "store":
        spoilt.buffers[1][7] ^= 1

    assert await stager.publish(by, spoilt) == []

    assert stager.failures == ["WEIGHTS_FAILED"]
    await assert_serves(embedded, good)
    monkeypatch.undo()
    mended = other_weights(embedded.model, 212)
    assert await stager.publish(by, taker.take(mended.items(), policy_version=3)) == ["engine-0"]
    await assert_serves(embedded, mended)


@pytest.mark.parametrize("connections", [1, 3])
async def test_weights_come_by_as_many_connections_as_the_trainer_says(
    embedded: Host, tmp_path: Path, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "CONNECTIONS", connections)
    by, taker, stager = transport("gloo", tmp_path), snapshots("gloo"), Stager(embedded)
    tensors = other_weights(embedded.model, 213)

    assert await stager.publish(by, taker.take(tensors.items(), policy_version=1)) == ["engine-0"]

    assert [each.group.connection_count for each in stager.begun[-1].transfers] == [connections]
    await assert_serves(embedded, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
async def test_an_engine_that_is_killed_meanwhile_fails_alone_and_its_successor_rejoins(
    tied_model: Path, tmp_path: Path, name: str
) -> None:
    by, taker = transport(name, tmp_path), snapshots(name)
    flags = ("--model.path", str(tied_model), "--engine.device", "cpu")
    async with AsyncExitStack() as life:
        process = life.enter_context(Process(*flags))
        steady = await life.enter_async_context(serve(embedded_root(tied_model)))
        address: str = process.address()
        nobody_asks: Any = None
        channel = await life.enter_async_context(rpc.channel(address))
        victim = Host(address, tied_model, engine_pb2_grpc.EngineServiceStub(channel), nobody_asks)
        stager = Stager(steady, victim)
        await stager.publish(by, taker.take(other_weights(tied_model, 220).items(), policy_version=1))

        def kill_and_begin(request: llm_proxy_pb2.BeginWeightUpdateRequest) -> Any:
            process.process.kill()
            return stager.begin(request)

        tensors = other_weights(tied_model, 221)
        snapshot = taker.take(tensors.items(), policy_version=2)
        async with asyncio.timeout(8):
            assert await by.transfer(snapshot, await stager.engines(), kill_and_begin) == ["engine-0"]
        steady.version = 2
        await steady.apply(2)
        await assert_serves(steady, tensors)

        successor = await life.enter_async_context(serve(embedded_root(tied_model)))
        stager.hosts["engine-1"] = successor
        behind = [each for each in await stager.engines() if each.policy_version != 2]
        assert await by.transfer(snapshot, behind, stager.begin) == ["engine-1"]
        successor.version = 2
        await successor.apply(2)
        await assert_serves(successor, tensors)


async def test_memory_of_another_process_that_is_gone_is_named(embedded: Host) -> None:
    tensors = other_weights(embedded.model, 230)
    snapshot = snapshots("ipc").take(tensors.items(), policy_version=1)
    request = engine_pb2.StageWeightsRequest(
        policy_version=1,
        tensors=snapshot.specs,
        bucket_size_bytes=BUCKET_BYTES,
        checksums=True,
        shared=engine_pb2.SharedWeights(path="/proc/1/fd/999999", offsets=[0] * (len(snapshot.buffers) + 1)),
    )

    with pytest.raises(WeightsFailed, match="cannot be opened"):
        await rpc.call(embedded.stub.StageWeights, request, timeout=SECONDS, retry=False)

    await assert_serves(embedded, {})


def test_memory_that_is_written_to_while_it_is_copied_is_found_out() -> None:
    snapshot = snapshots("ipc").take([("a", torch.ones(BUCKET_BYTES))], policy_version=1)
    layout = Layout(snapshot.specs, snapshot.bucket_size_bytes)
    shared = shared_weights(snapshot)
    buffers = layout.buffers(torch.empty(layout.size_bytes, dtype=torch.uint8))
    copy_shared(shared, buffers)
    assert torch.cat(buffers).view(torch.float32).tolist() == [1.0] * BUCKET_BYTES

    snapshot.buffers[0][-1] += 1

    with pytest.raises(WeightsFailed, match="Buffer 3 of 4 is not what was sent"):
        copy_shared(shared, buffers)
    with pytest.raises(InvalidArgument, match="5 offsets were given for 3 buffers"):
        copy_shared(shared, buffers[:3])


def listed(folder: Path) -> list[Path]:
    return list(folder.iterdir())


# --- deltas ---


def change(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return tensors | {name: tensors[name] + 0.1 * torch.randn_like(tensors[name]) for name in names}


async def test_an_engine_in_step_is_sent_what_changed_and_nothing_else(host: Host, tmp_path: Path) -> None:
    by, taker, stager = Store(tmp_path), snapshots("store"), Stager(host)
    first = host.version + 1
    tensors = other_weights(host.model, 240)
    await stager.publish(by, taker.take(tensors.items(), policy_version=first))
    assert stager.kinds() == [FULL]

    for version, name in ((first + 1, "model.norm.weight"), (first + 2, "model.layers.1.self_attn.q_proj.weight")):
        tensors = change(tensors, name)
        await stager.publish(by, taker.take(tensors.items(), policy_version=version))

        assert stager.kinds() == [DELTA]
        (told,) = stager.begun[-1].transfers
        assert told.stored.base_policy_version == version - 1
        assert sum(file.size_bytes for file in told.stored.files) < tensors[name].nbytes + 300
        await assert_serves(host, tensors)


async def test_an_engine_that_missed_a_version_is_sent_what_changed_since_its_own(
    tied_model: Path, tmp_path: Path
) -> None:
    by, taker = Store(tmp_path), snapshots("store")
    async with serve(embedded_root(tied_model)) as steady, serve(embedded_root(tied_model)) as late:
        stager = Stager(steady, late)
        tensors = other_weights(tied_model, 250)
        await stager.publish(by, taker.take(tensors.items(), policy_version=1))
        tensors = change(tensors, "model.norm.weight")
        only = [each for each in await stager.engines() if each.engine_id == "engine-0"]
        await by.transfer(taker.take(tensors.items(), policy_version=2), only, stager.begin)
        await steady.apply(2)
        tensors = change(tensors, "model.layers.0.input_layernorm.weight")

        await stager.publish(by, taker.take(tensors.items(), policy_version=3))

        assert [each.stored.base_policy_version for each in stager.begun[-1].transfers] == [2, 1]
        for each in (steady, late):
            await assert_serves(each, tensors)


async def test_a_delta_on_another_base_is_refused_and_the_whole_version_sent(embedded: Host, tmp_path: Path) -> None:
    by, taker, stager = Store(tmp_path), snapshots("store"), Stager(embedded)
    tensors = other_weights(embedded.model, 260)
    await stager.publish(by, taker.take(tensors.items(), policy_version=1))
    engines = await stager.engines()
    await embedded.publish(other_weights(embedded.model, 261))  # somebody else's version 2
    tensors = change(tensors, "model.norm.weight")
    snapshot = taker.take(tensors.items(), policy_version=3)

    assert await by.transfer(snapshot, engines, stager.begin) == []
    assert stager.failures == [WeightsBaseMismatch.reason]
    assert await stager.publish(by, snapshot) == ["engine-0"]

    assert stager.kinds() == [FULL]
    await assert_serves(embedded, tensors)


async def test_a_delta_is_refused_where_the_base_was_discarded(embedded: Host, tmp_path: Path) -> None:
    by, taker, stager = Store(tmp_path), snapshots("store"), Stager(embedded)
    tensors = other_weights(embedded.model, 262)
    await stager.publish(by, taker.take(tensors.items(), policy_version=1))
    await embedded.sleep(discard_weights=True)
    tensors = change(tensors, "model.norm.weight")
    snapshot = taker.take(tensors.items(), policy_version=2)

    assert await stager.publish(by, snapshot) == []
    assert stager.failures == [WeightsBaseMismatch.reason]
    await stager.publish(by, snapshot)
    await embedded.wake_up()

    await assert_serves(embedded, tensors)


async def test_a_step_that_changed_nothing_is_a_version_too(embedded: Host, tmp_path: Path) -> None:
    by, taker, stager = Store(tmp_path), snapshots("store"), Stager(embedded)
    tensors = other_weights(embedded.model, 263)
    for version in (1, 2):
        await stager.publish(by, taker.take(tensors.items(), policy_version=version))

    assert stager.kinds() == [DELTA]
    await assert_serves(embedded, tensors)


async def test_a_delta_without_a_base_is_refused(embedded: Host, tmp_path: Path) -> None:
    taker = snapshots("store")
    await Stager(embedded).publish(
        Store(tmp_path), taker.take(other_weights(embedded.model, 264).items(), policy_version=1)
    )
    (folder,) = listed(tmp_path)
    weights = stored.describe(folder)
    weights.kind = DELTA
    request = engine_pb2.StageWeightsRequest(policy_version=2, stored=weights)

    with pytest.raises(FarmError, match="names no base_policy_version"):
        await rpc.call(embedded.stub.StageWeights, request, timeout=SECONDS, retry=False)


# --- adapters and the folder ---


async def test_where_only_an_adapter_learns_it_travels_alone(embedded: Host, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base: Any = AutoModelForCausalLM.from_pretrained(embedded.model, dtype=torch.float32)
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, settings)
    model.save_pretrained(tmp_path / "peft")
    adapter = read_adapter(tmp_path / "peft")
    by, stager = Store(tmp_path / "store"), Stager(embedded)

    await stager.publish(by, snapshots("store").take_adapter(adapter, policy_version=1))

    assert stager.kinds() == [LORA]
    await assert_serves(embedded, dict(model.merge_and_unload().named_parameters()))


async def test_folders_of_the_last_two_versions_are_kept_and_others_are_not_touched(
    embedded: Host, tmp_path: Path
) -> None:
    (tmp_path / "v-of-somebody-else").mkdir()
    (tmp_path / ".unfinished-v7-whole-00000000").mkdir()
    (tmp_path / "v7-whole-0123abcd").mkdir()  # of a trainer before
    by, taker, stager = Store(tmp_path, deltas=False), snapshots("store"), Stager(embedded)

    for version in (8, 9, 10):
        tensors = other_weights(embedded.model, version)
        await stager.publish(by, taker.take(tensors.items(), policy_version=version))

    assert sorted(path.name.rpartition("-")[0] for path in listed(tmp_path)) == [
        "v-of-somebody",
        "v10-whole",
        "v9-whole",
    ]


async def test_engines_that_are_served_beside_each_other_read_one_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    snapshot = snapshots("store").take([("a", torch.ones(10))], policy_version=1)
    first_done = asyncio.Event()

    async def begin(request: llm_proxy_pb2.BeginWeightUpdateRequest) -> llm_proxy_pb2.BeginWeightUpdateResponse:
        (transfer,) = request.transfers
        if transfer.engine_id == "slow":
            await first_done.wait()
        assert stored.verified(transfer.stored)
        return llm_proxy_pb2.BeginWeightUpdateResponse(
            results=[llm_proxy_pb2.EngineTransferResult(engine_id=transfer.engine_id)]
        )

    async def bring_to(engine_id: str) -> list[str]:
        return await store.transfer(snapshot, [llm_proxy_pb2.Engine(engine_id=engine_id)], begin)

    slow = asyncio.create_task(bring_to("slow"))
    assert await bring_to("quick") == ["quick"]
    first_done.set()

    assert await slow == ["slow"]
    assert len(listed(tmp_path)) == 1


async def test_an_engine_has_a_version_though_its_folder_cannot_be_listed_any_more(tmp_path: Path) -> None:
    store = Store(tmp_path / "mount")
    snapshot = snapshots("store").take([("a", torch.ones(10))], policy_version=1)

    async def begin(request: llm_proxy_pb2.BeginWeightUpdateRequest) -> llm_proxy_pb2.BeginWeightUpdateResponse:
        (tmp_path / "mount").rename(tmp_path / "gone")
        (transfer,) = request.transfers
        result = llm_proxy_pb2.EngineTransferResult(engine_id=transfer.engine_id)
        return llm_proxy_pb2.BeginWeightUpdateResponse(results=[result])

    assert await store.transfer(snapshot, [llm_proxy_pb2.Engine(engine_id="e")], begin) == ["e"]


async def test_a_disk_without_room_is_a_failure_that_leaves_nothing(
    embedded: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by, taker, stager = Store(tmp_path), snapshots("store"), Stager(embedded)
    snapshot = taker.take(other_weights(embedded.model, 270).items(), policy_version=1)

    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "_write_all", full)
        with pytest.raises(WeightsFailed, match="No space left on device"):
            await stager.publish(by, snapshot)
    assert listed(tmp_path) == []

    assert await stager.publish(by, snapshot) == ["engine-0"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one")
@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (1, 0)])
async def test_versions_come_by_nccl(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch, sender: int, receiver: int
) -> None:
    links = Links(host="127.0.0.1", port=0, timeout_seconds=30, gpu=torch.device("cuda", sender))
    with monkeypatch.context() as other:
        other.setenv("CUDA_VISIBLE_DEVICES", str(receiver))
        process = Process("--model.path", str(tied_model), "--engine.device", "cuda")
        process.__enter__()
    async with AsyncExitStack() as life:
        life.push(process.__exit__)
        host = await life.enter_async_context(connect(process.address(), tied_model))
        taker, stager = snapshots("nccl"), Stager(host)
        for version in (1, 2):
            tensors = other_weights(tied_model, 280 + version)
            assert await stager.publish(links, taker.take(tensors.items(), policy_version=version)) == ["engine-0"]
            await assert_serves(host, tensors)
