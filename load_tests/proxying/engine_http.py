"""A vLLM or SGLang server without an engine: answers /v1/completions and /generate, at once or after an exact time.

    python -m load_tests.proxying.engine_http PORT SECONDS

Every other path gets what routers want to hear of a healthy engine.
"""

import asyncio
import gc
import json
import sys

from load_tests.proxying import payload
from load_tests.proxying.wire import Messages, answer

GENERATED = {
    "/v1/completions": answer(payload.completions_answer()),
    "/generate": answer(payload.generate_answer()),
}

ABOUT = {
    "model_path": payload.MODEL,
    "served_model_name": payload.MODEL,
    "tokenizer_path": "",
    "is_generation": True,
    "max_model_len": payload.CONTEXT_TOKENS,
    "version": "load",
    "object": "list",
    "data": [
        {
            "id": payload.MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "load",
            "max_model_len": payload.CONTEXT_TOKENS,
        }
    ],
}
_ABOUT = answer(json.dumps(ABOUT).encode())


class Connection(asyncio.Protocol):
    """One connection of a router. Its requests are answered in order."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._messages = Messages()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for head, _ in self._messages.received(data):
            path = head.split(b" ", 2)[1].partition(b"?")[0].decode()
            generated = GENERATED.get(path)
            if generated is not None and self._seconds:
                asyncio.get_running_loop().call_later(self._seconds, self._transport.write, generated)
            else:
                self._transport.write(generated or _ABOUT)


async def serve(port: int, seconds: float) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(seconds), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    gc.disable()
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
