from collections.abc import Callable

import pytest

from rollfarm.config import ConfigError
from rollfarm.registry import bind


def scaled(value: float, *, by: float = 2.0) -> float:
    return value * by


FUNCTIONS: dict[str, Callable[..., float]] = {"scaled": scaled}


def test_bind_fixes_settings():
    assert bind(FUNCTIONS, "scaled", {"by": 3}, what="scale")(2) == 6


def test_a_function_of_ones_own_is_named_by_its_module():
    assert bind(FUNCTIONS, "math:fsum", {}, what="scale")([1, 2]) == 3


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("scald", {}, "Unknown scale 'scald'. Did you mean 'scaled'?"),
        ("scaled", {"bye": 1}, "scaled: unknown setting 'bye'. Did you mean 'by'?"),
        ("scaled", {"by": "wide"}, "scaled: wrong setting by: Input should be a valid number"),
        ("no_such_module:f", {}, "cannot be imported"),
    ],
)
def test_a_wrong_name_or_setting_is_refused(name, settings, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        bind(FUNCTIONS, name, settings, what="scale")
