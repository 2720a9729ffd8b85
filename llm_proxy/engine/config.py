"""Settings of an engine host. Imports no torch."""

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field

from rollfarm.config import Config, ConfigError, Listen, Root, Telemetry
from rollfarm.run import ModelConfig


class VllmConfig(Config):
    """The vLLM server that the host starts and supervises."""

    python: Path = Path(".venv-vllm/bin/python")
    """Interpreter of the environment that has vLLM; tools/install-vllm.sh makes it."""

    port: int = Field(default=0, ge=0, le=65535)
    """Its HTTP port on loopback, for looking in from outside. 0 is a private socket: its routes are unauthenticated."""

    args: list[str] = []
    """Further arguments of its command line, after the host's own."""

    start_seconds: float = Field(default=180.0, gt=0)
    """How long it may take to answer its health check."""


class EngineConfig(Config):
    """One engine and how it is reached."""

    listen: Listen = Listen(port=7710)
    """Where EngineService listens, for llm_proxy."""

    telemetry: Telemetry = Telemetry()
    """Logs and metrics."""

    adapter: Literal["embedded", "vllm"] = "embedded"
    """"embedded" generates in this process, with any causal model of transformers; "vllm" starts a vLLM server."""

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
    """How long one broadcast, and the meeting of a weight group, may take. A sender that is silent for longer has
    vanished; the old weights keep serving."""

    vllm: VllmConfig = VllmConfig()
    """For the adapter "vllm" alone."""


class EngineRoot(Root):
    """Settings of `python -m llm_proxy.engine`."""

    model: ModelConfig = ModelConfig()
    """The policy's model."""

    engine: EngineConfig = EngineConfig()
    """This service."""

    def check(self) -> None:
        self.model.check()
        python = self.engine.vllm.python.absolute()
        if self.engine.adapter == "vllm" and not python.is_file():
            raise ConfigError(
                f"engine.vllm.python: {python} does not exist. Run tools/install-vllm.sh, which makes it, or give the "
                "interpreter of an environment that has vLLM and rollfarm."
            )


def refuse_unmade(model: ModelConfig) -> None:
    """Raise ConfigError where the model is still to be made from [model.create]."""
    if model.create is not None and not model.is_there:
        raise ConfigError(
            f"model.path: {model.path} is not made yet. Make it from model.create with `python -m trainer.create_model "
            "FARM.toml`; `rollfarm up` and the trainer do it by themselves."
        )
