"""Rows with images, against each row alone through the plain Hugging Face model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rollfarm import images
from rollfarm.config import ConfigError
from rollfarm.errors import InvalidTrajectory
from rollfarm.images import ImageTokens, PlacedImage
from rollfarm.tokens import pack_ids
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from tests.trainer.conftest import group, trajectory
from tests.trainer.test_learner import BATCH, make
from tests.trainer.test_packing import gradients
from tests.vision import BEGIN, FINISH, IDS, IMAGE_ID, Kind, Reference, make_model, picture
from trainer.backends import Settings
from trainer.backends.packed_attention import is_packed
from trainer.backends.replicated import ReplicatedBackend
from trainer.backends.scoring import TokenLogprobs, TokenValues, load_model
from trainer.backends.vision import positions
from trainer.micro_batches import micro_batch
from trainer.rows import Row, decode, encode, rows_of
from trainer.samples import check_images

CPU = torch.device("cpu")
ALIKE = 1e-5

Sizes = Sequence[tuple[int, int]]

ROWS: Sequence[Sizes] = [[(56, 84)], [], [(100, 60), (56, 56)], [(28, 28)]]
"""Of each row, the width and height of its images: some are resized, and some are not."""

Folder = Callable[[Kind], Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    made: dict[str, Path] = {}

    def find(kind: Kind) -> Path:
        if kind not in made:
            made[kind] = make_model(tmp_path_factory.mktemp(kind) / "model", kind)
        return made[kind]

    return find


def eyes_at(path: Path) -> ImageTokens:
    found = images.load(str(path))
    assert found is not None
    return found


def row_with(sizes: Sizes, eyes: ImageTokens, *, seed: int) -> Row:
    """Images with words around them, and five tokens of the policy, the second of which is an image's placeholder."""
    dice = np.random.default_rng(seed)
    ids, seen = [IDS["<user>"]], list[PlacedImage]()
    for number, (width, height) in enumerate(sizes):
        data = picture(width, height, seed=100 * seed + number)
        count = eyes.count(data, "image/png")
        seen.append(PlacedImage(data, "image/png", len(ids) + 1, count))
        ids += [IDS[BEGIN], *[IMAGE_ID] * count, IDS[FINISH], *dice.integers(IDS["right"], 20, 3)]
    ids += dice.integers(IDS["right"], 20, 6).tolist()
    mask_T = np.arange(len(ids)) >= len(ids) - 5
    ids[-4] = IMAGE_ID
    return Row(np.array(ids, np.int32), mask_T, images=seen)


def rows_for(path: Path) -> list[Row]:
    return [row_with(sizes, eyes_at(path), seed=seed) for seed, sizes in enumerate(ROWS)]


def plain_logprobs(path: Path, rows: Sequence[Row]) -> Tensor:
    """f32[P], by the model as transformers has it, each row alone."""
    reference = Reference(path)
    found = [torch.tensor(reference.logprobs(row.ids_T, row.images)) for row in rows]
    cuts = [torch.tensor(row.mask_T).nonzero().flatten() for row in rows]
    ids = [torch.tensor(row.ids_T.astype(np.int64)) for row in rows]
    return torch.cat([logp_TV[at_P - 1, ids_T[at_P]] for logp_TV, at_P, ids_T in zip(found, cuts, ids, strict=True)])


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("packing", [True, False])
def test_log_probabilities_are_those_of_each_row_alone(folder: Folder, kind: Kind, packing: bool) -> None:
    rows = rows_for(folder(kind))
    model = load_model(str(folder(kind)), packing=packing)

    with torch.no_grad():
        logp_P, _ = TokenLogprobs(model).eval()(micro_batch(rows, range(len(rows)), CPU), 1.0)

    assert is_packed(model) == packing
    assert (logp_P - plain_logprobs(folder(kind), rows)).abs().max() < ALIKE


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_gradients_reach_the_tower_and_do_not_depend_on_packing(folder: Folder, kind: Kind) -> None:
    rows = rows_for(folder(kind))
    by_packing: list[dict[str, Tensor]] = []
    for packing in (True, False):
        policy = TokenLogprobs(load_model(str(folder(kind)), packing=packing))
        by_packing.append(gradients(policy, micro_batch(rows, range(len(rows)), CPU)))

    packed, padded = by_packing
    assert packed.keys() == padded.keys() == dict(policy.named_parameters()).keys()
    assert all((packed[name] - padded[name]).abs().max() < 1e-4 for name in packed)
    assert packed["model.model.visual.patch_embed.proj.weight"].abs().max() > 0


