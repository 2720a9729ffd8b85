"""python -m sample_buffer FARM.toml: serves the ledger of a run."""

import asyncio
import socket
import sys
import time
from typing import NoReturn

import prometheus_client

from rollfarm import service
from rollfarm.config import ConfigError, Listen, exit_bad_config, load_or_exit
from rollfarm.errors import JournalFenced, JournalUnavailable
from rollfarm.telemetry import start_telemetry
from sample_buffer.config import SampleBufferConfig, SampleBufferRoot
from sample_buffer.journal import Journal, MemoryJournal
from sample_buffer.ledger import RECOVER_SECONDS, Ledger
from sample_buffer.metrics import StateCollector
from sample_buffer.redis_journal import RedisJournal
from sample_buffer.server import SERVICE, SampleBufferServicer

PROG = "python -m sample_buffer"

EXIT_FENCED = 4
"""Exit status when another sample_buffer took over the journal."""


def make_journal(config: SampleBufferConfig) -> Journal:
    """The journal that the configuration names. Raises ConfigError."""
    if config.journal == "memory":
        return MemoryJournal()
    if config.journal == "embedded":
        raise ConfigError(
            'sample_buffer.journal: "embedded" is a Valkey that `rollfarm up` starts. Run `rollfarm up`, or set '
            '--sample_buffer.journal to a redis:// URL, or to "memory" to forget everything at a restart.'
        )
    return RedisJournal(config.journal, config.journal_key, timeout_seconds=config.append_seconds)


async def open_ledger(config: SampleBufferConfig, ledger: Ledger) -> None:
    """Open the ledger, trying for connect_seconds. Raises ConfigError."""
    end = time.monotonic() + config.connect_seconds
    while True:
        try:
            await ledger.open()
            return
        except JournalUnavailable as error:
            if time.monotonic() + RECOVER_SECONDS >= end:
                raise ConfigError(
                    f"sample_buffer.journal: nothing usable answered at {config.journal} within "
                    f"{config.connect_seconds:g} s. {error.problem} Start Redis there, correct the URL, or run "
                    "`rollfarm up`, which brings its own."
                ) from None
        await asyncio.sleep(RECOVER_SECONDS)


def check_port(listen: Listen) -> None:
    """Raise PortInUse before the journal is opened: opening it would fence off whoever serves there."""
    with socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as error:
            raise service.PortInUse(f"Cannot listen on {listen.address}: {error.strerror}.") from error


async def main(config: SampleBufferConfig, journal: Journal) -> None:
    """Serve until told to stop. Raises PortInUse, ConfigError and JournalFenced."""
    check_port(config.listen)
    ledger = Ledger(config, journal)
    try:
        await open_ledger(config, ledger)
        service.calm_collector()
        prometheus_client.REGISTRY.register(StateCollector(lambda: ledger.runs))
        stop = service.stop_on_signal()
        buffer = SampleBufferServicer(ledger, stop, max_trajectory_bytes=config.max_trajectory_bytes)
        loops = (ledger.run, ledger.tick, buffer.wake_on_stop)
        await service.serve(buffer.register, config.listen, *loops, services=[SERVICE], stop=stop)
    finally:
        await ledger.close()


def cli(argv: list[str]) -> NoReturn:
    """Read the configuration, then serve. Ends the process."""
    config = load_or_exit(SampleBufferRoot, argv, prog=PROG).sample_buffer
    start_telemetry("sample_buffer", config.telemetry, config.listen)
    fenced: JournalFenced | None = None
    try:
        _serve(config)
    except* JournalFenced as group:
        fenced = group.exceptions[0] if isinstance(group.exceptions[0], JournalFenced) else None
    print(f"{PROG}: {fenced}", file=sys.stderr)
    raise SystemExit(EXIT_FENCED)


def _serve(config: SampleBufferConfig) -> NoReturn:
    try:
        journal = make_journal(config)
        service.run(lambda: main(config, journal), port_flag="--sample_buffer.listen.port")
    except ConfigError as error:
        exit_bad_config(PROG, error)


if __name__ == "__main__":
    cli(sys.argv[1:])
