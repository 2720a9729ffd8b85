"""What every engine promises, through the real contract, against a plain forward of transformers."""

import time
from typing import Any

import numpy as np
import pytest

from rollfarm import rpc
from rollfarm.errors import WeightsFailed, WeightsMismatch, WeightsNotStaged
from rollfarm.v1 import engine_pb2
from rollfarm.v1.engine_pb2 import (
    UPDATE_MODE_DRAIN,
    UPDATE_MODE_KEEP,
    UPDATE_MODE_KEEP_CACHE,
    UPDATE_MODE_RESUME,
)
from rollfarm.v1.trajectory_pb2 import FINISH_REASON_ABORT, FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.engine.kit import CONTEXT, SECONDS, VOCABULARY, Answer, Host, Reference, Sender, other_weights, prompts

LONG = 180
MANY = 32
"""Requests that run while weights change."""

CANCEL_SECONDS = 0.1
"""From Cancel to the last chunk of every request, when its slot is free."""


async def known(host: Host, seed: int) -> Reference:
    """Put weights that the test knows into the engine."""
    tensors = other_weights(host.model, seed)
    await host.publish(tensors)
    return Reference(host.model, tensors)


def assert_follows(reference: Reference, prompt: list[int], answer: Answer, *, of: slice = slice(None)) -> None:
    np.testing.assert_allclose(answer.logprobs[of], reference.chosen(prompt, answer.ids)[of], atol=1e-4)


async def assert_greedy(host: Host, reference: Reference) -> None:
    """New requests are answered by the version published last, and by nothing that was cached before it."""
    asked = prompts(8, seed=9)
    answers = await host.client.generate(asked, temperature=0)
    assert [answer.ids for answer in answers] == [reference.greedy(prompt, 16) for prompt in asked]
    assert {version for answer in answers for version in answer.versions} == {host.version}


def assert_one_boundary(answer: Answer, old_version: int, new_version: int) -> int:
    """Where the new weights began, within the answer."""
    boundary = answer.versions.index(new_version)
    assert boundary > 0
    assert answer.versions == [old_version] * boundary + [new_version] * (LONG - boundary)
    return boundary


async def test_greedy_tokens_are_those_of_transformers(host: Host) -> None:
    reference = await known(host, 1)
    asked = prompts(12)

    answers = await host.client.generate(asked, temperature=0)

    assert [answer.ids for answer in answers] == [reference.greedy(prompt, 16) for prompt in asked]


async def test_logprobs_are_those_of_a_plain_forward(host: Host) -> None:
    reference = await known(host, 2)
    asked = prompts(24, seed=1)

    answers = await host.client.generate(asked, max_tokens=20)

    for prompt, answer in zip(asked, answers, strict=True):
        assert len(answer.ids) == 20
        assert set(answer.versions) == {host.version}
        assert_follows(reference, prompt, answer)


async def test_logprobs_are_of_the_distribution_that_was_sampled_from(host: Host) -> None:
    reference = await known(host, 3)
    asked = prompts(8, seed=2)

    answers = await host.client.generate(asked, temperature=0.7, top_k=20, top_p=0.8)

    of_all = (await host.status()).adapter == "sglang"
    for prompt, answer in zip(asked, answers, strict=True):
        expected = [truncated(row, 20, 0.8, of_all=of_all) for row in reference.logprobs(prompt, answer.ids, 0.7)]
        np.testing.assert_allclose(answer.logprobs, np.array(expected)[np.arange(16), answer.ids], atol=1e-4)


def truncated(logp: np.ndarray, top_k: int, top_p: float, *, of_all: bool) -> np.ndarray:
    """The likeliest top_k, of these the fewest with a share of top_p, made to sum to one.

    The share is of the top_k's probability; with `of_all`, as SGLang has it, of all tokens'.
    """
    order = np.argsort(-logp)[:top_k]
    probs = np.exp(logp[order]) / (1 if of_all else np.exp(logp[order]).sum())
    order = order[np.cumsum(probs) - probs < top_p]
    kept = np.full_like(logp, -np.inf)
    kept[order] = logp[order] - np.log(np.exp(logp[order]).sum())
    return kept


