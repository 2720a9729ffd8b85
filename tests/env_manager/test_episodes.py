"""Whole episodes over real sockets: what is recorded is exactly what the proxy received and returned."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from env_manager.episodes import EpisodeFailed, Player
from env_manager.rendering import Renderer
from env_manager.transcript import Played
from rollfarm import tokens
from rollfarm.env import Environment, Observation, Step
from rollfarm.env_server import EnvironmentServicer
from rollfarm.errors import EnvironmentFailed, FarmError, InvalidArgument, InvalidTrajectory, RewardFailed
from rollfarm.v1 import environment_pb2, reward_gateway_pb2, sample_buffer_pb2, trajectory_pb2
from tests.env_manager.fakes import (
    CHATML,
    FakeBuffer,
    FakeProxy,
    FakeRewards,
    Policy,
    episode,
    serving,
    tokenizer,
    working,
)

TOKENIZER = tokenizer()
SEED_WITHOUT_HOLES = '{"size": 3, "holes": 0}'

POLICY = trajectory_pb2.AUTHOR_POLICY
ENVIRONMENT = trajectory_pb2.AUTHOR_ENVIRONMENT


def saying(*words: str) -> Policy:
    """A policy that says one after the other, over and over."""
    said = iter(range(1 << 30))
    return lambda prompt, asked: TOKENIZER.encode(words[next(said) % len(words)])


def ids(turn: trajectory_pb2.Turn) -> list[int]:
    return tokens.unpack_ids(turn.token_ids).tolist()


async def play_one(lease: sample_buffer_pb2.Episode, policy: Policy, rewards: FakeRewards | None = None, **config):
    """The buffer and the proxy after one episode."""
    buffer, proxy = FakeBuffer(), FakeProxy(policy)
    buffer.add(lease)
    async with serving(proxy.register) as address, working(buffer, address, rewards, **config):
        await buffer.ended()
    return buffer, proxy


async def test_the_turns_together_are_exactly_what_the_proxy_received_and_returned():
    policy = saying("down <end>", "down", "right <end>", "right")
    buffer, proxy = await play_one(episode(settings=SEED_WITHOUT_HOLES), policy)

    (trajectory,) = buffer.completed.values()
    grown: list[int] = []
    prompts: list[list[int]] = []
    for turn, next_turn in zip(trajectory.turns[::2], trajectory.turns[1::2], strict=True):
        assert (turn.author, next_turn.author) == (ENVIRONMENT, POLICY)
        grown += ids(turn)
        prompts.append(list(grown))
        grown += ids(next_turn)
    assert prompts == [tokens.unpack_ids(asked.generation.prompt_token_ids).tolist() for asked in proxy.requests]
    assert [ids(turn) for turn in trajectory.turns[1::2]] == [
        tokens.unpack_ids(result.token_ids).tolist() for result in proxy.results
    ]
    assert TOKENIZER.decode(grown) == (
        "<user> at 0 0 left wall down ice right ice up wall <end> <assistant> down <end> "
        "<user> at 1 0 left wall down ice right ice up ice <end> <assistant> down <end> "
        "<user> at 2 0 left wall down wall right ice up ice <end> <assistant> right <end> "
        "<user> at 2 1 left ice down wall right goal up ice <end> <assistant> right"
    )


async def test_a_trajectory_carries_everything_about_the_episode():
    leased = episode(settings=SEED_WITHOUT_HOLES, version=5, member=3)
    buffer, proxy = FakeBuffer(), FakeProxy(saying("down", "right"), version=6)
    buffer.add(leased)
    async with serving(proxy.register) as address, working(buffer, address):
        await buffer.ended()

    (trajectory,) = buffer.completed.values()
    assert (trajectory.run_id, trajectory.group_id, trajectory.member) == ("run", "group", 3)
    assert trajectory.task == leased.task
    assert trajectory.outcome == trajectory_pb2.OUTCOME_OK
    assert (trajectory.lease_policy_version, trajectory.oldest_policy_version) == (5, 6)
    assert trajectory.worker_id == "worker-1"
    assert len(trajectory.trajectory_id) == 32
    # Four steps of 1/4 of the way, 4 valid actions of 6 turns, the goal, 2 turns left.
    assert trajectory.reward == pytest.approx(0.5 + 0.4 / 6 + 0.3 + 0.4 / 6)
    assert [part.name for part in trajectory.reward_parts] == ["environment"]
    assert dict(trajectory.metrics) == {"success": 1.0, "progress": 1.0}
    assert list(trajectory.turn_texts[:2]) == ["at 0 0 left wall down ice right ice up wall", "down"]
    policy_turn = trajectory.turns[1]
    assert tokens.unpack_logprobs(policy_turn.logprobs).tolist() == [-0.5]
    assert [(span.policy_version, span.token_count) for span in policy_turn.version_spans] == [(6, 1)]
    assert policy_turn.finish_reason == trajectory_pb2.FINISH_REASON_STOP
    assert policy_turn.step_reward == pytest.approx(0.5 / 4 + 0.1 / 6)
    assert policy_turn.state_hash.endswith("-0-0")
    assert trajectory.turns[3].state_hash.endswith("-1-0")
    assert (policy_turn.engine_id, policy_turn.environment_id) == ("engine-1", "worker-1")
    assert policy_turn.queue_duration.nanos == 1000
    assert policy_turn.generate_duration.nanos == 2000
    assert policy_turn.environment_duration.nanos > 0


async def test_a_generation_asks_for_the_leases_version_first_and_a_seed_of_its_own():
    _, proxy = await play_one(episode(settings=SEED_WITHOUT_HOLES, version=9), saying("down", "right"))
    _, again = await play_one(episode(settings=SEED_WITHOUT_HOLES, version=9), saying("down", "right"))

    asked = proxy.requests[0]
    assert (asked.min_version, asked.priority, asked.HasField("exact_version")) == (9, 9, False)
    assert asked.generation.session_id == "lease-0"
    assert list(asked.generation.sampling.stop_token_ids) == [TOKENIZER.eos_token_id]
    seeds = [request.generation.sampling.seed for request in proxy.requests]
    assert len(set(seeds)) == 4
    assert seeds == [request.generation.sampling.seed for request in again.requests]
    assert len({request.generation.request_id for request in proxy.requests}) == 4


async def test_a_chatml_models_own_end_of_turn_is_not_repeated():
    mine = tokenizer(CHATML, eos="<|im_end|>")
    renderer = Renderer(mine)
    buffer, _ = await play_one(
        episode(settings=SEED_WITHOUT_HOLES, max_tokens=2),
        lambda prompt, asked: mine.encode("down <|im_end|>"),
        renderer=renderer,
        max_turns=2,
    )

    (trajectory,) = buffer.completed.values()
    text = mine.decode([token for turn in trajectory.turns for token in ids(turn)])
    assert text == (
        "<|im_start|> user at 0 0 left wall down ice right ice up wall <|im_end|> <|im_start|> assistant down "
        "<|im_end|> <|im_start|> user at 1 0 left wall down ice right ice up ice <|im_end|> <|im_start|> assistant "
        "down <|im_end|>"
    )


async def test_rewards_see_the_conversation_as_text_with_step_rewards_and_the_reference():
    rewards = FakeRewards()
    await play_one(episode("arithmetic", settings='{"operations": ["plus"]}'), saying("1"), rewards)

    (scored,) = rewards.asked
    question, answer = scored.turns
    assert question.text.startswith("what is")
    assert (answer.author, answer.text, answer.HasField("step_reward")) == (POLICY, "1", True)
    left, right = question.text.split()[2::2]
    assert int(scored.reference) == int(left) + int(right)
    assert scored.outcome == trajectory_pb2.OUTCOME_OK


@pytest.mark.parametrize(("validation_id", "size"), [("", 8), ("v1", 0)])
async def test_rewards_learn_which_group_the_episode_is_of_and_that_a_validation_episode_has_none(
    validation_id: str, size: int
):
    rewards, leased = FakeRewards(), episode("arithmetic", member=3)
    leased.group_size, leased.validation_id = 8, validation_id

    await play_one(leased, saying("1"), rewards)

    (request,) = rewards.requests
    assert (request.group_id, request.member, request.group_size) == ("group", 3, size)


class OneWorld:
    """Stands where worlds are found, and says when its one is left."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    @asynccontextmanager
    async def open(self, session_id: str, task: trajectory_pb2.Task) -> AsyncIterator[Any]:
        try:
            yield self
        finally:
            self._said.append("left")


