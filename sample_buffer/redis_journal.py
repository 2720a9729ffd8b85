"""A journal in Redis or Valkey: a stream of records, a hash of payloads, a snapshot and a fencing token.

Every append is one script, so it is atomic on the server and in its append-only file, and it checks the token first: a
writer that was superseded can change nothing. The token names the writer and its attempt to open, so a writer knows its
own attempts again though no answer came. Beside it stands how many records that attempt has appended: a server that
comes back without some that it had acknowledged is noticed, and nothing is written after the gap.

Commands of Redis 7.0. What a crash of the server may lose is its own appendfsync: `always` loses nothing; `everysec`
up to two seconds, even when only the process dies, because the server puts off writing while the disk is busy; `no`
nothing when the process dies, and half a minute when the machine does.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import structlog

from rollfarm.errors import JournalFenced, JournalUnavailable
from sample_buffer import redis_client, redis_urls
from sample_buffer.journal import Record

log = structlog.get_logger()

_OPEN = """
for at, kind in ipairs({'string', 'stream', 'hash', 'string'}) do
  local found = redis.call('TYPE', KEYS[at]).ok
  if found ~= 'none' and found ~= kind then return redis.error_reply('WRONGTYPE ' .. KEYS[at] .. ' is a ' .. found) end
end
local held = redis.call('GET', KEYS[1])
if held then
  local writer, attempt = string.match(held, '^(%x+)/(%d+)')
  if not writer then return redis.error_reply('WRONGTYPE ' .. KEYS[1] .. ' is no fence') end
  if writer ~= ARGV[1] and ARGV[3] == '1' then return redis.error_reply('FENCED') end
  if writer == ARGV[1] and tonumber(attempt) > tonumber(ARGV[2]) then return redis.error_reply('late') end
elseif ARGV[3] == '1' then
  return redis.error_reply('LOST ' .. KEYS[1] .. ' is gone')
end
redis.call('SET', KEYS[1], ARGV[1] .. '/' .. ARGV[2] .. '/0')
return held
"""
"""KEYS fence, stream, payloads, snapshot. ARGV writer, which of its attempts this is, 1 if an earlier one was
answered. Answers what the fence was."""

_APPEND = """
local held = redis.call('GET', KEYS[1])
if not held then return redis.error_reply('LOST ' .. KEYS[1] .. ' is gone') end
local writer, attempt, count = string.match(held, '^(%x+)/(%d+)/(%d+)$')
if writer ~= ARGV[1] or tonumber(attempt) > tonumber(ARGV[2]) then return redis.error_reply('FENCED') end
if attempt ~= ARGV[2] or count ~= ARGV[3] then return redis.error_reply('BEHIND ' .. held) end
local function each(command, first, last)
  for at = first, last, 1000 do redis.call(command, KEYS[3], unpack(ARGV, at, math.min(at + 999, last))) end
end
local split = 6 + 2 * tonumber(ARGV[6])
each('HSET', 7, split)
each('HDEL', split + 1, #ARGV)
if ARGV[5] == '' then
  redis.call('XADD', KEYS[2], '*', 'events', ARGV[4])
else
  redis.call('SET', KEYS[4], ARGV[5])
  redis.call('DEL', KEYS[2])
end
return redis.call('SET', KEYS[1], writer .. '/' .. attempt .. '/' .. tonumber(count) + 1)
"""
"""KEYS fence, stream, payloads, snapshot. ARGV writer, which of its attempts this is, its records so far, events,
snapshot or empty, payload count, (id, payload)..., garbage..."""

_PAGE = 64
"""Records or payloads read at once at start."""


class RedisJournal:
    """One farm's journal under the keys PREFIX:..."""

    def __init__(self, url: str, prefix: str, *, timeout_seconds: float) -> None:
        self._redis = redis_client.connect(redis_urls.parse(url), timeout_seconds=timeout_seconds)
        self._timeout_seconds = timeout_seconds
        # The braces keep the keys on one node of a cluster.
        self._keys = tuple(f"{{{prefix}}}:{name}" for name in ("fence", "events", "payloads", "snapshot"))
        _, self._stream, self._hash, self._snapshot = self._keys
        self._writer = secrets.token_hex(8)
        self._attempts = 0
        self._acknowledged = (0, 0)
        """The last attempt to open that was answered, and its records that were."""

    async def open(self) -> bytes | None:
        # What an earlier attempt sent, and Redis reads only now, changes nothing.
        self._attempts += 1
        was_open = self._acknowledged > (0, 0)
        held: bytes | None = await self._run(_OPEN, self._writer, str(self._attempts), str(int(was_open)))
        writer, *found = (held or b"").decode().split("/")
        if writer == self._writer and tuple(map(int, found)) < self._acknowledged:
            log.error("journal lost acknowledged records", found=found, acknowledged=self._acknowledged)
        self._acknowledged = (self._attempts, 0)
        with self._errors():
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
        attempt, count = self._acknowledged
        values: list[str | bytes] = [self._writer, str(attempt), str(count), record.events, record.snapshot or b""]
        values.append(str(len(record.payloads)))
        for name, payload in record.payloads.items():
            values += (name, payload)
        values += record.garbage
        await self._run(_APPEND, *values)
        self._acknowledged = (attempt, count + 1)

    async def _run(self, script: str, *values: str | bytes) -> Any:
        """Run a script on the journal's keys. Raises JournalUnavailable or JournalFenced."""
        with self._errors():
            async with asyncio.timeout(self._timeout_seconds):
                return await cast(Awaitable[Any], self._redis.eval(script, len(self._keys), *self._keys, *values))

    async def close(self) -> None:
        await self._redis.aclose()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except redis_client.ERRORS as error:
            if "FENCED" in str(error):
                raise JournalFenced("Another sample_buffer has taken over the journal.") from None
            raise JournalUnavailable(redis_client.explain(error), error=error) from None
