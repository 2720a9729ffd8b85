"""Agents: multi-turn chats over HTTP, each in a session of its own that records every token.

Every answer of the engine is the same, so that what an agent says next is known beforehand.
"""

import asyncio
import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from load_tests.proxying import payload
from load_tests.proxying.wire import request
from rollfarm import rpc
from rollfarm.v1 import llm_proxy_pb2, llm_proxy_pb2_grpc, trajectory_pb2

TURNS = 4
"""Requests of a session. Each repeats all that was said before, and adds a message."""

FIRST_WORDS, NEXT_WORDS = 128, 32
"""Tokens of an agent's messages."""

SPECIAL = ("<|im_start|>", "<|im_end|>", "<unk>", "system", "user", "assistant")
assert len(SPECIAL) <= payload.FIRST_ID

TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|> ' + message.role + ' ' + message.content + ' <|im_end|> ' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"""


def write_model(folder: Path) -> Path:
    """What llm_proxy reads of a model: its configuration, and a tokenizer that takes a word for a token."""
    words = {
        word: number for number, word in enumerate((*SPECIAL, *map(_word, range(len(SPECIAL), payload.VOCABULARY))))
    }
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    path = folder / payload.MODEL
    fast.save_pretrained(path)
    config = {
        "model_type": "qwen3",
        "vocab_size": payload.VOCABULARY,
        "max_position_embeddings": payload.CONTEXT_TOKENS,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def _word(number: int) -> str:
    return f"w{number}"


def bodies() -> list[bytes]:
    """What an agent sends, turn by turn."""
    answer = {"role": "assistant", "content": " ".join(map(_word, payload.ANSWER))}
    messages: list[dict[str, str]] = []
    made: list[bytes] = []
    for turn in range(TURNS):
        words = payload.PROMPT[: FIRST_WORDS if turn == 0 else NEXT_WORDS]
        messages.append({"role": "user", "content": " ".join(map(_word, words))})
        asked = {"model": payload.MODEL, "messages": messages, "max_tokens": payload.TOKENS}
        made.append(json.dumps(asked).encode())
        messages.append(answer)
    return made


def conversations(port: int, http_port: int, sessions: int) -> tuple[bytes, ...]:
    """Open sessions at llm_proxy; whole requests, the first turn of every session before the second of any."""
    keys = asyncio.run(_open(port, sessions))
    headers = [{"Authorization": f"Bearer {key}"} for key in keys]
    return tuple(request("/v1/chat/completions", http_port, body, header) for body in bodies() for header in headers)


async def _open(port: int, sessions: int) -> list[str]:
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub = llm_proxy_pb2_grpc.LlmProxyServiceStub(channel)
        sampling = trajectory_pb2.Sampling(max_tokens=payload.TOKENS, temperature=1.0)
        asked = [
            llm_proxy_pb2.OpenSessionRequest(session_id=f"session-{number}", sampling=sampling)
            for number in range(sessions)
        ]
        return [(await rpc.call(stub.OpenSession, one, timeout=10.0)).api_key for one in asked]
