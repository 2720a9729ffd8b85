"""The front door over a real socket: what is answered, and how what cannot be is refused."""

import asyncio
import json
import math
import time
from typing import Any

import anthropic
import grpc
import openai
import pytest
from grpc import aio

from rollfarm import rpc, times, tokens
from rollfarm.errors import HttpDisabled, UnknownAgentSession
from rollfarm.testing import SimulatedEngine
from rollfarm.v1 import llm_proxy_pb2, trajectory_pb2
from tests.llm_proxy import models
from tests.llm_proxy.fronts import MODEL, assert_exact, branch_ids, scripted
from tests.llm_proxy.support import run_proxy

ASKED: Any = [{"role": "user", "content": "Is it so?"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"


def yes(prompt: str) -> str:
    return "Yes, one two three.<|im_end|>"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": ASKED, **more}


async def test_usage_counts_the_tokens_that_the_engine_saw_and_made():
    async with scripted(yes) as (world, script):
        answer = await world.openai().chat.completions.create(**chat())
        told = await world.anthropic().messages.create(model=MODEL, max_tokens=50, messages=ASKED)

        counts = (len(script.prompts[0]), len(script.answer(script.prompts[0])))
        assert answer.usage
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == counts
        assert (told.usage.input_tokens, told.usage.output_tokens) == counts


async def test_tokens_are_counted_as_they_would_be_shown():
    async with scripted(yes) as (world, script):
        counted = await world.anthropic().messages.count_tokens(model=MODEL, messages=ASKED, system="Be brief.")
        told = await world.anthropic().messages.create(model=MODEL, max_tokens=5, messages=ASKED, system="Be brief.")

        assert counted.input_tokens == told.usage.input_tokens == len(script.prompts[0])


@pytest.mark.parametrize(
    ("most", "openai_reason", "anthropic_reason"), [(2, "length", "max_tokens"), (90, "stop", "end_turn")]
)
async def test_each_api_says_in_its_own_words_why_an_answer_ended(most, openai_reason, anthropic_reason):
    async with scripted(yes) as (world, _):
        answer = await world.openai().chat.completions.create(**chat(max_completion_tokens=most))
        told = await world.anthropic().messages.create(model=MODEL, max_tokens=most, messages=ASKED)

        assert (answer.choices[0].finish_reason, told.stop_reason) == (openai_reason, anthropic_reason)


async def test_logprobs_are_those_of_the_tokens_that_are_told():
    async with scripted(yes) as (world, script):
        answer = await world.openai().chat.completions.create(**chat(logprobs=True))

        logprobs = answer.choices[0].logprobs
        assert logprobs
        assert logprobs.content
        made = script.answer(script.prompts[0])[:-1]
        assert "".join(one.token for one in logprobs.content) == "Yes, one two three."
        record = await world.record()
        recorded = tokens.unpack_logprobs(record.branches[0].turns[-1].logprobs).tolist()
        assert [one.logprob for one in logprobs.content] == recorded[: len(made)]
        assert logprobs.content[0].bytes == list(logprobs.content[0].token.encode())


@pytest.mark.parametrize("streams", [False, True])
async def test_a_stop_string_cuts_the_answer_and_the_record_where_it_is_complete(streams):
    engine = SimulatedEngine(chunk_tokens=1, token_limit=14)
    async with scripted(lambda prompt: "One two STOP three four five six.<|im_end|>", engine=engine) as (world, script):
        text, reason = "", None
        if streams:
            stream = await world.openai().chat.completions.create(**chat(stop=["never", "STOP"], stream=True))
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
        else:
            answer = await world.openai().chat.completions.create(**chat(stop=["never", "STOP"]))
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason

        assert (text, reason) == ("One two ", "stop")
        await engine.until(lambda: not engine.open_requests)
        record = await world.record()
        written = tokens.unpack_ids(record.branches[0].turns[-1].token_ids).tolist()
        assert models.decode(written).startswith("One two STOP")
        assert not models.decode(written[:-1]).startswith("One two STOP")
        assert_exact(record, script)
        messages = [*ASKED, {"role": "assistant", "content": "One two "}, {"role": "user", "content": "And?"}]
        engine.allow(None)
        await world.openai().chat.completions.create(model=MODEL, messages=messages)
        assert_exact(await world.record(), script)
        assert len(await world.branches()) == 1


async def test_a_stop_sequence_is_named():
    async with scripted(yes) as (world, _):
        told = await world.anthropic().messages.create(
            model=MODEL, max_tokens=50, messages=ASKED, stop_sequences=["three"]
        )

        assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", "three")
        assert told.content[0].text == "Yes, one two "  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "written",
    [
        '<tool_call>{"name": "weather", "arguments": }</tool_call>',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name":',
        '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"degrees": NaN}}</tool_call>',
    ],
)
async def test_a_malformed_tool_call_stays_text(written):
    async with scripted(lambda prompt: f"So: {written}<|im_end|>") as (world, script):
        answer = await world.openai().chat.completions.create(**chat(tools=[TOOL]))

        assert answer.choices[0].message.content == f"So: {written}"
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        assert_exact(await world.record(), script)


async def test_no_tool_is_called_where_none_may_be():
    written = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    async with scripted(lambda prompt: f"{written}<|im_end|>") as (world, _):
        answer = await world.openai().chat.completions.create(**chat(tools=[TOOL], tool_choice="none"))

        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (written, "stop")


async def test_completions_take_text_or_tokens_and_are_recorded():
    async with scripted(lambda prompt: " One two<|im_end|>") as (world, script):
        client = world.openai()
        ids = models.encode("Where do you live?")
        by_text = await client.completions.create(model=MODEL, prompt="Where do you live?", max_tokens=3)
        longer = ids + script.answer(ids)[:3] + models.encode(" So?")
        by_tokens = await client.completions.create(model=MODEL, prompt=longer, max_tokens=50, logprobs=0)

        assert script.prompts == [ids, longer]
        assert by_text.choices[0].text == models.decode(script.answer(ids)[:3])
        assert by_text.choices[0].finish_reason == "length"
        assert by_tokens.choices[0].text == " One two"
        logprobs: Any = by_tokens.choices[0].logprobs
        assert len(logprobs.token_logprobs) == len(script.answer(longer))
        record = await world.record()
        (branch,) = record.branches
        assert branch_ids(branch) == longer + script.answer(longer)
        assert_exact(record, script)


async def test_the_models_are_listed_for_both_sdks():
    async with scripted(yes, model_names=["policy", "gpt-4o"]) as (world, _):
        assert [model.id async for model in world.openai().models.list()] == ["policy", "gpt-4o"]
        assert [model.id async for model in world.anthropic().models.list()] == ["policy", "gpt-4o"]
        answer = await world.openai().chat.completions.create(model="gpt-4o", messages=ASKED)
        assert answer.model == "gpt-4o"


@pytest.mark.parametrize("key", ["x", "wrong", "rf-" + "a" * 43])
async def test_a_wrong_key_is_refused_in_each_apis_words(key):
    async with scripted(yes) as (world, script):
        http = world.http()
        for header in ({"Authorization": f"Bearer {key}"}, {"Authorization": "", "x-api-key": key}):
            refused = await http.post(CHAT, json=chat(), headers=header)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            refused = await http.post(MESSAGES, json=chat(max_tokens=5), headers=header)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
            assert refused.json()["type"] == "error"
        assert not script.prompts


async def test_a_fixed_key_opens_the_door_and_nothing_is_recorded(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("alices-secret-key-1\n")
    monkeypatch.setenv("BOBS_KEY", "bobs-secret-key-12")
    keys = {"alice": f"file:{tmp_path}/key", "bob": "env:BOBS_KEY"}
    async with scripted(yes, keys=keys) as (world, _):
        for key in ("alices-secret-key-1", "bobs-secret-key-12"):
            answer = await world.openai(api_key=key).chat.completions.create(**chat(temperature=0.5))
            assert answer.choices[0].message.content == "Yes, one two three."
        assert not (await world.record()).branches


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"nonsense": 1}, "nonsense"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "Yes"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "messages"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_name_of_the_field(more, field):
    async with scripted(yes) as (world, script):
        body = json.dumps({**chat(), **more})

        refused = await world.http().post(CHAT, content=body, headers={"Content-Type": "application/json"})

        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", field)
        assert not script.prompts
        assert not world.fleet.router.running_count


@pytest.mark.parametrize("depth", [1000, 1015, 5000])
async def test_a_body_that_is_nested_too_deep_is_refused(depth):
    async with scripted(yes) as (world, _):
        tool = '{"type": "function", "function": {"name": "f", "parameters": %s}}' % ("[" * depth + "]" * depth)
        body = json.dumps({**chat(), "tools": [None]}).replace("null", tool)

        refused = await world.http().post(CHAT, content=body, headers={"Content-Type": "application/json"})

        assert refused.status_code == 400, refused.text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"temperature": 1.5}, "temperature must be between 0 and 1"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type"),
        ({"tools": [{"type": "web_search_1", "name": "x"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not supported"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "leaves none for output"),
    ],
)
async def test_anthropics_mistakes_are_refused_in_its_words(more, said):
    async with scripted(yes) as (world, _):
        refused = await world.http().post(MESSAGES, json={**chat(max_tokens=5), **more})

        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert said in refused.json()["error"]["message"]


async def test_errors_arrive_as_the_sdks_own():
    async with scripted(yes) as (world, _):
        with pytest.raises(openai.NotFoundError, match="There is no model 'gpt-9'") as missing:
            await world.openai().chat.completions.create(model="gpt-9", messages=ASKED)
        assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
        with pytest.raises(anthropic.NotFoundError, match="There is no model"):
            await world.anthropic().messages.create(model="claude", max_tokens=5, messages=ASKED)
        with pytest.raises(openai.BadRequestError) as long:
            await world.openai().chat.completions.create(**chat(messages=[{"role": "user", "content": "a " * 9000}]))
        assert long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"model": 1}'])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", MESSAGES, MESSAGES + "/count_tokens"])
async def test_garbage_is_refused(body, path):
    async with scripted(yes) as (world, _):
        refused = await world.http().post(path, content=body)

        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"


async def test_a_huge_body_is_refused():
    async with scripted(yes, max_body_bytes=10_000) as (world, _):
        refused = await world.http().post(CHAT, json=chat(user="x" * 20_000))
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")

        refused = await world.http().post(MESSAGES, json=chat(user="x" * 20_000))
        assert refused.json()["error"]["type"] == "request_too_large"


async def test_an_unknown_path_is_refused_in_json():
    async with scripted(yes) as (world, _):
        assert (await world.http().get(CHAT)).json()["error"]["message"] == f"There is no GET {CHAT} here."
        assert (await world.http().post("/v1/embeddings", json={})).status_code == 404


async def test_an_expired_sessions_key_is_refused():
    async with scripted(yes) as (world, _):
        await world.open("short", idle_duration=times.duration(0.05))
        await asyncio.sleep(0.1)

        with pytest.raises(openai.AuthenticationError):
            await world.openai().chat.completions.create(**chat())
        with pytest.raises(UnknownAgentSession):
            await world.record("short")


async def test_closing_a_session_answers_its_open_requests_and_refuses_its_key():
    engine = SimulatedEngine(token_limit=3)
    async with scripted(yes, engine=engine) as (world, _):
        client = world.openai()
        waiting = asyncio.create_task(client.chat.completions.create(**chat()))
        await engine.until(lambda: engine.is_stalled)

        record = await world.close()

        with pytest.raises(openai.AuthenticationError, match="The session was closed"):
            await waiting
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**chat())
        assert not record.branches
        assert await world.close() == record
        await engine.until(lambda: not engine.open_requests)


