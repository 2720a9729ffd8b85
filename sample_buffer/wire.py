"""Trajectories on the wire as bytes: kept as they were handed in, and never parsed on the way out.

So every delivery is the same, and none is serialised anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool

from rollfarm.rpc import CHUNK_BYTES
from rollfarm.v1 import sample_buffer_pb2

_TRAJECTORIES = sample_buffer_pb2.Group.TRAJECTORIES_FIELD_NUMBER
_GROUPS = sample_buffer_pb2.LeaseBatchResponse.GROUPS_FIELD_NUMBER


class Completion(Protocol):
    """A CompleteEpisodeRequest whose trajectory is still serialised."""

    request_id: str
    lease_id: str
    trajectory: bytes


class Completions(Protocol):
    """A CompleteEpisodesRequest of such."""

    completions: Sequence[Completion]


def _opaque() -> tuple[Any, Any]:
    """The classes of Completion and Completions: those of the contract, but for the type of `trajectory`.

    To the wire a message and its bytes are the same.
    """
    package = "sample_buffer.wire"
    file = descriptor_pb2.FileDescriptorProto(name="sample_buffer/wire.proto", package=package, syntax="proto3")
    one, many = file.message_type.add(), file.message_type.add()
    pb = sample_buffer_pb2
    pb.CompleteEpisodeRequest.DESCRIPTOR.CopyToProto(one)
    pb.CompleteEpisodesRequest.DESCRIPTOR.CopyToProto(many)
    (trajectory,) = (field for field in one.field if field.number == pb.CompleteEpisodeRequest.TRAJECTORY_FIELD_NUMBER)
    trajectory.type = trajectory.TYPE_BYTES
    trajectory.ClearField("type_name")
    (completions,) = many.field
    completions.type_name = f".{package}.{one.name}"
    pool = DescriptorPool()
    pool.Add(file)
    classes = message_factory.GetMessageClassesForFiles([file.name], pool)
    return classes[f"{package}.{one.name}"], classes[f"{package}.{many.name}"]


COMPLETION, COMPLETIONS = _opaque()


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
