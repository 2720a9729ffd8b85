"""Settings of an engine host. Imports no torch."""

from ipaddress import ip_address
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import ByteSize, Field

from rollfarm.config import Config, ConfigError, Listen, Root, Telemetry
from rollfarm.run import ModelConfig


class ServerConfig(Config):
    """An inference server: a child that the host starts and supervises, or one that it is attached to."""

    python: Path
    """Interpreter of the environment that has the server."""

    url: str = ""
    """A server that somebody else runs, such as "http://127.0.0.1:8000"; on this machine, for its routes are
    unauthenticated. Empty starts one."""

    port: int = Field(default=0, ge=0, le=65535)
    """HTTP port of the one that is started, on loopback, for looking in from outside. 0 hides it where it can."""

    args: list[str] = []
    """Further arguments of its command line, after the host's own."""

    start_seconds: float = Field(default=180.0, gt=0)
    """How long it may take to answer its health check."""

    stream_interval: int = Field(default=0, ge=0)
    """Tokens of a request from one chunk to the next. 0 is one chunk at its end, so that a server that dies takes all
    that its requests have made with it, and an agent's stream comes in one piece. Short ones cost throughput."""

    def check(self, table: str, *, remedy: str) -> None:
        """Raise ConfigError where it can neither be started nor attached to."""
        python = self.python.absolute()
        if not self.url and not python.is_file():
            raise ConfigError(f"{table}.python: {python} does not exist. {remedy}")
        if self.url and not _is_on_loopback(self.url):
            raise ConfigError(
                f"{table}.url: {self.url} is not the root of a server on loopback, such as http://127.0.0.1:8000. "
                "Whoever reaches the server may change its weights: run its engine host beside it."
            )


def _is_on_loopback(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.path not in ("", "/"):
        return False
    try:
        return parts.hostname == "localhost" or ip_address(parts.hostname).is_loopback
    except ValueError:
        return False


class VllmConfig(ServerConfig):
    """vLLM's OpenAI-compatible API server. A child listens on a private socket unless it is given a port."""

    python: Path = Path(".venv-vllm/bin/python")
    """Interpreter of the environment that has vLLM; tools/install-vllm.sh makes it."""


class SglangConfig(ServerConfig):
    """SGLang's own HTTP server. A child listens on loopback, on a free port unless it is given one."""

    python: Path = Path(".venv-sglang/bin/python")
    """Interpreter of the environment that has SGLang; on CPU tools/install-sglang.sh makes it."""


class SimulatedConfig(Config):
    """How long the simulated engine takes. The defaults resemble a model of 7.6 G parameters in bfloat16 on one A100:
    assumed from its bandwidth (2 TB/s) and arithmetic (half of 312 TFLOP/s), not measured."""

    step_seconds: float = Field(default=0.008, ge=0)
    """One decoding step, however few requests share it: reading 15.2 GB of weights."""

    request_seconds: float = Field(default=0.00005, ge=0)
    """Added to a step by each request in it: reading the keys and values of about 2,000 tokens."""

    prefill_seconds: float = Field(default=0.0001, ge=0)
    """Added to a step by each prompt token in it, and by those computed again after an update."""

    vocabulary_size: int = Field(default=152_064, ge=2)
    """Token ids lie below it."""


class EngineConfig(Config):
    """One engine and how it is reached."""

    listen: Listen = Listen(port=7710)
    """Where EngineService listens, for llm_proxy."""

    telemetry: Telemetry = Telemetry()
    """Logs and metrics."""

    adapter: Literal["embedded", "vllm", "sglang", "simulated"] = "embedded"
    """"embedded" generates in this process, with any causal model of transformers; "vllm" and "sglang" are a vLLM or
    SGLang server beside it; "simulated" computes nothing, takes the time that a GPU would, and needs no [model]."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the embedded engine computes. "auto" takes a GPU where there is one."""

    threads: int = Field(default=1, ge=0)
    """CPU threads of one forward pass. 0 is torch's choice, which on a shared machine is slower than 1."""

    slots: int = Field(default=64, ge=1)
    """Requests decoded at once. More raise throughput, and the latency of each."""

    context_tokens: int = Field(default=0, ge=0)
    """Most tokens of prompt and output together. 0 is what the model allows."""

    kv_cache: ByteSize = ByteSize(256_000_000)
    """Memory for keys and values, such as "256M" or "4G". Beyond running requests it holds the sessions' prefixes, so
    that a turn computes only its new tokens."""

    weights_seconds: float = Field(default=60.0, gt=0)
    """How long one broadcast may take, with the up to three before it that are still on their way, and how long the
    meeting of a weight group. A sender that is silent for longer has vanished; the old weights keep serving."""

    vllm: VllmConfig = VllmConfig()
    """For the adapter "vllm" alone."""

    sglang: SglangConfig = SglangConfig()
    """For the adapter "sglang" alone."""

    simulated: SimulatedConfig = SimulatedConfig()
    """For the adapter "simulated" alone."""


class EngineRoot(Root):
    """Settings of `python -m llm_proxy.engine`."""

    model: ModelConfig = ModelConfig()
    """The policy's model."""

    engine: EngineConfig = EngineConfig()
    """This service."""

    def check(self) -> None:
        if self.engine.adapter != "simulated":
            self.model.check()
        if self.engine.adapter == "vllm":
            self.engine.vllm.check(
                "engine.vllm",
                remedy="Run tools/install-vllm.sh, which makes it, or give the interpreter of an environment that has "
                "vLLM and rollfarm.",
            )
        if self.engine.adapter == "sglang":
            self.engine.sglang.check(
                "engine.sglang",
                remedy="Run tools/install-sglang.sh, which makes it, or give the interpreter of an environment that "
                "has SGLang and rollfarm.",
            )


def refuse_unmade(model: ModelConfig) -> None:
    """Raise ConfigError where the model is still to be made from [model.create]."""
    if model.create is not None and not model.is_there:
        raise ConfigError(
            f"model.path: {model.path} is not made yet. Make it from model.create with `python -m trainer.create_model "
            "FARM.toml`; `rollfarm up` and the trainer do it by themselves."
        )
