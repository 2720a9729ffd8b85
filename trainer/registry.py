"""Functions by name, with their settings checked when the configuration loads.

A registry is a literal dict. "module:function" names a function of the user's own; its keyword-only parameters are its
settings too.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from rollfarm.config import ConfigError, nearest

F = TypeVar("F", bound=Callable[..., Any])


def bind(registry: Mapping[str, F], name: str, /, **settings: object) -> F:
    """The function of that name with its settings bound.

    Raises ConfigError for a name or a setting that does not exist, or a value of the wrong type.
    """
    function = _imported(name) if ":" in name else _registered(registry, name)
    known = {
        parameter.name: parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"{name}: unknown setting {key!r}.{nearest(key, list(known))}")
        _check_type(name, key, value, known[key].default)
    missing = [key for key, parameter in known.items() if parameter.default is parameter.empty and key not in settings]
    if missing:
        raise ConfigError(f"{name}: setting {missing[0]!r} is missing, and has no default. Set it.")
    return cast(F, partial(function, **settings))


def _registered(registry: Mapping[str, F], name: str) -> F:
    if name not in registry:
        raise ConfigError(f'{name!r}: unknown name.{nearest(name, list(registry))} Or give "module:function".')
    return registry[name]


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name!r}: cannot be imported: {error}. Correct the name, or PYTHONPATH.") from None
    if not callable(found):
        raise ConfigError(f"{name!r}: not a function. Name one.")
    return found


def _check_type(name: str, key: str, value: object, default: object) -> None:
    """Refuse a value that is not like the default: a bool is no number, and an int passes for a float."""
    like: type | tuple[type, ...] = (int, float) if type(default) is float else type(default)
    known = isinstance(default, bool | int | float | str)
    if known and (isinstance(value, bool) != isinstance(default, bool) or not isinstance(value, like)):
        raise ConfigError(f"{name}: setting {key!r} is {value!r}; give a value like {default!r}.")
