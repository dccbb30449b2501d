"""`stillfresh.toml`: from text to frozen settings, or to a list of every mistake in it.

Three sources are put over each other, table by table: the file, the environment's variables, and
the options of the command line (`load`). Then `settings_of` checks the result in two passes. The
first reads each table by its model, whose fields name their readers (`setting_readers`): a value of
a wrong type or form is found there. The second looks at what fits only together, such as a token
for viewers, or a store that workers can share. Neither pass stops at a mistake: all are collected,
one line each with its key, so that an operator mends a file in one go.
"""

import os
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from stillfresh.engine import CALLS, Objectives, check_declared
from stillfresh.engine.keys import checked_kind
from stillfresh.errors import ConfigError, shown
from stillfresh.gateway import setting_readers as readers
from stillfresh.gateway.environment import by_name, variables_in
from stillfresh.gateway.guard import checked_token
from stillfresh.gateway.setting_readers import collect_mistakes, key, name_key, read_table, unknown
from stillfresh.pages import KIND as PAGE
from stillfresh.pages import MAX_BODY, MAX_ENTRIES
from stillfresh.pages.routes import (
    CREDENTIALS,
    Forward,
    Route,
    Routes,
    check_token_routes,
    checked_credentials,
)
from stillfresh.pages.upstream import (
    CONNECTIONS,
    HEALTH_EVERY,
    MAX_SPILL,
    MAX_STREAMS,
    MIN_UPLOAD_RATE,
    POOL_WAIT,
)
from stillfresh.stores import for_tenant, store_for

TOKEN: Final = "STILLFRESH_TOKEN"  # noqa: S105 (its name)
LONGEST: Final = 1_000_000
"""The most bytes of a file of settings."""


