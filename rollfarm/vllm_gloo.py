"""rollfarm inside a vLLM process: loads the weights that the engine host received, and ends with the host.

The engine host joins the trainer's gloo group and receives each version into memory that it shares with vLLM, while
vLLM generates. Here that memory is only read, in one short pause, so a trainer that dies midway never reaches vLLM.

`python -m rollfarm.vllm_gloo ARGS...` is vLLM's own API server, which also ends when its standard input does, unless
that is /dev/null: nobody holds its other end.
"""

import contextlib
import functools
import multiprocessing
import os
import runpy
import sys
import threading
from typing import Any

from rollfarm.engine_child import end_with_stdin, read_weights

BACKEND = "rollfarm"
"""What --weight-transfer-config calls the loader."""


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
            """Load what `read_weights` reads."""
            reload.initialize_layerwise_reload(self.model)
            self.model.load_weights(read_weights(update_info))
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def receive_weights(self, update_info: Any) -> None:
            raise NotImplementedError("update_weights does it")

        def finish_weight_update(self) -> None:
            """Done already."""

        def shutdown(self) -> None:
            """Nothing is held."""

    return SharedMemoryLoader


def main() -> None:
    """Run the API server until it ends or its standard input does."""
    end_with_stdin()
    if _on_cpu():
        # Half a prompt is sampled in vain, and vLLM then winds back the request's generator, which only CUDA's can do.
        sys.argv.insert(1, "--no-enable-chunked-prefill")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

    return bool(current_platform.is_cpu())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()
