"""Prompts with images: what engines take, and what vLLM and SGLang make of them."""

import asyncio
import base64
import subprocess
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from llm_proxy.engine.config import EngineConfig, EngineRoot, SglangConfig, VllmConfig
from rollfarm import images
from rollfarm.config import ConfigError
from rollfarm.images import PlacedImage
from rollfarm.run import ModelConfig
from rollfarm.tokens import pack_ids
from rollfarm.v1 import engine_pb2, trajectory_pb2
from tests.engine import sglang_stand_in
from tests.engine.kit import Answer, Host, serve
from tests.engine.sglang_stand_in import SglangStandIn
from tests.engine.stand_in import VllmStandIn, attached_root, choice
from tests.vision import BEGIN, FINISH, IDS, IMAGE_ID, VIDEO, WORDS, Kind, Reference, make_model, other_weights, picture

ALIKE = 1e-4
GENERATE = "/inference/v1/generate"

WIDE, SMALL = picture(84, 56, seed=1), picture(28, 28, seed=2)
"""Of 6 tokens and of 1. Neither is resized: that of torchvision, which vLLM has, is a little unlike Pillow's."""

SEEN = [PlacedImage(WIDE, "image/png", 2, 6), PlacedImage(SMALL, "image/png", 12, 1)]
PROMPT = [
    *(IDS["<user>"], IDS[BEGIN], *[IMAGE_ID] * 6, IDS[FINISH], IDS["go"], IDS["right"], IDS[BEGIN]),
    *(IMAGE_ID, IDS[FINISH], IDS["stop"], IDS["<assistant>"]),
]


@pytest.fixture(scope="session")
def sighted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sighted") / "model")


