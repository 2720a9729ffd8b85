"""What one measurement yields, and the clocks that it is taken with."""

import time
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Flow:
    """Requests that were answered."""

    requests: int
    seconds: float
    """From the first one sent to the last answer."""

    latencies: list[float]
    """Seconds from sending to the answer, of each."""

    cpu_seconds: float
    """CPU time of the process under test: user and system, all threads."""

    rss_bytes: int
    """What its resident memory had grown by at the first answer."""

    @property
    def cpu_us(self) -> float:
        """CPU time of a request, microseconds."""
        return 1e6 * self.cpu_seconds / self.requests


class Clocks:
    """Wall time, and the CPU time and memory of a process, from here on."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._cpu_before = self._cpu()
        self._rss_before = self._process.memory_info().rss
        self._rss_grown = 0
        self._began = time.perf_counter()

    def note_memory(self) -> None:
        """The first answer is there."""
        self._rss_grown = self._process.memory_info().rss - self._rss_before

    def flow(self, latencies: list[float]) -> Flow:
        seconds = time.perf_counter() - self._began
        return Flow(len(latencies), seconds, latencies, self._cpu() - self._cpu_before, self._rss_grown)

    def _cpu(self) -> float:
        return sum(self._process.cpu_times()[:2])
