"""The benchmark of llm_proxy: its arithmetic by hand, where messages end, and the whole script on a few requests."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from load_tests.proxying import payload, report
from load_tests.proxying.flow import Flow
from load_tests.proxying.patterns import Closed, Held, Paced, connections
from load_tests.proxying.wire import Messages, answer, request
from rollfarm.v1 import engine_pb2, llm_proxy_pb2

ROOT = Path(__file__).parents[2]

MEASURED = {
    "added_p50_ms",
    "added_p99_ms",
    "added_paced_p50_ms",
    "added_paced_p99_ms",
    "cpu_us_stream",
    "cpu_us_unary",
    "held_ratio_1000",
    "held_ratio_4000",
    "held_ratio_16000",
    "rss_kb_per_open_request",
}

PEER_KEYS = {f"peer_{peer}_{key}" for peer in ("vllm_router", "sglang_router", "smg") for key in ("cpu_us", "per_s")}


def flow(*latencies: float, seconds: float = 1.0, cpu: float = 0.0, rss: int = 0) -> Flow:
    return Flow(len(latencies), seconds, list(latencies), cpu, rss)


def test_what_is_added_is_the_median_over_the_rounds_of_the_difference_to_the_engine_alone():
    measured = {
        "direct": {"open": [flow(1.0), flow(1.5), flow(1.0)]},
        "llm_proxy": {"open": [flow(1.001), flow(1.502), flow(1.5)]},
    }

    made = report.figures(measured, peers=["smg"])

    assert made["added_p50_ms"] == 2.0  # of 1, 2 and 500
    assert made["added_closed_p50_ms"] is None
    assert made["peer_smg_added_p50_ms"] is None


def test_cpu_and_memory_are_of_one_request():
    measured = {
        "llm_proxy": {
            "closed": [flow(0.1, 0.1, seconds=0.5, cpu=0.0002)],
            "held_1000": [flow(1.0, 1.1, seconds=1.1, rss=9000)],
            "held_4000": [flow(1.0, 1.2, seconds=1.2, rss=8000)],
        },
    }

    made = report.figures(measured, peers=[])

    assert (made["cpu_us_stream"], made["per_s"]) == (100.0, 4)
    assert (made["held_ratio_1000"], made["held_ratio_4000"], made["held_ratio_16000"]) == (1.1, 1.2, None)
    assert made["rss_kb_per_open_request"] == 4.0


def test_the_engine_answers_each_request_of_a_message_with_every_token():
    asked = [payload.generation(name).SerializeToString() for name in ("a", "b")]

    response = engine_pb2.EngineServiceGenerateResponse.FromString(
        payload.chunks(engine_pb2.EngineServiceGenerateRequest.FromString(payload.requests(asked)))
    )

    assert [chunk.request_id for chunk in response.chunks] == ["a", "b"]
    assert [len(chunk.token_ids) for chunk in response.chunks] == [4 * payload.TOKENS] * 2


def test_what_llm_proxy_is_asked_holds_the_same_generation():
    sent = payload.requests([payload.proxied("a").SerializeToString()])

    asked = llm_proxy_pb2.GenerateManyRequest.FromString(sent)

    assert [one.generation for one in asked.generations] == [payload.generation("a")]


def test_messages_end_where_their_length_says_however_they_arrive():
    messages = Messages()
    data = request("/generate", 80, b'{"a": 1}') + answer(b"{}")

    received = [one for at in range(len(data)) for one in messages.received(data[at : at + 1])]

    assert [body for _, body in received] == [b'{"a": 1}', b"{}"]
    assert received[0][0].startswith(b"POST /generate HTTP/1.1\r\n")


def test_a_chunked_message_ends_with_its_last_chunk():
    messages = Messages()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    assert list(messages.received(head + b"2\r\n{}\r\n")) == []
    assert [body for _, body in messages.received(b"0\r\n\r\n" + answer(b"x"))] == [b"2\r\n{}\r\n0\r\n\r\n", b"x"]


async def test_paced_requests_are_due_at_their_rate_the_first_at_once():
    counts = [count async for count in Paced(requests=5, rate=1e6).due()]

    assert counts[0] >= 1
    assert sum(counts) == 5


@pytest.mark.parametrize(("pattern", "count"), [(Closed(9, 4), 4), (Held(9), 9), (Paced(9, 1.0), 1)])
def test_a_client_connects_as_often_as_it_asks_at_once(pattern: Closed | Held | Paced, count: int):
    assert connections(pattern) == count


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_script_ends_with_one_line_of_figures():
    script = await asyncio.create_subprocess_exec(
        *(sys.executable, "load_tests/proxy.py", "--rounds", "1", "--quick", "--skip", "peers"),
        cwd=ROOT,
        stdout=-1,
        stderr=-1,
    )

    stdout, stderr = await script.communicate()

    assert script.returncode == 0, stderr.decode()
    figures = json.loads(stdout.splitlines()[-1])
    assert {key for key in MEASURED if figures[key] is None} == set()
    assert {figures[key] for key in PEER_KEYS} == {None}
    assert 1.0 < figures["held_ratio_1000"] < 2.0
