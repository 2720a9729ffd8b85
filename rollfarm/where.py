"""Where the services of a running farm answer, by the files and flags that it was started with.

`rollfarm up` puts every service on this machine, at a fixed offset from up.base_port. An address that the configuration
gives, other than the default, is that of a service deployed by itself, and counts more.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollfarm.up.config import FarmRoot
    from rollfarm.up.farm import Addresses

MOST_OF_A_KIND = 10
EVERYWHERE = ("0.0.0.0", "::")
HELP = "the farm's TOML files; any flag of `rollfarm up`, such as --up.base_port 7800, goes over them"


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, positional: bool = True
) -> tuple[argparse.Namespace, list[str]]:
    """A command's own arguments, and those that say which farm, in the form that `rollfarm.config.load` reads.

    The files are named by --config and, if `positional`, without it too.
    """
    if positional:
        parser.add_argument("files", nargs="*", metavar="CONFIG.toml", help=HELP)
    shown = argparse.SUPPRESS if positional else HELP
    parser.add_argument("--config", action="append", default=[], metavar="CONFIG.toml", help=shown)
    own, flags = _split(argv)
    chosen = parser.parse_args(own)
    return chosen, [*(chosen.files if positional else []), *chosen.config, *flags]


def find_or_exit(farm: Sequence[str], *, prog: str) -> "Addresses":
    """The addresses of the farm that the arguments mean; a wrong configuration ends the process with status 2."""
    from rollfarm.config import ConfigError, exit_bad_config
    from rollfarm.up.config import read_farm
    from rollfarm.up.folder import checkout, make_importable

    make_importable(checkout())
    try:
        return find(read_farm(farm, prog=prog))
    except ConfigError as error:
        exit_bad_config(prog, error)


def find(farm: "FarmRoot") -> "Addresses":
    """Where the farm's services are looked for. On this machine there may be up to ten engines and env_managers; of a
    deployed farm llm_proxy names the engines, and nothing the env_managers."""
    from rollfarm.up.farm import Addresses

    given: dict[str, Any] = {
        "sample_buffer": _given(farm, "trainer", "sample_buffer_address"),
        "llm_proxy": _given(farm, "trainer", "llm_proxy_address"),
        "reward_gateway": _given(farm, "env_manager", "reward_gateway_address"),
        "engines": tuple(_given(farm, "llm_proxy", "engines")),
        "trainer": _given_trainer(farm),
    }
    most = 0 if given["sample_buffer"] else MOST_OF_A_KIND
    here = Addresses.of(farm.up.base_port, engines=most, env_managers=most)
    return replace(here, **{name: address for name, address in given.items() if address})


def _given(farm: "FarmRoot", table: str, key: str) -> Any:
    """What the configuration says instead of the default; empty if nothing."""
    settings = getattr(farm, table)
    value = getattr(settings, key)
    return "" if value == type(settings).model_fields[key].default else value


def _given_trainer(farm: "FarmRoot") -> str:
    """Nobody calls the trainer, so that its own table alone says where it is."""
    listen = _given(farm, "trainer", "listen")
    return listen.address if listen and listen.host not in EVERYWHERE else ""


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own arguments, and the dotted flags with their values."""
    own: list[str] = []
    flags: list[str] = []
    rest = iter(argv)
    for argument in rest:
        name, joined, _ = argument.partition("=")
        if name.startswith("--") and "." in name:
            flags += [argument] if joined else [argument, *islice(rest, 1)]
        else:
            own.append(argument)
    return own, flags
