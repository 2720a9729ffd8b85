"""Serves one reward as RewardService, for `rollfarm.reward.serve`."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from grpc import aio

from rollfarm import service
from rollfarm.config import Listen, Telemetry
from rollfarm.errors import RewardFailed
from rollfarm.reward import Reward, is_comparison, pack_score, pack_scores, read_episode, score, score_group
from rollfarm.telemetry import configure_logging
from rollfarm.v1 import reward_gateway_pb2, reward_gateway_pb2_grpc

SERVICE = "rollfarm.v1.RewardService"


class RewardServicer(reward_gateway_pb2_grpc.RewardServiceServicer):
    """Serves one reward under any name."""

    def __init__(self, function: Reward) -> None:
        self._function = function

    def register(self, server: aio.Server) -> None:
        reward_gateway_pb2_grpc.add_RewardServiceServicer_to_server(self, server)

    async def Score(
        self, request: reward_gateway_pb2.RewardServiceScoreRequest, context: Any
    ) -> reward_gateway_pb2.RewardServiceScoreResponse:
        if is_comparison(self._function):
            problem = f"Reward {request.reward} compares the members of a group; its `external` table lacks compares."
            raise RewardFailed(problem, reward=request.reward)
        return pack_score(await score(request.reward, self._function, read_episode(request.episode)))

    async def ScoreGroup(
        self, request: reward_gateway_pb2.ScoreGroupRequest, context: Any
    ) -> reward_gateway_pb2.ScoreGroupResponse:
        if not is_comparison(self._function):
            problem = f"Reward {request.reward} scores one episode; its `external` table says that it compares."
            raise RewardFailed(problem, reward=request.reward)
        episodes = [read_episode(episode) for episode in request.episodes]
        return pack_scores(await score_group(request.reward, self._function, episodes))


def main(function: Reward, argv: Sequence[str] | None) -> NoReturn:
    """Serve the reward until SIGTERM, as the command line says."""
    parser = argparse.ArgumentParser(description="Serves a reward to reward_gateway")
    parser.add_argument("--host", default="127.0.0.1", help="interface; 0.0.0.0 is all of them (default: %(default)s)")
    parser.add_argument("--port", type=int, default=7740, help="0 lets the system choose (default: %(default)s)")
    options = parser.parse_args(argv)
    configure_logging("reward", Telemetry())
    server = RewardServicer(function)
    listen = Listen(host=options.host, port=options.port)
    service.run(lambda: service.serve(server.register, listen, services=[SERVICE]))
