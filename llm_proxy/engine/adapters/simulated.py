"""The simulated engine: computes nothing, and takes the time that a model on one GPU would.

Batching, slots, pauses and updates are those of the embedded engine. A token is a function of its position and of the
weights, which are one number: the content that arrived decides the tokens, and not the version that it was labelled
with. So whoever knows both can tell whether each token came from the weights that it claims. Imports torch only to
receive weights.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llm_proxy.engine.adapters import Deliver
from llm_proxy.engine.adapters.threaded import ThreadedAdapter
from llm_proxy.engine.batching import Segment
from llm_proxy.engine.config import EngineConfig, SimulatedConfig
from llm_proxy.engine.requests import Limits
from llm_proxy.engine.stepping import Sampled
from rollfarm.testing import simulated_logprob, simulated_token
from rollfarm.threads import in_thread

if TYPE_CHECKING:
    from torch import Tensor

    from llm_proxy.engine.receiver import Receiver

WEIGHT = "simulated.version"
"""The model's one tensor: int64[1]."""

CONTEXT_TOKENS = 32_768
ROWS_PER_SLOT = 4

LATE_SECONDS = 0.02
"""A step that begins so late after another was delayed by this machine, and not by the one that is simulated."""


class SimulatedModel:
    """Sleeps for as long as a step takes, and then knows its tokens."""

    def __init__(self, config: SimulatedConfig, *, slots: int, context_tokens: int) -> None:
        self.limits = Limits(slots, context_tokens, config.vocabulary_size)
        self.row_count = ROWS_PER_SLOT * slots
        self.context_tokens = context_tokens
        self._config = config
        self._has_cache = True
        self._weight: int | None = 0
        self._free_at = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether it has a cache and weights."""
        return self._has_cache and self._weight is not None

    def step(self, segments: Sequence[Segment], seeds: Sequence[int]) -> Sampled:
        """One token for each segment that samples, when their time is over."""
        now = time.monotonic()
        began = self._free_at if now - self._free_at < LATE_SECONDS else now
        self._free_at = began + step_seconds(self._config, segments)
        time.sleep(max(0.0, self._free_at - now))
        sampled = Sampled([], [], [])
        for sequence in (segment.sequence for segment in segments if segment.samples):
            token, logprob = self._token(sequence.length)
            sampled.token_ids.append(token)
            sampled.logprobs.append(logprob)
            sampled.top.append(self._likeliest(token, logprob, sequence.request.top_logprobs))
        return sampled

    def _token(self, position: int) -> tuple[int, float]:
        assert self._weight is not None
        token = simulated_token(position, self._weight, self.limits.vocabulary_size)
        return token, simulated_logprob(token, self._weight)

    def _likeliest(self, token: int, logprob: float, count: int) -> tuple[list[int], list[float]] | None:
        """The token, then the ids after it, each a nat less likely."""
        if not count:
            return None
        ids = [(token + rank) % self.limits.vocabulary_size for rank in range(count)]
        return ids, [logprob - rank for rank in range(count)]

    def load(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Take the number that arrived."""
        self._weight = int(dict(tensors)[WEIGHT].item())

    def scrub(self) -> None:
        """Its cache holds nothing."""

    def sleep(self, *, discard_weights: bool) -> None:
        """Own nothing until `wake_up`; of discarded weights, nothing until `load`."""
        self._has_cache = False
        if discard_weights:
            self._weight = None

    def wake_up(self) -> None:
        self._has_cache = True


def step_seconds(config: SimulatedConfig, segments: Sequence[Segment]) -> float:
    """How long one step takes: its decoding requests, and the prompt tokens that share it."""
    prompt_tokens = sum(segment.count for segment in segments if segment.count > 1)
    return config.step_seconds + len(segments) * config.request_seconds + prompt_tokens * config.prefill_seconds


class SimulatedAdapter(ThreadedAdapter):
    """Sleeps; makes a receiver when weights are first spoken of."""

    name = "simulated"

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._receiver: asyncio.Future[Receiver] | None = None

    async def start(self, deliver: Deliver) -> None:
        model = SimulatedModel(
            self._config.simulated,
            slots=self._config.slots,
            context_tokens=self._config.context_tokens or CONTEXT_TOKENS,
        )
        self._begin(model, deliver)

    async def _receiving(self) -> "Receiver":
        """The receiver; torch, which it needs, is imported beside the loop."""
        if self._receiver is None:
            self._receiver = in_thread(lambda: _make_receiver(self._config.weights_seconds))
        return await asyncio.shield(self._receiver)


def _make_receiver(seconds: float) -> "Receiver":
    import torch

    from llm_proxy.engine.receiver import Receiver

    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
    return Receiver({WEIGHT: weight}, seconds=seconds)
