"""Wires the gateway: its domains with their workers, and its channels to external scorers."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import structlog

from reward_gateway.asking import Asker, attempt_of
from reward_gateway.config import RewardGatewayConfig
from reward_gateway.domains import Bulkhead, Comparer, Domain, Episode
from reward_gateway.gathering import Gathering
from reward_gateway.memory import Memory
from reward_gateway.pool import WorkerPool
from reward_gateway.scoring import External, InWorker, Plan, Share, plan
from reward_gateway.server import RewardGatewayServicer
from reward_gateway.timeouts import Timeout
from rollfarm import rpc, sandbox
from rollfarm.v1 import reward_gateway_pb2_grpc, trajectory_pb2

log = structlog.get_logger()


@asynccontextmanager
async def open_gateway(config: RewardGatewayConfig, shares: Plan | None = None) -> AsyncIterator[RewardGatewayServicer]:
    """The gateway with its workers and its channels, for as long as the context lasts."""
    shares = plan(config) if shares is None else shares
    memory = Memory(config.cached_scores)
    async with AsyncExitStack() as stack:
        external = await _external(stack, shares)
        pools = await _pools(stack, config, shares)
        domains: dict[str, Domain] = {}
        for name, asked in shares.items():
            askers = [_asker(name, config, share, pools.get(name), external, memory) for share in asked]
            domains[name] = _domain(name, config, askers)
        for domain in domains.values():
            stack.push_async_callback(domain.close)
        yield RewardGatewayServicer(shares, domains, _sandbox_level(config, shares))


def _sandbox_level(config: RewardGatewayConfig, shares: Plan) -> "trajectory_pb2.SandboxLevel.ValueType":
    """What programs are run under, looked at once; unspecified where no reward runs any."""
    sandbox.configure(config.sandbox)
    if not any(share.runs_programs for domain in shares.values() for share in domain):
        return trajectory_pb2.SANDBOX_LEVEL_UNSPECIFIED
    level = sandbox.shared().level
    if level == trajectory_pb2.SANDBOX_LEVEL_REFUSED:
        log.warning("no sandbox works here, so that no program can be scored")
    return level


async def _external(stack: AsyncExitStack, shares: Plan) -> Mapping[str, Any]:
    addresses = {
        share.where.address for domain in shares.values() for share in domain if isinstance(share.where, External)
    }
    channels = {address: await stack.enter_async_context(rpc.channel(address)) for address in addresses}
    return {address: reward_gateway_pb2_grpc.RewardServiceStub(channel) for address, channel in channels.items()}


async def _pools(stack: AsyncExitStack, config: RewardGatewayConfig, shares: Plan) -> Mapping[str, WorkerPool]:
    """A pool for each domain that needs one, so that a domain which hangs takes its own workers alone."""
    pools = {
        name: WorkerPool(
            config.domains[name].workers or config.workers,
            sorted({share.where.reward for share in domain if isinstance(share.where, InWorker)}),
            megabytes=config.worker_megabytes,
            wait_seconds=config.wait_seconds,
        )
        for name, domain in shares.items()
        if any(isinstance(share.where, InWorker) for share in domain)
    }
    for pool in pools.values():
        await stack.enter_async_context(pool)
    return pools


def _domain(name: str, config: RewardGatewayConfig, askers: Sequence[Asker]) -> Domain:
    bulkhead = Bulkhead(
        name,
        concurrency=config.domains[name].concurrency,
        waiting=config.waiting,
        wait_seconds=config.wait_seconds,
    )
    comparing = [asker for asker in askers if asker.share.compares]
    if not comparing:
        return Domain(name, askers, bulkhead)
    gathering = Gathering[str, Episode](keep_seconds=config.gather_seconds, most_bytes=config.gather_megabytes << 20)
    comparer = Comparer(comparing, bulkhead, gathering, gather_seconds=config.gather_seconds)
    return Domain(name, askers, bulkhead, comparer)


def _asker(
    domain: str,
    config: RewardGatewayConfig,
    share: Share,
    pool: WorkerPool | None,
    external: Mapping[str, Any],
    memory: Memory,
) -> Asker:
    most = share.timeout_seconds or config.timeout_seconds
    timeout = Timeout(
        least=most if share.runs_programs else config.least_timeout_seconds,
        factor=config.timeout_factor,
        most=most,
        window=config.timeout_window,
    )
    attempt = attempt_of(share, timeout, pool, external)
    return Asker(domain, share, attempt, timeout, memory, retries=config.retries)
