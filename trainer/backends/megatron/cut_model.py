"""A model cut over ranks that is asked about tokens, by Megatron-Core's pipeline schedule."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from trainer.backend_config import MegatronConfig
from trainer.backends import Settings
from trainer.backends.megatron import cpu
from trainer.backends.megatron.architecture import architecture_of, check_fits, read_config, rotary_frequencies
from trainer.backends.megatron.groups import meet
from trainer.backends.megatron.layout import layout
from trainer.backends.megatron.model import Decoder, transformer_config
from trainer.backends.megatron.packing import Packed, pack
from trainer.backends.megatron.weights import Weights
from trainer.backends.passes import world_size
from trainer.micro_batches import plan
from trainer.rows import Row, policy_token_count

Then = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""(f32[P] log-probabilities and entropies of a micro-batch, the places of its rows) to the loss, on the last stage."""

_Finish = Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor, None]]
"""What the last stage's model found, to what Megatron-Core wants of a loss."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A micro-batch."""

    packed: Packed
    places: Sequence[int]


class CutModel:
    """What scorers and backends have alike. Its weights are not set yet."""

    def __init__(self, settings: Settings, config: MegatronConfig) -> None:
        """Raises ConfigError."""
        self._settings = settings
        self._hf_config = read_config(settings.path)
        self._arch = architecture_of(self._hf_config)
        check_fits(self._arch, config)
        frequencies = rotary_frequencies(self._hf_config).to(settings.device)
        cpu.prepare()
        self._groups = meet(layout(config, world_size()), settings.device)
        # As many positions on every rank that shares them.
        self._multiple = config.tensor_parallel if config.sequence_parallel else 1
        with cpu.running():
            self._model = Decoder(
                transformer_config(self._arch, config, settings.compute_dtype),
                self._arch,
                frequencies,
                self._groups.all,
            ).to(settings.device)

    def score(self, rows: Sequence[Row], *, temperature: float) -> Tensor:
        counts = [row.policy_tokens for row in rows]
        ends = torch.tensor(counts).cumsum(0).tolist()
        scores_P = torch.zeros(policy_token_count(rows))

        def keep(logp_P: Tensor, entropy_P: Tensor, places: Sequence[int]) -> Tensor:
            del entropy_P
            if self._groups.speaks and places:
                parts = logp_P.float().cpu().split([counts[place] for place in places])
                for place, part in zip(places, parts, strict=True):
                    scores_P[ends[place] - len(part) : ends[place]] = part
            return logp_P.new_zeros(())

        with torch.no_grad():
            self._passes(rows, keep, temperature=temperature, forward_only=True)
        dist.all_reduce(scores_P)
        return scores_P

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def reload(self) -> None:
        self._move(self._settings.device)

    @property
    def _chunk(self) -> nn.Module:
        """What the schedule runs."""
        return self._model

    def _move(self, device: torch.device) -> None:
        for param in self._model.parameters():
            param.data = param.data.to(device)

    def _passes(self, rows: Sequence[Row], then: Then, *, temperature: float, forward_only: bool) -> None:
        """Every micro-batch of this rank's share of the rows through the pipeline, and back unless `forward_only`."""
        dealt = plan(rows, self._groups.layout.data, self._settings.micro_batch_tokens)[self._groups.rows_rank]

        def step(
            batches: Iterator[_Work], model: nn.Module
        ) -> tuple[Any, Callable[[Any], tuple[Tensor, Tensor, None]]]:
            work = next(batches)

            def finish(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, None]:
                # The second is a number of tokens to divide by, and everything is divided already.
                return then(*found, work.places), torch.zeros((), dtype=torch.int), None

            return model(work.packed, temperature), finish

        with cpu.running():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=self._work(rows, dealt),
                model=self._chunk,
                num_microbatches=len(dealt),
                # Shapes are told from stage to stage, as no two packs are alike.
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _work(self, rows: Sequence[Row], dealt: Sequence[Sequence[int]]) -> Iterator[_Work]:
        context = self._groups.all.cp
        for places in dealt:
            packed = pack(
                [rows[place] for place in places],
                rank=context.rank(),
                size=context.size(),
                multiple=self._multiple,
                device=self._settings.device,
            )
            yield _Work(packed, places)


class MegatronScorer(CutModel):
    """A Scorer that never learns."""

    def __init__(self, settings: Settings, config: MegatronConfig) -> None:
        """Raises ConfigError."""
        super().__init__(settings, config)
        self._model.requires_grad_(False)
        Weights(self._arch, self._groups, dict(self._model.named_parameters())).read(settings.path)
