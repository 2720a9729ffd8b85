"""The client of OpenAI-compatible endpoints, before llm_proxy's front door and before servers that answer nonsense."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from rollfarm.endpoint import Endpoint, EndpointConfig, shared
from rollfarm.errors import EndpointFailed
from rollfarm.ports import free_ports
from tests.llm_proxy.fronts import MODEL, World, scripted

KEY = "a-key-that-nobody-shall-see"
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where do you live?"}]
QUICK: dict[str, Any] = {"model": MODEL, "seconds": 20, "retries": 0}


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDPOINT_KEY", KEY)


@asynccontextmanager
async def answering(handler: Any) -> AsyncIterator[str]:
    """The base URL of a server where `handler` answers chat completions."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


def at(world: World) -> str:
    return f"{world.front.http.base_url}/v1"


async def test_it_answers_with_the_models_words():
    async with scripted(lambda prompt: "In Paris.<|im_end|>", keys={"me": "env:ENDPOINT_KEY"}) as (world, script):
        endpoint = shared(EndpointConfig(base_url=at(world), key="env:ENDPOINT_KEY", **QUICK))

        words = await endpoint.complete(ASKED, max_tokens=20)

        assert words == "In Paris."
        assert len(script.prompts) == 1
        assert shared(EndpointConfig(base_url=at(world), key="env:ENDPOINT_KEY", **QUICK)) is endpoint
        await endpoint.close()


async def test_a_key_in_a_file_is_taken_and_a_wrong_one_is_refused_without_being_shown(tmp_path: Path):
    (tmp_path / "right").write_text(f"{KEY}\n")
    (tmp_path / "wrong").write_text("not-the-right-key-at-all")
    async with scripted(lambda prompt: "Yes.<|im_end|>", keys={"me": "env:ENDPOINT_KEY"}) as (world, _):
        right = Endpoint(EndpointConfig(base_url=at(world), key=f"file:{tmp_path}/right", **QUICK))
        wrong = Endpoint(EndpointConfig(base_url=at(world), key=f"file:{tmp_path}/wrong", **QUICK))

        assert await right.complete(ASKED) == "Yes."
        with pytest.raises(EndpointFailed, match="AuthenticationError") as refused:
            await wrong.complete(ASKED)

        assert "not-the-right-key" not in str(refused.value)
        await right.close()
        await wrong.close()


async def test_a_key_that_an_endpoint_repeats_is_not_passed_on():
    async def tell(request: web.Request) -> web.Response:
        said = {"error": {"message": f"Bad key {request.headers['Authorization']}"}}
        return web.json_response(said, status=401)

    async with answering(tell) as url:
        endpoint = Endpoint(EndpointConfig(base_url=url, key="env:ENDPOINT_KEY", **QUICK))

        with pytest.raises(EndpointFailed, match=r"Bad key Bearer \*\*\*"):
            await endpoint.complete(ASKED)

        await endpoint.close()


@pytest.mark.parametrize(
    "answer", [web.json_response({}), web.json_response({"choices": []}), web.Response(text="<html>hello</html>")]
)
async def test_an_answer_that_is_no_completion_is_a_failure(answer: web.Response):
    async def say(request: web.Request) -> web.Response:
        return answer

    async with answering(say) as url:
        endpoint = Endpoint(EndpointConfig(base_url=url, **QUICK))

        with pytest.raises(EndpointFailed, match="no chat completion"):
            await endpoint.complete(ASKED)

        await endpoint.close()


async def test_an_endpoint_that_is_late_or_away_is_a_failure():
    async def never(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with answering(never) as url:
        late = Endpoint(EndpointConfig(base_url=url, **{**QUICK, "seconds": 0.05}))
        with pytest.raises(EndpointFailed, match="APITimeoutError"):
            await late.complete(ASKED)
        await late.close()
    away = Endpoint(EndpointConfig(base_url=f"http://127.0.0.1:{free_ports(1)}/v1", **QUICK))
    with pytest.raises(EndpointFailed, match="APIConnectionError"):
        await away.complete(ASKED)
    await away.close()


async def test_an_endpoint_that_is_overloaded_is_asked_again():
    asked = 0

    async def second(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 1:
            return web.Response(status=503, headers={"retry-after-ms": "1"})
        return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": "Now."}}]})

    async with answering(second) as url:
        endpoint = Endpoint(EndpointConfig(base_url=url, **{**QUICK, "retries": 1}))

        assert await endpoint.complete(ASKED) == "Now."

        await endpoint.close()


async def test_no_more_is_asked_at_once_than_allowed():
    open_now, most = 0, 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.01)
        open_now -= 1
        return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": "Now."}}]})

    async with answering(slow) as url:
        endpoint = Endpoint(EndpointConfig(base_url=url, concurrency=2, **QUICK))

        await asyncio.gather(*[endpoint.complete(ASKED) for _ in range(6)])

        assert most == 2
        await endpoint.close()


async def test_a_key_that_is_not_there_is_told_and_one_in_the_file_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ENDPOINT_KEY")
    endpoint = Endpoint(EndpointConfig(base_url="http://127.0.0.1:1/v1", key="env:ENDPOINT_KEY", **QUICK))

    with pytest.raises(EndpointFailed, match="ENDPOINT_KEY holds no key"):
        await endpoint.complete(ASKED)
    with pytest.raises(ValidationError, match="a key is not kept in files"):
        EndpointConfig(base_url="http://127.0.0.1:1/v1", model=MODEL, key="sk-secret")