@pytest.fixture
def sighted_vllm(vllm_python: Path) -> Path:
    if subprocess.run([vllm_python, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        pytest.skip("vLLM's models that take images need torchvision: run tools/install-vllm.sh again")
    return vllm_python


async def ask(host: Host, prompt: Sequence[int], parts: Sequence[trajectory_pb2.ImagePart], count: int = 8) -> Answer:
    """What the host answers to one request."""
    request = engine_pb2.EngineServiceGenerateRequest(
        generations=[
            engine_pb2.Generation(
                request_id="r",
                prompt_token_ids=pack_ids(prompt),
                sampling=trajectory_pb2.Sampling(max_tokens=count, temperature=1.0, seed=1),
                images=parts,
            )
        ]
    )
    answer = host.client.answers["r"] = Answer()
    await host.client._call.write(request)
    await asyncio.wait_for(answer.ended.wait(), 60)
    return answer


def refusal(answer: Answer) -> str:
    assert answer.failure is not None
    assert answer.failure.reason == "INVALID_ARGUMENT"
    return answer.failure.message


async def test_an_engine_without_eyes_says_which_has_them(embedded: Host) -> None:
    answer = await ask(embedded, PROMPT, images.write_once(SEEN, set()))

    assert "takes no images. Use one of vLLM, with a model of qwen2_vl" in refusal(answer)


def shown_to(stand_in: VllmStandIn, *, failures: int = 0) -> list[Any]:
    """The requests with images that it gets from now on, of which it fails the first."""
    bodies: list[Any] = []

    def said(body: Any) -> tuple[int, Any]:
        if body is None:
            return 405, {}
        if "content_parts" not in body:
            return stand_in.generated(body)
        bodies.append(body)
        if len(bodies) <= failures:
            return 500, {"error": {"message": "Internal server error"}}
        return 200, {"choices": [choice(3, stand_in.label)], "prompt_token_ids": PROMPT}

    stand_in.vocabulary_size, stand_in.answers[GENERATE] = len(WORDS), said
    return bodies


async def test_vllm_is_sent_one_token_for_each_image_and_the_image(sighted_model: Path) -> None:
    with VllmStandIn(str(sighted_model)) as stand_in:
        bodies = shown_to(stand_in)
        async with serve(attached_root(sighted_model, stand_in.url)) as host:
            answer = await ask(host, PROMPT, images.write_once(SEEN, set()), count=3)

    assert answer.ids == [0, 1, 2]
    (body,) = bodies
    assert body["token_ids"] == [*PROMPT[:3], *PROMPT[8:]]
    assert [part["url"] for part in body["content_parts"]] == [
        f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (WIDE, SMALL)
    ]
    assert [part["uuid"] for part in body["content_parts"]] == [
        f"{stand_in.label}/{sha256(data).hexdigest()}" for data in (WIDE, SMALL)
    ]


@pytest.mark.parametrize(("failures", "is_answered"), [(1, True), (2, False)])
async def test_a_vllm_that_lost_an_image_is_sent_it_once_more(
    sighted_model: Path, failures: int, is_answered: bool
) -> None:
    with VllmStandIn(str(sighted_model)) as stand_in:
        bodies = shown_to(stand_in, failures=failures)
        async with serve(attached_root(sighted_model, stand_in.url)) as host:
            answer = await ask(host, PROMPT, images.write_once(SEEN, set()), count=3)

    assert len(bodies) == 2
    assert bodies[0] == bodies[1]
    assert (answer.ids, answer.failure is None) == (([0, 1, 2], True) if is_answered else ([], False))


@pytest.mark.parametrize(
    ("prompt", "part", "problem"),
    [
        ([3, IMAGE_ID, IMAGE_ID], {"token_count": 1}, "Token 8 stands for images, and is elsewhere in the prompt"),
        ([3, IMAGE_ID, 4], {"token_count": 2}, "or not where they are"),
        ([3, IMAGE_ID, 4], {"token_count": 9}, "In the prompt an image stands for 9 tokens from 1 of 3"),
        ([3, IMAGE_ID, 4], {"data": b""}, "the bytes of an image are not there"),
        ([3, IMAGE_ID, 4], {"data": WIDE}, "is not that of its bytes"),
        ([3, IMAGE_ID, 4], {"media_type": "image/gif"}, "'image/gif', not one of"),
    ],
)
async def test_images_that_do_not_fit_their_prompt_are_refused(
    sighted_model: Path, prompt: list[int], part: dict[str, Any], problem: str
) -> None:
    (image,) = images.write_once([PlacedImage(SMALL, "image/png", 1, 1)], set())
    for name, value in part.items():
        setattr(image, name, value)
    with VllmStandIn(str(sighted_model)) as stand_in:
        stand_in.vocabulary_size = len(WORDS)
        async with serve(attached_root(sighted_model, stand_in.url)) as host:
            assert problem in refusal(await ask(host, prompt, [image]))


async def test_a_vllm_that_makes_other_tokens_of_the_images_fails_the_request(sighted_model: Path) -> None:
    with VllmStandIn(str(sighted_model)) as stand_in:
        stand_in.vocabulary_size = len(WORDS)
        async with serve(attached_root(sighted_model, stand_in.url)) as host:
            answer = await ask(host, PROMPT, images.write_once(SEEN, set()))

    assert answer.failure is not None
    assert "vLLM makes other tokens of the images" in answer.failure.message


@pytest.fixture
def sighted_sglang(sighted_model: Path) -> Iterator[SglangStandIn]:
    with SglangStandIn(str(sighted_model)) as stand_in:
        stand_in.vocabulary_size = len(WORDS)
        stand_in.settings["mm_preprocess_cache_size_mb"] = 256
        yield stand_in  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens", "failure"),
    [
        (PROMPT, len(PROMPT), ""),
        (PROMPT, len(PROMPT) + 1, "SGLang makes other tokens of the images"),
        ([*PROMPT, IDS[VIDEO]], len(PROMPT) + 1, "a token that stands for an image or a video"),
    ],
)
async def test_sglang_is_sent_one_token_for_each_image_and_the_image(
    sighted_model: Path, sighted_sglang: SglangStandIn, prompt: list[int], prompt_tokens: int, failure: str
) -> None:
    bodies: list[Any] = []

    def said(body: Any) -> tuple[int, Any]:
        if "image_data" not in body:
            return sighted_sglang.generated(body)
        bodies.append(body)
        return 200, sglang_stand_in.generated(3, sighted_sglang.label, prompt_tokens=prompt_tokens)

    sighted_sglang.answers["/generate"] = said
    async with serve(sglang_stand_in.attached_root(sighted_model, sighted_sglang.url)) as host:
        answer = await ask(host, prompt, images.write_once(SEEN, set()), count=3)

    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (WIDE, SMALL)]
    expected = [([*PROMPT[:3], *PROMPT[8:]], urls)] * (prompt == PROMPT)
    assert [(body["input_ids"], body["image_data"]) for body in bodies] == expected
    assert (answer.failure is None) == (not failure)
    assert failure in (answer.failure.message if answer.failure else "")