@pytest.mark.parametrize(("domain", "by"), [("play", "turns"), ("coding", "an agent")])
async def test_a_player_has_the_conversation_by_domain_says_once_that_it_is_over_and_scores_it(domain: str, by: str):
    said: list[str] = []

    def converse(name: str) -> Any:
        async def had(lease: sample_buffer_pb2.EpisodeLease, world: Any) -> Played:
            said.append(name)
            return Played(lease.episode, [], [])

        return had

    async def score(scored: Any, leased: Any) -> reward_gateway_pb2.ScoreResponse:
        said.append("scored")
        return reward_gateway_pb2.ScoreResponse(reward=1.0)

    agents = {"coding": converse("an agent")}
    worlds: Any = OneWorld(said)
    player = Player(worlds, converse("turns"), score, worker_id="worker-1", agents=agents)
    lease = sample_buffer_pb2.EpisodeLease(lease_id="lease", episode=episode())
    lease.episode.task.domain = domain

    trajectory = await player.play(lease, lambda: said.append("played"))

    assert said == [by, "left", "played", "scored"]
    assert (trajectory.outcome, trajectory.reward) == (trajectory_pb2.OUTCOME_OK, 1.0)


async def test_a_conversation_that_fails_was_not_played():
    said: list[str] = []

    async def converse(lease: Any, world: Any) -> Played:
        raise EnvironmentFailed("The ice broke.")

    async def score(scored: Any, leased: Any) -> reward_gateway_pb2.ScoreResponse:
        raise AssertionError("nothing is to be scored")

    worlds: Any = OneWorld(said)
    lease = sample_buffer_pb2.EpisodeLease(lease_id="lease", episode=episode())

    with pytest.raises(EpisodeFailed, match="The ice broke") as failed:
        await Player(worlds, converse, score, worker_id="w").play(lease, lambda: said.append("played"))

    assert (failed.value.outcome, said) == (trajectory_pb2.OUTCOME_ENV_FAILED, ["left"])


