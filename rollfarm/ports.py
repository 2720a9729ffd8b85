"""Ports of loopback that nobody listens on now; another program may the moment after."""

import os
import socket


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def free_ports(width: int) -> int:
    """The first of `width` consecutive ports that nobody listens on. Programs side by side look in different places.

    Raises RuntimeError when there are none.
    """
    bases = range(20_000, 30_000, width)
    start = os.getpid() % len(bases)
    for base in (*bases[start:], *bases[:start]):
        if all(is_free(port) for port in range(base, base + width)):
            return base
    raise RuntimeError(f"No {width} consecutive free ports between {bases.start} and {bases.stop}.")


def is_free(port: int) -> bool:
    """Whether a server could listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True