async def test_an_sglang_takes_no_images_of_a_model_whose_images_it_resizes_in_its_own_way(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2_vl")
    with SglangStandIn(str(model)) as stand_in:
        stand_in.vocabulary_size = len(WORDS)
        async with serve(sglang_stand_in.attached_root(model, stand_in.url)) as host:
            answer = await ask(host, PROMPT, images.write_once(SEEN, set()))

    assert "takes no images" in refusal(answer)


async def test_an_sglang_that_would_make_other_tokens_of_a_prompt_with_images_is_refused(
    sighted_model: Path, sighted_sglang: SglangStandIn
) -> None:
    sighted_sglang.settings["mm_preprocess_cache_size_mb"] = None

    with pytest.raises(ConfigError, match=r"it keeps no pixels.*--mm-preprocess-cache-size-mb 256"):
        async with serve(sglang_stand_in.attached_root(sighted_model, sighted_sglang.url)):
            pass


def started(adapter: Literal["vllm", "sglang"], model: Path, python: Path) -> EngineRoot:
    """An engine host that starts the server itself."""
    servers = {"vllm": VllmConfig, "sglang": SglangConfig}
    own = {adapter: servers[adapter](python=python, start_seconds=300)}
    engine = EngineConfig(adapter=adapter, kv_cache=64_000_000, slots=8, **own)  # pyright: ignore[reportArgumentType]
    return EngineRoot(model=ModelConfig(path=str(model)), engine=engine)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("adapter", "kind"),
    [
        *(("vllm", "qwen2_vl"), ("vllm", "qwen2_5_vl"), ("vllm", "qwen3_vl")),
        *(("sglang", "qwen2_5_vl"), ("sglang", "qwen3_vl")),
    ],
)
async def test_a_server_sees_what_the_reference_sees_and_takes_new_weights_of_the_tower(
    adapter: Literal["vllm", "sglang"], kind: Kind, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python: Path = request.getfixturevalue("sighted_vllm" if adapter == "vllm" else "sglang_python")
    sighted_model = make_model(tmp_path / "model", kind)
    tensors, others = (other_weights(sighted_model, seed=seed) for seed in (1, 2))

    async with serve(started(adapter, sighted_model, python)) as host:
        begun = await ask(host, PROMPT, images.write_once(SEEN, set()))
        await host.publish(tensors)
        updated = await ask(host, PROMPT, images.write_once(SEEN, set()))
        await host.publish(others, engine_pb2.UPDATE_MODE_KEEP_CACHE)
        again = await ask(host, PROMPT, images.write_once(SEEN, set()))

    assert (set(begun.versions), set(updated.versions), set(again.versions)) == ({0}, {1}, {2})
    assert distance(begun, Reference(sighted_model)) < ALIKE
    assert distance(updated, Reference(sighted_model, tensors)) < ALIKE
    assert distance(updated, Reference(sighted_model)) > 100 * ALIKE
    assert distance(again, Reference(sighted_model, others)) < ALIKE


def distance(answer: Answer, reference: Reference) -> float:
    """The greatest between two log-probabilities of a token."""
    assert answer.failure is None
    assert len(answer.ids) == 8
    logp_TV = reference.logprobs([*PROMPT, *answer.ids], SEEN)[len(PROMPT) - 1 : -1]
    return float(np.abs(logp_TV[np.arange(8), answer.ids] - answer.logprobs).max())
