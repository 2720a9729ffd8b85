"""Both journals keep the same promises, and a ledger never runs ahead of one that failed."""

import asyncio
import contextlib
import copy
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

import pytest

from rollfarm.errors import FarmError, JournalFenced, JournalUnavailable, LeaseExpired
from rollfarm.v1 import trajectory_pb2 as tp
from sample_buffer import views
from sample_buffer.config import SampleBufferConfig
from sample_buffer.journal import Journal, MemoryJournal, Record
from sample_buffer.ledger import Ledger
from sample_buffer.redis_journal import RedisJournal
from sample_buffer.runs import Runs
from sample_buffer.state import Lease
from tests.sample_buffer.support import Valkey, make_spec, play

MakeJournal = Callable[[], Journal]


def redis_journal(valkey: Valkey, seconds: float = 5.0) -> RedisJournal:
    return RedisJournal(valkey.url, "farm", timeout_seconds=seconds)


@pytest.fixture(params=["memory", "redis"])
async def make_journal(request: pytest.FixtureRequest, valkey: Valkey) -> MakeJournal:
    """Opens the same journal again and again, as a restarted process would."""
    if request.param == "redis":
        return lambda: redis_journal(valkey)
    journal = MemoryJournal()
    return lambda: journal


@asynccontextmanager
async def opened(journal: Journal, *, now: Callable[[], float] | None = None, **settings: int) -> AsyncIterator[Ledger]:
    """A ledger at work, until the block ends."""
    ledger = Ledger(SampleBufferConfig.model_validate(settings), journal, now)
    await ledger.open()
    running = asyncio.create_task(ledger.run())
    try:
        yield ledger
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, FarmError):
            await running
        await ledger.close()


def configure(ledger: Ledger) -> None:
    ledger.execute(lambda runs: runs.configure("configure", "trainer", make_spec(), "nonce", 0.0))


def lease(ledger: Ledger, request: str, count: int = 1) -> list[Lease]:
    return ledger.execute(lambda runs: runs.run("").lease(request, "worker", count, [], ledger.now()))


def complete(ledger: Ledger, held: Lease) -> bytes:
    played = play(views.episode_lease(ledger.runs.run(""), held).episode, reward=float(held.member))
    ledger.execute(lambda runs: runs.of_lease(held.lease_id).complete(held.lease_id, held.lease_id, played, 0.0))
    payload = played.SerializeToString(deterministic=True)
    ledger.keep(held.lease_id, payload)
    return payload


async def read(journal: Journal) -> list[bytes]:
    return [record async for record in journal.records()]


async def test_a_journal_reads_back_its_records_in_order(make_journal: MakeJournal) -> None:
    journal = make_journal()
    await journal.open()
    await journal.append(Record(b"one", {"a": b"\x00A", "b": b"B"}))
    await journal.append(Record(b"two", {"c": b"C"}, ["a"]))
    await journal.close()
    again = make_journal()

    assert await again.open() is None
    assert await read(again) == [b"one", b"two"]
    assert await again.payloads(["a", "b", "c"]) == {"b": b"B", "c": b"C"}
    await again.close()


async def test_a_snapshot_takes_the_place_of_earlier_records(make_journal: MakeJournal) -> None:
    journal = make_journal()
    await journal.open()
    await journal.append(Record(b"one"))
    await journal.append(Record(b"two", {"a": b"A"}, (), b"state"))
    await journal.append(Record(b"three"))

    assert await journal.open() == b"state"
    assert await read(journal) == [b"three"]
    assert await journal.payloads(["a"]) == {"a": b"A"}
    await journal.close()


async def test_more_records_and_payloads_than_a_page_are_read(valkey: Valkey) -> None:
    journal = redis_journal(valkey)
    await journal.open()
    for number in range(150):
        await journal.append(Record(str(number).encode(), {str(number): b"x"}))

    assert await read(journal) == [str(number).encode() for number in range(150)]
    assert len(await journal.payloads([str(number) for number in range(150)])) == 150
    await journal.close()


