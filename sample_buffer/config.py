"""Settings of sample_buffer."""

from pydantic import Field

from rollfarm.config import Config, Listen, Root, Telemetry


class SampleBufferConfig(Config):
    """The ledger of the run."""

    listen: Listen = Listen(port=7703)
    """Where the service listens."""

    telemetry: Telemetry = Telemetry()
    """Logs and metrics."""

    journal: str = "embedded"
    """Where events become durable. "embedded": a Valkey that `rollfarm up` starts. A redis://, rediss:// or unix://
    URL: that server; only with `appendfsync always` does its death lose nothing. "memory": nowhere, and a restart
    begins anew."""

    journal_key: str = Field(default="rollfarm", min_length=1)
    """Prefix of the journal's keys in Redis. Farms that share a Redis need one each."""

    connect_seconds: float = Field(default=5.0, ge=0)
    """How long to try to reach Redis at start. 0 tries once."""

    append_seconds: float = Field(default=5.0, gt=0)
    """How long Redis may take to answer before calls are refused as JOURNAL_UNAVAILABLE and the state is read anew."""

    snapshot_every_events: int = Field(default=50_000, ge=1)
    """Events between snapshots. More makes a restart slower (about 20 s per million), fewer costs more meanwhile."""

    retained_trajectories: int = Field(default=1000, ge=0)
    """Trajectories of committed and dropped groups that `rollfarm inspect` can still read. Each costs its size in
    memory, here and in Redis. 0 forgets them at once."""

    remembered_requests: int = Field(default=20_000, ge=1)
    """Answers kept for callers that repeat a call. It must outlast their retries: calls a second times seconds."""


class SampleBufferRoot(Root):
    """What sample_buffer reads."""

    sample_buffer: SampleBufferConfig = SampleBufferConfig()