async def test_the_likeliest_tokens_are_reported_at_every_position(host: Host) -> None:
    reference = await known(host, 4)
    (prompt,) = prompts(1, seed=3)

    (answer,) = await host.client.generate([prompt], max_tokens=6, top_logprobs=5)

    logp = reference.logprobs(prompt, answer.ids)
    best = np.argsort(-logp, axis=1)[:, :5]
    assert answer.top_ids == best.tolist()
    np.testing.assert_allclose(answer.top_logprobs, np.take_along_axis(logp, best, axis=1), atol=1e-4)


async def test_a_stop_token_ends_the_output_and_belongs_to_it(host: Host) -> None:
    reference = await known(host, 5)
    (prompt,) = prompts(1, seed=4)
    expected = reference.greedy(prompt, 16)
    stop = expected[5]

    (answer,) = await host.client.generate([prompt], temperature=0, stop_token_ids=[stop])

    assert answer.ids == expected[: expected.index(stop) + 1]
    assert answer.finish == FINISH_REASON_STOP


async def test_output_ends_with_the_context(host: Host) -> None:
    (prompt,) = prompts(1, seed=5, shortest=CONTEXT - 10, longest=CONTEXT - 10)

    (answer,) = await host.client.generate([prompt], max_tokens=100)

    assert len(answer.ids) == 10
    assert answer.finish == FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("prompt", "sampling", "problem"),
    [
        ([], {}, "prompt is empty"),
        ([1] * CONTEXT, {}, "leaves none for output"),
        ([1, VOCABULARY], {}, "outside of the vocabulary"),
        ([1, -1], {}, "outside of the vocabulary"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_p": 1.5}, "top_p is 1.5"),
    ],
)
async def test_a_wrong_request_fails_alone(
    host: Host, prompt: list[int], sampling: dict[str, Any], problem: str
) -> None:
    ids = await host.client.send([prompt], **sampling)
    ids += await host.client.send([[1, 2, 3]])

    wrong, right = await host.client.finished(ids)

    assert wrong.failure is not None
    assert wrong.failure.reason == "INVALID_ARGUMENT"
    assert problem in wrong.failure.message
    assert len(right.ids) == 16


async def test_the_same_seed_gives_the_same_tokens_and_another_gives_others(host: Host) -> None:
    if (await host.status()).adapter == "sglang":
        pytest.skip("SGLang honours seeds with --enable-deterministic-inference alone, which it has on a GPU alone")
    (prompt,) = prompts(1, seed=6)

    first, second, other = await host.client.generate([prompt] * 3, seeds=[7, 7, 8])

    assert first.ids == second.ids
    assert first.ids != other.ids


async def test_turns_of_a_session_agree_with_a_plain_forward(host: Host) -> None:
    reference = await known(host, 6)
    histories = prompts(8, seed=7, shortest=20)
    sessions = [f"session-{host.version}-{i}" for i in range(8)]

    for turn in range(4):
        answers = await host.client.generate(histories, sessions=sessions, max_tokens=1 + turn)

        for history, answer, more in zip(histories, answers, prompts(8, seed=turn), strict=True):
            assert_follows(reference, history, answer)
            history += answer.ids + more


async def test_running_requests_go_on_under_new_weights(host: Host) -> None:
    old, old_version = await known(host, 7), host.version
    new_tensors = other_weights(host.model, 8)
    await host.stage(new_tensors)
    asked = prompts(MANY, seed=8)
    ids = await host.busy(asked, max_tokens=LONG)

    await host.apply(host.version, UPDATE_MODE_KEEP)

    new = Reference(host.model, new_tensors)
    await assert_greedy(host, new)
    for prompt, answer in zip(asked, await host.client.finished(ids), strict=True):
        boundary = assert_one_boundary(answer, old_version, host.version)
        assert_follows(old, prompt, answer, of=slice(0, boundary))
        assert_follows(new, prompt, answer, of=slice(boundary, None))


