"""vLLM: the API server's command line, its routes, and the shape of its answers.

Weights come through rollfarm's loader, which a plugin brings into vLLM (rollfarm.vllm_gloo).
"""

import os
import secrets
import shlex
import tempfile
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from llm_proxy.engine.adapters.inference_server import InferenceServer, read_metrics
from llm_proxy.engine.adapters.labels import Labels
from llm_proxy.engine.adapters.shown import data_urls, folded
from llm_proxy.engine.adapters.versions import check_version
from llm_proxy.engine.config import EngineConfig
from llm_proxy.engine.requests import ABORT, LENGTH, STOP, Chunk, FinishReason, Limits, Request
from rollfarm.config import ConfigError
from rollfarm.errors import EngineFailed, InvalidArgument
from rollfarm.run import ModelConfig
from rollfarm.vllm_gloo import BACKEND

_TABLE = "engine.vllm"

_DEV_MODE = "VLLM_SERVER_DEV_MODE"
"""The only switch for the routes that pause and load."""

_ENVIRONMENT = {
    _DEV_MODE: "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",  # the first request for log-probabilities would compile for 15 s
}
_PRISTINE = "default"
"""What vLLM calls the weights that it was started with."""

_GENERATE = "/inference/v1/generate"
_ABORT_PREFIX = "generate-tokens-"
_FINISH: dict[str, FinishReason] = {"stop": STOP, "length": LENGTH, "abort": ABORT}


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float


class _Position(msgspec.Struct):
    logprob: float
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_Position] | None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None
    logprobs: _Logprobs | None
    weight_versions: list[_Span] | None
    finish_reason: str | None


