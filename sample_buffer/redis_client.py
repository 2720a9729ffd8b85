"""The connection to a journal's Redis, whichever kind it is, and what its errors mean.

Nothing is ever sent twice: a script that the server ran, and whose answer was lost, would run again.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

from redis import asyncio as aioredis
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)

from sample_buffer.redis_urls import RedisUrl

Client = aioredis.Redis | aioredis.RedisCluster

ERRORS = (RedisError, RedisClusterException, OSError)
"""Whatever goes wrong between here and Redis. A TimeoutError is an OSError."""

_REMEDIES: dict[type[Exception] | str, str] = {
    AuthenticationError: "Correct the user and the password in the journal's URL.",
    NoPermissionError: "Let the user run EVAL and the commands in docs/deploy.md on the journal's keys.",
    OutOfMemoryError: "Raise its maxmemory, or free some.",
    ReadOnlyError: "It is a replica: name the primary, or a redis+sentinel:// URL that finds it.",
    MovedError: "It is a node of a cluster: write redis+cluster://.",
    "MISCONF": "It cannot write to its disk: make room there, or mend it.",
    "NOREPLICAS": "Fewer replicas keep up than its min-replicas-to-write: bring them back.",
    "WRONGTYPE": "The keys are somebody else's: choose another sample_buffer.journal_key.",
    "LOST": "The journal is gone from it: restore its data, or begin anew by a restart of sample_buffer.",
    "BEHIND": "It came back without records that it had acknowledged: sample_buffer reads what there is.",
}
"""By class, or by the word that an error begins with."""


_PIECE_BYTES = 128 * 1024
"""A piece ends with the argument that fills it."""


def _pieces(command: Iterable[bytes]) -> Iterator[list[bytes]]:
    piece: list[bytes] = []
    size = 0
    for part in command:
        piece.append(part)
        size += len(part)
        if size >= _PIECE_BYTES:
            yield piece
            piece, size = [], 0
    yield piece


def _in_pieces(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """Connections of this kind that write a long command piece by piece, each when the last one is nearly gone.

    Before Python 3.12, asyncio joins what it writes at once, and copies all of it that does not fit into the socket.
    """

    class InPieces(kind):
        async def _send_packed_command(self, command: Iterable[bytes]) -> None:
            for piece in _pieces(command):
                await super()._send_packed_command(piece)

    return InPieces


class _Primary(aioredis.Redis):
    """A client that Sentinels direct, and that closes them too."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        await cast(SentinelConnectionPool, self.connection_pool).sentinel_manager.aclose()


def connect(url: RedisUrl, *, timeout_seconds: float) -> Client:
    """A client that connects when it is first used. No exchange with one server takes longer than `timeout_seconds`."""
    # Of several, the ones that hang must leave time for the one that answers.
    first_seconds = timeout_seconds / (len(url.hosts) + 1) if url.kind in ("sentinel", "cluster") else timeout_seconds
    common: dict[str, Any] = {"socket_timeout": timeout_seconds, "retry": Retry(NoBackoff(), 0)}
    settings = {**common, "socket_connect_timeout": first_seconds, **url.settings}
    if url.kind == "cluster":
        nodes = [ClusterNode(host, port) for host, port in url.hosts]
        return aioredis.RedisCluster(startup_nodes=nodes, require_full_coverage=False, **settings)
    if url.kind == "sentinel":
        asking = {**common, "socket_timeout": first_seconds, "socket_connect_timeout": first_seconds}
        sentinels = Sentinel(list(url.hosts), sentinel_kwargs={**asking, **url.sentinel_settings}, **settings)
        return sentinels.master_for(url.primary, redis_class=_Primary)
    if url.kind == "socket":
        client = aioredis.Redis(unix_socket_path=url.path, **settings)
    else:
        ((host, port),) = url.hosts
        client = aioredis.Redis(host=host, port=port, **settings)
    client.connection_pool.connection_class = _in_pieces(client.connection_pool.connection_class)
    return client


def explain(error: BaseException) -> str:
    """What Redis said, and what to do about it."""
    said = (str(error)[:300] or type(error).__name__).rstrip(".")
    cause: BaseException | None = error
    while cause is not None:  # redis-py wraps what happens while it connects
        word = str(cause).removeprefix("ERR ").partition(" ")[0]
        for kind, remedy in _REMEDIES.items():
            if kind == word or (isinstance(kind, type) and isinstance(cause, kind)):
                return f"Redis refuses: {said}. {remedy}"
        cause = cause.__cause__
    return f"The journal does not answer: {said}."
