"""SGLang: its command line, its routes, and the shape of its answers.

Seeds are passed on; SGLang honours them only with --enable-deterministic-inference, which none of its attention
backends for CPU has. Its top_p is a share of all tokens' probability, not of that of the top_k alone.
"""

import asyncio
import base64
import json
import pickle
import shlex
import uuid
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoConfig

from llm_proxy.engine.adapters.inference_server import InferenceServer
from llm_proxy.engine.adapters.labels import Labels
from llm_proxy.engine.adapters.shown import data_urls, folded
from llm_proxy.engine.adapters.versions import check_version
from llm_proxy.engine.config import EngineConfig
from llm_proxy.engine.requests import ABORT, LENGTH, STOP, Chunk, FinishReason, Limits, Request
from rollfarm.config import ConfigError
from rollfarm.errors import EngineFailed, InvalidArgument
from rollfarm.ports import free_port
from rollfarm.run import ModelConfig
from rollfarm.sglang_loader import LOADER

_TABLE = "engine.sglang"
_ENVIRONMENT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
_RESERVED_TOKENS = 8
"""Of its context SGLang gives a few to nobody."""

_PIXELS_MB = 256
"""Room for the pixels of images. Without any SGLang would make text of a prompt's tokens, and other tokens of that."""

_PRISTINE = "default"
"""What SGLang calls the weights that it was started with."""

_ALIVE = "/model_info"
"""Answered while SGLang stands still; /ready is not."""

_GENERATE = "/generate"
_FINISH: dict[str, FinishReason] = {"stop": STOP, "length": LENGTH, "abort": ABORT}

_Candidate = tuple[float | None, int, str | None]
"""A log-probability, None where it is minus infinity; a token; its text, which is not asked for."""


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: str
    status_code: int | None = None
    message: str = ""


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None
    prompt_tokens: int = 0
    output_token_logprobs: list[_Candidate] = []
    output_top_logprobs: list[list[_Candidate]] = []
    output_token_sampling_mask: list[list[int]] = []
    """For each token, which ones could have been sampled, the likeliest first."""

    output_token_sampling_logprobs: list[list[float]] = []
    """Their log-probabilities."""

    weight_versions: list[_Span] = []


class _Generated(msgspec.Struct):
    """Of a stream each one holds all since its beginning; only the last one has versions."""

    output_ids: list[int]
    meta_info: _Meta


class _Settings(msgspec.Struct):
    version: str
    model_path: str
    dtype: str
    max_running_requests: int
    max_req_input_len: int
    custom_weight_loader: list[str]
    disable_overlap_schedule: bool
    sampling_mask_max_tokens: int
    enable_memory_saver: bool
    device: str
    tp_size: int
    mm_preprocess_cache_size_mb: int | None = None


class _Weights(msgspec.Struct):
    weight_version: str


class _Load(msgspec.Struct):
    token_usage: float


class _Loads(msgspec.Struct):
    loads: list[_Load]


