"""Which processes make up a farm, and in what order: a pure function of the configuration.

Every service gets the run's config file and, by flags, only what one machine decides: its port and its neighbours'
addresses.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollfarm.config import ConfigError
from rollfarm.service import SUPERVISED
from rollfarm.up.config import FarmRoot, carried, setting
from rollfarm.valkey import valkey_binary

OFFSETS = {
    "llm_proxy": 1,
    "llm_proxy_http": 2,
    "sample_buffer": 3,
    "reward_gateway": 4,
    "trainer": 5,
    "rendezvous": 6,
    "engine": 10,
    "env_manager": 20,
}
"""A service's port is base_port + this (+ its number, where there are several)."""

METRICS_OFFSET = 50
"""A service's metrics page is this far above its port."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process of the farm."""

    name: str
    argv: tuple[str, ...]
    stage: int
    """Stages start in order, and the processes of one stage start together."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    address: str = ""
    """Where its health is asked for by gRPC. Empty: it is ready once it runs."""
    socket: Path | None = None
    """Where a Valkey answers once it is ready."""
    once: bool = False
    """It does its work and ends; the next stage waits for that."""
    gang: str = ""
    """Processes with one gang's name live and die together."""
    ports: tuple[int, ...] = ()
    """TCP ports that it will listen on."""


@dataclass(frozen=True)
class Plan:
    """The farm, in the order of its start. It is drained in the opposite order."""

    specs: tuple[ProcessSpec, ...]
    addresses: "Addresses"

    def ports(self) -> Iterator[tuple[int, str]]:
        """Every TCP port that the farm takes, and who takes it."""
        for spec in self.specs:
            for port in spec.ports:
                yield port, spec.name


@dataclass(frozen=True)
class Addresses:
    """Where the services of one farm answer."""

    sample_buffer: str
    llm_proxy: str
    reward_gateway: str
    trainer: str
    engines: tuple[str, ...]
    env_managers: tuple[str, ...]

    @classmethod
    def of(cls, base_port: int, *, engines: int, env_managers: int) -> "Addresses":
        """The addresses that `rollfarm up` gives on this machine."""

        def at(service: str, number: int = 0) -> str:
            return f"127.0.0.1:{base_port + OFFSETS[service] + number}"

        return cls(
            sample_buffer=at("sample_buffer"),
            llm_proxy=at("llm_proxy"),
            reward_gateway=at("reward_gateway"),
            trainer=at("trainer"),
            engines=tuple(at("engine", number) for number in range(engines)),
            env_managers=tuple(at("env_manager", number) for number in range(env_managers)),
        )

    def named(self) -> dict[str, str]:
        """Address by process name."""
        return {
            "reward_gateway": self.reward_gateway,
            "sample_buffer": self.sample_buffer,
            **{f"engine-{number}": address for number, address in enumerate(self.engines)},
            "llm_proxy": self.llm_proxy,
            **{f"env_manager-{number}": address for number, address in enumerate(self.env_managers)},
            "trainer": self.trainer,
        }


def plan(
    farm: FarmRoot,
    *,
    sockets: Path,
    environ: Mapping[str, str],
    python: str = sys.executable,
    trainer: str = "trainer",
) -> Plan:
    """The processes of `farm`, whose config file is RUN/config.toml. `trainer` is the module in the trainer's place.

    `sockets` is a short folder for unix sockets, whose paths may not exceed 107 bytes. Raises ConfigError.
    """
    up = farm.up
    addresses = Addresses.of(up.base_port, engines=up.engines, env_managers=up.env_managers)
    builder = _Builder(farm, addresses, python, _environment(farm, environ))
    embedded = setting(farm, "sample_buffer", "journal") == "embedded"
    if up.engines == 0 and not setting(farm, "llm_proxy", "engines"):
        raise ConfigError("up.engines: 0, and llm_proxy.engines names none. Start at least one engine, or name one.")

    specs: list[ProcessSpec] = []
    if embedded:
        specs.append(builder.valkey(sockets))
    if farm.model.create is not None and (not farm.model.is_there or farm.model.is_outdated):
        specs.append(builder.create_model())
    specs.append(builder.service("reward_gateway"))
    specs.append(builder.sample_buffer(sockets if embedded else None))
    specs += [
        builder.service("engine", number=number, count=up.engines, module="llm_proxy.engine")
        for number in range(up.engines)
    ]
    engines = {"engines": ",".join(addresses.engines)} if up.engines else {}
    specs.append(builder.llm_proxy(engines))
    neighbours = {"sample_buffer_address": addresses.sample_buffer, "llm_proxy_address": addresses.llm_proxy}
    gateway = {"reward_gateway_address": addresses.reward_gateway}
    specs += [
        builder.service("env_manager", number=number, count=up.env_managers, flags={**neighbours, **gateway})
        for number in range(up.env_managers)
    ]
    # A service that ends by itself counts as crashed; `rollfarm up` sees that the run is over and drains them all.
    stays = {**neighbours, "exit_when_finished": "false"}
    if trainer != "trainer":
        specs.append(builder.service("trainer", module=trainer, flags=stays))
    else:
        specs += builder.trainer(up.trainer_ranks, stays)
    return Plan(tuple(specs), addresses)


