"""Batches on the wire, made of the stored bytes of their trajectories: never parsed, so every delivery is the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollfarm.rpc import CHUNK_BYTES
from rollfarm.v1 import sample_buffer_pb2

_TRAJECTORIES = sample_buffer_pb2.Group.TRAJECTORIES_FIELD_NUMBER
_GROUPS = sample_buffer_pb2.LeaseBatchResponse.GROUPS_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class RawGroup:
    """A group whose trajectories are serialised already."""

    head: sample_buffer_pb2.Group
    """Everything but the trajectories."""
    trajectories: Sequence[bytes]

    def pieces(self) -> list[bytes]:
        """The serialised group, in pieces to join."""
        pieces = [self.head.SerializeToString(deterministic=True)]
        for trajectory in self.trajectories:
            pieces += (_prefix(_TRAJECTORIES, len(trajectory)), trajectory)
        return pieces


def messages(
    batch: sample_buffer_pb2.Batch, groups: Sequence[RawGroup], most_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Serialised LeaseBatchResponses of at most `most_bytes`; a larger group is a message of its own."""
    head = sample_buffer_pb2.LeaseBatchResponse(batch=batch).SerializeToString(deterministic=True)
    last = sample_buffer_pb2.LeaseBatchResponse(last=True).SerializeToString()
    room = most_bytes - len(head) - len(last)
    pieces: list[bytes] = []
    size = 0
    for group in groups:
        encoded = group.pieces()
        length = sum(map(len, encoded))
        encoded.insert(0, _prefix(_GROUPS, length))
        length += len(encoded[0])
        if pieces and size + length > room:
            yield b"".join((head, *pieces))
            pieces, size = [], 0
        pieces += encoded
        size += length
    yield b"".join((head, *pieces, last))


def _prefix(field: int, length: int) -> bytes:
    """Tag and length of a length-delimited field."""
    return _varint(field << 3 | 2) + _varint(length)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
