"""The simulated engine: known tokens, modelled time, and weights whose content decides the tokens."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llm_proxy.engine.adapters.simulated import WEIGHT, step_seconds
from llm_proxy.engine.batching import Segment
from llm_proxy.engine.batching import Sequence as Running
from llm_proxy.engine.config import EngineConfig, EngineRoot, SimulatedConfig
from llm_proxy.engine.requests import Request
from rollfarm import rpc
from rollfarm.config import Listen
from rollfarm.errors import WeightsFailed, WeightsMismatch
from rollfarm.testing import simulated_logprob, simulated_token
from rollfarm.v1 import engine_pb2, trajectory_pb2
from tests.engine.kit import SECONDS, Answer, Host, Sender, serve
from tests.engine.process import ROOT

VOCABULARY = 251
LONG = 200
KEEP, KEEP_CACHE = engine_pb2.UPDATE_MODE_KEEP, engine_pb2.UPDATE_MODE_KEEP_CACHE
RESUME, DRAIN = engine_pb2.UPDATE_MODE_RESUME, engine_pb2.UPDATE_MODE_DRAIN


def root(**simulated: Any) -> EngineRoot:
    simulated = {"step_seconds": 0.002, "request_seconds": 0.0, "prefill_seconds": 0.0} | simulated
    config = SimulatedConfig(vocabulary_size=VOCABULARY, **simulated)
    engine = EngineConfig(adapter="simulated", slots=4, context_tokens=1024, simulated=config)
    return EngineRoot(engine=engine.model_copy(update={"listen": Listen(drain_seconds=0)}))


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with serve(root()) as served:
        yield served


def weights(content: int) -> dict[str, Tensor]:
    return {WEIGHT: torch.tensor([content])}


def assert_tokens(prompt: Sequence[int], answer: Answer, contents: Sequence[int]) -> None:
    """Each token, and its log-probability, is that of its position under the content at its place."""
    expected = [simulated_token(len(prompt) + at, content, VOCABULARY) for at, content in enumerate(contents)]
    assert answer.ids == expected
    logprobs = [simulated_logprob(token, content) for token, content in zip(expected, contents, strict=True)]
    np.testing.assert_array_equal(answer.logprobs, logprobs)


async def test_tokens_follow_from_their_positions(host: Host) -> None:
    (answer,) = await host.client.generate([[5, 6, 7]], max_tokens=4)

    assert_tokens([5, 6, 7], answer, [0, 0, 0, 0])
    assert answer.ids[0] == (7 * 3 + 1) % VOCABULARY
    assert answer.versions == [0, 0, 0, 0]
    assert answer.finish == trajectory_pb2.FINISH_REASON_LENGTH


async def test_what_has_no_slot_waits(host: Host) -> None:
    ids = await host.client.send([[1]] * 6, max_tokens=LONG)
    await host.until(lambda status: status.running_count == 4)

    assert (await host.status()).waiting_count == 2

    assert [len(answer.ids) for answer in await host.client.finished(ids)] == [LONG] * 6


async def test_cancelled_requests_answer_and_free_their_slots(host: Host) -> None:
    ids = await host.busy([[1]] * 3, max_tokens=LONG)

    await host.cancel(ids)

    for answer in await host.client.finished(ids):
        assert answer.finish == trajectory_pb2.FINISH_REASON_ABORT
        assert_tokens([1], answer, [0] * len(answer.ids))
    await host.until(lambda status: status.running_count == 0)


@pytest.mark.parametrize("mode", [KEEP, KEEP_CACHE])
async def test_running_requests_go_on_under_new_weights(host: Host, mode: int) -> None:
    version = await host.stage(weights(1))
    ids = await host.busy([[1], [1, 2]], max_tokens=LONG)

    await host.apply(version, mode)

    for prompt, answer in zip([[1], [1, 2]], await host.client.finished(ids), strict=True):
        boundary = answer.versions.index(1)
        assert answer.versions == [0] * boundary + [1] * (LONG - boundary)
        assert boundary > 0
        assert_tokens(prompt, answer, answer.versions)


async def test_running_requests_are_given_back_in_resume_mode(host: Host) -> None:
    version = await host.stage(weights(1))
    ids = await host.busy([[1]], max_tokens=LONG)

    await host.apply(version, RESUME)

    (answer,) = await host.client.finished(ids)
    assert answer.finish == trajectory_pb2.FINISH_REASON_ABORT
    assert set(answer.versions) == {0}
    assert_tokens([1], answer, answer.versions)


async def test_running_requests_finish_under_the_old_weights_in_drain_mode(host: Host) -> None:
    version = await host.stage(weights(1))
    ids = await host.busy([[1]], max_tokens=LONG)

    await host.apply(version, DRAIN)

    (answer,) = await host.client.finished(ids)
    assert_tokens([1], answer, [0] * LONG)
    (after,) = await host.client.generate([[1]], max_tokens=2)
    assert_tokens([1], after, [1, 1])
    assert after.versions == [1, 1]


async def test_the_content_that_arrived_decides_the_tokens_and_not_the_label(host: Host) -> None:
    assert await host.publish(weights(9)) == 1

    (answer,) = await host.client.generate([[1]], max_tokens=3)

    assert answer.versions == [1, 1, 1]
    assert_tokens([1], answer, [9, 9, 9])


async def test_a_wrong_tensor_is_named_and_the_old_weights_keep_serving(host: Host) -> None:
    await host.publish(weights(1))
    sender = await Sender.meet(host)

    with pytest.raises(WeightsMismatch, match="has no tensor nonsense"):
        await sender.stage(host, 2, {"nonsense": torch.tensor([2])})

    (answer,) = await host.client.generate([[1]], max_tokens=2)
    assert_tokens([1], answer, [1, 1])


async def test_a_sender_that_vanishes_leaves_the_old_weights(host: Host) -> None:
    sender = await Sender.meet(host)
    request = sender.request(1, weights(1))

    staging = asyncio.create_task(rpc.call(host.stub.StageWeights, request, timeout=SECONDS, retry=False))
    await asyncio.sleep(0)
    sender.process_group = None
    with pytest.raises(WeightsFailed, match="vanished"):
        await staging

    (answer,) = await host.client.generate([[1]], max_tokens=2)
    assert_tokens([1], answer, [0, 0])


async def test_after_a_sleep_without_weights_it_waits_for_a_version(host: Host) -> None:
    ids = await host.busy([[1]], max_tokens=LONG)

    await host.sleep(discard_weights=True)
    await host.wake_up()

    (answer,) = await host.client.finished(ids)
    assert answer.finish == trajectory_pb2.FINISH_REASON_ABORT
    assert (await host.status()).sleeping
    await host.publish(weights(1))
    (after,) = await host.client.generate([[1]], max_tokens=1)
    assert_tokens([1], after, [1])


async def test_the_likeliest_tokens_begin_with_the_chosen_one(host: Host) -> None:
    (answer,) = await host.client.generate([[1]], max_tokens=1, top_logprobs=3)

    (token,) = answer.ids
    assert answer.top_ids == [[token, token + 1, token + 2]]
    assert answer.top_logprobs == [[answer.logprobs[0] - rank for rank in range(3)]]


def test_a_step_takes_longer_with_each_request_and_each_prompt_token() -> None:
    config = SimulatedConfig(step_seconds=1.0, request_seconds=0.1, prefill_seconds=0.01)
    request = Request("key", np.array([1], dtype=np.int32), max_tokens=1)
    sequence = Running(request, np.array([1, 0], dtype=np.int32), 1)
    decoding, prompt = Segment(sequence, 7, 1, True), Segment(sequence, 0, 50, True)

    assert step_seconds(config, [decoding]) == pytest.approx(1.1)
    assert step_seconds(config, [decoding, decoding, prompt]) == pytest.approx(1.8)


async def test_tokens_come_no_faster_than_the_steps_that_make_them() -> None:
    async with serve(root(step_seconds=0.02)) as host:
        began = time.monotonic()

        await host.client.generate([[1]] * 4, max_tokens=20)

        assert time.monotonic() - began >= 0.38


def test_an_engine_that_receives_no_weights_needs_neither_a_model_nor_torch() -> None:
    program = (
        "import sys; from llm_proxy.engine import __main__, adapters, config, metrics, server\n"
        "root = config.EngineRoot(engine=config.EngineConfig(adapter='simulated')); root.check()\n"
        "print(adapters.make(root).name, 'torch' in sys.modules)"
    )

    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert said.stdout.split() == ["simulated", "False"]