async def test_too_many_turns_truncate_and_are_scored():
    buffer, proxy = await play_one(episode(settings=SEED_WITHOUT_HOLES), saying("left"), max_turns=2)

    (trajectory,) = buffer.completed.values()
    assert trajectory.outcome == trajectory_pb2.OUTCOME_TRUNCATED
    assert trajectory.outcome_detail == "the limit of 2 turns"
    assert trajectory.reward == pytest.approx(2 * 0.1 / 6)
    assert [turn.author for turn in trajectory.turns] == [ENVIRONMENT, POLICY, ENVIRONMENT, POLICY]
    assert len(proxy.requests) == 2


async def test_a_full_context_truncates_and_no_request_exceeds_it():
    # The first prompt is 14 tokens, each turn adds the policy's word and 15 more.
    buffer, proxy = await play_one(episode(settings=SEED_WITHOUT_HOLES), saying("left"), context_tokens=32)

    (trajectory,) = buffer.completed.values()
    assert trajectory.outcome == trajectory_pb2.OUTCOME_TRUNCATED
    assert trajectory.outcome_detail == "the limit of 32 tokens"
    used = [len(request.generation.prompt_token_ids) // 4 for request in proxy.requests]
    assert used == [14, 30]
    assert [request.generation.sampling.max_tokens for request in proxy.requests] == [4, 2]


async def test_the_environments_own_limit_truncates():
    buffer, _ = await play_one(episode(settings=SEED_WITHOUT_HOLES), saying("left"))

    (trajectory,) = buffer.completed.values()
    assert (trajectory.outcome, len(trajectory.turns)) == (trajectory_pb2.OUTCOME_TRUNCATED, 12)


async def test_time_running_out_after_the_first_action_truncates_and_the_generation_is_cancelled():
    buffer, proxy = (
        FakeBuffer(),
        FakeProxy(lambda prompt, asked: TOKENIZER.encode("left") if len(prompt) < 20 else None),
    )
    buffer.add(episode(settings=SEED_WITHOUT_HOLES))
    async with serving(proxy.register) as address, working(buffer, address, episode_seconds=0.4):
        await buffer.ended()
        await proxy.until(lambda: bool(proxy.cancelled))

    (trajectory,) = buffer.completed.values()
    assert (trajectory.outcome, trajectory.outcome_detail) == (trajectory_pb2.OUTCOME_TRUNCATED, "the limit of 0.4 s")
    assert proxy.cancelled == ["lease-0/1"]


class Stalls(Environment):
    """Answers one action."""

    async def reset(self, seed: int, index: int) -> str:
        self.turn = 0
        return "at 0 0"

    async def step(self, action: str) -> Step:
        self.turn += 1
        if self.turn == 2:
            await asyncio.Event().wait()
        return Step("left wall", metrics={"turns": self.turn})


async def test_an_answer_that_does_not_come_in_time_is_no_repetition_of_the_one_before():
    rewards, always_left = FakeRewards(), FakeProxy(lambda prompt, asked: TOKENIZER.encode("left"))
    buffer = FakeBuffer()
    buffer.add(episode(f"{__name__}:Stalls"))
    async with serving(always_left.register) as address, working(buffer, address, rewards, episode_seconds=0.4):
        await buffer.ended()

    (scored,) = rewards.asked
    assert [turn.text for turn in scored.turns] == ["at 0 0", "left", "left wall", "left"]
    assert dict(scored.metrics) == {"turns": 1}


async def failure(lease: sample_buffer_pb2.Episode, policy: Policy, rewards: FakeRewards | None = None, **config):
    buffer, _ = await play_one(lease, policy, rewards, **config)
    assert not buffer.completed
    (failed,) = buffer.failed.values()
    return trajectory_pb2.Outcome.Name(failed.outcome), failed.detail


async def test_an_unknown_environment_fails_with_the_known_ones():
    outcome, detail = await failure(episode("frozen_lade"), saying("left"))

    assert outcome == "OUTCOME_ENV_FAILED"
    assert "Did you mean 'frozen_lake'? Known: arithmetic, " in detail


async def test_an_unknown_setting_fails_with_the_known_ones():
    outcome, detail = await failure(episode(settings='{"sise": 3}'), saying("left"))

    assert outcome == "OUTCOME_ENV_FAILED"
    assert "unknown setting 'sise'. Did you mean 'size'? Known: holes, size, slippery, turns, view." in detail


async def test_a_setting_of_the_wrong_kind_fails_with_what_is_wrong():
    outcome, detail = await failure(episode(settings='{"size": 1}'), saying("left"))

    assert (outcome, "greater than or equal to 2" in detail) == ("OUTCOME_ENV_FAILED", True)


async def test_an_empty_score_is_never_made_of_a_failed_one():
    rewards = FakeRewards(refuse=RewardFailed("Reward exact gave nan, which is not a finite number."))

    outcome, detail = await failure(episode(settings=SEED_WITHOUT_HOLES), saying("left"), rewards)

    assert (outcome, "gave nan" in detail) == ("OUTCOME_REWARD_FAILED", True)


async def test_a_refused_generation_aborts_with_the_cause():
    outcome, detail = await failure(episode(), lambda prompt, asked: InvalidArgument("The prompt is too long."))

    assert (outcome, detail) == ("OUTCOME_ABORTED", "The prompt is too long. Correct the request.")


async def test_a_generation_that_does_not_come_aborts():
    outcome, detail = await failure(episode(), lambda prompt, asked: None, turn_seconds=0.2)

    assert (outcome, detail) == ("OUTCOME_ABORTED", "No generation in 0.2 s.")


async def test_an_aborted_generation_aborts_the_episode():
    buffer, proxy = FakeBuffer(), FakeProxy(saying("left"), finish_reason=trajectory_pb2.FINISH_REASON_ABORT)
    buffer.add(episode())
    async with serving(proxy.register) as address, working(buffer, address):
        await buffer.ended()

    (failed,) = buffer.failed.values()
    assert (failed.outcome, failed.detail) == (
        trajectory_pb2.OUTCOME_ABORTED,
        "The generation was aborted after 1 tokens.",
    )


@pytest.mark.parametrize("error", [InvalidTrajectory, InvalidArgument])
async def test_a_refused_trajectory_is_failed_with_the_cause(error: type[FarmError]):
    buffer, proxy = FakeBuffer(refuse=error("The reward is nan.")), FakeProxy(saying("down", "right"))
    buffer.add(episode(settings=SEED_WITHOUT_HOLES))
    async with serving(proxy.register) as address, working(buffer, address):
        await buffer.ended()

    (failed,) = buffer.failed.values()
    assert (failed.outcome, "The reward is nan." in failed.detail) == (trajectory_pb2.OUTCOME_ABORTED, True)


class Stubborn(Environment):
    """Fails as it is told to."""

    hanging = threading.Event()

    def __init__(self, *, how: str = "") -> None:
        self.how = how

    def reset(self, seed: int, index: int) -> Observation:
        return Observation("at 0 0", reference="left", state_hash="here", system="be brief")

    def step(self, action: str) -> Step:
        if self.how == "raise":
            raise ValueError("the ice broke")
        if self.how == "hang":
            self.hanging.wait(20)
        return Step("goal", reward=float("nan") if self.how == "nan" else 1.5, done=True, metrics={"success": 1.0})

    def close(self) -> None:
        if self.how == "hang in close":
            self.hanging.wait(20)


async def test_an_environment_on_a_server_is_played_over_the_network():
    rewards = FakeRewards()
    async with serving(EnvironmentServicer([Stubborn]).register) as server:
        buffer, _ = await play_one(episode("stubborn"), saying("left"), rewards, servers=[server])

    (trajectory,) = buffer.completed.values()
    assert [turn.author for turn in trajectory.turns] == [trajectory_pb2.AUTHOR_SYSTEM, ENVIRONMENT, POLICY]
    assert trajectory.turns[2].environment_id == server
    assert (trajectory.reward, trajectory.turns[2].state_hash) == (1.5, "here")
    assert rewards.asked[0].reference == "left"
    assert rewards.asked[0].turns[-1].text == "goal"


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "step raised ValueError: the ice broke"),
        ("nan", "Environment stubborn: the step's reward is nan, not a finite number"),
        ("hang", "No answer"),
    ],
)
async def test_a_served_environment_that_misbehaves_fails_its_episode_alone(how: str, cause: str):
    buffer, proxy = FakeBuffer(), FakeProxy(saying("left"))
    buffer.add(episode("stubborn", settings=f'{{"how": "{how}"}}'), episode("stubborn"))
    async with (
        serving(EnvironmentServicer([Stubborn]).register) as server,
        serving(proxy.register) as address,
        working(buffer, address, servers=[server], environment_seconds=0.5),
    ):
        await buffer.ended(2)
        Stubborn.hanging.set()
    Stubborn.hanging.clear()

    assert list(buffer.completed) == ["lease-1"]
    failed = buffer.failed["lease-0"]
    assert (failed.outcome, cause in failed.detail) == (trajectory_pb2.OUTCOME_ENV_FAILED, True), failed.detail


