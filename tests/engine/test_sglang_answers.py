"""What the host makes of an SGLang that answers nonsense, or that is another than was meant: a stand-in plays it."""

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_proxy.engine import adapters
from llm_proxy.engine.config import EngineRoot
from rollfarm import rpc
from rollfarm.config import ConfigError
from rollfarm.errors import EngineFailed
from rollfarm.v1 import engine_pb2
from tests.engine.kit import SECONDS, VOCABULARY, Host, other_weights, serve
from tests.engine.sglang_stand_in import SglangStandIn, attached_root, generated
from tests.engine.stand_in import Said

LOAD = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
STAND_STILL = ["/pause_generation", "/slow_down"]


@pytest.fixture
def sglang(tied_model: Path) -> Iterator[SglangStandIn]:
    with SglangStandIn(str(tied_model)) as stand_in:
        yield stand_in  # pyright: ignore[reportReturnType]


async def start(root: EngineRoot) -> None:
    adapter = adapters.make(root)
    await adapter.start(lambda chunks: None)
    await adapter.stop()


NO_VERSIONS = {"weight_versions": []}
NO_LOGPROB = {"output_token_logprobs": [[-0.5, 1, None], [None, 2, None], [-0.5, 3, None]]}


@pytest.mark.parametrize(
    ("answer", "reason", "problem"),
    [
        ((200, b'{"output_ids": [1, 2'), "ENGINE_FAILED", r'with something else .*"output_ids": \[1, 2'),
        ((200, b"<html>Bad gateway"), "ENGINE_FAILED", "with something else .*<html>Bad gateway"),
        ((200, {"text": "hello"}), "ENGINE_FAILED", "missing required field `output_ids`"),
        (
            (200, {"output_ids": ["one"], "meta_info": {}}),
            "ENGINE_FAILED",
            r"Expected `int`, got `str` - at `\$\.output_ids\[0\]`",
        ),
        ((503, b"overloaded"), "ENGINE_FAILED", "with 503: 'overloaded'"),
        (None, "ENGINE_FAILED", "does not answer /generate"),
        ((400, b"no such thing"), "INVALID_ARGUMENT", "refuses .*no such thing"),
        ((200, generated(3, "") | {"output_ids": [1, 2]}), "ENGINE_FAILED", "2 tokens, 3 log-probabilities"),
        ((200, generated(3, "") | {"output_ids": [1, VOCABULARY, 3]}), "ENGINE_FAILED", f"token {VOCABULARY}, which"),
        ((200, generated(3, "", **NO_VERSIONS)), "ENGINE_FAILED", "the versions of 0"),
        ((200, generated(3, "", **NO_LOGPROB)), "GENERATION_FAILED", "no finite log-probability"),
    ],
)
async def test_an_answer_that_cannot_be_right_fails_its_request_alone(
    tied_model: Path, sglang: SglangStandIn, answer: tuple[int, Any] | None, reason: str, problem: str
) -> None:
    async with serve(attached_root(tied_model, sglang.url)) as host:
        sglang.answers["/generate"] = lambda body: answer and (answer[0], labelled(answer[1], sglang.label))
        (wrong,) = await host.client.generate([[1, 2, 3]])
        del sglang.answers["/generate"]
        (right,) = await host.client.generate([[1, 2, 3]])

    assert wrong.failure is not None
    assert (wrong.failure.reason, wrong.ids) == (reason, [])
    assert re.search(problem, wrong.failure.message)
    assert (right.ids, set(right.versions)) == (list(range(16)), {0})


@pytest.mark.parametrize("places", [0, 2])
async def test_an_answer_without_the_likeliest_tokens_of_each_place_fails_its_request(
    tied_model: Path, sglang: SglangStandIn, places: int
) -> None:
    async with serve(attached_root(tied_model, sglang.url)) as host:
        top = [[[-0.5, 1, None], [-0.7, 2, None]]] * places
        sglang.answers["/generate"] = lambda body: (200, generated(3, sglang.label, output_top_logprobs=top))

        (wrong,) = await host.client.generate([[1, 2, 3]], top_logprobs=2)

    assert wrong.failure is not None
    assert re.search(f"3 tokens and the likeliest at {places} places", wrong.failure.message)


def labelled(said: Any, label: str) -> Any:
    """The answer with the label that the host gave, which the test's parameters cannot know."""
    if isinstance(said, dict) and said.get("meta_info", {}).get("weight_versions"):
        said["meta_info"]["weight_versions"][0]["version"] = label
    return said


