"""Weights over real sockets to receivers that are processes of their own."""

import ast
import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from rollfarm import rpc
from rollfarm.config import ConfigError
from rollfarm.v1 import llm_proxy_pb2_grpc
from tests.trainer.stand_ins import Receiver, StandInProxy, serving_proxy
from trainer.config import TrainerConfig
from trainer.weights.build import build_transport
from trainer.weights.groups import Links
from trainer.weights.publisher import Publisher
from trainer.weights.snapshot import Snapshot, take_snapshot


def weights(version: int) -> dict[str, torch.Tensor]:
    """Tensors of several sizes and dtypes, over several buckets; one larger than a bucket."""
    dice = torch.Generator().manual_seed(version)
    return {
        "embed.weight": torch.randn(40, 8, generator=dice),
        "norm.weight": torch.randn(8, generator=dice),
        "scale": torch.randn((), generator=dice),
        "counter": torch.tensor([version]),
        "head.weight": torch.randn(40, 8, generator=dice),
    }


def snapshot(version: int) -> Snapshot:
    return take_snapshot(weights(version).items(), policy_version=version, dtype=torch.float32, bucket_size_bytes=1400)


async def hashes(receiver: Receiver) -> dict[str, str]:
    return ast.literal_eval(await receiver.ask("held"))


def expected(version: int) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in weights(version).items()}


@asynccontextmanager
async def publisher_to(
    proxy: StandInProxy, weights_host: str = "127.0.0.1", concurrent_engine_count: int = 0
) -> AsyncIterator[Publisher]:
    async with rpc.channel(proxy.address) as channel:
        yield Publisher(
            llm_proxy_pb2_grpc.LlmProxyServiceStub(channel),
            Links(host=weights_host, port=0, timeout_seconds=10),
            mode="keep",
            transfer_timeout_seconds=10,
            concurrent_engine_count=concurrent_engine_count,
        )


def test_a_snapshot_keeps_its_values_when_the_model_goes_on() -> None:
    live = {"w": torch.ones(3)}

    taken = take_snapshot(live.items(), policy_version=1, dtype=torch.bfloat16, bucket_size_bytes=64)
    live["w"].zero_()

    assert taken.buffers[0].view(torch.bfloat16).tolist() == [1, 1, 1]
    assert taken.specs[0].dtype == "bfloat16"


async def test_without_an_engine_a_version_is_announced_all_the_same() -> None:
    announced: list[int] = []

    async def announce() -> None:
        announced.append(1)

    async with serving_proxy() as proxy, publisher_to(proxy) as publisher:
        await publisher.publish(snapshot(1), announce)

    assert announced == [1]


async def test_engines_of_another_run_are_refused() -> None:
    async def announce() -> None: ...

    async with serving_proxy() as proxy, publisher_to(proxy) as publisher:
        proxy.policy_version = 7

        with pytest.raises(ConfigError, match="they served another run"):
            await publisher.publish(snapshot(3), announce)


def test_nccl_wants_the_trainer_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the trainer's device is cpu"):
        build_transport(TrainerConfig(transport="nccl", device="cpu"), tmp_path)


@pytest.mark.slow
async def test_engines_hold_the_version_before_it_is_announced_and_serve_it_afterwards() -> None:
    async with serving_proxy() as proxy, publisher_to(proxy) as publisher:
        for name in ("one", "two"):
            proxy.attach(name, await Receiver.start())
        seen: list[object] = []

        async def announce() -> None:
            seen.append([await hashes(receiver) for receiver in proxy.receivers.values()])
            seen.append(dict(proxy.versions))

        await publisher.publish(snapshot(1), announce)
        await publisher.publish(snapshot(2), announce)

        assert seen == [[expected(1)] * 2, {"one": 0, "two": 0}, [expected(2)] * 2, {"one": 1, "two": 1}]
        assert proxy.versions == {"one": 2, "two": 2}
        assert [[transfer.join for transfer in request.transfers] for request in proxy.begun] == [
            [True, True],
            [False, False],
        ]


@pytest.mark.slow
async def test_engines_change_as_many_at_a_time_as_was_asked_for() -> None:
    async def announce() -> None: ...

    async with serving_proxy() as proxy, publisher_to(proxy, concurrent_engine_count=1) as publisher:
        proxy.attach("one", await Receiver.start())
        await publisher.publish(snapshot(1), announce)

        assert [request.concurrent_engine_count for request in proxy.committed] == [1]


@pytest.mark.slow
async def test_an_engine_that_dies_holds_up_nobody_and_its_successor_catches_up() -> None:
    async def announce() -> None: ...

    async with serving_proxy() as proxy, publisher_to(proxy) as publisher:
        for name in ("one", "two"):
            proxy.attach(name, await Receiver.start())
        await publisher.publish(snapshot(1), announce)

        await proxy.receivers["two"].kill()
        await publisher.publish(snapshot(2), announce)
        assert proxy.versions == {"one": 2, "two": 1}

        watching = asyncio.create_task(publisher.watch())
        proxy.attach("two", await Receiver.start())
        await proxy.until(2)
        watching.cancel()

        assert await hashes(proxy.receivers["two"]) == expected(2)
        assert [transfer.engine_id for transfer in proxy.begun[-1].transfers] == ["two"]


@pytest.mark.slow
async def test_an_engine_that_hangs_slows_one_publication_and_is_served_again_once_it_takes_a_version() -> None:
    async def announce() -> None: ...

    async with serving_proxy() as proxy, publisher_to(proxy) as publisher:
        for name in ("one", "two"):
            proxy.attach(name, await Receiver.start())
        await publisher.publish(snapshot(1), announce)
        watching = asyncio.create_task(publisher.watch())
        proxy.hung, proxy.hang_seconds = {"two"}, 0.1
        await publisher.publish(snapshot(2), announce)

        proxy.hang_seconds = 60.0
        await proxy.until_staging({"two"})
        for version in (3, 4):
            async with asyncio.timeout(15):
                await publisher.publish(snapshot(version), announce)
        assert (proxy.versions, proxy.staging) == ({"one": 4, "two": 1}, {"two"})

        proxy.wake("two")
        await proxy.until(4)
        before = len(proxy.begun)
        await publisher.publish(snapshot(5), announce)
        watching.cancel()

        assert proxy.versions == {"one": 5, "two": 5}
        assert [len(request.transfers) for request in proxy.begun[before:]] == [2]
        assert await hashes(proxy.receivers["two"]) == expected(5)
