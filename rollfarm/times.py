"""Seconds as the contract's durations and timestamps, rounded to the nanosecond."""

from google.protobuf import duration_pb2, timestamp_pb2

_NANOS = 1_000_000_000


def duration(seconds: float) -> duration_pb2.Duration:
    """A span of time. Less than nothing, which a clock that was set back may give, is nothing."""
    whole, nanos = _split(max(0.0, seconds))
    return duration_pb2.Duration(seconds=whole, nanos=nanos)


def timestamp(seconds: float) -> timestamp_pb2.Timestamp:
    """A moment, in seconds since the epoch."""
    whole, nanos = _split(seconds)
    return timestamp_pb2.Timestamp(seconds=whole, nanos=nanos)


def _split(seconds: float) -> tuple[int, int]:
    """Whole seconds and the nanoseconds beyond. The product of both in one float would lose some of the latter."""
    whole, fraction = divmod(seconds, 1)
    return divmod(int(whole) * _NANOS + round(fraction * _NANOS), _NANOS)
