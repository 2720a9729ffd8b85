"""Records of a data set: a JSONL file, a parquet file, or a name on the hub by the `datasets` library.

A record is a dict of plain values by column. What is wrong with a data set is a ConfigError that says where and what to
do. A local file needs no network, and JSONL no library.
"""

import functools
import importlib.util
import json
import random
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollfarm.config import ConfigError, nearest

Record = Mapping[str, Any]

LINES, PARQUET = (".jsonl", ".ndjson"), (".parquet",)
"""Endings of local files."""

_reading = threading.Lock()


@dataclass(frozen=True, slots=True)
class Source:
    """Where records are."""

    name: str
    """A file that ends in .jsonl or .parquet, where ~ is the home folder, or a data set's name on the hub."""

    subset: str = ""
    """Of a data set on the hub, its configuration."""

    split: str = "train"
    """Of a data set on the hub. A file is one split."""

    @property
    def is_file(self) -> bool:
        """Whether it is a local file, by its name."""
        return self.name.endswith((*LINES, *PARQUET))


def read_records(source: Source) -> Sequence[Record]:
    """All of its records, in order. Read once in a process, and kept. Raises ConfigError."""
    with _reading:
        return _kept(source)


def load_records(source: Source) -> Sequence[Record]:
    """All of its records, in order. Read anew each time. Raises ConfigError."""
    if not source.is_file:
        records = _from_hub(source)
    else:
        path = _existing(source)
        records = _lines(path) if source.name.endswith(LINES) else _parquet(path, source)
    if not records:
        raise ConfigError(f"{source.name}: it has no records. Give a data set that has some.")
    return records


_kept = functools.lru_cache(32)(load_records)


def check_available(source: Source) -> None:
    """Raise ConfigError where a local file or a library is missing. Reads and downloads nothing."""
    if not source.is_file:
        _require("datasets", source)
        return
    _existing(source)
    if source.name.endswith(PARQUET):
        _require("pyarrow", source)


def column(record: Record, name: str, source: Source, number: int) -> Any:
    """The value of a column of record `number`, from 0. Raises ConfigError where there is none."""
    value = record.get(name)
    if value is None:
        what = "is null" if name in record else f"is missing.{nearest(name, list(record))}"
        raise ConfigError(f"{_where(source, number)}: the column {name!r} {what}")
    return value


def order(count: int, seed: int, epoch: int) -> Sequence[int]:
    """The records' numbers in the order of one epoch: a pure function, another one in each."""
    return _shuffled(count, seed, epoch)


def parts(count: int, share: float, seed: int) -> tuple[Sequence[int], Sequence[int]]:
    """The records' numbers for training, and a random `share` of them for validation: at least one, unless it is 0,
    and never all. Both in order; a pure function."""
    held = min(count - 1, max(1, round(share * count))) if share else 0
    chosen = set(_shuffled(count, seed, -1)[:held])
    return tuple(n for n in range(count) if n not in chosen), tuple(sorted(chosen))


@functools.lru_cache(8)
def _shuffled(count: int, seed: int, epoch: int) -> Sequence[int]:
    numbers = array("q", range(count))
    random.Random(f"{seed}/{epoch}").shuffle(numbers)
    return numbers


def _existing(source: Source) -> Path:
    path = Path(source.name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file. Correct the path, which is taken from the folder that the program was started in."
        )
    return path


def _lines(path: Path) -> list[Record]:
    records: list[Record] = []
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    records.append(_record(path, number, line))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 after line {len(records)}: {error.reason}. Convert it.") from None
    return records


def _record(path: Path, number: int, line: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: no JSON: {error}. Each line is one JSON object.") from None
    if not isinstance(record, dict):
        raise ConfigError(
            f"{path}, line {number}: {type(record).__name__}, not an object. Each line is one JSON object."
        )
    return record


def _parquet(path: Path, source: Source) -> list[Record]:
    _require("pyarrow", source)
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path}: no parquet file: {str(error).splitlines()[0]}. Correct the path.") from None


def _from_hub(source: Source) -> list[Record]:
    _require("datasets", source)
    from datasets import load_dataset

    try:
        return load_dataset(source.name, source.subset or None, split=source.split).to_list()
    # The library raises whatever its parts do: for the name, for the network, for a file in it.
    except Exception as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{source.name}: not to be had from the hub (subset {source.subset or 'default'!r}, split "
            f"{source.split!r}): {problem}. Correct the name, or give a file that ends in .jsonl or .parquet."
        ) from None


def _require(package: str, source: Source) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{source.name}: needs the package {package}. Install it with `pip install 'rollfarm[dataset]'`, or give "
            "a file that ends in .jsonl, which needs none."
        )


def _where(source: Source, number: int) -> str:
    return f"{source.name}, record {number + 1}"
