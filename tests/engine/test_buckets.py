"""The layout that both ends of a weight broadcast compute for themselves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfarm.buckets import DTYPE_BYTES, pieces, plan
from rollfarm.errors import InvalidArgument
from rollfarm.v1.engine_pb2 import TensorSpec


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def test_neighbours_of_one_dtype_share_a_bucket_until_it_is_full() -> None:
    buckets = plan([spec("a", 2, 3), spec("b", 4), spec("c", 1)], bucket_size_bytes=40)

    assert [[(s.name, s.offset, s.numel) for s in b.slots] for b in buckets] == [
        [("a", 0, 6), ("b", 6, 4)],
        [("c", 0, 1)],
    ]
    assert [b.numel for b in buckets] == [10, 1]


def test_a_change_of_dtype_begins_a_bucket() -> None:
    buckets = plan([spec("a", 1), spec("b", 1, dtype="bfloat16"), spec("c", 1)], bucket_size_bytes=1000)

    assert [(b.dtype, b.size_bytes) for b in buckets] == [("float32", 4), ("bfloat16", 2), ("float32", 4)]


def test_a_tensor_over_the_limit_travels_alone() -> None:
    buckets = plan([spec("a", 1), spec("huge", 100), spec("b", 1)], bucket_size_bytes=16)

    assert [[s.name for s in b.slots] for b in buckets] == [["a"], ["huge"], ["b"]]


def test_only_a_bucket_over_the_limit_is_cut_and_never_within_an_element() -> None:
    assert pieces(16, bucket_size_bytes=16) == [slice(0, 16)]
    assert pieces(50, bucket_size_bytes=21) == [slice(0, 16), slice(16, 32), slice(32, 48), slice(48, 50)]
    assert pieces(20, bucket_size_bytes=3) == [slice(0, 8), slice(8, 16), slice(16, 20)]
    assert pieces(20, bucket_size_bytes=0) == [slice(0, 20)]


def test_scalars_have_one_element_and_empty_tensors_none() -> None:
    (bucket,) = plan([spec("scalar"), spec("empty", 0, 4)], bucket_size_bytes=16)

    assert [(s.shape, s.numel) for s in bucket.slots] == [((), 1), ((0, 4), 0)]


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="Tensor a has the dtype 'complex64'"):
        plan([spec("a", 1, dtype="complex64")], bucket_size_bytes=16)


SHAPES = st.lists(st.tuples(st.sampled_from(list(DTYPE_BYTES)), st.lists(st.integers(0, 9), max_size=3)), max_size=30)


@given(shapes=SHAPES, limit=st.integers(0, 400))
def test_every_tensor_is_carried_once_in_order_without_gaps(shapes: list[tuple[str, list[int]]], limit: int) -> None:
    tensors = [TensorSpec(name=str(i), dtype=dtype, shape=shape) for i, (dtype, shape) in enumerate(shapes)]

    buckets = plan(tensors, limit)

    assert [slot.name for bucket in buckets for slot in bucket.slots] == [tensor.name for tensor in tensors]
    for bucket in buckets:
        ends = [0, *(slot.offset + slot.numel for slot in bucket.slots)]
        assert [slot.offset for slot in bucket.slots] == ends[:-1]
        assert ends[-1] == bucket.numel
        assert bucket.size_bytes <= limit or sum(slot.numel > 0 for slot in bucket.slots) <= 1
