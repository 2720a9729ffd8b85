"""Environments that show images: to tokens, to llm_proxy, and into the trajectory."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from env_manager import model
from env_manager.rendering import Prompt, Renderer, Span
from env_manager.transcript import Transcript
from llm_proxy.engine.requests import Limits, decode
from rollfarm import env_wire, images, tokens
from rollfarm.env import Environment, Image, Observation, Step, ToolResult
from rollfarm.errors import EnvironmentFailed, InvalidArgument
from rollfarm.playing import read_observation, read_step
from rollfarm.v1 import environment_pb2, llm_proxy_pb2, trajectory_pb2
from tests.env_manager.fakes import FakeBuffer, FakeProxy, Policy, episode, serving, tokenizer, working
from tests.vision import BEGIN, CHAT_TEMPLATE, FINISH, IDS, IMAGE, IMAGE_ID, Reference, make_model, picture
from trainer.backends.scoring import TokenLogprobs, load_model
from trainer.micro_batches import micro_batch
from trainer.rows import rows_of

PAINTER = "tests.env_manager.painter:Painter"
TWO, EIGHT = [BEGIN, *[IMAGE] * 2, FINISH], [BEGIN, *[IMAGE] * 8, FINISH]
"""Images of 56 x 28, and of 100 x 60 resized, as the policy sees them."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def renderer(path: Path) -> Renderer:
    found, _ = model.load(str(path), {}, 0)
    return found


def words(path: Path, token_ids: bytes) -> list[str]:
    return AutoTokenizer.from_pretrained(path).convert_ids_to_tokens(tokens.unpack_ids(token_ids).tolist())


def right_away(path: Path) -> Policy:
    """A policy that goes right, and ends its turn."""
    return lambda prompt, asked: [IDS["right"], IDS["<end>"]]


async def play(renderer: Renderer, policy: Policy, settings: str = "") -> tuple[FakeBuffer, FakeProxy]:
    buffer, proxy = FakeBuffer(), FakeProxy(policy)
    buffer.add(episode(PAINTER, settings=settings))
    async with serving(proxy.register) as address, working(buffer, address, renderer=renderer):
        await buffer.ended()
    return buffer, proxy


async def test_an_image_is_as_many_tokens_as_the_model_makes_of_it(path: Path, renderer: Renderer) -> None:
    buffer, proxy = await play(renderer, right_away(path))

    (trajectory,) = buffer.completed.values()
    first, second = proxy.requests
    opening = ["<user>", *TWO, *EIGHT, "go", "down", "<end>", "<assistant>"]
    answer = ["<user>", *TWO, BEGIN, IMAGE, FINISH, "go", "up", "<end>", "<assistant>"]
    assert words(path, first.generation.prompt_token_ids) == opening
    assert words(path, second.generation.prompt_token_ids) == [*opening, "right", "<end>", *answer]
    assert b"".join(turn.token_ids for turn in trajectory.turns[:3]) == second.generation.prompt_token_ids


async def test_a_request_carries_every_image_of_its_prompt_and_a_trajectory_each_once(
    path: Path, renderer: Renderer
) -> None:
    buffer, proxy = await play(renderer, right_away(path))

    (trajectory,) = buffer.completed.values()
    prompt = tokens.unpack_ids(proxy.requests[1].generation.prompt_token_ids)
    asked = images.place(proxy.requests[1].generation.images, len(prompt), {})
    (row,) = rows_of(trajectory)
    assert [(image.offset, image.count) for image in asked] == [(2, 2), (6, 8), (23, 2), (27, 1)]
    assert [i for i, token in enumerate(prompt) if token == IMAGE_ID] == [
        place for image in asked for place in range(image.offset, image.offset + image.count)
    ]
    assert list(row.images) == asked
    assert [len(turn.images) for turn in trajectory.turns] == [2, 0, 2, 0]
    written = [part.sha256 for turn in trajectory.turns for part in turn.images if part.data]
    assert len(written) == len(set(written)) == 3


async def test_the_policy_is_shown_an_image_as_large_as_the_model_sees_it(path: Path, renderer: Renderer) -> None:
    buffer, _ = await play(renderer, right_away(path))

    (trajectory,) = buffer.completed.values()
    whole, resized = trajectory.turns[0].images
    assert (whole.media_type, resized.media_type) == ("image/png", "image/png")
    assert renderer.eyes is not None
    assert renderer.eyes.fitted(resized.data, "image/png") == (resized.data, "image/png")
    assert sha256(resized.data).digest() == resized.sha256


async def test_a_trainer_gives_the_episode_the_log_probabilities_of_the_reference(
    path: Path, renderer: Renderer
) -> None:
    """From the environment to the trainer's log-probabilities, by the bytes that travel."""
    buffer, _ = await play(renderer, right_away(path))
    (trajectory,) = buffer.completed.values()

    rows = rows_of(trajectory_pb2.Trajectory.FromString(trajectory.SerializeToString())) * 2
    with torch.no_grad():
        logp_P, _ = TokenLogprobs(load_model(str(path))).eval()(micro_batch(rows, [0, 1], torch.device("cpu")), 1.0)

    expected_TV = Reference(path).logprobs(rows[0].ids_T, rows[0].images)
    at_P = rows[0].mask_T.nonzero()[0]
    expected_P = torch.tensor(expected_TV[at_P - 1, rows[0].ids_T[at_P]])
    assert (logp_P - expected_P.repeat(2)).abs().max() < 1e-4


