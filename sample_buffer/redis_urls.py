"""What the URL of a journal says: which Redis, how it is reached, and which of its databases.

    redis://[user:password@]HOST[:6379][/DB]                            one server
    unix://[user:password@]/PATH[?db=DB]                                one server on this machine
    redis+sentinel://[user:password@]HOST[:26379],.../PRIMARY[/DB]      the server that these Sentinels call PRIMARY
    redis+cluster://[user:password@]HOST[:6379],...                     the cluster of which these are nodes

`rediss` in place of `redis` is the same by TLS. Options follow as ?name=value&name=value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from rollfarm.config import nearest

Kind = Literal["server", "socket", "sentinel", "cluster"]
Settings = Mapping[str, str | int | bool]

SCHEMES: dict[str, Kind] = {
    "redis://": "server",
    "rediss://": "server",
    "unix://": "socket",
    "redis+sentinel://": "sentinel",
    "rediss+sentinel://": "sentinel",
    "redis+cluster://": "cluster",
    "rediss+cluster://": "cluster",
}
"""What a URL begins with."""

TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")

_SENTINEL_PORT = 26379
_PORT = 6379
_ESCAPES = "In a user, a password or a path, write / as %2F, @ as %40, : as %3A, ? as %3F and # as %23."


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A URL that was understood."""

    kind: Kind

    hosts: tuple[tuple[str, int], ...] = ()
    """One server, the Sentinels, or some nodes of the cluster."""

    path: str = ""
    """Of the socket."""

    primary: str = ""
    """What the Sentinels call the server."""

    settings: Settings = field(default_factory=dict[str, str | int | bool])
    """How to connect to the server, in redis-py's words."""

    sentinel_settings: Settings = field(default_factory=dict[str, str | int | bool])
    """How to connect to the Sentinels."""


def parse(url: str) -> RedisUrl:
    """Understand a URL that begins with one of SCHEMES.

    Raises ValueError, whose message has no part of the URL: where it is written wrongly, any part may be the password.
    """
    kind = SCHEMES[url.partition("://")[0] + "://"]
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"not a URL. {_ESCAPES}") from None
    login, _, place = parts.netloc.rpartition("@")
    if parts.fragment or (kind != "socket" and "@" in parts.path):
        raise ValueError(f"not a URL. {_ESCAPES}")
    tls = parts.scheme.startswith("rediss")
    options = _options(parts, kind, tls)
    settings: dict[str, str | int | bool] = {**_login(login), **options}
    sentinel = {name.removeprefix("sentinel_"): settings.pop(name) for name in SENTINEL_OPTIONS if name in settings}
    if tls:
        settings["ssl"] = True
        sentinel |= {name: value for name, value in settings.items() if name.startswith("ssl")}
    if kind == "socket":
        if place or not parts.path.strip("/"):
            raise ValueError("not the path of a socket: three slashes follow unix, as in unix:///run/redis.sock.")
        return RedisUrl(kind, path=unquote(parts.path), settings=settings)
    hosts = tuple(_host(one, _SENTINEL_PORT if kind == "sentinel" else _PORT) for one in place.split(","))
    if kind == "server" and len(hosts) > 1:
        raise ValueError("several hosts: write redis+sentinel://HOST,HOST/PRIMARY or redis+cluster://HOST,HOST.")
    primary, db = _names(parts.path.strip("/"), kind)
    if db:
        settings.setdefault("db", _number(db))
    return RedisUrl(kind, hosts, primary=primary, settings=settings, sentinel_settings=sentinel)


def _options(parts: SplitResult, kind: Kind, tls: bool) -> dict[str, str | int | bool]:
    known = ["username", "password"]
    known += ["db"] if kind != "cluster" else []
    known += TLS_OPTIONS if tls else []
    known += SENTINEL_OPTIONS if kind == "sentinel" else []
    options: dict[str, str | int | bool] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            hint = " By TLS, it begins with rediss." if name in TLS_OPTIONS else nearest(name, known)
            raise ValueError(f"an option that such a URL does not have.{hint}")
        options[name] = _number(value) if name == "db" else value
    if (reqs := options.get("ssl_cert_reqs", "required")) not in ("required", "optional", "none"):
        raise ValueError(f"ssl_cert_reqs is not {reqs!r}. Known: none, optional, required.")
    if (checks := options.get("ssl_check_hostname")) is not None:
        if checks not in ("true", "false"):
            raise ValueError(f"ssl_check_hostname is not {checks!r}. Known: false, true.")
        options["ssl_check_hostname"] = checks == "true"
    return options


def _login(login: str) -> dict[str, str]:
    user, _, password = login.partition(":")
    named = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in named.items() if value}


def _host(text: str, port: int) -> tuple[str, int]:
    try:
        found = urlsplit(f"//{text}")
        host, port = found.hostname or "", found.port or port
    except ValueError:
        raise ValueError(f"not a URL: its port is no number. {_ESCAPES}") from None
    if not host:
        raise ValueError(f"not a URL: it names no host, such as localhost. {_ESCAPES}")
    return host, port


def _names(path: str, kind: Kind) -> tuple[str, str]:
    """The primary and the database."""
    if kind == "sentinel":
        primary, _, db = path.partition("/")
        if not primary:
            raise ValueError("no name of a primary: after the Sentinels comes what they call it, as in /mymaster.")
        return unquote(primary), db
    if kind == "cluster" and path:
        raise ValueError("a path: a cluster has one database, without a name.")
    return "", path


def _number(db: str) -> int:
    if not db.isdecimal():
        raise ValueError(f"not a URL: its database is no number. {_ESCAPES}")
    return int(db)
