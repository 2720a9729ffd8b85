"""The vLLM child: its command line, its life, its HTTP routes, and the memory that it shares with the host."""

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2
import structlog
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from llm_proxy.engine.config import EngineConfig
from llm_proxy.engine.requests import Limits, Request
from rollfarm.config import ConfigError
from rollfarm.errors import EngineFailed, InvalidArgument
from rollfarm.run import ModelConfig

log = structlog.get_logger()

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # the only switch for the routes that pause and load
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",  # the first request for log-probabilities would compile for 15 s
}
_STOP_SECONDS = 15.0
_ABORT_PREFIX = "generate-tokens-"


class VllmServer:
    """One child process and its routes. Failures of the transport are EngineFailed."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._process: asyncio.subprocess.Process
        self._vocabulary_size = 0
        self._folder = tempfile.TemporaryDirectory(prefix="rollfarm-vllm-")
        self._socket = Path(self._folder.name) / "http"
        self._http: httpx2.AsyncClient

    async def start(self, limits: Limits) -> None:
        """Start the child and wait until it is healthy. Raises ConfigError."""
        self._vocabulary_size = limits.vocabulary_size
        self._http = self._client()
        self._process = await asyncio.create_subprocess_exec(
            str(self._config.vllm.python.absolute()),
            *("-m", "rollfarm.vllm_gloo"),
            *self._arguments(limits),
            env=os.environ | _ENVIRONMENT | self._environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr.fileno(),
        )
        try:
            async with asyncio.timeout(self._config.vllm.start_seconds):
                await self._healthy()
        except TimeoutError:
            await self.stop()
            raise ConfigError(
                f"engine.vllm: not ready within {self._config.vllm.start_seconds:g} s; its log is above. Raise "
                "engine.vllm.start_seconds."
            ) from None

    def _client(self) -> httpx2.AsyncClient:
        port = self._config.vllm.port
        transport = httpx2.AsyncHTTPTransport(
            uds=None if port else str(self._socket),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=self._config.slots),
        )
        return httpx2.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{port or 80}", timeout=None)

    def _arguments(self, limits: Limits) -> list[str]:
        port = self._config.vllm.port
        return [
            *("--model", self._model.path, "--served-model-name", "policy", "--dtype", self._model.dtype),
            *(("--host", "127.0.0.1", "--port", str(port)) if port else ("--uds", str(self._socket))),
            *("--max-model-len", str(limits.context_token_count), "--max-num-seqs", str(limits.slot_count)),
            *("--kv-cache-memory-bytes", str(int(self._config.kv_cache)), "--seed", str(secrets.randbits(31))),
            *("--distributed-executor-backend", "uni", "--enforce-eager", "--enable-scale-out"),
            *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
            *("--weight-transfer-config", '{"backend": "rollfarm"}', "--uvicorn-log-level", "warning"),
            *self._config.vllm.args,
        ]

    def _environment(self) -> dict[str, str]:
        own = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}
        if self._config.threads:
            own["OMP_NUM_THREADS"] = str(self._config.threads)
        if Path(self._model.path).is_dir():
            own["HF_HUB_OFFLINE"] = "1"
        return own

    async def _healthy(self) -> None:
        while True:
            if self._process.returncode is not None:
                raise ConfigError(
                    f"engine.vllm: vLLM ended with status {self._process.returncode} while it started; its log is "
                    "above. Correct what it complains about, or run tools/install-vllm.sh again."
                )
            try:
                if (await self._http.get("/health")).status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            await asyncio.sleep(0.2)

    async def wait(self) -> int:
        """The child's exit status, once it has ended."""
        return await self._process.wait()

    async def stop(self) -> None:
        """End the child, by force if it takes long."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        await self._http.aclose()
        self._folder.cleanup()

    async def generate(self, request: Request, *, cache_salt: str) -> dict[str, Any]:
        """vLLM's answer. Raises EngineFailed, and InvalidArgument where vLLM refuses."""
        # Of k candidates vLLM gives one place to the sampled token, however unlikely it is.
        candidates = min(request.top_logprobs + 1, self._vocabulary_size) if request.top_logprobs else 0
        sampling: dict[str, Any] = {
            "n": 1,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "logprobs": candidates,
            "stop_token_ids": sorted(request.stop_token_ids),
            "ignore_eos": True,
            "detokenize": False,
        }
        if request.seed is not None:
            sampling["seed"] = request.seed
        return await self.post(
            "/inference/v1/generate",
            {
                "request_id": request.key,
                "token_ids": request.prompt.tolist(),
                "sampling_params": sampling,
                "stream": False,
                "cache_salt": cache_salt,
            },
        )

    async def abort(self, keys: Iterable[str]) -> None:
        """Stop requests; each still answers with what it has."""
        await self.post("/abort_requests", {"request_ids": [_ABORT_PREFIX + key for key in keys]})

    async def check(self, seconds: float) -> None:
        """Raises EngineFailed unless vLLM says within `seconds` that it is well."""
        try:
            answer = await self._http.get("/health", timeout=seconds)
        except httpx2.TransportError as error:
            raise EngineFailed(f"vLLM does not answer: {error!r}.") from error
        if answer.status_code != 200:
            raise EngineFailed(f"vLLM is not well: it answers /health with {answer.status_code}.")

    async def get(self, path: str) -> str:
        """The text of a page."""
        try:
            return (await self._http.get(path)).text
        except httpx2.TransportError as error:
            raise EngineFailed(f"vLLM does not answer: {error!r}.") from error

    async def post(self, path: str, body: Any = None, *, params: dict[str, str] | None = None) -> Any:
        """The answer's JSON. A connection that vLLM had closed meanwhile is tried anew once."""
        for last in (False, True):
            try:
                answer = await self._http.post(path, json=body, params=params)
            except (httpx2.RemoteProtocolError, httpx2.WriteError, httpx2.ReadError) as error:
                if last:
                    raise EngineFailed(f"vLLM does not answer {path}: {error!r}.") from error
                continue
            except httpx2.TransportError as error:
                raise EngineFailed(f"vLLM does not answer {path}: {error!r}.") from error
            if answer.status_code == 200:
                return answer.json()
            if answer.status_code in (400, 422):
                raise InvalidArgument(f"vLLM refuses: {answer.text[:500]}.")
            raise EngineFailed(f"vLLM answers {path} with {answer.status_code}: {answer.text[:500]}.")
        raise AssertionError("unreachable")


