"""Checksums of weights on their way, which trainer and engine host both compute.

XXH3 finds what a broken transfer does (memory written to too early, bytes lost or swapped) at the speed of memory. It
keeps no attacker out; files, which others may reach, have sha256.
"""

from typing import Any

import xxhash

TABLE_ITEM_BYTES = 8
"""Of one buffer's checksum in the table that follows the buffers."""


def of_buffer(data: Any) -> bytes:
    """XXH3 64 of a buffer, 8 bytes, little-endian. Other threads run meanwhile."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(TABLE_ITEM_BYTES, "little")


def of_tensor(data: Any) -> bytes:
    """XXH3 128 of a buffer: tells whether a tensor changed; two that differ agree once in 2**128 times."""
    return xxhash.xxh3_128_digest(data)
