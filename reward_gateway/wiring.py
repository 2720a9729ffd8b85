"""Wires the gateway: its workers, its channels to external scorers."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from reward_gateway.config import RewardGatewayConfig
from reward_gateway.pool import WorkerPool
from reward_gateway.scoring import External, InWorker, Plan, plan
from reward_gateway.server import RewardGatewayServicer
from rollfarm import rpc
from rollfarm.v1 import reward_gateway_pb2_grpc


@asynccontextmanager
async def open_gateway(config: RewardGatewayConfig, shares: Plan | None = None) -> AsyncIterator[RewardGatewayServicer]:
    """The gateway with its workers and its channels, for as long as the context lasts."""
    shares = plan(config) if shares is None else shares
    wheres = [share.where for domain in shares.values() for share in domain]
    async with AsyncExitStack() as stack:
        pool = None
        if any(isinstance(where, InWorker) for where in wheres):
            pool = await stack.enter_async_context(WorkerPool(config.workers))
        external = {}
        for address in {where.address for where in wheres if isinstance(where, External)}:
            channel = await stack.enter_async_context(rpc.channel(address))
            external[address] = reward_gateway_pb2_grpc.RewardServiceStub(channel)
        yield RewardGatewayServicer(shares, pool, external, config.timeout_seconds)
