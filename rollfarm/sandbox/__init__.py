"""Runs programs that a model wrote, where they can do no harm.

Each run has a sandbox of its own, started ahead of time and thrown away: no network, no files but its own, limits on
time, memory, processes and output, and nothing left behind.
"""

from rollfarm.sandbox.config import SandboxConfig
from rollfarm.sandbox.program import PYTHON, Finished, Limits, Program
from rollfarm.sandbox.sandbox import Sandbox, configure, shared

__all__ = ["PYTHON", "Finished", "Limits", "Program", "Sandbox", "SandboxConfig", "configure", "shared"]
