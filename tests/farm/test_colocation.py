"""A farm whose engine and trainer take turns, as on one GPU."""

import json
import os
import signal
import tomllib

import grpc
import pytest

from rollfarm.v1 import trainer_pb2
from tests.farm.conftest import CHECKOUT, Farm, StartFarm

EASY = CHECKOUT / "tests" / "farm" / "easy.toml"


def sleeping_in_training(farm: Farm) -> bool | None:
    """Whether the engine slept in the middle of a step; None where it was not asked in the middle of one."""
    try:
        before, engines, after = farm.progress(), farm.proxy().engines, farm.progress()
    except grpc.RpcError:
        return None  # the trainer was killed, and starts
    if (before.phase, before.step_count) != (after.phase, after.step_count):
        return None
    return all(each.sleeping for each in engines) if before.phase == trainer_pb2.PHASE_TRAINING else None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_learns_in_turns_and_goes_on_after_its_trainer_was_killed_in_its_turn(start_farm: StartFarm) -> None:
    flags = ["--trainer.colocated", "true", "--run.alpha", "0", "--trainer.passes", "30", "--trainer.lr", "2e-3"]
    farm = start_farm(EASY, *flags, "--trainer.transport", "ipc", "--trainer.checkpoint_every", "1")
    seen: list[bool] = []

    def in_training(step: int) -> bool:
        found = sleeping_in_training(farm)
        seen.extend([] if found is None else [found])
        return found is not None and farm.progress().step_count >= step

    farm.wait_until(lambda: in_training(2), seconds=120)
    (trainer,) = farm.pids("trainer")
    os.kill(trainer, signal.SIGKILL)
    farm.wait_until(lambda: in_training(4), seconds=120)
    status, summary = farm.finish(seconds=120)

    assert all(seen)
    run = tomllib.loads(EASY.read_text())["run"]
    assert (status, summary["steps"]) == (0, run["steps"])
    assert summary["samples"] == run["steps"] * run["batch_groups"] * run["group_size"]
    lines = [json.loads(line) for line in (farm.run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(run["steps"]))
    assert steps[-1]["mean_reward"] > steps[0]["mean_reward"] + 0.05