@pytest.mark.parametrize(
    ("path", "answer", "problem"),
    [
        ("/server_info", (200, b"<html>"), "/server_info with something else .*Is it SGLang"),
        ("/server_info", (200, {"version": "0.5.23"}), "missing required field `model_path`"),
        ("/server_info", (404, b""), "/server_info with 404.*Is it SGLang"),
        ("/update_weight_version", (500, b"no"), "does not take the weights"),
        ("/model_info", (503, b""), "nothing healthy answers at http://127.0.0.1:.*/model_info within 3 s"),
    ],
)
async def test_another_server_than_sglang_is_a_configuration_error(
    tied_model: Path, sglang: SglangStandIn, path: str, answer: Said, problem: str
) -> None:
    sglang.answers[path] = lambda body: answer

    with pytest.raises(ConfigError, match=problem):
        await start(attached_root(tied_model, sglang.url))


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("version", "0.4.10", "version 0.4.10; 0.5.23 is the oldest that works"),
        ("model_path", "/elsewhere", "it serves /elsewhere"),
        ("dtype", "bfloat16", "its dtype is bfloat16"),
        ("max_running_requests", 8, "its slots are 8"),
        ("max_req_input_len", 250, "its context and its KV cache hold 250 tokens"),
        ("custom_weight_loader", [], "it has no loader rollfarm.sglang_loader.load"),
        ("disable_overlap_schedule", False, "it computes ahead"),
        ("sampling_mask_max_tokens", 50, "its sampling masks hold 50 tokens"),
    ],
)
async def test_settings_that_do_not_do_are_named(
    tied_model: Path, sglang: SglangStandIn, setting: str, value: object, problem: str
) -> None:
    sglang.settings[setting] = value

    with pytest.raises(ConfigError, match=problem):
        await start(attached_root(tied_model, sglang.url))


@pytest.mark.parametrize("size", [VOCABULARY - 1, VOCABULARY + 1])
async def test_another_vocabulary_is_a_configuration_error(tied_model: Path, sglang: SglangStandIn, size: int) -> None:
    sglang.vocabulary_size = size

    with pytest.raises(ConfigError, match="vocabulary is not the 97 tokens"):
        await start(attached_root(tied_model, sglang.url))


async def test_weights_that_this_host_did_not_load_end_it(tied_model: Path, sglang: SglangStandIn) -> None:
    with pytest.raises(ExceptionGroup) as ended:
        await exchange_weights(tied_model, sglang)

    assert ended.group_contains(EngineFailed, match="SGLang has weights that this host did not load")


async def exchange_weights(model: Path, sglang: SglangStandIn) -> None:
    """Serve an SGLang that is restarted behind the host's back."""
    async with serve(attached_root(model, sglang.url)) as host:
        sglang.label = "default"
        (answer,) = await host.client.generate([[1, 2, 3]])
        assert answer.failure is not None


async def test_what_a_dead_host_left_behind_is_aborted_and_loaded_over(tied_model: Path, sglang: SglangStandIn) -> None:
    sglang.label = "3f:7"

    async with serve(attached_root(tied_model, sglang.url)) as host:
        (answer,) = await host.client.generate([[1, 2, 3]])

    left = ["/continue_generation", "/abort_request"]
    assert sglang.calls[:8] == [*left, *STAND_STILL, *LOAD, "/continue_generation"]
    assert set(answer.versions) == {0}


async def test_every_rank_is_told_of_the_weights(tied_model: Path, sglang: SglangStandIn) -> None:
    async with serve(attached_root(tied_model, sglang.url)) as host:
        await host.publish(other_weights(tied_model, 1))

    (update,) = [body for body in sglang.bodies if "serialized_named_tensors" in body]
    assert len(update["serialized_named_tensors"]) == 2


async def test_asleep_it_gives_away_each_kind_of_memory_once_and_takes_back_what_it_gave(
    tied_model: Path, sglang: SglangStandIn
) -> None:
    async with serve(attached_root(tied_model, sglang.url)) as host:
        await host.sleep()
        await host.sleep(discard_weights=True)
        asleep = await host.status()
        await host.publish(other_weights(tied_model, 1))
        await host.wake_up()
        awake = await host.status()

    moved = [(call, body["tags"]) for call, body in zip(sglang.calls, sglang.bodies, strict=True) if "tags" in body]
    assert moved == [
        ("/release_memory_occupation", ["kv_cache"]),
        ("/release_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache"]),
    ]
    assert (asleep.sleeping, awake.sleeping, awake.policy_version) == (True, False, 1)


async def test_the_share_of_its_kv_cache_is_in_the_status(tied_model: Path, sglang: SglangStandIn) -> None:
    async with serve(attached_root(tied_model, sglang.url)) as host:
        await host.until(lambda status: status.kv_cache_usage == 0.25)


@pytest.mark.parametrize("asked_first", [True, False])
async def test_it_is_well_while_new_weights_hold_its_scheduler_up(
    tied_model: Path, sglang: SglangStandIn, asked_first: bool
) -> None:
    held_up, loaded = threading.Event(), threading.Event()

    def hold_up(body: Any) -> Said:
        held_up.set()
        loaded.wait(SECONDS)
        return 200, {}

    async with serve(attached_root(tied_model, sglang.url)) as host:
        version = await host.stage(other_weights(tied_model, 1))
        sglang.answers["/slow_down"] = hold_up
        work = [host.apply(version), ask_once(host)]
        tasks = []
        for each in reversed(work) if asked_first else work:
            tasks.append(asyncio.create_task(each))
            await asyncio.to_thread(held_up.wait, SECONDS)
        status = await tasks[0 if asked_first else 1]
        loaded.set()
        await asyncio.gather(*tasks)

    assert status.policy_version == 0


async def ask_once(host: Host) -> engine_pb2.EngineServiceGetStatusResponse:
    request = engine_pb2.EngineServiceGetStatusRequest()
    return await rpc.call(host.stub.GetStatus, request, timeout=1, retry=False)
