"""What the host makes of a vLLM that answers nonsense, or that is not the one that was meant: a stand-in plays it."""

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_proxy.engine import adapters
from llm_proxy.engine.adapters.versions import check_version
from llm_proxy.engine.config import EngineRoot
from rollfarm.config import ConfigError
from rollfarm.errors import EngineFailed, Unsupported
from tests.engine.kit import CONTEXT, VOCABULARY, Answer, embedded_root, other_weights, serve
from tests.engine.stand_in import Said, VllmStandIn, attached_root, choice
from tests.llm_proxy.support import asked, run_proxy

GENERATE = "/inference/v1/generate"
LOAD = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
TRUNCATED = b'{"choices": [{"token_ids": [1, 2'
NO_PROBABILITY = {"content": [{"logprob": 0.0}, {"logprob": -9999.0}, {"logprob": 0.0}]}


@pytest.fixture
def vllm(tied_model: Path) -> Iterator[VllmStandIn]:
    with VllmStandIn(str(tied_model)) as stand_in:
        yield stand_in


async def start(root: EngineRoot) -> None:
    adapter = adapters.make(root)
    await adapter.start(lambda chunks: None)
    await adapter.stop()


@pytest.mark.parametrize(
    ("answer", "reason", "problem"),
    [
        ((200, b"<html>Bad gateway"), "ENGINE_FAILED", "with something else .*<html>Bad gateway"),
        ((200, TRUNCATED), "ENGINE_FAILED", r'with something else .*"token_ids": \[1, 2'),
        ((200, {"choices": []}), "ENGINE_FAILED", r"length >= 1 - at `\$\.choices`"),
        ((200, {"text": "hello"}), "ENGINE_FAILED", "missing required field `choices`"),
        ((200, b'{"choices": [{"finish_reason": "\xff"}]}'), "ENGINE_FAILED", "with something else .*can't decode"),
        ((200, b'{"choices": ' + b"[" * 5000), "ENGINE_FAILED", "with something else"),
        ((200, b'{"deep": ' + b"[" * 5000), "ENGINE_FAILED", "with something else .*recursion depth"),
        ((503, b"overloaded"), "ENGINE_FAILED", "with 503: 'overloaded'"),
        (None, "ENGINE_FAILED", f"does not answer {GENERATE}"),
        ((400, b"no such thing"), "INVALID_ARGUMENT", "refuses .*no such thing"),
    ],
)
async def test_an_answer_that_is_none_fails_its_request_alone(
    tied_model: Path, vllm: VllmStandIn, answer: Said | None, reason: str, problem: str
) -> None:
    async with serve(attached_root(tied_model, vllm.url)) as host:
        vllm.answers[GENERATE] = lambda body: answer
        (wrong,) = await host.client.generate([[1, 2, 3]])
        del vllm.answers[GENERATE]
        (right,) = await host.client.generate([[1, 2, 3]])

    assert_failed(wrong, reason, problem)
    assert (right.ids, set(right.versions)) == (list(range(16)), {0})


@pytest.mark.parametrize(
    ("fields", "reason", "problem"),
    [
        ({"token_ids": ["one", 2, 3]}, "ENGINE_FAILED", r"Expected `int`, got `str` - at .*token_ids\[0\]"),
        ({"token_ids": [1, 2]}, "ENGINE_FAILED", "2 tokens, 3 log-probabilities"),
        ({"logprobs": None}, "ENGINE_FAILED", "3 tokens, 0 log-probabilities"),
        ({"weight_versions": []}, "ENGINE_FAILED", "the versions of 0"),
        ({"token_ids": [1, VOCABULARY, 3]}, "ENGINE_FAILED", f"token {VOCABULARY}, which is outside"),
        ({"token_ids": [1, -1, 3]}, "ENGINE_FAILED", "outside of the model's vocabulary"),
        ({"logprobs": NO_PROBABILITY}, "GENERATION_FAILED", "no finite log-probability"),
    ],
)
async def test_tokens_that_cannot_be_right_fail_their_request_alone(
    tied_model: Path, vllm: VllmStandIn, fields: dict[str, Any], reason: str, problem: str
) -> None:
    async with serve(attached_root(tied_model, vllm.url)) as host:
        vllm.answers[GENERATE] = lambda body: (200, {"choices": [choice(3, vllm.label) | fields]})
        (wrong,) = await host.client.generate([[1, 2, 3]])
        del vllm.answers[GENERATE]
        (right,) = await host.client.generate([[1, 2, 3]])

    assert_failed(wrong, reason, problem)
    assert right.ids == list(range(16))


def assert_failed(answer: Answer, reason: str, problem: str) -> None:
    assert answer.failure is not None
    assert (answer.failure.reason, answer.ids) == (reason, [])
    assert re.search(problem, answer.failure.message)


