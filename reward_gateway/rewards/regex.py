"""The answer against a regular expression. Runs in workers alone: a pattern may take for ever."""

import re

from reward_gateway.rewards.words import spoken
from rollfarm.reward import Episode, pure


@pure
def regex(episode: Episode, *, pattern: re.Pattern[str], whole: bool = False) -> float:
    """1 when the pattern is found in the policy's last words, or with `whole` matches them all, else 0.

    Flags are written into the pattern, as in "(?i)yes".
    """
    answer = spoken(episode.answer).strip()
    return float((pattern.fullmatch(answer) if whole else pattern.search(answer)) is not None)
