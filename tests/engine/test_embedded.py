"""The embedded engine alone: architectures, prompts in pieces, weights that break, and sleep."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llm_proxy.engine import adapters, attention
from llm_proxy.engine.attention import NAME
from llm_proxy.engine.batching import Batching
from llm_proxy.engine.requests import Request
from llm_proxy.engine.runner import Runner
from llm_proxy.engine.server import Context, EngineServicer
from rollfarm.config import ConfigError
from rollfarm.errors import WeightsNotStaged
from rollfarm.tokens import pack_ids
from rollfarm.v1 import engine_pb2, trajectory_pb2
from tests.engine.kit import Host, Reference, embedded_root, other_weights, prompts, serve

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=7)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SMALL,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2)
    ),
}


Output = tuple[list[int], list[float]]


def runner_of(architecture: str, folder: Path) -> Runner:
    """Of a random model, which is also left in the folder."""
    torch.manual_seed(0)
    MODELS[architecture]().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME).eval()
    return Runner(model, slots=8, context_tokens=0, kv_cache_bytes=10**7)


def assert_logprobs_agree(folder: Path, asked: list[list[int]], outputs: list[Output]) -> None:
    """With those of a plain forward pass of the folder's model."""
    reference = Reference(folder)
    for prompt, (ids, logprobs) in zip(asked, outputs, strict=True):
        np.testing.assert_allclose(logprobs, reference.chosen(prompt, ids), atol=1e-4)


def generate(runner: Runner, asked: list[list[int]], count: int, *, step_tokens: int, at_once: int = 1) -> list[Output]:
    """Every prompt's output and its log-probabilities; `at_once` prompts come with each step."""
    batching = Batching(slot_count=8, row_count=runner.row_count, step_tokens=step_tokens)
    outputs: dict[str, Output] = {str(i): ([], []) for i in range(len(asked))}
    waiting = [Request(str(i), np.array(p, dtype=np.int32), count) for i, p in enumerate(asked)]
    while waiting or batching.has_work():
        for _ in waiting[:at_once]:
            batching.add(waiting.pop(0))
        segments = batching.next_step()
        sampling = [s.sequence for s in segments if s.samples]
        sampled = runner.step(segments, [3] * len(sampling))
        batching.computed(segments)
        for sequence, token, logprob in zip(sampling, sampled.token_ids, sampled.logprobs, strict=True):
            outputs[sequence.request.key][0].append(token)
            outputs[sequence.request.key][1].append(logprob)
            batching.append(sequence, token)
    return list(outputs.values())


@pytest.mark.parametrize("architecture", MODELS)
def test_logprobs_agree_for_other_architectures_and_prompts_in_pieces(architecture: str, tmp_path: Path) -> None:
    runner, asked = runner_of(architecture, tmp_path), prompts(10, shortest=2, longest=40)

    outputs = generate(runner, asked, 12, step_tokens=17)

    assert_logprobs_agree(tmp_path, asked, outputs)


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("short", [0, 20, 256])
def test_logprobs_agree_whether_prompts_are_looked_at_together_or_alone(
    architecture: str, short: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SHORT", short)
    runner, asked = runner_of(architecture, tmp_path), prompts(12, shortest=2, longest=40)

    outputs = generate(runner, asked, 6, step_tokens=90, at_once=4)

    assert_logprobs_agree(tmp_path, asked, outputs)


@given(st.lists(st.integers(2, attention.SHORT), min_size=1, max_size=64))
def test_prompts_that_are_looked_at_together_are_at_most_half_padding(found: list[int]) -> None:
    counts = sorted(found, key=lambda count: attention.order(0, count))
    pieces = [counts[cut] for cut in attention.cuts(counts)]

    assert [count for piece in pieces for count in piece] == counts
    assert all(len(piece) * piece[-1] <= 2 * sum(piece) for piece in pieces)
    assert all(one[-1] < other[0] for one, other in pairwise(pieces))


def test_an_attention_with_what_the_engine_would_leave_out_is_refused() -> None:
    query, key, value = torch.zeros(3, 1, 2, 5, 8)

    with pytest.raises(TypeError, match="position_bias"):
        ALL_ATTENTION_FUNCTIONS[NAME](nn.Module(), query, key, value, None, position_bias=torch.zeros(5, 5))


def test_the_last_layer_works_where_a_token_is_sampled_and_the_others_everywhere(tmp_path: Path) -> None:
    runner = runner_of("llama", tmp_path)
    seen: list[int] = []
    for name, module in runner.model.named_modules():
        if name.endswith("down_proj"):
            module.register_forward_hook(lambda module, given, made: seen.append(len(given[0][0])))

    generate(runner, [[3, 5, 7, 9], [2, 4, 6]], 2, step_tokens=90, at_once=2)

    assert seen == [7, 7, 7, 2, 2, 2, 2, 2]


def test_a_model_without_a_cache_of_keys_is_refused_with_a_remedy() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model: PreTrainedModel = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2))

    with pytest.raises(ConfigError, match="cannot serve a MambaForCausalLM"):
        Runner(model.eval(), slots=8, context_tokens=64, kv_cache_bytes=10**7)


