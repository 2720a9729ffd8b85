"""What a farm claims for itself: its run's folder, and one for unix sockets.

A claim is a lock on a descriptor that every process of the farm inherits. So it outlives a farm that is killed for as
long as a service of it still drains, and ends with the last of them, however that ends.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "rollfarm-up-"
"""Of the names of folders for sockets."""

LONGEST_PARENT = 60
"""Characters of the system's temporary folder up to which the paths of sockets in it are short enough."""

YOUNG_SECONDS = 60.0
"""Age from which a folder for sockets that nobody claims was left by a killed farm, and not made just now."""


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[int | None]:
    """A descriptor that claims the file or folder; None while another farm does."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def socket_folder() -> Iterator[tuple[Path, int]]:
    """A folder whose name is short enough for sockets, and what claims it. What killed farms left is removed."""
    temporary = Path(tempfile.gettempdir())
    parent = temporary if len(str(temporary)) < LONGEST_PARENT else Path("/tmp")
    for folder in parent.glob(f"{PREFIX}*"):
        _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as name, claimed(Path(name)) as claim:
        assert claim is not None
        yield Path(name), claim


def _remove_abandoned(folder: Path) -> None:
    """Remove the folder with the sockets in it, unless it is claimed, young, another user's, or holds anything else."""
    with contextlib.suppress(OSError), claimed(folder) as claim:
        if claim is not None and time.time() - folder.stat().st_mtime > YOUNG_SECONDS:
            for path in folder.iterdir():
                if path.is_socket():
                    path.unlink()
            folder.rmdir()
