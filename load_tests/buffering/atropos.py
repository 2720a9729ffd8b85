"""The same samples through Atropos' trajectory API, over HTTP, as its environments and trainers talk to it.

Its server keeps everything in memory alone. It gets connections that stay open and bodies that are made beforehand, in
plain JSON or, as its own environments send them, compressed.
"""

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from load_tests.buffering.clients import Clocks, Flow, Load
from load_tests.buffering.samples import VOCABULARY
from load_tests.buffering.servers import ROOT, serving
from rollfarm.config import ConfigError
from rollfarm.ports import free_port

VENV = ROOT / ".tools" / "atropos"
PACKAGES = ("fastapi==0.165.0", "uvicorn[standard]==0.54.0")
"""All that its server imports. The rest of what atroposlib names, half a gigabyte, is for environments."""

MASKED = -100
"""Its mask of a token that the policy did not write; other masks repeat the token."""
NO_LOGPROB = 1.0
"""Its log-probability of such a token."""

JSON = {"Content-Type": "application/json"}


@contextmanager
def server(folder: Path) -> Iterator[tuple[int, int]]:
    """Its API server until the block ends: its port and its process id."""
    _install()
    port = free_port()
    command = [str(VENV / "bin" / "run-api"), "--host", "127.0.0.1", "--port", str(port)]
    with serving(command, folder / "atropos.log", lambda: _answers(port)) as pid:
        yield port, pid


def _install() -> None:
    """Make its environment, once for this checkout."""
    done = VENV / "installed"
    if done.is_file():
        return
    print(f"Installing atroposlib and its server's packages in {VENV} (70 MB, once) ...", file=sys.stderr, flush=True)
    install = [str(VENV / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet"]
    _run([sys.executable, "-m", "venv", "--clear", str(VENV)])
    _run([*install, *PACKAGES])
    _run([*install, "--no-deps", "atroposlib==0.4.0"])
    done.touch()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ConfigError(f"Installing Atropos failed; --skip atropos does without.\n{done.stdout}")


def _answers(port: int) -> bool:
    try:
        return "AtroposLib" in str(_get(port, "/"))
    except OSError:
        return False


def group(load: Load) -> dict[str, object]:
    """A ScoredData: one group of samples."""
    size, members = load.size, range(load.group_size)
    chance = np.random.default_rng(0)
    tokens = [chance.integers(VOCABULARY, size=size.prompt_tokens + size.tokens).tolist() for _ in members]
    logprobs = [(-chance.exponential(size=size.tokens)).astype("<f4").tolist() for _ in members]
    return {
        "tokens": tokens,
        "masks": [[MASKED] * size.prompt_tokens + ids[size.prompt_tokens :] for ids in tokens],
        "scores": [float(member % 2) for member in members],
        "inference_logprobs": [[NO_LOGPROB] * size.prompt_tokens + ours for ours in logprobs],
        "env_id": 0,
    }


def put(load: Load, port: int, compressed: bool) -> Flow:
    """Register a trainer and an environment, and post every group of the run."""
    _register(port, load)
    body = json.dumps(group(load)).encode()
    headers = JSON
    if compressed:
        body, headers = gzip.compress(body), {**JSON, "Content-Encoding": "gzip"}

    def worker(count: int) -> list[float]:
        connection = HTTPConnection("127.0.0.1", port)
        latencies: list[float] = []
        for _ in range(count):
            began = time.perf_counter()
            answer = _post(connection, "/scored_data", body, headers)
            latencies += [time.perf_counter() - began] * load.group_size
            assert answer == {"status": "received"}, answer
        return latencies

    groups = load.samples // load.group_size
    counts = [groups // load.calls + (number < groups % load.calls) for number in range(load.calls)]
    with ThreadPoolExecutor(load.calls) as pool:
        clocks = Clocks(load.pids)
        latencies = [latency for some in pool.map(worker, counts) for latency in some]
        flow = clocks.flow(load.samples, latencies)
    queued = _get(port, "/status")["queue_size"]
    assert queued == groups, f"{queued} groups are queued, and {groups} were posted"
    return flow


def take(load: Load, port: int) -> Flow:
    """Get every batch, parsed."""
    latencies: list[float] = []
    clocks = Clocks(load.pids)
    for _ in range(load.steps):
        began = time.perf_counter()
        batch = _get(port, "/batch")["batch"]
        latencies.append(time.perf_counter() - began)
        samples = sum(len(group["tokens"]) for group in batch)
        assert samples == load.batch_samples, f"{samples} samples in a batch of {load.batch_samples}"
    flow = clocks.flow(load.samples, latencies)
    assert _get(port, "/batch")["batch"] is None
    return flow


def reset(port: int) -> None:
    """Forget every sample and registration."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/reset_data")
    connection.getresponse().read()


def _register(port: int, load: Load) -> None:
    trainer = {
        "wandb_group": "load",
        "wandb_project": "load",
        "batch_size": load.batch_samples,
        "max_token_len": load.size.prompt_tokens + load.size.tokens,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": load.steps,
    }
    environment = {
        "max_token_length": load.size.prompt_tokens + load.size.tokens,
        "desired_name": "sums",
        "weight": 1.0,
        "group_size": load.group_size,
    }
    connection = HTTPConnection("127.0.0.1", port)
    _post(connection, "/register", json.dumps(trainer).encode(), JSON)
    assert _get(port, "/batch")["batch"] is None
    answer = _post(connection, "/register-env", json.dumps(environment).encode(), JSON)
    assert answer["status"] == "success", answer


def _post(connection: HTTPConnection, path: str, body: bytes, headers: dict[str, str]) -> Any:
    connection.request("POST", path, body, headers)
    return json.loads(connection.getresponse().read())


def _get(port: int, path: str) -> Any:
    """By a connection of its own: the server ends those that it finds idle."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("GET", path)
    return json.loads(connection.getresponse().read())
