"""Versions in files on a path that trainer and engine hosts share: whole ones, what changed since another, or adapters.

A version's folder appears whole or not at all: it is written beside and renamed. An engine is sent what changed when it
serves a version that this process brought to it and whose tensors it still knows by their digests; everything else, and
whoever refuses, gets the whole version, which is written when somebody needs it. Folders of versions before the last
two are removed: engines read a version only while BeginWeightUpdate is under way, and one that was given up may still
be reading the last.
"""

import asyncio
import hashlib
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from safetensors.torch import save

from rollfarm.config import ConfigError
from rollfarm.errors import WeightsFailed
from rollfarm.stored import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rollfarm.threads import in_thread
from rollfarm.v1 import engine_pb2, llm_proxy_pb2
from trainer.weights import files
from trainer.weights.shared import staged_by
from trainer.weights.snapshot import Adapter, Snapshot
from trainer.weights.transport import Begin

log = structlog.get_logger()

KEPT_VERSIONS = 2
KNOWN_VERSIONS = 8
"""Versions whose digests are remembered: an engine that is further behind gets a whole one."""

MOST_OF_WHOLE = 0.9
"""A delta of a larger share is not worth its base."""

_FOLDER = re.compile(r"v\d+-(whole|adapter|since-\d+)-[0-9a-f]{8}")
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True, slots=True)
class _Held:
    """What an engine was brought."""

    instance_id: str
    policy_version: int


class Store:
    """A Transport by files."""

    def __init__(self, folder: Path, *, deltas: bool = True) -> None:
        """`folder` is this run's alone, under the same path for every engine host.

        Raises ConfigError where it cannot be written to.
        """
        self._folder = folder.absolute()
        self._deltas = deltas
        self._held: dict[str, _Held] = {}
        self._digests: dict[int, dict[str, bytes]] = {}
        self._written: dict[tuple[int, int | None], engine_pb2.StoredWeights] = {}
        """By version and base; a whole version has none."""

        self._changing = asyncio.Lock()
        """Held while folders come and go: an engine may be brought up to date beside a publication."""

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(path)
        except OSError as error:
            raise ConfigError(
                f"trainer.store_folder: {self._folder} cannot be written to: {error.strerror}. Give a folder that the "
                "trainer may write to and every engine host may read."
            ) from error

    async def transfer(self, snapshot: Snapshot, engines: Sequence[llm_proxy_pb2.Engine], begin: Begin) -> list[str]:
        """Write what the engines need, and let them read it. Raises WeightsFailed where it cannot be written."""
        version = snapshot.policy_version
        await in_thread(lambda: list(snapshot.parts()))
        if self._deltas:
            self._digests[version] = await in_thread(lambda: snapshot.digests)
        bases = {engine.engine_id: self._base_of(engine, snapshot) for engine in engines}
        written = {base: await self._write(snapshot, base) for base in set(bases.values())}
        request = llm_proxy_pb2.BeginWeightUpdateRequest(
            policy_version=version,
            transfers=[
                llm_proxy_pb2.EngineTransfer(
                    engine_id=engine.engine_id, instance_id=engine.instance_id, stored=written[bases[engine.engine_id]]
                )
                for engine in engines
            ],
        )
        for engine in engines:  # whoever is not known to have it needs everything
            self._held.pop(engine.engine_id, None)
        staged = staged_by(await begin(request))
        instances = {engine.engine_id: engine.instance_id for engine in engines}
        self._held |= {engine_id: _Held(instances[engine_id], version) for engine_id in staged}
        async with self._changing:
            await in_thread(lambda: self._forget_before(version))
        return staged

    def forget_all_but(self, instance_ids: Collection[str]) -> None:
        """What is known of an engine is little, and spares it a whole version when llm_proxy lists it again."""

    def _base_of(self, engine: llm_proxy_pb2.Engine, snapshot: Snapshot) -> int | None:
        """The version that the engine needs only the changes to; None where it needs everything."""
        base = engine.policy_version
        knows_it = self._held.get(engine.engine_id) == _Held(engine.instance_id, base)
        if not self._deltas or not knows_it or base not in self._digests or snapshot.adapter is not None:
            return None
        changed = sum(data.numel() for _, data in self._changed(snapshot, base))
        return base if changed <= MOST_OF_WHOLE * snapshot.size_bytes else None

    def _changed(self, snapshot: Snapshot, base: int | None) -> Iterator[files.Part]:
        """Tensors that differ from those of `base`; all of them where there is none."""
        if base is None:
            return snapshot.tensors()
        before = self._digests[base]
        return (part for part in snapshot.tensors() if before.get(part[0].name) != snapshot.digests[part[0].name])

    async def _write(self, snapshot: Snapshot, base: int | None) -> engine_pb2.StoredWeights:
        key = (snapshot.policy_version, base)
        async with self._changing:
            if key not in self._written:
                try:
                    self._written[key] = await in_thread(lambda: self._write_folder(snapshot, base))
                except OSError as error:
                    raise WeightsFailed(
                        f"Version {snapshot.policy_version} cannot be written to {self._folder}: {error.strerror}.",
                        policy_version=snapshot.policy_version,
                        folder=self._folder,
                    ) from error
            return self._written[key]

    def _write_folder(self, snapshot: Snapshot, base: int | None) -> engine_pb2.StoredWeights:
        kind = "adapter" if snapshot.adapter else "whole" if base is None else f"since-{base}"
        name = f"v{snapshot.policy_version}-{kind}-{uuid.uuid4().hex[:8]}"
        work = self._folder / f"{_UNFINISHED}{name}"
        work.mkdir()
        try:
            if snapshot.adapter is not None:
                weights = _write_adapter(work, snapshot.adapter)
            else:
                weights = engine_pb2.StoredWeights(
                    files=files.write(work, self._changed(snapshot, base)),
                    kind=engine_pb2.StoredWeights.KIND_FULL if base is None else engine_pb2.StoredWeights.KIND_DELTA,
                    base_policy_version=base,
                )
            work.rename(self._folder / name)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        weights.uri = (self._folder / name).as_uri()
        return weights

    def _forget_before(self, version: int) -> None:
        """Remove the folders of versions that nobody is told to read any more, also those of a trainer before."""
        self._digests = {known: each for known, each in self._digests.items() if known > version - KNOWN_VERSIONS}
        self._written = {key: each for key, each in self._written.items() if key[0] > version - KEPT_VERSIONS}
        kept = {each.uri.rpartition("/")[2] for each in self._written.values()}
        try:
            there = list(self._folder.iterdir())
        except OSError as error:
            log.warning("versions before not removed", folder=str(self._folder), cause=str(error))
            return
        for path in there:
            if _FOLDER.fullmatch(path.name) and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)


def _write_adapter(folder: Path, adapter: Adapter) -> engine_pb2.StoredWeights:
    contents = {ADAPTER_CONFIG: adapter.config_json, ADAPTER_WEIGHTS: save(dict(adapter.tensors))}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return engine_pb2.StoredWeights(
        files=[
            engine_pb2.StoredFile(path=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            for name, content in contents.items()
        ],
        kind=engine_pb2.StoredWeights.KIND_LORA,
    )
