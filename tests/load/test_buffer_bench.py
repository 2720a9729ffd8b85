"""The throughput benchmark of sample_buffer: its arithmetic by hand, and the whole script on a few samples."""

import asyncio
import json
import math
import sys
from pathlib import Path

import pytest

from load_tests.buffering import report
from load_tests.buffering.clients import Flow, due
from load_tests.buffering.samples import Size, completion, completions, delimited
from rollfarm.tokens import token_count
from rollfarm.v1 import sample_buffer_pb2 as pb

ROOT = Path(__file__).parents[2]

KEYS = {
    "cores",
    "appendfsync",
    "put_per_s",
    "take_per_s",
    "cycle_per_s",
    "put_p50_ms",
    "put_p99_ms",
    "batch_256_ms",
    "vs_raw_redis",
    "replay_s_per_million",
    "replay_rss_mb",
    "restart_s",
    "put_cpu_s_per_thousand",
}


def flow(samples: int, seconds: float, *, latencies: tuple[float, ...] = (0.0,), **cpu: float) -> Flow:
    return Flow(samples, seconds, list(latencies), cpu, commits=4)


def lease(member: int) -> pb.EpisodeLease:
    episode = pb.Episode(run_id="run", group_id="run/0", member=member, policy_version=3)
    return pb.EpisodeLease(lease_id=f"lease-{member}", episode=episode)


def test_completions_put_together_from_bytes_are_whole_messages():
    size = Size(prompt_tokens=2, tokens=200)

    parsed = pb.CompleteEpisodesRequest.FromString(
        completions([completion(lease(0), size), completion(lease(1), size)])
    )

    assert [one.lease_id for one in parsed.completions] == ["lease-0", "lease-1"]
    assert [one.trajectory.member for one in parsed.completions] == [0, 1]
    prompt, answer = parsed.completions[1].trajectory.turns
    assert (token_count(prompt.token_ids), token_count(answer.token_ids), token_count(answer.logprobs)) == (2, 200, 200)
    assert [(span.policy_version, span.token_count) for span in answer.version_spans] == [(3, 200)]


@pytest.mark.parametrize(("length", "prefix"), [(1, b"\x0a\x01"), (127, b"\x0a\x7f"), (300, b"\x0a\xac\x02")])
def test_a_field_begins_with_its_tag_and_its_length(length: int, prefix: bytes):
    assert delimited(1, b"x" * length) == prefix + b"x" * length


def test_samples_are_due_at_the_offered_rate_the_first_at_once():
    assert [due(seconds, 100.0, 50) for seconds in (0.0, 0.005, 0.01, 0.1, 9.0)] == [1, 1, 2, 11, 50]
    assert due(0.0, math.inf, 50) == 50


def test_a_quantile_is_a_value_that_was_measured():
    values = [4.0, 1.0, 3.0, 2.0]

    assert [report.quantile(values, share) for share in (0.0, 0.5, 0.75, 0.99)] == [1.0, 2.0, 3.0, 4.0]


def test_figures_are_medians_and_ratios_are_of_one_round():
    rounds = {
        "put": [
            flow(100, 1.0, sample_buffer=0.2),
            flow(100, 2.0, sample_buffer=0.1),
            flow(100, 4.0, sample_buffer=0.1),
        ],
        "take": [flow(100, 1.0, latencies=(0.01, 0.02, 0.03))] * 3,
        "raw_redis": [flow(100, 1.0), flow(100, 0.5), flow(100, 0.4)],
    }

    made = report.figures(rounds)

    assert (made["put_per_s"], made["raw_redis_per_s"]) == (50, 200)
    assert made["vs_raw_redis"] == 0.25  # of 1, 0.25 and 0.1
    assert (made["batch_256_ms"], made["commit_samples"]) == (20.0, 25)
    assert made["put_cpu_s_per_thousand"] == {"sample_buffer": 1.0}


def test_atropos_counts_as_fast_as_its_faster_way():
    rounds = {
        "put": [flow(100, 1.0, sample_buffer=0.1, valkey=0.1, client=9.0)],
        "take": [flow(100, 1.0)],
        "atropos_put": [flow(100, 8.0, atropos=1.0)],
        "atropos_compressed_put": [flow(100, 5.0, atropos=0.8)],
        "atropos_take": [flow(100, 10.0)],
    }

    made = report.figures(rounds)

    assert made["vs_atropos"] == 7.5  # 1/100 + 1/100 s a sample against 1/20 + 1/10
    assert (made["vs_atropos_put"], made["vs_atropos_take"], made["vs_atropos_cpu"]) == (5.0, 10.0, 4.0)


@pytest.mark.slow
async def test_the_script_ends_with_one_line_of_figures():
    sizes = "--rounds 1 --batches 2 --batch-groups 4 --tokens 16 --replay-events 2000 --skip atropos"
    script = await asyncio.create_subprocess_exec(
        sys.executable, "load_tests/buffer.py", *sizes.split(), cwd=ROOT, stdout=-1, stderr=-1
    )

    stdout, stderr = await script.communicate()

    assert script.returncode == 0, stderr.decode()
    figures = json.loads(stdout.splitlines()[-1])
    assert figures.keys() >= KEYS
    assert figures["samples_a_round"] == 64
    assert b"cycle" in stderr