def test_a_cache_too_small_for_one_sequence_is_refused_with_a_remedy(untied_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(untied_model, attn_implementation=NAME).eval()

    with pytest.raises(ConfigError, match="Raise it, or lower engine"):
        Runner(model, slots=8, context_tokens=0, kv_cache_bytes=1000)


async def test_untied_heads_are_updated_too(untied_model: Path) -> None:
    tensors = other_weights(untied_model, 1)
    assert "lm_head.weight" in tensors

    async with serve(embedded_root(untied_model)) as host:
        await host.publish(tensors)
        (answer,) = await host.client.generate([[1, 2, 3]], temperature=0)

    assert answer.ids == Reference(untied_model, tensors).greedy([1, 2, 3], 16)


async def test_weights_may_come_in_another_precision(embedded: Host) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in other_weights(embedded.model, 2).items()}

    await embedded.publish(tensors)

    reference = Reference(embedded.model, {name: tensor.float() for name, tensor in tensors.items()})
    (answer,) = await embedded.client.generate([[1, 2, 3]])
    np.testing.assert_allclose(answer.logprobs, reference.chosen([1, 2, 3], answer.ids), atol=1e-4)


async def test_weights_that_are_not_finite_fail_requests_and_leave_nothing_behind(embedded: Host) -> None:
    good = other_weights(embedded.model, 3)
    await embedded.publish({name: torch.full_like(tensor, float("nan")) for name, tensor in good.items()})

    broken = await embedded.client.generate(prompts(4))
    await embedded.publish(good)
    answers = await embedded.client.generate(prompts(4))

    assert {answer.failure.reason for answer in broken if answer.failure} == {"GENERATION_FAILED"}
    reference = Reference(embedded.model, good)
    for prompt, answer in zip(prompts(4), answers, strict=True):
        np.testing.assert_allclose(answer.logprobs, reference.chosen(prompt, answer.ids), atol=1e-4)


async def test_a_sleeping_engine_gives_requests_back_lets_later_ones_wait_and_goes_on_awake(embedded: Host) -> None:
    asked = prompts(4)
    reference = Reference(embedded.model)
    sessions = [f"session-{i}" for i in range(4)]
    ids = await embedded.busy(asked, max_tokens=180, sessions=sessions)

    await embedded.sleep()
    await embedded.sleep()
    asleep = await embedded.status()
    late = await embedded.client.send(asked, temperature=0, sessions=sessions)
    await embedded.until(lambda status: status.waiting_count == 4)
    await embedded.wake_up()
    await embedded.wake_up()

    for prompt, answer in zip(asked, await embedded.client.finished(ids), strict=True):
        assert answer.finish == trajectory_pb2.FINISH_REASON_ABORT
        np.testing.assert_allclose(answer.logprobs, reference.chosen(prompt, answer.ids), atol=1e-4)
    assert (asleep.sleeping, asleep.running_count, asleep.kv_cache_usage) == (True, 0, 0)
    answers = await embedded.client.finished(late)
    assert [answer.ids for answer in answers] == [reference.greedy(prompt, 16) for prompt in asked]
    assert not (await embedded.status()).sleeping


