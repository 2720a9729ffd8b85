"""Who a key belongs to. Keys are kept as digests alone, and none is ever written to a log."""

import hmac
import secrets
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import Generic, TypeVar

BYTES = 32
T = TypeVar("T")


class Keys(Generic[T]):
    """Keys and their owners."""

    def __init__(self) -> None:
        self._owners: dict[bytes, tuple[bytes, T]] = {}

    def add(self, key: str, owner: T) -> None:
        digest = _digest(key)
        self._owners[digest] = (digest, owner)

    def remove(self, key: str) -> None:
        self._owners.pop(_digest(key), None)

    def find(self, key: str) -> T | None:
        """Who the key belongs to. Takes as long for a wrong key as for one that is nearly right."""
        digest = _digest(key)
        known, owner = self._owners.get(digest, (b"", None))
        return owner if hmac.compare_digest(known, digest) else None


class Mint:
    """Makes the keys of sessions: for equal nonces equal ones, so that none has to be kept to be told again."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(BYTES)

    def key(self, nonce: bytes) -> str:
        return "rf-" + urlsafe_b64encode(hmac.digest(self._secret, nonce, "sha256")).decode().rstrip("=")

    def nonce(self) -> bytes:
        return secrets.token_bytes(BYTES)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