def test_what_a_row_sees_does_not_depend_on_its_micro_batch(folder: Folder) -> None:
    path = folder("qwen2_5_vl")
    rows = rows_for(path)

    def scores(tokens: int) -> Tensor:
        settings = Settings(path=str(path), device=CPU, micro_batch_tokens=tokens)
        return ReplicatedBackend(TokenLogprobs(load_model(str(path))), settings).score(rows, temperature=1.0)

    assert (scores(tokens=20) - scores(tokens=4096)).abs().max() < ALIKE


def test_a_pass_without_an_image_leaves_no_parameter_without_a_gradient(folder: Folder) -> None:
    policy = TokenLogprobs(load_model(str(folder("qwen3_vl"))))
    text = rows_for(folder("qwen3_vl"))[1]

    policy(micro_batch([text], [0], CPU), 1.0)[0].sum().backward()

    found = {name: param.grad for name, param in policy.named_parameters()}
    assert all(grad is not None for grad in found.values())
    assert not any(grad.abs().max() for name, grad in found.items() if "visual" in name and grad is not None)


def test_positions_are_those_of_the_paper(folder: Folder) -> None:
    eyes = eyes_at(folder("qwen2_vl"))
    row = row_with([(56, 84)], eyes, seed=0)
    batch = micro_batch([row, row], [0, 1], CPU)

    place_3T = positions(batch, np.array([[1, 3, 2], [1, 3, 2]]))

    time, height, width = place_3T[:, :10].tolist()
    assert time == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert height == [0, 1, 2, 2, 3, 3, 4, 4, 5, 6]
    assert width == [0, 1, 2, 3, 2, 3, 2, 3, 5, 6]
    assert np.array_equal(place_3T[:, len(row) :], place_3T[:, : len(row)])


def test_an_image_of_another_number_of_tokens_is_refused(folder: Folder) -> None:
    row = row_with([(56, 84)], eyes_at(folder("qwen2_vl")), seed=0)
    wrong = replace(row, images=[replace(row.images[0], count=5)])

    with pytest.raises(InvalidTrajectory, match="stands for 5 tokens, and the trainer's model makes 6"):
        TokenLogprobs(load_model(str(folder("qwen2_vl"))))(micro_batch([wrong], [0], CPU), 1.0)


def test_a_model_without_eyes_refuses_rows_with_images(folder: Folder, model_path: Path) -> None:
    row = row_with([(56, 84)], eyes_at(folder("qwen2_vl")), seed=0)
    blind = TokenLogprobs(load_model(str(model_path)))

    with pytest.raises(ConfigError, match="saw images, and Qwen3ForCausalLM takes none"):
        blind(micro_batch([replace(row, ids_T=row.ids_T * 0)], [0], CPU), 1.0)


def test_a_critic_sees_images_too(folder: Folder) -> None:
    rows = rows_for(folder("qwen2_5_vl"))
    critic = TokenValues(load_model(str(folder("qwen2_5_vl")))).eval()
    torch.nn.init.normal_(critic.value.weight, generator=torch.Generator().manual_seed(0))
    other = [replace(rows[0], images=[replace(rows[0].images[0], data=picture(56, 84, seed=77))])]

    with torch.no_grad():
        one, two = (critic(micro_batch(shown, [0], CPU), 1.0)[0] for shown in (rows, other))

    assert (one - two).abs().min() > 1e-6


