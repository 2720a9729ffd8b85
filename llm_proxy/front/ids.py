"""Ids that nobody else has. They open nothing, so that they need not be hard to guess."""

import random


def unique() -> str:
    return f"{random.getrandbits(128):032x}"
