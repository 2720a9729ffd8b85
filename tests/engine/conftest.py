"""Tiny models, engine hosts in this process, and a trainer's end of a weight broadcast."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.engine.kit import Host, embedded_root, serve

torch.set_num_threads(1)

VOCABULARY = 97


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
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), seed=0, tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("untied"), seed=1, tied=False)


@pytest.fixture
async def embedded(tied_model: Path) -> AsyncIterator[Host]:
    async with serve(embedded_root(tied_model)) as host:
        yield host


@pytest.fixture
async def host(embedded: Host) -> Host:
    return embedded