class SglangServer:
    """SGLang as a child on loopback, or one that is attached."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self._limits: Limits
        self._port = config.sglang.port or free_port()
        self.http = InferenceServer("SGLang", _TABLE, config.sglang, port=self._port, health=_ALIVE)
        self.labels = Labels("SGLang")
        self.version = ""
        self.is_pristine = True
        self.cannot_sleep = ""
        self._media_tokens: list[int] = []
        self._ranks = 1
        self._names: dict[str, str] = {}
        """What SGLang calls each open request: it aborts all whose names begin alike, so they are equally long."""

        self._given_away: list[str] = []
        """Kinds of memory that are freed while it sleeps."""

    async def start(self, limits: Limits) -> None:
        self._limits = limits
        self._media_tokens = _media_tokens(self._model)
        try:
            if self._config.sglang.url:
                await self.http.attach()
            else:
                await self.http.launch(self._command(limits), _ENVIRONMENT | self._environment())
            await self._examine()
        except (EngineFailed, InvalidArgument) as failure:
            await self.http.stop()
            raise ConfigError(f"{_TABLE}: {failure.problem} Is it SGLang?") from failure
        except ConfigError:
            await self.http.stop()
            raise

    def _command(self, limits: Limits) -> list[str]:
        sglang = self._config.sglang
        return [
            *(str(sglang.python.absolute()), "-m", "rollfarm.sglang_loader", *self._needed(limits)),
            *("--host", "127.0.0.1", "--port", str(self._port), "--log-level", "warning"),
            *("--max-total-tokens", str(int(self._config.kv_cache) // _token_bytes(self._model))),
            *("--sleep-on-idle", *sglang.args),
        ]

    def _needed(self, limits: Limits) -> list[str]:
        """What an attached SGLang is started with as well."""
        return [
            *("--model-path", self._model.path, "--dtype", self._model.dtype, "--skip-tokenizer-init"),
            *("--context-length", str(limits.context_token_count + _RESERVED_TOKENS)),
            *("--max-running-requests", str(limits.slot_count), "--custom-weight-loader", LOADER),
            # What would be computed ahead at an update would come from the old weights, labelled as from the new.
            "--disable-overlap-schedule",
            *("--sampling-mask-max-tokens", str(limits.vocabulary_size)),
            *(() if limits.image_token_id is None else ("--mm-preprocess-cache-size-mb", str(_PIXELS_MB))),
        ]

    def _environment(self) -> dict[str, str]:
        own: dict[str, str] = {}
        if self._config.threads:
            own["OMP_NUM_THREADS"] = str(self._config.threads)
        if Path(self._model.path).is_dir():
            own["HF_HUB_OFFLINE"] = "1"
        return own

    async def _examine(self) -> None:
        settings = await self.http.read("/server_info", _Settings)
        self.version, self._ranks = settings.version, settings.tp_size
        check_version("SGLang", self.version, table=_TABLE)
        if not settings.enable_memory_saver or settings.device == "cpu":
            self.cannot_sleep = "This SGLang was started without --enable-memory-saver, or on a CPU."
        if wrong := _differences(settings, self._model, self._limits):
            raise ConfigError(
                f"{_TABLE}: SGLang was started otherwise than needed: {', '.join(wrong)}. Start it with "
                f"`python -m rollfarm.sglang_loader {shlex.join(self._needed(self._limits))}`, and where it listens."
            )
        self.is_pristine = (await self.http.read(_ALIVE, _Weights)).weight_version == _PRISTINE
        if not self.is_pristine:  # a host that is gone may have left it standing still, with requests
            await self.http.tell("/continue_generation", {})
            await self.http.tell("/abort_request", {"abort_all": True})
        await self._check_vocabulary()

    async def _check_vocabulary(self) -> None:
        """SGLang refuses to be biased towards a token that its model does not have."""
        size = self._limits.vocabulary_size
        if not await self._knows(size - 1) or await self._knows(size):
            raise ConfigError(
                f"{_TABLE}: SGLang's vocabulary is not the {size} tokens of {self._model.path}: it serves another "
                "model. Start it with the model of model.path."
            )

    async def _knows(self, token: int) -> bool:
        sampling = {"max_new_tokens": 1, "logit_bias": {str(token): 0.0}}
        try:
            await self.http.tell(_GENERATE, {"input_ids": [0], "sampling_params": sampling})
        except InvalidArgument:
            return False
        return True

    async def stop(self) -> None:
        await self.http.stop()

    async def check(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._round_trip()
        except TimeoutError:
            raise EngineFailed(f"SGLang does not answer within {seconds:g} s.") from None

    async def _round_trip(self) -> None:
        """Return once SGLang's scheduler has done what it was told before."""
        await self.http.tell("/slow_down", {"forward_sleep_time": None})

    async def kv_cache_usage(self) -> float:
        loads = (await self.http.read("/v1/loads", _Loads)).loads
        return max((load.token_usage for load in loads), default=0.0)

    async def stand_still(self, *, keep_cache: bool) -> None:
        await self.http.tell("/pause_generation", {"mode": "in_place" if keep_cache else "retract"})
        await self._round_trip()

    async def go_on(self) -> None:
        await self.http.tell("/continue_generation", {})

    async def rename_weights(self, label: str) -> None:
        await self.http.tell("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def load(self, label: str, weights: Mapping[str, Any], *, keep_cache: bool) -> None:
        await self.http.tell("/begin_weight_update", {"selector": "all"})
        update = {
            "serialized_named_tensors": [_payload(weights)] * self._ranks,
            "load_format": LOADER,
            "flush_cache": not keep_cache,
            "weight_version": label,
        }
        await self.http.tell("/update_weights_from_tensor", update)
        await self.http.tell("/end_weight_update", {})

    async def fall_asleep(self, *, discard_weights: bool) -> None:
        wanted = ["kv_cache", "weights"] if discard_weights else ["kv_cache"]
        if kinds := [kind for kind in wanted if kind not in self._given_away]:
            await self.http.tell("/release_memory_occupation", {"tags": kinds})
            self._given_away += kinds

    async def wake_up(self, *, weights_alone: bool) -> None:
        if kinds := [kind for kind in self._given_away if kind == "weights" or not weights_alone]:
            await self.http.tell("/resume_memory_occupation", {"tags": kinds})
            self._given_away = [kind for kind in self._given_away if kind not in kinds]

    async def generate(self, request: Request, *, cache_key: str) -> AsyncGenerator[Chunk, None]:
        """Where it stops at tokens, SGLang also stops at the model's own last ones: it then goes on from there."""
        made: list[int] = []
        spans: list[tuple[int, int]] = []
        part, goes_on = request, True
        while goes_on:
            began, goes_on = len(made), False
            async with aclosing(self._generate(part, cache_key=cache_key)) as chunks:
                async for chunk in chunks:
                    made += chunk.token_ids
                    chunk.spans = spans = spans + chunk.spans
                    if chunk.finish == STOP and made[began:] and made[-1] not in request.stop_token_ids:
                        goes_on = len(made) < request.max_tokens
                        chunk.finish = None if goes_on else LENGTH
                    yield chunk
            prompt = np.append(request.prompt, np.array(made, np.int32))
            part = replace(request, prompt=prompt, max_tokens=request.max_tokens - len(made))

    async def _generate(self, request: Request, *, cache_key: str) -> AsyncGenerator[Chunk, None]:
        self._names[request.key] = uuid.uuid4().hex
        count = 0
        try:
            body = self._body(request, cache_key=cache_key)
            async with aclosing(self.http.answers(_GENERATE, _Generated, body)) as answers:
                async for answer in answers:
                    _check_prompt(answer, request)
                    chunk = self._chunk(answer, request, after=count)
                    count += len(chunk.token_ids)
                    yield chunk
        finally:
            del self._names[request.key]

    def _body(self, request: Request, *, cache_key: str) -> dict[str, Any]:
        truncates = self._truncates(request)
        # Beside top_p SGLang reports what could have been sampled only with a top_k.
        top_k = request.top_k or (self._limits.vocabulary_size if truncates else -1)
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": top_k,
            "stop_token_ids": sorted(request.stop_token_ids),
            "ignore_eos": not request.stop_token_ids,
        }
        if request.seed is not None:
            sampling["sampling_seed"] = request.seed
        interval = self._config.sglang.stream_interval
        if interval:
            sampling["stream_interval"] = interval
        body: dict[str, Any] = {
            "rid": self._names[request.key],
            "input_ids": request.prompt.tolist(),
            "sampling_params": sampling,
            "stream": interval > 0,
            "return_logprob": True,
            "top_logprobs_num": request.top_logprobs,
            "extra_key": cache_key,
        }
        if truncates:
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
        if request.images:
            body |= _with_images(request, self._media_tokens)
        return body

    def _truncates(self, request: Request) -> bool:
        """Whether some tokens cannot be sampled. SGLang's plain log-probabilities know nothing of that."""
        return request.temperature > 0 and (request.top_p < 1 or 0 < request.top_k < self._limits.vocabulary_size)

    def _chunk(self, answer: _Generated, request: Request, *, after: int) -> Chunk:
        """What the answer holds after so many tokens."""
        meta = answer.meta_info
        token_ids = answer.output_ids[after:]
        if self._truncates(request):
            candidates = [
                list(zip(ids, logprobs, strict=False))
                for ids, logprobs in zip(
                    meta.output_token_sampling_mask[after:], meta.output_token_sampling_logprobs[after:], strict=False
                )
            ]
            logprobs = [dict(row).get(token, -inf) for row, token in zip(candidates, token_ids, strict=False)]
        else:
            top = meta.output_top_logprobs[after:]
            candidates = [[(token, _finite(logprob)) for logprob, token, _ in row] for row in top]
            logprobs = [_finite(logprob) for logprob, _, _ in meta.output_token_logprobs[after:]]
        chunk = Chunk(
            request.key,
            token_ids=token_ids,
            logprobs=logprobs,
            spans=[
                (self.labels.version(span.version), span.end - span.start)
                for span in meta.weight_versions
                if span.end > span.start
            ],
            finish=meta.finish_reason and self._finish(meta.finish_reason),
        )
        if request.top_logprobs:
            chunk.top = [_likeliest(row, request.top_logprobs) for row in candidates]
        self.http.verify(
            _GENERATE, chunk, vocabulary_size=self._limits.vocabulary_size, top_logprobs=request.top_logprobs
        )
        return chunk

    def _finish(self, said: _Finish) -> FinishReason:
        """A stream that has begun ends so, too, where it would have been refused."""
        self.http.check_status(_GENERATE, said.status_code or 200, said.message)
        return _FINISH.get(said.type, ABORT)

    async def abort(self, keys: AbstractSet[str]) -> None:
        for name in [self._names[key] for key in keys if key in self._names]:
            await self.http.tell("/abort_request", {"rid": name})


