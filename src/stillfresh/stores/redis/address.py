"""From `redis://user:password@host:6379/0?prefix=shop` to a store; mistakes are named."""

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

from stillfresh.clock import Clock
from stillfresh.durations import seconds
from stillfresh.errors import ConfigError
from stillfresh.stores.redis.store import RedisStore

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
SAID: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
CERTIFICATES: Final = ("none", "optional", "required")


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
        tls["ssl_check_hostname"] = SAID[tls["ssl_check_hostname"].lower()]
    if "ssl_cert_reqs" in tls:
        tls["ssl_cert_reqs"] = _certificates(tls["ssl_cert_reqs"])
    bare = parts._replace(scheme=SCHEMES[parts.scheme], query="")
    return RedisStore(urlunsplit(bare), clock=clock, options=tls, **own)


def _mistake(parts: SplitResult) -> str | None:
    given = parse_qsl(parts.query, keep_blank_values=True)
    names = [name for name, _ in given]
    unknown = sorted({*names} - (OWN | TLS if SCHEMES[parts.scheme] == "rediss" else OWN))
    database = parts.path.strip("/")
    checks = {
        "names no host": not parts.hostname,
        "has a port that is none": not _is_port(parts),
        "has more than a database's number behind the host": bool(parts.fragment)
        or not (database.isdecimal() or not database),
        f"knows no {', '.join(unknown)}": bool(unknown),
        "says the same thing twice": len({*names}) < len(names),
    }
    wrong = next((mistake for mistake, is_made in checks.items() if is_made), None)
    return wrong or next((VALUES[name][0] for name, value in given if _is_wrong(name, value)), None)


def _is_wrong(name: str, value: str) -> bool:
    return name in VALUES and not VALUES[name][1](value)


def _is_count(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def _is_time(text: str) -> bool:
    try:
        seconds(text, positive=True)
    except ConfigError:
        return False
    return True


def _is_said(text: str) -> bool:
    return text.lower() in SAID


def _is_certificates(text: str) -> bool:
    return _certificates(text) in CERTIFICATES


def _certificates(text: str) -> str:
    """Also as Python's ssl module names them."""
    return text.lower().removeprefix("cert_")


VALUES: Final[dict[str, tuple[str, Callable[[str], bool]]]] = {
    "max_connections": ("max_connections is a whole number of 1 or more", _is_count),
    "timeout": ("timeout is a time of more than zero, such as 500ms, 1s or 2m", _is_time),
    "ssl_check_hostname": ("ssl_check_hostname is true or false", _is_said),
    "ssl_cert_reqs": ("ssl_cert_reqs is none, optional or required", _is_certificates),
}
"""What the values must be, and whether one is."""


def _is_port(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _masked(parts: SplitResult) -> str:
    """Without the password, wherever somebody wrote it: errors end up in logs."""
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    netloc = f"{name}{colon}{'***' if colon else ''}{at}{host}"
    return urlunsplit(parts._replace(netloc=netloc, query="…" if parts.query else ""))
