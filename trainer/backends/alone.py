"""What rank 0 does alone, such as reading or writing a whole model, may take longer than ranks wait for each other.

Meanwhile rank 0 tells the others from a thread that it lives, so that they wait for as long as it does.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from trainer.backends.passes import rank, world_size

PULSE_SECONDS = 10.0
"""Between two signs of life. Far below trainer.rank_timeout_seconds."""

T = TypeVar("T")


def on_rank_0(work: Callable[[], T]) -> T | None:
    """What `work` returns on rank 0, and None on the others, which come back when rank 0 is done: also where `work`
    raised, which rank 0 alone does. Collective; `work` itself must not be."""
    if rank() > 0:
        while not _pulse(is_done=False):
            pass
        return None
    if world_size() == 1:
        return work()
    done = threading.Event()
    failures: list[Exception] = []

    def beat() -> None:
        try:
            while not done.wait(PULSE_SECONDS):
                _pulse(is_done=False)
            _pulse(is_done=True)
        except RuntimeError as gone:  # torch.distributed's, of a rank that is gone
            failures.append(gone)

    pulses = threading.Thread(target=beat, name="pulse")
    pulses.start()
    try:
        return work()
    finally:
        done.set()
        pulses.join()
        for failure in failures:
            raise failure


def _pulse(*, is_done: bool) -> bool:
    """Rank 0's word, on every rank."""
    word = torch.tensor(int(is_done))
    dist.broadcast(word, src=0)
    return bool(word)
