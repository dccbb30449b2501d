"""Reading a table of settings: every mistake is found, each is one line with its key.

A reader takes a value and its key, and returns what it means or raises `ConfigError`.
"""

import dataclasses
import difflib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from string import Formatter
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import httpx2

from stillfresh.checks import checked_share, checked_whole
from stillfresh.durations import ALLOWED, seconds
from stillfresh.engine import Objective, objectives_of
from stillfresh.errors import ConfigError, shown, shown_address
from stillfresh.gateway.guard import EVERYWHERE, LOCAL_NAMES, checked_origins, is_address
from stillfresh.gateway.own_paths import checked_prefix
from stillfresh.http import checked_cookies
from stillfresh.http.client import checked_url
from stillfresh.http.fields import NAME as FIELD_NAME
from stillfresh.http.fields import checked_headers
from stillfresh.pages.edge import checked_networks, is_host
from stillfresh.pages.routes import NEVER, Forward, Route, Routes, checked_credentials
from stillfresh.pages.upstream import (
    checked_ca,
    checked_health_path,
    checked_upstream,
    checked_upstreams,
)
from stillfresh.stores import checked_tenant, store_for

Reader: TypeAlias = Callable[[Any, str], Any]
REQUIRED: Final = object()
WRITTEN: Final = "seconds as a number, or text such as '250ms', '30s', '5m', '1h', '30d'"
OURS: Final = {"accept-encoding", "connection", "content-length", "content-type", "host"} | {
    *("if-modified-since", "if-none-match", "transfer-encoding")
}
NUMBERS: Final = re.compile(r"[\d.]+", re.ASCII)
NAME: Final = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?")
PATH: Final = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
ID_SLOT: Final = re.compile(r"\{(id|viewer_id)\}")
"""Where a URL template takes an id."""


def key(read: Reader, default: Any = REQUIRED, *, secret: bool = False) -> Any:  # noqa: ANN401
    """A key of a table: its reader, and its default."""
    options: dict[str, Any] = {} if default is REQUIRED else {"default_factory": lambda: default}
    return dataclasses.field(metadata={"read": read}, repr=not secret, **options)


def keys_of(table: type) -> dict[str, "dataclasses.Field[Any]"]:
    return {field.name: field for field in dataclasses.fields(table) if field.metadata}


def read_table(where: str, table: object, model: type, mistakes: list[str]) -> dict[str, Any]:
    """The readable values; the others are among the mistakes."""
    if not isinstance(table, dict):
        mistakes.append(f"{where}: must be a table, as [{where}], not {shown(table)}")
        return {}
    keys = keys_of(model)
    values: dict[str, Any] = {}
    mistakes.extend(f"{where}.{name}: {unknown(name, keys)}" for name in table if name not in keys)
    for name, field in keys.items():
        if name in table:
            with collect_mistakes(mistakes):
                values[name] = field.metadata["read"](table[name], f"{where}.{name}")
        elif field.default_factory is dataclasses.MISSING:
            mistakes.append(f"{where}.{name}: is missing")
        else:
            values[name] = field.default_factory()
    return values


@contextmanager
def collect_mistakes(mistakes: list[str]) -> Iterator[None]:
    """An error of several mistakes has each of them as an argument."""
    try:
        yield
    except ConfigError as exc:
        mistakes.extend(exc.args)


@contextmanager
def name_key(key: str, own: str = "") -> Iterator[None]:
    """Put the key into an error, in place of the name that the check itself uses (`own`)."""
    try:
        yield
    except ConfigError as exc:
        named = f"{own or key.rpartition('.')[2]}: "
        raise ConfigError(f"{key}: {str(exc).removeprefix(named)}") from exc


def unknown(key: str, known: Iterable[str]) -> str:
    """With the key that was probably meant, or all keys."""
    near = difflib.get_close_matches(key, known, 1)
    meant = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
    return f"unknown key; {meant}"


def text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ConfigError(f"{key}: must be printable text, not {shown_address(value)}")
    return value