async def test_kept_caches_serve_only_those_that_ran(host: Host) -> None:
    """Tokens after the boundary were sampled by the new weights over keys and values of the old ones.

    So no forward under one version gives their log-probabilities: the trainer's own differ from those recorded here,
    like any behaviour policy's, and its importance ratio is what corrects for it. Only spans before the boundary, and
    requests that begin after it, agree with a plain forward.
    """
    old, old_version = await known(host, 11), host.version
    new_tensors = other_weights(host.model, 12)
    await host.stage(new_tensors)
    asked = prompts(MANY, seed=10, shortest=30)
    sessions = [f"kept-{host.version}-{i}" for i in range(MANY)]
    ids = await host.busy(asked, sessions=sessions, max_tokens=LONG)

    await host.apply(host.version, UPDATE_MODE_KEEP_CACHE)

    new = Reference(host.model, new_tensors)
    await assert_greedy(host, new)
    answers = await host.client.finished(ids)
    for prompt, answer in zip(asked, answers, strict=True):
        boundary = assert_one_boundary(answer, old_version, host.version)
        assert_follows(old, prompt, answer, of=slice(0, boundary))
    turns = [prompt + answer.ids for prompt, answer in zip(asked, answers, strict=True)]
    for turn, answer in zip(turns, await host.client.generate(turns, sessions=sessions), strict=True):
        assert_follows(new, turn, answer)


async def test_running_requests_are_given_back_in_resume_mode(host: Host) -> None:
    old, old_version = await known(host, 13), host.version
    new_tensors = other_weights(host.model, 14)
    await host.stage(new_tensors)
    asked = prompts(MANY, seed=11)
    ids = await host.busy(asked, max_tokens=LONG)

    await host.apply(host.version, UPDATE_MODE_RESUME)

    await assert_greedy(host, Reference(host.model, new_tensors))
    for prompt, answer in zip(asked, await host.client.finished(ids), strict=True):
        assert answer.finish == FINISH_REASON_ABORT
        assert 0 < len(answer.ids) < LONG
        assert set(answer.versions) == {old_version}
        assert_follows(old, prompt, answer)


async def test_running_requests_finish_under_the_old_weights_in_drain_mode(host: Host) -> None:
    old, old_version = await known(host, 15), host.version
    new_tensors = other_weights(host.model, 16)
    await host.stage(new_tensors)
    asked = prompts(MANY, seed=12)
    ids = await host.busy(asked, max_tokens=LONG)

    await host.apply(host.version, UPDATE_MODE_DRAIN)

    await assert_greedy(host, Reference(host.model, new_tensors))
    for prompt, answer in zip(asked, await host.client.finished(ids), strict=True):
        assert answer.versions == [old_version] * LONG
        assert_follows(old, prompt, answer)


async def test_cancelled_requests_answer_and_free_their_slots_within_100_ms(host: Host) -> None:
    """A busy machine may hold up any one round; the best shows what the engine itself takes."""
    seconds: list[float] = []
    for _ in range(5):
        ids = await host.busy(prompts(8, seed=13), max_tokens=LONG)

        began = time.perf_counter()
        await host.cancel([*ids, "unknown"])
        answers = await host.client.finished(ids)
        seconds.append(time.perf_counter() - began)

        assert {answer.finish for answer in answers} == {FINISH_REASON_ABORT}
        assert all(len(answer.ids) < LONG for answer in answers)
        await host.until(lambda status: status.running_count == 0)
    assert min(seconds) < CANCEL_SECONDS


async def test_requests_end_with_their_stream(host: Host) -> None:
    await host.busy(prompts(8, seed=14), max_tokens=LONG)

    await host.client.close()

    await host.until(lambda status: status.running_count == 0 and status.waiting_count == 0)


async def test_a_paused_engine_makes_no_token_and_goes_on_where_it_was(host: Host) -> None:
    reference = await known(host, 17)
    asked = prompts(4, seed=15)
    ids = await host.busy(asked, max_tokens=LONG)

    await host.pause()
    before = await host.status()
    late = await host.client.send([[1, 2, 3]], max_tokens=1)
    paused = await host.status()
    await host.resume()

    assert paused.paused
    assert paused.generated_token_count == before.generated_token_count
    for prompt, answer in zip(asked, await host.client.finished(ids), strict=True):
        assert_follows(reference, prompt, answer)
    await host.client.finished(late)


