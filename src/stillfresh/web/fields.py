"""Reading a table of settings: every mistake is found, each is one line with its key (G1).

A reader takes a value and its key, and returns what it means or raises `ConfigError`.
"""

import difflib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final, TypeAlias

import httpx2

from stillfresh.checks import is_whole
from stillfresh.durations import ALLOWED, seconds
from stillfresh.errors import ConfigError, shown, shown_address
from stillfresh.http.client import checked_url
from stillfresh.http.fields import checked_headers
from stillfresh.isr.edge import checked_networks, is_host
from stillfresh.isr.rules_routes import Forward, Route, Routes, checked_credentials, checked_forward
from stillfresh.isr.upstream import checked_upstream
from stillfresh.stores import checked_tenant, for_tenant, store_for
from stillfresh.web.guard import SECRET, checked_origins, is_address

Reader: TypeAlias = Callable[[Any, str], Any]
REQUIRED: Final = object()
WRITTEN: Final = "seconds as a number, or text such as '250ms', '30s', '5m', '1h', '30d'"
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 (to be compared with)
OURS: Final = {"accept-encoding", "connection", "content-length", "content-type", "host"} | {
    "transfer-encoding"
}
NUMBERS: Final = re.compile(r"[\d.]+", re.ASCII)
NAME: Final = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?")
PATH: Final = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")


@dataclass(frozen=True, slots=True)
class Field:
    """A key of a table: how it is read, and what it is where it is not written."""

    read: Reader
    default: Any = REQUIRED


def read_table(
    where: str, table: object, fields: Mapping[str, Field], mistakes: list[str]
) -> dict[str, Any]:
    """What could be read; what could not is among the mistakes."""
    if not isinstance(table, dict):
        mistakes.append(f"{where}: must be a table, as [{where}], not {shown(table)}")
        return {}
    prefix = f"{where}." if where else ""
    mistakes.extend(f"{prefix}{key}: {unknown(key, fields)}" for key in table if key not in fields)
    found: dict[str, Any] = {}
    for name, field in fields.items():
        if name in table:
            note(mistakes, found, name, lambda: field.read(table[name], prefix + name))  # noqa: B023 (called at once)
        elif field.default is REQUIRED:
            mistakes.append(f"{prefix}{name}: is missing")
        else:
            found[name] = field.default
    return found


def note(mistakes: list[str], found: dict[str, Any], name: str, read: Callable[[], object]) -> None:
    try:
        found[name] = read()
    except ConfigError as exc:
        mistakes.append(str(exc))


def unknown(key: str, known: Mapping[str, object]) -> str:
    """With the key that was probably meant, or all there are."""
    near = difflib.get_close_matches(key, known, 1)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    there = f"there are: {', '.join(known)}" if known else "there are none here"
    return f"unknown key; {there}"


def text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ConfigError(f"{key}: must be printable text, not {shown_address(value)}")
    return value


