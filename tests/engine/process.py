"""An engine host as a process of its own."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "llm_proxy.engine")

START_SECONDS = 300.0
STOP_SECONDS = 60.0


def vllm_flags(model: Path, python: Path) -> list[str]:
    return [
        *("--model.path", str(model), "--engine.adapter", "vllm"),
        *("--engine.vllm.python", str(python), "--engine.kv_cache", "64M", "--engine.vllm.start_seconds", "300"),
    ]


def sglang_flags(model: Path, python: Path) -> list[str]:
    return [
        *("--model.path", str(model), "--engine.adapter", "sglang"),
        *("--engine.sglang.python", str(python), "--engine.kv_cache", "64M", "--engine.sglang.start_seconds", "300"),
    ]


class Process:
    """Started on entry, on a free port and in `folder`; told to end on exit."""

    def __init__(self, *flags: str, folder: Path = ROOT) -> None:
        self.lines: list[str] = []
        """Its log so far."""

        self._flags = flags
        self._folder = folder
        self._address: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __enter__(self) -> "Process":
        self.process = subprocess.Popen(
            [*COMMAND, *self._flags, "--engine.listen.port", "0", "--engine.telemetry.log_format", "json"],
            cwd=self._folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("{") and (said := json.loads(line)).get("event") == "serving":
                self._address.put(said["address"])
        self._address.put("")

    def address(self) -> str:
        """Where it serves, once it does."""
        address = self._address.get(timeout=START_SECONDS)
        assert address, "the engine host ended: " + "".join(self.lines)
        return address

    def wait(self) -> int:
        """Its exit status, once it and its log have ended."""
        status = self.process.wait(STOP_SECONDS)
        self._reader.join(STOP_SECONDS)
        return status
