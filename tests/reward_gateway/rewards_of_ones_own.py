"""Rewards that misbehave, as a user might name them in the farm's file."""

import asyncio
import contextlib
import os
import time

from reward_gateway.worker import HEAD, OK
from rollfarm.reward import Episode, Score


def length(episode: Episode, *, most: int = 10) -> Score:
    return Score(min(len(episode.answer), most), f"of {most}")


async def patient(episode: Episode, *, seconds: float = 0.0) -> float:
    await asyncio.sleep(seconds)
    return 1.0


def hangs(episode: Episode) -> float:
    if episode.answer == "hang":
        time.sleep(60)
    return 1.0


def dies(episode: Episode) -> float:
    if episode.answer == "die":
        os._exit(1)
    return 1.0


def prints(episode: Episode) -> float:
    print("this must not reach the gateway's pipe")
    return 0.25


def not_a_number(episode: Episode) -> float:
    return float("nan")


def not_anything(episode: Episode) -> str:
    return "1.0"


def answers_for_others(episode: Episode) -> float:
    """Writes an answer of its own wherever it can."""
    for descriptor in range(3, 10):
        with contextlib.suppress(OSError):
            os.write(descriptor, HEAD.pack(1, 7) + OK)
    return 1.0
