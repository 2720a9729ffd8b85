"""RewardGatewayService: hands each episode to its domain, and tells how the domains fare."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import prometheus_client
import structlog
from grpc import aio

from reward_gateway.domains import Domain
from reward_gateway.scoring import Plan, shares_of
from rollfarm import foreign, telemetry
from rollfarm.error_wire import to_failure
from rollfarm.errors import FarmError, RewardFailed
from rollfarm.times import duration
from rollfarm.v1 import reward_gateway_pb2, reward_gateway_pb2_grpc, trajectory_pb2

log = structlog.get_logger()

SERVICE = "rollfarm.v1.RewardGatewayService"

SECONDS = prometheus_client.Histogram(
    "rollfarm_reward_gateway_score_seconds",
    "Time to score an episode by all of its domain's rewards; waiting for its turn and for siblings included.",
    ["domain"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)


class RewardGatewayServicer(reward_gateway_pb2_grpc.RewardGatewayServiceServicer):
    """Scores episodes. `reward_gateway.wiring` makes it."""

    def __init__(
        self, plan: Plan, domains: Mapping[str, Domain], sandbox_level: "trajectory_pb2.SandboxLevel.ValueType"
    ) -> None:
        self._plan = plan
        self.domains = domains
        self._sandbox_level = sandbox_level

    def register(self, server: aio.Server) -> None:
        reward_gateway_pb2_grpc.add_RewardGatewayServiceServicer_to_server(self, server)

    async def Score(self, request: reward_gateway_pb2.ScoreRequest, context: Any) -> reward_gateway_pb2.ScoreResponse:
        return await self._score(request)

    async def ScoreMany(
        self, request_iterator: AsyncIterator[reward_gateway_pb2.ScoreManyRequest], context: Any
    ) -> AsyncIterator[reward_gateway_pb2.ScoreManyResponse]:
        asked = await anext(request_iterator, reward_gateway_pb2.ScoreManyRequest())
        tasks = [asyncio.create_task(self._result(*each)) for each in enumerate(asked.requests)]
        cancelling = asyncio.create_task(_cancel(tasks, request_iterator))
        try:
            scoring = set(tasks)
            while scoring:
                done, scoring = await asyncio.wait(scoring, return_when=asyncio.FIRST_COMPLETED)
                if results := [each.result() for each in done if not each.cancelled()]:
                    yield reward_gateway_pb2.ScoreManyResponse(results=results)
        finally:
            for each in (cancelling, *tasks):
                each.cancel()

    async def _result(self, index: int, request: reward_gateway_pb2.ScoreRequest) -> reward_gateway_pb2.ScoreResult:
        if request.trace_id:
            telemetry.trace_id.set(request.trace_id)
        try:
            return reward_gateway_pb2.ScoreResult(index=index, scored=await self._score(request))
        except FarmError as error:
            return reward_gateway_pb2.ScoreResult(index=index, failure=to_failure(error))
        except Exception as bug:
            log.exception("bug in a score", domain=request.episode.task.domain)
            failed = RewardFailed(f"Bug: {foreign.cause(bug)}.")
            return reward_gateway_pb2.ScoreResult(index=index, failure=to_failure(failed))

    async def _score(self, request: reward_gateway_pb2.ScoreRequest) -> reward_gateway_pb2.ScoreResponse:
        name = request.episode.task.domain
        shares_of(self._plan, name)
        with SECONDS.labels(name).time():
            return await self.domains[name].score(request)

    async def GetStatus(
        self, request: reward_gateway_pb2.RewardGatewayServiceGetStatusRequest, context: Any
    ) -> reward_gateway_pb2.RewardGatewayServiceGetStatusResponse:
        return reward_gateway_pb2.RewardGatewayServiceGetStatusResponse(
            domains=[_status(domain) for domain in self.domains.values()], sandbox_level=self._sandbox_level
        )


async def _cancel(
    scoring: Sequence[asyncio.Task[Any]], requests: AsyncIterator[reward_gateway_pb2.ScoreManyRequest]
) -> None:
    """Cancel what the caller names, for as long as it does."""
    async for request in requests:
        for index in request.cancelled_indexes:
            if 0 <= index < len(scoring):
                scoring[index].cancel()


def _status(domain: Domain) -> reward_gateway_pb2.DomainStatus:
    places = domain.bulkhead.places
    return reward_gateway_pb2.DomainStatus(
        domain=domain.name,
        running_count=places.running,
        waiting_count=places.waiting,
        rewards=[
            reward_gateway_pb2.RewardStatus(
                name=asker.share.name,
                scored_count=asker.tally.scored,
                cached_count=asker.tally.cached,
                failed_count=asker.tally.failed,
                timeout_duration=duration(asker.timeout.seconds()),
                detail=asker.tally.cause,
            )
            for asker in domain.askers
        ],
    )
