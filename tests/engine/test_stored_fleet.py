"""Versions from files through a real llm_proxy: each of its engines reads them for itself."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from rollfarm import rpc, stored, tokens
from rollfarm.v1 import engine_pb2, llm_proxy_pb2
from tests.engine.kit import SECONDS, Reference, embedded_root, other_weights, prompts, serve
from tests.engine.process import Process
from tests.llm_proxy.support import Proxy, asked, run_proxy

BEHIND = llm_proxy_pb2.Engine.STATE_BEHIND
SERVING = llm_proxy_pb2.Engine.STATE_SERVING


def write(folder: Path, tensors: dict[str, Tensor]) -> engine_pb2.StoredWeights:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    return stored.describe(folder)


async def begin(proxy: Proxy, weights: engine_pb2.StoredWeights, engines: Sequence[Any]) -> list[str]:
    """Stage version 1; the reason of each engine's failure, or ""."""
    request = llm_proxy_pb2.BeginWeightUpdateRequest(
        policy_version=1,
        transfers=[
            llm_proxy_pb2.EngineTransfer(engine_id=engine.engine_id, instance_id=engine.instance_id)
            for engine in engines
        ],
        stored=weights,
    )
    answer = await rpc.call(proxy.stub.BeginWeightUpdate, request, timeout=SECONDS)
    return [result.failure.reason for result in answer.results]


async def greedy(proxy: Proxy, asked_for: Sequence[list[int]]) -> list[tuple[list[int], str]]:
    """Each prompt's tokens, and the engine that made them."""
    results = [
        await proxy.generate(asked(str(i), prompt=prompt, max_tokens=16, temperature=0.0), SECONDS)
        for i, prompt in enumerate(asked_for)
    ]
    return [(tokens.unpack_ids(result.token_ids).tolist(), result.engine_id) for result in results]


async def test_every_engine_reads_a_version_and_they_serve_it_together(tied_model: Path, tmp_path: Path) -> None:
    tensors = other_weights(tied_model, 130)
    weights = write(tmp_path / "v1", tensors)
    async with (
        serve(embedded_root(tied_model)) as one,
        serve(embedded_root(tied_model)) as other,
        run_proxy(one.address, other.address) as proxy,
    ):
        engines = (await proxy.serving(2)).engines

        assert await begin(proxy, weights, engines) == ["", ""]
        committed = await proxy.commit(1)

        assert set(committed.engine_ids) == {one.address, other.address}
        reference = Reference(tied_model, tensors)
        expected = [reference.greedy(prompt, 16) for prompt in prompts(4)]
        assert [ids for ids, _ in await greedy(proxy, prompts(4))] == expected
        for host in (one, other):
            answers = await host.client.generate(prompts(4), temperature=0)
            assert [answer.ids for answer in answers] == expected


@pytest.mark.slow
async def test_an_engine_whose_file_is_spoilt_fails_alone(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine runs in a folder of its own, where a relative path leads to a copy of its own."""
    tensors = other_weights(tied_model, 131)
    weights = write(tmp_path / "good" / "v1", tensors)
    weights.uri = "v1"
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    (tmp_path / "bad" / "v1" / "model.safetensors").write_bytes(b"spoilt")
    monkeypatch.chdir(tmp_path / "good")
    flags = ("--model.path", str(tied_model), "--engine.device", "cpu")
    with Process(*flags, folder=tmp_path / "bad") as process:
        bad = process.address()
        async with serve(embedded_root(tied_model)) as good, run_proxy(good.address, bad) as proxy:
            engines = {engine.engine_id: engine for engine in (await proxy.serving(2)).engines}

            assert await begin(proxy, weights, [engines[good.address], engines[bad]]) == ["", "WEIGHTS_FAILED"]
            committed = await proxy.commit(1)

            assert list(committed.engine_ids) == [good.address]
            states = {engine.engine_id: engine.state for engine in (await proxy.list_engines()).engines}
            assert states == {good.address: SERVING, bad: BEHIND}
            reference = Reference(tied_model, tensors)
            assert await greedy(proxy, prompts(4)) == [
                (reference.greedy(prompt, 16), good.address) for prompt in prompts(4)
            ]