class Mistakes(ConfigError):
    """All mistakes of a file, one line each."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = tuple(map(_line, mistakes))
        super().__init__("\n".join(self.mistakes))


def _line(text: str) -> str:
    """One line, even if a key has line breaks."""
    return "".join(character if character.isprintable() else "�" for character in text)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """`[store]`: where entities and pages are kept."""

    url: str = key(readers.store_url, "memory://")
    memory_for: float = key(readers.duration, 0.0)


@dataclass(frozen=True, slots=True)
class PagesSettings:
    """`[pages]`: a site whose pages are cached."""

    upstream: tuple[str, ...] = key(readers.upstreams)
    routes: Mapping[str, Route] = key(readers.routes, {})
    query: tuple[str, ...] | None = key(readers.texts, None)
    site_hosts: tuple[str, ...] = key(readers.hosts, ())
    tenant: str | None = key(readers.tenant, None)
    max_body: int = key(readers.whole(1, 2**30), MAX_BODY)
    timeout: float = key(readers.positive(3_600), 30.0)
    trusted_proxies: tuple[str, ...] = key(readers.networks, ())
    forward: Forward | None = key(readers.forward, None)  # noqa: RUF009 (a field)
    credentials: tuple[str, ...] = key(readers.credentials, CREDENTIALS)
    stale_for: float = key(readers.duration, 604_800.0)
    error_for: float = key(readers.duration, 604_800.0)
    absent_for: float = key(readers.duration, 10.0)
    max_streams: int = key(readers.whole(1, 1_000_000), MAX_STREAMS)
    heuristic: bool = key(readers.flag, default=False)
    cdn_override: bool = key(readers.flag, default=True)
    expose_tags: bool = key(readers.flag, default=False)
    purge_from: tuple[str, ...] = key(readers.networks, ())
    objective: str | None = key(readers.objective, None)
    normalise_query: bool = key(readers.flag, default=False)
    site_connections: int = key(readers.whole(1, 100_000), CONNECTIONS)
    pool_wait: float = key(readers.duration, POOL_WAIT)
    min_upload_rate: int = key(readers.whole(0, 1_000_000), MIN_UPLOAD_RATE)
    max_spill: int = key(readers.whole(0, 2**40), MAX_SPILL)
    max_entries: int = key(readers.whole(1, 10_000_000), MAX_ENTRIES)
    max_bytes: int = key(readers.whole(1, 2**40), 256 * 1024 * 1024)
    ignore_cookies: tuple[str, ...] = key(readers.cookies, ())
    host: str | None = key(readers.one_of("visitor", "site"), None)
    own_prefix: str = key(readers.own_prefix, "")
    site_ca: str | None = key(readers.site_ca, None)
    health_path: str | None = key(readers.health_path, None)
    health_every: float = key(readers.positive(3_600), HEALTH_EVERY)


@dataclass(frozen=True, slots=True)
class KindSettings:
    """`[kinds.NAME]`: entities of an upstream API."""

    name: str
    fresh_for: float = key(readers.positive(10 * 365 * 86_400))
    url: str | None = key(readers.url_template, None)
    batch_url: str | None = key(readers.url, None)
    terms: str = key(readers.one_of("own", "upstream"), "own")
    concurrency: int = key(readers.whole(1, 1_000), 4)
    ids_field: str = key(readers.text, "ids")
    id: str = key(readers.template, "{id}")
    list_field: str | None = key(readers.path, None)
    stale_for: float = key(readers.duration, 86_400.0)
    error_for: float = key(readers.duration, 86_400.0)
    absent_for: float | None = key(readers.duration, None)
    max_batch: int = key(readers.whole(1, 1_000), 20)
    timeout: float = key(readers.positive(30), 10.0)
    max_bytes: int = key(readers.whole(1, 2**30), 8 * 1024 * 1024)
    headers: Mapping[str, str] = key(readers.headers, {}, secret=True)
    per_viewer: bool = key(readers.flag, default=False)
    viewer_field: str = key(readers.text, "viewer_id")
    objective: Objectives = key(readers.objectives, None)  # noqa: RUF009 (a field)
    check: float = key(readers.check, 0.0)
    true_within: float | None = key(readers.positive(10 * 365 * 86_400), None)
    check_calls: float = key(readers.positive(1_000), CALLS)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`[server]`: where it listens, and which clients it accepts."""

    host: str = key(readers.host, "127.0.0.1")
    port: int = key(readers.whole(0, 65_535), 8080)
    hosts: tuple[str, ...] = key(readers.hosts, ())
    origins: tuple[str, ...] = key(readers.origins, ())
    token: str | None = key(checked_token, None, secret=True)
    authenticate_url: str | None = key(readers.url, None)
    max_connections: int = key(readers.whole(1, 1_000_000), 10_000)
    token_file: str | None = key(readers.text, None)
    workers: int = key(readers.whole(1, 256), 1)
    uds: str | None = key(readers.text, None)
    drain: float = key(readers.duration, 0.0)
    record: str | None = key(readers.text, None)
    record_share: float = key(readers.share, 1.0)


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """`[outbox]`: a PostgreSQL database whose changes invalidate pages by tag."""

    database: str = key(readers.text, secret=True)
    consumer: str = key(readers.text, "cache")
    max_lag: float = key(readers.positive(86_400), 30.0)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """`[log]`: what is written to standard error, and how."""

    level: str = key(readers.one_of("debug", "info", "warning", "error", "critical"), "warning")
    format: str = key(readers.one_of("text", "json"), "text")
    access: str = key(readers.one_of("off", "text", "json"), "off")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of `stillfresh serve`."""

    store: StoreSettings = StoreSettings()
    pages: PagesSettings | None = None
    kinds: tuple[KindSettings, ...] = ()
    server: ServerSettings = ServerSettings()
    outbox: OutboxSettings | None = None
    log: LogSettings = LogSettings()


MODELS: Final[dict[str, Any]] = {
    "store": StoreSettings,
    "pages": PagesSettings,
    "kinds": KindSettings,
    "server": ServerSettings,
    "outbox": OutboxSettings,
    "log": LogSettings,
}
OPTIONAL: Final = ("outbox", "pages")
URL_KEYS: Final = ("terms",)
BATCH_KEYS: Final = ("ids_field", "id", "list_field", "max_batch", "viewer_field")


def load(
    path: str | Path | None,
    over: Mapping[str, Mapping[str, Any]] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """The file's settings; variables override them, and `over` overrides both."""
    tables = {} if path is None else _tables(Path(path))
    from_environment, named, mistakes = variables_in(environ, MODELS)
    for table in (from_environment, over or {}):
        _put_over(tables, table)
    try:
        settings = settings_of(tables, environ)
    except Mistakes as exc:
        mistakes += [by_name(mistake, named) for mistake in exc.mistakes]
        raise Mistakes(mistakes) from exc
    if mistakes:
        raise Mistakes(mistakes)
    return settings


