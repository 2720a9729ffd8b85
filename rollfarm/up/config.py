"""The whole farm's configuration as one root, so that every key and flag is checked before anything starts.

The kit imports no service; each service's root is found by its dotted name when the farm starts.
"""

import functools
import importlib
import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_origin

from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from rollfarm.config import Config, ConfigError, Root, load, masked, read, table_of, variable
from rollfarm.run import ModelConfig, RunConfig

SERVICE_ROOTS = (
    "sample_buffer.config:SampleBufferRoot",
    "llm_proxy.config:LlmProxyRoot",
    "llm_proxy.engine.config:EngineRoot",
    "env_manager.config:EnvManagerRoot",
    "reward_gateway.config:RewardGatewayRoot",
    "trainer.config:TrainerRoot",
)
"""Where each service declares the tables that it reads."""

_NO_TABLES: dict[str, Any] = {"run": {}, "model": {}, "up": {}}


class UpConfig(Config):
    """How one machine runs the whole farm."""

    engines: int = Field(default=1, ge=0, le=10)
    """Engine processes. Each takes a core or a GPU and its own copy of the weights. 0 starts none: name running ones in
    llm_proxy.engines."""

    env_managers: int = Field(default=1, ge=1, le=10)
    """env_manager processes. One plays hundreds of light episodes; more help where environments burn CPU."""

    trainer_ranks: int = Field(default=1, ge=1, le=64)
    """Trainer processes. Each takes a core or a GPU; the batch is split between them."""

    base_port: int = Field(default=7700, ge=1, le=65535 - 100)
    """Every service's port is this plus a fixed offset; the farm takes no port beyond the hundred above it. Another one
    lets two farms share a machine."""

    start_seconds: float = Field(default=300.0, gt=0)
    """How long a service may take to come up. Big models load slowly."""

    max_restarts: int = Field(default=5, ge=0)
    """Crashes of one service within restart_window_seconds after which the farm gives up. 0 forgives none."""

    restart_window_seconds: float = Field(default=300.0, gt=0)
    """Crashes longer ago than this are forgotten."""

    max_failed_groups: int = Field(default=20, ge=0)
    """The farm gives up after this many groups were dropped because their episodes failed, with no episode played well
    in between, or when every environment was suspended before any episode was played well. 0 never gives up."""

    drain_seconds: float = Field(default=20.0, ge=0)
    """How long a service may take to end by itself before it is killed. 0 kills at once."""

    time_limit_seconds: float = Field(default=0.0, ge=0)
    """The farm is drained after this long and can be resumed, which is no failure. 0 is without a limit."""

    metric: str = "reward"
    """The measure of the validation that is reported: "reward", or a name that the environment measures, such as
    "success"."""

    min_gain: float = 0.0
    """The command fails when a finished run's measure did not rise by this much from the first validation to the last.
    0 asks for nothing."""

    fresh: bool | Literal["finished"] = False
    """Delete the run's folder and begin anew, and make a model of [model.create] anew whose settings changed;
    "finished" does so only where no unfinished run is in the folder, and otherwise goes on with that."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """"live" redraws a screen, "plain" writes a line now and then; "auto" is live on a terminal."""

    plain_seconds: float = Field(default=5.0, gt=0)
    """Seconds between the lines of the plain console."""


class FarmRoot(Root):
    """What `rollfarm up` reads itself. The services' tables are added to it by `farm_root`."""

    flags_listed_by: ClassVar[str] = "`rollfarm up --flags`"

    run: RunConfig = RunConfig()
    """What the run is."""

    model: ModelConfig = ModelConfig()
    """What it trains."""

    up: UpConfig = UpConfig()
    """How this machine runs it."""

    def check(self) -> None:
        if setting(self, "trainer", "offline"):
            raise ConfigError(
                "trainer.offline: a farm learns from episodes, not from records. Say `rollfarm train`, or remove the "
                "table."
            )
        self.model.check()
        if not self.run.domains:
            raise ConfigError("run.domains: empty. Add [[run.domains]] with a name and an environment.")
        http = setting(self, "llm_proxy", "http")
        if setting(self, "env_manager", "agents") and not (http and http.enabled):
            raise ConfigError(
                "env_manager.agents: agents speak HTTP, which llm_proxy does not serve. Set [llm_proxy.http] enabled = "
                "true."
            )
        scored = setting(self, "reward_gateway", "domains") or {}
        for domain in self.run.domains:
            if domain.name not in scored:
                raise ConfigError(
                    f"run.domains: nothing scores {domain.name!r}. Add [reward_gateway.domains.{domain.name}] with its "
                    "rewards."
                )


def setting(farm: FarmRoot, table: str, key: str) -> Any:
    """A value in a service's table, which the kit's types do not know; None where there is no such table."""
    return getattr(getattr(farm, table, None), key, None)