def test_rows_with_images_survive_the_way_to_another_rank_and_an_image_travels_once(folder: Folder) -> None:
    rows = rows_for(folder("qwen2_5_vl"))
    large = picture(300, 300)
    twins = [replace(rows[0], images=[PlacedImage(large, "image/png", 2, 9)])] * 3

    back = decode(encode([*rows, *twins]))

    assert [list(row.images) for row in back] == [list(row.images) for row in [*rows, *twins]]
    assert len(encode(twins)) < 1.5 * len(large)


def shown(data: bytes, *, count: int = 2, offset: int = 0) -> trajectory_pb2.ImagePart:
    return trajectory_pb2.ImagePart(
        data=data, media_type="image/png", token_offset=offset, token_count=count, sha256=sha256(data).digest()
    )


def test_a_row_has_the_images_of_its_segment_and_a_later_one_is_found_by_its_digest() -> None:
    data = picture(28, 28)
    whole = trajectory(1.0)
    whole.turns[0].images.append(shown(data))
    whole.turns[2].token_ids = pack_ids([10, IMAGE_ID])
    whole.turns[2].images.append(shown(data, count=1, offset=1))
    whole.turns[2].images[0].data = b""
    second = trajectory(1.0)
    second.turns[0].begins_segment = True
    second.turns[0].images.append(shown(data))
    second.turns[0].images[0].data = b""
    whole.turns.extend(second.turns)

    first, last = rows_of(whole)

    assert [(image.data, image.offset, image.count) for image in first.images] == [(data, 0, 2), (data, 4, 1)]
    assert [(image.data, image.offset, image.count) for image in last.images] == [(data, 0, 2)]


def test_an_image_whose_bytes_are_not_there_is_refused() -> None:
    broken = trajectory(1.0, name="broken")
    broken.turns[0].images.append(shown(picture(28, 28)))
    broken.turns[0].images[0].data = b""

    with pytest.raises(InvalidTrajectory, match="In trajectory broken the bytes of an image are not there"):
        rows_of(broken)


def test_a_batch_that_another_model_saw_is_refused_before_it_is_learnt_from(folder: Folder, model_path: Path) -> None:
    seen = trajectory(1.0, name="seen")
    seen.turns[0].images.append(shown(picture(56, 28)))
    groups = [sample_buffer_pb2.Group(group_id="g", trajectories=[seen])]

    check_images(groups, str(folder("qwen2_5_vl")))
    with pytest.raises(ConfigError, match="trajectory seen of group g the policy saw an image, and the"):
        check_images(groups, str(model_path))
    groups[0].trajectories[0].turns[0].images[0].CopyFrom(shown(picture(56, 56)))
    with pytest.raises(ConfigError, match="stands for 2 tokens, and the trainer's model makes 4"):
        check_images(groups, str(folder("qwen2_5_vl")))


def test_a_learner_learns_from_images_and_one_without_eyes_keeps_the_batch(folder: Folder, model_path: Path) -> None:
    groups = [group("a", [1, 0]), group("b", [0, 1])]
    for each in groups:
        for member in each.trajectories:
            member.turns[0].token_ids = pack_ids([IMAGE_ID, IMAGE_ID])
            member.turns[0].images.append(shown(picture(56, 28)))
    learner = make(folder("qwen2_5_vl"))
    before = {name: tensor.clone() for name, tensor in learner.leader.named_tensors()}

    outcome = learner.learn(BATCH, groups)

    moved = {name for name, tensor in learner.leader.named_tensors() if (tensor - before[name]).abs().max() > 0}
    assert outcome.metrics["skipped"] == 0
    assert any(name.endswith("visual.patch_embed.proj.weight") for name in moved)
    with pytest.raises(ConfigError, match="the policy saw an image"):
        make(model_path).learn(BATCH, groups)
