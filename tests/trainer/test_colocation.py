"""Trainer and engines that take turns, by a real llm_proxy; and a policy that is away in host memory meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollfarm import rpc
from rollfarm.config import ConfigError
from rollfarm.errors import Unsupported
from rollfarm.ports import free_ports
from rollfarm.run import ModelConfig, TinyModelConfig
from rollfarm.testing import SimulatedEngine
from rollfarm.v1 import engine_pb2, llm_proxy_pb2_grpc
from tests.llm_proxy.support import Proxy, asked, run_proxy, versions
from tests.trainer.conftest import WORDS, make_backend, random_rows
from trainer.backends import Settings
from trainer.backends.replicated import ReplicatedBackend
from trainer.backends.scoring import TokenLogprobs, load_model
from trainer.colocation import Colocated
from trainer.config import TrainerConfig, TrainerRoot
from trainer.controls import Controls
from trainer.create_model import ensure_model
from trainer.objective import policy_objective
from trainer.ranks import Leader, Models, Role

OBJECTIVE = policy_objective(TrainerConfig())


class Moves:
    """Where models were moved to, and whether the engine slept then."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.made: list[tuple[bool, bool]] = []

    async def move(self, to_host: bool) -> None:
        self.made.append((to_host, self.engine.is_asleep))


def turns_by(stub: Any, controls: Controls | None = None, *, lease_seconds: float = 60.0) -> Colocated:
    return Colocated(stub, controls or Controls(), asyncio.Event(), drain_seconds=0, lease_seconds=lease_seconds)


@asynccontextmanager
async def taking_turns(
    engine: SimulatedEngine, *, lease_seconds: float = 60.0
) -> AsyncIterator[tuple[Colocated, Moves, Proxy]]:
    async with engine.serve() as address, run_proxy(address) as proxy:
        await proxy.serving()
        yield turns_by(proxy.stub, lease_seconds=lease_seconds), Moves(engine), proxy


async def test_models_are_on_the_devices_only_while_the_engines_sleep() -> None:
    engine = SimulatedEngine()
    async with taking_turns(engine) as (turns, moves, proxy):
        for _ in range(2):
            await turns.take(moves.move, discard_weights=False)
            await turns.take(moves.move, discard_weights=True)
            assert engine.is_asleep
            await turns.give(moves.move)
            await turns.give(moves.move)
            assert not engine.is_asleep

        assert moves.made == [(False, True), (True, True)] * 2
        assert versions(await proxy.generate(asked("a"))) == [0] * 4


async def test_a_long_turn_is_renewed_and_one_whose_trainer_died_ends() -> None:
    engine = SimulatedEngine()
    async with taking_turns(engine, lease_seconds=3.0) as (turns, moves, proxy):
        renewing = asyncio.create_task(turns.renew())
        await turns.take(moves.move, discard_weights=False)
        woken = asyncio.create_task(engine.until(lambda: not engine.is_asleep))
        await asyncio.wait({woken}, timeout=3.5)
        assert not woken.done()

        renewing.cancel()

        await woken
        assert versions(await proxy.generate(asked("a"))) == [0] * 4


async def test_a_version_is_kept_where_llm_proxy_restarts_after_it_came() -> None:
    class Counting(SimulatedEngine):
        sleep_count = 0

        async def Sleep(self, request: engine_pb2.SleepRequest, context: Any) -> Any:
            self.sleep_count += 1
            return await super().Sleep(request, context)

    engine, port = Counting(), free_ports(1)
    moves = Moves(engine)
    async with engine.serve() as address, rpc.channel(f"127.0.0.1:{port}") as channel:
        turns = turns_by(llm_proxy_pb2_grpc.LlmProxyServiceStub(channel), lease_seconds=3.0)
        async with run_proxy(address, port=port) as proxy:
            await proxy.serving()
            await turns.take(moves.move, discard_weights=True)
            assert await proxy.begin(1, *(await proxy.list_engines()).engines) == [""]
            await proxy.commit(1)
        async with run_proxy(address, port=port) as proxy:
            renewing = asyncio.create_task(turns.renew())
            await engine.until(lambda: engine.sleep_count == 2)
            renewing.cancel()
            await turns.give(moves.move)

            assert versions(await proxy.generate(asked("a"))) == [1] * 4


async def test_the_devices_are_had_only_once_an_engine_that_starts_sleeps() -> None:
    engine = SimulatedEngine()
    moves = Moves(engine)
    async with engine.serve() as address, run_proxy() as proxy:
        taking = asyncio.create_task(turns_by(proxy.stub).take(moves.move, discard_weights=True))
        await asyncio.wait({taking}, timeout=0.7)
        assert moves.made == []

        await proxy.attach(address)
        await taking

        assert moves.made == [(False, True)]


async def test_an_engine_that_cannot_sleep_is_a_wrong_configuration() -> None:
    engine = SimulatedEngine(sleep_error=Unsupported("This engine cannot."))
    async with taking_turns(engine) as (turns, moves, _):
        with pytest.raises(ConfigError, match=r"trainer\.colocated: This engine cannot\..*--enable-sleep-mode"):
            await turns.take(moves.move, discard_weights=True)

        assert moves.made == []


async def test_a_trainer_that_is_to_stop_does_not_wait_for_an_llm_proxy_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.colocation.CALL_SECONDS", 0.2)
    controls, moves = Controls(), Moves(SimulatedEngine())
    async with rpc.channel(f"127.0.0.1:{free_ports(1)}") as channel:
        turns = turns_by(llm_proxy_pb2_grpc.LlmProxyServiceStub(channel), controls)
        waiting = asyncio.create_task(turns.take(moves.move, discard_weights=False))
        await asyncio.wait({waiting}, timeout=0.5)
        assert not waiting.done()

        controls.drain()

        await waiting
        assert moves.made == [(False, False)]


def test_nccl_cannot_connect_what_shares_a_gpu(model_path: Path) -> None:
    root = TrainerRoot.model_validate(
        {"model": {"path": str(model_path)}, "trainer": {"colocated": True, "transport": "nccl"}}
    )

    with pytest.raises(ConfigError, match=r"trainer\.transport: nccl connects no two processes on one GPU"):
        root.check()


def step(backend: ReplicatedBackend, seed: int) -> dict[str, float]:
    rows = random_rows(8, seed=seed)
    return backend.train_step(rows, OBJECTIVE, temperature=1.0, norm=OBJECTIVE.norm(rows), lr=1e-2)


def test_a_policy_that_was_away_in_host_memory_goes_on_as_if_it_had_not_been(model_path: Path) -> None:
    away, here = make_backend(model_path), make_backend(model_path)
    leader = Leader(Models({Role.POLICY: away}), {})
    for backend in (away, here):
        step(backend, 0)

    leader.move(to_host=True)
    leader.move(to_host=False)

    assert [step(away, seed) for seed in (1, 2)] == [step(here, seed) for seed in (1, 2)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_policy_that_is_away_leaves_the_gpu_to_others(tmp_path: Path) -> None:
    ensure_model(ModelConfig(path=str(tmp_path), create=TinyModelConfig(words=WORDS, hidden_size=512, layers=8)))
    settings = Settings(path=str(tmp_path), device=torch.device("cuda"))
    backend = ReplicatedBackend(TokenLogprobs(load_model(str(tmp_path))), settings)
    leader = Leader(Models({Role.POLICY: backend}), {})
    step(backend, 0)
    reserved = torch.cuda.memory_reserved()

    leader.move(to_host=True)
    left = torch.cuda.memory_reserved()
    leader.move(to_host=False)

    assert left < reserved / 4
    assert step(backend, 1)["skipped"] == 0
