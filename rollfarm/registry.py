"""Functions and classes chosen by configuration: a literal dict of names, or "module:name" for the user's own.

The keyword parameters of what is chosen are its settings. They are checked by name and by type when the configuration
is read, so that a wrong one never waits until it is used.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from rollfarm.config import ConfigError, nearest

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def resolve(registry: Mapping[str, T], name: str, *, what: str) -> T:
    """The entry called `name`, or what "module:name" imports. Raises ConfigError, which lists the known names.

    `what` says in messages what is looked for, for example "reward".
    """
    if name in registry:
        return registry[name]
    if ":" not in name:
        raise _unknown(what, name, registry)
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{what.capitalize()} {name!r} cannot be imported: {error}. "
            "Put its folder on PYTHONPATH, or correct the name."
        ) from error


def bind(registry: Mapping[str, F], name: str, settings: Mapping[str, Any], *, what: str) -> F:
    """The function called `name` with its settings bound. Raises ConfigError as `resolve` and `check_settings` do."""
    function = resolve(registry, name, what=what)
    return typing.cast(F, functools.partial(function, **check_settings(function, settings, owner=name)))


def check_settings(target: Callable[..., Any], settings: Mapping[str, Any], *, owner: str) -> dict[str, Any]:
    """`settings` with the types that `target` declares for its keyword parameters.

    Raises ConfigError: an unknown name gets the nearest known one, and `owner` says whose settings they are.
    """
    model = settings_model(target)
    for name in settings:
        if name not in model.model_fields:
            raise _unknown_setting(owner, name, model.model_fields)
    try:
        checked = model(**settings)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"{owner}: wrong setting {problems}.") from None
    return {name: getattr(checked, name) for name in checked.model_fields_set}


def outline(module: str, registry: str) -> dict[str, list[str]]:
    """The names in the dict `registry` of `module`, each with the settings of its function, by the source alone.

    For a look at a registry whose module takes seconds to import, as torch makes it. Its keys are literal, and its
    values functions of the same module.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text()).body
    functions = {
        node.name: [arg.arg for arg in node.args.kwonlyargs] for node in body if isinstance(node, ast.FunctionDef)
    }
    for node in body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == registry
            and isinstance(node.value, ast.Dict)
        ):
            return {
                ast.literal_eval(key): functions[ast.unparse(value)]
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if key is not None
            }
    raise LookupError(f"{module} has no literal dict {registry}")


def check_outline(known: Mapping[str, Sequence[str]], name: str, settings: Mapping[str, Any], *, what: str) -> None:
    """Raise ConfigError for an unknown name or setting, as `bind` does. The user's own functions are not looked at."""
    if ":" in name:
        return
    if name not in known:
        raise _unknown(what, name, known)
    for setting in settings:
        if setting not in known[name]:
            raise _unknown_setting(name, setting, known[name])


def _unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"Unknown {what} {name!r}.{nearest(name, list(known))} Your own is 'module:name'.")


def _unknown_setting(owner: str, name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"{owner}: unknown setting {name!r}.{nearest(name, list(known))}")


@functools.cache
def settings_model(target: Callable[..., Any]) -> type[BaseModel]:
    """The keyword parameters of a function, or of a class's constructor, as a closed table."""
    called = target.__init__ if inspect.isclass(target) else target
    hints = typing.get_type_hints(called, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if _is_setting(parameter, in_class=inspect.isclass(target)):
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints.get(name, Any), default)
    return create_model(
        "Settings",
        __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()),
        **fields,
    )  # pyright: ignore[reportCallIssue]


def _is_setting(parameter: inspect.Parameter, *, in_class: bool) -> bool:
    kinds = {parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD} if in_class else {parameter.KEYWORD_ONLY}
    return parameter.kind in kinds