async def test_a_session_bounds_how_its_agent_samples():
    engine = SimulatedEngine(token_limit=1)
    async with scripted(yes, engine=engine) as (world, _):
        sampling: Any = {"max_tokens": 40, "temperature": 0.7, "top_k": 5, "seed": 9}
        wishes = {"max_tokens": 90, "temperature": 0.1, "top_p": 0.5, "seed": 3, "n": 2}
        for session_id, allow in (("bound", False), ("free", True)):
            await world.open(session_id, sampling=sampling, allow_sampling=allow, priority=4, tenant="t")
            waiting = asyncio.create_task(world.openai().chat.completions.create(**chat(**wishes)))
            await engine.until(lambda: len(engine.open_requests) == 2)
            asked = [running.generation.sampling for running in engine._open.values()]
            waiting.cancel()
            await engine.until(lambda: not engine.open_requests)
            assert {one.max_tokens for one in asked} == {40}
            assert {one.temperature for one in asked} == {0.1 if allow else 0.7}
            assert {one.top_p for one in asked} == {0.5 if allow else 0}
            assert {one.seed for one in asked} == ({3, 4} if allow else {9, 10})
            assert list(asked[0].stop_token_ids) == [2]


async def test_a_session_that_recorded_all_it_may_is_refused():
    async with scripted(yes, session_tokens=20) as (world, _):
        await world.openai().chat.completions.create(**chat())

        with pytest.raises(openai.RateLimitError, match="recorded as many tokens as it may"):
            await world.openai().chat.completions.create(**chat())


