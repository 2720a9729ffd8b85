"""The engine host as a process: what it says when it cannot start, and what is left when something is killed."""

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollfarm import rpc
from rollfarm.errors import WeightsFailed, WeightsNotStaged
from rollfarm.v1 import engine_pb2
from tests.engine.kit import SECONDS, Host, Reference, other_weights
from tests.engine.process import COMMAND, ROOT, Process, vllm_flags


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *args], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "model.path: missing"),
        ("/nowhere/model", "/nowhere/model does not exist"),
        ("proto", "no config.json"),
    ],
)
def test_a_wrong_model_path_is_a_configuration_error(path: str, problem: str) -> None:
    ended = run("--model.path", path)

    assert ended.returncode == 2
    assert problem in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_missing_vllm_is_a_configuration_error(tied_model: Path) -> None:
    ended = run("--model.path", str(tied_model), "--engine.adapter", "vllm", "--engine.vllm.python", "/nowhere/python")

    assert ended.returncode == 2
    assert "Run tools/install-vllm.sh" in ended.stderr


def test_a_port_in_use_is_said_so(tied_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("--model.path", str(tied_model), "--engine.listen.port", str(taken.getsockname()[1]))

    assert ended.returncode == 3
    assert "Cannot listen on" in ended.stderr
    assert "--engine.listen.port" in ended.stderr


def test_help_imports_no_torch() -> None:
    script = (
        "import runpy, sys; sys.argv = ['engine', '--help']\n"
        "try: runpy.run_module('llm_proxy.engine', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )

    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)

    assert ended.stdout.splitlines()[-1] == "False"
    assert "--engine.slots" in ended.stdout


SENDER = """
import datetime, sys, time, torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
name, elements = sys.argv[1], int(sys.argv[2])
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
group = ProcessGroupGloo(PrefixStore(name, store), 0, 2, datetime.timedelta(seconds=60))
group.broadcast(torch.zeros(elements), 0).wait()
print("sent", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
async def test_a_killed_sender_leaves_the_old_weights(embedded: Host) -> None:
    tensors = other_weights(embedded.model, 1)
    first, *_rest = tensors.values()
    _name, *_ = tensors
    sender = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SENDER, "killed", str(first.numel())), stdout=subprocess.PIPE
    )
    assert sender.stdout is not None
    group = engine_pb2.WeightGroup(
        group_name="killed",
        store_address=f"127.0.0.1:{int(await sender.stdout.readline())}",
        rank=1,
        world_size=2,
        backend="gloo",
    )
    request = engine_pb2.StageWeightsRequest(
        group_name="killed",
        policy_version=1,
        tensors=[
            engine_pb2.TensorSpec(name=name, dtype="float32", shape=tensor.shape) for name, tensor in tensors.items()
        ],
        bucket_size_bytes=first.nbytes,
    )
    await rpc.call(embedded.stub.JoinWeights, engine_pb2.JoinWeightsRequest(group=group), timeout=SECONDS)

    staging = asyncio.create_task(rpc.call(embedded.stub.StageWeights, request, timeout=SECONDS, retry=False))
    assert await sender.stdout.readline() == b"sent\n"
    sender.kill()

    with pytest.raises(WeightsFailed, match="vanished"):
        await staging
    await sender.wait()
    with pytest.raises(WeightsNotStaged):
        await embedded.apply(1)
    (answer,) = await embedded.client.generate([[1, 2, 3]], temperature=0)
    assert answer.ids == Reference(embedded.model).greedy([1, 2, 3], 16)


@pytest.mark.slow
@pytest.mark.timeout(700)
async def test_vllm_and_its_host_end_together(tied_model: Path, vllm_python: Path) -> None:
    with Process(*vllm_flags(tied_model, vllm_python)) as killed:
        await asyncio.to_thread(killed.address)
        family = psutil.Process(killed.process.pid).children(recursive=True)

        killed.process.kill()

        _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=60)
        assert alive == []

    with Process(*vllm_flags(tied_model, vllm_python)) as bereft:
        await asyncio.to_thread(bereft.address)
        (child,) = psutil.Process(bereft.process.pid).children()
        family = child.children(recursive=True)

        child.send_signal(signal.SIGKILL)

        assert await asyncio.to_thread(bereft.wait) == 1
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=60)
        assert alive == []
        assert "vLLM ended by itself with status -9" in "".join(bereft.lines)
