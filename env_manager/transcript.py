"""One episode's record as it is played. Concatenated, its turns are exactly the tokens that the engines saw.

Pure: time arrives as an argument.
"""

import hashlib
from collections.abc import Sequence

from env_manager.rendering import Span
from rollfarm import times
from rollfarm.env import Observation, Step
from rollfarm.v1 import llm_proxy_pb2, reward_gateway_pb2, sample_buffer_pb2, trajectory_pb2


class Transcript:
    """What was said so far, as tokens and as text."""

    def __init__(self, episode: sample_buffer_pb2.Episode, shown: Observation) -> None:
        """`shown` is how the environment began."""
        self.episode = episode
        self.action_count = 0
        self._turns: list[trajectory_pb2.Turn] = []
        self._texts: list[str] = []
        self._prompt = bytearray()
        self._reference = shown.reference
        self._state_hash = shown.state_hash
        self._last = Step()

    @property
    def prompt(self) -> bytes:
        """[T] "<i4", every token so far."""
        return bytes(self._prompt)

    @property
    def token_count(self) -> int:
        """Tokens so far."""
        return len(self._prompt) // 4

    def show(self, spans: Sequence[Span]) -> None:
        """Append what the policy is shown."""
        for span in spans:
            self._turns.append(trajectory_pb2.Turn(author=span.author, token_ids=span.token_ids))
            self._texts.append(span.text)
            self._prompt += span.token_ids

    def act(self, result: llm_proxy_pb2.GenerationResult, text: str) -> None:
        """Append what the policy wrote."""
        turn = trajectory_pb2.Turn(
            author=trajectory_pb2.AUTHOR_POLICY,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            version_spans=result.version_spans,
            finish_reason=result.finish_reason,
            state_hash=self._state_hash,
            engine_id=result.engine_id,
            queue_duration=result.queue_duration,
            generate_duration=result.generate_duration,
        )
        if result.HasField("top_logprobs"):
            turn.top_logprobs.CopyFrom(result.top_logprobs)
        self._turns.append(turn)
        self._texts.append(text)
        self._prompt += result.token_ids
        self.action_count += 1

    def answer(self, step: Step, environment_id: str, seconds: float) -> None:
        """Note what the environment made of it."""
        turn = self._turns[-1]
        turn.step_reward = step.reward
        turn.environment_id = environment_id
        turn.environment_duration.CopyFrom(times.duration(seconds))
        self._state_hash = step.state_hash
        self._last = step

    def to_score(self, outcome: "trajectory_pb2.Outcome.ValueType") -> reward_gateway_pb2.ScoredEpisode:
        """The episode as rewards see it: with the environment's last words, which no engine saw."""
        turns = [
            reward_gateway_pb2.ScoredTurn(
                author=turn.author,
                text=text,
                step_reward=turn.step_reward if turn.HasField("step_reward") else None,
            )
            for turn, text in zip(self._turns, self._texts, strict=True)
        ]
        if self._turns[-1].author == trajectory_pb2.AUTHOR_POLICY and self._last.text:
            environment = trajectory_pb2.AUTHOR_ENVIRONMENT
            turns.append(reward_gateway_pb2.ScoredTurn(author=environment, text=self._last.text))
        return reward_gateway_pb2.ScoredEpisode(
            task=self.episode.task,
            turns=turns,
            reference=self._reference,
            metrics=self._last.metrics,
            outcome=outcome,
        )

    def finish(
        self,
        outcome: "trajectory_pb2.Outcome.ValueType",
        detail: str,
        score: reward_gateway_pb2.ScoreResponse,
        *,
        trajectory_id: str,
        worker_id: str,
        began: float,
        ended: float,
    ) -> trajectory_pb2.Trajectory:
        """The trajectory to hand in. `began` and `ended` are seconds since the epoch."""
        episode = self.episode
        versions = [span.policy_version for turn in self._turns for span in turn.version_spans]
        return trajectory_pb2.Trajectory(
            trajectory_id=trajectory_id,
            run_id=episode.run_id,
            group_id=episode.group_id,
            member=episode.member,
            task=episode.task,
            turns=self._turns,
            outcome=outcome,
            outcome_detail=detail,
            reward=score.reward,
            reward_parts=score.parts,
            lease_policy_version=episode.policy_version,
            oldest_policy_version=min(versions, default=episode.policy_version),
            metrics=self._last.metrics,
            create_time=times.timestamp(began),
            duration=times.duration(ended - began),
            worker_id=worker_id,
            turn_texts=self._texts,
        )


def seed_of(episode: sample_buffer_pb2.Episode, turn: int) -> int:
    """Seeds one generation: equal for equal work, whoever plays it, and different for every sibling and turn."""
    sampling = episode.sampling
    parts = (
        sampling.seed if sampling.HasField("seed") else "",
        episode.task.seed,
        episode.member,
        episode.attempt,
        turn,
    )
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
