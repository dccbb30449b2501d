"""Tags as rows of their own, so that no index is asked of the table (I6).

A row says: this entry was leased with this tag. It is written before the load begins, outlives
the copy, and is taken away when it is found to speak of nothing.
"""

from collections.abc import Iterable
from math import ceil
from typing import Final

from stillfresh.errors import StoreError
from stillfresh.stores.aws import CONDITION, Refused
from stillfresh.stores.dynamodb.names import Names
from stillfresh.stores.dynamodb.rows import Tagged, tag_item
from stillfresh.stores.dynamodb.schema import LOCK, Item, text
from stillfresh.stores.dynamodb.table import Table, values
from stillfresh.stores.dynamodb.workers import each

LASTS: Final = 30 * 86400
"""Seconds that a row stays after the last lease; a copy that lives longer takes it along."""
UNCHANGED: Final = "attribute_not_exists(lease_token) OR lease_token IN (:seen, :token)"
TRIES: Final = 8


class Tags:
    def __init__(self, table: Table, names: Names) -> None:
        self._table = table
        self._names = names

    async def write(
        self, tags: Iterable[str], *, kind: str, id_: str, token: str, ttl: float, seen: str
    ) -> None:
        """`seen`: the lease that probably wrote the rows that are there."""
        items = {
            tag: tag_item(self._names, tag, kind=kind, id_=id_, token=token, ttl=ceil(ttl))
            for tag in tags
        }
        await each(items, lambda tag: self._write(items[tag], seen))

    async def _write(self, item: Item, seen: str) -> None:
        """In the place of a row that was seen: one that arrives late replaces no later one (S8).

        Nor does a holder whose lease was lost meanwhile, and that cannot publish any more: a row
        that was seen while the lease still was ours is no later one's.
        """
        pk, sk, token = (item[name]["S"] for name in ("pk", "sk", "lease_token"))
        for _ in range(TRIES):
            try:
                await self._table.put(item, UNCHANGED, values(seen=seen, token=token))
            except Refused as exc:
                if exc.code != CONDITION:
                    raise
                seen = text(exc.item or await self._table.get(pk, sk) or {}, "lease_token") or ""
                lock = await self._table.get(sk, LOCK) or {}
                if text(lock, "lease_token") != token:
                    return
            else:
                return
        raise StoreError(f"{self._names.table}: others keep changing the row of a tag")

    async def remove(self, tagged: Tagged, pk: str, *, but: Iterable[str] = ()) -> None:
        """Those that these leases wrote: a later one's speak of its load, and stay."""
        rows = [
            (self._names.tag(tag), token)
            for tag in tagged.tags - set(but)
            for token in tagged.tokens
        ]
        await each(rows, lambda row: self._table.delete_if(row[0], pk, lease_token=row[1]))

    async def rows(self, tag: str) -> list[Item]:
        return [row async for page in self._table.partition(self._names.tag(tag)) for row in page]

    async def drop(self, row: Item) -> None:
        """Of an entry that is gone; not if it was leased again since the row was read."""
        unchanged = {"lease_token": text(row, "lease_token") or ""}
        await self._table.delete_if(row["pk"]["S"], row["sk"]["S"], **unchanged)