class _Generated(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    prompt_token_ids: list[int] | None = None


class _Version(msgspec.Struct):
    version: str


class _Paused(msgspec.Struct):
    is_paused: bool


class _Weights(msgspec.Struct):
    weight_version: str


class _ModelSettings(msgspec.Struct):
    model: str
    dtype: str
    max_model_len: int
    max_logprobs: int
    logprobs_mode: str
    enable_sleep_mode: bool


class _SchedulerSettings(msgspec.Struct):
    max_num_seqs: int


class _TransferSettings(msgspec.Struct):
    backend: str


class _Settings(msgspec.Struct):
    model_config: _ModelSettings
    scheduler_config: _SchedulerSettings
    weight_transfer_config: _TransferSettings | None


class _ServerInfo(msgspec.Struct):
    vllm_config: _Settings


class VllmServer:
    """vLLM as a child on a private socket, or one that is attached."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._limits: Limits
        self._folder = tempfile.TemporaryDirectory(prefix="rollfarm-vllm-")
        self._socket = Path(self._folder.name) / "http"
        port = config.vllm.port
        self.http = InferenceServer("vLLM", _TABLE, config.vllm, port=port, socket=None if port else self._socket)
        self.labels = Labels("vLLM")
        self.version = ""
        self.is_pristine = True
        self.cannot_sleep = ""

    async def start(self, limits: Limits) -> None:
        self._limits = limits
        try:
            if self._config.vllm.url:
                await self.http.attach()
            else:
                await self.http.launch(self._command(limits), _ENVIRONMENT | self._environment())
            await self._examine()
        except (EngineFailed, InvalidArgument) as failure:
            await self.stop()
            raise ConfigError(f"{_TABLE}: {failure.problem} Is it vLLM?") from failure
        except ConfigError:
            await self.stop()
            raise

    async def _examine(self) -> None:
        self.version = (await self.http.read("/version", _Version)).version
        check_version("vLLM", self.version, table=_TABLE)
        await self._check_settings()
        paused = (await self.http.read("/is_paused", _Paused)).is_paused
        label = (await self.http.read("/weight_info", _Weights)).weight_version
        self.is_pristine = label == _PRISTINE and not paused
        if paused:
            await self._rouse()
        await self._check_vocabulary()

    async def _rouse(self) -> None:
        """Undo what a host that is gone has left."""
        if not self.cannot_sleep:
            await self.wake_up(weights_alone=False)
        await self.go_on()

    def _command(self, limits: Limits) -> list[str]:
        vllm, port = self._config.vllm, self._config.vllm.port
        return [
            *(str(vllm.python.absolute()), "-m", "rollfarm.vllm_gloo", *self._needed(limits)),
            *(("--host", "127.0.0.1", "--port", str(port)) if port else ("--uds", str(self._socket))),
            *("--kv-cache-memory-bytes", str(int(self._config.kv_cache)), "--seed", str(secrets.randbits(31))),
            *("--distributed-executor-backend", "uni", "--enforce-eager"),
            *("--served-model-name", "policy", "--uvicorn-log-level", "warning", *vllm.args),
        ]

    def _needed(self, limits: Limits) -> list[str]:
        """What an attached vLLM is started with as well."""
        return [
            *("--model", self._model.path, "--dtype", self._model.dtype),
            *("--max-model-len", str(limits.context_token_count), "--max-num-seqs", str(limits.slot_count)),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
            *("--weight-transfer-config", '{"backend": "rollfarm"}'),
        ]

    def _environment(self) -> dict[str, str]:
        own = {"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}
        if self._config.threads:
            own["OMP_NUM_THREADS"] = str(self._config.threads)
        if Path(self._model.path).is_dir():
            own["HF_HUB_OFFLINE"] = "1"
        return own

    async def _check_settings(self) -> None:
        wrong = [] if await self.http.has(_GENERATE) else ["it has no --enable-scale-out"]
        if await self.http.has("/is_paused"):
            found = (await self.http.read("/server_info?config_format=json", _ServerInfo)).vllm_config
            if not found.model_config.enable_sleep_mode:  # it then says that it sleeps, and does not
                self.cannot_sleep = "This vLLM was started without --enable-sleep-mode, which it has on a GPU alone."
            wrong += _differences(found, self._model, self._limits)
        else:
            wrong.append(f"its environment has no {_DEV_MODE}=1")
        if wrong:
            needed = shlex.join(self._needed(self._limits))
            raise ConfigError(
                f"{_TABLE}: vLLM was started otherwise than needed: {', '.join(wrong)}. Start it with "
                f"`{_DEV_MODE}=1 python -m rollfarm.vllm_gloo {needed}`, and where it listens."
            )

    async def _check_vocabulary(self) -> None:
        """vLLM refuses to stop at a token that its model does not have."""
        size = self._limits.vocabulary_size
        if not await self._knows(size - 1) or await self._knows(size):
            raise ConfigError(
                f"{_TABLE}: vLLM's vocabulary is not the {size} tokens of {self._model.path}: it serves another model. "
                "Start it with the model of model.path."
            )

    async def _knows(self, token: int) -> bool:
        request = Request("vocabulary", prompt=np.zeros(1, np.int32), max_tokens=1, stop_token_ids=frozenset([token]))
        try:
            await self.http.ask(_GENERATE, _Generated, self._body(request, cache_salt="vocabulary") | {"stream": False})
        except InvalidArgument:
            return False
        return True

    async def stop(self) -> None:
        await self.http.stop()
        self._folder.cleanup()

    async def generate(self, request: Request, *, cache_key: str) -> AsyncGenerator[Chunk, None]:
        body = self._body(request, cache_salt=cache_key)
        if request.images:
            answer = await self._answer_about_images(body)
            if answer.prompt_token_ids != request.prompt.tolist():
                raise EngineFailed("vLLM makes other tokens of the images than env_manager: give both the same model.")
            yield self._chunk(answer.choices[0], request)
            return
        async with aclosing(self.http.answers(_GENERATE, _Generated, body)) as answers:
            async for answer in answers:
                yield self._chunk(answer.choices[0], request)

    async def _answer_about_images(self, body: Mapping[str, Any]) -> _Generated:
        """One half of vLLM forgets images a moment before the other when its caches are cleared. What asks for one
        meanwhile fails, and succeeds when it is sent again."""
        try:
            return await self.http.ask(_GENERATE, _Generated, body)
        except EngineFailed:
            return await self.http.ask(_GENERATE, _Generated, body)

    def _body(self, request: Request, *, cache_salt: str) -> dict[str, Any]:
        # Of k candidates vLLM gives one place to the sampled token, however unlikely it is.
        candidates = min(request.top_logprobs + 1, self._limits.vocabulary_size) if request.top_logprobs else 0
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
        interval = self._config.vllm.stream_interval
        if interval:
            sampling["stream_interval"] = interval
        return {
            "request_id": request.key,
            "token_ids": request.prompt.tolist(),
            "sampling_params": sampling,
            "stream": interval > 0 and not request.images,
            "cache_salt": cache_salt,
            **(_with_images(request, cache_salt=cache_salt) if request.images else {}),
        }

    def _chunk(self, choice: _Choice, request: Request) -> Chunk:
        content = (choice.logprobs and choice.logprobs.content) or []
        chunk = Chunk(
            request.key,
            token_ids=choice.token_ids or [],
            logprobs=[position.logprob for position in content],
            spans=[(self.labels.version(span.version), span.end - span.start) for span in choice.weight_versions or []],
            finish=_FINISH.get(choice.finish_reason, ABORT) if choice.finish_reason else None,
        )
        if request.top_logprobs:
            chunk.top = [_likeliest(position.top_logprobs, request.top_logprobs) for position in content]
        self.http.verify(
            _GENERATE, chunk, vocabulary_size=self._limits.vocabulary_size, top_logprobs=request.top_logprobs
        )
        return chunk

    async def abort(self, keys: AbstractSet[str]) -> None:
        await self.http.tell("/abort_requests", {"request_ids": [_ABORT_PREFIX + key for key in keys]})

    async def stand_still(self, *, keep_cache: bool) -> None:
        params = {"mode": "keep", "clear_cache": "false" if keep_cache else "true"}
        await self.http.tell("/pause", params=params)

    async def go_on(self) -> None:
        await self.http.tell("/resume")

    async def load(self, label: str, weights: Mapping[str, Any], *, keep_cache: bool) -> None:
        """A kept cache stays within reach of what runs alone: later requests come with another cache key."""
        await self.http.tell("/start_weight_update")
        await self.http.tell("/update_weights", {"update_info": weights})
        await self.http.tell("/finish_weight_update", {"weight_version": label})

    async def rename_weights(self, label: str) -> None:
        await self.http.tell("/update_weight_version", {"new_version": label})

    async def fall_asleep(self, *, discard_weights: bool) -> None:
        await self.http.tell("/sleep", params={"level": "2" if discard_weights else "1"})

    async def wake_up(self, *, weights_alone: bool) -> None:
        await self.http.tell("/wake_up", params={"tags": "weights"} if weights_alone else None)

    async def kv_cache_usage(self) -> float:
        return read_metrics(await self.http.page("/metrics")).get("vllm:kv_cache_usage_perc", 0.0)

    async def check(self, seconds: float) -> None:
        await self.http.check(seconds)


def _with_images(request: Request, *, cache_salt: str) -> dict[str, Any]:
    """What its vision tower made of an image vLLM keeps by the name that the image has, so each version's have other
    names."""
    return {
        "token_ids": folded(request).tolist(),
        "content_parts": [
            {"type": "image_url", "url": url, "uuid": f"{cache_salt}/{sha256(image.data).hexdigest()}"}
            for image, url in zip(request.images, data_urls(request), strict=True)
        ],
        "return_token_ids": True,
    }


def _differences(found: _Settings, model: ModelConfig, limits: Limits) -> list[str]:
    """What of vLLM's settings does not do."""
    settings, slots = found.model_config, found.scheduler_config.max_num_seqs
    backend = found.weight_transfer_config.backend if found.weight_transfer_config is not None else "none"
    needs = {
        f"it serves {settings.model}": Path(settings.model).absolute() == Path(model.path).absolute(),
        f"its dtype is {settings.dtype}": settings.dtype.removeprefix("torch.") == model.dtype,
        f"its context is {settings.max_model_len}": settings.max_model_len >= limits.context_token_count,
        f"its slots are {slots}": slots >= limits.slot_count,
        f"its log-probabilities are {settings.logprobs_mode}": settings.logprobs_mode == "processed_logprobs",
        f"it gives at most {settings.max_logprobs} log-probabilities": settings.max_logprobs == -1,
        f"its weights come by {backend}": backend == BACKEND,
    }
    return [problem for problem, is_met in needs.items() if not is_met]


def _likeliest(candidates: list[_Candidate], width: int) -> tuple[list[int], list[float]]:
    """vLLM puts the sampled token among them even where it is not."""
    unique = {candidate.token_id: candidate.logprob for candidate in candidates}
    best = sorted(unique.items(), key=lambda item: -item[1])[:width]
    if len(best) < width:
        raise EngineFailed(f"vLLM answers {_GENERATE} with {len(best)} of the {width} likeliest tokens.")
    return [token for token, _ in best], [logprob for _, logprob in best]
