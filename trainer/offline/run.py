"""A run on records, from wherever it stands to its end: a step, a measurement and a checkpoint now and then.

Which records a step gets is a function of its number, and a checkpoint has everything else: a run that was killed ends
with the weights that it would have had.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from rollfarm.config import ConfigError
from rollfarm.v1 import trainer_pb2
from trainer.checkpoints import Checkpoints, CheckpointState, replace_folder
from trainer.config import TrainerRoot
from trainer.disk import remedy
from trainer.offline.config import OfflineConfig
from trainer.offline.data import Data, Sieve
from trainer.offline.pipelines import Pipeline
from trainer.progress import Progress, StepReport, ValidationReport
from trainer.ranks import PULSE_SECONDS, Leader
from trainer.saving import NotSaved, Saver
from trainer.schedule import lr_share

log = structlog.get_logger()

T = TypeVar("T")

LEFT_OUT = "left_out"
"""Records of a step that were too long."""


class OfflineRun:
    """`run` once."""

    def __init__(
        self,
        root: TrainerRoot,
        offline: OfflineConfig,
        leader: Leader,
        pipeline: Pipeline,
        data: Data,
        sieve: Sieve,
        checkpoints: Checkpoints,
        progress: Progress,
        stop: asyncio.Event,
    ) -> None:
        """`stop` ends it early: it saves, and can go on later."""
        self._run = root.run
        self._config = root.trainer
        self._offline = offline
        self._leader = leader
        self._pipeline = pipeline
        self._data = data
        self._sieve = sieve
        self._checkpoints = checkpoints
        self._progress = progress
        self._stop = stop
        self._compute_thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._saved = 0
        """Steps that a durable checkpoint holds."""
        self.step = 0
        """Steps done."""

    async def run(self) -> bool:
        """Whether it came to its end. Raises ConfigError, also where it cannot be saved."""
        problem: ConfigError | None = None
        is_over = False
        async with asyncio.TaskGroup() as group:
            saver = Saver(self._checkpoints, self._note_saved, group)
            pulses = group.create_task(self._pulse(), name="pulse")
            try:
                is_over = await self._live(saver)
            except ConfigError as error:
                problem = error
            pulses.cancel()
        if problem is not None:
            raise problem
        await self._compute(self._leader.stop)
        return is_over

    async def _live(self, saver: Saver) -> bool:
        await self._go_on()
        await self._measure_if_due()
        while not self._is_over() and not self._stop.is_set():
            await self._train()
            if self.step % self._config.checkpoint_every == 0:
                await self._save(saver)
            await self._measure_if_due()
        await self._save(saver)
        await saver.settled()
        if (problem := saver.problem) is not None:
            raise NotSaved(
                f"run.folder: step {self.step} could not be saved in {self._checkpoints.folder}: {problem}. "
                f"{remedy(problem)} Then go on with the run."
            )
        if not self._is_over():
            return False
        await self._measure()
        await self._export()
        self._progress.enter(trainer_pb2.PHASE_FINISHED)
        return True

    def _is_over(self) -> bool:
        return bool(self._run.steps) and self.step >= self._run.steps

    async def _compute(self, work: Callable[..., T], *args: object) -> T:
        """Run `work` in the one thread that touches the models."""
        return await asyncio.get_running_loop().run_in_executor(self._compute_thread, work, *args)

    async def _pulse(self) -> None:
        """Keep in touch with the other ranks, until cancelled: a checkpoint may take longer than they wait."""
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            await self._compute(self._leader.pulse)

    async def _go_on(self) -> None:
        """Take up the newest checkpoint, which is of these records."""
        self._checkpoints.sweep()
        if (found := self._checkpoints.newest()) is not None:
            path, state = found
            await self._compute(self._leader.load, path)
            self.step = self._saved = state.step_count
            self._progress.checkpoint_path = str(path)
        self._progress.resume(self.step)
        log.info(
            "run goes on" if self.step else "run begins",
            run=self._run.name,
            step=self.step,
            steps=self._run.steps or "no end",
            records=len(self._data.items),
            held_out=len(self._data.held_out),
        )

    async def _train(self) -> None:
        self._progress.enter(trainer_pb2.PHASE_TRAINING)
        began = time.monotonic()
        metrics = await self._compute(self._learn)
        report = StepReport(
            step=self.step,
            mean_reward=None,
            metrics=_finite(metrics),
            wait_seconds=0.0,
            train_seconds=time.monotonic() - began,
            publish_seconds=0.0,
            policy_version=0,
            time=time.time(),
        )
        self.step += 1
        self._progress.stepped(report)
        shown = {name: round(report.metrics[name], 4) for name in ("loss", "accuracy") if name in report.metrics}
        log.info("step done", step=report.step, **shown, train_s=round(report.train_seconds, 2))

    def _learn(self) -> dict[str, float]:
        size, deck = self._offline.batch_size, self._data.deck
        items = [self._data.items[number] for number in deck.batch(self.step, size)]
        batch = self._sieve.rendered(items)
        told = {"epoch": self.step * size / deck.epoch_size, LEFT_OUT: float(len(items) - len(batch))}
        if not batch:
            return {**told, "skipped": 0.0, "tokens": 0.0}
        lr = self._config.lr * lr_share(self._config, self.step, self._run.steps)
        metrics = self._pipeline.step(batch, lr)
        if metrics["skipped"]:
            log.error("step skipped: loss or gradient is not finite", step=self.step)
        return {**metrics, **told}

    # --- measurements ---

    async def _measure_if_due(self) -> None:
        every = self._config.validation_every
        if self.step == 0 or (every and self.step % every == 0):
            await self._measure()

    async def _measure(self) -> None:
        """Measure the policy on what was held out, once for each number of steps."""
        if not self._data.held_out or self._progress.has_validation(self.step):
            return
        self._progress.enter(trainer_pb2.PHASE_VALIDATING)
        metrics = _finite(await self._compute(self._measured))
        count = int(len(self._data.held_out) - metrics[LEFT_OUT])
        report = ValidationReport(self.step, None, metrics, count, policy_version=0, time=time.time())
        self._progress.validated(report)
        log.info("validated", step=self.step, **{name: round(value, 4) for name, value in metrics.items()})

    def _measured(self) -> dict[str, float]:
        held, size = self._data.held_out, self._offline.batch_size
        found: list[dict[str, float]] = []
        left_out = 0
        for first in range(0, len(held), size):
            items = held[first : first + size]
            batch = self._sieve.rendered(items)
            left_out += len(items) - len(batch)
            if batch:
                found.append(self._pipeline.measure(batch))
        return {**_mean(found), LEFT_OUT: float(left_out)}

    # --- checkpoints and the end ---

    async def _save(self, saver: Saver) -> None:
        """Begin to save what is not saved; training may go on while it is written."""
        await saver.settled()
        if self.step == self._saved:
            return
        state = CheckpointState(self._run.name, self.step, 0, "", self._data.identity)
        await saver.begin(state, lambda folder: self._compute(self._leader.save, folder))

    async def _note_saved(self, state: CheckpointState, path: Path) -> None:
        self._saved = state.step_count
        self._progress.checkpoint_path = str(path)
        self._progress.catch_up()

    async def _export(self) -> None:
        """Write the final model. Raises NotSaved where there is no room for it."""
        path = self._run.path / "model"
        try:
            await self._compute(replace_folder, path, self._leader.export)
        except OSError as error:
            raise NotSaved(
                f"run.folder: the model could not be written to {path}: {error}. {remedy(error)} Then go on with the "
                "run; every step is saved."
            ) from None


def check_same(was: Mapping[str, object], now: Mapping[str, object], path: Path) -> None:
    """Raise ConfigError where the steps to come would not follow those that were done."""
    changed = [name for name, value in json.loads(json.dumps(now)).items() if was.get(name) != value]
    if changed:
        told = "; ".join(f"{name} was {was.get(name)!r} and is {now[name]!r}" for name in changed)
        raise ConfigError(
            f"trainer.offline: {path} was trained otherwise: {told}. Restore that, or choose another run.name."
        )


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """JSON has no others."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of several measurements, each by its weight."""
    total = sum(each["weight"] for each in found)

    def values() -> Iterator[tuple[str, float]]:
        for name in found[0] if found else ():
            if name != "weight":
                yield name, sum(each[name] * each["weight"] for each in found) / total

    return dict(values())
