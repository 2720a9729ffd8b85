"""What can go wrong with a real vLLM while its process lives."""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from llm_proxy.engine.adapters.vllm_server import SharedMemory
from llm_proxy.engine.config import EngineConfig, EngineRoot, VllmConfig
from rollfarm.errors import FarmError, InvalidArgument
from rollfarm.run import ModelConfig
from rollfarm.v1 import llm_proxy_pb2
from tests.engine.kit import embedded_root, other_weights, serve
from tests.engine.process import Process, vllm_flags
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