def texts(value: object, key: str) -> tuple[str, ...]:
    return _each(text, value, key)


def _each(read: Reader, value: object, key: str) -> tuple[Any, ...]:
    """A list of texts; every item that cannot be read is a mistake."""
    if not isinstance(value, list):
        raise ConfigError(f"{key}: must be a list of texts, not {shown(value)}")
    items: list[Any] = []
    mistakes: list[str] = []
    for item in value:
        with collect_mistakes(mistakes):
            items.append(read(item, key))
    if mistakes:
        raise ConfigError(*mistakes)
    return tuple(items)


def objective(value: str, key: str) -> str:
    Objective.of(value, name=key)
    return value


def objectives(value: str | list[str], key: str) -> str | tuple[str, ...]:
    """One objective, or one of age and one of truth."""
    objectives_of(value, name=key)
    return tuple(value) if isinstance(value, list) else value


def check(value: object, key: str) -> float:
    """The share of reads that is checked; 0: none."""
    return 0.0 if value == 0 and not isinstance(value, bool) else checked_share(key, value)


def flag(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key}: must be true or false, not {shown(value)}")
    return value


def whole(least: int, most: int) -> Reader:
    return lambda value, key: checked_whole(key, value, least, most)


def duration(value: Any, key: str, most: float | None = None) -> float:  # noqa: ANN401 (as written)
    """With `most`: above zero, and at most that."""
    try:
        length = seconds(value, name=key, positive=most is not None)
    except ConfigError as exc:  # leave out forms that only Python can write
        raise ConfigError(str(exc).replace(ALLOWED, WRITTEN)) from exc
    if most is not None and length > most:
        raise ConfigError(f"{key}: must be {most:g} seconds or less, not {shown(value)}")
    return length


def share(value: object, key: str) -> float:
    return checked_share(key, value)


def positive(most: float = math.inf) -> Reader:
    return partial(duration, most=most)


def _with_check(read: Reader, check: Callable[[Any], object], own: str = "") -> Reader:
    """The value that `read` returns, if `check` accepts it."""

    def checked(value: object, key: str) -> object:
        result: object = read(value, key)
        with name_key(key, own):
            check(result)
        return result

    return checked


url: Final = _with_check(text, checked_url, "url")
store_url: Final = _with_check(text, lambda url: store_for(url, time.time))
tenant: Final = _with_check(text, checked_tenant)
_cookie: Final = _with_check(text, lambda pattern: checked_cookies([pattern]), "ignore_cookies")
_credential: Final = _with_check(text, lambda name: checked_credentials([name]))
_network: Final = _with_check(text, lambda network: checked_networks([network]))
_origin: Final = _with_check(text, lambda origin: checked_origins([origin]))
_address: Final = _with_check(text, checked_upstream, "upstream")
cookies: Final = partial(_each, _cookie)
networks: Final = partial(_each, _network)
origins: Final = partial(_each, _origin)
credentials: Final = partial(_each, _credential)
_addresses: Final[Reader] = _with_check(partial(_each, _address), checked_upstreams, "upstream")


def upstreams(value: object, key: str) -> tuple[str, ...]:
    """One address of a site, or a list of several."""
    if not isinstance(value, str | list):
        raise ConfigError(f"{key}: must be an address, or a list of some, not {shown(value)}")
    addresses: tuple[str, ...] = _addresses([value] if isinstance(value, str) else value, key)
    return addresses


def health_path(value: object, key: str) -> str:
    return checked_health_path(value, key)


def site_ca(value: object, key: str) -> str:
    file = text(value, key)
    checked_ca(file, key)
    return file


def own_prefix(value: object, key: str) -> str:
    return checked_prefix(text(value, key), key)


def url_template(value: object, key: str) -> str:
    """A URL with the id in its path or its query."""
    template = text(value, key)
    with name_key(key, "url"):
        checked_url(ID_SLOT.sub("x", template))
    parts = urlsplit(template)
    is_plain = not {"{", "}"} & set(ID_SLOT.sub("", template) + parts.netloc)
    if not is_plain or {".", ".."} & set(parts.path.split("/")) or "{id}" not in template:
        like = "'https://api.example/items/{id}': {id} once or more behind the host, and no . or .."
        raise ConfigError(f"{key}: must be like {like}, not {shown(template)}")
    return template


