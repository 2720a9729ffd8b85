"""What all adapters share: their package is imported when an episode needs it, and its absence has a remedy."""

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rollfarm.config import ConfigError
from rollfarm.env import Environment, Kind
from rollfarm.errors import InvalidArgument, PackageMissing
from rollfarm.registry import resolve

SEEDS = 2**32
"""Seeds that numpy and most worlds take; a task's is taken modulo this."""


class Adapter(Environment):
    """Plays another project's environment."""

    package: ClassVar[str]
    """The module that must be importable."""

    @classmethod
    def load(cls, module: str = "") -> Any:
        """The package, or a module of it. Raises PackageMissing, which names the extra."""
        try:
            return importlib.import_module(module or cls.package)
        except ModuleNotFoundError as error:
            if cls.is_installed():
                raise
            raise package_missing(cls, str(error)) from None

    @classmethod
    def is_installed(cls) -> bool:
        """Whether the package can be imported here."""
        return importlib.util.find_spec(cls.package) is not None

    @classmethod
    def check(cls, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError where settings that are well-formed can never be played, as far as this machine knows."""


def package_missing(kind: type[Adapter], why: str = "") -> PackageMissing:
    """The error of an adapter whose package is not installed."""
    reason = f" ({why})" if why else ""
    return PackageMissing(
        f"The environment {kind.name} needs the package {kind.package}, which is not installed{reason}: "
        f"`pip install 'rollfarm[{kind.name}]'`.",
        package=kind.package,
        extra=kind.name,
    )


def data_missing(kind: type[Adapter], world: str, data: str, how: str) -> PackageMissing:
    """The error of a world whose data is not on this machine, with how it gets there."""
    return PackageMissing(f"{kind.name}: {world} needs {data}, which is not on this machine: {how}.", data=data)


def corpus_missing(kind: type[Adapter], world: str, error: LookupError) -> PackageMissing | None:
    """The error of a world that reads one of nltk's corpora, which are downloaded; None where `error` is another."""
    found = re.search(r"nltk\.download\('(\w+)'\)", str(error))
    if found is None:
        return None
    return data_missing(kind, world, f"nltk's {found[1]!r}", f"`python -m nltk.downloader {found[1]}`")


def wrong_setting(kind: Kind, problem: str) -> InvalidArgument:
    """The error of settings that are well-formed, and that the package does not take."""
    return InvalidArgument(f"{kind.name}: {problem.rstrip('.')}.", environment=kind.name)


def function(kind: Kind, setting: str, name: str) -> Callable[..., Any]:
    """The function that the setting names as "module:function". Raises InvalidArgument."""
    try:
        found = resolve({}, name, what=setting)
    except ConfigError as error:
        raise wrong_setting(kind, str(error).rstrip(".")) from None
    if not callable(found):
        raise wrong_setting(kind, f"{setting} {name!r} is not a function")
    return found
