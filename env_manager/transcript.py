"""One episode's record: a transcript while it is played, and what was played once it is over.

Concatenated, the turns of a segment are exactly the tokens that the engines saw. Pure: time arrives as an argument.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from env_manager.rendering import Prompt, words
from rollfarm import images, times
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
        """Of the segment."""

        self._images: list[trajectory_pb2.ImagePart] = []
        """Of the segment, as they travel with the prompt."""

        self._in_prompt: set[bytes] = set()
        self._in_turns: set[bytes] = set()
        """Images whose bytes are there, by their SHA-256."""

        self._reference = shown.reference
        self._state_hash = shown.state_hash
        self._last = Step()

    @property
    def prompt(self) -> bytes:
        """[T] "<i4", every token of the segment so far."""
        return bytes(self._prompt)

    @property
    def token_count(self) -> int:
        """Tokens of the segment so far."""
        return len(self._prompt) // 4

    @property
    def images(self) -> Sequence[trajectory_pb2.ImagePart]:
        """What the prompt shows, as it travels with the prompt."""
        return self._images

    def show(self, prompt: Prompt) -> None:
        """Append what the policy is shown."""
        if prompt.begins_segment:
            self._prompt.clear()
            self._images.clear()
            self._in_prompt.clear()
        for number, span in enumerate(prompt.spans):
            begins = prompt.begins_segment and not number
            parts = images.write_once(span.images, self._in_turns)
            self._turns.append(
                trajectory_pb2.Turn(author=span.author, token_ids=span.token_ids, begins_segment=begins, images=parts)
            )
            for part, image in zip(parts, span.images, strict=True):
                self._show_image(part, image.data)
            self._texts.append(span.text)
            self._prompt += span.token_ids

    def _show_image(self, part: trajectory_pb2.ImagePart, data: bytes) -> None:
        """Append what a turn shows to what the prompt shows, where its bytes may be written already, or not yet."""
        self._images.append(
            trajectory_pb2.ImagePart(
                data=b"" if part.sha256 in self._in_prompt else data,
                media_type=part.media_type,
                token_offset=part.token_offset + self.token_count,
                token_count=part.token_count,
                sha256=part.sha256,
            )
        )
        self._in_prompt.add(part.sha256)

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
        self._last = Step(metrics=self._last.metrics)
        self.action_count += 1

    def answer(self, step: Step, environment_id: str, seconds: float) -> None:
        """Note what the environment made of it."""
        turn = self._turns[-1]
        turn.step_reward = step.reward
        turn.environment_id = environment_id
        turn.environment_duration.CopyFrom(times.duration(seconds))
        self._state_hash = step.state_hash
        self._last = step

    def end(self, limit: str) -> "Played":
        """What was played. `limit` is what cut it short; empty where the environment was done."""
        acted_last = bool(self._turns) and self._turns[-1].author == trajectory_pb2.AUTHOR_POLICY
        return Played(
            self.episode,
            self._turns,
            self._texts,
            limit=limit,
            reference=self._reference,
            metrics=self._last.metrics,
            last_words=words(self._last) if acted_last else "",
        )


@dataclass(frozen=True, slots=True)
class Played:
    """A conversation that is over, and whose score is awaited."""

    episode: sample_buffer_pb2.Episode

    turns: Sequence[trajectory_pb2.Turn]
    """In order."""

    texts: Sequence[str]
    """Of each turn."""

    limit: str = ""
    """What cut it short, in words; empty where it came to its own end."""

    reference: str = ""
    """The right answer, where the environment gave one."""

    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the environment measured."""

    last_words: str = ""
    """The environment's, which no engine saw."""

    @property
    def outcome(self) -> "trajectory_pb2.Outcome.ValueType":
        return trajectory_pb2.OUTCOME_TRUNCATED if self.limit else trajectory_pb2.OUTCOME_OK

    def to_score(self) -> reward_gateway_pb2.ScoredEpisode:
        """The episode as rewards see it."""
        turns = [
            trajectory_pb2.ScoredTurn(
                author=turn.author,
                text=text,
                step_reward=turn.step_reward if turn.HasField("step_reward") else None,
            )
            for turn, text in zip(self.turns, self.texts, strict=True)
        ]
        if self.last_words:
            turns.append(trajectory_pb2.ScoredTurn(author=trajectory_pb2.AUTHOR_ENVIRONMENT, text=self.last_words))
        return reward_gateway_pb2.ScoredEpisode(
            task=self.episode.task,
            turns=turns,
            reference=self.reference,
            metrics=self.metrics,
            outcome=self.outcome,
        )

    def finish(
        self,
        score: reward_gateway_pb2.ScoreResponse,
        *,
        trajectory_id: str,
        worker_id: str,
        began: float,
        ended: float,
    ) -> trajectory_pb2.Trajectory:
        """The trajectory to hand in. `began` and `ended` are seconds since the epoch."""
        episode = self.episode
        versions = [span.policy_version for turn in self.turns for span in turn.version_spans]
        return trajectory_pb2.Trajectory(
            trajectory_id=trajectory_id,
            run_id=episode.run_id,
            group_id=episode.group_id,
            member=episode.member,
            task=episode.task,
            turns=self.turns,
            outcome=self.outcome,
            outcome_detail=self.limit,
            reward=score.reward,
            reward_parts=score.parts,
            lease_policy_version=episode.policy_version,
            oldest_policy_version=min(versions, default=episode.policy_version),
            metrics=self.metrics,
            create_time=times.timestamp(began),
            duration=times.duration(ended - began),
            worker_id=worker_id,
            turn_texts=self.texts,
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
