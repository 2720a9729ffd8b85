"""`rollfarm inspect` shows what happened to an episode, and what the policy wrote, to people."""

import os
import re
import subprocess
import sys

from rollfarm import rpc
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2 as tp
from tests.sample_buffer.support import ROOT, Process, lease_all, make_spec, play, process, request_id, take_batch


def inspect(port: int, *arguments: str) -> str:
    """What it prints, once it ended with status 0."""
    shown = subprocess.run(
        [sys.executable, "-m", "rollfarm", "inspect", "--address", f"127.0.0.1:{port}", *arguments],
        cwd=ROOT,
        env={**os.environ, "TZ": "UTC"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def told(episode: pb.Episode) -> tp.Trajectory:
    """An episode of two policy turns by two engines, with its text."""
    played = play(episode, versions=[0, 0])
    played.turns[1].engine_id, played.turns[2].engine_id = "engine-b", "engine-a"
    played.turn_texts.extend(["the lake is [/frozen]", "go left", "go down"])
    played.outcome, played.outcome_detail = tp.OUTCOME_TRUNCATED, "at [12] turns"
    return played


async def commit_one_step(farm: Process) -> pb.EpisodeLease:
    """Fail an episode, then play, take, publish and commit the first step. Answers the lease that made up for it."""
    stub = farm.stub
    spec = make_spec(batch_groups=1, group_size=1, alpha=0.0)
    await rpc.call(
        stub.ConfigureRun, pb.ConfigureRunRequest(request_id=request_id(), trainer_id="trainer", spec=spec), timeout=10
    )
    (first,) = await lease_all(stub)
    failure = pb.FailEpisodeRequest(
        request_id=request_id(), lease_id=first.lease_id, outcome=tp.OUTCOME_ENV_FAILED, detail="the ice [/broke]"
    )
    await rpc.call(stub.FailEpisode, failure, timeout=10)
    (again,) = await lease_all(stub)
    completion = pb.CompleteEpisodeRequest(
        request_id=request_id(), lease_id=again.lease_id, trajectory=told(again.episode)
    )
    await rpc.call(stub.CompleteEpisode, completion, timeout=10)
    (batch,) = await take_batch(stub, 0)
    published = pb.PublishVersionRequest(
        request_id=request_id(), run_id="run", policy_version=1, trained_step_count=1, trainer_id="trainer"
    )
    await rpc.call(stub.PublishVersion, published, timeout=10)
    committed = pb.CommitStepRequest(
        request_id=request_id(), run_id="run", step=0, batch_id=batch.batch.batch_id, trainer_id="trainer"
    )
    await rpc.call(stub.CommitStep, committed, timeout=10)
    return again


async def test_inspect_tells_every_transition_of_an_episode_and_its_text() -> None:
    async with process("--sample_buffer.journal", "memory") as farm:
        again = await commit_one_step(farm)

        listed = inspect(farm.port)
        shown = inspect(farm.port, "run-g0.0")

    assert "run-g0.0.2" in listed
    for text in ("the lake is [/frozen]", "go left", "go down", "truncated at [12] turns"):
        assert text in shown
    nonce = again.lease_id.rpartition("-")[0]
    lines = re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}  (\w+) +(.*)$", shown, re.MULTILINE)
    assert [(event, facts.rstrip()) for event, facts in lines] == [
        ("admitted", "version 0"),
        ("leased", f"version 0 · worker worker · lease {nonce}-0"),
        ("failed", f"version 0 · worker worker · lease {nonce}-0 · OUTCOME_ENV_FAILED: the ice [/broke]"),
        ("leased", f"version 0 · worker worker · lease {nonce}-1"),
        (
            "completed",
            f"version 0 · worker worker · lease {nonce}-1 · engine engine-b, engine-a · OUTCOME_TRUNCATED",
        ),
        ("ready", "version 0"),
        ("taken", f"version 0 · step 0 · batch {nonce}-step-0"),
        ("published", f"version 1 · step 0 · batch {nonce}-step-0"),
        ("committed", f"version 1 · step 0 · batch {nonce}-step-0"),
    ]
