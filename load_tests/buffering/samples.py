"""Samples for load, made cheaply: the tokens are serialised once for each policy version."""

import uuid
from functools import cache

import numpy as np

from rollfarm.config import Config
from rollfarm.tokens import pack_ids, pack_logprobs
from rollfarm.v1 import sample_buffer_pb2 as pb
from rollfarm.v1 import trajectory_pb2 as tp

VOCABULARY = 32_000

_TRAJECTORY = pb.CompleteEpisodeRequest.TRAJECTORY_FIELD_NUMBER
_COMPLETIONS = pb.CompleteEpisodesRequest.COMPLETIONS_FIELD_NUMBER


class Size(Config):
    """How large a sample is."""

    prompt_tokens: int = 64
    """Tokens of the environment's turn."""

    tokens: int = 1024
    """Tokens of the policy's turn; each has a log-probability."""


def trajectory(episode: pb.Episode, size: Size) -> bytes:
    """A whole, scored trajectory for the episode, serialised.

    The rewards of a group differ, as a filter would want them to.
    """
    head = tp.Trajectory(
        trajectory_id=uuid.uuid4().hex,
        run_id=episode.run_id,
        group_id=episode.group_id,
        member=episode.member,
        task=episode.task,
        outcome=tp.OUTCOME_OK,
        reward=float(episode.member % 2),
        lease_policy_version=episode.policy_version,
        oldest_policy_version=episode.policy_version,
        metrics={"success": float(episode.member % 2)},
        worker_id="load",
    )
    return head.SerializeToString() + _turns(size.prompt_tokens, size.tokens, episode.policy_version)


@cache
def _turns(prompt_tokens: int, tokens: int, version: int) -> bytes:
    """The serialised turns of a trajectory: appended to the rest of it, they are a part of it."""
    chance = np.random.default_rng(0)
    prompt = tp.Turn(author=tp.AUTHOR_ENVIRONMENT, token_ids=pack_ids(chance.integers(VOCABULARY, size=prompt_tokens)))
    answer = tp.Turn(
        author=tp.AUTHOR_POLICY,
        token_ids=pack_ids(chance.integers(VOCABULARY, size=tokens)),
        logprobs=pack_logprobs(-chance.exponential(size=tokens)),
        version_spans=[tp.VersionSpan(policy_version=version, token_count=tokens)],
        finish_reason=tp.FINISH_REASON_STOP,
        engine_id="engine-0",
    )
    return tp.Trajectory(turns=[prompt, answer]).SerializeToString()


def completion(lease: pb.EpisodeLease, size: Size) -> bytes:
    """A CompleteEpisodeRequest for the lease, serialised."""
    head = pb.CompleteEpisodeRequest(request_id=str(uuid.uuid4()), lease_id=lease.lease_id)
    return head.SerializeToString() + delimited(_TRAJECTORY, trajectory(lease.episode, size))


def completions(serialised: list[bytes]) -> bytes:
    """A CompleteEpisodesRequest of serialised CompleteEpisodeRequests, serialised."""
    return b"".join(delimited(_COMPLETIONS, one) for one in serialised)


def delimited(field: int, data: bytes) -> bytes:
    """A length-delimited field on the wire."""
    prefix = bytearray((field << 3 | 2,))
    length = len(data)
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + data
