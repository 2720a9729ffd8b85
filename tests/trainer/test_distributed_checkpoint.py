import json
from pathlib import Path

import pytest
import torch

from rollfarm.config import ConfigError
from trainer.backends import distributed_checkpoint
from trainer.backends.distributed_checkpoint import DistributedCheckpoint


def tensors(fill: float = 0.0, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {
        name: torch.full(shape, fill) for name, shape in (shapes or {"model.a": (2, 3), "optimizer.step": ()}).items()
    }


def test_tensors_come_back_as_they_were_when_they_were_copied(tmp_path: Path) -> None:
    checkpoint, saved, loaded = DistributedCheckpoint(), tensors(1.0), tensors(0.0)

    write = checkpoint.save(tmp_path, saved)
    for tensor in saved.values():
        tensor.fill_(2.0)
    write()
    checkpoint.load(tmp_path, loaded, model="m")

    assert all((tensor == 1.0).all() for tensor in loaded.values())


def test_nothing_in_the_folder_is_a_pickle(tmp_path: Path) -> None:
    DistributedCheckpoint().save(tmp_path, tensors())()

    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors", ".json"}


def test_large_models_go_into_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_checkpoint, "FILE_BYTES", 20)
    shapes = {f"model.{name}": (2, 3) for name in "abc"}
    checkpoint, loaded = DistributedCheckpoint(), tensors(0.0, **shapes)

    checkpoint.save(tmp_path, tensors(1.0, **shapes))()
    checkpoint.load(tmp_path, loaded, model="m")

    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert all((tensor == 1.0).all() for tensor in loaded.values())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"model.a": (2, 4), "optimizer.step": ()},
            r"another model than m: 1 tensors differ, such as model.a, \[2, 3\]",
        ),
        ({"model.b": (2, 3), "optimizer.step": ()}, "2 tensors differ, such as model.a, .* there and missing here"),
        ({"model.a": (2, 3), "optimizer.exp_avg": ()}, "another optimiser.*optimizer.exp_avg.*trainer.optimizer"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_by_a_name_that_differs(
    tmp_path: Path, other: dict[str, tuple[int, ...]], message: str
) -> None:
    checkpoint, ours = DistributedCheckpoint(), tensors(0.0, **other)
    checkpoint.save(tmp_path, tensors(1.0))()

    with pytest.raises(ConfigError, match=message):
        checkpoint.load(tmp_path, ours, model="m")

    assert not any(tensor.any() for tensor in ours.values())


def test_a_write_that_fails_is_an_os_error_and_leaves_nothing_that_loads(tmp_path: Path) -> None:
    checkpoint = DistributedCheckpoint()
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").mkdir()

    with pytest.raises(OSError, match="shard"):
        checkpoint.save(tmp_path, tensors())()
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        checkpoint.load(tmp_path, tensors(), model="m")


def test_files_that_were_cut_short_are_refused(tmp_path: Path) -> None:
    checkpoint = DistributedCheckpoint()
    checkpoint.save(tmp_path, tensors())()
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-4])

    with pytest.raises(ConfigError, match="damaged"):
        checkpoint.load(tmp_path, tensors(), model="m")
    assert json.loads((tmp_path / "index.json").read_text())