def _differences(found: _Settings, model: ModelConfig, limits: Limits) -> list[str]:
    """What of SGLang's settings does not do."""
    slots, longest = found.max_running_requests, found.max_req_input_len
    needs = {
        f"it serves {found.model_path}": Path(found.model_path).absolute() == Path(model.path).absolute(),
        f"its dtype is {found.dtype}": found.dtype == model.dtype,
        f"its slots are {slots}": slots >= limits.slot_count,
        f"its context and its KV cache hold {longest} tokens": longest >= limits.context_token_count,
        f"it has no loader {LOADER}": LOADER in found.custom_weight_loader,
        "it computes ahead": found.disable_overlap_schedule,
        f"its sampling masks hold {found.sampling_mask_max_tokens} tokens": found.sampling_mask_max_tokens
        >= limits.vocabulary_size,
        "it keeps no pixels": limits.image_token_id is None or bool(found.mm_preprocess_cache_size_mb),
    }
    return [problem for problem, is_met in needs.items() if not is_met]


def _with_images(request: Request, media_tokens: list[int]) -> dict[str, Any]:
    """The images and their places. Raises InvalidArgument where SGLang would see more of them than there are."""
    prompt = folded(request)
    if np.isin(prompt, media_tokens).sum() != len(request.images):
        raise InvalidArgument(
            "The policy wrote a token that stands for an image or a video, which SGLang cannot tell from one that is "
            "shown.",
            field="images",
        )
    return {"input_ids": prompt.tolist(), "image_data": data_urls(request)}


