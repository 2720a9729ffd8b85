"""A real disk that can be filled: a small tmpfs."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

SIZE_MB = 16
BLOCK = b"\0" * 4096


@dataclass(frozen=True)
class FullDisk:
    """A disk of SIZE_MB."""

    folder: Path

    def fill(self) -> None:
        """Leave not one block."""
        with self.ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(BLOCK)

    def free(self) -> None:
        self.ballast.unlink()

    @property
    def ballast(self) -> Path:
        return self.folder / "ballast"


@contextmanager
def mounted(folder: Path) -> Iterator[FullDisk]:
    """Skips the test where nothing may be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a disk to fill")
    try:
        yield FullDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
