"""Walks over the whole database of a Redis store, in slices: listing, counting, evicting.

No slice is long for the server. SCAN has no order, so a listing walks over all names, and then
reads the first bytes of the listed entries. In a cluster it walks over each primary; keys that move
meanwhile may be missed.
"""

from collections.abc import AsyncIterator
from heapq import nsmallest
from typing import Final, TypeAlias

from stillfresh.stores.contract import After, StoredEntry, StoreStats
from stillfresh.stores.redis import lua, scripts
from stillfresh.stores.redis.cluster import Cluster
from stillfresh.stores.redis.layout import Places, listed
from stillfresh.stores.redis.link import Link

Name: TypeAlias = tuple[str, str]

SLICE: Final = 1_000
LOOKED_AT: Final = 500
SAMPLE: Final = 200
"""Keys in a slice, and slices of a count; beyond that a count is an estimate."""
FIRST_BYTES: Final = 4_096
"""Enough for everything but the value, unless tags and error are long."""


async def list_entries(
    link: Link | Cluster, places: Places, kind: str | None, search: str, *, after: After, limit: int
) -> list[StoredEntry]:
    found: list[StoredEntry] = []
    while (left := limit - len(found)) > 0:
        first = await _first(_names(link, places, kind, search), after, left)
        found += await _described(link, places, first)
        if len(first) < left:
            break  # otherwise some were not ours, or were deleted meanwhile: this is not the end
        after = first[-1]
    return found


async def walk(
    link: Link | Cluster, places: Places, kind: str | None
) -> AsyncIterator[list[StoredEntry]]:
    """Of one kind or of all, in no order, each at least once: one walk, however many."""
    async for names in _names(link, places, kind, ""):
        yield await _described(link, places, names)


async def _names(
    link: Link | Cluster, places: Places, kind: str | None, search: str
) -> AsyncIterator[list[Name]]:
    pattern = places.pattern(kind, search)
    for server in await link.servers():
        at = b""
        while at != b"0":
            step = ("SCAN", at or 0, "MATCH", pattern, "COUNT", SLICE, "TYPE", "string")
            ((at, keys),) = await server.run([step])
            names = (places.name(places.member(key)) for key in keys)
            yield [name for name in names if name is not None and search in name[1]]


async def _first(slices: AsyncIterator[list[Name]], after: After, limit: int) -> list[Name]:
    """The first entries after `after`."""
    first: set[Name] = set()
    last: Name | None = None
    async for names in slices:
        behind = (name for name in names if after is None or name > after)
        first.update(name for name in behind if last is None or name < last)
        if len(first) >= limit:
            first = set(nsmallest(limit, first))
            last = max(first)
    return sorted(first)


async def _described(link: Link | Cluster, places: Places, names: list[Name]) -> list[StoredEntry]:
    """The entries; those that were deleted since, and others' keys, are left out."""
    keys = [places.of(kind, [id_])[0].key for kind, id_ in names]
    heads = [("GETRANGE", key, 0, FIRST_BYTES - 1) for key in keys]
    replies = await link.run([*heads, *(("STRLEN", key) for key in keys)])
    found = [
        (name, listed(head, length))
        for name, head, length in zip(
            names, replies[: len(names)], replies[len(names) :], strict=True
        )
    ]
    return [StoredEntry(*name, *about) for name, about in found if about is not None]


async def evict(link: Link | Cluster, places: Places, before: float) -> int:
    dropped = 0
    for server in await link.servers():
        async for (some,) in _slices(server, places, scripts.EVICT, repr(float(before))):
            dropped += some
    return dropped


async def count(link: Link | Cluster, places: Places, now: str) -> StoreStats:
    """The count of a very large database is an estimate."""
    totals = [0.0, 0.0, 0.0]
    for server in await link.servers():
        slices = _slices(server, places, scripts.COUNT, now, SAMPLE)
        found, scale = [some async for some in slices], 1.0
        if len(found) == SAMPLE:
            (keys,) = await server.run([("DBSIZE",)])
            scale = max(1.0, keys / (SAMPLE * LOOKED_AT))
        totals = [total + scale * sum(it) for total, *it in zip(totals, *found, strict=True)]
    copies, leases, size = map(round, totals)
    return StoreStats(copies, leases, size)


async def _slices(
    server: Link, places: Places, script: lua.Script, argument: str, most: int | None = None
) -> AsyncIterator[list[int]]:
    """Slices of the server's whole database, at most `most`."""
    at, slices = b"", 0
    while at != b"0" and slices != most:
        step = script.call([], at or b"0", places.every, argument)
        ((at, *found),) = await server.run([step])
        slices += 1
        yield found
