"""Scores answers to reasoning-gym's data sets.

Some of the data sets' scorers run the answer as Python, where a policy that finds out could do anything. They are asked
only about answers that are nothing but a formula, a table or a text; others are 0. So are answers at which a scorer
raises, where it does not raise at the right one too.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

RUN_ANSWERS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Data sets whose scorers call eval or sympy's parse_expr, which calls it."""

_OF_ANGLES = ["sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"]

FUNCTIONS = frozenset(["abs", "Abs", "exp", "ln", "log", "sqrt", *_OF_ANGLES])
"""What a formula may call."""

_STRANGE = re.compile(r"[^\w\s+\-*/^=()\[\],.'\"!]|\.\s*[^\W\d]")
"""What no formula or table has; attributes are among it."""

_CALL = re.compile(r"([^\W\d]\w*|[\])])\s*\(")


def is_plain(answer: str) -> bool:
    """Whether the answer calls nothing but FUNCTIONS when it is run, which are given no text."""
    if "(" not in answer:
        return _STRANGE.search(answer) is None
    is_formula = not (_STRANGE.search(answer) or "'" in answer or '"' in answer)
    return is_formula and all(called in FUNCTIONS for called in _CALL.findall(answer))


def score(scorer: Callable[..., float], answer: str, entry: Mapping[str, Any]) -> float:
    """What the data set's `scorer` gives. Raises what it raises at the entry's own answer."""
    if entry["metadata"]["source_dataset"] in RUN_ANSWERS and not is_plain(answer):
        return 0.0
    try:
        return float(scorer(answer=answer, entry=entry))
    except Exception:  # whatever a data set raises
        scorer(answer=entry["answer"], entry=entry)
        return 0.0
