"""Configuration: TOML files composed left to right, dotted flags over them, environment variables for secrets.

One file describes the whole farm, a table for each service. A service reads the tables that it declares and ignores
the other services'; a key that nobody declares is an error that names the nearest valid one.

Precedence, highest first: `--table.key value`, then `ROLLFARM_TABLE__KEY` in the environment, then the files, the last
one first.

The password of a URL is never written down: not in a file, and not in the message of a ConfigError.
"""

import difflib
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

SECTIONS = ("run", "model", "sample_buffer", "llm_proxy", "engine", "env_manager", "reward_gateway", "trainer", "up")
"""Every table that a farm's file may have."""

ENV_PREFIX = "ROLLFARM_"
"""What the names of environment variables begin with."""

EXIT_BAD_CONFIG = 2
"""Exit status of a service whose configuration is wrong."""

EXIT_PORT_IN_USE = 3
"""Exit status of a service that could not listen."""


class Config(BaseModel):
    """A closed, immutable table of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Root(BaseSettings):
    """What one program reads: a field for each table. Subclass it, then call `load`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    flags_listed_by: ClassVar[str] = "--help"
    """What lists every flag."""

    def check(self) -> None:
        """Raise ConfigError for what no key shows by itself: names that have to exist, and keys that have to agree.

        `load` calls it in every service, and `rollfarm up` for every service before it starts any. It imports no torch.
        """


class Listen(Config):
    """Where a gRPC server listens."""

    host: str = "127.0.0.1"
    """Interface. 0.0.0.0 is all of them: anyone who reaches the port may use the service."""

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port; 0 lets the system choose, and the log says which."""

    drain_seconds: Annotated[float, Field(ge=0)] = 5.0
    """On SIGTERM, how long running calls may finish. 0 cuts them off; callers retry."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Telemetry(Config):
    """Logs and metrics of one process."""

    log_format: typing.Literal["console", "json"] = "console"
    """"console" for people, "json" for machines: one object a line on stderr."""

    log_level: typing.Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level written."""

    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the Prometheus page at /metrics, on the host of `listen`. 0 serves none."""


class ConfigError(Exception):
    """The configuration is wrong; the message says where and what to do, and shows no password."""

    def __init__(self, problem: str) -> None:
        super().__init__(masked(problem))


_SECRET = re.compile(r"(?<=://)[^\s/?#]+(?=@)|(?<=[?&_]password=)[^\s&]+")
_MASKED = re.compile(r"://\*\*\*@|[?&_]password=\*\*\*")


def masked(text: str) -> str:
    """`text` with *** for the user and the password of every URL in it."""
    return _SECRET.sub("***", text)


C = TypeVar("C", bound=Root)


def load(root: type[C], argv: Sequence[str], *, prog: str, defaults: dict[str, Any] | None = None) -> C:
    """Read `FILE... --table.key value...` into `root`, and check it.

    `defaults` are lowest in precedence. Raises ConfigError; `load_or_exit` prints it instead.
    """
    loaded = read(root, argv, prog=prog, defaults=defaults)
    for path, value in leaves(loaded):
        if _MASKED.search(str(value)):
            raise ConfigError(
                f"{'.'.join(path)}: its password is not kept in files. Set the whole value in the environment, as "
                f"{variable(path)}."
            )
    loaded.check()
    return loaded


def read(root: type[C], argv: Sequence[str], *, prog: str, defaults: dict[str, Any] | None = None) -> C:
    """Like `load`, but what a service needs beyond well-formed tables is not looked at. Raises ConfigError."""
    files = [Path(arg) for arg in _leading_files(argv)]
    for file in files:
        _check_file(file)
    flags = list(argv[len(files) :])

    class Loaded(root):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            toml = TomlConfigSettingsSource(settings_cls, files or None, deep_merge=True)
            for foreign in set(SECTIONS) - set(settings_cls.model_fields):
                toml.init_kwargs.pop(foreign, None)
            cli = CliSettingsSource[Any](
                settings_cls,
                cli_prog_name=f"{prog} [FILE.toml ...]",
                cli_parse_args=flags,
                cli_exit_on_error=False,
                cli_hide_none_type=True,
                cli_avoid_json=True,
            )
            return cli, env_settings, toml, init_settings

    Loaded.__name__ = root.__name__
    Loaded.__doc__ = root.__doc__
    try:
        return typing.cast(C, Loaded(**(defaults or {})))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(root, item) for item in error.errors())) from None
    except SettingsError as error:
        raise ConfigError(_explain_flag(root, str(error))) from None


