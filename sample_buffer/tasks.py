"""What group k of a run plays: a pure function of (run seed, k).

Domains are interleaved by smooth weighted round robin (the one of nginx) in integers, so that every prefix of the
sequence holds the domains in the ratio of their weights, to within one group, and no platform's floats matter.
"""

import hashlib
from collections.abc import Sequence

from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2

WEIGHT_UNITS = 1 << 30
"""Integer shares that the weights of a run are rounded to."""


def shares(weights: Sequence[float]) -> list[int]:
    """The weights as positive integers that sum to about WEIGHT_UNITS."""
    total = sum(weights)
    return [max(1, round(weight / total * WEIGHT_UNITS)) for weight in weights]


def interleave(balances: list[int], shares: Sequence[int]) -> int:
    """The next domain; advances `balances` in place. Begin with all zeros."""
    for domain, share in enumerate(shares):
        balances[domain] += share
    chosen = max(range(len(shares)), key=lambda domain: (balances[domain], -domain))
    balances[chosen] -= sum(shares)
    return chosen


def spread(shares: Sequence[int], count: int) -> list[tuple[int, int]]:
    """(domain, position in the domain) of the first `count` of the sequence."""
    balances = [0] * len(shares)
    seen = [0] * len(shares)
    picks: list[tuple[int, int]] = []
    for _ in range(count):
        domain = interleave(balances, shares)
        picks.append((domain, seen[domain]))
        seen[domain] += 1
    return picks


def seed_of(run_seed: int, domain: str, index: int, *, validation: bool) -> int:
    """Seed of one task, 0 to 2**63 - 1. Training's are even and validation's odd: the two never meet."""
    digest = hashlib.blake2b(f"{run_seed}/{domain}/{index}/{int(validation)}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2 << 1) | validation


def task(spec: sample_buffer_pb2.RunSpec, domain: int, index: int, *, validation: bool = False) -> trajectory_pb2.Task:
    """The task at `index` of the domain at position `domain` of the spec. Those of a run that evaluates are all
    validation's."""
    source = spec.domains[domain]
    return trajectory_pb2.Task(
        domain=source.name,
        environment=source.environment,
        index=index,
        seed=seed_of(spec.seed, source.name, index, validation=validation or spec.held_out),
        settings_json=source.settings_json,
    )


def group_id(run_id: str, index: int) -> str:
    """Names group `index` of a run."""
    return f"{run_id}-g{index}"
