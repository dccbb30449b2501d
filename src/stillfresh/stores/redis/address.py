"""From `redis://user:password@host:6379/0?prefix=shop` to a store; mistakes are named."""

from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

from stillfresh.clock import Clock
from stillfresh.durations import seconds
from stillfresh.errors import ConfigError, shown, without_password
from stillfresh.stores.redis.store import RedisStore

SCHEMES: Final = {"redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss"}
OWN: Final = {"prefix", "timeout", "max_connections"}
TLS: Final = {"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"} | {
    "ssl_cert_reqs",
    "ssl_check_hostname",
}
"""The client library's own, passed on."""
FLAGS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
CERTIFICATES: Final = {
    f"{python}{name}": name for name in ("none", "optional", "required") for python in ("", "cert_")
}


def _time(text: str) -> float | None:
    try:
        return seconds(text, positive=True)
    except ConfigError:
        return None


READERS: Final[dict[str, tuple[str, Callable[[str], object]]]] = {
    "max_connections": (
        "a whole number of 1 or more",
        lambda text: int(text) if text.isdecimal() and int(text) > 0 else None,
    ),
    "timeout": ("a time of more than zero, such as 500ms, 1s or 2m", _time),
    "ssl_check_hostname": ("true or false", lambda text: FLAGS.get(text.lower())),
    "ssl_cert_reqs": (
        "none, optional or required",
        lambda text: CERTIFICATES.get(text.lower()),
    ),
}
"""What a value must be, and how it is read; None: it is not."""


def store_at(url: str, clock: Clock | None) -> RedisStore:
    """Nothing is connected yet."""
    parts = urlsplit(url)
    given = parse_qsl(parts.query, keep_blank_values=True)
    options: dict[str, Any] = {
        name: READERS[name][1](text) if name in READERS else text for name, text in given
    }
    if (wrong := _mistake(parts, len(given), options)) is not None:
        raise ConfigError(
            f"store {_masked(url)}: {wrong}; write redis://host:6379/0, rediss:// for TLS, and "
            f"behind ? any of {', '.join(sorted(OWN))} (rediss:// also {', '.join(sorted(TLS))})"
        )
    bare = parts._replace(scheme=SCHEMES[parts.scheme], query="")
    tls = {name: options.pop(name) for name in TLS & options.keys()}
    return RedisStore(urlunsplit(bare), clock=clock, options=tls, **options)


def _mistake(parts: SplitResult, count: int, options: Mapping[str, object]) -> str | None:
    known = OWN | TLS if SCHEMES[parts.scheme] == "rediss" else OWN
    names = options.keys() - known
    unknown = sorted(it if it.isidentifier() else "…" for it in names)  # a password may have a ?
    database = parts.path.strip("/")
    checks = {
        "names no host": not parts.hostname,
        "has a port that is none": not _is_port(parts),
        "has more than a database's number behind the host": bool(parts.fragment)
        or not (database.isdecimal() or not database),
        f"knows no {', '.join(unknown)}": bool(unknown),
        "says the same thing twice": len(options) < count,
    } | {
        f"{name} is {what}": options.get(name, what) is None for name, (what, _) in READERS.items()
    }
    return next((mistake for mistake, is_made in checks.items() if is_made), None)


def _is_port(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _masked(url: str) -> str:
    """Without the password, wherever somebody wrote it: errors end up in logs."""
    address, mark, _ = without_password(url).partition("?")
    return shown(f"{address}{mark and '?…'}")