@pytest.mark.parametrize("applied_asleep", [True, False])
async def test_without_weights_nothing_is_generated_until_a_version_is_applied(
    embedded: Host, applied_asleep: bool
) -> None:
    await embedded.publish(other_weights(embedded.model, 4))
    tensors = other_weights(embedded.model, 5)

    await embedded.sleep()
    await embedded.sleep(discard_weights=True)
    ids = await embedded.client.send([[1, 2, 3]], temperature=0)
    with pytest.raises(WeightsNotStaged):
        await embedded.apply(embedded.version)
    if applied_asleep:
        await embedded.publish(tensors)
        waiting = await embedded.status()
        await embedded.wake_up()
    else:
        await embedded.wake_up()
        waiting = await embedded.status()
        await embedded.publish(tensors)

    assert (waiting.sleeping, waiting.generated_token_count) == (True, 0)
    (answer,) = await embedded.client.finished(ids)
    assert answer.ids == Reference(embedded.model, tensors).greedy([1, 2, 3], 16)
    assert set(answer.versions) == {embedded.version}
    assert not (await embedded.status()).sleeping


async def test_sleep_gives_its_memory_back_to_the_system(tmp_path: Path) -> None:
    cache_bytes, weight_bytes = 64 * 2**20, 4 * 512 * 8192 * 6
    wide: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
    }
    Qwen3ForCausalLM(Qwen3Config(**SMALL | wide, head_dim=64)).save_pretrained(tmp_path)

    async with serve(embedded_root(tmp_path, kv_cache=cache_bytes, slots=4)) as host:
        awake = resident_bytes()
        await host.sleep()
        without_cache = resident_bytes()
        await host.sleep(discard_weights=True)
        without_weights = resident_bytes()

    assert awake - without_cache > 0.9 * cache_bytes
    assert without_cache - without_weights > 0.9 * weight_bytes


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


async def test_more_requests_than_slots_all_finish(tied_model: Path) -> None:
    async with serve(embedded_root(tied_model, slots=3)) as host:
        answers = await host.client.generate(prompts(20))

    assert all(len(answer.ids) == 16 for answer in answers)


async def test_a_caller_that_half_closes_its_stream_gets_every_chunk_however_late_it_reads(tied_model: Path) -> None:
    adapter = adapters.make(embedded_root(tied_model))
    servicer = EngineServicer(adapter)
    await adapter.start(servicer.deliver)

    async def half_closed() -> AsyncIterator[engine_pb2.EngineServiceGenerateRequest]:
        lengths = {"short": 1, "long": 200}
        yield engine_pb2.EngineServiceGenerateRequest(
            generations=[
                engine_pb2.Generation(
                    request_id=name,
                    prompt_token_ids=pack_ids([1, 2, 3]),
                    sampling=trajectory_pb2.Sampling(max_tokens=length, temperature=1.0),
                )
                for name, length in lengths.items()
            ]
        )

    answers = servicer.Generate(half_closed(), cast(Context, None))
    early = await anext(answers)
    while adapter.status().running_count:  # noqa: ASYNC110 - another thread's state
        await asyncio.sleep(0.01)
    late = [message async for message in answers]

    ended = [chunk.request_id for message in (early, *late) for chunk in message.chunks if chunk.finish_reason]
    assert ended == ["short", "long"]
    await adapter.stop()
