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
from stillfresh.stores.redis.layout import Keyspace, listed
from stillfresh.stores.redis.link import Link

Name: TypeAlias = tuple[str, str]

SLICE: Final = 1_000
"""Keys that one SCAN of a listing visits."""
LOOKED_AT: Final = 500
"""Keys that one slice of a count visits; the script says the same number."""
SAMPLE: Final = 200
"""Slices of a count; beyond that a count is an estimate."""
FIRST_BYTES: Final = 4_096
"""Enough for everything but the value, unless tags and error are long."""


async def list_entries(
    link: Link | Cluster,
    keyspace: Keyspace,
    kind: str | None,
    search: str,
    *,
    after: After,
    limit: int,
) -> list[StoredEntry]:
    """The next entries by kind and id.

    A name may not be ours, or may have been deleted meanwhile. So a page with too few entries is
    the last one only if there were too few names.
    """
    entries: list[StoredEntry] = []
    while len(entries) < limit:
        left = limit - len(entries)
        names = await _first(_names(link, keyspace, kind, search), after, left)
        entries += await _read_entries(link, keyspace, names)
        if len(names) < left:
            break
        after = names[-1]
    return entries


async def walk(
    link: Link | Cluster, keyspace: Keyspace, kind: str | None
) -> AsyncIterator[list[StoredEntry]]:
    """All entries of one kind or of all kinds, in no order, each at least once."""
    async for names in _names(link, keyspace, kind, ""):
        yield await _read_entries(link, keyspace, names)


async def _names(
    link: Link | Cluster, keyspace: Keyspace, kind: str | None, search: str
) -> AsyncIterator[list[Name]]:
    pattern = keyspace.pattern(kind, search)
    for server in await link.servers():
        at = b""
        while at != b"0":
            step = ("SCAN", at or 0, "MATCH", pattern, "COUNT", SLICE, "TYPE", "string")
            ((at, keys),) = await server.run([step])
            names = (keyspace.name(keyspace.member(key)) for key in keys)
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


async def _read_entries(
    link: Link | Cluster, keyspace: Keyspace, names: list[Name]
) -> list[StoredEntry]:
    """The entries of these names, without deleted ones and keys of other programs."""
    keys = [keyspace.of(kind, [id_])[0].key for kind, id_ in names]
    reads = [("GETRANGE", key, 0, FIRST_BYTES - 1) for key in keys]
    sizes = [("STRLEN", key) for key in keys]
    replies = await link.run([*reads, *sizes])
    heads = replies[: len(names)]
    lengths = replies[len(names) :]
    entries: list[StoredEntry] = []
    for (kind, id_), head, length in zip(names, heads, lengths, strict=True):
        listing = listed(head, length)
        if listing is not None:
            record, size = listing
            entries.append(StoredEntry(kind, id_, record, size))
    return entries


async def evict(link: Link | Cluster, keyspace: Keyspace, before: float) -> int:
    dropped = 0
    for server in await link.servers():
        async for (number,) in _slices(server, keyspace, scripts.EVICT, repr(float(before))):
            dropped += number
    return dropped


async def count(link: Link | Cluster, keyspace: Keyspace, now: str) -> StoreStats:
    """The count of a very large database is an estimate."""
    copies = 0.0
    leases = 0.0
    size = 0.0
    for server in await link.servers():
        slices = _slices(server, keyspace, scripts.COUNT, now, SAMPLE)
        counts = [slice_counts async for slice_counts in slices]
        scale = 1.0
        if len(counts) == SAMPLE:
            (keys,) = await server.run([("DBSIZE",)])
            scale = max(1.0, keys / (SAMPLE * LOOKED_AT))
        copies += scale * sum(slice_copies for slice_copies, _, _ in counts)
        leases += scale * sum(slice_leases for _, slice_leases, _ in counts)
        size += scale * sum(slice_size for _, _, slice_size in counts)
    return StoreStats(round(copies), round(leases), round(size))


async def _slices(
    server: Link, keyspace: Keyspace, script: lua.Script, argument: str, most: int | None = None
) -> AsyncIterator[list[int]]:
    """The counts of each slice of the server's whole database, of at most `most` slices."""
    at = b""
    slices = 0
    while at != b"0" and slices != most:
        step = script.call([], at or b"0", keyspace.every, argument)
        ((at, *counts),) = await server.run([step])
        slices += 1
        yield counts