async def test_versions_of_less_than_no_tokens_fail_their_request(tied_model: Path, vllm: VllmStandIn) -> None:
    async with serve(attached_root(tied_model, vllm.url)) as host:
        ends = [(0, 5), (5, 3)]
        spans = [{"version": vllm.label, "start": start, "end": end} for start, end in ends]
        vllm.answers[GENERATE] = lambda body: (200, {"choices": [choice(3, "") | {"weight_versions": spans}]})

        (wrong,) = await host.client.generate([[1, 2, 3]])

    assert_failed(wrong, "ENGINE_FAILED", "the versions of 3")


async def test_a_connection_that_was_closed_meanwhile_is_tried_anew(tied_model: Path, vllm: VllmStandIn) -> None:
    tries: list[Any] = []

    def answer(body: Any) -> Said | None:
        tries.append(body)
        return vllm.generated(body) if len(tries) > 1 else None

    async with serve(attached_root(tied_model, vllm.url)) as host:
        vllm.answers[GENERATE] = answer
        (answered,) = await host.client.generate([[1, 2, 3]])

    assert answered.ids == list(range(16))
    assert len(tries) == 2


async def test_a_request_goes_on_elsewhere_when_an_engine_answers_garbage(tied_model: Path, vllm: VllmStandIn) -> None:
    async with (
        serve(attached_root(tied_model, vllm.url)) as garbled,
        serve(embedded_root(tied_model)) as other,
        run_proxy(garbled.address) as proxy,
    ):
        await proxy.serving()
        vllm.answers[GENERATE] = lambda body: (200, TRUNCATED)
        generating = asyncio.create_task(proxy.generate(asked("r1", max_tokens=8)))
        await proxy.attach(other.address)

        result = await generating

    assert result.engine_id == other.address
    assert len(result.token_ids) == 8 * 4


@pytest.mark.parametrize(
    ("path", "answer", "problem"),
    [
        ("/version", (200, {"version": "0.11.0"}), "version 0.11.0; 0.32.0 is the oldest that works"),
        ("/version", (200, {"version": "from yesterday"}), "version from yesterday; 0.32.0 is"),
        ("/version", (200, b"<html>"), "/version with something else .*Is it vLLM"),
        ("/version", (404, b""), "/version with 404.*Is it vLLM"),
        ("/is_paused", (404, {}), r"no VLLM_SERVER_DEV_MODE=1. Start it with `VLLM_SERVER_DEV_MODE=1 python"),
        ("/server_info", (200, {"vllm_config": {}}), r"missing required field `model_config` - at `\$\.vllm_config`"),
        (GENERATE, (404, {}), "no --enable-scale-out. Start it with .*--enable-scale-out"),
        ("/update_weight_version", (500, b"no"), "does not take the weights"),
        ("/health", (503, b""), "nothing healthy answers at http://127.0.0.1:.*/health within 0.5 s"),
    ],
)
async def test_another_server_than_the_one_that_is_needed_is_a_configuration_error(
    tied_model: Path, vllm: VllmStandIn, path: str, answer: Said, problem: str
) -> None:
    vllm.answers[path] = lambda body: answer

    with pytest.raises(ConfigError, match=problem):
        await start(attached_root(tied_model, vllm.url))


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("model", "/elsewhere", "it serves /elsewhere"),
        ("dtype", "torch.bfloat16", "its dtype is torch.bfloat16"),
        ("max_model_len", CONTEXT - 1, "its context is 255"),
        ("logprobs_mode", "raw_logprobs", "its log-probabilities are raw_logprobs"),
        ("max_logprobs", 20, "at most 20 log-probabilities"),
    ],
)
async def test_settings_that_do_not_do_are_named_with_the_flags_that_do(
    tied_model: Path, vllm: VllmStandIn, setting: str, value: object, problem: str
) -> None:
    vllm.settings[setting] = value

    with pytest.raises(ConfigError, match=problem) as refused:
        await start(attached_root(tied_model, vllm.url))

    assert f"--model {tied_model} --dtype float32 --max-model-len {CONTEXT} --max-num-seqs 64" in str(refused.value)


@pytest.mark.parametrize("size", [VOCABULARY - 1, VOCABULARY + 1])
async def test_another_vocabulary_is_a_configuration_error(tied_model: Path, vllm: VllmStandIn, size: int) -> None:
    vllm.vocabulary_size = size

    with pytest.raises(ConfigError, match="vocabulary is not the 97 tokens"):
        await start(attached_root(tied_model, vllm.url))


async def test_nobody_there_is_a_configuration_error(tied_model: Path) -> None:
    with pytest.raises(ConfigError, match="nothing healthy answers"):
        await start(attached_root(tied_model, "http://127.0.0.1:9"))


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:8000", "http://vllm:8000", "https://127.0.0.1:8000", "127.0.0.1:8000"]
)
def test_a_server_that_others_may_reach_is_refused(tied_model: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="not the root of a server on loopback"):
        attached_root(tied_model, url).check()


async def test_weights_that_this_host_did_not_load_end_it(tied_model: Path, vllm: VllmStandIn) -> None:
    with pytest.raises(ExceptionGroup) as ended:
        await exchange_weights(tied_model, vllm)

    assert ended.group_contains(EngineFailed, match="weights that this host did not load")


