"""What the caches of a gateway hold, entry by entry, and what an operator may do to one (G6).

A kind that was declared is asked for through its resource, so that memory and loads under way hear
of it; one that only lies in the store (of an older configuration) through the store.
"""

from collections.abc import Mapping
from typing import Any, Final

from stillfresh.engine import Cache, Explanation
from stillfresh.engine.core import Core
from stillfresh.engine.explain import explain
from stillfresh.engine.keys import checked_id, checked_kind
from stillfresh.engine.rules import fresh_until, is_cooling, is_held, verdict_of
from stillfresh.errors import ConfigError, LoadFailed
from stillfresh.freshness import Verdict, age_of
from stillfresh.stores.contract import Entry, Mark, Record
from stillfresh.web.replies import Problem
from stillfresh.web.values import shown_value

__all__ = ["ACTIONS", "Shelves"]

ACTIONS: Final = ("refresh", "invalidate", "delete")
PAGES: Final = "pages"


class Shelves:
    """The caches by name; where two hold a kind of one name, the first that declared it."""

    def __init__(self, caches: Mapping[str, Cache]) -> None:
        self._caches = caches

    def kinds(self) -> list[str]:
        return sorted({kind for cache in self._caches.values() for kind in cache.cores})

    async def entries(
        self, kind: str | None, search: str, after: tuple[str, str] | None, limit: int
    ) -> dict[str, Any]:
        """A page of them, in the order of kind and id; `next` is where the following one begins."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for name, cache in self._caches.items():
            runtime = await cache.runtime()
            now = runtime.clock()
            for entry in await runtime.store.entries(kind, search, after, limit + 1):
                if self._is_here(name, entry.kind):
                    found.setdefault((entry.kind, entry.id), _row(name, entry, now))
        names = sorted(found)
        is_more = len(names) > limit
        return {
            "entries": [found[it] for it in names[:limit]],
            "next": list(names[limit - 1]) if is_more else None,
        }

    async def explain(self, kind: str, id_: str) -> dict[str, Any]:
        """Why this value, why now, who refreshes it, when; and the value."""
        name, cache = await self._cache_of(kind, id_)
        runtime, core = await cache.runtime(), cache.cores.get(kind)
        record = (await runtime.store.read(kind, [id_])).get(id_, Record())
        now = runtime.clock()
        if core is None:
            told = explain(kind, id_, record, now, loading_here=False, in_memory=False)
        else:
            told = await core.explain(_key(core, id_))
        value = None if record.copy is None else record.copy.value
        return {
            **_row(name, Entry(kind, id_, record, 0), now),
            **_explained(told),
            "is_declared": core is not None,
            "can_refresh": core is not None and core.spec.by_id,
            "value": shown_value(value, is_page=name == PAGES) if record.copy else None,
            "terms": _terms(record),
        }

    async def act(self, action: str, kind: str, id_: str) -> str:
        """What was done, in a sentence."""
        _, cache = await self._cache_of(kind, id_)
        core = cache.cores.get(kind)
        if core is None:
            return await _act_on_store(cache, action, kind, id_)
        key = _key(core, id_)
        match action:
            case "refresh" if core.spec.by_id:
                await _reload(core, key)
                return "Loaded anew."
            case "refresh":
                await core.invalidate([key], soft=True)
                return "Marked stale: its next reader brings a new copy."
            case "invalidate":
                await core.invalidate([key], soft=False)
                return "Invalidated: no read is answered with this copy, unless loading fails."
            case _:
                await core.delete([key])
                return "Deleted."

    def _is_here(self, name: str, kind: str) -> bool:
        """Not a kind that another cache, perhaps on the same store, looks after."""
        owner = self._owner(kind)
        return owner is None or owner == name

    def _owner(self, kind: str) -> str | None:
        return next((name for name, cache in self._caches.items() if kind in cache.cores), None)

    async def _cache_of(self, kind: str, id_: str) -> tuple[str, Cache]:
        if (name := self._owner(kind)) is not None:
            return name, self._caches[name]
        try:
            checked_kind(kind), checked_id(kind, id_)
        except ConfigError as exc:
            raise Problem(404, "not_found", "Not found", str(exc)) from exc
        for name, cache in self._caches.items():
            store = (await cache.runtime()).store
            if await store.entries(kind, "", None, 1) and await store.read(kind, [id_]):
                return name, cache
        raise Problem(404, "not_found", "Not found", f"no store knows {kind} {id_!r}")


async def _act_on_store(cache: Cache, action: str, kind: str, id_: str) -> str:
    store = (await cache.runtime()).store
    match action:
        case "refresh":
            said = f"{kind} is declared nowhere here, so nobody knows how to load it"
            raise Problem(409, "not_loadable", "Cannot be loaded", said)
        case "invalidate":
            await store.invalidate(kind, [id_])
            return "Invalidated."
        case _:
            await store.delete(kind, [id_])
            return "Deleted."


async def _reload(core: Core[Any, Any], key: object) -> None:
    outcome = (await core.reload([key]))[key]
    if isinstance(outcome, LoadFailed):
        raise Problem(502, "load_failed", "Loading failed", str(outcome))


def _key(core: Core[Any, Any], id_: str) -> Any:  # noqa: ANN401 (each resource has its own)
    try:
        key = core.key(id_)
        core.check([key])
    except (ConfigError, ValueError) as exc:
        said = f"{id_!r} is no id of {core.spec.kind}"
        raise Problem(404, "not_found", "Not found", said) from exc
    return key


def _row(cache: str, entry: Entry, now: float) -> dict[str, Any]:
    copy, failure = entry.record.copy, entry.record.failure
    held = entry.record.held_until if is_held(entry.record, now) else None
    cooling = failure is not None and is_cooling(failure, now)
    return {
        "cache": cache,
        "kind": entry.kind,
        "id": entry.id,
        "verdict": Verdict.GONE if copy is None else verdict_of(copy, now),
        "age": None if copy is None else age_of(copy.fetched_at, now),
        "fresh_for": None if copy is None else fresh_until(copy) - now,
        "size": entry.size,
        "has_copy": copy is not None,
        "is_absent": copy is not None and copy.value is None,
        "is_invalidated": copy is not None and copy.mark is not Mark.NONE,
        "held_for": None if held is None else held - now,
        "failures": 0 if failure is None else failure.count,
        "retry_in": failure.retry_at - now if failure is not None and cooling else None,
    }


def _explained(told: Explanation) -> dict[str, Any]:
    return {
        "text": told.text,
        "error": told.error,
        "loading_here": told.loading_here,
        "in_memory": told.in_memory,
    }


def _terms(record: Record) -> dict[str, float] | None:
    if record.copy is None:
        return None
    policy = record.copy.policy
    return {
        "fresh_for": policy.fresh_for,
        "stale_for": policy.stale_for,
        "error_for": policy.error_for,
    }
