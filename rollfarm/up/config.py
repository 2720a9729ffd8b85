"""The whole farm's configuration as one root, so that every key and flag is checked before anything starts.

The kit imports no service; each service's root is found by its dotted name when the farm starts.
"""

import importlib
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SecretStr, create_model
from pydantic.fields import FieldInfo

from rollfarm.config import Config, ConfigError, Root, load
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

ENV_PREFIX = "ROLLFARM_"


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
    in between. 0 never gives up."""

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
    """Delete the run's folder and begin anew; "finished" does so only where the run in it is finished, and otherwise
    goes on with it."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """"live" redraws a screen, "plain" writes a line now and then; "auto" is live on a terminal."""

    plain_seconds: float = Field(default=5.0, gt=0)
    """Seconds between the lines of the plain console."""


class FarmRoot(Root):
    """What `rollfarm up` reads itself. The services' tables are added to it by `farm_root`."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    up: UpConfig = UpConfig()


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
    """Read `FILE... --table.key value...` and check it as every service will. Raises ConfigError."""
    farm = load(farm_root(names), argv, prog="rollfarm up", defaults={"run": {}, "model": {}, "up": {}})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        write_toml(as_used(farm), path)
        for name in names:
            load(_service_root(name), [str(path)], prog="rollfarm up")
    _check_model(farm.model)
    _check_domains(farm)
    return farm


def as_used(farm: Root, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The resolved configuration as plain tables, for the file that the services read.

    Values that came from the environment stay there, and secrets are never written.
    """
    return _plain(farm, (), environ)


def secrets(farm: Root) -> dict[str, str]:
    """Environment variables that carry the secrets of the configuration to the services."""
    return dict(_secrets(farm, ()))


def write_toml(tables: dict[str, Any], path: Path) -> None:
    """Write `tables` to `path` in one move."""
    import tomli_w

    fresh = path.with_suffix(".tmp")
    fresh.write_text(tomli_w.dumps(tables, multiline_strings=False))
    fresh.replace(path)


def _service_root(name: str) -> type[Root]:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(
            f"Cannot import {module}: {error}. Run `rollfarm up` from a checkout, with rollfarm[all] installed."
        ) from error


def _check_domains(farm: FarmRoot) -> None:
    if not farm.run.domains:
        raise ConfigError("run.domains: empty. Add [[run.domains]] with a name and an environment.")
    scored = as_used(farm).get("reward_gateway", {}).get("domains", {})
    for domain in farm.run.domains:
        if domain.name not in scored:
            raise ConfigError(
                f"run.domains: nothing scores {domain.name!r}. Add [reward_gateway.domains.{domain.name}] with its "
                "rewards."
            )


def _check_model(model: ModelConfig) -> None:
    if not model.path:
        raise ConfigError("model.path: missing. Give a model's folder, or its name on the hub.")
    folder = Path(model.path).expanduser()
    if folder.exists() or model.create is not None:
        return
    looks_local = folder.is_absolute() or model.path.startswith((".", "~")) or model.path.count("/") != 1
    if looks_local:
        raise ConfigError(
            f"model.path: {model.path} does not exist. Give a folder in Hugging Face format, or add [model.create] to "
            "make a tiny model there."
        )


def _plain(value: Any, path: tuple[str, ...], environ: Mapping[str, str]) -> Any:
    if isinstance(value, Config | Root):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        return {
            name: _plain(item, (*path, name), environ)
            for name, item in fields.items()
            if item is not None and not isinstance(item, SecretStr) and _variable((*path, name)) not in environ
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item, (*path, str(key)), environ) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, path, environ) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return str(value)


def _secrets(value: Any, path: tuple[str, ...]) -> list[tuple[str, str]]:
    if isinstance(value, SecretStr):
        return [(_variable(path), value.get_secret_value())]
    if isinstance(value, Config | Root):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        return [pair for name, item in fields.items() for pair in _secrets(item, (*path, name))]
    return []


def _variable(path: tuple[str, ...]) -> str:
    return ENV_PREFIX + "__".join(path).upper()


def describe(root: type[BaseModel], prefix: str = "") -> str:
    """Every key of `root` with its default and its meaning, for people."""
    lines: list[str] = []
    for name, field in root.model_fields.items():
        path = prefix + name
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            lines.append(describe(inner, f"{path}."))
            continue
        default = "required" if field.is_required() else f"= {field.get_default(call_default_factory=True)!r}"
        meaning = " ".join((field.description or "").split())
        lines += [f"--{path}  {default}", *(f"    {line}" for line in textwrap.wrap(meaning, 100))]
    return "\n".join(lines)
