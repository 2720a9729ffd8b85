"""The loop against a real sample_buffer process, with players in place of env_managers and no engines."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from rollfarm.config import ConfigError
from rollfarm.errors import CheckpointFailed, TrainerReplaced
from rollfarm.v1 import sample_buffer_pb2, trainer_pb2
from tests.trainer.disks import FullDisk
from tests.trainer.farms import Farm, farm
from tests.trainer.stand_ins import evenly
from trainer.colocation import Move
from trainer.saving import NotSaved


async def test_a_run_goes_from_first_publication_to_final_export(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path) as run:
        trainer = run.trainer()
        await trainer.controller.run()

        status = await run.status()
        assert (status.policy_version, status.next_commit_step) == (7, 6)
        assert status.committed_trajectory_count == 6 * 8
        assert status.max_staleness <= 1
        assert trainer.progress.phase == trainer_pb2.PHASE_FINISHED
        assert [line["step"] for line in run.metrics("step")] == list(range(6))
        assert [(line["step_count"], line["episode_count"]) for line in run.metrics("validation")] == [(0, 4), (6, 4)]
        _assert_told_by_domain(run)
        assert run.weights()


async def test_alpha_0_trains_on_nothing_but_the_newest_version(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path, alpha=0.0) as run:
        await run.trainer().controller.run()

        status = await run.status()
        assert dict(status.staleness_counts) == {0: 48}
        assert [line["metrics"]["staleness_max"] for line in run.metrics("step")] == [0] * 6


async def test_a_crash_repeats_uncommitted_batches_in_silence_and_changes_nothing(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"checkpoint_every": 4, "validation_episodes": 0}
    async with farm(buffer_address, model_path, tmp_path / "straight", **settings) as straight:
        await straight.trainer().controller.run()
    async with farm(buffer_address, model_path, tmp_path / "crashed", **settings) as run:
        first = run.trainer()
        dying = asyncio.create_task(first.controller.run())
        await first.until(lambda progress: progress.step_count >= 3)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        before = await run.status()

        second = run.trainer()
        await second.controller.run()

        after = await run.status()
        repeated = before.next_batch_step
        versions = [line["policy_version"] for line in run.metrics("step")]
        assert before.next_commit_step == 0 < repeated
        assert versions[: repeated - 1] == [before.policy_version] * (repeated - 1)
        assert versions[repeated - 1 :] == [before.policy_version + 1 + each for each in range(6 - repeated + 1)]
        assert after.policy_version == versions[-1]
        assert [line["step"] for line in run.metrics("step")] == list(range(6))
        assert (after.next_commit_step, after.committed_trajectory_count) == (6, 48)
        for name, tensor in straight.weights().items():
            assert torch.equal(run.weights()[name], tensor), name


async def test_without_room_training_goes_on_and_nothing_is_lost(
    buffer_address: str, model_path: Path, tmp_path: Path, full_disk: FullDisk
) -> None:
    settings: dict[str, Any] = {"checkpoint_every": 1, "validation_episodes": 0}
    async with farm(buffer_address, model_path, tmp_path / "straight", **settings) as straight:
        await straight.trainer().controller.run()
    async with farm(buffer_address, model_path, full_disk.folder, **settings) as run:
        run.root.run.path.mkdir()
        full_disk.fill()
        first = run.trainer()
        with pytest.raises(NotSaved, match=r"No space left on device\. Free room there"):
            await first.controller.run()
        before = await run.status()
        assert (first.progress.step_count, before.next_batch_step, before.next_commit_step) == (6, 6, 0)
        assert first.progress.phase != trainer_pb2.PHASE_FINISHED
        assert not list(run.root.run.path.glob("checkpoints/*"))

        full_disk.free()
        second = run.trainer()
        await second.controller.run()

        after = await run.status()
        assert (after.next_commit_step, after.committed_trajectory_count) == (6, 48)
        assert [line["step"] for line in run.metrics("step")] == list(range(6))
        for name, tensor in straight.weights().items():
            assert torch.equal(run.weights()[name], tensor), name


async def test_once_there_is_room_again_the_next_checkpoint_holds_every_step(
    buffer_address: str, model_path: Path, full_disk: FullDisk
) -> None:
    settings: dict[str, Any] = {"checkpoint_every": 1, "validation_episodes": 0}
    async with farm(buffer_address, model_path, full_disk.folder, **settings) as run:
        run.root.run.path.mkdir()
        full_disk.fill()
        trainer = run.with_run(steps=0).trainer()
        running = asyncio.create_task(trainer.controller.run())
        await trainer.until(lambda progress: progress.step_count >= 3)
        with pytest.raises(CheckpointFailed, match="No space left"):
            await trainer.controls.checkpoint()
        assert (await run.status()).next_commit_step == 0

        full_disk.free()
        _, steps = await trainer.controls.checkpoint()

        status = await run.status()
        assert status.next_commit_step >= steps >= 3
        assert status.credits_in_use_count <= status.credit_count
        trainer.controls.drain()
        await running
        assert len(run.metrics("step")) == trainer.progress.step_count


async def test_each_validation_has_a_checkpoint_and_the_best_are_kept(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"checkpoint_every": 6, "validation_every": 1, "keep_best": 2, "best_metric": "success"}
    async with farm(buffer_address, model_path, tmp_path, **settings) as run:
        await run.trainer(keep=1, keep_best=2).controller.run()

        values = {line["step_count"]: line["metrics"]["success"] for line in run.metrics("validation")}
        best = sorted((step for step in values if step), key=lambda step: (values[step], step))[-2:]
        kept = {path.name for path in (run.root.run.path / "checkpoints").iterdir()}
        assert list(values) == list(range(7))
        assert kept == {f"step-{step:06d}" for step in {*best, 6}}


async def test_a_validation_that_a_crash_cut_short_is_done_by_the_next_trainer(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path, checkpoint_every=2, validation_every=2) as run:
        first = run.trainer()
        dying = asyncio.create_task(first.controller.run())
        await first.until(lambda progress: (progress.step_count, progress.phase) == (4, trainer_pb2.PHASE_VALIDATING))
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)

        await run.trainer().controller.run()

        assert [line["step_count"] for line in run.metrics("validation")] == [0, 2, 4, 6]


async def test_a_run_goes_on_after_a_batch_whose_step_is_not_finite(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    def pay(episode: sample_buffer_pb2.Episode) -> float:
        return 1e300 if (episode.task.index, episode.member) == (4, 0) else evenly(episode)

    settings: dict[str, Any] = {"advantage": "dr_grpo", "validation_episodes": 0}
    async with farm(buffer_address, model_path, tmp_path, pay=pay, **settings) as run:
        with capture_logs() as logs:
            await run.trainer().controller.run()

        skipped = [line["metrics"]["skipped"] for line in run.metrics("step")]
        assert sorted(skipped) == [0, 0, 0, 0, 0, 1]
        named = [entry["group_ids"] for entry in logs if entry["event"].startswith("step skipped")]
        assert [len(group_ids) for group_ids in named] == [2]
        status = await run.status()
        assert (status.next_commit_step, status.committed_trajectory_count) == (6, 48)


async def test_a_trainer_that_another_one_replaces_ends_and_the_run_goes_on_without_it(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"checkpoint_every": 1, "validation_episodes": 0}
    async with farm(buffer_address, model_path, tmp_path, **settings) as run:
        run = run.with_run(steps=12)
        first, second = run.trainer(), run.trainer()
        replaced = asyncio.create_task(first.controller.run())
        await first.until(lambda progress: progress.step_count >= 2)

        await second.controller.run()

        with pytest.raises(TrainerReplaced, match="has taken over"):
            await replaced
        assert first.progress.step_count < 12
        assert [line["step"] for line in run.metrics("step")] == list(range(12))
        assert (await run.status()).next_commit_step == 12


async def test_a_trainer_asked_to_stop_saves_and_the_next_one_repeats_nothing(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path, checkpoint_every=100) as run:
        first = run.trainer()
        stopping = asyncio.create_task(first.controller.run())
        await first.until(lambda progress: progress.step_count >= 2)
        first.controls.drain()
        await stopping
        held = first.progress.step_count
        status = await run.status()
        assert status.next_commit_step == held

        second = run.trainer()
        await second.controller.run()

        assert [line["step"] for line in run.metrics("step")] == list(range(6))
        assert (await run.status()).next_commit_step == 6
        assert len({line["policy_version"] for line in run.metrics("step")}) == 6


class Devices:
    """Turns that note whose the devices are."""

    def __init__(self) -> None:
        self.given = asyncio.Event()

    async def take(self, move: Move, *, discard_weights: bool) -> None:
        self.given.clear()

    async def give(self, move: Move) -> None:
        self.given.set()

    async def renew(self) -> None: ...


async def test_a_pause_holds_the_next_step_and_leaves_the_devices_and_a_checkpoint_can_be_had_meanwhile(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    devices = Devices()
    async with farm(buffer_address, model_path, tmp_path, checkpoint_every=100) as run:
        trainer = run.trainer(turns=devices)
        running = asyncio.create_task(trainer.controller.run())
        await trainer.until(lambda progress: progress.step_count >= 1)

        trainer.controls.pause(True)
        path, steps = await trainer.controls.checkpoint()

        assert path.name == f"step-{steps:06d}"
        assert (await run.status()).next_commit_step == steps
        assert trainer.progress.step_count == steps < 6
        await asyncio.wait_for(devices.given.wait(), 10)
        trainer.controls.pause(False)
        await running
        assert trainer.progress.step_count == 6


async def test_a_finished_run_is_found_finished_and_more_steps_go_on(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path, validation_episodes=0) as run:
        await run.trainer().controller.run()
        again = run.trainer()
        await again.controller.run()
        assert again.progress.phase == trainer_pb2.PHASE_FINISHED

        longer = run.with_run(steps=8)
        await longer.trainer().controller.run()

        assert [line["step"] for line in run.metrics("step")] == list(range(8))


async def test_a_checkpoint_that_the_journal_does_not_know_is_refused(
    buffer_address: str, model_path: Path, tmp_path: Path
) -> None:
    async with farm(buffer_address, model_path, tmp_path) as run:
        await run.trainer().controller.run()

        forgotten = run.with_run(name="forgotten")
        (run.root.run.path / "checkpoints").rename(_made(forgotten.root.run.path) / "checkpoints")
        with pytest.raises(ConfigError, match="belongs to the run"):
            await forgotten.trainer().controller.run()

        for state in (forgotten.root.run.path / "checkpoints").glob("*/state.json"):
            state.write_text(state.read_text().replace(run.root.run.name, "forgotten"))
        with pytest.raises(ConfigError, match="its journal was lost"):
            await forgotten.trainer().controller.run()


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _assert_told_by_domain(run: Farm) -> None:
    """Every step's figures, a validation's, and the first step's samples."""
    for line in (step["metrics"] for step in run.metrics("step")):
        assert line["domain/lake/episodes"] == 8
        assert line["environment/frozen_lake/staleness"] == line["domain/lake/staleness"] == line["staleness"]
        assert line["outcome_count/ok"] >= 8
    for line in run.metrics("validation"):
        assert line["metrics"]["domain/lake/reward"] == pytest.approx(line["mean_reward"])
    samples = [json.loads(line) for line in (run.root.run.path / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0] * 4
    assert all(sample["text"] and sample["domain"] == "lake" for sample in samples)
