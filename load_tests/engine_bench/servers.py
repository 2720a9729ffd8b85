"""The processes under load: engine hosts, llm_proxies, and the model that a real engine needs."""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from load_tests.buffering.servers import serving
from rollfarm import rpc
from rollfarm.ports import free_port
from rollfarm.v1 import llm_proxy_pb2, llm_proxy_pb2_grpc

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"


@dataclass(frozen=True)
class Server:
    """A process that serves."""

    address: str
    pid: int


@contextmanager
def engine(folder: Path, name: str, flags: dict[str, str]) -> Iterator[Server]:
    """`python -m llm_proxy.engine` until the block ends."""
    with _service(folder, name, "llm_proxy.engine", "engine", flags) as server:
        yield server


@contextmanager
def llm_proxy(folder: Path, name: str, engines: Sequence[Server], flags: dict[str, str]) -> Iterator[Server]:
    """`python -m llm_proxy` until the block ends, from when every engine serves."""
    addresses = json.dumps([engine.address for engine in engines])
    with _service(folder, name, "llm_proxy", "llm_proxy", flags | {"llm_proxy.engines": addresses}) as server:
        asyncio.run(_until_serving(server.address, len(engines)))
        yield server


@contextmanager
def _service(folder: Path, name: str, module: str, table: str, flags: dict[str, str]) -> Iterator[Server]:
    address = f"127.0.0.1:{free_port()}"
    flags = flags | {f"{table}.listen.port": address.rpartition(":")[2]}
    command = [sys.executable, "-m", module, *(word for key, value in flags.items() for word in (f"--{key}", value))]
    with serving(command, folder / f"{name}.log", lambda: asyncio.run(rpc.is_serving(address, timeout=0.5))) as pid:
        yield Server(address, pid)


async def _until_serving(address: str, count: int) -> None:
    async with rpc.channel(address) as channel, asyncio.timeout(60):
        stub = llm_proxy_pb2_grpc.LlmProxyServiceStub(channel)
        serving_count, revision = 0, None
        while serving_count < count:
            request = llm_proxy_pb2.ListEnginesRequest(after_revision=revision)
            listed = await rpc.call(stub.ListEngines, request, timeout=10)
            serving_count = sum(each.state == llm_proxy_pb2.Engine.STATE_SERVING for each in listed.engines)
            revision = listed.revision


def make_model(folder: Path) -> int:
    """A random decoder of about 3 M parameters in Hugging Face format; how many it has. Needs torch."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return model.num_parameters()
