"""A real vLLM: what can go wrong while its process lives, and one that is attached by its URL."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from llm_proxy.engine import adapters
from llm_proxy.engine.adapters.shared_memory import SharedMemory
from llm_proxy.engine.config import EngineConfig, EngineRoot, VllmConfig
from rollfarm.config import ConfigError
from rollfarm.errors import EngineFailed, FarmError, InvalidArgument, Unsupported
from rollfarm.ports import free_port
from rollfarm.run import ModelConfig
from rollfarm.tokens import unpack_ids, unpack_logprobs
from rollfarm.v1 import llm_proxy_pb2
from tests.engine.kit import CONTEXT, Reference, embedded_root, other_weights, prompts, serve
from tests.engine.process import ROOT, Process, vllm_flags
from tests.engine.stand_in import attached_root
from tests.llm_proxy.support import asked, run_proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

CONNECTING, SERVING = llm_proxy_pb2.Engine.STATE_CONNECTING, llm_proxy_pb2.Engine.STATE_SERVING


async def test_a_vllm_that_hangs_is_given_up_until_it_answers_again(tied_model: Path, vllm_python: Path) -> None:
    with Process(*vllm_flags(tied_model, vllm_python)) as hung:
        first = await asyncio.to_thread(hung.address)
        async with serve(embedded_root(tied_model)) as other, run_proxy(first, health_timeout_seconds=2.0) as proxy:
            await proxy.serving()
            generating = [asyncio.create_task(proxy.generate(asked(f"r{n}", max_tokens=200), 60)) for n in range(8)]
            await proxy.until(lambda: proxy.fleet.router.running_count == 8)
            (vllm,) = psutil.Process(hung.process.pid).children()
            vllm.send_signal(signal.SIGSTOP)
            await proxy.attach(other.address)

            results = await asyncio.gather(*generating)

            assert {result.engine_id for result in results} == {other.address}
            listed = await proxy.list_engines()
            assert [engine.state for engine in listed.engines] == [CONNECTING, SERVING]
            assert "vLLM does not answer" in listed.engines[0].detail
            vllm.send_signal(signal.SIGCONT)
            await proxy.serving(2)


async def test_what_a_killed_vllm_had_streamed_is_kept_and_gone_on_from(tied_model: Path, vllm_python: Path) -> None:
    reference, many = Reference(tied_model), prompts(8, seed=3)
    flags = [*vllm_flags(tied_model, vllm_python), "--engine.vllm.stream_interval", "8"]
    with Process(*flags) as killed:
        first = await asyncio.to_thread(killed.address)
        async with serve(embedded_root(tied_model)) as other, run_proxy(first) as proxy:
            await proxy.serving()
            generating = [
                asyncio.create_task(proxy.generate(asked(f"r{n}", prompt=prompt, max_tokens=200, temperature=0.0), 60))
                for n, prompt in enumerate(many)
            ]
            engine = proxy.fleet.router.engine(first)
            await proxy.until(lambda: len(engine.attempts) == 8)
            requests = [attempt.request for attempt in engine.attempts.values() if attempt.request is not None]
            await proxy.until(lambda: all(request.made >= 16 for request in requests))
            for process in psutil.Process(killed.process.pid).children(recursive=True):
                process.kill()
            await proxy.until(lambda: not engine.is_reached)
            kept = {each.request_id: (bytes(each.token_ids), bytes(each.logprobs)) for each in requests}
            await proxy.attach(other.address)
            results = await asyncio.gather(*generating)

    assert len(kept) == 8
    for prompt, result in zip(many, results, strict=True):
        token_ids, logprobs = kept[result.request_id]
        ids = unpack_ids(result.token_ids).tolist()
        assert 16 * 4 <= len(token_ids) < 200 * 4
        assert result.engine_id == other.address
        assert result.token_ids.startswith(token_ids)
        assert result.logprobs.startswith(logprobs)
        assert ids == reference.greedy(prompt, 200)
        np.testing.assert_allclose(unpack_logprobs(result.logprobs), reference.chosen(prompt, ids), atol=1e-4)


async def test_a_vllm_that_refuses_new_weights_takes_its_host_down(
    tied_model: Path, vllm_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedMemory, "describe", lambda *_: "not what vLLM expects")
    vllm = VllmConfig(python=vllm_python, start_seconds=300)
    engine = EngineConfig(adapter="vllm", kv_cache=64_000_000, vllm=vllm)  # pyright: ignore[reportArgumentType]
    root = EngineRoot(model=ModelConfig(path=str(tied_model)), engine=engine)

    with pytest.raises(ExceptionGroup) as ended:
        await update(root)

    assert ended.group_contains(InvalidArgument, match="vLLM refuses")


async def update(root: EngineRoot) -> None:
    """Serve the engine, and try to bring new weights to it."""
    async with serve(root) as host:
        version = await host.stage(other_weights(host.model, 1))
        with pytest.raises(FarmError):
            await host.apply(version)


@pytest.fixture(scope="module")
def lone_vllm(tied_model: Path, vllm_python: Path) -> "Iterator[tuple[str, subprocess.Popen[bytes]]]":
    """A vLLM that is started as docs/configure.md says, and where it listens."""
    port = free_port()
    process = subprocess.Popen(
        [
            *(vllm_python, "-m", "rollfarm.vllm_gloo", "--model", tied_model, "--dtype", "float32"),
            *("--max-model-len", str(CONTEXT), "--max-num-seqs", "64", "--host", "127.0.0.1", "--port", str(port)),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
            *("--weight-transfer-config", '{"backend": "rollfarm"}', "--kv-cache-memory-bytes", "64M"),
            *("--enforce-eager", "--distributed-executor-backend", "uni", "--uvicorn-log-level", "warning"),
        ],
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | ON_CPU,
    )
    yield f"http://127.0.0.1:{port}", process
    process.terminate()
    process.wait(60)


ON_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


async def test_an_attached_vllm_outlives_its_hosts_and_begins_each_time_at_the_base_model(
    tied_model: Path, lone_vllm: "tuple[str, subprocess.Popen[bytes]]"
) -> None:
    url, process = lone_vllm
    tensors = other_weights(tied_model, 1)

    async with serve(attached_root(tied_model, url, start_seconds=300)) as first:
        await first.publish(tensors)
        (under_new,) = await first.client.generate([[1, 2, 3]], temperature=0)
        await first.pause()
    async with serve(attached_root(tied_model, url)) as second:
        begun = await second.status()
        (under_base,) = await second.client.generate([[1, 2, 3]], temperature=0)

    assert process.poll() is None
    assert under_new.ids == Reference(tied_model, tensors).greedy([1, 2, 3], 16)
    assert (begun.policy_version, begun.paused, begun.server_version) == (0, False, "0.32.0")
    assert under_base.ids == Reference(tied_model).greedy([1, 2, 3], 16)
    assert set(under_base.versions) == {0}


async def test_a_vllm_with_other_settings_is_not_attached(
    tied_model: Path, untied_model: Path, lone_vllm: "tuple[str, subprocess.Popen[bytes]]"
) -> None:
    url, _ = lone_vllm

    with pytest.raises(ConfigError, match=r"its slots are 64.*Start it with .* --max-num-seqs 128 "):
        await adapters.make(attached_root(tied_model, url, start_seconds=300, slots=128)).start(lambda chunks: None)
    with pytest.raises(ConfigError, match=f"it serves {tied_model}"):
        await adapters.make(attached_root(untied_model, url)).start(lambda chunks: None)


async def test_a_vllm_on_a_cpu_says_that_it_cannot_sleep(
    tied_model: Path, lone_vllm: "tuple[str, subprocess.Popen[bytes]]"
) -> None:
    url, _ = lone_vllm

    async with serve(attached_root(tied_model, url, start_seconds=300)) as host:
        with pytest.raises(Unsupported, match="--enable-sleep-mode"):
            await host.sleep()

        assert not (await host.status()).sleeping


async def test_a_host_ends_with_the_vllm_that_it_is_attached_to(
    tied_model: Path, lone_vllm: "tuple[str, subprocess.Popen[bytes]]"
) -> None:
    url, process = lone_vllm

    adapter = adapters.make(attached_root(tied_model, url, start_seconds=300))
    await adapter.start(lambda chunks: None)

    process.kill()

    with pytest.raises(EngineFailed, match="is gone"):
        await asyncio.wait_for(adapter.watch(), 30)
    await adapter.stop()
