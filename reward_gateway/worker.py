"""A process that computes rewards which block or may hang: one at a time, asked and answered over its pipes.

`python -m reward_gateway.worker MEGABYTES REWARD...` imports what those rewards need and greets, then reads frames on
stdin and writes one for each on stdout. A frame is the number of its bytes, the number of its question, and those
bytes. It ends with its stdin. It is safe to kill at any moment.
"""

import asyncio
import functools
import importlib
import json
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from reward_gateway.rewards import PACKAGES, REWARDS
from rollfarm.errors import FarmError, RewardFailed
from rollfarm.foreign import cause
from rollfarm.registry import check_settings, resolve
from rollfarm.reward import (
    Reward,
    Score,
    TryAgain,
    is_comparison,
    may_pass,
    pack_scores,
    read_episode,
    score,
    score_group,
    unpack_scores,
)
from rollfarm.v1 import reward_gateway_pb2

HEAD = struct.Struct("<IQ")
"""How many bytes follow, and which question they ask or answer."""

GREETING = 0
"""The number of the frame that says that it can be asked; questions begin at 1. Its bytes are why it cannot."""

OK, FAILED, AGAIN = b"+", b"-", b"~"


def pack_question(
    reward: str, settings: Mapping[str, Any], timeout: float, episodes: Sequence[reward_gateway_pb2.ScoredEpisode]
) -> bytes:
    """A question: a line of JSON, then the episodes."""
    head = json.dumps({"settings": dict(settings), "timeout": timeout})
    return (
        head.encode()
        + b"\n"
        + reward_gateway_pb2.ScoreGroupRequest(episodes=episodes, reward=reward).SerializeToString()
    )


def unpack_answer(reward: str, frame: bytes, count: int) -> list[Score]:
    """The scores of `count` episodes. Raises RewardFailed with the cause that the worker gives."""
    kind, rest = frame[:1], frame[1:]
    if kind != OK:
        raise (TryAgain if kind == AGAIN else RewardFailed)(rest.decode(), reward=reward)
    return unpack_scores(reward, reward_gateway_pb2.ScoreGroupResponse.FromString(rest), count)


def answer(question: bytes) -> bytes:
    """OK and the scores, or FAILED or AGAIN and the cause."""
    head, _, packed = question.partition(b"\n")
    asked = json.loads(head)
    # Should this process hang after the gateway has died, nobody is left to kill it: the system does.
    signal.setitimer(signal.ITIMER_REAL, 2 * asked["timeout"])
    try:
        request = reward_gateway_pb2.ScoreGroupRequest.FromString(packed)
        scores = asyncio.run(_scores(request, asked["settings"]))
        return OK + pack_scores(scores).SerializeToString()
    except FarmError as failure:
        traceback.print_exception(failure.__cause__ or failure, file=sys.stderr)
        passing = isinstance(failure, RewardFailed) and may_pass(failure)
        return (AGAIN if passing else FAILED) + failure.problem.encode()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


async def _scores(request: reward_gateway_pb2.ScoreGroupRequest, settings: Mapping[str, Any]) -> list[Score]:
    function = _function(request.reward)
    bound = functools.partial(function, **check_settings(function, settings, owner=request.reward))
    episodes = [read_episode(episode) for episode in request.episodes]
    if is_comparison(function):
        return await score_group(request.reward, bound, episodes)
    return [await score(request.reward, bound, episode) for episode in episodes]


@functools.cache
def _function(reward: str) -> Reward:
    return resolve(REWARDS, reward, what="reward")


def load(rewards: Sequence[str]) -> str:
    """Import what the rewards need, so that no score pays for it. Why that failed, or nothing."""
    try:
        for reward in rewards:
            _function(reward)
            for package in PACKAGES.get(reward, {}):
                importlib.import_module(package)
    except (Exception, SystemExit) as error:  # whatever an author's module raises
        return cause(error)
    return ""


def main() -> None:
    questions, answers = _own_pipes()
    megabytes, *rewards = sys.argv[1:]
    if megabytes != "0":
        most_bytes = int(megabytes) << 20
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    _send(answers, GREETING, load(rewards).encode())
    while len(head := questions.read(HEAD.size)) == HEAD.size:
        length, number = HEAD.unpack(head)
        _send(answers, number, answer(questions.read(length)))


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes, out of reach of rewards that read stdin or print."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as nothing:  # noqa: PTH123 (a descriptor is wanted, not a path)
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return questions, answers


def _send(answers: BinaryIO, number: int, frame: bytes) -> None:
    answers.write(HEAD.pack(len(frame), number) + frame)
    answers.flush()


if __name__ == "__main__":
    main()
