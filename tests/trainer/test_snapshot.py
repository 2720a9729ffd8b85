"""Snapshots: streamed, checked, and kept in memory that is used again."""

import hashlib
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollfarm import buckets, checksums
from trainer.weights import files
from trainer.weights.memory import RamArena, SharedArena
from trainer.weights.snapshot import Snapshot, Snapshots, take_snapshot

Named = dict[str, Tensor]


def mixed(seed: int = 0) -> Named:
    """Several dtypes, a scalar, an empty tensor, one larger than a bucket."""
    dice = torch.Generator().manual_seed(seed)
    return {
        "flag": torch.tensor([True, False, True]),
        "large": torch.randn(20, 5, generator=dice),
        "scalar": torch.randn((), generator=dice),
        "none": torch.zeros(0, 4),
        "count": torch.arange(7),
        "small": torch.randn(3, generator=dice),
    }


def snapshots(arena: type[RamArena] | type[SharedArena] = RamArena) -> Snapshots:
    return Snapshots(dtype=torch.float32, bucket_size_bytes=64, make_arena=arena)


def values(snapshot: Snapshot) -> dict[str, list[int]]:
    return {spec.name: data.tolist() for spec, data in snapshot.tensors()}


@pytest.mark.parametrize("arena", [RamArena, SharedArena])
def test_buckets_are_those_that_engines_plan_and_hold_every_tensor(arena: type[RamArena] | type[SharedArena]) -> None:
    tensors = mixed()

    taken = snapshots(arena).take(tensors.items(), policy_version=1)

    plan = buckets.plan(taken.specs, 64)
    assert [bucket.size_bytes for bucket in plan] == [buffer.numel() for buffer in taken.buffers]
    assert values(taken) == {
        name: tensor.contiguous().flatten().view(torch.uint8).tolist() for name, tensor in tensors.items()
    }
    assert taken.size_bytes == 3 + 400 + 4 + 0 + 56 + 12


def test_the_last_part_is_a_table_of_the_buckets_checksums() -> None:
    taken = snapshots().take(mixed().items(), policy_version=1)

    *full, table = taken.parts()

    assert table.numpy().tobytes() == b"".join(checksums.of_buffer(buffer.numpy()) for buffer in full)


def test_a_large_tensor_is_sent_while_it_is_copied() -> None:
    large = torch.arange(40, dtype=torch.float64).view(8, 5)

    taken = snapshots().take([("large", large)], policy_version=1)

    *pieces, _ = taken.parts()
    assert [piece.view(torch.float32).tolist() for piece in pieces] == [
        [float(number) for number in range(start, min(start + 16, 40))] for start in (0, 16, 32)
    ]
    assert [bucket.tolist() for bucket in taken.buffers] == [torch.cat(pieces).tolist()]


def test_a_large_tensor_whose_rows_do_not_follow_each_other_is_copied_in_order() -> None:
    large = torch.arange(40.0).view(5, 8).t()

    taken = snapshots().take([("large", large)], policy_version=1)

    assert values(taken) == {"large": large.contiguous().flatten().view(torch.uint8).tolist()}
    assert list(taken.parts())[-1].numpy().tobytes() == b"".join(
        checksums.of_buffer(piece.numpy()) for piece in list(taken.parts())[:-1]
    )


def test_a_tensor_is_needed_only_until_the_next_one_is_asked_for() -> None:
    tensors = mixed()

    def lent() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            copy = tensor.clone()
            yield name, copy
            copy.zero_()

    taken = snapshots().take(lent(), policy_version=1)

    assert values(taken) == values(snapshots().take(tensors.items(), policy_version=1))


def test_from_the_second_version_on_it_is_sent_while_it_is_filled() -> None:
    taker, opened, came, may_go_on = snapshots(), list[Snapshot](), list[Tensor](), threading.Event()
    taker.take(mixed().items(), policy_version=1)

    def slowly() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in mixed(1).items():
            yield name, tensor
            if name == "scalar":
                assert may_go_on.wait(10)

    def send() -> None:
        for part in opened[0].parts():
            came.append(part.clone())
            may_go_on.set()

    def open_and_send(snapshot: Snapshot) -> None:
        opened.append(snapshot)
        sending.start()

    sending = threading.Thread(target=send, daemon=True)
    taken = taker.take(slowly(), policy_version=2, opened=open_and_send)
    sending.join(10)

    assert [part.tolist() for part in came] == [part.tolist() for part in taken.parts()]


def test_whoever_sends_what_cannot_be_gathered_is_told() -> None:
    taker, opened = snapshots(), list[Snapshot]()
    taker.take(mixed().items(), policy_version=1)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "flag", mixed()["flag"]
        raise OSError("a rank is gone")

    with pytest.raises(OSError, match="a rank is gone"):
        taker.take(broken(), policy_version=2, opened=opened.append)
    with pytest.raises(RuntimeError, match="version 2 was not gathered: a rank is gone"):
        list(opened[0].parts())


def test_another_model_under_the_same_versions_is_refused() -> None:
    taker = snapshots()
    taker.take(mixed().items(), policy_version=1)

    with pytest.raises(RuntimeError, match="not those of the version before"):
        taker.take([("flag", torch.tensor([True]))], policy_version=2)


def test_memory_is_used_again_only_when_nobody_holds_the_version() -> None:
    taker = snapshots()
    first = taker.take(mixed(1).items(), policy_version=1)
    before, place = values(first), first.buffers[0].data_ptr()

    second = taker.take(mixed(2).items(), policy_version=2)
    assert values(first) == before

    del first
    third = taker.take(mixed(3).items(), policy_version=3)

    assert third.buffers[0].data_ptr() == place
    assert values(second) == values(snapshots().take(mixed(2).items(), policy_version=2))


def test_memory_of_more_versions_than_are_needed_at_once_is_given_back() -> None:
    made: list[RamArena] = []
    taker = Snapshots(dtype=torch.float32, bucket_size_bytes=64, make_arena=lambda: made.append(RamArena()) or made[-1])
    held = [taker.take(mixed().items(), policy_version=version) for version in range(4)]
    arenas = [weakref.ref(arena) for arena in made]
    made.clear()

    held.clear()

    assert sum(arena() is not None for arena in arenas) == 2


def test_equal_tensors_have_equal_digests_and_no_others() -> None:
    taker, tensors = snapshots(), mixed()
    before = taker.take(tensors.items(), policy_version=1).digests

    tensors["large"][3, 3] += 1e-6
    after = taker.take(tensors.items(), policy_version=2).digests

    assert [name for name in tensors if before[name] != after[name]] == ["large"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_what_safetensors_reads_and_hash_as_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 64)
    tensors = mixed()
    taken = take_snapshot(tensors.items(), policy_version=1, dtype=dtype, bucket_size_bytes=64)

    written = files.write(tmp_path, taken.tensors())

    read = {name: each for file in written for name, each in load_file(tmp_path / file.path).items()}
    assert len(written) > 1
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(read[name], tensor.to(dtype if tensor.is_floating_point() else tensor.dtype))
    for file in written:
        content = (tmp_path / file.path).read_bytes()
        assert (file.size_bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
