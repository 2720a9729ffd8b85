"""The least that durable storage costs: the same bytes, in transactions of the same size, straight to the server."""

import time

from redis import Redis

from load_tests.buffering.clients import Clocks, Flow, Load
from load_tests.buffering.samples import trajectory
from rollfarm.v1 import sample_buffer_pb2 as pb


def write(load: Load, commit_samples: int) -> Flow:
    """Append each sample with a small event to a stream, `commit_samples` in a transaction, and forget them after."""
    episode = pb.Episode(run_id=load.run_id, group_id=f"{load.run_id}/0", policy_version=1)
    payload = trajectory(episode, load.size)
    event = b'["Completed",1700000000.0,"put","%s","%s",1,"%s",1,0.0,0,1024,{}]' % (b"r" * 36, b"l" * 16, b"t" * 32)
    redis = Redis.from_url(load.journal)
    latencies: list[float] = []
    clocks = Clocks(load.pids)
    for first in range(0, load.samples, commit_samples):
        began = time.perf_counter()
        pipeline = redis.pipeline(transaction=True)
        for _ in range(min(commit_samples, load.samples - first)):
            pipeline.xadd("raw", {"event": event, "payload": payload})
        pipeline.execute()
        latencies.append(time.perf_counter() - began)
    flow = clocks.flow(load.samples, latencies)
    assert redis.xlen("raw") == load.samples
    redis.delete("raw")
    return flow
