"""A hub's kinds as resources of its cache, and how a viewer's own views are keyed (C14)."""

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec

from stillfresh.coordinator.model import Kind
from stillfresh.engine import Cache, Resource
from stillfresh.engine.rules import ABSENT, results_of
from stillfresh.errors import ConfigError, shown


def key_of(kind: Kind, id_: str, viewer_id: str | None) -> str:
    """An id is its own key, except where views differ by viewer."""
    return joined(str(viewer_id), id_) if kind.per_viewer else id_


def joined(viewer_id: str, id_: str) -> str:
    return msgspec.json.encode((viewer_id, id_)).decode()


def parts(key: str) -> tuple[str, str]:
    return msgspec.json.decode(key, type=tuple[str, str])


def by_name(kinds: Iterable[Kind]) -> dict[str, Kind]:
    found = list(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, str) else [None]
    if not all(isinstance(kind, Kind) for kind in found):
        raise ConfigError(f"kinds: takes a list of Kind(...), not {shown(kinds)}")
    by_name: dict[str, Kind] = {}
    for kind in found:
        if kind.name in by_name:
            raise ConfigError(f"kinds: two are named {kind.name!r}; each has a name of its own")
        by_name[kind.name] = kind
    return by_name


def resource_for(cache: Cache, kind: Kind) -> Resource[str, Any]:
    async def shared(ids: list[str]) -> dict[str, Any]:
        return await kind.fetch(ids)  # type: ignore[return-value]  # the engine checks what it is

    async def per_viewer(keys: list[str]) -> dict[str, Any]:
        """One request for each viewer among them; one that fails, fails its own."""
        asked: dict[str, list[str]] = {}
        for viewer_id, id_ in map(parts, keys):
            asked.setdefault(viewer_id, []).append(id_)
        answers = await asyncio.gather(
            *(_fetched(kind, ids, viewer_id) for viewer_id, ids in asked.items()),
            return_exceptions=True,
        )
        return {
            joined(viewer_id, id_): found
            for (viewer_id, ids), answer in zip(asked.items(), answers, strict=True)
            for id_, found in _each(ids, answer).items()
        }

    declare = cache.batched(
        kind.name,
        fresh_for=kind.fresh_for,
        stale_for=kind.stale_for,
        error_for=kind.error_for,
        absent_for=kind.absent_for,
        memory_for=kind.memory_for,
        max_batch=kind.max_batch,
    )
    return declare(per_viewer if kind.per_viewer else shared)


async def _fetched(kind: Kind, ids: list[str], viewer_id: str) -> dict[str, object]:
    """Called and checked in a task of its own: nothing that it raises is another viewer's."""
    return results_of(kind.name, ids, await kind.fetch(list(ids), viewer_id))


def _each(ids: list[str], answer: dict[str, object] | BaseException) -> dict[str, object]:
    if isinstance(answer, BaseException):
        return dict.fromkeys(ids, answer)
    return {id_: found for id_, found in answer.items() if found is not ABSENT}
