"""The small HTTP server, playing SGLang."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llm_proxy.engine.config import EngineConfig, EngineRoot, SglangConfig
from rollfarm.config import Listen
from rollfarm.run import ModelConfig
from tests.engine.kit import CONTEXT, VOCABULARY
from tests.engine.stand_in import Said, VllmStandIn


def attached_root(model: Path, url: str, *, stream_interval: int = 0) -> EngineRoot:
    """An engine host beside the SGLang at `url`."""
    sglang = SglangConfig(url=url, start_seconds=3, stream_interval=stream_interval)
    return EngineRoot(
        model=ModelConfig(path=str(model)),
        engine=EngineConfig(adapter="sglang", sglang=sglang, listen=Listen(drain_seconds=0)),
    )


class SglangStandIn(VllmStandIn):
    """The same small server, answering as SGLang does."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self.bodies: list[Any] = []
        """Of the calls."""

        self.settings = {
            "version": "0.5.23",
            "model_path": model_path,
            "dtype": "float32",
            "max_running_requests": 64,
            "max_req_input_len": CONTEXT,
            "custom_weight_loader": ["rollfarm.sglang_loader.load"],
            "disable_overlap_schedule": True,
            "sampling_mask_max_tokens": VOCABULARY,
            "enable_memory_saver": True,
            "device": "cuda",
            "tp_size": 2,
        }

    def say(self, path: str, body: Any) -> Said | None:
        name = urlsplit(path).path
        if name in self.answers:
            return self.answers[name](body)
        if name == "/generate":
            return self.generated(body)
        if body is not None:
            self.calls.append(path)
            self.bodies.append(body)
            self.label = body.get("new_version") or body.get("weight_version") or self.label
        return 200, {
            "/server_info": self.settings,
            "/model_info": {"weight_version": self.label},
            "/v1/loads": {"loads": [{"token_usage": 0.25}]},
        }.get(name, {})

    def generated(self, body: Any) -> Said:
        sampling = body["sampling_params"]
        if any(int(token) >= self.vocabulary_size for token in sampling.get("logit_bias", {})):
            return 400, {"error": {"message": "logit_bias must has keys in the vocabulary"}}
        return 200, generated(sampling["max_new_tokens"], self.label)


def generated(count: int, label: str, **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": [n % VOCABULARY for n in range(count)],
        "meta_info": {
            "finish_reason": {"type": "length", "length": count},
            "output_token_logprobs": [[-0.5, n % VOCABULARY, None] for n in range(count)],
            "weight_versions": [{"version": label, "start": 0, "end": count}],
        }
        | meta,
    }
