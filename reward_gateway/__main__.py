"""`python -m reward_gateway farm.toml`: score episodes until SIGTERM."""

import sys

import prometheus_client

from reward_gateway.config import RewardGatewayConfig, RewardGatewayRoot
from reward_gateway.metrics import DomainsCollector
from reward_gateway.scoring import Plan, plan
from reward_gateway.server import SERVICE
from reward_gateway.wiring import open_gateway
from rollfarm import service
from rollfarm.config import load_or_exit
from rollfarm.telemetry import start_telemetry

PROG = "python -m reward_gateway"


async def serve(config: RewardGatewayConfig, shares: Plan) -> None:
    async with open_gateway(config, shares) as gateway:
        prometheus_client.REGISTRY.register(DomainsCollector(gateway.domains.values()))
        await service.serve(gateway.register, config.listen, services=[SERVICE])


def main() -> None:
    config = load_or_exit(RewardGatewayRoot, sys.argv[1:], prog=PROG).reward_gateway
    shares = plan(config)
    start_telemetry("reward_gateway", config.telemetry, config.listen)
    service.run(lambda: serve(config, shares), port_flag="--reward_gateway.listen.port", quick=True)


if __name__ == "__main__":
    main()
