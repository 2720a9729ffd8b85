"""Imports of big libraries."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import big libraries inside of it, without looks for garbage.

    Imports leave hardly any, and the looks take a quarter of the time of torch and transformers.
    """
    looked = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looked:
            gc.enable()


def end_without_looks() -> None:
    """Skip the looks for garbage with which Python ends, and which take most of a second with torch and transformers.

    The last that a process calls.
    """
    gc.freeze()
