"""Two ranks that cut models every way that two ranks can, one after the other: FOLDER.

One pair of processes does it all, since each takes seconds to import Megatron-Core. Models lie in FOLDER/models by the
names of Model, and plain torch's checkpoint of each in FOLDER/torch-NAME. Rank 0 writes what it found into
FOLDER/found.json, and tensors beside it.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor

from tests.trainer.conftest import random_rows
from trainer.algorithms.losses import Metrics
from trainer.backend_config import MegatronConfig
from trainer.backends import Backend, Scorer, Settings
from trainer.backends.megatron.backend import MegatronBackend
from trainer.backends.megatron.cut_model import MegatronScorer
from trainer.config import TrainerConfig
from trainer.micro_batches import MicroBatch
from trainer.objective import LossFn, policy_objective
from trainer.ranks import join, rank

STEPS = 6
SAVED = 3
"""Steps that the checkpoint on the way holds."""

LR = 1e-3
TEMPERATURE = 0.8
OBJECTIVE = policy_objective(TrainerConfig())

Model = Literal["plain", "tied", "mixture"]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to cut one model."""

    model: Model
    config: MegatronConfig
    dtype: torch.dtype = torch.float32

    resumes: str = "torch"
    """Whose checkpoint it goes on from, beside its own."""


COPIES, TENSOR, PIPELINE = MegatronConfig(), MegatronConfig(tensor_parallel=2), MegatronConfig(pipeline_parallel=2)
CONTEXT, EXPERTS = MegatronConfig(context_parallel=2), MegatronConfig(expert_parallel=2)
SEQUENCE = MegatronConfig(tensor_parallel=2, sequence_parallel=True)

CASES = {
    "copies": Case("plain", COPIES),
    "tensor": Case("plain", TENSOR, resumes="copies"),
    "pipeline": Case("plain", PIPELINE, resumes="tensor"),
    "context": Case("plain", CONTEXT, resumes="pipeline"),
    "sequence": Case("plain", SEQUENCE.model_copy(update={"recompute": True}), resumes="context"),
    "tied-tensor": Case("tied", TENSOR),
    "tied-pipeline": Case("tied", PIPELINE, resumes="tied-tensor"),
    "tensor-bf16": Case("plain", TENSOR, torch.bfloat16, resumes=""),
    "pipeline-bf16": Case("plain", PIPELINE, torch.bfloat16, resumes=""),
    "mixture-experts": Case("mixture", EXPERTS, resumes=""),
    "mixture-sequence": Case("mixture", SEQUENCE, resumes="mixture-experts"),
    "mixture-pipeline": Case("mixture", PIPELINE, resumes="mixture-sequence"),
}


def settings_for(model: Path, dtype: torch.dtype = torch.float32) -> Settings:
    return Settings(
        path=str(model),
        device=torch.device("cpu"),
        compute_dtype=dtype,
        micro_batch_tokens=40,
        weight_decay=0.1,
        max_grad_norm=0.5,
    )


def step(backend: Backend, seed: int, loss_fn: LossFn = OBJECTIVE, **changes: Any) -> dict[str, float]:
    """One on its batch; `changes` are those of its first row."""
    first, *others = random_rows(9, seed=seed)
    rows = [replace(first, **changes), *others]
    return backend.train_step(rows, loss_fn, temperature=TEMPERATURE, norm=OBJECTIVE.norm(rows), lr=LR)


def logprobs(scorer: Scorer) -> list[float]:
    return scorer.score(random_rows(9, seed=1000), temperature=TEMPERATURE).tolist()


def unsound_loss(logp_P: Tensor, entropy_P: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    """Not finite, and its gradient is."""
    loss, metrics = OBJECTIVE(logp_P, entropy_P, batch)
    return loss + torch.inf, metrics


def loss_of_entropies(logp_P: Tensor, entropy_P: Tensor, batch: MicroBatch) -> tuple[Tensor, Metrics]:
    """With a bonus for entropies, whose gradient it wants."""
    loss, metrics = OBJECTIVE(logp_P, entropy_P, batch)
    return loss - entropy_P.sum(), metrics


def whole_run(backend: Backend, folder: Path) -> dict[str, Any]:
    """STEPS steps; on the way a checkpoint, steps that are not finite, and a stay in host memory."""
    steps: list[dict[str, float]] = []
    skipped: list[float] = []
    for seed in range(STEPS):
        if seed == SAVED:
            folder.mkdir(exist_ok=True)
            write = backend.save(folder)
            first_P = np.zeros(random_rows(9, seed=99)[0].policy_tokens, np.float32)
            skipped += [step(backend, 99, advantage_P=first_P + poison)["skipped"] for poison in (np.nan, np.inf)]
            skipped.append(step(backend, 99, unsound_loss)["skipped"])
            backend.offload()
            backend.reload()
            write()
        steps.append(step(backend, seed))
    return {"steps": steps, "skipped": skipped, "logprobs": logprobs(backend)}


def run(name: str, case: Case, folder: Path) -> dict[str, Any]:
    """Everything that is asked of one case."""
    model = folder / "models" / case.model
    settings = settings_for(model, case.dtype)
    backend = MegatronBackend(settings, case.config)
    found = whole_run(backend, folder / name)
    tensors = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    if rank() == 0:
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}-export").mkdir(exist_ok=True)
    backend.export(folder / f"{name}-export")
    backend.reset_optimizer()
    found["after_reset"] = [step(backend, seed, loss_of_entropies)["loss"] for seed in (7, 8, 9)]
    if case.resumes:
        resumed = MegatronBackend(settings, case.config)
        resumed.load(folder / (f"torch-{case.model}" if case.resumes == "torch" else case.resumes))
        found["resumed"] = [step(resumed, seed)["loss"] for seed in range(SAVED, STEPS)]
    scorer = MegatronScorer(settings, case.config)
    scorer.offload()
    scorer.reload()
    found["frozen"] = logprobs(scorer)
    return found


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        found[name] = run(name, case, folder)
        # Ranks of a run are cut one way; here the next case cuts them anew.
        parallel_state.destroy_model_parallel()
        if rank() == 0:
            (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    join(torch.device("cpu"), 120)
    main(Path(sys.argv[1]))
