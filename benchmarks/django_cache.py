"""The Django backend beside Django's own and django-redis, on one machine and server (E20)."""

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import django
from django.conf import settings

from benchmarks import tried
from benchmarks.harness import Contender, Figures, Progress, Row, Section
from benchmarks.redis_store import server
from benchmarks.sync import raced as raced_in_thread

__all__ = ["section"]

OURS = "stillfresh.integrations.django.StillfreshCache"
FILES = "django.core.cache.backends.filebased.FileBasedCache"
DATABASE = "django.core.cache.backends.db.DatabaseCache"
REDIS = "django.core.cache.backends.redis.RedisCache"
VALUE = {"user": "somebody", "items": list(range(20)), "text": "x" * 500}
MANY = {f"many-{number}": VALUE for number in range(20)}
PAIRS = {"SQLite": ("FileBasedCache", "DatabaseCache"), "Redis": ("django-redis", "RedisCache")}
STATEMENTS = {
    "get": "cache.get('key')",
    "get, missing": "cache.get('missing')",
    "set": "cache.set('key', value)",
    "add, existing": "cache.add('key', value)",
    "touch": "cache.touch('key', 300)",
    "incr": "cache.incr('number')",
    "set and delete": "cache.set('gone', value); cache.delete('gone')",
    "delete, missing": "cache.delete('missing')",
    "get_many": "cache.get_many(many)",
    "set_many": "cache.set_many(many)",
    "get_or_set": "cache.get_or_set('key', value)",
    "add, new": "cache.add(f'new-{next(numbers)}', value)",
    "get_or_set, missing": "cache.get_or_set(f'made-{next(numbers)}', value)",
}
"""Those that make new entries come last: FileBasedCache counts its files at every `set`."""
TARGETS = {
    ("get", "FileBasedCache"): ("E20", 1.0),
    ("add, existing", "FileBasedCache"): ("S14", 3.0),
    ("touch", "FileBasedCache"): ("S14", 3.0),
    ("delete, missing", "FileBasedCache"): ("S14", 3.0),
    ("get", "django-redis"): ("S14", 0.9),
    ("set", "django-redis"): ("S14", 2.0),
    ("add, new", "django-redis"): ("S14", 2.5),
    ("add, existing", "django-redis"): ("S14", 2.5),
    ("touch", "django-redis"): ("S14", 2.5),
    ("delete, missing", "django-redis"): ("S14", 2.5),
    ("incr", "django-redis"): ("S14", 4.0),
}
"""The rule and the most, by statement and peer; the other rows have no target."""
TRIED = {"SQLite": tried.DJANGO_SQLITE, "Redis": tried.DJANGO_REDIS}
WITH_MEMORY = "Redis with MEMORY_FOR"
ROUNDS = 21
THREADS = 16


def configured(folder: str, port: int) -> Any:  # noqa: ANN401 (Django has no types)
    """The caches, by name."""
    redis = f"redis://127.0.0.1:{port}"
    places = {
        "SQLite": (OURS, f"sqlite:///{folder}/cache.db"),
        "Redis": (OURS, f"{redis}/0"),
        WITH_MEMORY: (OURS, f"{redis}/0?prefix=memory"),
        "FileBasedCache": (FILES, f"{folder}/files"),
        "DatabaseCache": (DATABASE, "cached"),
        "django-redis": ("django_redis.cache.RedisCache", f"{redis}/1"),
        "RedisCache": (REDIS, f"{redis}/2"),
    }
    caches: dict[str, dict[str, Any]] = {
        name: {"BACKEND": backend, "LOCATION": place} for name, (backend, place) in places.items()
    }
    for name in ("FileBasedCache", "DatabaseCache"):  # they would drop entries of the benchmark
        caches[name]["OPTIONS"] = {"MAX_ENTRIES": 1_000_000}
    caches[WITH_MEMORY]["OPTIONS"] = {"MEMORY_FOR": 60}
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{folder}/database.db"}
    settings.configure(
        CACHES={**caches, "default": {"BACKEND": FILES, "LOCATION": folder}},
        DATABASES={"default": database},
    )
    django.setup()
    from django.core.cache import caches as opened  # noqa: PLC0415 (after settings)
    from django.core.management import call_command  # noqa: PLC0415

    call_command("createcachetable", verbosity=0)
    return {name: opened[name] for name in places}


def calls(cache: Any) -> int:  # noqa: ANN401
    """How often `get_or_set` calls its function for sixteen threads."""
    made, start = [], threading.Barrier(THREADS)

    def make() -> int:
        made.append(1)
        return len(made)

    def ask(_: int) -> None:
        start.wait()
        cache.get_or_set("stampede", make)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(ask, range(THREADS)))
    return len(made)


def raced(caches: Any, statement: str) -> Figures:  # noqa: ANN401
    """Nanoseconds for one call, by cache."""
    names = {"value": VALUE, "many": MANY, "numbers": count()}
    contenders = [
        Contender(name, statement, {**names, "cache": cache}, range(20))
        for name, cache in caches.items()
    ]
    return raced_in_thread(contenders, ROUNDS)


def section(progress: Progress) -> Section:
    rows: list[Row] = []
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder, server() as port:
        caches = configured(folder, port)
        for cache in caches.values():
            cache.set("key", VALUE)
            cache.set("number", 0)
        for what, statement in STATEMENTS.items():
            progress(f"Django: {what}")
            times = raced(caches, statement)
            figures[f"Django, `{what}`, µs"] = {name: ns / 1000 for name, ns in times.items()}
            for ours, peers in PAIRS.items():
                for peer in peers:
                    rule, target = TARGETS.get((what, peer), ("E20", None))
                    text = f"`{what}` on {ours}, against {peer}"
                    ratio = times[ours] / times[peer]
                    rows.append(Row(rule, text, ratio, target, tried=TRIED[ours]))
            if what == "get, missing":
                ratio = times[WITH_MEMORY] / times["Redis"]
                text = f"`{what}` on {WITH_MEMORY}, against without"
                rows.append(Row("S14", text, ratio, 1.0, tried=tried.DJANGO_MISSING))
        for ours in PAIRS:
            text = f"calls of `get_or_set`'s function for {THREADS} threads, on {ours}"
            rows.append(Row("E5", text, calls(caches[ours]), 1.0, unit=""))
    return Section(
        "Django (E20, S14)",
        rows,
        figures,
        "A dict of 700 bytes; `get_many` and `set_many` of 20. Every read asks the store, except "
        "with MEMORY_FOR. `set` is one step that no load which began earlier can undo, and "
        "`get_or_set` takes a lease, so that one process calls the function. DatabaseCache is on "
        "SQLite here.",
    )
