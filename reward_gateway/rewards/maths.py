"""The answer as mathematics: 1/2, 0.5 and \\frac{1}{2} are equal. Runs in workers alone: parsing can hang."""

import logging

from rollfarm.reward import Episode, Score, pure

# It warns at every call that its own timer is off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


@pure
def maths(episode: Episode, *, digits: int = 6) -> Score:
    """1 when the policy's last words hold an expression equal to the reference, else 0.

    `digits` is how many decimals of numbers must agree. Raises ValueError when the reference holds no expression.
    """
    # Here, because it brings sympy with it, and only workers shall pay for that.
    from math_verify import parse, verify

    # The worker is killed when it is late, so the library's own timer, which needs SIGALRM, stays off.
    wanted = parse(_anchored(episode.reference), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not wanted:
        raise ValueError(f"the reference {episode.reference!r} holds no mathematical expression")
    found = parse(episode.answer, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    equal = bool(found) and verify(wanted, found, float_rounding=digits, timeout_seconds=None)
    return Score(float(equal), f"read {found[0]}" if found else "no mathematical expression in the answer")


def _anchored(reference: str) -> str:
    """A reference is mathematics throughout, also where its author left the dollars out."""
    return reference if "$" in reference or "\\boxed" in reference else f"${reference}$"
