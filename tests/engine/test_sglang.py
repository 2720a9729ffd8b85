"""A real SGLang that is attached by its URL: what is particular about it, and how it ends."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM

from llm_proxy.engine import adapters
from llm_proxy.engine.adapters.shared_memory import SharedMemory
from llm_proxy.engine.config import EngineConfig, EngineRoot, SglangConfig
from rollfarm import rpc
from rollfarm.config import ConfigError, Listen
from rollfarm.errors import EngineFailed, Unsupported
from rollfarm.ports import free_port
from rollfarm.run import ModelConfig
from rollfarm.tokens import pack_ids, unpack_ids
from rollfarm.v1 import engine_pb2, trajectory_pb2
from rollfarm.v1.trajectory_pb2 import FINISH_REASON_ABORT, FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.engine.kit import CONTEXT, SECONDS, VOCABULARY, Reference, other_weights, prompts, serve
from tests.engine.process import ROOT, Process, sglang_flags

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

Lone = tuple[str, "subprocess.Popen[bytes]"]
"""Where it listens, and its process."""


@pytest.fixture(scope="module")
def model(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ends, as most models do, with tokens of its own: nearly half of them."""
    folder = tmp_path_factory.mktemp("ending")
    ending = AutoModelForCausalLM.from_pretrained(untied_model)
    ending.config.eos_token_id = ending.generation_config.eos_token_id = list(range(0, VOCABULARY, 2))
    ending.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lone_sglang(model: Path, sglang_python: Path) -> Iterator[Lone]:
    """An SGLang that is started as docs/configure.md says."""
    port = free_port()
    process = subprocess.Popen(
        [
            *(sglang_python, "-m", "rollfarm.sglang_loader", "--model-path", model, "--dtype", "float32"),
            *("--skip-tokenizer-init", "--context-length", str(CONTEXT + 8), "--max-running-requests", "64"),
            *("--custom-weight-loader", "rollfarm.sglang_loader.load", "--disable-overlap-schedule"),
            *("--sampling-mask-max-tokens", str(VOCABULARY), "--max-total-tokens", "30000", "--sleep-on-idle"),
            *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
        ],
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env=os.environ | {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "OMP_NUM_THREADS": "1"},
    )
    yield f"http://127.0.0.1:{port}", process
    process.kill()
    process.wait()


def attached_root(model: Path, url: str, *, slots: int = 64, stream_interval: int = 0) -> EngineRoot:
    sglang = SglangConfig(url=url, start_seconds=300, stream_interval=stream_interval)
    return EngineRoot(
        model=ModelConfig(path=str(model)),
        engine=EngineConfig(adapter="sglang", sglang=sglang, listen=Listen(drain_seconds=0), slots=slots),
    )


async def test_it_outlives_its_hosts_and_begins_each_time_at_the_base_model(model: Path, lone_sglang: Lone) -> None:
    url, process = lone_sglang
    tensors = other_weights(model, 1)

    async with serve(attached_root(model, url)) as first:
        await first.publish(tensors)
        (under_new,) = await first.client.generate([[1, 2, 3]], temperature=0)
        await first.busy(prompts(4), max_tokens=180)
        await first.pause()
    async with serve(attached_root(model, url)) as second:
        begun = await second.status()
        (under_base,) = await second.client.generate([[1, 2, 3]], temperature=0)

    assert process.poll() is None
    assert under_new.ids == likeliest(Reference(model, tensors), under_new.ids)
    assert (begun.policy_version, begun.paused, begun.server_version) == (0, False, "0.5.23")
    assert under_base.ids == likeliest(Reference(model), under_base.ids)
    assert len(under_new.ids) == len(under_base.ids) == 16
    assert set(under_base.versions) == {0}


def likeliest(reference: Reference, output: list[int]) -> list[int]:
    """Before each token of the output to [1, 2, 3]. The reference's own `greedy` would end at the model's own."""
    return reference.logprobs([1, 2, 3], output).argmax(axis=-1).tolist()


@pytest.mark.parametrize("stream_interval", [0, 3])
async def test_the_models_own_last_tokens_end_nothing_unless_asked_to(
    model: Path, lone_sglang: Lone, stream_interval: int
) -> None:
    reference = Reference(model)
    asked = prompts(8, seed=1)

    async with serve(attached_root(model, lone_sglang[0], stream_interval=stream_interval)) as host:
        answers = await host.client.generate(asked, max_tokens=40, stop_token_ids=[VOCABULARY - 2])

    assert any(token % 2 == 0 for answer in answers for token in answer.ids[:-1])
    for prompt, answer in zip(asked, answers, strict=True):
        if answer.finish == FINISH_REASON_STOP:
            assert answer.ids.index(VOCABULARY - 2) == len(answer.ids) - 1
        else:
            assert (answer.finish, len(answer.ids)) == (FINISH_REASON_LENGTH, 40)
        assert answer.logprobs == pytest.approx(reference.chosen(prompt, answer.ids), abs=1e-4)


