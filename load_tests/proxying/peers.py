"""The Rust routers that others put before their engines, each installed in an environment of its own in `.tools`."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from load_tests.buffering.servers import ROOT, serving
from load_tests.proxying import payload
from load_tests.proxying.http_clients import HttpTarget, http
from load_tests.proxying.servers import Engine, answers_http
from load_tests.proxying.system import Ask
from load_tests.proxying.wire import request
from rollfarm.ports import free_port


class Peer(NamedTuple):
    """A router that takes SGLang's /generate: token ids in, token ids and log-probabilities out."""

    package: str
    version: str
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.package.replace("-", "_")

    @property
    def venv(self) -> Path:
        return ROOT / ".tools" / self.package


PEERS = (
    Peer("vllm-router", "0.1.17", ("--log-level", "warning")),
    Peer("sglang-router", "0.3.2", ("--log-level", "warn")),
    Peer("smg", "1.13.0", ("--log-level", "warn", "--disable-tokenizer-autoload")),
)

FLAGS = ("--policy", "round_robin", "--max-concurrent-requests", "32768", "--queue-size", "32768")
"""No choice to make, and nothing refused."""


class PeerFailed(Exception):
    """A peer cannot be measured here."""


def install(peer: Peer) -> None:
    """Make its environment, once for this checkout. Raises PeerFailed."""
    done = peer.venv / f"installed-{peer.version}"
    if done.is_file():
        return
    print(f"Installing {peer.package} {peer.version} in {peer.venv} (150 MB, once) ...", file=sys.stderr, flush=True)
    pip = [str(peer.venv / "bin" / "pip"), "--disable-pip-version-check"]
    _run([sys.executable, "-m", "venv", "--clear", str(peer.venv)])
    _run([*pip, "install", "--quiet", "--only-binary", ":all:", f"{peer.package}=={peer.version}"])
    done.touch()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise PeerFailed(done.stdout[-2000:])


@contextmanager
def router(peer: Peer, folder: Path, engine: Engine) -> Iterator[Ask]:
    """The router before one engine, until the block ends. Raises PeerFailed."""
    install(peer)
    port, metrics_port = free_port(), free_port()
    command = [str(peer.venv / "bin" / "python"), "-m", f"{peer.name}.launch_router", *FLAGS, *peer.flags]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    command += ["--worker-urls", f"http://127.0.0.1:{engine.port}"]
    asked = request("/generate", port, payload.generate_body())
    try:
        with serving(command, folder / f"{peer.name}.log", lambda: answers_http(port, asked)) as pid:
            yield partial(http, HttpTarget(port, pid, (asked,)))
    except SystemExit as error:
        raise PeerFailed(str(error)) from None
