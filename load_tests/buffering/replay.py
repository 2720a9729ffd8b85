"""Writes a long journal through the ledger itself, without a socket, so that a restart has something to read."""

import asyncio
import uuid

from load_tests.buffering.clients import TRAINER, Load
from load_tests.buffering.samples import trajectory
from rollfarm.config import Telemetry
from rollfarm.telemetry import configure_logging
from rollfarm.v1 import trajectory_pb2 as tp
from sample_buffer import views
from sample_buffer.config import SampleBufferConfig
from sample_buffer.ledger import Ledger
from sample_buffer.redis_journal import RedisJournal
from sample_buffer.runs import Runs

NEVER = 10**12
"""More events than any journal has."""

WRITE_SECONDS = 120.0
"""A slow machine writes fewer events than were asked for."""


def write(load: Load, url: str, events: int, snapshot_every_events: int) -> int:
    """Append `events`, rounded up to whole steps of the run. Answers how many there was time for."""
    configure_logging("load", Telemetry(log_level="warning"))
    return asyncio.run(_write(load, url, events, snapshot_every_events))


async def _write(load: Load, url: str, events: int, snapshot_every_events: int) -> int:
    config = SampleBufferConfig(journal=url, snapshot_every_events=snapshot_every_events)
    ledger = Ledger(config, RedisJournal(url, config.journal_key, timeout_seconds=60))
    await ledger.open()
    written, end = 0, ledger.now() + WRITE_SECONDS
    async with asyncio.TaskGroup() as group:
        appending = group.create_task(ledger.run())
        ledger.execute(lambda runs: runs.configure(_new_id(), TRAINER, load.spec, "nonce", ledger.now()))
        for step in range(load.steps):
            _play(load, ledger, step)
            written += len(ledger.runs.outbox)
            await ledger.durable()
            if written >= events or ledger.now() > end:
                break
        appending.cancel()
    await ledger.close()
    return written


def _play(load: Load, ledger: Ledger, step: int) -> None:
    """One step of the run, from leases to the commit."""
    now = ledger.now()

    def episodes(runs: Runs) -> None:
        groups = runs.run(load.run_id)
        for lease in groups.lease(_new_id(), "load", load.batch_samples, (), now):
            payload = trajectory(views.episode_lease(groups, lease).episode, load.size)
            groups.complete(_new_id(), lease.lease_id, tp.Trajectory.FromString(payload), now)
            ledger.keep(lease.lease_id, payload)

    def training(runs: Runs) -> None:
        groups = runs.run(load.run_id)
        taken = groups.take(step, now)
        assert taken is not None
        groups.publish(_new_id(), step + 1, step + 1, now)
        groups.commit(_new_id(), step, taken[0].batch_id, now)

    ledger.execute(episodes)
    ledger.execute(training)


def _new_id() -> str:
    return str(uuid.uuid4())
