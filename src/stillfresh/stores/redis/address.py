"""From `redis://user:password@host:6379/0?prefix=shop` to a store; mistakes are named.

Several servers: `redis+cluster://host:6379,host:6379` for the nodes of a cluster, and
`redis+sentinel://host:26379,host:26379/service` for the Sentinels that name the primary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from stillfresh.clock import Clock
from stillfresh.durations import seconds
from stillfresh.errors import ConfigError, shown_place
from stillfresh.stores.redis.store import RedisStore

SCHEMES: Final = {"redis": "redis", "valkey": "redis", "rediss": "rediss", "valkeys": "rediss"}
PORTS: Final = {"cluster": 6379, "sentinel": 26379}
OWN: Final = {"prefix", "timeout", "max_connections", "wait_replicas"}
TLS: Final = {"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"} | {
    "ssl_cert_reqs",
    "ssl_check_hostname",
}
"""Options of the client library, passed on."""
FLAGS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
CERTIFICATES: Final = {
    f"{python}{name}": name for name in ("none", "optional", "required") for python in ("", "cert_")
}


def _time(text: str) -> float | None:
    try:
        return seconds(text, positive=True)
    except ConfigError:
        return None


def _whole(least: int) -> Callable[[str], int | None]:
    return lambda text: int(text) if text.isdecimal() and int(text) >= least else None


READERS: Final[dict[str, tuple[str, Callable[[str], object]]]] = {
    "max_connections": ("a whole number of 1 or more", _whole(1)),
    "wait_replicas": ("a whole number of 0 or more", _whole(0)),
    "timeout": ("a time of more than zero, such as 500ms, 1s or 2m", _time),
    "ssl_check_hostname": ("true or false", lambda text: FLAGS.get(text.lower())),
    "ssl_cert_reqs": (
        "none, optional or required",
        lambda text: CERTIFICATES.get(text.lower()),
    ),
}
"""What a value must be, and its reader, which returns None for an invalid one."""


def store_at(url: str, clock: Clock | None) -> RedisStore:
    """The store that an address names; nothing is connected yet."""
    parts = urlsplit(url)
    scheme, _, several = parts.scheme.partition("+")
    given = parse_qsl(parts.query, keep_blank_values=True)
    options: dict[str, Any] = {
        name: READERS[name][1](text) if name in READERS else text for name, text in given
    }
    user, at, hosts = parts.netloc.rpartition("@")
    listed = [parts._replace(netloc=f"{user}{at}{host}") for host in hosts.split(",")]
    if not several:
        listed = [parts]
    service, _, database = parts.path.strip("/").partition("/")
    if several != "sentinel":
        service = ""
        database = parts.path.strip("/")
    wrong = _mistake(parts, listed, (service, database), len(given), options)
    if wrong is not None:
        raise ConfigError(
            f"store {shown_place(url)}: {wrong}; write redis://host:6379/0, "
            f"redis+cluster://host:6379,host:6379 or redis+sentinel://host:26379,host:26379/service"
            f" (rediss:// for TLS), and behind ? any of {', '.join(sorted(OWN))} (rediss:// also "
            f"{', '.join(sorted(TLS))})"
        )
    bare = listed[0]._replace(scheme=SCHEMES[scheme], query="", path=f"/{database or 0}")
    tls = {name: options.pop(name) for name in TLS & options.keys()}
    nodes: list[tuple[str, int]] = []
    if several:
        nodes = [(node.hostname or "", node.port or PORTS[several]) for node in listed]
    return RedisStore(
        urlunsplit(bare),
        clock=clock,
        options=tls,
        nodes=nodes,
        service=unquote(service) or None,
        **options,
    )


def _mistake(
    parts: SplitResult,
    listed: Sequence[SplitResult],
    place: tuple[str, str],
    count: int,
    options: Mapping[str, object],
) -> str | None:
    scheme, _, several = parts.scheme.partition("+")
    service, database = place
    known = OWN | TLS if SCHEMES[scheme] == "rediss" else OWN
    names = options.keys() - known
    # A password may contain a ?, and must not be shown.
    unknown = sorted(name if name.isidentifier() else "…" for name in names)
    checks = {
        "names no host": not all(node.hostname for node in listed),
        "has a port that is not a number from 1 to 65,535": not all(map(_is_port, listed)),
        "names no service of the Sentinels": several == "sentinel" and not service,
        "has something else than the number of a database after the host": bool(parts.fragment)
        or not (database.isdecimal() or not database),
        "names a database, but a cluster has only database 0": several == "cluster"
        and database.strip("0") != "",
        f"has no option {', '.join(unknown)}": bool(unknown),
        "names an option twice": len(options) < count,
    } | {
        f"{name} is {what}": options.get(name, what) is None for name, (what, _) in READERS.items()
    }
    return next((mistake for mistake, is_made in checks.items() if is_made), None)


def _is_port(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False