async def exchange_weights(model: Path, vllm: VllmStandIn) -> None:
    """Serve a vLLM that is restarted behind the host's back."""
    async with serve(attached_root(model, vllm.url)) as host:
        vllm.label = "default"
        (answer,) = await host.client.generate([[1, 2, 3]])
        assert answer.failure is not None


async def test_a_vllm_that_is_gone_ends_its_host(tied_model: Path) -> None:
    with VllmStandIn(str(tied_model)) as vllm:
        adapter = adapters.make(attached_root(tied_model, vllm.url))
        await adapter.start(lambda chunks: None)

    with pytest.raises(EngineFailed, match="is gone"):
        await asyncio.wait_for(adapter.watch(), 30)
    await adapter.stop()


async def test_what_a_dead_host_left_behind_is_aborted_and_loaded_over(tied_model: Path, vllm: VllmStandIn) -> None:
    vllm.label = "3f:7"

    async with serve(attached_root(tied_model, vllm.url)) as host:
        (answer,) = await host.client.generate([[1, 2, 3]])

    assert [call.partition("?")[0] for call in vllm.calls] == LOAD
    assert set(answer.versions) == {0}


async def test_a_vllm_that_a_dead_host_left_asleep_is_woken_and_loaded(tied_model: Path, vllm: VllmStandIn) -> None:
    vllm.settings["enable_sleep_mode"] = True
    vllm.answers["/is_paused"] = lambda body: (200, {"is_paused": True})

    async with serve(attached_root(tied_model, vllm.url)) as host:
        (answer,) = await host.client.generate([[1, 2, 3]])

    assert [call.partition("?")[0] for call in vllm.calls] == ["/wake_up", "/resume", *LOAD]
    assert set(answer.versions) == {0}


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1.dev5+g1234abc", "1.0"])
def test_newer_versions_are_taken(version: str) -> None:
    check_version("vLLM", version, table="engine.vllm")


async def test_a_vllm_sleeps_where_it_can_and_without_weights_waits_for_a_version(
    tied_model: Path, vllm: VllmStandIn
) -> None:
    vllm.settings["enable_sleep_mode"] = True

    async with serve(attached_root(tied_model, vllm.url)) as host:
        vllm.calls.clear()
        await host.sleep(discard_weights=True)
        asleep = list(vllm.calls)
        ids = await host.client.send([[1, 2, 3]])
        await host.wake_up()
        awake = await host.status()
        await host.publish(other_weights(tied_model, 1))
        (answer,) = await host.client.finished(ids)

    assert asleep == ["/sleep?level=2"]
    assert (awake.sleeping, awake.waiting_count) == (True, 1)
    assert [call.partition("?")[0] for call in vllm.calls] == ["/sleep", "/wake_up", "/resume", *LOAD]
    assert set(answer.versions) == {1}


async def test_weights_are_loaded_asleep_once_their_memory_is_taken_back(tied_model: Path, vllm: VllmStandIn) -> None:
    vllm.settings["enable_sleep_mode"] = True

    async with serve(attached_root(tied_model, vllm.url)) as host:
        await host.sleep(discard_weights=True)
        vllm.calls.clear()
        await host.publish(other_weights(tied_model, 1))
        await host.wake_up()
        (answer,) = await host.client.generate([[1, 2, 3]])

    *loading, woken, resumed = vllm.calls
    assert loading[0] == "/wake_up?tags=weights"
    assert [call.partition("?")[0] for call in loading[1:]] == LOAD[:-1]
    assert (woken, resumed) == ("/wake_up", "/resume")
    assert set(answer.versions) == {1}


@pytest.mark.parametrize("interrupt", ["resume", "wake_up"])
async def test_nothing_makes_a_vllm_go_on_with_half_a_version(
    tied_model: Path, vllm: VllmStandIn, interrupt: str
) -> None:
    vllm.settings["enable_sleep_mode"] = True
    loading, loaded = threading.Event(), threading.Event()

    def load(body: Any) -> Said:
        loading.set()
        loaded.wait(10)
        return 200, {}

    async with serve(attached_root(tied_model, vllm.url)) as host:
        await (host.pause if interrupt == "resume" else host.sleep)()
        vllm.answers["/update_weights"] = load
        publishing = asyncio.create_task(host.publish(other_weights(tied_model, 1)))
        await asyncio.to_thread(loading.wait, 10)
        vllm.calls.clear()

        interrupting = asyncio.create_task(getattr(host, interrupt)())
        await host.status()
        loaded.set()
        await asyncio.gather(publishing, interrupting)

    assert vllm.calls[0] == "/finish_weight_update"
    assert vllm.calls[-1] == "/resume"


async def test_a_vllm_without_sleep_mode_does_not_sleep(tied_model: Path, vllm: VllmStandIn) -> None:
    async with serve(attached_root(tied_model, vllm.url)) as host:
        with pytest.raises(Unsupported, match="--enable-sleep-mode"):
            await host.sleep()
        with pytest.raises(Unsupported):
            await host.wake_up()

    assert not any(call.startswith("/sleep") for call in vllm.calls)
