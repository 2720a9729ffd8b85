"""Tiny models, and the engine hosts that the contract suite runs against: embedded ones here, others as processes."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.engine.kit import CONTEXT, VOCABULARY, Host, connect, embedded_root, serve
from tests.engine.process import ROOT, Process, sglang_flags, vllm_flags

torch.set_num_threads(1)

INTERVAL = "8"
"""Tokens of a chunk, where the server streams: far fewer than the contract's requests have."""


def make_model(folder: Path, *, seed: int, tied: bool) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), seed=0, tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("untied"), seed=1, tied=False)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    python = Path(os.environ.get("ROLLFARM_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
    if not python.is_file():
        pytest.skip(f"vLLM is not installed ({python}): run tools/install-vllm.sh, or set ROLLFARM_VLLM_PYTHON")
    return python


@pytest.fixture(scope="session")
def vllm_address(tied_model: Path, vllm_python: Path) -> Iterator[str]:
    with Process(*vllm_flags(tied_model, vllm_python)) as process:
        yield process.address()


@pytest.fixture(scope="session")
def streaming_vllm_address(tied_model: Path, vllm_python: Path) -> Iterator[str]:
    with Process(*vllm_flags(tied_model, vllm_python), "--engine.vllm.stream_interval", INTERVAL) as process:
        yield process.address()


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    python = Path(os.environ.get("ROLLFARM_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
    if not python.is_file():
        pytest.skip(f"SGLang is not installed ({python}): run tools/install-sglang.sh, or set ROLLFARM_SGLANG_PYTHON")
    return python


@pytest.fixture(scope="session")
def sglang_address(tied_model: Path, sglang_python: Path) -> Iterator[str]:
    with Process(*sglang_flags(tied_model, sglang_python)) as process:
        yield process.address()


@pytest.fixture(scope="session")
def streaming_sglang_address(tied_model: Path, sglang_python: Path) -> Iterator[str]:
    with Process(*sglang_flags(tied_model, sglang_python), "--engine.sglang.stream_interval", INTERVAL) as process:
        yield process.address()


@pytest.fixture
async def embedded(tied_model: Path) -> AsyncIterator[Host]:
    async with serve(embedded_root(tied_model)) as host:
        yield host


SERVER = [pytest.mark.slow, pytest.mark.timeout(400)]
SERVERS = ["vllm", "streaming_vllm", "sglang", "streaming_sglang"]


@pytest.fixture(params=["embedded", *(pytest.param(name, marks=SERVER) for name in SERVERS)])
async def host(request: pytest.FixtureRequest, tied_model: Path) -> AsyncIterator[Host]:
    """An engine at some version of the test's model: its weights may be an earlier test's."""
    if request.param == "embedded":
        async with serve(embedded_root(tied_model)) as embedded:
            yield embedded
    else:
        address = request.getfixturevalue(f"{request.param}_address")
        async with connect(address, tied_model) as server:
            yield server
