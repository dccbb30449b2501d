"""A listing of a Redis store: SCAN has no order, so the whole database is walked, slice by slice.

Names only; then the first bytes of those that are listed. No slice is long for the server.
"""

from collections.abc import AsyncIterator
from heapq import nsmallest
from typing import Final, TypeAlias

from stillfresh.stores.contract import Entry
from stillfresh.stores.redis.layout import Command, Places, RedisKey, listed
from stillfresh.stores.redis.link import Link

Member: TypeAlias = tuple[bytes, bytes]

SLICE: Final = 1_000
FIRST_BYTES: Final = 4_096
"""They tell everything but the value; of many tags and a long error, the beginning."""


async def list_entries(
    link: Link,
    places: Places,
    *,
    kind: str | None,
    search: str,
    after: tuple[str, str] | None,
    limit: int,
) -> list[Entry]:
    start = None if after is None else (_bytes(after[0]), _bytes(after[1]))
    pattern, wanted = places.pattern(kind, search), _bytes(search)
    found: list[Entry] = []
    while (left := limit - len(found)) > 0:
        names = _names(link, places, pattern, wanted)
        first = await _first(names, start, left)
        found += await _described(link, places, first)
        if len(first) < left:
            break  # else some were none of ours, or went while we looked: that is no end
        start = first[-1]
    return found


async def walk(link: Link, places: Places, kind: str) -> AsyncIterator[list[Entry]]:
    """All of a kind, in no order, each at least once: one walk, however many they are."""
    async for members in _names(link, places, places.pattern(kind, ""), b""):
        yield await _described(link, places, members)


async def _names(
    link: Link, places: Places, pattern: bytes, search: bytes
) -> AsyncIterator[list[Member]]:
    at = b""
    while at != b"0":
        walk = ("SCAN", at or 0, "MATCH", pattern, "COUNT", SLICE, "TYPE", "string")
        ((at, keys),) = await link.run([walk])
        yield [member for member in map(places.member, keys) if search in member[1]]


async def _first(
    names: AsyncIterator[list[Member]], start: Member | None, limit: int
) -> list[Member]:
    """The first ones behind `start`, of all that there are."""
    first: set[Member] = set()
    last: Member | None = None
    async for members in names:
        behind = (each for each in members if start is None or each > start)
        first.update(each for each in behind if last is None or each < last)
        if len(first) >= limit:
            first = set(nsmallest(limit, first))
            last = max(first)
    return sorted(first)


async def _described(link: Link, places: Places, members: list[Member]) -> list[Entry]:
    """One that went since its name was read is left out, as any that is not ours."""
    names = [name for member in members if (name := places.named(*member)) is not None]
    asked = [command for kind, id_ in names for command in _asks(places.of(kind, [id_])[0])]
    replies = await link.run(asked)
    found = [
        (name, listed(glance, length))
        for name, glance, length in zip(names, replies[::2], replies[1::2], strict=True)
    ]
    return [Entry(*name, *about) for name, about in found if about is not None]


def _asks(place: RedisKey) -> list[Command]:
    return [("GETRANGE", place.key, 0, FIRST_BYTES - 1), ("STRLEN", place.key)]


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
