"""Tokens a second of a farm that is kept busy. Runs in a client process of its own."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from rollfarm import rpc, tokens
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, llm_proxy_pb2_grpc, trajectory_pb2

Work = tuple[list[int], int]
"""A prompt, and how many tokens are asked for."""


def through_farm(address: str, work: Sequence[Work], concurrency: int) -> float:
    """Tokens a second by GenerateMany, with at most `concurrency` requests open."""
    return asyncio.run(_through_farm(address, work, concurrency))


async def _through_farm(address: str, work: Sequence[Work], concurrency: int) -> float:
    generations = [_generation(prompt, output_tokens) for prompt, output_tokens in work]
    async with rpc.channel(address) as channel:
        stub: Any = llm_proxy_pb2_grpc.LlmProxyServiceStub(channel)
        call = stub.GenerateMany()
        began, made = time.perf_counter(), 0
        await call.write(llm_proxy_pb2.GenerateManyRequest(generations=generations[:concurrency]))
        sent, answered = min(concurrency, len(generations)), 0
        while answered < len(generations):
            message = await call.read()
            for result in message.results:
                assert not result.HasField("failure"), result.failure
                made += tokens.token_count(result.token_ids)
            answered += len(message.results)
            if more := generations[sent : sent + len(message.results)]:
                await call.write(llm_proxy_pb2.GenerateManyRequest(generations=more))
                sent += len(more)
        seconds = time.perf_counter() - began
    assert made == sum(output_tokens for _, output_tokens in work), f"{made} tokens are too few or too many"
    return made / seconds


def _generation(prompt: Sequence[int], output_tokens: int) -> llm_proxy_pb2.ProxiedGeneration:
    return llm_proxy_pb2.ProxiedGeneration(
        generation=engine_pb2.Generation(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=tokens.pack_ids(prompt),
            sampling=trajectory_pb2.Sampling(max_tokens=output_tokens, temperature=1.0),
        )
    )
