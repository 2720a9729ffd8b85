"""`python -m trainer.evaluation farm.toml`: in a trainer's place, it asks for episodes and counts.

The model is whatever the engines serve; nothing is published, so nothing gets stale, and the whole evaluation may be
outstanding at once. A delivery is committed once tasks.jsonl holds it: whatever is killed, no episode counts twice.
"""

import asyncio
import socket
import sys
import time
import uuid
from statistics import fmean

import structlog
from grpc import aio

from rollfarm import rpc, service, telemetry
from rollfarm.config import ConfigError, exit_bad_config, load_or_exit
from rollfarm.errors import InvalidArgument, RunMismatch
from rollfarm.v1 import sample_buffer_pb2, sample_buffer_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from trainer.buffer import BufferClient, LeasedBatch
from trainer.config import TrainerRoot
from trainer.evaluation.results import TASKS, Results, summarise, task_result, write
from trainer.progress import Progress, StepReport
from trainer.server import SERVICE, TrainerServicer

log = structlog.get_logger()

PROG = "python -m trainer.evaluation"

ALPHA = 1e6
"""More batches than any evaluation has: all of it may be outstanding."""


class Evaluator:
    """One evaluation, from wherever it stands to its end."""

    def __init__(self, root: TrainerRoot, buffer: BufferClient, progress: Progress, results: Results) -> None:
        self._root = root
        self._config = root.trainer.evaluation
        self._buffer = buffer
        self._progress = progress
        self._results = results

    async def run(self) -> None:
        """Raises ConfigError."""
        try:
            found = await self._buffer.configure(spec_of(self._root))
        except (RunMismatch, InvalidArgument) as error:
            raise ConfigError(f"run: {error}") from None
        self._results.resume(found.next_commit_step)
        self._progress.resume(found.next_commit_step)
        log.info("evaluation begins" if found.created else "evaluation goes on", tasks_done=len(self._results.tasks))
        for step in range(found.next_commit_step, self._config.tasks):
            self._progress.enter(trainer_pb2.PHASE_WAITING)
            began = time.monotonic()
            leased = await self._buffer.lease_batch(step)
            self._take(leased, waited=time.monotonic() - began)
            await self._buffer.commit(step, leased.batch.batch_id)
        result = summarise(
            self._results.tasks, self._config, model=self._root.model.path, dropped=await self._buffer.dropped()
        )
        write(result, self._root.run.path)
        self._progress.enter(trainer_pb2.PHASE_FINISHED)
        log.info("evaluation finished", tasks=len(self._results.tasks))

    def _take(self, leased: LeasedBatch, *, waited: float) -> None:
        step = leased.batch.step
        self._results.add([task_result(step, group, self._config.metric) for group in leased.groups])
        rewards = [each.reward for group in leased.groups for each in group.trajectories]
        self._progress.stepped(StepReport(step, fmean(rewards), {}, waited, 0.0, 0.0, 0, time.time()))


def spec_of(root: TrainerRoot) -> sample_buffer_pb2.RunSpec:
    """The run that is played: a delivery holds as many tasks as there are domains, and each has its share."""
    run, config = root.run, root.trainer.evaluation
    spec = run.to_proto()
    del spec.filters[:]
    spec.MergeFrom(
        sample_buffer_pb2.RunSpec(
            alpha=ALPHA,
            batch_groups=len(run.domains),
            group_size=config.samples,
            step_count=config.tasks,
            held_out=True,
        )
    )
    spec.redundant_members = spec.redundant_groups = 0
    spec.sampling.CopyFrom(spec.validation_sampling)
    for domain in spec.domains:
        domain.weight = 1.0
    return spec


async def serve(root: TrainerRoot) -> None:
    """Serve and evaluate until it is over; then serve the result until SIGTERM, as a trainer does."""
    config, folder = root.trainer, root.run.path
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(root.run.name, config.evaluation.tasks, folder / "metrics.jsonl")
    asked, stop = service.stop_on_signal(), asyncio.Event()
    async with rpc.channel(config.sample_buffer_address) as channel:
        buffer = BufferClient(
            sample_buffer_pb2_grpc.SampleBufferServiceStub(channel),
            run_id=root.run.name,
            trainer_id=f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}",
        )
        evaluator = Evaluator(root, buffer, progress, Results(folder / TASKS))

        def register(server: aio.Server) -> None:
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server(TrainerServicer(progress, controls=None), server)

        async def stop_when_asked() -> None:
            await asked.wait()
            stop.set()

        async def evaluate() -> None:
            await evaluator.run()
            if config.exit_when_finished:
                stop.set()

        await service.serve(register, config.listen, stop_when_asked, evaluate, services=[SERVICE], stop=stop)


def main(argv: list[str]) -> None:
    root = load_or_exit(TrainerRoot, argv, prog=PROG)
    telemetry.start_telemetry("trainer", root.trainer.telemetry, root.trainer.listen)
    try:
        service.run(lambda: serve(root), port_flag="--trainer.listen.port")
    except* ConfigError as errors:
        exit_bad_config(PROG, _first(errors))


def _first(errors: BaseExceptionGroup[ConfigError]) -> Exception:
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None