class _Builder:
    """What the specs of one farm share."""

    def __init__(self, farm: FarmRoot, addresses: Addresses, python: str, env: Mapping[str, str]) -> None:
        self._farm = farm
        self._addresses = addresses
        self._python = python
        self._env = env
        self._config = str(farm.run.path / "config.toml")

    def valkey(self, sockets: Path) -> ProcessSpec:
        valkey_binary()
        socket = sockets / "valkey.sock"
        argv = (self._python, "-m", "rollfarm.up.leash", str(self._farm.run.path / "valkey"), str(socket))
        return ProcessSpec("valkey", argv, stage=0, env=self._env, socket=socket)

    def sample_buffer(self, sockets: Path | None) -> ProcessSpec:
        """`sockets` is where our Valkey is. When both die at once it may come back later: wait for it."""
        if sockets is None:
            return self.service("sample_buffer")
        journal = f"unix://{sockets / 'valkey.sock'}"
        wait = str(self._farm.up.start_seconds)
        return self.service("sample_buffer", flags={"journal": journal, "connect_seconds": wait})

    def llm_proxy(self, flags: Mapping[str, str]) -> ProcessSpec:
        """With a port for agents, where its HTTP is enabled."""
        if not setting(self._farm, "llm_proxy", "http").enabled:
            return self.service("llm_proxy", flags=flags)
        port = self._farm.up.base_port + OFFSETS["llm_proxy_http"]
        spec = self.service("llm_proxy", flags={**flags, "http.listen.port": str(port)})
        return replace(spec, ports=(*spec.ports, port))

    def create_model(self) -> ProcessSpec:
        argv = (self._python, "-m", "trainer.create_model", self._config)
        return ProcessSpec("create_model", argv, stage=0, env=self._env, once=True)

    def service(
        self,
        table: str,
        *,
        number: int = 0,
        count: int = 0,
        module: str = "",
        flags: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ProcessSpec:
        """A service whose table is `table`; `count` > 0 numbers its processes."""
        name = f"{table}-{number}" if count else table
        port = self._farm.up.base_port + OFFSETS[table] + number
        settings = {
            "listen.port": str(port),
            "telemetry.metrics_port": str(port + METRICS_OFFSET),
            **(flags or {}),
        }
        argv = [self._python, "-m", module or table, self._config]
        for key, value in settings.items():
            argv += [f"--{table}.{key}", value]
        return ProcessSpec(
            name,
            tuple(argv),
            stage=1,
            env={**self._env, **(env or {})},
            address=f"127.0.0.1:{port}",
            ports=(port, port + METRICS_OFFSET),
        )

    def trainer(self, ranks: int, flags: Mapping[str, str]) -> list[ProcessSpec]:
        """Rank 0 serves; with several ranks they find each other as torchrun's do. On the engines' devices it starts
        after them: an engine that starts takes memory, and cannot sleep yet."""
        stage = 2 if setting(self._farm, "trainer", "colocated") else 1
        return [replace(spec, stage=stage) for spec in self._ranks(ranks, flags)]

    def _ranks(self, ranks: int, flags: Mapping[str, str]) -> list[ProcessSpec]:
        if ranks == 1:
            return [self.service("trainer", flags=flags)]
        rendezvous = self._farm.up.base_port + OFFSETS["rendezvous"]
        leader = self.service("trainer", flags=flags, env=_rank(0, ranks, rendezvous))
        specs = [replace(leader, name="trainer-0", gang="trainer", ports=(*leader.ports, rendezvous))]
        for rank in range(1, ranks):
            silent = {**flags, "listen.port": "0", "telemetry.metrics_port": "0"}
            follower = self.service("trainer", flags=silent, env=_rank(rank, ranks, rendezvous))
            specs.append(replace(follower, name=f"trainer-{rank}", gang="trainer", address="", ports=()))
        return specs


def _rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _environment(farm: FarmRoot, environ: Mapping[str, str]) -> dict[str, str]:
    """What every process of the farm finds in its environment beside our own."""
    added = {SUPERVISED: "1", "PYTHONUNBUFFERED": "1", **carried(farm, environ)}
    if "OMP_NUM_THREADS" not in environ:
        added["OMP_NUM_THREADS"] = "1"
    return added
