"""Puts a run on records together, in one process or in the ranks that torchrun starts."""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import structlog

from rollfarm import service, telemetry
from rollfarm.config import ConfigError, load
from rollfarm.up.claims import claimed
from rollfarm.up.config import as_used, write_toml
from rollfarm.up.folder import CONFIG, LOCK, RunInUse, resume_command
from trainer.config import TrainerRoot
from trainer.offline.config import OfflineConfig

if TYPE_CHECKING:
    from trainer.progress import Progress

log = structlog.get_logger()

EXIT_INTERRUPTED = 130


class Loaded(NamedTuple):
    """What is to be done."""

    root: TrainerRoot
    offline: OfflineConfig


def start(argv: Sequence[str], *, prog: str) -> int:
    """Train as these files and flags say. The exit status. Raises ConfigError and RunInUse."""
    root = load(TrainerRoot, argv, prog=prog)
    if root.trainer.offline is None:
        raise ConfigError(
            "trainer.offline: missing. Add [[trainer.offline.records]] with a source, as examples/offline/sft.toml "
            "has; a farm is trained by `rollfarm up`."
        )
    root.model.refuse_outdated()
    loaded = Loaded(root, root.trainer.offline)
    # Imported late: torch takes seconds, and a wrong key needs none of it.
    from trainer import ranks

    if ranks.rank() > 0:
        telemetry.configure_logging("trainer", root.trainer.telemetry)
        _follow(loaded)
        return 0
    telemetry.start_telemetry("trainer", root.trainer.telemetry, root.trainer.listen)
    with _opened(root):
        return asyncio.run(_lead(loaded))


@contextmanager
def _opened(root: TrainerRoot) -> Iterator[None]:
    """Make the run's folder ours, and write down how it is configured. Raises RunInUse."""
    run = root.run.path
    run.mkdir(parents=True, exist_ok=True)
    (run / LOCK).touch()
    with claimed(run / LOCK) as claim:
        if claim is None:
            raise RunInUse(f"Another program works on {run}. Stop it, or wait for it, or choose another --run.name.")
        write_toml(as_used(root), run / CONFIG)
        yield


def _follow(loaded: Loaded) -> None:
    from trainer import ranks
    from trainer.backends.build import build_models
    from trainer.offline.pipelines import OBJECTIVES

    _prepare(loaded.root)
    ranks.follow(lambda: build_models(loaded.root.model, loaded.root.trainer), OBJECTIVES)


def _prepare(root: TrainerRoot) -> None:
    """Before any model is loaded. Raises ConfigError."""
    import torch

    from trainer.create_model import ensure_model
    from trainer.vocabulary import check_vocabularies

    if root.trainer.threads:
        torch.set_num_threads(root.trainer.threads)
    ensure_model(root.model)
    check_vocabularies(root.model, root.trainer)


async def _lead(loaded: Loaded) -> int:
    from trainer.backends.build import build_models
    from trainer.checkpoints import Checkpoints
    from trainer.offline.data import Sieve, load_data
    from trainer.offline.pipelines import OBJECTIVES, pipeline_of, reader_of
    from trainer.offline.run import OfflineRun
    from trainer.progress import Progress
    from trainer.ranks import Leader
    from trainer.texts import Renderer
    from trainer.tracking import close_all, feeds_of

    stop = service.stop_on_signal()
    root, offline = loaded
    _prepare(root)
    data = load_data(offline, reader_of(offline), seed=root.trainer.seed)
    if offline.epochs:
        steps = data.deck.steps(offline.epochs, offline.batch_size)
        root = root.model_copy(update={"run": root.run.model_copy(update={"steps": steps})})
    renderer = Renderer(root.model.path)
    leader = Leader(await asyncio.to_thread(build_models, root.model, root.trainer), OBJECTIVES)
    feeds = feeds_of(root)
    progress = Progress(root.run.name, root.run.steps, root.run.path / "metrics.jsonl", feeds)
    run = OfflineRun(
        root,
        offline,
        leader,
        pipeline_of(offline, leader),
        data,
        Sieve(renderer, offline.max_tokens),
        Checkpoints(root.run.path / "checkpoints", run_id=root.run.name, keep=root.trainer.keep_checkpoints),
        progress,
        stop,
    )
    try:
        is_over = await run.run()
    finally:
        await asyncio.to_thread(close_all, feeds)
    if not is_over:
        print(f"Saved after step {run.step}. Go on with: {resume_command(root.run.path)}", file=sys.stderr)
    print(json.dumps(_result(root, progress, is_over)), flush=True)
    return 0 if is_over else EXIT_INTERRUPTED


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
