"""Multiple choice: the letter that the policy settled on."""

import re

from reward_gateway.rewards.words import boxed, spoken, tagged
from rollfarm.reward import Episode, Score

_MOST = 4_000
"""Characters at the end of the answer in which the choice is looked for."""

_PHRASE = re.compile(
    r"(?i:answer|choice|option)(?:\s+is|\s*:)\s*:?[\s*_$]{0,9}(?:option\s+)?(?:\(([A-Za-z])\)|([A-Z])(?![\w'’]))"
)
_ALONE = re.compile(r"[\s*_$]{0,9}(?:\(([A-Za-z])\)|([A-Z])(?:[.):*_$]|$)|([a-z])[.)*_$]{0,3}$)")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")


def choice(episode: Episode) -> Score:
    """1 when the policy chose the letter that the reference begins with, else 0.

    The choice is a letter in <answer> or \\boxed{}, else after "answer is", else at the head of the last line, as in
    "B", "(B)" and "B) Paris". Raises ValueError when the reference is no letter.
    """
    wanted = _letter(episode.reference)
    if wanted is None:
        raise ValueError(f"the reference {episode.reference!r} is no letter of a choice")
    found = chosen(episode.answer)
    return Score(float(found == wanted), f"read {found}" if found else "no choice in the answer")


def chosen(answer: str) -> str | None:
    """The letter in upper case, or None."""
    text = spoken(answer)[-_MOST:]
    for marked in (tagged(text), boxed(text)):
        if marked is not None:
            return _letter(_WRAPPED.sub(r"\1", marked))
    if phrases := _PHRASE.findall(text):
        return "".join(phrases[-1]).upper()
    lines = text.split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return _letter(last)


def _letter(text: str) -> str | None:
    found = _ALONE.match(text.strip())
    return "".join(filter(None, found.groups())).upper() if found else None
