import numpy as np
import pytest

from rollfarm.errors import InvalidArgument
from rollfarm.tokens import (
    append_spans,
    pack_ids,
    pack_logprobs,
    token_count,
    unpack_ids,
    unpack_logprobs,
    versions_of,
)
from rollfarm.v1.trajectory_pb2 import VersionSpan


def test_token_arrays_are_little_endian_and_survive_the_trip():
    assert pack_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert unpack_ids(pack_ids([1, 258])).tolist() == [1, 258]
    assert unpack_logprobs(pack_logprobs([-0.5])).tolist() == [-0.5]
    assert token_count(pack_ids([4, 5, 6])) == 3


def test_a_truncated_array_is_refused():
    with pytest.raises(InvalidArgument, match="5 bytes"):
        unpack_ids(b"12345")


def test_neighbouring_spans_of_one_version_are_joined():
    spans = [(1, 2)]

    append_spans(spans, [(1, 1), (2, 1)])

    assert spans == [(1, 3), (2, 1)]


def test_every_token_has_the_version_of_its_span():
    spans = [VersionSpan(policy_version=1, token_count=3), VersionSpan(policy_version=2, token_count=1)]

    np.testing.assert_array_equal(versions_of(spans), [1, 1, 1, 2])
