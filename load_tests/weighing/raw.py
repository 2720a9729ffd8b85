"""The yardstick: gloo broadcasts of the same bytes between two processes that do nothing else.

Both ends keep memory of the whole size, in buckets as large as the trainer's, one broadcast after the other.
"""

import datetime
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

ROOT = Path(__file__).parents[2]
TIMEOUT = datetime.timedelta(seconds=120)
HOST = "127.0.0.1"


class Raw:
    """The sending end."""

    def __init__(self, group: Any, child: "subprocess.Popen[str]", size_bytes: int, bucket_bytes: int) -> None:
        self._group = group
        self._child = child
        self.pid = child.pid
        self._buckets = torch.zeros(size_bytes, dtype=torch.uint8).split(bucket_bytes)

    def seconds(self) -> float:
        """Of one broadcast of everything, until the other end has said that it has it."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        began = time.perf_counter()
        print("go", file=self._child.stdin, flush=True)
        for bucket in self._buckets:
            self._group.broadcast(bucket, 0).wait()
        assert self._child.stdout.readline() == "done\n"
        return time.perf_counter() - began


@contextmanager
def raw(size_bytes: int, bucket_bytes: int) -> Iterator[Raw]:
    """A pair of processes until the block ends."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    arguments = [str(store.port), str(size_bytes), str(bucket_bytes)]
    command = [sys.executable, "-m", "load_tests.weighing.raw", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield Raw(_group(store, 0), child, size_bytes, bucket_bytes)
        finally:
            child.kill()


def _group(store: TCPStore, rank: int) -> Any:
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = TIMEOUT
    options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
    return ProcessGroupGloo(PrefixStore("raw", store), rank, 2, options)


def _receive(port: int, size_bytes: int, bucket_bytes: int) -> None:
    group = _group(TCPStore(HOST, port, is_master=False, timeout=TIMEOUT), 1)
    buckets = torch.zeros(size_bytes, dtype=torch.uint8).split(bucket_bytes)
    for _ in sys.stdin:
        for bucket in buckets:
            group.broadcast(bucket, 0).wait()
        print("done", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _receive(*map(int, sys.argv[1:]))
