"""What authors' code returns and raises, made safe to send. What is worthless raises ValueError, in words."""

import math
from typing import SupportsFloat, cast

MOST_CHARACTERS = 1000
"""Of a cause, which travels in the trailers of a call; gRPC lets all of them together be 8 KiB."""


def text(value: object, what: str) -> str:
    """`value`, which is text that UTF-8 can carry. `what` names it in the error."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is {type(value).__name__}, not a str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds lone surrogates; decode what it was read from with errors='replace'") from None
    return value


def number(value: object, what: str) -> float:
    """`value` as a finite float; whatever float() takes and is not text."""
    try:
        if not hasattr(value, "__float__"):  # as a check for SupportsFloat, but fast
            raise TypeError
        finite = float(cast(SupportsFloat, value))
    except Exception:  # whatever an author's __float__ raises
        raise ValueError(f"{what} is {type(value).__name__}, not a number") from None
    if not math.isfinite(finite):
        raise ValueError(f"{what} is {finite}, not a finite number")
    return finite


def flag(value: object, what: str) -> bool:
    """`value` as a bool; numpy's are fine."""
    if value not in (True, False):
        raise ValueError(f"{what} is {type(value).__name__}, not a bool")
    return bool(value)


def cause(error: BaseException) -> str:
    """What was raised, by name and by message, as text that UTF-8 can carry and a call's trailers can hold."""
    try:
        message = str(error)
    except Exception:  # whatever an author's __str__ raises
        message = "(its message cannot be shown)"
    if len(message) > MOST_CHARACTERS:
        message = f"{message[:MOST_CHARACTERS]}..."
    return f"{type(error).__name__}: {message}".encode(errors="backslashreplace").decode()
