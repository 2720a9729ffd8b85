"""Rewards that misbehave, as a user might name them in the farm's file."""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence

from reward_gateway.worker import HEAD, OK
from rollfarm import telemetry
from rollfarm.reward import Episode, Score, TryAgain, compares, pure


def length(episode: Episode, *, most: int = 10) -> Score:
    return Score(min(len(episode.answer), most), f"of {most}")


async def patient(episode: Episode, *, seconds: float = 0.0) -> float:
    await asyncio.sleep(seconds)
    return 1.0


async def traced(episode: Episode) -> Score:
    return Score(0.0, telemetry.trace_id.get())


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


GATE: dict[str, asyncio.Event] = {}
"""Holds `gated` up, by the answer."""


async def gated(episode: Episode) -> float:
    await GATE.setdefault(episode.answer, asyncio.Event()).wait()
    return 1.0


ATTEMPTS: dict[str, int] = {}
"""How often `moody` was asked, by the answer."""


async def moody(episode: Episode, *, failures: int = 1) -> float:
    """Fails the first few times."""
    ATTEMPTS[episode.answer] = ATTEMPTS.get(episode.answer, 0) + 1
    if ATTEMPTS[episode.answer] <= failures:
        raise TryAgain("not in the mood")
    return 1.0


def moody_worker(episode: Episode) -> float:
    raise TryAgain("never in the mood")


@pure
async def counted(episode: Episode) -> float:
    """How often it was asked for this answer."""
    ATTEMPTS[episode.answer] = ATTEMPTS.get(episode.answer, 0) + 1
    return float(ATTEMPTS[episode.answer])


def eats_memory(episode: Episode) -> float:
    return float(len(bytearray(8 << 30)))


@compares
def shorter(episodes: Sequence[Episode], *, bonus: float = 0.0) -> list[float]:
    longest = max(len(episode.answer) for episode in episodes)
    return [longest - len(episode.answer) + bonus for episode in episodes]


@compares
async def together(episodes: Sequence[Episode]) -> list[Score]:
    """How many were compared; fails where one says so."""
    answers = [episode.answer for episode in episodes]
    if "gate" in answers:
        await GATE.setdefault("together", asyncio.Event()).wait()
    if "raise" in answers:
        raise ValueError("one of them says raise")
    return [Score(len(answers), ",".join(answers)) for _ in answers]


@compares
async def too_few(episodes: Sequence[Episode]) -> list[float]:
    return [1.0]


@compares
async def not_many(episodes: Sequence[Episode]) -> float:
    return 1.0
