"""Writes safetensors files out of a snapshot's memory, hashing what is written as it is written.

The format is 8 bytes (the header's length, little-endian), the header as JSON, and the tensors without gaps; a header
of a multiple of 8 bytes and wider dtypes first keep every tensor aligned. https://github.com/huggingface/safetensors
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from rollfarm import buckets
from rollfarm.v1 import engine_pb2

DTYPE_CODES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""As safetensors names dtypes."""

FILE_BYTES = 256 * 1024 * 1024
"""A file takes tensors until it has so many, or its share of a smaller version."""

FILES = 16
"""A version is cut in about as many files, unless those were larger: several are hashed at a time, here and by the
engines."""

_THREADS = 4
_CHUNK_BYTES = 512 * 1024
"""Hashed while it is still in the cache."""

Part = tuple[engine_pb2.TensorSpec, Tensor]
"""A tensor's spec and its bytes."""


def write(folder: Path, parts: Iterable[Part]) -> list[engine_pb2.StoredFile]:
    """The tensors in as many files as they need, in a folder that exists. Raises OSError."""
    shards = list(enumerate(_shards(parts)))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="write-weights") as threads:
        return list(threads.map(lambda shard: _write(folder, f"model-{shard[0]:05d}.safetensors", shard[1]), shards))


def _shards(parts: Iterable[Part]) -> list[list[Part]]:
    shards: list[list[Part]] = [[]]
    listed = list(parts)
    enough = min(FILE_BYTES, sum(data.numel() for _, data in listed) // FILES)
    filled = 0
    for part in listed:
        if shards[-1] and filled >= enough:
            shards.append([])
            filled = 0
        shards[-1].append(part)
        filled += part[1].numel()
    return shards


def _write(folder: Path, name: str, parts: Sequence[Part]) -> engine_pb2.StoredFile:
    ordered = sorted(parts, key=lambda part: -buckets.DTYPE_BYTES[part[0].dtype])
    digest = hashlib.sha256()
    with (folder / name).open("wb", buffering=0) as file:
        for piece in (_header([spec for spec, _ in ordered]), *(data.numpy().data for _, data in ordered)):
            for start in range(0, len(piece), _CHUNK_BYTES):
                _write_all(file, piece[start : start + _CHUNK_BYTES])
                digest.update(piece[start : start + _CHUNK_BYTES])
        size = file.tell()
    return engine_pb2.StoredFile(path=name, size_bytes=size, sha256=digest.hexdigest())


def _write_all(file: Any, data: bytes | memoryview) -> None:
    """An unbuffered file may take a part of it."""
    while data:
        data = data[file.write(data) :]


def _header(specs: Sequence[engine_pb2.TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + buckets.size_bytes(spec)
        entries[spec.name] = {
            "dtype": DTYPE_CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
