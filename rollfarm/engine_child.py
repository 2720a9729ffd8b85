"""What rollfarm does within the process of an inference server: it reads weights, and ends with the engine host."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_GRACE_SECONDS = 10.0


def read_weights(description: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors in memory of the host, from {"path", "size_bytes", "tensors": [[name, dtype, shape, first byte]...]}."""
    import torch

    memory = torch.from_file(description["path"], shared=True, size=description["size_bytes"], dtype=torch.uint8)
    for name, dtype_name, shape, first in description["tensors"]:
        dtype = getattr(torch, dtype_name)
        numel = 1
        for size in shape:
            numel *= size
        yield name, memory[first : first + numel * dtype.itemsize].view(dtype).view(shape)


def end_with_stdin() -> None:
    """End this process when its standard input does, unless that is /dev/null: nobody holds its other end."""
    if not os.path.samestat(os.fstat(0), Path(os.devnull).stat()):
        threading.Thread(target=_end_with_stdin, daemon=True).start()


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    threading.Timer(_GRACE_SECONDS, lambda: os._exit(1)).start()
    os.kill(os.getpid(), signal.SIGTERM)