async def test_a_new_segment_shows_every_image_again_and_their_bytes_do_not_travel_again(path: Path) -> None:
    mine: Any = AutoTokenizer.from_pretrained(path)
    mine.chat_template = "{{ messages | length }} " + CHAT_TEMPLATE  # so the prompt is rendered anew at each turn
    renderer = Renderer(mine, eyes=images.load(str(path)))

    buffer, proxy = await play(renderer, right_away(path))

    (trajectory,) = buffer.completed.values()
    first, second = rows_of(trajectory)
    assert trajectory.turns[2].begins_segment
    assert [image.count for image in second.images] == [2, 8, 2, 1]
    assert second.images[0].data == first.images[0].data
    assert [bool(part.data) for part in trajectory.turns[2].images] == [False, False, False, True]
    asked = proxy.requests[1].generation
    assert images.place(asked.images, len(second), {}) == list(second.images)


async def test_a_policy_that_writes_the_placeholder_aborts_its_episode(renderer: Renderer) -> None:
    limits = Limits(slot_count=1, context_token_count=512, vocabulary_size=len(IDS), image_token_id=IMAGE_ID)

    def write(prompt: Sequence[int], asked: llm_proxy_pb2.ProxiedGeneration) -> list[int] | InvalidArgument:
        try:
            decode(asked.generation, "key", limits)
        except InvalidArgument as refused:
            return refused
        return [IMAGE_ID, IDS["<end>"]]

    buffer, proxy = await play(renderer, write)

    (failure,) = buffer.failed.values()
    assert failure.outcome == trajectory_pb2.OUTCOME_ABORTED
    assert f"Token {IMAGE_ID} stands for images, and is elsewhere in the prompt, as where the policy" in failure.detail
    assert len(proxy.requests) == 2


async def test_images_are_hashed_where_they_are_shown_and_not_in_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    monkeypatch.setattr(images, "_digest", lambda data: hashed.append(data) or sha256(data).digest())
    shown = [(picture(28, 28, seed=seed), "image/png", 1) for seed in (1, 2, 1)]
    ids, placed = images.expand(np.full(3, IMAGE_ID, np.int32), shown, IMAGE_ID)
    transcript = Transcript(episode(PAINTER), Observation(""))
    span = Span(trajectory_pb2.AUTHOR_ENVIRONMENT, tokens.pack_ids(ids), "", placed)

    transcript.show(Prompt((span,)))
    transcript.show(Prompt((span,)))
    transcript.show(Prompt((span,), begins_segment=True))

    assert [bool(part.data) for part in transcript.images] == [True, True, False]
    assert images.place(transcript.images, 3, {}) == placed
    assert len(hashed) == 9


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ('{"bad": "bytes"}', "shows what is no image to take: an image is no image/png"),
        ('{"bad": "text"}', "2 images are shown, and the text holds the placeholders of 3"),
    ],
)
async def test_an_image_that_is_none_fails_the_episode(
    path: Path, renderer: Renderer, settings: str, cause: str
) -> None:
    buffer, proxy = await play(renderer, right_away(path), settings)

    (failure,) = buffer.failed.values()
    assert failure.outcome == trajectory_pb2.OUTCOME_ENV_FAILED
    assert cause in failure.detail
    assert not proxy.requests


async def test_a_model_without_eyes_fails_the_episode_and_names_models_that_have_them(path: Path) -> None:
    buffer, _ = await play(Renderer(tokenizer()), right_away(path))

    (failure,) = buffer.failed.values()
    assert "shows images, and the model takes none. Use one of qwen2_vl" in failure.detail


async def test_images_of_an_episode_are_bounded_together(
    path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("env_manager.rendering.MOST_IMAGE_BYTES", 10_000)
    buffer, _ = await play(renderer, right_away(path))

    (failure,) = buffer.failed.values()
    assert "an episode may show 10,000" in failure.detail


def test_what_an_environment_shows_is_the_same_on_a_server() -> None:
    one, other = Image(picture(28, 28)), Image(picture(28, 28, kind="JPEG"), "image/jpeg")
    shown = Observation("look", system="be brief", images=[one, other])
    step = Step("", images=[other], tool_results=[ToolResult("call00001", "f", "done")])

    assert env_wire.from_reset(env_wire.to_reset(shown)) == Observation(
        "look", system="be brief", images=[one, other], tools=[]
    )
    assert env_wire.from_step(env_wire.to_step(step)) == step


def test_a_tool_gives_no_image() -> None:
    part = trajectory_pb2.ImagePart(data=picture(28, 28), media_type="image/png")
    message = environment_pb2.Message(author=trajectory_pb2.AUTHOR_ENVIRONMENT, tool_call_id="call00001", images=[part])

    with pytest.raises(ValueError, match="as what a tool gave"):
        env_wire.from_step(environment_pb2.StepResponse(messages=[message]))


@pytest.mark.parametrize(
    ("shown", "cause"),
    [
        ("image.png", "its images is no list of Images"),
        ([b"bytes"], "its images is no list of Images"),
        ([Image(b"", "image/png")], "an image has 0 bytes"),
        ([Image(b"gif", "image/gif")], "'image/gif', not one of"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_images_that_are_none_are_told_before_they_travel(shown: Any, cause: str) -> None:
    with pytest.raises(EnvironmentFailed, match=cause):
        read_observation("painter", Observation("", images=shown))
    with pytest.raises(EnvironmentFailed, match=cause):
        read_step("painter", Step(images=shown))


def test_an_environment_without_images_shows_none() -> None:
    assert Observation("").images == Step().images == ()
    assert issubclass(Environment, object)
