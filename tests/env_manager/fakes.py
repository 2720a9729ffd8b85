"""Small servers for env_manager's tests: real sockets, and everything they were told is kept."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import duration_pb2
from grpc import aio
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from env_manager.config import EnvManagerConfig
from env_manager.hosts import Hosts
from env_manager.processes import Processes
from env_manager.rendering import Renderer
from env_manager.wiring import open_worker
from env_manager.worlds import Worlds
from rollfarm import rpc, times, tokens
from rollfarm.config import Telemetry
from rollfarm.error_wire import to_failure
from rollfarm.errors import FarmError, LeaseExpired, is_retryable
from rollfarm.service import Changed, ErrorInterceptor, poll_seconds
from rollfarm.v1 import (
    llm_proxy_pb2,
    llm_proxy_pb2_grpc,
    reward_gateway_pb2,
    reward_gateway_pb2_grpc,
    sample_buffer_pb2,
    sample_buffer_pb2_grpc,
    trajectory_pb2,
)

TINY_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)

CHATML = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)

WORDS = "system user assistant at left down right up ice hole goal wall be brief what is plus minus times"


def tokenizer(template: str = TINY_TEMPLATE, *, eos: str = "<end>") -> Any:
    """A word-level tokenizer that knows the built-in environments' words."""
    special = ["<unk>", "<pad>", "<end>", "<system>", "<user>", "<assistant>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *WORDS.split(), *map(str, range(100))]
    model = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token=eos,
        additional_special_tokens=special[3:],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@asynccontextmanager
async def serving(
    register: Callable[[aio.Server], None], port: int = 0, *, interceptors: Sequence[aio.ServerInterceptor] = ()
) -> AsyncIterator[str]:
    """Serve on loopback and yield host:port. Leaving cuts every call, as a crash would."""
    server = aio.server(
        interceptors=[ErrorInterceptor(), *interceptors], options=[*rpc.MESSAGE_OPTIONS, ("grpc.so_reuseport", 0)]
    )
    register(server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(grace=None)


Policy = Callable[[Sequence[int], llm_proxy_pb2.ProxiedGeneration], Sequence[int] | FarmError | None]
"""What is written after these tokens; an error is refused, and None is never answered."""


@dataclass(eq=False)
class FakeProxy(llm_proxy_pb2_grpc.LlmProxyServiceServicer):
    """An llm_proxy whose policy is a function."""

    policy: Policy
    version: int = 0
    finish_reason: trajectory_pb2.FinishReason.ValueType = trajectory_pb2.FINISH_REASON_STOP
    requests: list[llm_proxy_pb2.ProxiedGeneration] = field(default_factory=list)
    results: list[llm_proxy_pb2.GenerationResult] = field(default_factory=list)
    message_sizes: list[int] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    changed: Changed = field(default_factory=Changed)

    def register(self, server: aio.Server) -> None:
        llm_proxy_pb2_grpc.add_LlmProxyServiceServicer_to_server(self, server)

    async def until(self, reached: Callable[[], bool], seconds: float = 10.0) -> None:
        assert await self.changed.first(lambda: reached() or None, seconds), "the proxy did not get there"

    async def GenerateMany(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for request in request_iterator:
            self.requests.extend(request.generations)
            self.message_sizes.append(len(request.generations))
            answers = [self._answer(generation) for generation in request.generations]
            results = [answer for answer in answers if answer is not None]
            self.results.extend(results)
            self.changed.notify()
            if results:
                yield llm_proxy_pb2.GenerateManyResponse(results=results)

    async def Cancel(self, request: llm_proxy_pb2.CancelRequest, context: Any) -> llm_proxy_pb2.CancelResponse:
        self.cancelled.extend(request.request_ids)
        self.changed.notify()
        return llm_proxy_pb2.CancelResponse()

    def _answer(self, asked: llm_proxy_pb2.ProxiedGeneration) -> llm_proxy_pb2.GenerationResult | None:
        request_id = asked.generation.request_id
        written = self.policy(tokens.unpack_ids(asked.generation.prompt_token_ids).tolist(), asked)
        if written is None:
            return None
        if isinstance(written, FarmError):
            return llm_proxy_pb2.GenerationResult(request_id=request_id, failure=to_failure(written))
        return llm_proxy_pb2.GenerationResult(
            request_id=request_id,
            token_ids=tokens.pack_ids(written),
            logprobs=tokens.pack_logprobs([-0.5] * len(written)),
            version_spans=[trajectory_pb2.VersionSpan(policy_version=self.version, token_count=len(written))],
            finish_reason=self.finish_reason,
            engine_id="engine-1",
            queue_duration=duration_pb2.Duration(nanos=1000),
            generate_duration=duration_pb2.Duration(nanos=2000),
        )


@dataclass(eq=False)
class FakeBuffer(sample_buffer_pb2_grpc.SampleBufferServiceServicer):
    """A sample_buffer that leases what it is given, once."""

    lease_seconds: float = 30.0
    pending: list[sample_buffer_pb2.Episode] = field(default_factory=list)
    to_cancel: list[sample_buffer_pb2.CancelledLease] = field(default_factory=list)
    beats: list[sample_buffer_pb2.HeartbeatRequest] = field(default_factory=list)
    leased: list[sample_buffer_pb2.EpisodeLease] = field(default_factory=list)
    completed: dict[str, trajectory_pb2.Trajectory] = field(default_factory=dict)
    failed: dict[str, sample_buffer_pb2.FailEpisodeRequest] = field(default_factory=dict)
    asked: list[sample_buffer_pb2.LeaseEpisodesRequest] = field(default_factory=list)
    refuse: FarmError | None = None
    """CompleteEpisodes answers it."""

    refused_count: int = 0

    changed: Changed = field(default_factory=Changed)

    def register(self, server: aio.Server) -> None:
        sample_buffer_pb2_grpc.add_SampleBufferServiceServicer_to_server(self, server)

    def add(self, *episodes: sample_buffer_pb2.Episode) -> None:
        self.pending.extend(episodes)
        self.changed.notify()

    async def until(self, reached: Callable[[], bool], seconds: float = 10.0) -> None:
        assert await self.changed.first(lambda: reached() or None, seconds), "the buffer did not get there"

    async def ended(self, count: int = 1) -> None:
        await self.until(lambda: len(self.completed) + len(self.failed) >= count)

    async def LeaseEpisodes(self, request: sample_buffer_pb2.LeaseEpisodesRequest, context: Any) -> Any:
        self.asked.append(request)
        self.changed.notify()
        leases = await self.changed.first(lambda: self._take(request) or None, poll_seconds(context))
        return sample_buffer_pb2.LeaseEpisodesResponse(leases=leases or [])

    def _take(self, request: sample_buffer_pb2.LeaseEpisodesRequest) -> list[sample_buffer_pb2.EpisodeLease]:
        """The first of those that are wanted."""
        wanted = [episode for episode in self.pending if _is_wanted(episode.task.environment, request)]
        wanted = wanted[: request.max_leases]
        self.pending = [episode for episode in self.pending if not any(episode is taken for taken in wanted)]
        leases = [
            sample_buffer_pb2.EpisodeLease(
                lease_id=f"lease-{len(self.leased) + position}",
                episode=episode,
                lease_duration=times.duration(self.lease_seconds),
            )
            for position, episode in enumerate(wanted)
        ]
        self.leased.extend(leases)
        return leases

    async def Heartbeat(self, request: sample_buffer_pb2.HeartbeatRequest, context: Any) -> Any:
        self.beats.append(request)
        self.changed.notify()
        cancelled = await self.changed.first(
            lambda: [lease for lease in self.to_cancel if lease.lease_id in request.lease_ids] or None,
            request.wait_duration.ToNanoseconds() / 1e9,
        )
        return sample_buffer_pb2.HeartbeatResponse(cancelled=cancelled or [])

    def cancel(self, lease_id: str) -> None:
        """Say that nobody needs the episode any more."""
        self.to_cancel.append(
            sample_buffer_pb2.CancelledLease(lease_id=lease_id, outcome=trajectory_pb2.OUTCOME_CANCELLED)
        )
        self.changed.notify()

    async def CompleteEpisodes(self, request: sample_buffer_pb2.CompleteEpisodesRequest, context: Any) -> Any:
        if self.refuse is not None and is_retryable(self.refuse):
            self.refused_count += 1
            self.changed.notify()
            raise self.refuse
        results = [self._complete(completion) for completion in request.completions]
        self.changed.notify()
        return sample_buffer_pb2.CompleteEpisodesResponse(results=results)

    def _complete(self, request: sample_buffer_pb2.CompleteEpisodeRequest) -> sample_buffer_pb2.CompletionResult:
        if self.refuse is not None:
            self.refused_count += 1
            return sample_buffer_pb2.CompletionResult(failure=to_failure(self.refuse))
        self.completed[request.lease_id] = request.trajectory
        accepted = sample_buffer_pb2.CompleteEpisodeResponse(disposition=sample_buffer_pb2.DISPOSITION_ACCEPTED)
        return sample_buffer_pb2.CompletionResult(completed=accepted)

    async def FailEpisode(self, request: sample_buffer_pb2.FailEpisodeRequest, context: Any) -> Any:
        if request.lease_id in self.failed or request.lease_id in self.completed:
            raise LeaseExpired("The episode has ended.")
        self.failed[request.lease_id] = request
        self.changed.notify()
        return sample_buffer_pb2.FailEpisodeResponse()


def _is_wanted(environment: str, request: sample_buffer_pb2.LeaseEpisodesRequest) -> bool:
    return environment not in request.excluded_environments and (
        not request.environments or environment in request.environments
    )


@dataclass(eq=False)
class FakeRewards(reward_gateway_pb2_grpc.RewardGatewayServiceServicer):
    """A reward_gateway that adds the step rewards up."""

    refuse: FarmError | None = None
    asked: list[reward_gateway_pb2.ScoredEpisode] = field(default_factory=list)
    requests: list[reward_gateway_pb2.ScoreRequest] = field(default_factory=list)
    calls: list[list[int]] = field(default_factory=list)
    """The members that each call asked for."""

    cancelled: list[int] = field(default_factory=list)
    """Members that a call asked for and then did not want."""

    changed: Changed = field(default_factory=Changed)

    def register(self, server: aio.Server) -> None:
        reward_gateway_pb2_grpc.add_RewardGatewayServiceServicer_to_server(self, server)

    async def until(self, reached: Callable[[], bool], seconds: float = 10.0) -> None:
        assert await self.changed.first(lambda: reached() or None, seconds), "the gateway did not get there"

    async def Score(self, request: reward_gateway_pb2.ScoreRequest, context: Any) -> reward_gateway_pb2.ScoreResponse:
        self.asked.append(request.episode)
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        total = sum(turn.step_reward for turn in request.episode.turns)
        part = trajectory_pb2.RewardPart(name="environment", value=total, weight=1.0)
        return reward_gateway_pb2.ScoreResponse(reward=total, parts=[part])

    async def ScoreMany(
        self, request_iterator: AsyncIterator[reward_gateway_pb2.ScoreManyRequest], context: Any
    ) -> AsyncIterator[reward_gateway_pb2.ScoreManyResponse]:
        async def result(index: int, each: reward_gateway_pb2.ScoreRequest) -> reward_gateway_pb2.ScoreResult:
            try:
                return reward_gateway_pb2.ScoreResult(index=index, scored=await self.Score(each, context))
            except FarmError as error:
                return reward_gateway_pb2.ScoreResult(index=index, failure=to_failure(error))

        asked = await anext(request_iterator)
        members = [each.member for each in asked.requests]
        self.calls.append(members)
        tasks = [asyncio.create_task(result(*each)) for each in enumerate(asked.requests)]

        async def cancel() -> None:
            async for request in request_iterator:
                for index in request.cancelled_indexes:
                    self.cancelled.append(members[index])
                    tasks[index].cancel()
                self.changed.notify()

        cancelling, scoring = asyncio.create_task(cancel()), set(tasks)
        try:
            while scoring:
                done, scoring = await asyncio.wait(scoring, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    if not each.cancelled():
                        yield reward_gateway_pb2.ScoreManyResponse(results=[each.result()])
        finally:
            for each in (cancelling, *tasks):
                each.cancel()


def episode(
    environment: str = "frozen_lake",
    *,
    settings: str = "",
    seed: int = 7,
    version: int = 0,
    member: int = 0,
    max_tokens: int = 4,
) -> sample_buffer_pb2.Episode:
    return sample_buffer_pb2.Episode(
        run_id="run",
        group_id="group",
        member=member,
        task=trajectory_pb2.Task(domain="play", environment=environment, seed=seed, settings_json=settings),
        policy_version=version,
        sampling=trajectory_pb2.Sampling(max_tokens=max_tokens, temperature=1.0),
        attempt=1,
    )


def worlds_of(hosts: Hosts, **settings: Any) -> Worlds:
    """Every environment that `hosts` and this process play."""
    processes = Processes(hosts, per_environment=1, hang_seconds=60.0, telemetry=Telemetry())
    return Worlds(hosts, processes, environment_id="here", **settings)


@asynccontextmanager
async def working(
    buffer: FakeBuffer,
    proxy_address: str,
    rewards: FakeRewards | None = None,
    *,
    renderer: Renderer | None = None,
    context_tokens: int = 512,
    interceptors: Sequence[aio.ServerInterceptor] = (),
    **config: Any,
) -> AsyncIterator[asyncio.Task[None]]:
    """A worker that plays what `buffer` leases. Leaving stops it as SIGTERM would; a bug in it rises here."""
    async with (
        serving(buffer.register, interceptors=interceptors) as buffer_address,
        serving((rewards or FakeRewards()).register, interceptors=interceptors) as reward_address,
    ):
        settings = EnvManagerConfig(
            sample_buffer_address=buffer_address,
            llm_proxy_address=proxy_address,
            reward_gateway_address=reward_address,
            worker_id="worker-1",
            **config,
        )
        async with open_worker(settings, renderer or Renderer(tokenizer()), context_tokens) as worker:
            running = asyncio.create_task(_all(worker.loops))
            try:
                yield running
            finally:
                running.cancel()
                await asyncio.wait([running])
                if not running.cancelled() and (error := running.exception()) is not None:
                    raise error


async def _all(loops: Sequence[Callable[[], Any]]) -> None:
    async with asyncio.TaskGroup() as group:
        for loop in loops:
            group.create_task(loop())
