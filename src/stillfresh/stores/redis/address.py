"""From `redis://user:password@host:6379/0?prefix=shop` to a store; mistakes are named."""

from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

from stillfresh.clock import Clock
from stillfresh.errors import ConfigError
from stillfresh.stores.redis.store import RedisStore

__all__ = ["store_at"]

SCHEMES: Final = {"redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss"}
OWN: Final = {"prefix", "timeout", "max_connections"}
TLS: Final = {
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
}
"""The client library's own, passed on."""


def store_at(url: str, clock: Clock | None) -> RedisStore:
    """Nothing is connected yet."""
    parts = urlsplit(url)
    wrong = _mistake(parts)
    if wrong is not None:
        raise ConfigError(
            f"store {_masked(parts)!r}: {wrong}; write redis://host:6379/0, rediss:// for TLS, and "
            f"behind ? any of {', '.join(sorted(OWN))} (rediss:// also {', '.join(sorted(TLS))})"
        )
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    own: dict[str, Any] = {name: value for name, value in given.items() if name in OWN}
    if "max_connections" in own:
        own["max_connections"] = int(own["max_connections"])
    tls: dict[str, Any] = {name: value for name, value in given.items() if name in TLS}
    if "ssl_check_hostname" in tls:
        tls["ssl_check_hostname"] = tls["ssl_check_hostname"] == "true"
    bare = parts._replace(scheme=SCHEMES[parts.scheme], query="")
    return RedisStore(urlunsplit(bare), clock=clock, options=tls, **own)


def _mistake(parts: SplitResult) -> str | None:
    given = parse_qsl(parts.query, keep_blank_values=True)
    names = [name for name, _ in given]
    unknown = sorted({*names} - (OWN | TLS if SCHEMES[parts.scheme] == "rediss" else OWN))
    database = parts.path.strip("/")
    counts = [value for name, value in given if name == "max_connections"]
    checks = {
        "names no host": not parts.hostname,
        "has a port that is none": not _is_port(parts),
        "has more than a database's number behind the host": bool(parts.fragment)
        or not (database.isdecimal() or not database),
        f"knows no {', '.join(unknown)}": bool(unknown),
        "says the same thing twice": len({*names}) < len(names),
        "max_connections is a whole number of 1 or more": not all(map(_is_count, counts)),
    }
    return next((mistake for mistake, is_made in checks.items() if is_made), None)


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _is_port(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _masked(parts: SplitResult) -> str:
    """Without the password: errors end up in logs."""
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    return urlunsplit(parts._replace(netloc=f"{name}{colon}{'***' if colon else ''}{at}{host}"))