def farm_root(names: Sequence[str] = SERVICE_ROOTS) -> type[FarmRoot]:
    """FarmRoot with every table of every service.

    Raises ConfigError where a service cannot be imported or two disagree about a table.
    """
    fields: dict[str, FieldInfo] = {}
    for name in names:
        for table, field in _service_root(name).model_fields.items():
            known = fields.get(table) or FarmRoot.model_fields.get(table)
            if known is not None and known.annotation is not field.annotation:
                raise ConfigError(f"{name} and another service disagree about the table [{table}].")
            fields.setdefault(table, field)
    merged: dict[str, Any] = {
        table: Annotated[field.annotation, field]
        for table, field in fields.items()
        if table not in FarmRoot.model_fields
    }
    return create_model("FarmRoot", __base__=FarmRoot, __doc__=FarmRoot.__doc__, **merged)


def load_farm(argv: Sequence[str], names: Sequence[str] = SERVICE_ROOTS) -> FarmRoot:
    """Read `FILE... --table.key value...`, and check it as every service will. Raises ConfigError."""
    farm = load(farm_root(names), argv, prog="rollfarm up", defaults=_NO_TABLES)
    for name in names:
        root = _service_root(name)
        root.model_construct(**{table: getattr(farm, table) for table in root.model_fields}).check()
    return farm


def read_farm(argv: Sequence[str], *, prog: str) -> FarmRoot:
    """The same for a look at a farm that runs already, without a check of what services need. Raises ConfigError."""
    return read(farm_root(), argv, prog=prog, defaults=_NO_TABLES)


def as_used(farm: Root, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The resolved configuration as plain tables, for the file that the services read.

    Passwords are masked in it, and what came from the environment stays there; `carried` has both.
    """
    tables = _plain(farm)
    for path, value in _unwritten(farm, (), environ):
        *outer, key = path
        table = functools.reduce(dict.__getitem__, outer, tables)
        # A masked URL stays even so: without it a run would go on with another journal, and nobody would be told.
        written = _hidden(value) if isinstance(value, str) or variable(path) not in environ else value
        if written == value:
            del table[key]
        else:
            table[key] = written
    return tables


def carried(farm: Root, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables that bring to the services what their file does not say."""
    return {
        variable(path): value if isinstance(value, str) else json.dumps(value)
        for path, value in _unwritten(farm, (), environ)
    }


def write_toml(tables: dict[str, Any], path: Path) -> None:
    """Write `tables` to `path` in one move."""
    import tomli_w

    fresh = path.with_suffix(".tmp")
    fresh.write_text(tomli_w.dumps(tables, multiline_strings=False))
    fresh.replace(path)


def describe(root: type[BaseModel]) -> str:
    """Every key of `root` with its default and its meaning, for people."""
    return "\n".join(_described(root, None, ""))


def _described(table: type[BaseModel], given: object, prefix: str, *, mark: str = "--") -> Iterator[str]:
    """The keys of `table`, whose defaults are those of the instance `given`, if there is one.

    `mark` tells flags from keys inside a list or a dict, which is given whole.
    """
    for name, field in table.model_fields.items():
        path = prefix + name
        default = getattr(given, name, field.get_default(call_default_factory=True))
        if isinstance(default, BaseModel):
            yield from _described(type(default), default, f"{path}.", mark=mark)
            continue
        yield f"{mark}{path}  {'required' if field.is_required() else _default_text(default)}"
        meaning = " ".join((field.description or "").split())
        yield from (f"    {line}" for line in textwrap.wrap(meaning, 100))
        if inner := table_of(field.annotation):
            yield from _described(inner, None, f"{path}.", mark=mark)
        elif inner := table_of(field.annotation, containers=True):
            key = ".NAME" if get_origin(field.annotation) is dict else "[]"
            yield from _described(inner, None, f"{path}{key}.", mark="  ")


def _default_text(default: object) -> str:
    return "unset" if default is None else f"= {json.dumps(to_jsonable_python(default))}"


def _service_root(name: str) -> type[Root]:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(
            f"Cannot import {module}: {error}. Run this in the checkout, after `pip install '.[all]'` or `make demo`."
        ) from error


def _plain(value: Any) -> Any:
    """As TOML has it, which has no None."""
    value = to_jsonable_python(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _unwritten(
    table: BaseModel, path: tuple[str, ...], environ: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What came from the environment, and values that hold a password, with their paths."""
    for name in type(table).model_fields:
        value, where = getattr(table, name), (*path, name)
        if value is None:
            continue
        if variable(where) in environ:
            yield where, _plain(value)
        elif isinstance(value, BaseModel):
            yield from _unwritten(value, where, environ)
        elif _hidden(_plain(value)) != _plain(value):
            yield where, _plain(value)


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_hidden(item) for item in value]
    return masked(value) if isinstance(value, str) else value