def _put_over(tables: dict[str, Any], over: Mapping[str, Any]) -> None:
    for name, table in over.items():
        own = tables.get(name, {})
        if not isinstance(own, dict):
            continue  # reported as a mistake of the file
        if name == "kinds":
            tables[name] = own = {**own}
            _put_over(own, table)
        else:
            tables[name] = {**own, **table}


def settings_of(tables: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from tables: `{"pages": {"upstream": "http://…"}}`."""
    mistakes = [f"{name}: {unknown(name, MODELS)}" for name in tables if name not in MODELS]
    checked: dict[str, Any] = {}
    for name in MODELS:
        if name in OPTIONAL and name not in tables:
            continue
        read = _kinds if name == "kinds" else partial(read_table, name, model=MODELS[name])
        checked[name] = read(tables.get(name, {}), mistakes=mistakes)
    store = checked["store"]
    server = checked["server"]
    kinds = checked.pop("kinds")
    pages = checked.get("pages", {})
    _find_token(server, environ, mistakes)
    if "outbox" in checked and "pages" not in checked:
        mistakes.append("outbox: goes with [pages]: it says which of them are stale, by their tags")
    if not pages and not kinds and not mistakes:
        mistakes.append("nothing to serve: write [pages] or [kinds.NAME]")
    _check_viewers(kinds, server, mistakes)
    with collect_mistakes(mistakes), name_key("pages.routes"):
        names = checked_credentials(pages.get("credentials", ()))
        check_token_routes(Routes(pages.get("routes", {})), names)
    _check_not_itself(server, pages, kinds, mistakes)
    _check_site(tables.get("pages"), pages, mistakes)
    if server.get("workers", 1) > 1 and store.get("url", "").lower().startswith("memory:"):
        mistakes.append(
            f"server.workers: {server['workers']} processes cannot share {store['url']}; name a "
            "store that they can, as sqlite:///stillfresh.db, in store.url or --store"
        )
    with collect_mistakes(mistakes), name_key("pages.tenant"):  # one tenant, wherever it is written
        if "url" in store and pages.get("tenant"):
            for_tenant(store_for(store["url"], time.time), pages["tenant"])
    if mistakes:
        raise Mistakes(mistakes)
    models = {name: MODELS[name](**table) for name, table in checked.items()}
    return Settings(kinds=tuple(KindSettings(**kind) for kind in kinds), **models)


def _tables(path: Path) -> dict[str, Any]:
    try:
        text = _read(path, LONGEST + 1)
        if len(text) > LONGEST:
            raise Mistakes([f"{path}: longer than {LONGEST:,} bytes"])
        return tomllib.loads(text.decode())
    except OSError as exc:
        raise Mistakes([f"{path}: {exc.strerror or exc}"]) from exc
    except UnicodeDecodeError as exc:
        raise Mistakes([f"{path}: not UTF-8 ({exc.reason} at byte {exc.start})"]) from exc
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise Mistakes([f"{path}: not TOML: {' '.join(str(exc).split())}"]) from exc


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except ValueError as exc:  # half a character, or a NUL
        raise OSError("no file can have this name") from exc


def _kinds(tables: object, mistakes: list[str]) -> list[dict[str, Any]]:
    if not isinstance(tables, dict):
        mistakes.append(f"kinds: must be tables, as [kinds.post], not {shown(tables)}")
        return []
    kinds = []
    for name, table in tables.items():
        where = f"kinds.{name}"
        with collect_mistakes(mistakes), name_key(where):
            if checked_kind(name) == PAGE:
                raise ConfigError("pages are kept under this name; choose another one")
        kind = {"name": name, **read_table(where, table, KindSettings, mistakes)}
        if isinstance(table, dict):
            _check_way(where, table, kind, mistakes)
            with collect_mistakes(mistakes), name_key(where):
                check_declared(
                    name,
                    kind.get("objective"),
                    check=kind.get("check", 0.0),
                    true_within=kind.get("true_within"),
                    check_calls=kind.get("check_calls", CALLS),
                    fresh_for=kind.get("fresh_for", 1.0),
                )
        kinds.append(kind)
    return kinds


def _check_way(
    where: str, table: Mapping[str, Any], kind: Mapping[str, Any], mistakes: list[str]
) -> None:
    """Views are fetched one by one or in batches; each way has its own keys."""
    if ("url" in table) is ("batch_url" in table):
        which = "both are set" if "url" in table else "neither is set"
        mistakes.append(
            f"{where}.url: {which}; write url (a GET for each id) or batch_url (a POST for many)"
        )
        return
    way = "url" if "url" in table else "batch_url"
    other = "batch_url" if way == "url" else "url"
    keys_of_other: tuple[str, ...] = BATCH_KEYS if way == "url" else URL_KEYS
    mistakes.extend(
        f"{where}.{key}: is for kinds with {other}, and this kind has {way}; remove it"
        for key in keys_of_other
        if key in table
    )
    if (url := kind.get("url")) and ("{viewer_id}" in url) is not kind.get("per_viewer", False):
        mistakes.append(f"{where}.url: {{viewer_id}} belongs into it if the kind is per_viewer")


def _find_token(server: dict[str, Any], environ: Mapping[str, str], mistakes: list[str]) -> None:
    """From the file, from a file that it names, or from the environment."""
    file = server.get("token_file")
    token = server.get("token")
    from_environment = environ.get(TOKEN)
    with collect_mistakes(mistakes):
        if file is not None and token is not None:
            raise ConfigError("server.token_file: there is a server.token too; write one of them")
        if file is not None:
            server["token"] = _token_in(file)
        elif token is None and from_environment:
            server["token"] = checked_token(from_environment, TOKEN)


def _token_in(file: str) -> str:
    try:
        token = _read(Path(file), 1_000).decode("ascii", "replace").strip()
    except OSError as exc:
        raise ConfigError(f"server.token_file: {file}: {exc.strerror or exc}") from exc
    return checked_token(token, "server.token_file")


def _check_viewers(
    kinds: list[dict[str, Any]], server: Mapping[str, Any], mistakes: list[str]
) -> None:
    own = [kind for kind in kinds if kind.get("per_viewer")]
    for kind in own:
        name = kind.get("viewer_field")
        if name is not None and name == kind.get("ids_field"):
            where = f"kinds.{kind['name']}.viewer_field"
            mistakes.append(f"{where}: is the ids_field, too: {shown(name)}")
    if own and server.get("authenticate_url", "") is None:
        mistakes.append(
            "server.authenticate_url: is missing; a kind with per_viewer needs it, to find out "
            "whose token a request has"
        )


def _check_not_itself(
    server: Mapping[str, Any],
    pages: Mapping[str, Any],
    kinds: list[dict[str, Any]],
    mistakes: list[str],
) -> None:
    """Refuse a gateway whose upstream is the gateway itself."""
    host = server.get("host")
    port = server.get("port")
    urls = [
        (f"kinds.{kind['name']}.{way}", kind.get(way))
        for kind in kinds
        for way in ("url", "batch_url")
    ]
    urls += [("pages.upstream", url) for url in pages.get("upstream", ())]
    urls.append(("server.authenticate_url", server.get("authenticate_url")))
    mistakes.extend(
        f"{where}: {url.partition('?')[0]} is where this gateway listens itself; "
        "choose another port for one of them"
        for where, url in urls
        if host and port and url and readers.is_at(url, host, port)
    )


def _check_site(table: object, pages: Mapping[str, Any], mistakes: list[str]) -> None:
    """Settings that do nothing without another one."""
    if not isinstance(table, dict):
        return
    if "health_every" in table and "health_every" in pages and "health_path" not in table:
        mistakes.append("pages.health_every: goes with pages.health_path, which is missing")
    upstreams = pages.get("upstream")
    if pages.get("site_ca") and upstreams and not any(map(_is_https, upstreams)):
        mistakes.append("pages.site_ca: goes with an https:// address in pages.upstream")


def _is_https(url: str) -> bool:
    return url.lower().startswith("https:")
