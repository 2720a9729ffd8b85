"""What the host makes of a vLLM or an SGLang that answers piece by piece: stand-ins play them."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llm_proxy.engine.adapters.streamed import Streamed
from llm_proxy.engine.config import EngineRoot
from llm_proxy.engine.requests import LENGTH, Chunk
from rollfarm.errors import EngineFailed, GenerationFailed
from rollfarm.tokens import unpack_ids, unpack_logprobs
from tests.engine import sglang_stand_in, stand_in
from tests.engine.kit import SECONDS, embedded_root, other_weights, serve
from tests.engine.stand_in import DONE, Events, Said, VllmStandIn, event
from tests.llm_proxy.support import asked, run_proxy

Span = tuple[str, int, int]


class Kind(NamedTuple):
    """A kind of server."""

    title: str
    path: str
    make: Callable[[str], VllmStandIn]
    root: Callable[..., EngineRoot]

    def root_of(self, model: Path, server: VllmStandIn) -> EngineRoot:
        return self.root(model, server.url, stream_interval=3)


VLLM = Kind("vLLM", "/inference/v1/generate", VllmStandIn, stand_in.attached_root)
SGLANG = Kind("SGLang", "/generate", sglang_stand_in.SglangStandIn, sglang_stand_in.attached_root)


@pytest.fixture(params=[VLLM, SGLANG], ids=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def server(tied_model: Path, kind: Kind) -> Iterator[VllmStandIn]:
    with kind.make(str(tied_model)) as playing:
        yield playing


def piece(kind: Kind, before: int, count: int, *, versions: Sequence[Span] = ()) -> Any:
    """Tokens `before`, `before` + 1 ... and, on the last piece, the versions of all. SGLang says everything anew."""
    spans = [{"version": version, "start": start, "end": end} for version, start, end in versions]
    ids = list(range(before + count))
    if kind is SGLANG:
        meta = {
            "finish_reason": {"type": "length"} if spans else None,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return {"output_ids": ids, "meta_info": meta | ({"weight_versions": spans} if spans else {})}
    choice = {
        "token_ids": ids[before:],
        "logprobs": {"content": [{"logprob": -0.5}] * count},
        "weight_versions": spans or None,
        "finish_reason": "length" if spans else None,
    }
    return {"choices": [choice]}


async def test_each_piece_goes_on_at_once_and_is_asked_for_by_the_interval(
    tied_model: Path, kind: Kind, server: VllmStandIn
) -> None:
    bodies: list[Any] = []
    arrived = threading.Event()

    def stream(body: Any) -> Said:
        bodies.append(body)

        def pieces() -> Iterator[bytes]:
            yield event(piece(kind, 0, 3))
            arrived.wait(SECONDS)
            yield event(piece(kind, 3, 2, versions=[(server.label, 0, 5)])) + DONE

        return 200, Events(pieces())

    async with serve(kind.root_of(tied_model, server)) as host:
        server.answers[kind.path] = stream
        (request_id,) = await host.client.send([[1, 2, 3]], max_tokens=5)
        answer = host.client.answers[request_id]
        await asyncio.wait_for(answer.started.wait(), SECONDS)
        begun = list(answer.ids)
        arrived.set()
        await host.client.finished([request_id])

    assert begun == [0, 1, 2]
    assert (answer.ids, answer.logprobs, answer.versions) == ([0, 1, 2, 3, 4], [-0.5] * 5, [0] * 5)
    assert answer.finish == LENGTH
    assert (bodies[0]["stream"], bodies[0]["sampling_params"]["stream_interval"]) == (True, 3)


async def test_what_comes_after_weights_changed_waits_until_the_server_says_of_which_it_is(
    tied_model: Path, kind: Kind, server: VllmStandIn
) -> None:
    changed = threading.Event()

    def stream(body: Any) -> Said:
        old = server.label

        def pieces() -> Iterator[bytes]:
            yield event(piece(kind, 0, 3))
            changed.wait(SECONDS)
            yield event(piece(kind, 3, 3))
            yield event(piece(kind, 6, 3, versions=[(old, 0, 5), (server.label, 5, 9)])) + DONE

        return 200, Events(pieces())

    async with serve(kind.root_of(tied_model, server)) as host:
        server.answers[kind.path] = stream
        (request_id,) = await host.client.send([[1, 2, 3]], max_tokens=9)
        answer = host.client.answers[request_id]
        await asyncio.wait_for(answer.started.wait(), SECONDS)
        begun = list(answer.versions)
        await host.publish(other_weights(tied_model, 1))
        changed.set()
        await host.client.finished([request_id])

    assert begun == [0, 0, 0]
    assert (answer.ids, answer.versions) == (list(range(9)), [0] * 5 + [1] * 4)


async def test_lines_may_be_long_and_arrive_in_any_pieces(tied_model: Path, kind: Kind, server: VllmStandIn) -> None:
    async with serve(kind.root_of(tied_model, server)) as host:
        last = piece(kind, 3, 2, versions=[(server.label, 0, 5)]) | {"padding": "x" * 300_000}
        sent = event(piece(kind, 0, 3)) + event(last) + DONE
        cuts = [0, 3, 7, 50, 1000, 150_000, len(sent) - 3, len(sent)]
        pieces = [sent[start:end] for start, end in pairwise(cuts)]
        server.answers[kind.path] = lambda body: (200, Events(pieces))

        (answer,) = await host.client.generate([[1, 2, 3]], max_tokens=5)

    assert (answer.ids, answer.versions, answer.failure) == ([0, 1, 2, 3, 4], [0] * 5, None)


def problem(code: int) -> bytes:
    return event({"error": {"message": "no such thing", "type": "Error", "code": code}})


Rest = Callable[[Kind, str], bytes]
"""How a stream goes on after three tokens, by the kind and the label of the server's weights."""

