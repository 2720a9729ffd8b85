"""Versions that come from files: whole ones and LoRA adapters, and everything that can be wrong with a file."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollfarm import rpc, stored
from rollfarm.errors import FarmError, InvalidArgument, WeightsFailed, WeightsMismatch, WeightsNotStaged
from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2
from rollfarm.v1.engine_pb2 import (
    UPDATE_MODE_DRAIN,
    UPDATE_MODE_KEEP,
    UPDATE_MODE_KEEP_CACHE,
    UPDATE_MODE_RESUME,
)
from tests.engine.kit import SECONDS, Host, Reference, Sender, embedded_root, other_weights, prompts, serve

LONG = 180


def write(folder: Path, tensors: dict[str, Tensor]) -> engine_pb2.StoredWeights:
    """A version in two files."""
    folder.mkdir(parents=True)
    names = list(tensors)
    for number, part in enumerate((names[:3], names[3:])):
        save_file({name: tensors[name].contiguous() for name in part}, folder / f"model-{number}.safetensors")
    return stored.describe(folder)


async def stage(host: Host, weights: engine_pb2.StoredWeights) -> int:
    """Stage `weights` as the next version."""
    request = engine_pb2.StageWeightsRequest(policy_version=host.version + 1, stored=weights)
    await rpc.call(host.stub.StageWeights, request, timeout=SECONDS, retry=False)
    host.version += 1
    return host.version


async def publish(host: Host, weights: engine_pb2.StoredWeights) -> None:
    await host.apply(await stage(host, weights))


async def assert_serves(host: Host, reference: Reference) -> None:
    asked = prompts(8, seed=host.version)

    answers = await host.client.generate(asked, temperature=0)

    assert [answer.ids for answer in answers] == [reference.greedy(prompt, 16) for prompt in asked]
    assert {version for answer in answers for version in answer.versions} == {host.version}


@pytest.mark.parametrize("mode", [UPDATE_MODE_KEEP, UPDATE_MODE_KEEP_CACHE, UPDATE_MODE_RESUME, UPDATE_MODE_DRAIN])
async def test_a_version_in_files_comes_while_requests_run_and_is_served(host: Host, tmp_path: Path, mode: int) -> None:
    before = other_weights(host.model, 100)
    await host.publish(before)
    old, old_version = Reference(host.model, before), host.version
    tensors = other_weights(host.model, 101)
    weights = write(tmp_path / "version", tensors)
    asked = prompts(8, seed=1)
    ids = await host.busy(asked, max_tokens=LONG)

    await stage(host, weights)
    await host.apply(host.version, mode)

    for prompt, answer in zip(asked, await host.client.finished(ids), strict=True):
        boundary = answer.versions.count(old_version)
        assert boundary > 0
        assert answer.versions == [old_version] * boundary + [host.version] * (len(answer.ids) - boundary)
        np.testing.assert_allclose(answer.logprobs[:boundary], old.chosen(prompt, answer.ids)[:boundary], atol=1e-4)
    await assert_serves(host, Reference(host.model, tensors))


async def test_files_of_another_precision_and_a_plain_path_are_taken(host: Host, tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in other_weights(host.model, 102).items()}
    weights = write(tmp_path / "a version", tensors)
    weights.uri = str(tmp_path / "a version")

    await publish(host, weights)

    await assert_serves(host, Reference(host.model, {name: tensor.float() for name, tensor in tensors.items()}))


async def test_versions_from_files_and_by_broadcast_take_turns(host: Host, tmp_path: Path) -> None:
    sender = await Sender.meet(host)

    for seed in (103, 105):
        tensors = other_weights(host.model, seed)
        host.version += 1
        await sender.stage(host, host.version, tensors)
        await host.apply(host.version)
        await assert_serves(host, Reference(host.model, tensors))

        tensors = other_weights(host.model, seed + 1)
        await publish(host, write(tmp_path / str(seed), tensors))
        await assert_serves(host, Reference(host.model, tensors))


async def test_a_broadcast_that_ends_after_files_were_staged_does_not_replace_them(host: Host, tmp_path: Path) -> None:
    late, tensors = other_weights(host.model, 107), other_weights(host.model, 108)
    sender = await Sender.meet(host)
    broadcast = sender.request(host.version + 1, late)
    receiving = asyncio.ensure_future(rpc.call(host.stub.StageWeights, broadcast, timeout=SECONDS, retry=False))
    await in_thread(lambda: sender.send(broadcast, late, which=slice(1)))

    await stage(host, write(tmp_path / "version", tensors))
    await in_thread(lambda: sender.send(broadcast, late, which=slice(1, None)))

    with pytest.raises(WeightsFailed, match="replaced by another"):
        await receiving
    await host.apply(host.version)
    await assert_serves(host, Reference(host.model, tensors))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "problem"), [(Path.unlink, "cannot be read"), (cut, "has .* bytes"), (alter, "was altered")]
)
async def test_a_file_that_is_not_as_it_was_written_is_named_and_the_old_weights_keep_serving(
    host: Host, tmp_path: Path, spoil: Callable[[Path], Any], problem: str
) -> None:
    tensors = other_weights(host.model, 109)
    await publish(host, write(tmp_path / "good", tensors))
    weights = write(tmp_path / "bad", other_weights(host.model, 110))
    spoil(tmp_path / "bad" / "model-1.safetensors")

    with pytest.raises(WeightsFailed, match=f"model-1.safetensors {problem}"):
        await stage(host, weights)

    with pytest.raises(WeightsNotStaged):
        await host.apply(host.version + 1)
    await assert_serves(host, Reference(host.model, tensors))


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("model.norm.weight", lambda tensor: None, "model.norm.weight is missing"),
        ("model.norm.weight", lambda tensor: tensor[:5], "model.norm.weight has the shape"),
        ("model.norm.weight", lambda tensor: tensor.int(), "model.norm.weight has the dtype int32"),
        ("nonsense", lambda tensor: torch.ones(1), "has no tensor nonsense"),
    ],
)
async def test_a_wrong_tensor_in_a_file_is_named_and_the_old_weights_keep_serving(
    host: Host, tmp_path: Path, name: str, change: Callable[[Any], Tensor | None], problem: str
) -> None:
    good = other_weights(host.model, 111)
    await host.publish(good)
    tensors = {**good, name: change(good.get(name))}

    with pytest.raises(WeightsMismatch, match=problem):
        await stage(
            host, write(tmp_path / "v", {name: tensor for name, tensor in tensors.items() if tensor is not None})
        )

    await assert_serves(host, Reference(host.model, good))


async def test_a_file_of_another_kind_is_named(embedded: Host, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("no tensors")

    with pytest.raises(WeightsMismatch, match=r"model.safetensors is no safetensors file"):
        await stage(embedded, stored.describe(tmp_path))


async def test_a_tensor_in_two_files_is_named(embedded: Host, tmp_path: Path) -> None:
    write(tmp_path / "v", other_weights(embedded.model, 112))
    shutil.copy(tmp_path / "v" / "model-1.safetensors", tmp_path / "v" / "model-2.safetensors")

    with pytest.raises(WeightsMismatch, match=r"model-2.safetensors holds .* a second time"):
        await stage(embedded, stored.describe(tmp_path / "v"))


@pytest.mark.parametrize("uri", ["s3://bucket/version", "file://elsewhere/version", "https://host/version", ""])
async def test_a_place_that_is_no_folder_is_refused_with_a_remedy(embedded: Host, uri: str) -> None:
    with pytest.raises(InvalidArgument, match="Mount the store"):
        await stage(embedded, engine_pb2.StoredWeights(uri=uri, kind=engine_pb2.StoredWeights.KIND_FULL))


@pytest.mark.parametrize("path", ["../model-0.safetensors", "/etc/passwd", "link.safetensors", ""])
async def test_a_path_that_leaves_the_folder_is_refused(embedded: Host, tmp_path: Path, path: str) -> None:
    weights = write(tmp_path / "v", other_weights(embedded.model, 113))
    (tmp_path / "model-0.safetensors").write_text("another's")
    (tmp_path / "v" / "link.safetensors").symlink_to(tmp_path / "model-0.safetensors")
    weights.files[0].path = path

    with pytest.raises(InvalidArgument, match="is not within"):
        await stage(embedded, weights)


async def test_an_unknown_kind_is_refused(embedded: Host, tmp_path: Path) -> None:
    weights = write(tmp_path / "v", other_weights(embedded.model, 114))
    weights.kind = engine_pb2.StoredWeights.KIND_UNSPECIFIED

    with pytest.raises(InvalidArgument, match="KIND_FULL, KIND_LORA and KIND_DELTA"):
        await stage(embedded, weights)


async def test_discarded_weights_come_back_from_the_model_s_own_files(embedded: Host) -> None:
    request = engine_pb2.StageWeightsRequest(policy_version=0, stored=stored.describe(embedded.model))

    await embedded.sleep(discard_weights=True)
    await rpc.call(embedded.stub.StageWeights, request, timeout=SECONDS, retry=False)
    await embedded.apply(0)
    await embedded.wake_up()

    await assert_serves(embedded, Reference(embedded.model))


# --- LoRA ---

RANK, ALPHA = 4, 32
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def base_weights(model: Path) -> dict[str, Tensor]:
    return load_file(model / "model.safetensors")


def make_adapter(folder: Path, model: Path, seed: int, **settings: Any) -> engine_pb2.StoredWeights:
    """An adapter as peft 0.21 writes one."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in base_weights(model).items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(
                RANK, weight.shape[1], generator=generator
            )
            tensors[f"base_model.model.{module}.lora_B.weight"] = 0.1 * torch.randn(
                weight.shape[0], RANK, generator=generator
            )
    return write_adapter(folder, tensors, **settings)


