"""The front door in llm_proxy's own process, and before the real embedded engine."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from llm_proxy.engines import Connection
from rollfarm import rpc, tokens
from rollfarm.testing import SimulatedEngine
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, trajectory_pb2
from tests.engine.kit import Reference, embedded_root, serve
from tests.llm_proxy import models
from tests.llm_proxy.fronts import MODEL, POLICY, branch_ids, run_front
from tests.llm_proxy.support import SECONDS
from tests.llm_proxy.test_process import process

ASKED: Any = [{"role": "user", "content": "Where do you live?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(tmp_path_factory.mktemp("model") / "policy")


@pytest.mark.slow
async def test_what_is_recorded_is_what_the_embedded_engine_saw_and_made(model: Path) -> None:
    """Random weights write anything: half characters, marks, special tokens. The tokens survive it all."""
    async with serve(embedded_root(model)) as host, run_front(host.address) as world:
        sent: list[tuple[list[int], list[int]]] = []
        client = world.openai()
        messages: list[Any] = list(ASKED)
        for turn in range(4):
            answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, seed=turn)
            messages += [answer.choices[0].message, {"role": "user", "content": f"And {turn}?"}]

        record = await world.record()
        (branch,) = record.branches
        assert [turn.author == POLICY for turn in branch.turns] == [False, True] * 4
        ids: list[int] = []
        reference = Reference(model)
        for turn in branch.turns:
            own = tokens.unpack_ids(turn.token_ids).tolist()
            if turn.author == POLICY:
                sent.append((list(ids), own))
                expected = reference.chosen(ids, own)
                assert tokens.unpack_logprobs(turn.logprobs) == pytest.approx(expected, abs=1e-3)
            ids += own
        assert ids == branch_ids(branch)
        status = await host.status()
        assert status.generated_token_count == sum(len(made) for _, made in sent)


@pytest.mark.slow
async def test_the_embedded_engines_own_account_equals_the_record(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: dict[str, list[int]] = {}
    made: dict[str, list[int]] = {}
    send = Connection.send

    def sending(self: Connection, generations: list[engine_pb2.Generation]) -> None:
        for generation in generations:
            prompts[generation.request_id] = tokens.unpack_ids(generation.prompt_token_ids).tolist()
        send(self, generations)

    monkeypatch.setattr(Connection, "send", sending)
    async with serve(embedded_root(model)) as host, run_front(host.address) as world:
        receive = world.fleet.router.receive

        def receiving(engine_id: str, chunk: engine_pb2.GenerationChunk, now: float) -> None:
            made.setdefault(chunk.request_id, []).extend(tokens.unpack_ids(chunk.token_ids).tolist())
            receive(engine_id, chunk, now)

        monkeypatch.setattr(world.fleet.router, "receive", receiving)
        client = world.anthropic()
        messages: list[Any] = list(ASKED)
        for turn in range(4):
            answer = await client.messages.create(model=MODEL, messages=messages, max_tokens=24)
            text = "".join(block.text for block in answer.content if block.type == "text")
            messages += [{"role": "assistant", "content": answer.content}]
            messages += [{"role": "user", "content": f"And {turn}, {len(text)}?"}]

        (branch,) = (await world.record()).branches
        before: list[int] = []
        told: list[tuple[list[int], list[int]]] = []
        for turn in branch.turns:
            ids = tokens.unpack_ids(turn.token_ids).tolist()
            if turn.author == POLICY:
                told.append((list(before), ids))
            before += ids
        assert told == [(prompts[request_id], made[request_id]) for request_id in prompts]


async def test_the_service_serves_agents_and_finishes_what_is_open_on_sigterm(model: Path) -> None:
    engine = SimulatedEngine(policy=models.Script(lambda prompt: "Yes.<|im_end|>"), token_limit=1)
    engine.vocabulary_size = models.VOCABULARY
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--llm_proxy.http.enabled", "true", "--llm_proxy.http.listen.port", str(port), "--model.path", str(model))
    async with engine.serve() as address, process("--llm_proxy.engines", address, *flags) as (llm_proxy, proxy):
        sampling = trajectory_pb2.Sampling(max_tokens=50, temperature=1)
        opening = llm_proxy_pb2.OpenSessionRequest(session_id="a", sampling=sampling)
        opened = await rpc.call(proxy.stub.OpenSession, opening, timeout=SECONDS)
        assert (opened.base_url, opened.model_name) == (f"http://127.0.0.1:{port}/v1", "policy")
        async with openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key, max_retries=0) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=ASKED))
            await engine.until(lambda: engine.is_stalled)

            llm_proxy.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            engine.allow(None)

            assert (await asking).choices[0].message.content == "Yes."
        assert await asyncio.wait_for(llm_proxy.wait(), 10) == 0


async def test_a_port_that_is_taken_and_a_key_that_is_not_there_are_told(model: Path) -> None:
    async def ended(*flags: str) -> tuple[int | None, str]:
        run = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llm_proxy", "--llm_proxy.listen.port", "0", "--llm_proxy.http.enabled", "true",
            "--model.path", str(model), *flags, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, errors = await asyncio.wait_for(run.communicate(), 60)
        return run.returncode, errors.decode()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, said = await ended("--llm_proxy.http.listen.port", str(taken.getsockname()[1]))
    assert (status, "for HTTP (llm_proxy.http.listen)" in said) == (3, True)
    status, said = await ended("--llm_proxy.http.keys", json.dumps({"alice": "env:NOT_THERE"}))
    assert (status, "llm_proxy.http.keys.alice: NOT_THERE holds no key" in said) == (2, True)
    status, said = await ended("--llm_proxy.http.keys", json.dumps({"alice": "my-secret-key"}))
    assert (status, "a key is not kept in files" in said, "my-secret" in said) == (2, True, False)


def test_the_front_door_needs_no_torch(model: Path) -> None:
    program = (
        "import sys\n"
        "from llm_proxy.config import LlmProxyConfig\n"
        "from llm_proxy.engines import Fleet\n"
        "from llm_proxy.front.config import HttpConfig\n"
        "from llm_proxy.front.wiring import Front\n"
        "from rollfarm import chat\n"
        f"tokenizer, context = chat.load({str(model)!r})\n"
        "Front(HttpConfig(), Fleet(LlmProxyConfig()), chat.ChatTemplate(tokenizer), context, 'm')\n"
        "assert not sys.modules.get('torch'), 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.slow
async def test_the_likeliest_tokens_are_the_embedded_engines(model: Path) -> None:
    async with serve(embedded_root(model)) as host, run_front(host.address) as world:
        asked: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 6}
        answer = await world.openai().chat.completions.create(**asked, logprobs=True, top_logprobs=3)

        logprobs: Any = answer.choices[0].logprobs
        (branch,) = (await world.record()).branches
        prompt = [token for turn in branch.turns[:-1] for token in tokens.unpack_ids(turn.token_ids).tolist()]
        made = tokens.unpack_ids(branch.turns[-1].token_ids).tolist()
        expected = Reference(model).logprobs(prompt, made)
        for at, one in enumerate(logprobs.content):
            likeliest = sorted(expected[at], reverse=True)[:3]
            assert [top.logprob for top in one.top_logprobs] == pytest.approx(likeliest, abs=1e-3)
            assert one.logprob == pytest.approx(expected[at][made[at]], abs=1e-3)
        assert branch.turns[-1].top_logprobs.width == 3
