"""Requests and answers, serialised before the clock starts: what is measured is whoever passes them on."""

import json

import numpy as np

from load_tests.buffering.samples import delimited
from rollfarm.tokens import pack_ids, pack_logprobs
from rollfarm.v1 import engine_pb2, llm_proxy_pb2, trajectory_pb2

VOCABULARY = 32_000
MODEL = "load"
CONTEXT_TOKENS = 32_768
FIRST_ID = 8
"""Ids below it mean something to a chat template, and are in no prompt or answer."""

PROMPT_TOKENS = 256
TOKENS = 128
"""Tokens of an answer, each with its log-probability."""

_CHUNKS = engine_pb2.EngineServiceGenerateResponse.CHUNKS_FIELD_NUMBER
_GENERATIONS = llm_proxy_pb2.GenerateManyRequest.GENERATIONS_FIELD_NUMBER
assert _GENERATIONS == engine_pb2.EngineServiceGenerateRequest.GENERATIONS_FIELD_NUMBER

_chance = np.random.default_rng(0)
PROMPT = _chance.integers(FIRST_ID, VOCABULARY, size=PROMPT_TOKENS).tolist()
ANSWER = _chance.integers(FIRST_ID, VOCABULARY, size=TOKENS).tolist()
LOGPROBS = (-_chance.exponential(size=TOKENS)).astype("<f4").tolist()
_IDS, _LOGPROBS = pack_ids(ANSWER), pack_logprobs(LOGPROBS)


def generation(request_id: str) -> engine_pb2.Generation:
    """What an engine is asked."""
    return engine_pb2.Generation(
        request_id=request_id,
        prompt_token_ids=pack_ids(PROMPT),
        sampling=trajectory_pb2.Sampling(max_tokens=TOKENS, temperature=1.0, top_p=1.0),
        session_id=request_id,
    )


def proxied(request_id: str) -> llm_proxy_pb2.ProxiedGeneration:
    """What llm_proxy is asked."""
    return llm_proxy_pb2.ProxiedGeneration(generation=generation(request_id), min_version=0, priority=3)


def requests(messages: list[bytes]) -> bytes:
    """A message of either stream, of serialised generations."""
    return b"".join(delimited(_GENERATIONS, message) for message in messages)


_REST_OF_CHUNK = engine_pb2.GenerationChunk(
    token_ids=_IDS,
    logprobs=_LOGPROBS,
    version_spans=[trajectory_pb2.VersionSpan(token_count=TOKENS)],
    finish_reason=trajectory_pb2.FINISH_REASON_LENGTH,
).SerializeToString()


def chunks(request: engine_pb2.EngineServiceGenerateRequest) -> bytes:
    """The engine's answer to every request of a message, serialised."""
    field = engine_pb2.GenerationChunk.REQUEST_ID_FIELD_NUMBER
    return b"".join(
        delimited(_CHUNKS, delimited(field, asked.request_id.encode()) + _REST_OF_CHUNK)
        for asked in request.generations
    )


def unary_answer(request_id: str) -> bytes:
    """A GenerateResponse, serialised."""
    result = llm_proxy_pb2.GenerationResult(request_id=request_id, token_ids=_IDS, logprobs=_LOGPROBS)
    return llm_proxy_pb2.GenerateResponse(result=result).SerializeToString()


def generate_body() -> bytes:
    """The request as SGLang's /generate takes it."""
    sampling = {"max_new_tokens": TOKENS, "temperature": 1.0, "top_p": 1.0}
    return json.dumps({"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}).encode()


def generate_answer() -> bytes:
    """The answer as SGLang's /generate gives it."""
    meta = {
        "finish_reason": {"type": "length", "length": TOKENS},
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": TOKENS,
        "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(LOGPROBS, ANSWER, strict=True)],
    }
    return json.dumps({"text": "", "output_ids": ANSWER, "meta_info": meta}).encode()


def completions_body() -> bytes:
    """The request as vLLM's /v1/completions takes it."""
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0}
    return json.dumps({**asked, "return_token_ids": True}).encode()


def completions_answer() -> bytes:
    """The answer as vLLM's /v1/completions gives it."""
    logprobs = {"tokens": [f"token_id:{token}" for token in ANSWER], "token_logprobs": LOGPROBS}
    choice = {"index": 0, "text": "", "token_ids": ANSWER, "logprobs": logprobs, "finish_reason": "length"}
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": TOKENS, "total_tokens": PROMPT_TOKENS + TOKENS}
    answer = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": MODEL}
    return json.dumps({**answer, "choices": [choice], "usage": usage}).encode()