def _check_prompt(answer: _Generated, request: Request) -> None:
    """Raise EngineFailed where the images were not those tokens to SGLang."""
    if request.images and answer.meta_info.prompt_tokens != len(request.prompt):
        raise EngineFailed("SGLang makes other tokens of the images than env_manager: give both the same model.")


def _media_tokens(model: ModelConfig) -> list[int]:
    """Ids that SGLang takes for what is to be seen."""
    config = AutoConfig.from_pretrained(model.path)
    found = [getattr(config, name, None) for name in ("image_token_id", "video_token_id")]
    return [token for token in found if token is not None]


def _token_bytes(model: ModelConfig) -> int:
    """Keys and values of one token. Models that compress them need less."""
    text: Any = AutoConfig.from_pretrained(model.path).get_text_config()
    heads: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype: torch.dtype = getattr(torch, model.dtype)
    return 2 * text.num_hidden_layers * heads * size * dtype.itemsize


def _payload(weights: Mapping[str, Any]) -> str:
    """One named tensor, as SGLang takes them: the bytes of what `load` is to know."""
    description = torch.tensor(list(json.dumps(weights).encode()), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("rollfarm", description)])).decode()


def _finite(logprob: float | None) -> float:
    """JSON has no infinity."""
    return -inf if logprob is None else logprob


def _likeliest(candidates: list[tuple[int, float]], width: int) -> tuple[list[int], list[float]]:
    """The first of `candidates`; where these are fewer, also tokens that could not be sampled."""
    best = dict(candidates[:width])
    token = 0
    while len(best) < width:
        best.setdefault(token, -inf)
        token += 1
    return list(best), list(best.values())