async def test_a_request_that_takes_too_long_is_given_up():
    engine = SimulatedEngine(token_limit=1)
    async with scripted(yes, engine=engine, request_seconds=0.2) as (world, _):
        with pytest.raises(openai.InternalServerError, match=r"No answer in 0.2 seconds") as late:
            await world.openai().chat.completions.create(**chat())
        assert late.value.status_code == 504
        stream = await world.openai().chat.completions.create(**chat(stream=True))
        with pytest.raises(openai.APIError, match=r"No answer in 0.2 seconds"):
            _ = [chunk async for chunk in stream]
        await engine.until(lambda: not engine.open_requests)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_that_hangs_up_frees_its_slot_at_once(streams):
    engine = SimulatedEngine(token_limit=3)
    async with scripted(yes, engine=engine) as (world, _):
        host = world.front.http.base_url.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        body = json.dumps(chat(stream=streams)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {world.api_key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await engine.until(lambda: engine.is_stalled)
        if streams:
            await reader.readuntil(b"data: ")

        hung_up = time.monotonic()
        writer.close()
        await engine.until(lambda: not engine.open_requests)

        assert time.monotonic() - hung_up < 0.1
        await world.until(lambda: world.fleet.router.running_count == 0)
        record = await world.record()
        assert (len(record.branches), record.request_count) == (0, 0)


async def test_a_stream_tells_as_the_engine_makes_it_and_never_splits_a_character():
    engine = SimulatedEngine(chunk_tokens=1, token_limit=1)
    text = "né 🌧 ok"
    async with scripted(lambda prompt: f"{text}<|im_end|>", engine=engine) as (world, script):
        options: Any = {"include_usage": True}
        stream = await world.openai().chat.completions.create(**chat(stream=True, stream_options=options))
        chunks = [await anext(stream), await anext(stream)]
        assert chunks[1].choices[0].delta.content == "n", "told while the engine waits"
        engine.allow(None)
        chunks += [chunk async for chunk in stream]

        told = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(told) == text
        assert not any("\ufffd" in piece for piece in told)
        assert any("🌧" in piece for piece in told)
        assert chunks[-1].usage
        assert chunks[-1].usage.prompt_tokens == len(script.prompts[0])
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert_exact(await world.record(), script)


async def test_choices_and_completions_stream_too():
    async with scripted(yes) as (world, _):
        stream = await world.openai().chat.completions.create(**chat(stream=True, n=2))
        told = {0: "", 1: ""}
        async for chunk in stream:
            told[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert set(told.values()) == {"Yes, one two three."}
        text = ""
        async for chunk in await world.openai().completions.create(
            model=MODEL, prompt="So", max_tokens=50, stream=True
        ):
            text += chunk.choices[0].text
        assert text == "Yes, one two three."


async def test_a_mistake_is_refused_before_a_stream_begins():
    async with scripted(yes) as (world, _):
        with pytest.raises(openai.BadRequestError):
            await world.openai().chat.completions.create(
                **chat(stream=True, messages=[{"role": "user", "content": "a " * 9000}])
            )


async def test_a_token_that_the_model_does_not_have_is_refused_before_a_stream_begins():
    async with scripted(yes) as (world, script):
        wrong = models.VOCABULARY
        with pytest.raises(openai.BadRequestError, match=f"Token id {wrong} is outside of the vocabulary"):
            await world.openai().completions.create(model=MODEL, prompt=[1, wrong], max_tokens=5, stream=True)
        assert not script.prompts


async def test_sessions_are_refused_where_no_http_is_served():
    async with run_proxy() as proxy:
        with pytest.raises(HttpDisabled):
            await rpc.call(proxy.stub.OpenSession, llm_proxy_pb2.OpenSessionRequest(session_id="a"), timeout=5)
        assert (await proxy.status()).session_count == 0


async def test_the_status_counts_open_sessions_and_opening_is_idempotent():
    async with scripted(yes) as (world, _):
        first = await world.open("again")
        assert await world.open("again") == first
        status = await rpc.call(world.stub.GetStatus, llm_proxy_pb2.LlmProxyServiceGetStatusRequest(), timeout=5)
        assert status.session_count == 2
        request = llm_proxy_pb2.OpenSessionRequest(session_id="again", sampling=trajectory_pb2.Sampling())
        with pytest.raises(aio.AioRpcError) as different:
            await world.stub.OpenSession(request)
        assert different.value.code() is grpc.StatusCode.INVALID_ARGUMENT
