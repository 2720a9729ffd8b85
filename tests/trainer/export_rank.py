"""One of two ranks, as a process: MODEL FOLDER. They wait for each other at most TIMEOUT_SECONDS, and export the model
into FOLDER, where the test lets rank 0 write no sooner than it likes."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.trainer.conftest import make_backend
from trainer.backends import alone
from trainer.ranks import join, rank

TIMEOUT_SECONDS = 4.0


def main(model: str, folder: str) -> None:
    join(torch.device("cpu"), 120)
    backend = make_backend(Path(model))
    dist.barrier()
    alone.PULSE_SECONDS = 0.2
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_SECONDS))  # pyright: ignore[reportPrivateUsage]
    if rank() == 0:
        print("begun", flush=True)
    backend.export(Path(folder))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