async def test_tokens_that_could_not_be_sampled_are_the_last_of_the_likeliest(model: Path, lone_sglang: Lone) -> None:
    async with serve(attached_root(model, lone_sglang[0])) as host:
        (answer,) = await host.client.generate([[1, 2, 3]], max_tokens=4, top_k=2, top_logprobs=4)

    for token, ids, logprobs in zip(answer.ids, answer.top_ids, answer.top_logprobs, strict=True):
        assert token in ids[:2]
        assert len(set(ids)) == 4
        assert sum(2.718281828**logprob for logprob in logprobs[:2]) == pytest.approx(1)
        assert logprobs[2:] == [-float("inf")] * 2


async def test_cancelling_a_request_leaves_those_whose_names_begin_alike(model: Path, lone_sglang: Lone) -> None:
    async with serve(attached_root(model, lone_sglang[0])) as host:
        last: dict[str, engine_pb2.GenerationChunk] = {}
        sampling = trajectory_pb2.Sampling(max_tokens=180, temperature=1.0)
        asked = [
            engine_pb2.Generation(request_id=name, prompt_token_ids=pack_ids([1, 2, 3]), sampling=sampling)
            for name in ("a", "ab")
        ]
        call: Any = host.stub.Generate()
        await call.write(engine_pb2.EngineServiceGenerateRequest(generations=asked))
        await host.until(lambda status: status.running_count == 2)
        await host.cancel(["a"])
        await call.done_writing()
        async for answer in call:
            last |= {chunk.request_id: chunk for chunk in answer.chunks}

    assert last["a"].finish_reason == FINISH_REASON_ABORT
    assert (last["ab"].finish_reason, len(unpack_ids(last["ab"].token_ids))) == (FINISH_REASON_LENGTH, 180)


async def test_requests_can_be_given_back_while_it_stands_still(model: Path, lone_sglang: Lone) -> None:
    old = Reference(model)
    asked = prompts(8, seed=2)

    async with serve(attached_root(model, lone_sglang[0])) as host:
        version = await host.stage(other_weights(model, 2))
        ids = await host.busy(asked, max_tokens=180)
        await host.pause()
        await host.apply(version, engine_pb2.UPDATE_MODE_RESUME)
        answers = await host.client.finished(ids)
        status = await host.status()

    assert (status.paused, status.policy_version) == (True, version)
    for prompt, answer in zip(asked, answers, strict=True):
        assert (answer.finish, set(answer.versions)) == (FINISH_REASON_ABORT, {0})
        assert answer.logprobs == pytest.approx(old.chosen(prompt, answer.ids), abs=1e-4)


async def test_another_one_than_is_needed_is_not_attached(model: Path, tied_model: Path, lone_sglang: Lone) -> None:
    with pytest.raises(ConfigError, match=r"its slots are 64.*Start it with .* --max-running-requests 128 "):
        await adapters.make(attached_root(model, lone_sglang[0], slots=128)).start(lambda chunks: None)
    with pytest.raises(ConfigError, match=f"it serves {model}"):
        await adapters.make(attached_root(tied_model, lone_sglang[0])).start(lambda chunks: None)


async def test_on_a_cpu_it_cannot_sleep(model: Path, lone_sglang: Lone) -> None:
    async with serve(attached_root(model, lone_sglang[0])) as host:
        with pytest.raises(Unsupported, match="--enable-memory-saver"):
            await host.sleep()

        assert not (await host.status()).sleeping


async def test_one_whose_scheduler_hangs_is_not_well_until_it_goes_on(model: Path, lone_sglang: Lone) -> None:
    url, process = lone_sglang
    scheduler = scheduler_of(process.pid)

    request = engine_pb2.EngineServiceGetStatusRequest()

    async with serve(attached_root(model, url)) as host:
        scheduler.suspend()
        try:
            with pytest.raises(EngineFailed, match="SGLang does not answer"):
                await rpc.call(host.stub.GetStatus, request, timeout=2, retry=False)
        finally:
            scheduler.resume()
        (answer,) = await host.client.generate([[1, 2, 3]])

    assert len(answer.ids) == 16


async def test_weights_that_it_cannot_load_end_it_and_its_host(
    model: Path, lone_sglang: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, process = lone_sglang

    with pytest.raises(ExceptionGroup) as ended:
        await update_with_nonsense(attached_root(model, url), monkeypatch)

    assert ended.group_contains(EngineFailed, match="SGLang")
    assert await asyncio.to_thread(process.wait, 30) != 0


async def update_with_nonsense(root: EngineRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(root) as host:
        version = await host.stage(other_weights(host.model, 1))
        nothing = {"path": "/proc/none/fd/1", "size_bytes": 1, "tensors": []}
        monkeypatch.setattr(SharedMemory, "describe", lambda *_: nothing)
        request = engine_pb2.ApplyWeightsRequest(policy_version=version)
        with pytest.raises(EngineFailed):
            await rpc.call(host.stub.ApplyWeights, request, timeout=SECONDS, retry=False)


async def test_a_child_ends_with_its_host(tied_model: Path, sglang_python: Path) -> None:
    with Process(*sglang_flags(tied_model, sglang_python)) as killed:
        await asyncio.to_thread(killed.address)
        family = psutil.Process(killed.process.pid).children(recursive=True)

        killed.process.kill()

        _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=60)
        assert len(family) > 1
        assert alive == []


def scheduler_of(pid: int) -> psutil.Process:
    (scheduler,) = [child for child in psutil.Process(pid).children(recursive=True) if "scheduler" in name(child)]
    return scheduler


def name(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