def load_or_exit(root: type[C], argv: Sequence[str], *, prog: str, defaults: dict[str, Any] | None = None) -> C:
    """Like `load`, but a wrong configuration ends the process with status 2 and a message on stderr."""
    try:
        return load(root, argv, prog=prog, defaults=defaults)
    except ConfigError as error:
        exit_bad_config(prog, error)


def exit_bad_config(prog: str, error: Exception) -> NoReturn:
    """End the process with the status and the form that every service uses for a wrong configuration."""
    print(f"{prog}: configuration error\n  " + str(error).replace("\n", "\n  "), file=sys.stderr)
    raise SystemExit(EXIT_BAD_CONFIG)


def _leading_files(argv: Sequence[str]) -> Iterator[str]:
    for arg in argv:
        if arg.startswith("-"):
            return
        yield arg


def _check_file(file: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"{file}: no such file. Give the path of a farm's TOML file, such as examples/demo.toml.")
    try:
        tables = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}. Correct the file.") from None
    for table in tables:
        if table not in SECTIONS:
            raise ConfigError(f"{file}: unknown table [{table}].{nearest(table, SECTIONS)}")


def nearest(name: str, known: Sequence[str]) -> str:
    """A remedy for an unknown name: the nearest known one, and the whole list."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(sorted(known))}."


def _explain(root: type[BaseModel], item: Any) -> str:
    path = [str(part) for part in item["loc"]]
    where = ".".join(path)
    if item["type"] == "extra_forbidden":
        model = _model_at(root, path[:-1])
        known = list(model.model_fields) if model else []
        return f"{where}: unknown key.{nearest(path[-1], known)}"
    if item["type"] == "missing":
        return f"{where}: missing. Set it in the file, or with --{where} VALUE."
    if item["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return f"{where}: unknown value {item['input']!r}.{nearest(str(item['input']), known)}"
    if item["type"] == "value_error":
        return f"{where}: {item['ctx']['error']}"
    return f"{where}: {item['msg']} (got {item['input']!r})."


def _explain_flag(root: type[Root], message: str) -> str:
    unknown = [word.split("=")[0] for word in message.split() if word.startswith("--")]
    if "unrecognized" not in message or not unknown:
        return message
    known = [f"--{path}" for path in dotted_paths(root)]
    close = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"{unknown[0]}: unknown flag.{hint} {root.flags_listed_by} lists them all."


def dotted_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every settable key under `model`, dotted."""
    for name, field in model.model_fields.items():
        inner = table_of(field.annotation)
        if inner is None:
            yield prefix + name
        else:
            yield from dotted_paths(inner, f"{prefix}{name}.")


def leaves(table: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value under `table` that is not itself a table, with its path."""
    for name in type(table).model_fields:
        value = getattr(table, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def variable(path: Sequence[str]) -> str:
    """The environment variable that sets the key at `path`."""
    return ENV_PREFIX + "__".join(path).upper()


def _model_at(model: type[BaseModel] | None, path: Sequence[str]) -> type[BaseModel] | None:
    for part in path:
        if model is None:
            return None
        if part in model.model_fields:
            model = table_of(model.model_fields[part].annotation, containers=True)
        # Otherwise the part is an index or key of a container, or the tag of a union: the model stays.
    return model


def table_of(annotation: Any, *, containers: bool = False) -> type[BaseModel] | None:
    """The table that a field of this type holds, if any; with `containers` also the one that a list or dict is of."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType) or (containers and origin in (list, tuple, dict)):
        return next((found for arg in get_args(annotation) if (found := table_of(arg, containers=containers))), None)
    return None
