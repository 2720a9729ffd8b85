"""Settings of an engine host. Imports no torch."""

import re
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field

from rollfarm.config import Config, ConfigError, Listen, Root, Telemetry
from rollfarm.run import ModelConfig

_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/[A-Za-z0-9][\w.-]*")


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

    telemetry: Telemetry = Telemetry()

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


class EngineRoot(Root):
    """Settings of `python -m llm_proxy.engine`."""

    model: ModelConfig = ModelConfig()

    engine: EngineConfig = EngineConfig()


def check_model(model: ModelConfig) -> None:
    """Raise ConfigError unless `model.path` can be a model: a folder with config.json, or a name on the hub."""
    path = Path(model.path)
    if not model.path:
        raise ConfigError(
            "model.path: missing. Set it to a folder in Hugging Face format or a model's name on the hub."
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model.path: {path} has no config.json. Give a folder that save_pretrained wrote, or remove it and "
                "set model.create to have a tiny model made there."
            )
        return
    if model.create is not None:
        raise ConfigError(
            f"model.path: {path} is not made yet. Make it from model.create with `python -m trainer.create_model "
            "FARM.toml`; `rollfarm up` and the trainer do it by themselves."
        )
    hub = _HUB_NAME.fullmatch(model.path)
    if path.exists() or hub is None or Path(hub[1]).exists():
        raise ConfigError(
            f"model.path: {path} is neither a folder nor an owner/name on the hub. Correct the path, or set "
            "model.create to have a tiny model made there."
        )