class OtherLanguage(aio.ServerInterceptor):
    """Makes a server's Step answer these bytes, which our SDK would not send, and takes its StepMany away."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = iter(answers)

    async def intercept_service(self, continuation, handler_call_details):
        if handler_call_details.method.endswith("/StepMany"):
            return None
        handler = await continuation(handler_call_details)
        if not handler_call_details.method.endswith("/Step"):
            return handler
        return grpc.unary_unary_rpc_method_handler(self._step)

    async def _step(self, request: object, context: object) -> bytes:
        return next(self._answers)


async def test_an_answer_that_is_not_finite_or_no_message_fails_its_episode_in_whatever_language_it_was_given():
    infinite = environment_pb2.StepResponse(metrics={"success": float("inf")})
    other_language = OtherLanguage(
        environment_pb2.StepResponse(reward=float("nan")).SerializeToString(),
        infinite.SerializeToString(),
        environment_pb2.StepResponse(state_hash="text").SerializeToString().replace(b"text", b"\xff\xfe\xff\xfe"),
    )
    buffer, proxy = FakeBuffer(), FakeProxy(saying("left"))
    async with (
        serving(EnvironmentServicer([Stubborn]).register, interceptors=[other_language]) as server,
        serving(proxy.register) as address,
        working(buffer, address, servers=[server], slots=1),
    ):
        buffer.add(*[episode("stubborn") for _ in range(3)])
        await buffer.ended(3)

    details = [failed.detail for failed in buffer.failed.values()]
    assert f"Environment stubborn at {server}: the step's reward is nan, not a finite number." in details[0]
    assert f"Environment stubborn at {server}: the step's metric 'success' is inf, not a finite number." in details[1]
    assert f"Environment server {server}: The answer to" in details[2]
    assert "is no valid message" in details[2]


async def test_an_episode_whose_environment_server_restarted_fails():
    asked, answer = asyncio.Event(), asyncio.Event()

    class SlowProxy(FakeProxy):
        async def GenerateMany(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            async for response in super().GenerateMany(request_iterator, context):
                asked.set()
                await answer.wait()
                yield response

    buffer, proxy = FakeBuffer(), SlowProxy(saying("left"))
    buffer.add(episode("stubborn"))
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving(proxy.register))
        async with serving(EnvironmentServicer([Stubborn]).register) as server:
            await stack.enter_async_context(working(buffer, address, servers=[server]))
            await asked.wait()
        await stack.enter_async_context(serving(EnvironmentServicer([Stubborn]).register, int(server.split(":")[1])))
        answer.set()
        await buffer.ended()

    failed = buffer.failed["lease-0"]
    assert failed.outcome == trajectory_pb2.OUTCOME_ENV_FAILED
    assert "No episode 'lease-0' is open." in failed.detail


async def test_a_class_of_ones_own_is_played_in_a_thread_and_a_hang_blocks_nobody():
    buffer, proxy = FakeBuffer(), FakeProxy(saying("left"))
    mine = f"{Stubborn.__module__}:Stubborn"
    buffer.add(episode(mine, settings='{"how": "hang"}'), episode(mine))
    async with serving(proxy.register) as address, working(buffer, address, environment_seconds=0.3):
        await buffer.ended(2)

    assert buffer.completed["lease-1"].reward == 1.5
    assert "step gave no answer in 0.3 s" in buffer.failed["lease-0"].detail


async def test_an_environment_that_hangs_in_close_keeps_no_finished_episode_back():
    buffer, proxy = FakeBuffer(), FakeProxy(saying("left"))
    mine = f"{Stubborn.__module__}:Stubborn"
    buffer.add(episode(mine, settings='{"how": "hang in close"}'), episode(mine))
    async with serving(proxy.register) as address, working(buffer, address, slots=1, environment_seconds=0.3):
        await buffer.ended(2)
        Stubborn.hanging.set()
    Stubborn.hanging.clear()

    assert [trajectory.reward for trajectory in buffer.completed.values()] == [1.5, 1.5]