BROKEN: dict[str, tuple[Rest, str, str]] = {
    "ended": (lambda kind, label: b"", "ENGINE_FAILED", "ends its answer to .* midway"),
    "cut": (lambda kind, label: event(piece(kind, 3, 2))[:30], "ENGINE_FAILED", "ends its answer to .* midway"),
    "html": (lambda kind, label: b"<html>Bad gateway\n", "ENGINE_FAILED", "something else .*<html>Bad gateway"),
    "nonsense": (
        lambda kind, label: b'data: {"text": "hi"}\n\n',
        "ENGINE_FAILED",
        "something else .*missing required field",
    ),
    "failing": (lambda kind, label: problem(500), "ENGINE_FAILED", "with 500: no such thing"),
    "refusing": (lambda kind, label: problem(400), "INVALID_ARGUMENT", "refuses .*: no such thing"),
    "endless": (lambda kind, label: DONE, "ENGINE_FAILED", "without saying why"),
    "unlabelled": (
        lambda kind, label: event(piece(kind, 3, 2, versions=[(label, 0, 4)])) + DONE,
        "ENGINE_FAILED",
        "5 tokens and the versions of 4",
    ),
    "relabelled": (
        lambda kind, label: event(piece(kind, 3, 2, versions=[(label + "7", 0, 2), (label, 2, 5)])) + DONE,
        "GENERATION_FAILED",
        "version 7 which was sent as one of 0",
    ),
    "strange": (
        lambda kind, label: event(piece(kind, 3, 97, versions=[(label, 0, 100)])) + DONE,
        "ENGINE_FAILED",
        "token 97, which is outside",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_stream_that_breaks_fails_its_request_alone_and_leaves_what_came(
    tied_model: Path, kind: Kind, server: VllmStandIn, how: str
) -> None:
    rest, reason, message = BROKEN[how]

    async with serve(kind.root_of(tied_model, server)) as host:
        begun = event(piece(kind, 0, 3))
        server.answers[kind.path] = lambda body: (200, Events([begun, rest(kind, server.label)]))
        (wrong,) = await host.client.generate([[1, 2, 3]], max_tokens=120)
        whole = event(piece(kind, 0, 5, versions=[(server.label, 0, 5)])) + DONE
        server.answers[kind.path] = lambda body: (200, Events([whole]))
        (right,) = await host.client.generate([[1, 2, 3]], max_tokens=5)

    assert wrong.failure is not None
    assert (wrong.failure.reason, wrong.ids, wrong.versions) == (reason, [0, 1, 2], [0, 0, 0])
    assert re.search(message, wrong.failure.message)
    assert right.ids == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [SGLANG], ids=["sglang"])
async def test_a_stream_that_sglang_aborts_by_itself_is_no_answer(
    tied_model: Path, kind: Kind, server: VllmStandIn
) -> None:
    async with serve(kind.root_of(tied_model, server)) as host:
        last = piece(kind, 0, 3, versions=[(server.label, 0, 3)])
        last["meta_info"]["finish_reason"] = {"type": "abort", "status_code": 500, "message": "out of memory"}
        server.answers[kind.path] = lambda body: (200, Events([event(last) + DONE]))
        (answer,) = await host.client.generate([[1, 2, 3]], max_tokens=9)

    assert answer.failure is not None
    assert (answer.failure.reason, answer.ids) == ("ENGINE_FAILED", [])
    assert "out of memory" in answer.failure.message


async def test_a_request_goes_on_elsewhere_from_what_a_broken_stream_brought(
    tied_model: Path, kind: Kind, server: VllmStandIn
) -> None:
    broken = threading.Event()

    def stream(body: Any) -> Said:
        def pieces() -> Iterator[bytes]:
            yield event(piece(kind, 0, 3))
            broken.wait(SECONDS)

        return (503, b"") if broken.is_set() else (200, Events(pieces()))

    async with (
        serve(kind.root_of(tied_model, server)) as streaming,
        serve(embedded_root(tied_model)) as other,
        run_proxy(streaming.address) as proxy,
    ):
        await proxy.serving()
        server.answers[kind.path] = stream
        generating = asyncio.create_task(proxy.generate(asked("r1", max_tokens=8, temperature=0.0)))
        await proxy.until(lambda: proxy.fleet.router.generated_count == 3)
        await proxy.attach(other.address)
        await proxy.serving(2)
        broken.set()
        result = await generating
        (rest,) = await other.client.generate([[1, 2, 3, 0, 1, 2]], max_tokens=5, temperature=0.0)

    assert result.engine_id == other.address
    assert unpack_ids(result.token_ids).tolist() == [0, 1, 2, *rest.ids]
    assert unpack_logprobs(result.logprobs).tolist() == [-0.5] * 3 + rest.logprobs


def said(count: int, *, spans: Sequence[tuple[int, int]] = (), last: bool = False) -> Chunk:
    return Chunk("a", [7] * count, [-0.5] * count, list(spans), finish=LENGTH if last else None)


def test_held_tokens_come_with_the_last_and_what_was_sent_is_not_sent_again() -> None:
    streamed = Streamed("a", title="vLLM", version=4)

    chunks = [
        streamed.take(said(2), unchanged=True),
        streamed.take(said(3), unchanged=False),
        streamed.take(said(1, spans=[(4, 3), (5, 1), (6, 2)], last=True), unchanged=False),
    ]

    handed_over = [(len(chunk.token_ids), chunk.spans) if chunk else None for chunk in chunks]
    assert handed_over == [(2, [(4, 2)]), None, (4, [(4, 1), (5, 1), (6, 2)])]


def test_an_answer_in_one_piece_has_the_versions_that_the_server_says() -> None:
    chunk = Streamed("a", title="vLLM", version=4).take(said(5, spans=[(4, 2), (5, 3)], last=True), unchanged=False)

    assert chunk is not None
    assert (len(chunk.token_ids), chunk.spans, chunk.finish) == (5, [(4, 2), (5, 3)], LENGTH)


@pytest.mark.parametrize(
    ("spans", "error"),
    [
        ([(4, 3)], EngineFailed),
        ([(4, 5), (5, -1)], EngineFailed),
        ([(3, 1), (4, 3)], GenerationFailed),
    ],
)
def test_versions_that_cannot_be_are_refused(spans: list[tuple[int, int]], error: type[Exception]) -> None:
    streamed = Streamed("a", title="vLLM", version=4)
    streamed.take(said(2), unchanged=True)

    with pytest.raises(error):
        streamed.take(said(2, spans=spans, last=True), unchanged=True)
