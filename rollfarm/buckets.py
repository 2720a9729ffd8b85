"""How weights are packed for a broadcast: the one rule that the trainer and every engine's receiver share.

Tensors keep their order. Consecutive tensors of one dtype fill a bucket of at most `bucket_size_bytes`, which travels
as one flat buffer; a larger tensor is a bucket of its own and travels in pieces of that size, so that it is gathered,
sent and checked at the same time. Only the bytes count: either end may broadcast the buffer as uint8, and must for
dtypes that its backend does not know. No torch here: dtypes are names.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollfarm.errors import InvalidArgument
from rollfarm.v1 import engine_pb2

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Size of one element, by the dtype's name without "torch."."""

PIECE_ALIGN_BYTES = 8
"""Pieces end at multiples of it, so that each holds whole elements."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in its bucket's flat buffer."""

    name: str
    """Hugging Face name."""

    shape: tuple[int, ...]
    """Empty is a scalar."""

    offset: int
    """First element."""

    numel: int
    """Elements."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One broadcast, or several where a single tensor is larger than `bucket_size_bytes`."""

    dtype: str
    """Of every tensor in it, and of the flat buffer."""

    slots: tuple[Slot, ...]
    """Its tensors, in order, without gaps."""

    numel: int
    """Elements of the flat buffer."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the flat buffer."""
        return self.numel * DTYPE_BYTES[self.dtype]


def plan(tensors: Iterable[engine_pb2.TensorSpec], bucket_size_bytes: int) -> list[Bucket]:
    """The buckets that carry `tensors`, in the order of their broadcasts.

    A tensor without elements takes a slot of its neighbour's bucket. Raises InvalidArgument for a dtype that has no
    known size and for a negative dimension.
    """
    return [_bucket(dtype, specs) for dtype, specs in _runs(tensors, bucket_size_bytes)]


def _runs(
    tensors: Iterable[engine_pb2.TensorSpec], bucket_size_bytes: int
) -> Iterator[tuple[str, list[engine_pb2.TensorSpec]]]:
    run: list[engine_pb2.TensorSpec] = []
    filled = 0
    for spec in tensors:
        if run and not fits(spec, run[0].dtype, filled, bucket_size_bytes):
            yield run[0].dtype, run
            run, filled = [], 0
        run.append(spec)
        filled += size_bytes(spec)
    if run:
        yield run[0].dtype, run


def pieces(size_bytes: int, bucket_size_bytes: int) -> list[slice]:
    """The bytes of a bucket that travel together, in order. 0 for `bucket_size_bytes` cuts nothing."""
    step = max(PIECE_ALIGN_BYTES, bucket_size_bytes - bucket_size_bytes % PIECE_ALIGN_BYTES)
    if bucket_size_bytes <= 0 or size_bytes <= bucket_size_bytes:
        return [slice(0, size_bytes)]
    return [slice(start, min(start + step, size_bytes)) for start in range(0, size_bytes, step)]


def fits(tensor: engine_pb2.TensorSpec, dtype: str, filled_bytes: int, bucket_size_bytes: int) -> bool:
    """Whether the tensor joins a bucket of that dtype which holds so many bytes already."""
    return tensor.dtype == dtype and filled_bytes + size_bytes(tensor) <= bucket_size_bytes


def size_bytes(tensor: engine_pb2.TensorSpec) -> int:
    """Raises InvalidArgument as `plan` does."""
    return _numel(tensor) * _itemsize(tensor)


def _bucket(dtype: str, specs: list[engine_pb2.TensorSpec]) -> Bucket:
    slots: list[Slot] = []
    offset = 0
    for spec in specs:
        slots.append(Slot(spec.name, tuple(spec.shape), offset, _numel(spec)))
        offset += slots[-1].numel
    return Bucket(dtype, tuple(slots), offset)


def _numel(spec: engine_pb2.TensorSpec) -> int:
    if any(size < 0 for size in spec.shape):
        raise InvalidArgument(f"Tensor {spec.name} has the shape {list(spec.shape)}.", tensor=spec.name)
    return math.prod(spec.shape)


def _itemsize(spec: engine_pb2.TensorSpec) -> int:
    if spec.dtype not in DTYPE_BYTES:
        raise InvalidArgument(
            f"Tensor {spec.name} has the dtype {spec.dtype!r}; known: {', '.join(DTYPE_BYTES)}.",
            tensor=spec.name,
            dtype=spec.dtype,
        )
    return DTYPE_BYTES[spec.dtype]
