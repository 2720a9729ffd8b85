"""Tokens a second of a vLLM server that is asked directly, without the farm: the fastest client that Python has.

Runs by itself, in vLLM's own environment, which has aiohttp and msgspec: a job as JSON on stdin, the figure on stdout.
"""

import asyncio
import json
import sys
import time
import uuid
from typing import Any

import aiohttp
import msgspec


class Position(msgspec.Struct):
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[Position]


class Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: Logprobs


class Generated(msgspec.Struct):
    choices: list[Choice]


async def main(job: dict[str, Any]) -> float:
    """Keep `concurrency` requests open on as many connections, each used again and again."""
    waiting = list(reversed(job["work"]))
    made = 0
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=300)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None),
        json_serialize=lambda body: msgspec.json.encode(body).decode(),
    ) as session:

        async def keep_asking() -> None:
            nonlocal made
            while waiting:
                prompt, output_tokens = waiting.pop()
                body = _body(prompt, output_tokens)
                async with session.post(job["url"] + "/inference/v1/generate", json=body) as response:
                    answer = msgspec.json.decode(await response.read(), type=Generated)
                (choice,) = answer.choices
                count = len(choice.token_ids)
                assert count == len(choice.logprobs.content) == output_tokens, answer
                made += count

        began = time.perf_counter()
        await asyncio.gather(*(keep_asking() for _ in range(job["concurrency"])))
        return made / (time.perf_counter() - began)


def _body(prompt: list[int], output_tokens: int) -> dict[str, Any]:
    """What the engine host asks for too: tokens, their log-probabilities and their versions."""
    sampling = {
        "n": 1,
        "max_tokens": output_tokens,
        "temperature": 1.0,
        "logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
    }
    return {"request_id": uuid.uuid4().hex, "token_ids": prompt, "sampling_params": sampling, "stream": False}


if __name__ == "__main__":
    print(asyncio.run(main(json.load(sys.stdin))))
