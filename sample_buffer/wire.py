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


def messages(
    batch: sample_buffer_pb2.Batch, groups: Sequence[RawGroup], most_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """Serialised LeaseBatchResponses of at most `most_bytes`, or of one trajectory where that is larger.

    A group that does not fit goes on in the next message, under the same head.
    """
    head = sample_buffer_pb2.LeaseBatchResponse(batch=batch).SerializeToString(deterministic=True)
    last = sample_buffer_pb2.LeaseBatchResponse(last=True).SerializeToString()
    room = most_bytes - len(head) - len(last)
    pieces: list[bytes] = []
    size = 0
    for part in _parts(groups, room):
        length = sum(map(len, part))
        if pieces and size + length > room:
            yield b"".join((head, *pieces))
            pieces, size = [], 0
        pieces += part
        size += length
    yield b"".join((head, *pieces, last))


def _parts(groups: Sequence[RawGroup], room: int) -> Iterator[list[bytes]]:
    """Each group as one field, or as several where its trajectories fill more than `room`."""
    for group in groups:
        head = group.head.SerializeToString(deterministic=True)
        part, size = [head], len(head)
        for trajectory in group.trajectories:
            prefix = _prefix(_TRAJECTORIES, len(trajectory))
            length = len(prefix) + len(trajectory)
            if len(part) > 1 and size + length + _PREFIX_BYTES > room:
                yield [_prefix(_GROUPS, size), *part]
                part, size = [head], len(head)
            part += (prefix, trajectory)
            size += length
        yield [_prefix(_GROUPS, size), *part]


_PREFIX_BYTES = 6
"""The most that tag and length take."""


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