async def test_weights_may_change_while_it_is_paused(host: Host) -> None:
    await host.pause()
    reference = await known(host, 18)
    ids = await host.client.send([[1, 2, 3]], temperature=0)
    still_paused = (await host.status()).paused
    await host.resume()

    (answer,) = await host.client.finished(ids)
    assert still_paused
    assert answer.ids == reference.greedy([1, 2, 3], 16)


async def test_a_wrong_tensor_is_named_and_the_old_weights_keep_serving(host: Host) -> None:
    reference = await known(host, 19)
    tensors = other_weights(host.model, 20)
    wrong = {
        "has no tensor nonsense": tensors | {"nonsense": tensors["model.norm.weight"]},
        "model.norm.weight has the shape": tensors | {"model.norm.weight": tensors["model.norm.weight"][:5]},
        "model.norm.weight is missing": {k: v for k, v in tensors.items() if k != "model.norm.weight"},
        "model.norm.weight has the dtype int32": tensors | {"model.norm.weight": tensors["model.norm.weight"].int()},
    }

    for problem, named in wrong.items():
        sender = await Sender.meet(host)
        with pytest.raises(WeightsMismatch, match=problem):
            await rpc.call(host.stub.StageWeights, sender.request(99, named), timeout=SECONDS, retry=False)

    (answer,) = await host.client.generate([[1, 2, 3]], temperature=0)
    assert answer.ids == reference.greedy([1, 2, 3], 16)


async def test_a_sender_that_vanishes_midway_leaves_the_old_weights(host: Host) -> None:
    reference = await known(host, 21)
    tensors = other_weights(host.model, 22)
    sender = await Sender.meet(host)
    request = sender.request(host.version + 1, tensors)

    staging = rpc.call(host.stub.StageWeights, request, timeout=SECONDS, retry=False)
    with pytest.raises(WeightsFailed, match="vanished"):
        await sender.vanish_during(staging, request, tensors)

    with pytest.raises(WeightsNotStaged):
        await host.apply(request.policy_version)
    with pytest.raises(WeightsFailed, match="not joined"):
        await rpc.call(host.stub.StageWeights, request, timeout=SECONDS, retry=False)
    (answer,) = await host.client.generate([[1, 2, 3]], temperature=0)
    assert answer.ids == reference.greedy([1, 2, 3], 16)
    await known(host, 23)


async def test_one_group_carries_many_versions_while_requests_run(host: Host) -> None:
    sender = await Sender.meet(host)
    ids = await host.busy(prompts(8, seed=16), max_tokens=LONG)

    for seed in (24, 25):
        tensors = other_weights(host.model, seed)
        host.version += 1
        size = await sender.stage(host, host.version, tensors)
        assert size == sum(tensor.nbytes for tensor in tensors.values())
        await host.apply(host.version)

    reference = Reference(host.model, tensors)
    (answer,) = await host.client.generate([[1, 2, 3]], temperature=0)
    assert answer.ids == reference.greedy([1, 2, 3], 16)
    await host.client.finished(ids)


async def test_applying_is_idempotent_and_needs_a_staged_version(host: Host) -> None:
    await known(host, 26)

    assert await host.apply(host.version) == 0
    with pytest.raises(WeightsNotStaged):
        await host.apply(host.version + 1)


async def test_a_discarded_version_cannot_be_applied(host: Host) -> None:
    version = await host.stage(other_weights(host.model, 27))

    request = engine_pb2.DiscardWeightsRequest(policy_version=version)
    await rpc.call(host.stub.DiscardWeights, request, timeout=SECONDS)

    with pytest.raises(WeightsNotStaged):
        await host.apply(version)


async def test_tied_heads_may_be_sent_under_both_names(host: Host) -> None:
    tensors = other_weights(host.model, 28)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    await host.publish(tensors)

    (answer,) = await host.client.generate([[1, 2, 3]], temperature=0)
    assert answer.ids == Reference(host.model, tensors).greedy([1, 2, 3], 16)


async def test_the_status_says_what_the_engine_is(host: Host) -> None:
    status = await host.status()

    assert status.instance_id
    assert status.adapter in ("embedded", "vllm", "sglang")
    assert bool(status.server_version) == (status.adapter != "embedded")
    assert (status.slot_count, status.context_token_count, status.vocabulary_size) == (64, CONTEXT, VOCABULARY)
