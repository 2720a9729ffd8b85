"""A process that computes rewards which block or may hang: one at a time, asked and answered over its pipes.

`python -m reward_gateway.worker` greets, then reads frames on stdin and writes one for each on stdout. A frame is the
number of its bytes, the number of its question, and those bytes. It ends with its stdin. It is safe to kill at any
moment.
"""

import asyncio
import functools
import json
import os
import signal
import struct
import sys
import traceback
from typing import Any, BinaryIO

from reward_gateway.rewards import REWARDS
from rollfarm.errors import FarmError
from rollfarm.registry import check_settings, resolve
from rollfarm.reward import Reward, Score, read_episode, score
from rollfarm.v1 import reward_gateway_pb2

HEAD = struct.Struct("<IQ")
"""How many bytes follow, and which question they ask or answer."""

GREETING = 0
"""The number of the empty frame that says that it can be asked; questions begin at 1."""

OK, FAILED = b"+", b"-"


def pack_question(reward: str, settings: Any, timeout: float, episode: reward_gateway_pb2.ScoredEpisode) -> bytes:
    """A question: a line of JSON, then the episode."""
    head = json.dumps({"reward": reward, "settings": settings, "timeout": timeout})
    return head.encode() + b"\n" + episode.SerializeToString()


def pack_score(verdict: Score) -> bytes:
    answer = reward_gateway_pb2.RewardServiceScoreResponse(value=verdict.value, detail=verdict.detail)
    return OK + answer.SerializeToString()


def answer(question: bytes) -> bytes:
    """OK and the score, or FAILED and the cause."""
    head, _, packed = question.partition(b"\n")
    asked = json.loads(head)
    # Should this process hang after the gateway has died, nobody is left to kill it: the system does.
    signal.setitimer(signal.ITIMER_REAL, 2 * asked["timeout"])
    try:
        episode = read_episode(reward_gateway_pb2.ScoredEpisode.FromString(packed))
        function = _function(asked["reward"])
        settings = check_settings(function, asked["settings"], owner=asked["reward"])
        function = functools.partial(function, **settings)
        return pack_score(asyncio.run(score(asked["reward"], function, episode)))
    except FarmError as failure:
        traceback.print_exception(failure.__cause__ or failure, file=sys.stderr)
        return FAILED + failure.problem.encode()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@functools.cache
def _function(reward: str) -> Reward:
    return resolve(REWARDS, reward, what="reward")


def main() -> None:
    questions, answers = _own_pipes()
    _send(answers, GREETING, b"")
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
