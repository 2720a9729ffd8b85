"""rollfarm inside an SGLang process: loads the weights that the engine host received, and ends with the host.

The engine host receives each version into memory that it shares with SGLang, while SGLang generates. Then it hands a
single tensor over, as any trainer may, with this module's `load` as the loader: it says where the memory is, and what
lies in it.

`python -m rollfarm.sglang_loader ARGS...` is SGLang's own server, which also ends when its standard input does.
"""

import json
import os
import runpy
import sys
from typing import Any

from rollfarm.engine_child import end_with_stdin, read_weights

LOADER = "rollfarm.sglang_loader.load"
"""What --custom-weight-loader and the load_format of /update_weights_from_tensor call the loader."""

_CPU_ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--mm-attention-backend", "sdpa"),
)
_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}


def load(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """SGLang's hook, called in each of its ranks: put a whole version into `model`, in the format of a checkpoint."""
    ((_, description),) = named_tensors
    model.load_weights(read_weights(json.loads(bytes(description.tolist()))))
    _forget_images()


def _forget_images() -> None:
    """What the vision tower made of them before is of other weights, and SGLang would go on with it."""
    from sglang.srt.managers import mm_schedule  # pyright: ignore[reportMissingImports]

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def main() -> None:
    """Run the server until it ends or its standard input does."""
    end_with_stdin()
    if not _has_gpu():
        os.environ.update(_CPU_ENVIRONMENT)
        sys.argv[1:1] = _CPU_ARGUMENTS
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.argv[0] = "sglang"
    main()
