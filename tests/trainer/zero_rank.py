"""Two ranks that try whatever DeepSpeed's backends can do, one after the other: MODEL FOLDER.

One pair of processes does it all, since each takes seconds to import DeepSpeed. Rank 0 writes what it found into
FOLDER/found.json, and tensors beside it.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.trainer.conftest import random_rows
from trainer.algorithms.losses import Metrics
from trainer.backend_config import DeepSpeedConfig
from trainer.backends import Backend, Settings, zero
from trainer.backends import logprobs as token_chunks
from trainer.backends.scoring import TokenLogprobs, TokenValues
from trainer.backends.zero import ZeroBackend, frozen
from trainer.config import TrainerConfig
from trainer.micro_batches import MicroBatch
from trainer.objective import LossFn, policy_objective
from trainer.ranks import join, rank
from trainer.rows import Row

ROWS = (9, 9, 9, 9, 1, 9)
"""Of each step: of a single one, a rank has nothing."""

STEPS = len(ROWS)
SAVED = 3
"""Steps that the checkpoint on the way holds."""

LR = 1e-3
TEMPERATURE = 0.8
OBJECTIVE = policy_objective(TrainerConfig())

STAGES = {
    "1": DeepSpeedConfig(stage=1),
    "2": DeepSpeedConfig(stage=2),
    "3": DeepSpeedConfig(stage=3, whole_up_to=0, activation_checkpointing=True),
    "3-whole": DeepSpeedConfig(stage=3),
    "2-offload": DeepSpeedConfig(stage=2, offload_optimizer=True),
    "3-offload": DeepSpeedConfig(stage=3, whole_up_to=0, offload_optimizer=True, offload_parameters=True),
}

RESUMED = {"1": "3", "2": "1", "3": "2", "3-whole": "3-whole"}
"""By whom training goes on from whose checkpoint."""


def settings_for(model: Path, dtype: torch.dtype = torch.float32) -> Settings:
    return Settings(
        path=str(model),
        device=torch.device("cpu"),
        compute_dtype=dtype,
        micro_batch_tokens=40,
        weight_decay=0.1,
        max_grad_norm=0.5,
    )


def value_error(value_P: Tensor, entropy_P: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    """A critic's loss."""
    del entropy_P
    return (value_P - batch.return_P).square().sum(), {}


def with_returns(rows: list[Row]) -> list[Row]:
    """For a critic to expect."""
    return [replace(row, return_P=row.advantage_P) for row in rows]


def step(backend: Backend, seed: int, loss_fn: LossFn = OBJECTIVE, **changes: Any) -> dict[str, float]:
    """One on its batch; `changes` are those of its first row."""
    first, *others = with_returns(random_rows(ROWS[seed % STEPS], seed=seed))
    rows = [replace(first, **changes), *others]
    return backend.train_step(rows, loss_fn, temperature=TEMPERATURE, norm=OBJECTIVE.norm(rows), lr=LR)


def logprobs(backend: Any) -> list[float]:
    return backend.score(random_rows(9, seed=1000), temperature=TEMPERATURE).tolist()


def whole_run(backend: Backend, folder: Path) -> dict[str, Any]:
    """STEPS steps; on the way a checkpoint, a step that is not finite, a stay in host memory, and an export."""
    done: list[dict[str, float]] = []
    skipped: list[float] = []
    for seed in range(STEPS):
        if seed == SAVED:
            folder.mkdir(exist_ok=True)
            write = backend.save(folder)
            first_P = np.zeros(random_rows(9, seed=99)[0].policy_tokens, np.float32)
            for poison in (np.nan, np.inf):
                skipped.append(step(backend, 99, advantage_P=first_P + poison)["skipped"])
            skipped.append(step(backend, 99, unsound_loss)["skipped"])
            backend.offload()
            backend.reload()
            write()
        done.append(step(backend, seed))
    return {
        "losses": [each["loss"] for each in done],
        "grad_norms": [each["grad_norm"] for each in done],
        "skipped": skipped,
        "logprobs": logprobs(backend),
    }


def unsound_loss(logp_P: Tensor, entropy_P: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    """Not finite, and its gradient is."""
    loss, metrics = OBJECTIVE(logp_P, entropy_P, batch)
    return loss + torch.inf, metrics


def published(backend: Backend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.named_tensors()}


def main(model: Path, folder: Path) -> dict[str, Any]:
    # Several chunks of tokens, of which ranks have different numbers, and several buckets; some tensors exceed one.
    token_chunks.CHUNK_ELEMENTS, zero.BUCKET_ELEMENTS = 200, 4000
    make: Callable[..., TokenLogprobs] = TokenLogprobs
    settings, half = settings_for(model), settings_for(model, torch.bfloat16)
    found: dict[str, Any] = {}
    for name, config in STAGES.items():
        backend = ZeroBackend(make, settings, config)
        found[name] = whole_run(backend, folder / name)
        if name in ("2", "3"):
            tensors = published(backend)
            if rank() == 0:
                save_file(tensors, folder / f"{name}.safetensors")
            (folder / f"{name}-export").mkdir(exist_ok=True)
            backend.export(folder / f"{name}-export")
        backend.reset_optimizer()
        found[name]["after_reset"] = [step(backend, seed)["loss"] for seed in (7, 8, 9)]
    for name, saved in RESUMED.items():
        backend = ZeroBackend(make, settings, STAGES[name])
        backend.load(folder / saved)
        found[name]["resumed"] = [step(backend, seed)["loss"] for seed in range(SAVED, STEPS)]
    backend = ZeroBackend(make, settings, STAGES["2"])
    backend.load(folder / "torch")
    found["from torch"] = [step(backend, seed)["loss"] for seed in range(SAVED, STEPS)]
    for name in ("1", "2", "3"):
        backend = ZeroBackend(make, half, STAGES[name])
        found[f"{name}-bf16"] = {
            "losses": [step(backend, seed)["loss"] for seed in range(STEPS)],
            "logprobs": logprobs(backend),
            "dtypes": sorted({str(tensor.dtype) for tensor in published(backend).values()}),
        }
        critic = ZeroBackend(TokenValues, settings, STAGES[name])
        found[f"{name}-critic"] = [step(critic, seed, value_error)["loss"] for seed in range(STEPS)]
        (folder / f"{name}-critic").mkdir(exist_ok=True)
        critic.save(folder / f"{name}-critic")()
        reference = frozen(make, settings, STAGES[name])
        reference.offload()
        reference.reload()
        found[f"{name}-frozen"] = logprobs(reference)
        found[f"{name}-frozen-bf16"] = logprobs(frozen(make, half, STAGES[name]))
    tied = settings_for(model.with_name("tied"))
    for name in ("2", "3"):
        backend = ZeroBackend(make, tied, STAGES[name])
        found[f"{name}-tied"] = [step(backend, seed)["loss"] for seed in range(STEPS)]
        found[f"{name}-tied-names"] = sorted(published(backend))
    return found


if __name__ == "__main__":
    join(torch.device("cpu"), 120)
    answer = main(Path(sys.argv[1]), Path(sys.argv[2]))
    if rank() == 0:
        Path(sys.argv[2], "found.json").write_text(json.dumps(answer))
