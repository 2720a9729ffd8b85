"""Answers to questions in words, compared as SQuAD (arXiv 1606.05250) does."""

import json
import re
import string
from collections import Counter
from typing import Literal

from reward_gateway.rewards.words import final
from rollfarm.reward import Episode

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def qa(episode: Episode, *, metric: Literal["exact", "f1"] = "f1") -> float:
    """How well the policy's final answer agrees with the reference, or with the best of a JSON list of references.

    Case, punctuation and articles do not matter. "exact" is 1 or 0; "f1" is the F1 of the words in common. Raises
    ValueError when there is no reference.
    """
    references = _references(episode)
    said = final(episode.answer)
    if not said:
        return 0.0  # also where a reference is nothing but an article
    answer = normal(said)
    if metric == "exact":
        return float(any(answer == normal(reference) for reference in references))
    return max(f1(answer.split(), normal(reference).split()) for reference in references)


def normal(text: str) -> str:
    """Lower case, without punctuation, articles and surplus space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: list[str], reference: list[str]) -> float:
    """2PR / (P + R) over the words that both have, as often as both have them."""
    if not answer or not reference:
        return float(answer == reference)
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference))


def _references(episode: Episode) -> list[str]:
    try:
        several = json.loads(episode.reference)
    except ValueError:
        several = None
    references = several if isinstance(several, list) else [episode.reference]
    usable = [reference for reference in references if isinstance(reference, str) and reference.strip()]
    if not usable:
        raise ValueError(f"environment {episode.environment!r} gives no reference to compare with")
    return usable
