"""rollfarm inside a vLLM process: loads the weights that the engine host received, and ends with the host.

The engine host joins the trainer's gloo group and receives each version into memory that it shares with vLLM, while
vLLM generates. Here that memory is only read, in one short pause, so a trainer that dies midway never reaches vLLM.

`python -m rollfarm.vllm_gloo ARGS...` is vLLM's own API server, which also ends when its standard input does.
"""

import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from typing import Any

BACKEND = "rollfarm"
"""What --weight-transfer-config calls the loader."""

_GRACE_SECONDS = 10.0


def register() -> None:
    """vLLM's plug-in hook, called in each of its processes, sometimes twice."""
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    with contextlib.suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(BACKEND, "rollfarm.vllm_gloo", "SharedMemoryLoader")
    _end_with_parent()


@functools.cache
def _end_with_parent() -> None:
    """A vLLM worker outlives an API server that is killed, unless somebody watches."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def __getattr__(name: str) -> Any:
    """Make the loader when vLLM asks for it: its base class exists in vLLM's environment alone."""
    if name != "SharedMemoryLoader":
        raise AttributeError(name)
    globals()[name] = loader = _loader()
    return loader


def _loader() -> type:
    import torch
    from vllm.distributed.weight_transfer import base  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.model_loader import reload  # pyright: ignore[reportMissingImports]

    class SharedMemoryLoader(base.WeightTransferEngine):  # pyright: ignore[reportUntypedBaseClass]
        """Reads a whole version at once, in the format of a checkpoint."""

        init_info_cls = base.WeightTransferInitInfo
        update_info_cls = base.WeightTransferUpdateInfo

        def init_transfer_engine(self, init_info: Any) -> None:
            """Nothing meets here."""

        def start_weight_update(self) -> None:
            """`update_weights` does all, so that no layer is ever without weights for longer."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Load {"path", "size_bytes", "tensors": [[name, dtype, shape, first byte]...]}."""
            memory = torch.from_file(
                update_info["path"], shared=True, size=update_info["size_bytes"], dtype=torch.uint8
            )
            reload.initialize_layerwise_reload(self.model)
            self.model.load_weights(_views(torch, memory, update_info["tensors"]))
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def receive_weights(self, update_info: Any) -> None:
            raise NotImplementedError("update_weights does it")

        def finish_weight_update(self) -> None:
            """Done already."""

        def shutdown(self) -> None:
            """Nothing is held."""

    return SharedMemoryLoader


def _views(torch: Any, memory: Any, tensors: list[tuple[str, str, list[int], int]]) -> Any:
    for name, dtype_name, shape, first in tensors:
        dtype = getattr(torch, dtype_name)
        numel = 1
        for size in shape:
            numel *= size
        yield name, memory[first : first + numel * dtype.itemsize].view(dtype).view(shape)


def main() -> None:
    """Run the API server until it ends or its standard input does."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    if _on_cpu():
        # Half a prompt is sampled in vain, and vLLM then winds back the request's generator, which only CUDA's can do.
        sys.argv.insert(1, "--no-enable-chunked-prefill")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    return bool(current_platform.is_cpu())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    threading.Timer(_GRACE_SECONDS, lambda: os._exit(1)).start()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()
