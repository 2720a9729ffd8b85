"""What goes wrong with disks, as one kind of error: OSError, however a library wraps it."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

FULL = {errno.ENOSPC, errno.EDQUOT}

_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def os_errors() -> Iterator[None]:
    """Raises OSError where a library that writes files had one. safetensors tells its number in words, and
    torch.distributed.checkpoint has one for each rank."""
    try:
        yield
    except SafetensorError as error:
        if (found := _RUST_ERROR.search(str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error
    except CheckpointException as error:
        for rank, (failure, _) in error.failures.items():
            if isinstance(failure, OSError):
                raise OSError(failure.errno, f"{failure.strerror} (rank {rank})", failure.filename) from error
        raise


def remedy(error: OSError) -> str:
    """What a person does about it."""
    if error.errno in FULL:
        return "Free room there, or lower trainer.keep_checkpoints and trainer.keep_best."
    return "Make the folder writable again."