def texts(value: object, key: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{key}: must be a list of texts, not {shown(value)}")
    return tuple(text(it, key) for it in value)


def flag(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}: must be true or false, not {shown(value)}")
    return value


def whole(least: int, most: int) -> Reader:
    def read(value: object, key: str) -> int:
        if not is_whole(value, least, most):
            raise ConfigError(f"{key}: must be {least:,} to {most:,}, not {shown(value)}")
        return value

    return read


def duration(value: Any, key: str) -> float:  # noqa: ANN401 (whatever is written)
    return _seconds(value, key)


def _seconds(value: Any, key: str, *, positive: bool = False) -> float:  # noqa: ANN401
    """What only Python can write is not advised."""
    try:
        return seconds(value, name=key, positive=positive)
    except ConfigError as exc:
        raise ConfigError(str(exc).replace(ALLOWED, WRITTEN)) from exc


def positive(most: float) -> Reader:
    """More than zero, and no more than this."""

    def read(value: Any, key: str) -> float:  # noqa: ANN401 (whatever is written)
        found = _seconds(value, key, positive=True)
        if found > most:
            raise ConfigError(f"{key}: must be {most:g} seconds or less, not {shown(value)}")
        return found

    return read


def _keyed(key: str, check: Callable[[], Any], own: str = "") -> Any:  # noqa: ANN401 (its result)
    """A check that names what it checks in its `own` way is told its key here, once."""
    try:
        return check()
    except ConfigError as exc:
        named = f"{own or key.rpartition('.')[2]}: "
        raise ConfigError(f"{key}: {str(exc).removeprefix(named)}") from exc


def _checked(read: Reader, check: Callable[[Any], object], own: str = "") -> Reader:
    """What `read` makes of a value, if `check` takes it."""

    def checked(value: object, key: str) -> object:
        found: object = read(value, key)
        _keyed(key, lambda: check(found), own)
        return found

    return checked


url: Final = _checked(text, checked_url, "url")
upstream: Final = _checked(text, checked_upstream)
store_url: Final = _checked(text, lambda it: store_for(it, time.time))
tenant: Final = _checked(text, checked_tenant)
credentials: Final = _checked(texts, checked_credentials)
networks: Final = _checked(texts, checked_networks)
origins: Final = _checked(texts, checked_origins)


def is_at(url: str, host: str, port: int) -> bool:
    """True if a request to this URL reaches the gateway itself."""
    parts = httpx2.URL(url)
    here = LOOPBACK | EVERYWHERE
    names = here if host in here else {host}
    return parts.scheme == "http" and parts.host in names and (parts.port or 80) == port


def one_tenant(url: str, tenant: str, key: str) -> None:
    """I17: where the store's address names a tenant too, it is this one."""
    _keyed(key, lambda: for_tenant(store_for(url, time.time), tenant))


def headers(value: object, key: str) -> dict[str, str]:
    found: dict[str, str] = _keyed(key, lambda: checked_headers(value))
    if taken := sorted(OURS & {name.lower() for name in found}):
        raise ConfigError(f"{key}: {', '.join(taken)} is written by stillfresh itself")
    return found


def routes(value: object, key: str) -> dict[str, float | Route]:
    if not isinstance(value, dict):
        raise ConfigError(f'{key}: must be like {{ "/blog/*" = "10m" }}, not {shown(value)}')
    found = {path: _route(it, f'{key}."{path}"') for path, it in value.items()}
    _keyed(key, lambda: Routes(found))
    return found


def _route(value: Any, key: str) -> float | Route:  # noqa: ANN401 (whatever is written)
    """A duration, or a table of a duration and how the site is asked (I24)."""
    if not isinstance(value, dict):
        return _seconds(value, key, positive=True)
    mistakes: list[str] = []
    found = read_table(key, value, ROUTE, mistakes)
    if mistakes:
        raise ConfigError(mistakes[0])
    return Route(found["revalidate"], forward=found["forward"])


def forward(value: object, key: str) -> Forward | None:
    return checked_forward(value or "", key)


def hosts(value: object, key: str) -> tuple[str, ...]:
    found = texts(value, key)
    for host in found:
        if not is_host(host.removeprefix("*.").encode("latin-1", "replace")):
            raise ConfigError(f"{key}: write example.com or *.example.com, not {shown(host)}")
    return found


def host(value: object, key: str) -> str:
    """Of a machine: a name, or an address that is one."""
    name = text(value, key)
    is_number = ":" in name or NUMBERS.fullmatch(name) is not None
    if not (is_address(name) if is_number else NAME.fullmatch(name)):
        raise ConfigError(f"{key}: must be a host's name or address, not {shown(name)}")
    return name


def path(value: object, key: str) -> str:
    """Into an object: names with dots between them."""
    if not isinstance(value, str) or not PATH.fullmatch(value):
        raise ConfigError(f"{key}: must be like 'items' or 'data.items', not {shown(value)}")
    return value


def template(value: object, key: str) -> str:
    """An id from a view's own fields: at least one, and nothing that only Python knows."""
    wrong = f"{key}: must be like '{{id}}' or '{{details.author}}:{{details.id}}', not"
    try:
        pieces = list(Formatter().parse(text(value, key)))
    except ValueError as exc:
        raise ConfigError(f"{wrong} {shown(value)} ({exc})") from exc
    named = [it for it in pieces if it[1] is not None]
    if not named or any(it[2] or it[3] or not PATH.fullmatch(it[1] or "") for it in named):
        raise ConfigError(f"{wrong} {shown(value)}")
    return str(value)


def secret(value: object, key: str) -> str:
    """Never shown, not even where it is wrong."""
    if not isinstance(value, str) or not SECRET.fullmatch(value):
        raise ConfigError(f"{key}: must be printable ASCII text without spaces")
    return value


ROUTE: Final = {
    "revalidate": Field(lambda value, key: _seconds(value, key, positive=True), None),
    "forward": Field(forward, None),
}
"""What a route says that is written as a table."""
