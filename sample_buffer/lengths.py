"""Finished episodes by length, so that a bias against long ones shows.

Policy tokens are counted in a histogram of eight buckets to each doubling, exactly up to 16, and read as quarters.
"""

from collections.abc import Mapping

from rollfarm.v1 import sample_buffer_pb2

BITS = 4
"""Leading binary digits that a length keeps when it is rounded up."""

Histogram = Mapping[int, int]
"""Episodes by `rounded` length."""


def rounded(token_count: int) -> int:
    """The longest length in the bucket: at most an eighth more."""
    unit = 1 << max(0, token_count.bit_length() - BITS)
    return -(-token_count // unit) * unit


def quartiles(finished: Histogram, dropped: Mapping[str, Histogram]) -> list[sample_buffer_pb2.LengthQuartile]:
    """Four quarters of the finished episodes, shortest first, and what was dropped of each; none of no episode.

    A bucket that lies in several quarters is shared out: its dropped episodes as evenly as integers allow.
    """
    total = sum(finished.values())
    if not total:
        return []
    quarters = [sample_buffer_pb2.LengthQuartile() for _ in range(4)]
    begin = 0
    for length, count in sorted(finished.items()):
        for number, quarter in enumerate(quarters):
            low = max(total * number // 4, begin) - begin
            high = min(total * (number + 1) // 4, begin + count) - begin
            if low < high:
                quarter.max_token_count = length
                quarter.episode_count += high - low
                for reason, histogram in dropped.items():
                    lost = histogram.get(length, 0)
                    if part := lost * high // count - lost * low // count:
                        quarter.dropped_counts[reason] += part
        begin += count
    for quarter, shorter in zip(quarters[1:], quarters, strict=False):
        quarter.max_token_count = max(quarter.max_token_count, shorter.max_token_count)  # one may be empty
    return quarters
