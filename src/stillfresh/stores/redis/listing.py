"""A listing of a Redis store: SCAN has no order, so the whole database is walked, slice by slice.

Names only; then the first bytes of those that are listed. No slice is long for the server.
"""

from typing import Final

from stillfresh.stores.contract import Entry
from stillfresh.stores.listing import is_listed
from stillfresh.stores.redis.layout import Command, Place, Places, listed
from stillfresh.stores.redis.link import Link

__all__ = ["list_entries"]

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
    first: list[tuple[str, str]] = []
    pattern, at = places.pattern(kind, search), b""
    while at != b"0":
        walk = ("SCAN", at or 0, "MATCH", pattern, "COUNT", SLICE, "TYPE", "string")
        ((at, keys),) = await link.run([walk])
        names = {name for key in keys if (name := places.named(key)) is not None}
        listed_too = {name for name in names if is_listed(name, kind, search, after)}
        first = sorted({*first, *listed_too})[:limit] if listed_too else first
    found = await _described(link, places, first)
    if len(found) < len(first) == limit:  # some went while we looked: that is no end
        found += await list_entries(
            link, places, kind=kind, search=search, after=first[-1], limit=limit - len(found)
        )
    return found


async def _described(link: Link, places: Places, names: list[tuple[str, str]]) -> list[Entry]:
    """One that went since its name was read is left out, as any that is not ours."""
    asked = [command for kind, id_ in names for command in _asks(places.of(kind, [id_])[0])]
    replies = await link.run(asked)
    found = [
        (name, listed(glance, length))
        for name, glance, length in zip(names, replies[::2], replies[1::2], strict=True)
    ]
    return [Entry(*name, *about) for name, about in found if about is not None]


def _asks(place: Place) -> list[Command]:
    return [("GETRANGE", place.key, 0, FIRST_BYTES - 1), ("STRLEN", place.key)]
