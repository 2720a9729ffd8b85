"""Settings of sample_buffer."""

from pydantic import Field, field_validator

from rollfarm.config import Config, ConfigError, Listen, Root, Telemetry, nearest
from rollfarm.errors import InvalidArgument
from rollfarm.run import RunConfig
from sample_buffer import filters, redis_urls

JOURNALS = ("embedded", "memory")


class SampleBufferConfig(Config):
    """The ledger of the run."""

    listen: Listen = Listen(port=7703)
    """Where the service listens."""

    telemetry: Telemetry = Telemetry()
    """Logs and metrics."""

    journal: str = "embedded"
    """Where events become durable. "embedded": a Valkey that `rollfarm up` starts. A redis://, rediss:// (TLS), unix://,
    redis+sentinel:// or redis+cluster:// URL: that server, as docs/deploy.md has it; only with `appendfsync always`
    does its death lose nothing. "memory": nowhere, and a restart begins anew."""

    journal_key: str = Field(default="rollfarm", min_length=1)
    """Prefix of the journal's keys in Redis. Farms that share a Redis need one each."""

    connect_seconds: float = Field(default=5.0, ge=0)
    """How long to try to reach Redis at start. 0 tries once."""

    append_seconds: float = Field(default=5.0, gt=0)
    """How long Redis may take to answer before calls are refused as JOURNAL_UNAVAILABLE and the state is read anew."""

    snapshot_every_events: int = Field(default=50_000, ge=1)
    """Events between snapshots. More makes a restart slower (about 20 s per million), fewer costs more meanwhile."""

    retained_trajectories: int = Field(default=1000, ge=0)
    """Trajectories of the current run's committed and dropped groups that `rollfarm inspect` can still read. Each costs
    its size in memory, here and in Redis. 0 forgets them at once."""

    remembered_requests: int = Field(default=20_000, ge=1)
    """Answers kept for callers that repeat a call. It must outlast their retries: calls a second times seconds."""

    max_trajectory_bytes: int = Field(default=16 * 1024 * 1024, ge=1, le=48 * 1024 * 1024)
    """A larger trajectory is refused as TRAJECTORY_TOO_LARGE. A token costs 8 bytes, an image its own. It must fit into
    one message, and that ends at 64 MiB."""

    @field_validator("journal")
    @classmethod
    def _is_a_journal(cls, journal: str) -> str:
        if journal in JOURNALS:
            return journal
        if not journal.startswith(tuple(redis_urls.SCHEMES)):
            kind = "".join(journal.partition(":")[:2])  # what follows may be a password
            raise ValueError(f"{kind!r} is no journal.{nearest(kind, [*JOURNALS, *redis_urls.SCHEMES])}")
        redis_urls.parse(journal)
        return journal


class SampleBufferRoot(Root):
    """What sample_buffer reads."""

    run: RunConfig = RunConfig()
    """Its filters are checked here; the trainer brings them."""

    sample_buffer: SampleBufferConfig = SampleBufferConfig()
    """This service."""

    def check(self) -> None:
        try:
            filters.check(self.run.to_proto().filters)
        except InvalidArgument as error:
            raise ConfigError(f"run.filters: {error.problem}") from None
