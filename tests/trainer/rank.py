"""One rank, as a process: MODEL FOLDER CONFIG STEPS [ROWS [SAVE_BEFORE [DTYPE]]].

CONFIG is a TrainerConfig as JSON. Rank 0 goes on from FOLDER/load where there is such a checkpoint, trains on the
batches `random_rows(ROWS, seed=s)` for the seeds s of STEPS ("0-20", or "forever"), saves into FOLDER/save, exports
into FOLDER/export and says what happened in one line of JSON: what each step measured, and the log-probabilities of
another batch afterwards. Before the step of the seed SAVE_BEFORE it saves into FOLDER/middle, and writes while it
goes on.
"""

import json
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

from rollfarm.run import ModelConfig
from tests.trainer.conftest import random_rows
from trainer import ranks
from trainer.backends.build import build_models
from trainer.config import TrainerConfig
from trainer.objective import policy_objective
from trainer.ranks import Leader

TEMPERATURE = 0.8
PROBE_SEED = 1000


def main(
    model: str,
    folder: str,
    config_json: str,
    steps: str,
    rows_each: str = "9",
    save_before: str = "",
    dtype: str = "float32",
) -> None:
    config = TrainerConfig.model_validate_json(config_json)
    objective = policy_objective(config)
    objectives = {"policy": objective}

    def build() -> ranks.Models:
        return build_models(ModelConfig.model_validate({"path": model, "dtype": dtype}), config)

    if ranks.rank() > 0:
        ranks.follow(build, objectives)
        return
    leader = Leader(build(), objectives)
    if (saved := Path(folder) / "load").exists():
        leader.load(saved)
    measured: list[dict[str, float]] = []
    writer = ThreadPoolExecutor(1)
    writing: list[Future[None]] = []
    for seed in count() if steps == "forever" else range(*map(int, steps.split("-"))):
        if str(seed) == save_before:
            (Path(folder) / "middle").mkdir()
            writing.append(writer.submit(leader.save(Path(folder) / "middle")))
        rows = random_rows(int(rows_each), seed=seed)
        norm = objective.norm(rows)
        measured.append(leader.train_step(rows, "policy", temperature=TEMPERATURE, norm=norm, lr=config.lr))
        leader.pulse()
        if steps == "forever" and seed == 0:
            print("begun", flush=True)
    for each in writing:
        each.result()
    scores_P = leader.score(random_rows(9, seed=PROBE_SEED), temperature=TEMPERATURE)
    for name in ("save", "export"):
        (Path(folder) / name).mkdir(exist_ok=True)
    leader.save(Path(folder) / "save")()
    leader.export(Path(folder) / "export")
    leader.stop()
    print(json.dumps({"steps": measured, "logprobs": scores_P.tolist()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
