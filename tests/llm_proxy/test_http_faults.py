"""The front door when what the policy wrote, or the moment, is unkind."""

import asyncio
import gc
import json
from typing import Any, NoReturn

import openai
import pytest
from aiohttp import web

from llm_proxy.front.door import Choice
from llm_proxy.requests import OpenRequest
from rollfarm.chat.replies import Reader
from rollfarm.v1 import trajectory_pb2
from tests.llm_proxy.fronts import MODEL, assert_exact, scripted

ASKED: Any = [{"role": "user", "content": "Is it so?"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_call_nested_too_deeply_to_parse_stays_text(streams):
    written = "<tool_call>" + "[" * 2000 + "</tool_call>"
    async with scripted(lambda _: written + "<|im_end|>", session_tokens=10_000) as (world, script):
        await world.open("deep", sampling={"max_tokens": 3000})
        asked: Any = {"model": MODEL, "messages": ASKED, "tools": [TOOL], "stream": streams}

        answer = await world.openai().chat.completions.create(**asked)

        if streams:
            told = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
        else:
            told = answer.choices[0].message.content
        assert told == written
        assert_exact(await world.record("deep"), script)


async def test_a_refused_request_is_not_kept_by_a_cycle():
    async with scripted(lambda _: "Yes.<|im_end|>") as (world, _):
        client = world.http()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(20):
                refused = await client.post("/v1/chat/completions", json={"model": "gpt-9", "messages": ASKED})
                assert refused.status_code == 404
            gc.collect()
            kept = [found for found in gc.garbage if isinstance(found, web.Request)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

        assert not kept


async def test_an_agents_call_with_arguments_nested_too_deeply_is_shown_as_text():
    deep = "[" * 5000
    call: Any = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": deep}}
    messages: Any = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, *ASKED]
    async with scripted(lambda _: "Yes.<|im_end|>") as (world, _):
        with pytest.raises(openai.BadRequestError, match="leaves none for output"):
            await world.openai().chat.completions.create(model=MODEL, messages=messages)


async def test_tokens_that_cannot_be_read_fail_their_own_stream_alone(monkeypatch):
    async with scripted(lambda _: "Yes.<|im_end|>") as (world, script):

        def feed(reader: Reader, token_ids: bytes) -> NoReturn:
            raise OverflowError("out of range")

        with monkeypatch.context() as broken:
            broken.setattr(Reader, "feed", feed)
            stream = await world.openai().chat.completions.create(model=MODEL, messages=ASKED, stream=True)
            with pytest.raises(openai.APIError, match="The server failed"):
                _ = [chunk async for chunk in stream]

        answer = await world.openai().chat.completions.create(model=MODEL, messages=ASKED)
        assert answer.choices[0].message.content == "Yes."
        assert_exact(await world.record(), script)


async def test_a_request_whose_session_is_closed_while_its_body_comes_is_refused():
    async with scripted(lambda _: "Yes.<|im_end|>") as (world, script):
        host = world.front.http.base_url.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*host.split(":"))
        body = json.dumps({"model": MODEL, "messages": ASKED}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {world.api_key}\r\n"
        writer.write(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        await reader.readuntil(b"100 Continue\r\n\r\n")

        await world.close()
        writer.write(body)

        assert b"401 Unauthorized" in await reader.readline()
        writer.close()
        assert not script.prompts


async def test_an_answer_that_comes_as_its_session_is_closed_is_not_told(monkeypatch):
    async with scripted(lambda _: "Yes.<|im_end|>") as (world, _):
        answer = Choice.answer

        def answer_and_close(choice: Choice, request: OpenRequest) -> None:
            answer(choice, request)
            world.front.close("episode")

        monkeypatch.setattr(Choice, "answer", answer_and_close)
        with pytest.raises(openai.AuthenticationError, match="The session was closed"):
            await world.openai().chat.completions.create(model=MODEL, messages=ASKED)

        assert not (await world.close()).branches


async def test_of_several_choices_none_is_recorded_where_one_fails(monkeypatch):
    async with scripted(lambda _: "Yes.<|im_end|>") as (world, _):
        answer = Choice.answer

        def cancel_the_second(choice: Choice, request: OpenRequest) -> None:
            if choice.index == 1:
                request.finish_reason = trajectory_pb2.FINISH_REASON_ABORT
            answer(choice, request)

        monkeypatch.setattr(Choice, "answer", cancel_the_second)
        with pytest.raises(openai.InternalServerError, match="The generation was cancelled"):
            await world.openai().chat.completions.create(model=MODEL, messages=ASKED, n=2)

        record = await world.record()
        assert not record.branches
        assert record.request_count == 0
