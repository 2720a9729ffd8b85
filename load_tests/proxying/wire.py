"""HTTP/1.1 as far as both ends of the load need it: where a message ends. Nothing cheaper stands between the clocks."""

from collections.abc import Iterator, Mapping

_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"
_CHUNKED = b"\r\ntransfer-encoding: chunked"
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class Messages:
    """The messages of one connection."""

    def __init__(self) -> None:
        self._data = b""

    def received(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Head and body of each message that is complete; the body of a chunked one with its chunk sizes."""
        self._data += data
        while (end := self._data.find(_END)) >= 0:
            head = self._data[:end]
            size = self._body_size(head.lower(), end + len(_END))
            if size is None or len(self._data) < size:
                return
            message, self._data = self._data[:size], self._data[size:]
            yield head, message[end + len(_END) :]

    def _body_size(self, head: bytes, begin: int) -> int | None:
        """Where the body ends; None is not yet known."""
        if _CHUNKED in head:
            last = self._data.find(_LAST_CHUNK, begin)
            return None if last < 0 else last + len(_LAST_CHUNK)
        at = head.find(_LENGTH)
        return begin if at < 0 else begin + int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0])


def answer(body: bytes) -> bytes:
    """A whole answer of JSON."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def request(path: str, port: int, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A whole POST of JSON."""
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
