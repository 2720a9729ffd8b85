"""A journal in Redis or Valkey: a stream of records, a hash of payloads, a snapshot and a fencing token.

Every append is one script, so it is atomic on the server and in its append-only file, and it checks the token first: a
writer that was superseded can change nothing. The token names the writer and its attempt to open, so a writer knows its
own attempts again though no answer came. Commands of Redis 7.0. What a crash of the server may lose is its own
appendfsync: `always` loses nothing; `everysec` up to two seconds, even when only the process dies, because the server
puts off writing while the disk is busy; `no` nothing when the process dies, and half a minute when the machine does.
"""

import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import contextmanager
from typing import Any, cast

from redis import asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from rollfarm.errors import JournalFenced, JournalUnavailable
from sample_buffer.journal import Record

_OPEN = """
local held = redis.call('GET', KEYS[1])
if held then
  local writer, attempt = string.match(held, '^(%x+)/(%d+)$')
  if writer ~= ARGV[1] and ARGV[3] == '1' then return redis.error_reply('FENCED') end
  if writer == ARGV[1] and tonumber(attempt) > tonumber(ARGV[2]) then return redis.error_reply('late') end
end
return redis.call('SET', KEYS[1], ARGV[1] .. '/' .. ARGV[2])
"""
"""KEYS fence. ARGV writer, which of its attempts this is, 1 if an earlier one was answered."""

_APPEND = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED') end
local at = 5
for _ = 1, tonumber(ARGV[4]) do
  redis.call('HSET', KEYS[3], ARGV[at], ARGV[at + 1])
  at = at + 2
end
while at <= #ARGV do
  redis.call('HDEL', KEYS[3], ARGV[at])
  at = at + 1
end
if ARGV[3] == '' then
  redis.call('XADD', KEYS[2], '*', 'events', ARGV[2])
else
  redis.call('SET', KEYS[4], ARGV[3])
  redis.call('DEL', KEYS[2])
end
return 1
"""
"""KEYS fence, stream, payloads, snapshot. ARGV token, events, snapshot or empty, payload count, (id, payload)...,
garbage..."""

_PAGE = 64
"""Records or payloads read at once at start."""


class RedisJournal:
    """One farm's journal under the keys PREFIX:..."""

    def __init__(self, url: str, prefix: str, *, timeout_seconds: float) -> None:
        self._redis: aioredis.Redis = aioredis.Redis.from_url(
            url,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 0),  # a repeated script would append twice
        )
        # The braces keep the keys on one node of a cluster.
        self._fence, self._stream, self._hash, self._snapshot = (
            f"{{{prefix}}}:{name}" for name in ("fence", "events", "payloads", "snapshot")
        )
        self._writer = secrets.token_hex(8)
        self._attempts = 0
        self._was_open = False

    @property
    def _token(self) -> str:
        """Of the newest attempt to open: what an older one sent, and Redis reads only now, changes nothing."""
        return f"{self._writer}/{self._attempts}"

    async def open(self) -> bytes | None:
        self._attempts += 1
        values = (self._writer, str(self._attempts), str(int(self._was_open)))
        with self._errors():
            await cast(Awaitable[Any], self._redis.eval(_OPEN, 1, self._fence, *values))
            self._was_open = True
            return cast(bytes | None, await self._redis.get(self._snapshot))

    async def records(self) -> AsyncIterator[bytes]:
        after = "-"
        with self._errors():
            while page := await cast(Awaitable[Any], self._redis.xrange(self._stream, min=after, count=_PAGE)):
                for record_id, fields in page:
                    after = f"({record_id.decode()}"
                    yield fields[b"events"]

    async def payloads(self, ids: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        with self._errors():
            for at in range(0, len(ids), _PAGE):
                names = list(ids[at : at + _PAGE])
                values = await cast(Awaitable[Any], self._redis.hmget(self._hash, names))
                found.update((name, value) for name, value in zip(names, values, strict=True) if value is not None)
        return found

    async def append(self, record: Record) -> None:
        keys = (self._fence, self._stream, self._hash, self._snapshot)
        values: list[Any] = [self._token, record.events, record.snapshot or b"", str(len(record.payloads))]
        for name, payload in record.payloads.items():
            values += (name, payload)
        values += record.garbage
        with self._errors():
            await cast(Awaitable[Any], self._redis.eval(_APPEND, len(keys), *keys, *values))

    async def close(self) -> None:
        await self._redis.aclose()

    @contextmanager
    def _errors(self) -> Any:
        try:
            yield
        except (RedisError, OSError) as error:
            if "FENCED" in str(error):
                raise JournalFenced("Another sample_buffer has taken over the journal.") from None
            raise JournalUnavailable(f"The journal does not answer: {error}.", error=error) from None