class SharedMemory:
    """Memory that a child opens by path. Nothing is left behind, however this process ends."""

    def __init__(self) -> None:
        self._file = -1

    def allocate(self, size: int) -> Tensor:
        """New memory. What was given out before stays valid, but the child is no longer told of it."""
        self.close()
        self._file = os.memfd_create("rollfarm-weights")
        os.ftruncate(self._file, size)
        return torch.from_file(self._path, shared=True, size=size, dtype=torch.uint8)

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def describe(self, memory: Tensor, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """What the child needs to read `tensors`, which lie in `memory`."""
        return {
            "path": self._path,
            "size_bytes": memory.numel(),
            "tensors": [
                (
                    name,
                    str(tensor.dtype).removeprefix("torch."),
                    list(tensor.shape),
                    tensor.data_ptr() - memory.data_ptr(),
                )
                for name, tensor in tensors
            ],
        }

    def close(self) -> None:
        """Give the memory back once nobody maps it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def model_shapes(model: ModelConfig, config: EngineConfig) -> tuple[dict[str, Tensor], Limits]:
    """The model's tensors without values, under all of their names, and its limits. Raises ConfigError."""
    try:
        hf_config: Any = AutoConfig.from_pretrained(model.path)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(hf_config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {model.path} cannot be loaded: {error}") from error
    text = hf_config.get_text_config()
    most: int = text.max_position_embeddings
    if config.context_tokens > most:
        raise ConfigError(
            f"engine.context_tokens: {config.context_tokens} is more than the model's {most}. Lower it, or set 0."
        )
    limits = Limits(config.slots, config.context_tokens or most, text.vocab_size)
    return dict(skeleton.state_dict(keep_vars=True)), limits


def read_metrics(page: str) -> dict[str, float]:
    """Values of a Prometheus page by name; of several with one name the last."""
    values: dict[str, float] = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0]] = float(value)
    return values