def write_adapter(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> engine_pb2.StoredWeights:
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "lora_dropout": 0.05,
        "bias": "none",
        "init_lora_weights": True,
        "loftq_config": {},
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "rank_pattern": {},
        "use_dora": False,
        "use_rslora": False,
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return stored.describe(folder)


def merged(model: Path, folder: Path, scale: float) -> Reference:
    adapter = load_file(folder / "adapter_model.safetensors")
    tensors = base_weights(model)
    for name, a in adapter.items():
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            tensors[weight] = tensors[weight] + scale * adapter[name.replace("lora_A", "lora_B")] @ a
    return Reference(model, tensors)


async def test_each_adapter_goes_on_top_of_the_base_model_alone(host: Host, tmp_path: Path) -> None:
    await host.publish(other_weights(host.model, 120))

    for seed in (121, 122):
        await publish(host, make_adapter(tmp_path / str(seed), host.model, seed))

        reference = merged(host.model, tmp_path / str(seed), ALPHA / RANK)
        await assert_serves(host, reference)
        (answer,) = await host.client.generate([[1, 2, 3]])
        np.testing.assert_allclose(answer.logprobs, reference.chosen([1, 2, 3], answer.ids), atol=1e-4)


async def test_an_adapter_stabilised_by_its_rank_counts_by_the_root(embedded: Host, tmp_path: Path) -> None:
    await publish(embedded, make_adapter(tmp_path / "a", embedded.model, 123, use_rslora=True))

    await assert_serves(embedded, merged(embedded.model, tmp_path / "a", ALPHA / RANK**0.5))


async def test_a_sum_is_as_precise_as_the_engine_where_the_base_model_is_not(tied_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tied_model, tmp_path / "model")
    halved = {name: tensor.bfloat16() for name, tensor in base_weights(tied_model).items()}
    save_file(halved, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})

    async with serve(embedded_root(tmp_path / "model")) as host:
        await publish(host, make_adapter(tmp_path / "a", host.model, 126))
        (answer,) = await host.client.generate([[1, 2, 3]])

    reference = merged(tmp_path / "model", tmp_path / "a", ALPHA / RANK)
    np.testing.assert_allclose(answer.logprobs, reference.chosen([1, 2, 3], answer.ids), atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"bias": "all"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"of_next_year": {"a": 1}}, "of_next_year"),
    ],
)
async def test_an_adapter_that_is_more_than_two_matrices_is_refused_by_name(
    embedded: Host, tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(WeightsMismatch, match=f"adapter's {problem} cannot be merged"):
        await stage(embedded, make_adapter(tmp_path / "a", embedded.model, 124, **settings))

    await assert_serves(embedded, Reference(embedded.model))


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({f"{Q}.lora_A.weight": torch.ones(4, 64)}, "only one of"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 64), f"{Q}.lora_B.weight": torch.ones(99, 4)}, "does not fit"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 64), f"{Q}.lora_B.weight": torch.ones(128, 3)}, "does not fit"),
        ({f"{Q}.lora_A.weight": torch.ones(0, 64), f"{Q}.lora_B.weight": torch.ones(128, 0)}, "does not fit"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector cannot be merged"),
        (
            {"base_model.model.nothing.lora_A.weight": torch.ones(4, 4)}
            | {"base_model.model.nothing.lora_B.weight": torch.ones(4, 4)},
            "no tensor nothing.weight",
        ),
        (
            {"base_model.model.model.embed_tokens.lora_A.weight": torch.ones(4, 64)}
            | {"base_model.model.model.embed_tokens.lora_B.weight": torch.ones(97, 4)},
            "tied to another",
        ),
    ],
)
async def test_an_adapter_s_wrong_tensor_is_named(
    embedded: Host, tmp_path: Path, tensors: dict[str, Tensor], problem: str
) -> None:
    with pytest.raises(WeightsMismatch, match=problem):
        await stage(embedded, write_adapter(tmp_path / "a", tensors))


async def test_an_adapter_without_its_tensors_is_refused(embedded: Host, tmp_path: Path) -> None:
    weights = make_adapter(tmp_path / "a", embedded.model, 125)
    del weights.files[1]

    with pytest.raises(FarmError, match="An adapter is adapter_config"):
        await stage(embedded, weights)


def test_a_folder_without_weights_is_not_described(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds no safetensors file"):
        stored.describe(tmp_path)
