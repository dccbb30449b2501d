"""How a declared kind becomes a resource of the cache: its keys, and a loader that calls `fetch`.

A kind that is the same for all is keyed by id. A kind that is per viewer is keyed by viewer and id
(`viewer_key`); its loader sends a request for each viewer, so that no viewer's error reaches
another. Connections and news are the hub's concern.
"""

import asyncio
from typing import Any

import msgspec

from stillfresh.engine import Cache, Resource
from stillfresh.engine.rules import ABSENT, NOTHING, results_of
from stillfresh.errors import StoreError
from stillfresh.systems.coordinator import Kind


def resource_for(cache: Cache, kind: Kind) -> Resource[str, Any]:
    """Declare the kind's resource."""

    async def load_shared(ids: list[str]) -> dict[str, Any]:
        more = await _stored_argument(cache, kind, ids, ids)
        return await kind.fetch(ids, **more)  # type: ignore[return-value]  # the engine checks it

    async def fetch_of_viewer(viewer_id: str, ids: list[str]) -> dict[str, object]:
        """Call and check in its own task: an error of one viewer reaches no other."""
        keys = [viewer_key(viewer_id, id_) for id_ in ids]
        more = await _stored_argument(cache, kind, ids, keys)
        return results_of(kind.name, ids, await kind.fetch(list(ids), viewer_id, **more))

    async def load_per_viewer(keys: list[str]) -> dict[str, Any]:
        """Send one request for each viewer; if one fails, only its own ids fail."""
        ids_by_viewer: dict[str, list[str]] = {}
        for key in keys:
            viewer_id, id_ = msgspec.json.decode(key, type=tuple[str, str])
            ids_by_viewer.setdefault(viewer_id, []).append(id_)
        requests = (fetch_of_viewer(viewer_id, ids) for viewer_id, ids in ids_by_viewer.items())
        answers = await asyncio.gather(*requests, return_exceptions=True)
        views: dict[str, Any] = {}
        for (viewer_id, ids), answer in zip(ids_by_viewer.items(), answers, strict=True):
            results = dict.fromkeys(ids, answer) if isinstance(answer, BaseException) else answer
            views |= {viewer_key(viewer_id, id_): view for id_, view in results.items()}
        return {key: view for key, view in views.items() if view is not ABSENT}

    declare = cache.batched(
        kind.name,
        fresh_for=kind.fresh_for,
        stale_for=kind.stale_for,
        error_for=kind.error_for,
        absent_for=kind.absent_for,
        memory_for=kind.memory_for,
        max_batch=kind.max_batch,
        concurrency=kind.concurrency,
        codec=kind.codec,
        objective=kind.objective,
        check=kind.check,
        true_within=kind.true_within,
        check_calls=kind.check_calls,
    )
    return declare(load_per_viewer if kind.per_viewer else load_shared)


def viewer_key(viewer_id: str, id_: str) -> str:
    """Return the key of one viewer's own view."""
    return msgspec.json.encode((viewer_id, id_)).decode()


async def _stored_argument(
    cache: Cache, kind: Kind, ids: list[str], keys: list[str]
) -> dict[str, dict[str, bytes]]:
    """`stored=` for a fetch that asks whether the stored bytes are still right; see `Kind.codec`.

    Empty for a kind without a codec, whose fetch does not take it.
    """
    if kind.codec is None:
        return {}
    try:
        records = await (await cache.store()).read(kind.name, keys)
    except StoreError:
        records = {}
    copies = ((id_, records.get(key, NOTHING).copy) for id_, key in zip(ids, keys, strict=True))
    values = {id_: copy.value for id_, copy in copies if copy is not None}
    return {"stored": {id_: value for id_, value in values.items() if isinstance(value, bytes)}}
