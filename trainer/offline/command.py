"""Puts a run on records together, in one process or in the ranks that torchrun starts."""

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog

from rollfarm import service, telemetry
from rollfarm.config import ConfigError, load
from rollfarm.up.claims import claimed
from rollfarm.up.config import as_used, write_toml
from rollfarm.up.folder import CONFIG, LOCK, RunInUse, is_on_records, resume_command
from trainer.config import TrainerRoot
from trainer.offline.config import OfflineConfig

if TYPE_CHECKING:
    from trainer.checkpoints import Checkpoints
    from trainer.offline.data import Data, Sieve
    from trainer.progress import Progress

log = structlog.get_logger()

EXIT_INTERRUPTED = 130


class Ready(NamedTuple):
    """What rank 0 has before any model is loaded."""

    data: "Data"
    sieve: "Sieve"
    checkpoints: "Checkpoints"


def start(argv: Sequence[str], *, prog: str) -> int:
    """Train as these files and flags say. The exit status. Raises ConfigError and RunInUse."""
    root = load(TrainerRoot, argv, prog=prog)
    if root.trainer.offline is None:
        raise ConfigError(
            "trainer.offline: missing. Add [[trainer.offline.records]] with a source, as examples/offline/sft.toml "
            "has; a farm is trained by `rollfarm up`."
        )
    if root.trainer.offline.epochs and any(word.partition("=")[0] == "--run.steps" for word in argv):
        raise ConfigError("--run.steps: trainer.offline.epochs says how long. Give --trainer.offline.epochs instead.")
    root.model.refuse_outdated()
    # Imported late: torch takes seconds, and a wrong key needs none of it.
    from trainer import ranks
    from trainer.backends.alone import on_rank_0

    if ranks.rank() > 0:
        telemetry.configure_logging("trainer", root.trainer.telemetry)
        _follow(root)
        return 0
    telemetry.start_telemetry("trainer", root.trainer.telemetry, root.trainer.listen)
    with _opened(root):
        offline = root.trainer.offline
        _meet(root)
        ready = on_rank_0(lambda: _made_ready(root, offline))
        assert ready is not None
        return asyncio.run(_lead(root, offline, ready))


@contextmanager
def _opened(root: TrainerRoot) -> Iterator[None]:
    """Make the run's folder ours. Raises RunInUse, and ConfigError where it is a farm's."""
    run = root.run.path
    run.mkdir(parents=True, exist_ok=True)
    (run / LOCK).touch()
    with claimed(run / LOCK) as claim:
        if claim is None:
            raise RunInUse(f"Another program works on {run}. Stop it, or wait for it, or choose another --run.name.")
        if (run / CONFIG).exists() and not is_on_records(run / CONFIG):
            raise ConfigError(f"run.name: {run} is a run of `rollfarm up`. Choose another --run.name.")
        yield


def _follow(root: TrainerRoot) -> None:
    from trainer import ranks
    from trainer.backends.alone import on_rank_0
    from trainer.backends.build import build_models
    from trainer.offline.pipelines import OBJECTIVES

    _meet(root)
    on_rank_0(lambda: None)
    _prepare(root)
    ranks.follow(lambda: build_models(root.model, root.trainer), OBJECTIVES)


def _meet(root: TrainerRoot) -> None:
    """Join the other ranks, which wait for rank 0 from then on for as long as it lives."""
    from trainer.ranks import choose_device, join

    join(choose_device(root.trainer.device), root.trainer.rank_timeout_seconds)


def _made_ready(root: TrainerRoot, offline: OfflineConfig) -> Ready:
    """Read everything, and write the configuration down once nothing is wrong with it. Raises ConfigError."""
    from trainer.checkpoints import Checkpoints
    from trainer.offline.data import Sieve, load_data
    from trainer.offline.run import check_same
    from trainer.texts import Renderer

    _prepare(root)
    run = root.run.path
    checkpoints = Checkpoints(run / "checkpoints", run_id=root.run.name, keep=root.trainer.keep_checkpoints)
    data = load_data(root, offline)
    if (found := checkpoints.newest()) is not None:
        path, state = found
        check_same(state.learner, data.identity, path)
    sieve = Sieve(Renderer(root.model.path), offline.max_tokens)
    sieve.check(data)
    write_toml(as_used(root), run / CONFIG)
    return Ready(data, sieve, checkpoints)


def _prepare(root: TrainerRoot) -> None:
    """Before any model is loaded. Raises ConfigError."""
    import torch

    from trainer.create_model import ensure_model
    from trainer.vocabulary import check_vocabularies

    if root.trainer.threads:
        torch.set_num_threads(root.trainer.threads)
    ensure_model(root.model)
    check_vocabularies(root.model, root.trainer)


async def _lead(root: TrainerRoot, offline: OfflineConfig, ready: Ready) -> int:
    from trainer.backends.build import build_models
    from trainer.offline.pipelines import OBJECTIVES, pipeline_of
    from trainer.offline.run import OfflineRun
    from trainer.progress import Progress
    from trainer.ranks import Leader
    from trainer.tracking import close_all, feeds_of

    stop = service.stop_on_signal()
    if offline.epochs:
        steps = ready.data.deck.steps(offline.epochs, offline.batch_size)
        root = root.model_copy(update={"run": root.run.model_copy(update={"steps": steps})})
    leader = Leader(await asyncio.to_thread(build_models, root.model, root.trainer), OBJECTIVES)
    feeds = feeds_of(root)
    progress = Progress(root.run.name, root.run.steps, root.run.path / "metrics.jsonl", feeds)
    run = OfflineRun(
        root,
        offline,
        leader,
        pipeline_of(offline, leader),
        ready.data,
        ready.sieve,
        ready.checkpoints,
        progress,
        stop,
    )
    try:
        is_over = await run.run()
    finally:
        await asyncio.to_thread(close_all, feeds)
    if not is_over:
        print(f"Saved after step {run.step}. Go on with: {_to_go_on(root.run.path)}", file=sys.stderr)
    print(json.dumps(_result(root, progress, is_over)), flush=True)
    return 0 if is_over else EXIT_INTERRUPTED


def _to_go_on(run: Path) -> str:
    """What a person types then."""
    from trainer.ranks import world_size

    if world_size() == 1:
        return resume_command(run)
    here = os.environ.get("LOCAL_WORLD_SIZE", str(world_size()))
    return f"torchrun --nproc-per-node {here} -m rollfarm resume {shlex.quote(str(run))}"


def _result(root: TrainerRoot, progress: "Progress", is_over: bool) -> dict[str, object]:
    """For programs."""
    last = dict(progress.steps[-1].metrics) if progress.steps else {}
    validated = [{"step": each.step_count, **each.metrics} for each in progress.validations]
    return {
        "run": str(root.run.path),
        "steps": progress.step_count,
        "finished": is_over,
        "model": str(root.run.path / "model") if is_over else None,
        "loss": last.get("loss"),
        "validation_before": validated[0] if validated else None,
        "validation_after": validated[-1] if validated and is_over else None,
    }
