"""The front door as llm_proxy holds it: its sessions, as gRPC opens and closes them, and its HTTP server."""

import time
from pathlib import Path

from llm_proxy.engines import Fleet
from llm_proxy.front.config import HttpConfig
from llm_proxy.front.door import Door, Tenant
from llm_proxy.front.keys import Keys
from llm_proxy.front.server import HttpServer
from llm_proxy.front.sessions import Sessions
from rollfarm import chat
from rollfarm.chat import ChatTemplate
from rollfarm.secret import read_secret
from rollfarm.v1 import llm_proxy_pb2


class Front:
    """The sessions and the server that serves them."""

    def __init__(
        self, config: HttpConfig, fleet: Fleet, template: ChatTemplate, context_tokens: int, name: str
    ) -> None:
        """`name` is the model's, unless the configuration gives others. Raises ConfigError where a key is not there."""
        self.sessions = Sessions(most=config.session_count, idle_seconds=config.session_idle_seconds)
        self._router, self._wake = fleet.router, fleet.wake
        names = config.model_names or [name]
        self._name = names[0]
        keys: Keys[Tenant] = Keys()
        for tenant, source in config.keys.items():
            keys.add(read_secret(f"llm_proxy.http.keys.{tenant}", source), Tenant(tenant))
        door = Door(fleet, template, context_tokens, config)
        self.http = HttpServer(config, door, self.sessions, keys, names)

    def open(self, asked: llm_proxy_pb2.OpenSessionRequest) -> llm_proxy_pb2.OpenSessionResponse:
        """Raises InvalidArgument and SessionsFull."""
        key = self.sessions.open(asked, time.monotonic())
        return llm_proxy_pb2.OpenSessionResponse(
            base_url=f"{self.http.base_url}/v1", api_key=key, model_name=self._name
        )

    def get(self, session_id: str) -> llm_proxy_pb2.SessionRecord:
        """Raises UnknownAgentSession."""
        return self.sessions.get(session_id, time.monotonic()).record.to_proto(session_id)

    def close(self, session_id: str) -> llm_proxy_pb2.SessionRecord:
        """Its open requests are answered that it is closed. Raises UnknownAgentSession."""
        now = time.monotonic()
        session = self.sessions.close(session_id, now)
        for request_id in session.requests:
            self._router.cancel(request_id, now)
        self._wake()
        return session.record.to_proto(session_id)


def open_front(config: HttpConfig, model_path: str, fleet: Fleet) -> Front:
    """The front door of the model at `model_path`, its port taken. Raises ConfigError and PortInUse."""
    tokenizer, context_tokens = chat.load(model_path)
    template = ChatTemplate(tokenizer, config.template)
    front = Front(config, fleet, template, context_tokens, Path(model_path).name)
    front.http.bind()
    return front
