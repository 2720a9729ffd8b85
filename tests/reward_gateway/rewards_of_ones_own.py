"""Rewards that misbehave, as a user might name them in the farm's file."""

import asyncio
import os
import time

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
