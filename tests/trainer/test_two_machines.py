"""Weights between two machines: network namespaces on one wire, each with addresses and names of its own."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from llm_proxy.engine.groups import Group
from llm_proxy.engine.layout import Layout, check_sums, table_for
from rollfarm.v1 import llm_proxy_pb2
from tests.trainer.conftest import ROOT
from tests.trainer.test_publisher import snapshot
from trainer.weights.groups import Links

TRAINER, ENGINE = "10.231.77.1", "10.231.77.2"


@dataclass(frozen=True)
class Machine:
    """A network namespace."""

    name: str
    address: str

    @property
    def hosts(self) -> Path:
        """What `ip netns exec` shows as /etc/hosts."""
        return Path("/etc/netns") / self.name / "hosts"

    @property
    def prefix(self) -> list[str]:
        """Starts a command there."""
        return ["ip", "netns", "exec", self.name]

    def add(self) -> None:
        ip("netns", "add", self.name)
        self.hosts.parent.mkdir(parents=True)
        # As Debian's installer leaves it.
        self.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")

    def plug(self, wire: str) -> None:
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", wire)
        for device in ("lo", wire):
            ip("-n", self.name, "link", "set", device, "up")

    def remove(self) -> None:
        shutil.rmtree(self.hosts.parent, ignore_errors=True)
        subprocess.run(["ip", "netns", "delete", self.name], check=False, capture_output=True, timeout=10)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """The trainer's and the engine's."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root on Linux, with iproute2, can make network namespaces")
    here = os.getpid()
    trainer, engine = Machine(f"rf-{here}-trainer", TRAINER), Machine(f"rf-{here}-engine", ENGINE)
    try:
        try:
            trainer.add()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        engine.add()
        ip("link", "add", "wire", "netns", trainer.name, "type", "veth", "peer", "name", "wire", "netns", engine.name)
        trainer.plug("wire")
        engine.plug("wire")
        yield trainer, engine
    finally:
        trainer.remove()
        engine.remove()


@pytest.mark.slow
def test_weights_reach_an_engine_on_another_machine_though_both_know_themselves_as_127_0_1_1(
    machines: tuple[Machine, Machine],
) -> None:
    trainer, engine = machines

    command = [*trainer.prefix, sys.executable, "-m", "tests.trainer.publish", trainer.address, *engine.prefix]
    published = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    assert published.returncode == 0, published.stderr


class Near:
    """An engine of this process, that takes whatever is sent."""

    def __init__(self) -> None:
        self.joins: list[bool] = []
        """Whether it was asked to join, with each version."""

        self.group: Group | None = None

    async def begin(self, request: llm_proxy_pb2.BeginWeightUpdateRequest) -> llm_proxy_pb2.BeginWeightUpdateResponse:
        (transfer,) = request.transfers
        self.joins.append(transfer.join)
        if transfer.join:
            self.group = await asyncio.to_thread(Group, transfer.group, seconds=10)
        assert self.group is not None
        layout = Layout(request.tensors, request.bucket_size_bytes)
        buffers = layout.buffers(torch.empty(layout.size_bytes, dtype=torch.uint8))
        table = table_for(buffers)
        check_sums(self.group.receive([*buffers, table]), table)
        result = llm_proxy_pb2.EngineTransferResult(engine_id=transfer.engine_id)
        return llm_proxy_pb2.BeginWeightUpdateResponse(results=[result])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers on all of 127.0.0.0/8")
async def test_both_ends_listen_where_the_other_can_reach_them() -> None:
    links = Links(host="127.0.0.2", port=0, timeout_seconds=10)
    before = listening()
    near = Near()

    assert await links.transfer(snapshot(1), [llm_proxy_pb2.Engine(engine_id="near")], near.begin) == ["near"]

    assert {address for address, _ in listening() - before} == {"127.0.0.2", "127.0.0.1"}


async def test_a_group_is_kept_until_its_engine_leaves_and_then_frees_its_sockets() -> None:
    links = Links(host="127.0.0.1", port=0, timeout_seconds=10)
    before = listening()
    engine, near = llm_proxy_pb2.Engine(engine_id="near", instance_id="first"), Near()
    for version in (1, 2):
        await links.transfer(snapshot(version), [engine], near.begin)
        links.forget_all_but({"first"})
    assert near.joins == [True, False]
    near.group = None
    assert listening() > before

    links.forget_all_but({"another"})

    async with asyncio.timeout(10):
        while listening() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_an_address_of_another_machine_is_refused_at_the_start() -> None:
    with pytest.raises(RuntimeError, match=r"192\.0\.2\.1 to a \(local\) address"):
        Links(host="192.0.2.1", port=0, timeout_seconds=10)


def listening() -> set[tuple[str, int]]:
    """Where this process takes connections."""
    sockets = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN}