async def test_a_large_record_is_written_in_pieces(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = asyncio.StreamWriter.writelines

    def measured(writer: asyncio.StreamWriter, data: Iterable[bytes]) -> None:
        piece = list(data)
        sizes.append(sum(map(len, piece)))
        write(writer, piece)

    monkeypatch.setattr(asyncio.StreamWriter, "writelines", measured)
    payloads = {f"lease-{number}": bytes([number]) * 9000 for number in range(200)}
    journal = redis_journal(valkey)
    await journal.open()

    await journal.append(Record(b"[]", payloads))

    assert sum(sizes) > 200 * 9000
    assert max(sizes) < 150_000
    assert await journal.payloads(list(payloads)) == payloads
    await journal.close()


async def test_a_writer_whose_opening_was_never_answered_is_not_fenced_off_by_itself(valkey: Valkey) -> None:
    journal = redis_journal(valkey, seconds=0.3)
    await journal.open()
    await journal.append(Record(b"one"))
    with valkey.stopped():
        for _ in range(2):
            with pytest.raises(JournalUnavailable):
                await journal.open()

    assert await until_open(journal) is None
    await journal.append(Record(b"two"))

    assert await read(journal) == [b"one", b"two"]
    await journal.close()


async def test_a_writer_that_never_got_an_answer_opens_as_the_first_one_does(valkey: Valkey) -> None:
    other, starting = redis_journal(valkey), redis_journal(valkey, seconds=0.3)
    await other.open()
    with valkey.stopped(), pytest.raises(JournalUnavailable):
        await starting.open()

    await until_open(starting)
    await starting.append(Record(b"one"))

    with pytest.raises(JournalFenced):
        await other.open()
    await other.close()
    await starting.close()


async def until_open(journal: RedisJournal) -> bytes | None:
    """Open as often as it takes a server that just woke up."""
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(JournalUnavailable):
                return await journal.open()


async def test_what_was_sent_before_the_last_opening_and_comes_after_it_changes_nothing(valkey: Valkey) -> None:
    journal = redis_journal(valkey)
    await journal.open()
    before = copy.copy(journal)
    await journal.open()

    with pytest.raises(JournalFenced):
        await before.append(Record(b"late"))
    with pytest.raises(JournalUnavailable, match="late"):
        await redo(before)
    await journal.append(Record(b"one"))

    assert await read(journal) == [b"one"]
    await journal.close()


async def redo(journal: RedisJournal) -> None:
    """Repeat the journal's last attempt to open."""
    journal._attempts -= 1  # pyright: ignore[reportPrivateUsage]
    await journal.open()


async def test_a_fenced_ledger_refuses_and_stops(valkey: Valkey) -> None:
    ledger = Ledger(SampleBufferConfig(), redis_journal(valkey))
    await ledger.open()
    running = asyncio.create_task(ledger.run())
    async with opened(redis_journal(valkey)):
        configure(ledger)

        with pytest.raises(JournalFenced):
            await ledger.durable()
        with pytest.raises(JournalFenced):
            await running
        with pytest.raises(JournalFenced):
            configure(ledger)
    await ledger.close()


async def test_a_restart_finds_everything_that_was_durable(make_journal: MakeJournal) -> None:
    async with opened(make_journal()) as ledger:
        configure(ledger)
        held = lease(ledger, "all", 100)
        payloads = [complete(ledger, one) for one in held]
        await ledger.durable()
        before = ledger.runs.dump()
    async with opened(make_journal()) as again:
        assert again.runs.dump() == before
        assert [again.payload(one.lease_id) for one in held] == payloads
        assert lease(again, "all", 100) == held


async def test_payloads_leave_the_journal_with_their_retention(make_journal: MakeJournal) -> None:
    async with opened(make_journal(), retained_trajectories=0) as ledger:
        configure(ledger)
        for one in lease(ledger, "all", 100):
            complete(ledger, one)
        ledger.execute(lambda runs: runs.run("").take(0, 0.0))
        await ledger.durable()
        ledger.execute(lambda runs: runs.run("").commit("commit", 0, "nonce-step-0", 0.0))
        await ledger.durable()
    journal = make_journal()
    await journal.open()

    assert sorted(await journal.payloads([f"nonce-{n}" for n in range(8)])) == [f"nonce-{n}" for n in range(4, 8)]
    await journal.close()


async def test_payloads_that_a_run_retained_leave_the_journal_when_another_begins(make_journal: MakeJournal) -> None:
    async with opened(make_journal()) as ledger:
        configure(ledger)
        for one in lease(ledger, "all", 100):
            complete(ledger, one)
        ledger.execute(lambda runs: runs.run("").take(0, 0.0))
        ledger.execute(lambda runs: runs.run("").commit("commit", 0, "nonce-step-0", 0.0))
        await ledger.durable()
        ledger.execute(lambda runs: runs.configure("another", "trainer", make_spec(name="another"), "other", 0.0))
        await ledger.durable()
    journal = make_journal()
    await journal.open()

    assert sorted(await journal.payloads([f"nonce-{n}" for n in range(8)])) == [f"nonce-{n}" for n in range(4, 8)]
    await journal.close()


async def test_retention_may_change_between_starts(make_journal: MakeJournal) -> None:
    for retained in (100, 0, 100):
        async with opened(make_journal(), retained_trajectories=retained) as ledger:
            configure(ledger)
            step = ledger.runs.run("").state.next_batch_step
            for one in lease(ledger, f"all-{step}", 100):
                complete(ledger, one)
            ledger.execute(lambda runs, step=step: runs.run("").take(step, 0.0))
            ledger.execute(lambda runs, step=step: runs.run("").commit(f"c{step}", step, f"nonce-step-{step}", 0.0))
            ledger.execute(lambda runs, step=step: runs.run("").publish(f"p{step}", step + 1, step + 1, 0.0))
            await ledger.durable()

    async with opened(make_journal(), retained_trajectories=100) as last:
        assert last.runs.run("").state.next_commit_step == 3


class Flaky(MemoryJournal):
    """A journal that can go away, having or not having written."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.writes_first = False

    async def open(self) -> bytes | None:
        self._check()
        return await super().open()

    async def append(self, record: Record) -> None:
        if self.writes_first:
            await super().append(record)
        self._check()
        await super().append(record)

    def _check(self) -> None:
        if self.away:
            raise JournalUnavailable("Away.")


@pytest.mark.parametrize("written", [False, True])
async def test_after_a_failed_append_the_state_is_what_the_journal_says(written: bool) -> None:
    journal = Flaky()
    async with opened(journal, now=lambda: 0.0) as ledger:
        configure(ledger)
        await ledger.durable()
        journal.away, journal.writes_first = True, written

        lost = lease(ledger, "first", 2)
        with pytest.raises(JournalUnavailable):
            await ledger.durable()
        with pytest.raises(JournalUnavailable):
            lease(ledger, "second", 2)
        journal.away, journal.writes_first = False, False
        back = await ledger.changed.first(lambda: try_lease(ledger, "first"), 5)

        assert back == lost[:2]
        assert ledger.runs.run("").state.lease_count == 2


def try_lease(ledger: Ledger, request: str) -> list[Lease] | None:
    with contextlib.suppress(JournalUnavailable):
        return lease(ledger, request, 2)
    return None


async def test_a_killed_valkey_is_noticed_and_its_return_too(valkey: Valkey) -> None:
    async with opened(redis_journal(valkey)) as ledger:
        configure(ledger)
        await ledger.durable()
        before = ledger.runs.dump()
        valkey.kill()
        lease(ledger, "lost")
        with pytest.raises(JournalUnavailable):
            await ledger.durable()

        await valkey.start()
        back = await ledger.changed.first(lambda: not_down(ledger), 10)

        assert back == before


def not_down(ledger: Ledger) -> bytes | None:
    with contextlib.suppress(JournalUnavailable):
        return ledger.execute(Runs.dump)
    return None


async def test_events_of_one_turn_are_one_append() -> None:
    journal = MemoryJournal()
    async with opened(journal) as ledger:
        configure(ledger)
        await ledger.durable()
        before = len(await read(journal))

        async def one(number: int) -> None:
            lease(ledger, str(number))
            await ledger.durable()

        await asyncio.gather(*(one(number) for number in range(8)))

        assert len(await read(journal)) == before + 1


async def test_a_command_that_breaks_takes_the_ledger_down() -> None:
    ledger = Ledger(SampleBufferConfig(), MemoryJournal())
    await ledger.open()
    running = asyncio.create_task(ledger.run())

    def bug(_: Runs) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ledger.execute(bug)
    with pytest.raises(ZeroDivisionError):
        await running


def careless(seed: int) -> Iterator[Callable[[Ledger, float], None]]:
    """The same random life of a run for every journal."""
    dice = random.Random(seed)
    held: list[Lease] = []

    def step(ledger: Ledger, now: float) -> None:
        groups = ledger.runs.run("")
        state = groups.state
        choice = dice.random()
        name = f"{now}"
        if choice < 0.3:
            held.extend(ledger.execute(lambda runs: runs.run("").lease(name, "w", 3, [], now)))
        elif choice < 0.7 and held:
            one = held.pop(dice.randrange(len(held)))
            if one.lease_id in state.leases:
                complete(ledger, one)
        elif choice < 0.8 and held:
            one = held.pop(dice.randrange(len(held)))
            with contextlib.suppress(LeaseExpired):
                outcome = tp.OUTCOME_ENV_FAILED
                ledger.execute(lambda runs: runs.of_lease(one.lease_id).fail(name, one.lease_id, outcome, "x", now))
        elif choice < 0.9:
            ledger.execute(lambda runs: runs.run("").take(state.next_batch_step, now))
        elif choice < 0.95:
            trained = state.next_batch_step
            ledger.execute(lambda runs: runs.run("").publish(name, state.version + 1, trained, now))
        elif state.batches:
            last = max(state.batches)
            ledger.execute(lambda runs: runs.run("").commit(name, last, f"nonce-step-{last}", now))

    for _ in range(300):
        yield step


async def live(make: MakeJournal, seed: int) -> tuple[bytes, dict[str, bytes]]:
    """Where the run of `seed` stands after 300 commands and 6 restarts."""
    life = careless(seed)
    time = 0.0
    dump, payloads = b"", {}
    for _ in range(6):
        async with opened(make(), now=lambda: 0.0, retained_trajectories=6, snapshot_every_events=40) as ledger:
            configure(ledger)
            for _ in range(50):
                time += 1
                next(life)(ledger, time)
                await ledger.durable()
            dump = ledger.runs.dump()
            payloads = {name: ledger.payload(name) for name in ledger.runs.payload_ids()}
    return dump, payloads


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_same_commands_give_the_same_state_on_both_journals(valkey: Valkey, seed: int) -> None:
    memory = MemoryJournal()

    in_memory = await live(lambda: memory, seed)
    in_redis = await live(lambda: redis_journal(valkey), seed)

    assert in_memory == in_redis
    assert in_memory[1]


class Deaf(MemoryJournal):
    """Swallows a cancellation, as asyncio.wait_for of Python 3.11 may."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = asyncio.Event()

    async def append(self, record: Record) -> None:
        self.busy.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await super().append(record)


async def test_a_ledger_stops_though_its_journal_swallowed_the_cancellation() -> None:
    journal = Deaf()
    ledger = Ledger(SampleBufferConfig(), journal)
    await ledger.open()
    running = asyncio.create_task(ledger.run())
    await journal.busy.wait()

    running.cancel()

    async with asyncio.timeout(5):
        await running