def one_of(*allowed: str) -> Reader:
    def read(value: object, key: str) -> str:
        if value not in allowed:
            *first, last = map(repr, allowed)
            raise ConfigError(f"{key}: must be {', '.join(first)} or {last}, not {shown(value)}")
        return str(value)

    return read


forward: Final = one_of("request", "key")


def is_at(url: str, host: str, port: int) -> bool:
    """True if a request to this URL reaches the gateway itself."""
    parts = httpx2.URL(url)
    here = LOCAL_NAMES | EVERYWHERE
    names = here if host in here else {host}
    return parts.scheme == "http" and parts.host in names and (parts.port or 80) == port


def headers(value: object, key: str) -> dict[str, str]:
    with name_key(key):
        fields = checked_headers(value)
    if taken := sorted(OURS & {name.lower() for name in fields}):
        raise ConfigError(f"{key}: {', '.join(taken)} is written by stillfresh itself")
    return fields


def field_names(value: object, key: str) -> tuple[str, ...]:
    """Names of request fields."""
    return _each(_field_name, value, key)


def _field_name(value: object, key: str) -> str:
    name = text(value, key)
    if not FIELD_NAME.fullmatch(name.lower().encode("latin-1", "replace")):
        raise ConfigError(f"{key}: write a field's name, such as X-Api-Key, not {shown(name)}")
    return name


@dataclasses.dataclass(frozen=True, slots=True)
class RouteSettings:
    """A route that is written as a table: a duration, and how the site is asked."""

    revalidate: float | None = key(positive(), None)
    forward: Forward | None = key(forward, None)  # noqa: RUF009 (a field)
    vary: tuple[str, ...] = key(field_names, ())
    tags: tuple[str, ...] = key(texts, ())
    ignore_cookies: tuple[str, ...] | None = key(cookies, None)


def routes(value: object, key: str) -> dict[str, Route]:
    if not isinstance(value, dict):
        raise ConfigError(f'{key}: must be like {{ "/blog/*" = "10m" }}, not {shown(value)}')
    routes: dict[str, Route] = {}
    mistakes: list[str] = []
    for path, table in value.items():
        with collect_mistakes(mistakes):
            routes[path] = _route(table, f'{key}."{path}"')
        with collect_mistakes(mistakes), name_key(key):
            Routes({path: routes.get(path, Route())})
    if mistakes:
        raise ConfigError(*mistakes)
    return routes


def _route(value: object, key: str) -> Route:
    if value == NEVER:
        return Route(never=True)
    if not isinstance(value, dict):
        try:
            return Route(duration(value, key, math.inf))
        except ConfigError as exc:
            raise ConfigError(f"{exc}; or 'never', for pages that pass uncached") from None
    mistakes: list[str] = []
    options = read_table(key, value, RouteSettings, mistakes)
    if mistakes:
        raise ConfigError(*mistakes)
    return Route(**options)


def hosts(value: object, key: str) -> tuple[str, ...]:
    return _each(_host_or_below, value, key)


def _host_or_below(value: object, key: str) -> str:
    """A host, or all hosts below one."""
    name = text(value, key)
    if not is_host(name.removeprefix("*.").encode("latin-1", "replace")):
        raise ConfigError(f"{key}: write example.com or *.example.com, not {shown(name)}")
    return name


def host(value: object, key: str) -> str:
    """The name or the valid address of a machine."""
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
    template = text(value, key)
    try:
        named = [piece[1:] for piece in Formatter().parse(template) if piece[1] is not None]
    except ValueError:
        named = []
    if not named or any(form or how or not PATH.fullmatch(name or "") for name, form, how in named):
        like = "'{id}' or '{details.author}:{details.id}'"
        raise ConfigError(f"{key}: must be like {like}, not {shown(value)}")
    return template
