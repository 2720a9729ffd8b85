"""Whole farms, started as a person starts them: `python -m rollfarm up ...` in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from rollfarm.ports import free_ports
from rollfarm.v1 import (
    llm_proxy_pb2,
    llm_proxy_pb2_grpc,
    sample_buffer_pb2,
    sample_buffer_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)

CHECKOUT = Path(__file__).parents[2]

PORTS = 120
"""More than a farm needs."""

SERVICES = ("sample_buffer", "llm_proxy", "llm_proxy.engine", "env_manager", "reward_gateway", "trainer")


@dataclass
class Farm:
    """A running `rollfarm up` and typed windows into it."""

    process: subprocess.Popen[str]
    base_port: int
    run: Path

    def pids(self, module: str) -> list[int]:
        """Pids of `python -m module` under this farm, in order of start."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in sorted(children, key=lambda c: c.create_time()) if _module(child) == module]

    def valkey_pids(self) -> list[int]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child.pid for child in children if _is_valkey(child)]

    def progress(self, **fields: Any) -> trainer_pb2.GetProgressResponse:
        stub = trainer_pb2_grpc.TrainerServiceStub(self._channel(5))
        return stub.GetProgress(trainer_pb2.GetProgressRequest(**fields), timeout=20, wait_for_ready=True)

    def ledger(self) -> sample_buffer_pb2.GetStatusResponse:
        stub = sample_buffer_pb2_grpc.SampleBufferServiceStub(self._channel(3))
        return stub.GetStatus(sample_buffer_pb2.GetStatusRequest(), timeout=20, wait_for_ready=True)

    def trajectories(self, count: int) -> list[Any]:
        stub = sample_buffer_pb2_grpc.SampleBufferServiceStub(self._channel(3))
        request = sample_buffer_pb2.ListTrajectoriesRequest(page_size=count)
        return list(stub.ListTrajectories(request, timeout=20, wait_for_ready=True).trajectories)

    def proxy(self) -> llm_proxy_pb2.LlmProxyServiceGetStatusResponse:
        stub = llm_proxy_pb2_grpc.LlmProxyServiceStub(self._channel(1))
        request = llm_proxy_pb2.LlmProxyServiceGetStatusRequest()
        return stub.GetStatus(request, timeout=20, wait_for_ready=True)

    def wait_until(self, ready: Callable[[], bool], *, seconds: float) -> None:
        """Return when `ready()`; fail with the farm's last words when it ends or `seconds` pass first."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                pytest.fail(f"the farm ended with status {self.process.returncode}:\n{self.last_words()}")
            try:
                if ready():
                    return
            except grpc.RpcError:
                pass  # the service is starting
            time.sleep(0.1)
        pytest.fail(f"not in {seconds} s:\n{self.last_words()}")

    def wait_for_step(self, step: int, *, seconds: float) -> None:
        self.wait_until(lambda: self.progress().step_count >= step, seconds=seconds)

    def finish(self, *, seconds: float) -> tuple[int, dict[str, Any]]:
        """The exit status and the summary on the last line of stdout."""
        try:
            out, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the farm did not finish in {seconds} s:\n{self.last_words()}")
        lines = out.strip().splitlines()
        assert lines, f"nothing on stdout; status {self.process.returncode}:\n{self.last_words()}"
        return self.process.returncode, json.loads(lines[-1])

    def stop(self) -> None:
        """Ctrl-C, and kill what is left after a while."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    child.kill()
                self.process.kill()
                self.process.communicate()

    def last_words(self) -> str:
        logs = [self.run.parent / f"{self.run.name}.stderr", *sorted((self.run / "logs").glob("*.log"))]
        return "\n".join(f"--- {log.name}\n{_tail(log)}" for log in logs if log.exists())

    def _channel(self, offset: int) -> grpc.Channel:
        # A service may start long after the first try: the next one must not wait as long.
        options = [(f"grpc.{name}_reconnect_backoff_ms", 200) for name in ("initial", "min", "max")]
        return grpc.insecure_channel(f"127.0.0.1:{self.base_port + offset}", options)


StartFarm = Callable[..., Farm]


@pytest.fixture
def start_farm(tmp_path: Path) -> Iterator[StartFarm]:
    """Starts `rollfarm up CONFIG... --flags...` with ports and a run folder of its own."""
    farms: list[Farm] = []

    def start(
        config: str | Path | list[Path],
        *flags: str,
        name: str = "run",
        base_port: int = 0,
        model: Path = tmp_path / "model",
    ) -> Farm:
        port = base_port or free_ports(PORTS)
        files = [str(file) for file in (config if isinstance(config, list) else [config])]
        argv = [sys.executable, "-m", "rollfarm", "up", *files, "--run.folder", str(tmp_path), "--run.name", name]
        argv += ["--up.base_port", str(port), "--model.path", str(model), *flags]
        with (tmp_path / f"{name}.stderr").open("a") as stderr:
            process = subprocess.Popen(
                argv,
                stdout=subprocess.PIPE,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                text=True,
                cwd=CHECKOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        farms.append(Farm(process, port, tmp_path / name))
        return farms[-1]

    yield start
    for farm in farms:
        farm.stop()


def _module(process: psutil.Process) -> str:
    try:
        argv = process.cmdline()
    except psutil.Error:
        return ""
    return argv[argv.index("-m") + 1] if "-m" in argv[:4] else ""


def _is_valkey(process: psutil.Process) -> bool:
    try:
        return any("valkey" in part or "redis-server" in part for part in process.cmdline()[:1])
    except psutil.Error:
        return False


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
