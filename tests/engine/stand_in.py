"""Engine hosts beside a vLLM that they did not start, and a small HTTP server that plays it."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from llm_proxy.engine.config import EngineConfig, EngineRoot, VllmConfig
from rollfarm.config import Listen
from rollfarm.run import ModelConfig
from tests.engine.kit import CONTEXT, VOCABULARY

Said = tuple[int, Any]
"""A status, and what is sent as JSON; bytes are sent as they are, and an Events is a stream that the connection ends
with."""

DONE = b"data: [DONE]\n\n"


@dataclass
class Events:
    """Sent one after the other, when there is another."""

    pieces: Iterable[bytes]


def event(said: Any) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def attached_root(
    model: Path, url: str, *, start_seconds: float = 0.5, stream_interval: int = 0, **engine: Any
) -> EngineRoot:
    """An engine host beside the vLLM at `url`."""
    vllm = VllmConfig(url=url, start_seconds=start_seconds, stream_interval=stream_interval)
    return EngineRoot(
        model=ModelConfig(path=str(model)),
        engine=EngineConfig(adapter="vllm", vllm=vllm, listen=Listen(drain_seconds=0), **engine),
    )


class VllmStandIn:
    """Answers as vLLM does, for the model at `model_path`, until `answers` says otherwise."""

    def __init__(self, model_path: str) -> None:
        self.vocabulary_size = VOCABULARY
        self.label = "default"
        self.calls: list[str] = []
        """Paths of all POST requests but those for tokens, with their queries."""

        self.settings: dict[str, Any] = {
            "model": model_path,
            "dtype": "torch.float32",
            "max_model_len": CONTEXT,
            "max_logprobs": -1,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": False,
        }
        self.answers: dict[str, Callable[[Any], Said | None]] = {}
        """By path. None closes the connection."""

        self._connections: list[socket.socket] = []

    def __enter__(self) -> "VllmStandIn":
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                stand_in._connections.append(self.connection)

            def do_GET(self) -> None:
                self.answer(None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                self.answer(json.loads(body) if body else {})

            def answer(self, body: Any) -> None:
                said = stand_in.say(self.path, body)
                if said is None:
                    self.close_connection = True
                    return
                status, content = said
                if isinstance(content, Events):
                    self.stream(content)
                    return
                sent = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def stream(self, events: Events) -> None:
                self.close_connection = True
                self.send_response(200)
                self.end_headers()
                for piece in events.pieces:
                    self.wfile.write(piece)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def say(self, path: str, body: Any) -> Said | None:
        """What is answered; `body` is None for a GET."""
        name = urlsplit(path).path
        if name in self.answers:
            return self.answers[name](body)
        if name == "/inference/v1/generate":
            return (405, {}) if body is None else self.generated(body)
        if body is not None:
            self.calls.append(path)
        if body and name == "/update_weight_version":
            self.label = body["new_version"]
        if body and name == "/finish_weight_update":
            self.label = body["weight_version"]
        return 200, {
            "/version": {"version": "0.32.0"},
            "/is_paused": {"is_paused": False},
            "/weight_info": {"weight_version": self.label},
            "/server_info": {
                "vllm_config": {
                    "model_config": self.settings,
                    "scheduler_config": {"max_num_seqs": 64},
                    "weight_transfer_config": {"backend": "rollfarm"},
                }
            },
        }.get(name, {})

    def generated(self, body: Any) -> Said:
        """As many tokens as were asked for: 0, 1, 2..."""
        sampling = body["sampling_params"]
        if any(token >= self.vocabulary_size for token in sampling["stop_token_ids"]):
            return 400, {"error": {"message": f"out-of-vocab token ids. Vocabulary size: {self.vocabulary_size}"}}
        return 200, {"choices": [choice(sampling["max_tokens"], self.label)]}


def choice(count: int, label: str) -> dict[str, Any]:
    return {
        "token_ids": [n % VOCABULARY for n in range(count)],
        "logprobs": {"content": [{"logprob": -0.5, "top_logprobs": []} for _ in range(count)]},
        "weight_versions": [{"version": label, "start": 0, "end": count}],
        "finish_reason": "length",
    }
