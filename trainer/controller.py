"""The asynchronous loop: lease a batch, learn, publish, checkpoint, commit.

Generation goes on meanwhile, as far ahead as sample_buffer's credits let it: exactly not at all with alpha 0.
Checkpoints are written meanwhile, too. A crash at any moment loses nothing: the batches after the newest checkpoint are
delivered again and trained again, in silence until the trainer is where it was, and policy_version goes on from what
sample_buffer knows.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from rollfarm.config import ConfigError
from rollfarm.errors import CheckpointFailed, InvalidArgument, RunMismatch
from rollfarm.v1 import sample_buffer_pb2, trainer_pb2
from trainer.buffer import BufferClient, LeasedBatch
from trainer.checkpoints import Checkpoints, CheckpointState, replace_folder
from trainer.colocation import Apart, Turns
from trainer.config import TrainerRoot
from trainer.controls import Controls, Draining, Interrupted, unless
from trainer.disk import remedy
from trainer.learner import Learner
from trainer.progress import Progress, StepReport, ValidationReport
from trainer.saving import NotSaved, Saver
from trainer.weights.publisher import Publisher
from trainer.weights.snapshot import Snapshot

log = structlog.get_logger()

T = TypeVar("T")

DRAIN_GRACE_SECONDS = 5.0
"""How long a publication or a commit may still take once the trainer was asked to stop."""


class Controller:
    """One run from wherever it stands to its end. `run` once."""

    def __init__(
        self,
        root: TrainerRoot,
        build: Callable[[], Learner],
        buffer: BufferClient,
        publisher: Publisher,
        checkpoints: Checkpoints,
        progress: Progress,
        controls: Controls,
        turns: Turns | None = None,
    ) -> None:
        """`turns`: whose the devices are, where they are not the trainer's alone."""
        self._run = root.run
        self._config = root.trainer
        self._build = build
        self._buffer = buffer
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._progress = progress
        self._controls = controls
        self._turns = turns or Apart()
        self._compute_thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._built: Learner | None = None
        self._saver: Saver | None = None
        self._step = 0
        self._committed = 0
        """Steps that a durable checkpoint holds, and sample_buffer knows of it."""
        self._delivered = 0
        """Steps that were delivered before this process began; they are trained on again without publishing."""
        self._last_batch_id = ""

    async def run(self) -> None:
        """Learn until the run is over, or until asked to stop; either way everything learnt is saved.

        Raises ConfigError, also where it cannot be saved, and TrainerReplaced when another trainer takes the run over.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._saver = Saver(self._checkpoints, self._commit, group)
                await self._live()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _live(self) -> None:
        try:
            await self._start()
            await self._learn()
            await self._finish()
        except Draining:
            log.info("stopping", step=self._step)
        await self._save_and_wait()
        await self._turns.give(self._move)
        self._controls.refuse()
        built, self._built = self._built, None  # No pulse after this: the other ranks are gone then.
        if built is not None:
            await self.compute(built.leader.stop)

    async def compute(self, work: Callable[..., T], *args: object) -> T:
        """Run `work` in the one thread that touches the model."""
        return await asyncio.get_running_loop().run_in_executor(self._compute_thread, work, *args)

    async def pulse(self, seconds: float) -> None:
        """Keep in touch with the other ranks, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            if self._built is not None:
                await self.compute(self._built.leader.pulse)

    async def _move(self, to_host: bool) -> None:
        """Move every model, if there are models, to host memory or back to where it computes."""
        if self._built is not None:
            await self.compute(partial(self._built.leader.move, to_host=to_host))

    @property
    def _learner(self) -> Learner:
        assert self._built is not None
        return self._built

    # --- start ---

    async def _start(self) -> None:
        is_new = self._checkpoints.newest() is None
        await self._turns.take(self._move, discard_weights=True)
        self._built = await self.compute(self._build)
        if is_new:
            await self._warm_start()
        run = await self._take_over()
        # Not earlier: until here another trainer may have gone on.
        await self._load_newest(run)
        await self._go_on_from(run)
        if self._step >= self._delivered:
            await self._publish()

    async def _warm_start(self) -> None:
        losses = self._learner.warm_start()
        self._progress.enter(trainer_pb2.PHASE_WARMING_UP)
        last = None
        while (loss := await self.compute(_next_or_none, losses)) is not None:
            last = loss
            if self._controls.draining:
                raise Draining
        if last is not None:
            log.info("warm start done", loss=round(last, 4))
        self._progress.enter(trainer_pb2.PHASE_LOADING)

    async def _take_over(self) -> sample_buffer_pb2.ConfigureRunResponse:
        """Be the run's one trainer; where the run stands."""
        try:
            return await self._controls.unless_draining(self._buffer.configure(self._run.to_proto()))
        except (RunMismatch, InvalidArgument) as error:
            raise ConfigError(f"run: {error}") from None

    async def _load_newest(self, run: sample_buffer_pb2.ConfigureRunResponse) -> None:
        self._checkpoints.sweep()
        if (found := self._checkpoints.newest()) is not None:
            path, state = found
            if "pipeline" in state.learner:
                raise ConfigError(f"run.name: {path} is of `rollfarm train`, not of a farm. Choose another run.name.")
            await self.compute(self._learner.load, path)
            self._learner.restore(state.learner)
            self._step, self._last_batch_id = state.step_count, state.last_batch_id
            self._progress.checkpoint_path = str(path)
        self._progress.resume(self._step, validated_until=max(self._step, run.next_batch_step))
        for report in self._progress.validations:
            self._value(report)

    async def _go_on_from(self, run: sample_buffer_pb2.ConfigureRunResponse) -> None:
        """Commit what only the checkpoint knows of, and repeat what only sample_buffer knows of."""
        _check_agrees(run, self._step, self._run.name)
        self._delivered, self._committed = run.next_batch_step, run.next_commit_step
        self._progress.published(run.policy_version)
        if self._step > self._committed:
            commit = self._buffer.commit(self._step - 1, self._last_batch_id)
            await self._controls.unless_draining(commit, grace=DRAIN_GRACE_SECONDS)
            self._committed = self._step
        log.info(
            "run begins" if run.created else "run goes on",
            run=self._run.name,
            step=self._step,
            policy_version=run.policy_version,
            batches_to_repeat=self._delivered - self._step,
        )

    # --- the loop ---

    async def _learn(self) -> None:
        if self._step >= self._delivered and self._validation_due():
            await self._validate()
        while not self._is_over():
            await self._between_steps()
            began = time.monotonic()
            self._progress.enter(trainer_pb2.PHASE_WAITING)
            if self._step >= self._delivered:
                await self._turns.give(self._move)
            try:
                leased = await unless(self._controls.until_wanted, self._buffer.lease_batch(self._step))
            except Interrupted:
                continue
            await self._between_steps()
            await self._train_on(leased, wait_seconds=time.monotonic() - began)

    def _is_over(self) -> bool:
        return bool(self._run.steps) and self._step >= self._run.steps

    async def _between_steps(self, *, hold: bool = False) -> None:
        """Do what was asked for; stay here while paused, or for good with `hold`. Raises Draining."""
        while True:
            if self._controls.draining:
                raise Draining
            if self._controls.checkpoint_wanted:
                await self._answer_with_checkpoint()
            elif hold:
                await self._controls.until_wanted()
            elif self._controls.paused:
                if self._step >= self._delivered:
                    await self._turns.give(self._move)
                await self._controls.until_released()
            else:
                return

    async def _train_on(self, leased: LeasedBatch, *, wait_seconds: float) -> None:
        batch = leased.batch
        log.info("batch leased", step=batch.step, groups=batch.group_count, redelivered=batch.redelivered)
        began = time.monotonic()
        await self._turns.take(self._move, discard_weights=True)
        self._progress.enter(trainer_pb2.PHASE_TRAINING)
        learning = self.compute(self._learner.learn, batch, leased.groups)
        outcome, counted = await asyncio.gather(learning, self._buffer.measures())
        samples = await self.compute(self._learner.table, batch.step, leased.groups)
        outcome.metrics.update(counted)
        trained = time.monotonic()
        self._step, self._last_batch_id = batch.step + 1, batch.batch_id

        def report() -> None:
            done = StepReport(
                step=batch.step,
                mean_reward=outcome.mean_reward,
                metrics=outcome.metrics,
                wait_seconds=wait_seconds,
                train_seconds=trained - began,
                publish_seconds=time.monotonic() - trained,
                policy_version=self._progress.policy_version,
                time=time.time(),
            )
            self._progress.stepped(done, samples)
            _log_step(done)

        try:
            if self._step >= self._delivered:
                await self._publish()
        except Draining:
            report()
            raise
        report()
        valued = self._config.keep_best and self._validation_due()
        if self._step % self._config.checkpoint_every == 0 or valued:
            await self._save()
        if self._validation_due() and self._step >= self._delivered and not self._is_over():
            await self._validate()

    async def _publish(self) -> None:
        """Publish the weights as the next version. Raises Draining when nobody answers and the trainer has to go."""
        self._progress.enter(trainer_pb2.PHASE_PUBLISHING)
        version = self._progress.policy_version + 1
        snapshot, gathering = await self._gather(version)

        async def announce() -> None:
            await gathering
            await self._buffer.publish_version(version, self._step)
            self._progress.published(version)

        await self._controls.unless_draining(self._publisher.publish(snapshot, announce), grace=DRAIN_GRACE_SECONDS)

    async def _gather(self, version: int) -> tuple[Snapshot, Awaitable[Snapshot]]:
        """The weights as a version that may be sent while it is gathered, and when that is done."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[Snapshot] = loop.create_future()

        def gather() -> Snapshot:
            return self._learner.snapshot(version, lambda each: loop.call_soon_threadsafe(opened.set_result, each))

        gathering = asyncio.ensure_future(self.compute(gather))
        await asyncio.wait({opened, gathering}, return_when=asyncio.FIRST_COMPLETED)
        return opened.result() if opened.done() else await gathering, gathering

    # --- checkpoints ---

    async def _save(self) -> None:
        """Begin to save what is not saved; training may go on while it is written."""
        assert self._saver is not None
        await self._saver.settled()
        if self._step == self._committed:
            return
        await self._turns.take(self._move, discard_weights=False)
        state = CheckpointState(
            self._run.name, self._step, self._progress.policy_version, self._last_batch_id, self._learner.state()
        )
        await self._saver.begin(state, lambda folder: self.compute(self._learner.save, folder))

    async def _save_and_wait(self) -> None:
        """Save what is not saved, for good. Raises NotSaved where that is impossible."""
        assert self._saver is not None
        await self._save()
        await self._settled()
        if (problem := self._saver.problem) is not None:
            raise NotSaved(
                f"run.folder: step {self._step} could not be saved in {self._checkpoints.folder}: {problem}. "
                f"{remedy(problem)} Then go on with the run: its batches since step {self._committed} are delivered "
                "again."
            )

    async def _settled(self) -> None:
        """Wait for the checkpoint that is being written."""
        assert self._saver is not None
        await self._saver.settled()

    async def _answer_with_checkpoint(self) -> None:
        try:
            await self._save_and_wait()
        except NotSaved as error:
            self._controls.not_checkpointed(CheckpointFailed(str(error), step_count=self._step))
            return
        if path := self._progress.checkpoint_path:
            self._controls.checkpointed(Path(path), self._step)
        else:
            self._controls.not_checkpointed(CheckpointFailed("No step is done yet.", step_count=0))

    async def _commit(self, state: CheckpointState, path: Path) -> None:
        """Tell sample_buffer of a durable checkpoint."""
        self._progress.checkpoint_path = str(path)
        self._progress.catch_up()
        for report in self._progress.validations:
            if report.step_count == state.step_count:
                self._value(report)
        commit = self._buffer.commit(state.step_count - 1, state.last_batch_id)
        try:
            await self._controls.unless_draining(commit, grace=DRAIN_GRACE_SECONDS)
        except Draining:
            log.warning("step not committed; it will be when the run goes on", step=state.step_count)
            return
        self._committed = state.step_count
        log.info("checkpoint committed", step=state.step_count, path=str(path))

    # --- validation and the end ---

    async def _validate(self) -> None:
        """Measure the policy on tasks that it never trains on, once for each number of steps."""
        if not self._config.validation_episodes or self._progress.has_validation(self._step):
            return
        self._progress.enter(trainer_pb2.PHASE_VALIDATING)
        await self._turns.give(self._move)
        version = self._progress.policy_version
        play = self._buffer.validate(f"step-{self._step}-version-{version}", self._config.validation_episodes)
        try:
            async with asyncio.timeout(self._config.validation_timeout_seconds):
                results = await self._controls.unless_draining(play)
        except TimeoutError:
            log.warning("validation given up", step=self._step, seconds=self._config.validation_timeout_seconds)
            return
        report = ValidationReport.over(results, self._step, version)
        self._progress.validated(report)
        await self._settled()
        self._value(report)
        overall = {name: value for name, value in report.metrics.items() if "/" not in name}
        log.info("validated", step=self._step, reward=round(report.mean_reward or 0.0, 4), **overall)

    def _validation_due(self) -> bool:
        """Whether the policy is measured after these steps: before the first, and now and then."""
        every = self._config.validation_every
        return self._step == 0 or bool(every and self._step % every == 0)

    def _value(self, report: ValidationReport) -> None:
        """Note how good the checkpoint is, so that the best are kept."""
        name = self._config.best_metric
        value = report.mean_reward if name == "reward" else report.metrics.get(name)
        if not self._config.keep_best:
            return
        if value is None:
            known = ", ".join(["reward", *sorted(report.metrics)])
            log.warning("validation without trainer.best_metric", best_metric=name, known=known, step=report.step_count)
            return
        try:
            self._checkpoints.validated(report.step_count, value)
        except OSError as error:
            log.error("validation not noted", step=report.step_count, cause=str(error), remedy=remedy(error))

    async def _finish(self) -> None:
        await self._save_and_wait()
        await self._validate()
        await self._export()
        await self._turns.give(self._move)
        self._progress.enter(trainer_pb2.PHASE_FINISHED)
        log.info("run finished", step=self._step, policy_version=self._progress.policy_version)
        if not self._config.exit_when_finished:
            await self._between_steps(hold=True)

    async def _export(self) -> None:
        """Write the final model. Raises NotSaved where there is no room for it."""
        await self._turns.take(self._move, discard_weights=False)
        path = self._run.path / "model"
        try:
            await self.compute(replace_folder, path, self._learner.export)
        except OSError as error:
            raise NotSaved(
                f"run.folder: the model could not be written to {path}: {error}. {remedy(error)} Then go on with the "
                "run; every step is saved."
            ) from None


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong before anything that followed from it."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _check_agrees(run: sample_buffer_pb2.ConfigureRunResponse, step: int, name: str) -> None:
    """Refuse to go on from a checkpoint and a journal that do not belong together."""
    if step > run.next_batch_step:
        raise ConfigError(
            f"run.name: the newest checkpoint of {name!r} holds {step} steps, but sample_buffer knows of only "
            f"{run.next_batch_step}: its journal was lost. Restore the journal, or choose another run.name."
        )
    if step < run.next_commit_step:
        raise ConfigError(
            f"run.name: sample_buffer has {run.next_commit_step} committed steps of {name!r}, but the newest "
            f"checkpoint holds {step}. Restore the checkpoints, or choose another run.name."
        )


def _log_step(report: StepReport) -> None:
    shown = ("loss", "grad_norm", "clipped", "staleness_max", "episode_success")
    log.info(
        "step done",
        step=report.step,
        reward=round(report.mean_reward or 0.0, 4),
        **{name: round(report.metrics[name], 4) for name in shown if name in report.metrics},
        wait_s=round(report.wait_seconds, 2),
        train_s=round(report.train_seconds, 2),
        publish_s=round(report.publish_seconds, 2),
    )


def _next_or_none(losses: Iterator[float]) -> float | None:
    return next(losses, None)
