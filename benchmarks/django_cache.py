"""The Django backend beside Django's own and django-redis, on one machine and server (E20)."""

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django
from django.conf import settings

from benchmarks.harness import Contender, Progress, Row, Section, race
from benchmarks.redis_store import server

__all__ = ["section"]

OURS = "stillfresh.integrations.django.StillfreshCache"
FILES = "django.core.cache.backends.filebased.FileBasedCache"
VALUE = {"user": "somebody", "items": list(range(20)), "text": "x" * 500}
PAIRS = {"SQLite": "FileBasedCache", "Redis": "django-redis"}
STATEMENTS = {
    "get": "cache.get(key)",
    "get_or_set": "cache.get_or_set(key, value)",
    "set": "cache.set(key, value)",
    "get, missing": "cache.get('missing')",
}
TARGETS = ("get",)
THREADS = 16


def configured(folder: str, port: int) -> Any:  # noqa: ANN401 (Django has no types)
    """The four caches, by name."""
    redis = f"redis://127.0.0.1:{port}"
    places = {
        "SQLite": (OURS, f"sqlite:///{folder}/cache.db"),
        "Redis": (OURS, f"{redis}/0"),
        "FileBasedCache": (FILES, f"{folder}/files"),
        "django-redis": ("django_redis.cache.RedisCache", f"{redis}/1"),
    }
    caches = {name: {"BACKEND": it, "LOCATION": at} for name, (it, at) in places.items()}
    settings.configure(CACHES={**caches, "default": {"BACKEND": FILES, "LOCATION": folder}})
    django.setup()
    from django.core.cache import caches as found  # noqa: PLC0415 (after settings)

    return {name: found[name] for name in places}


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


def section(progress: Progress) -> Section:
    with tempfile.TemporaryDirectory() as folder, server() as port:
        caches, rows, figures = configured(folder, port), [], {}
        for cache in caches.values():
            cache.set("key", VALUE)
        for what, statement in STATEMENTS.items():
            progress(f"Django: {what}")
            names = {"value": VALUE}
            contenders = [
                Contender(name, statement, {**names, "cache": cache}, ["key"] * 20)
                for name, cache in caches.items()
            ]
            taken = race(contenders, rounds=51)
            figures[f"Django, `{what}`, µs"] = {name: ns / 1000 for name, ns in taken.items()}
            for ours, theirs in PAIRS.items():
                target = 1.0 if what in TARGETS else None
                said = f"`{what}` on {ours}, against {theirs}"
                rows.append(Row("E20", said, taken[ours] / taken[theirs], target))
        for ours in PAIRS:
            said = f"calls of `get_or_set`'s function for {THREADS} threads, on {ours}"
            rows.append(Row("E5", said, calls(caches[ours]), 1.0, unit=""))
    return Section(
        "Django (E20)",
        rows,
        figures,
        "A dict of 700 bytes. Every read asks the store (no MEMORY_FOR). `set` takes a lease and "
        "publishes, so that it cannot be undone by a load that began earlier.",
    )
