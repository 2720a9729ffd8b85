"""`rollfarm up` as load tests run it: a process of its own, quiet, with flags over a farm's file."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rollfarm.ports import free_ports

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo.toml"

SMALL_MODEL = {"model.create.hidden_size": "64", "trainer.lr": "1e-3", "trainer.lr_schedule": "constant"}
"""Flags over the demo: 86,000 parameters, for load tests of which the model is no part."""


def command(config: Path, flags: Mapping[str, str]) -> list[str]:
    """The command, on ports that are free."""
    quiet = {"up.base_port": str(free_ports(100)), "up.console": "off", "up.min_gain": "0"}
    words = [word for key, value in {**quiet, **flags}.items() for word in (f"--{key}", value)]
    return [sys.executable, "-m", "rollfarm", "up", str(config), *words]


def environment() -> dict[str, str]:
    """For its processes."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
