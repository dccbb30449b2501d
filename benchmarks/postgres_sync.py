"""S14: PostgreSQL from threads: a `SyncCache` beside psycopg, and Django beside its DatabaseCache.

All on one server that writes to the disk before it answers.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final
from urllib.parse import urlsplit

import django
import psycopg
from django.conf import settings

from benchmarks import tried
from benchmarks.harness import Contender, Figures, Progress, Row, Section
from benchmarks.postgres_store import SAFE
from benchmarks.sync import raced
from stillfresh import SyncCache
from tests.kit.servers.postgres import postgres_serving

__all__ = ["section"]

KEY: Final = "sku-1"
VALUE: Final = "x" * 200
PAGE: Final = {"user": "somebody", "items": list(range(20)), "text": "x" * 500}
GET, SELECT = "`prices.get(key)` of a `SyncCache`", "`SELECT` of one row in psycopg"
PUT, UPSERT = "`prices.put(key, value)` of a `SyncCache`", "an upsert of one row in psycopg"
GONE, DELETE = "`prices.delete(key)` of a missing key", "`DELETE` of a missing row in psycopg"
TABLE: Final = "CREATE TABLE bare (id text PRIMARY KEY, token text, value bytea)"
UPSERT_ONE: Final = """INSERT INTO bare VALUES (%s, 'token', %s)
    ON CONFLICT (id) DO UPDATE SET token = excluded.token, value = excluded.value"""
DJANGO: Final = {
    "get": "cache.get('key')",
    "get, missing": "cache.get('missing')",
    "set": "cache.set('key', value)",
    "add, existing": "cache.add('key', value)",
    "touch": "cache.touch('key', 300)",
    "incr": "cache.incr('number')",
    "delete, missing": "cache.delete('missing')",
    "get_many": "cache.get_many(many)",
    "set_many": "cache.set_many(items)",
}
OURS: Final = "stillfresh"
THEIRS: Final = "DatabaseCache"


def threads(address: str, url: str) -> Figures:
    """Nanoseconds for one call."""
    with ExitStack() as stack:
        bare = stack.enter_context(psycopg.connect(address, autocommit=True))
        bare.execute(TABLE)
        bare.execute(UPSERT_ONE, (KEY, VALUE.encode()))
        cache = stack.enter_context(SyncCache(url))

        @cache.batched("price", fresh_for=3600)
        def prices(skus: list[str]) -> dict[str, str]:
            return dict.fromkeys(skus, VALUE)

        prices(KEY)

        def fetch(id_: str) -> Sequence[Any]:
            return bare.execute("SELECT value FROM bare WHERE id = %s", (id_,)).fetchall()

        def upsert(id_: str) -> object:
            return bare.execute(UPSERT_ONE, (id_, VALUE.encode()))

        def delete(id_: str) -> object:
            return bare.execute("DELETE FROM bare WHERE id = %s", (id_,))

        names = {"prices": prices, "value": VALUE}
        names |= {"fetch": fetch, "upsert": upsert, "delete": delete}
        return raced(
            [
                Contender(GET, "prices.get(key)", names, [KEY] * 20),
                Contender(SELECT, "fetch(key)", names, [KEY] * 20),
                Contender(PUT, "prices.put(key, value)", names, [KEY] * 10),
                Contender(UPSERT, "upsert(key)", names, [KEY] * 10),
                Contender(GONE, "prices.delete(key)", names, ["none"] * 10),
                Contender(DELETE, "delete(key)", names, ["none"] * 10),
            ]
        )


def configured(address: str, url: str) -> dict[str, Any]:
    """Django's caches, by name."""
    parts = urlsplit(address)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.removeprefix("/"),
        "USER": parts.username,
        "HOST": parts.hostname,
        "PORT": parts.port,
        "CONN_MAX_AGE": None,
    }
    backends = {
        OURS: ("stillfresh.integrations.django.StillfreshCache", url),
        THEIRS: ("django.core.cache.backends.db.DatabaseCache", "cached"),
    }
    caches = {
        name: {"BACKEND": backend, "LOCATION": place} for name, (backend, place) in backends.items()
    }
    settings.configure(
        CACHES={**caches, "default": caches[THEIRS]}, DATABASES={"default": database}
    )
    django.setup()
    from django.core.cache import caches as opened  # noqa: PLC0415 (after settings)
    from django.core.management import call_command  # noqa: PLC0415

    call_command("createcachetable", verbosity=0)
    return {name: opened[name] for name in backends}


def section(progress: Progress) -> Section:
    with postgres_serving(*SAFE) as server:
        progress("PostgreSQL in a thread")
        calls = threads(server.address, server.new_store())
        caches = configured(server.address, server.new_store())
        items = {f"many-{number}": PAGE for number in range(20)}
        for cache in caches.values():
            cache.set("key", PAGE)
            cache.set("number", 0)
            cache.set_many(items)
        times: dict[str, Figures] = {}
        for what, statement in DJANGO.items():
            progress(f"Django on PostgreSQL: {what}")
            names = {"value": PAGE, "many": list(items), "items": items}
            times[what] = raced(
                [
                    Contender(name, statement, {**names, "cache": cache}, range(5))
                    for name, cache in caches.items()
                ]
            )
    targets = [(GET, SELECT, 1.6), (PUT, UPSERT, 2.0), (GONE, DELETE, 1.5)]
    rows = [
        Row(
            "S14",
            f"{ours} on PostgreSQL, against {bare}",
            calls[ours] / calls[bare],
            target,
            tried=tried.POSTGRES_PUT,
        )
        for ours, bare, target in targets
    ]
    rows += [
        Row(
            "S14",
            f"`{what}` of Django on PostgreSQL, against {THEIRS}",
            figures[OURS] / figures[THEIRS],
            1.2,
            tried=tried.POSTGRES_PUT,
        )
        for what, figures in times.items()
    ]
    in_threads = {name: ns / 1000 for name, ns in calls.items()}
    in_django = {
        f"Django on PostgreSQL, `{what}`, µs": {name: ns / 1000 for name, ns in figures.items()}
        for what, figures in times.items()
    }
    return Section(
        "PostgreSQL in threads (S14)",
        rows,
        {"PostgreSQL in a thread, µs": in_threads, **in_django},
        "The server writes to the disk before it answers. A dict of 700 bytes in Django; "
        "`get_many` and `set_many` of 20. Django keeps its connection open.",
    )
