"""Weights in files: described by whoever wrote them, verified by whoever reads them.

A version is a folder whose files never change once they are described: each version has a folder of its own. No torch
here: what the files hold is for the engine host to judge.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rollfarm.errors import InvalidArgument, WeightsFailed
from rollfarm.v1 import engine_pb2

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_THREADS = 4
"""Files that are verified at a time."""


def describe(folder: Path) -> engine_pb2.StoredWeights:
    """The version in `folder`: a LoRA adapter as peft writes it, or every safetensors file. Raises InvalidArgument."""
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if is_adapter:
        names = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise InvalidArgument(f"{folder} holds no safetensors file.", folder=folder)
    return engine_pb2.StoredWeights(
        uri=folder.absolute().as_uri(),
        files=[
            engine_pb2.StoredFile(path=name, size_bytes=(folder / name).stat().st_size, sha256=_sha256(folder / name))
            for name in names
        ],
        kind=engine_pb2.StoredWeights.KIND_LORA if is_adapter else engine_pb2.StoredWeights.KIND_FULL,
    )


def verified(stored: engine_pb2.StoredWeights) -> dict[str, Path]:
    """Where each of the version's files lies, once all are found to be as described.

    Reads every byte. Raises InvalidArgument, and WeightsFailed for a file that is missing or altered.
    """
    folder = _folder(stored.uri)
    files = {file.path: _within(folder, file.path) for file in stored.files}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as threads:
        for checked in [threads.submit(_check, file, files[file.path]) for file in stored.files]:
            checked.result()
    return files


def _folder(uri: str) -> Path:
    if uri and "://" not in uri:
        return Path(uri)
    parts = urlsplit(uri)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return Path(url2pathname(parts.path))
    raise InvalidArgument(
        f"Weights cannot be read from {uri!r}: engines know folders alone, as file:///path or a plain path. Mount the "
        "store where the engine host runs, and name the folder there.",
        uri=uri,
    )


def _within(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not name or not path.is_relative_to(folder.resolve()):
        raise InvalidArgument(f"The stored file {name!r} is not within {folder}.", path=name)
    return path


def _check(file: engine_pb2.StoredFile, path: Path) -> None:
    try:
        size = path.stat().st_size
        if size != file.size_bytes:
            raise WeightsFailed(f"{path} has {size} bytes; it was written with {file.size_bytes}.", path=path)
        if _sha256(path) != file.sha256:
            raise WeightsFailed(f"{path} was altered: its sha256 is not the one that it was written with.", path=path)
    except OSError as error:
        raise WeightsFailed(f"{path} cannot be read: {error.strerror}.", path=path) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
