"""env_manager as a process: how it starts, how it refuses to, how it stops."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from env_manager.model import load
from rollfarm.config import ConfigError
from rollfarm.ports import free_port
from rollfarm.v1 import trajectory_pb2
from tests.env_manager.fakes import FakeBuffer, FakeProxy, FakeRewards, episode, serving, tokenizer
from tests.env_manager.hosting import Echo, attached


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 96}))
    return folder


def test_a_model_brings_its_tokenizer_and_its_context(model: Path):
    renderer, context_tokens = load(str(model), {}, 0)

    assert context_tokens == 96
    assert len(renderer.stop_token_ids) == 1
    assert load(str(model), {}, 64)[1] == 64


def test_more_context_than_the_model_has_is_refused(model: Path):
    with pytest.raises(ConfigError, match="128 is more than the model's 96"):
        load(str(model), {}, 128)


def test_a_model_that_is_not_there_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match="no usable model at '/nowhere"):
        load("/nowhere/at/all", {}, 0)


def test_a_model_without_a_chat_template_is_refused(model: Path):
    (model / "chat_template.jinja").unlink()

    with pytest.raises(ConfigError, match="no chat template"):
        load(str(model), {}, 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env_manager.slotz", "3"], "Did you mean --env_manager.slots?"),
        (["--env_manager.slots", "0"], "env_manager.slots: Input should be greater than or equal to 1"),
        (["--env_manager.slots", "1"], "model.path: missing"),
    ],
)
def test_a_wrong_configuration_ends_the_process_with_status_2_and_a_remedy(flags: list[str], message: str):
    ended = subprocess.run([sys.executable, "-m", "env_manager", *flags], capture_output=True, text=True)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr


def test_the_worker_imports_no_torch():
    code = (
        "import sys, env_manager.wiring, env_manager.__main__\n"
        "from env_manager.model import load\n"
        "try: load('/nowhere/at/all', {}, 0)\n"
        "except Exception as error: assert 'no usable model' in str(error)\n"
        "assert 'transformers' in sys.modules and 'torch' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


async def test_the_process_plays_what_it_leases_and_gives_back_the_rest_on_sigterm(model: Path):
    words = tokenizer()
    buffer, rewards = FakeBuffer(), FakeRewards()
    proxy = FakeProxy(lambda prompt, asked: words.encode("left") if asked.generation.session_id == "lease-0" else None)
    buffer.add(episode(settings='{"size": 2}'), episode(settings='{"size": 2}'))
    async with (
        serving(buffer.register) as buffer_address,
        serving(proxy.register) as proxy_address,
        serving(rewards.register) as reward_address,
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "env_manager", "--model.path", str(model), "--env_manager.listen.port", "0"),
            *("--env_manager.sample_buffer_address", buffer_address),
            *("--env_manager.llm_proxy_address", proxy_address),
            *("--env_manager.reward_gateway_address", reward_address),
        )
        try:
            await buffer.until(lambda: len(buffer.completed) == 1 and len(proxy.requests) >= 5, 30)
            process.send_signal(signal.SIGTERM)
            returned = await asyncio.wait_for(process.wait(), 15)
        finally:
            if process.returncode is None:
                process.kill()

    assert returned == 0
    assert list(buffer.completed) == ["lease-0"]
    assert {lease: failed.outcome for lease, failed in buffer.failed.items()} == {
        "lease-1": trajectory_pb2.OUTCOME_CANCELLED
    }


async def test_on_sigterm_it_gives_leases_back_before_it_lets_go_of_a_worker_that_dialled_in(model: Path):
    buffer, rewards, port = FakeBuffer(), FakeRewards(), free_port()
    proxy = FakeProxy(lambda prompt, asked: None)
    async with (
        serving(buffer.register) as buffer_address,
        serving(proxy.register) as proxy_address,
        serving(rewards.register) as reward_address,
        attached(f"127.0.0.1:{port}", Echo),
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "env_manager", "--model.path", str(model)),
            *("--env_manager.listen.port", str(port), "--env_manager.listen.drain_seconds", "60"),
            *("--env_manager.sample_buffer_address", buffer_address),
            *("--env_manager.llm_proxy_address", proxy_address),
            *("--env_manager.reward_gateway_address", reward_address),
            *("--env_manager.environments", "echo"),
        )
        try:
            buffer.add(episode("echo"))
            await proxy.until(lambda: bool(proxy.requests), 30)
            process.send_signal(signal.SIGTERM)
            returned = await asyncio.wait_for(process.wait(), 30)
        finally:
            if process.returncode is None:
                process.kill()

    assert returned == 0
    assert [failed.outcome for failed in buffer.failed.values()] == [trajectory_pb2.OUTCOME_CANCELLED]
