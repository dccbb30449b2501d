"""A listing of the table, in the order that DynamoDB has (S1, I7).

The keys are hashes: only rows that say whose they are can be listed, which stillfresh's own do,
unless the id is very long. A page costs what its rows do, half a read unit for every 4 KB; a
search reads on until enough was found, at worst the whole table.
"""

from collections.abc import Sequence
from typing import Final

from stillfresh.clock import Clock
from stillfresh.stores.contract import Entry
from stillfresh.stores.dynamodb.names import Names
from stillfresh.stores.dynamodb.rows import merged
from stillfresh.stores.dynamodb.scanning import entries_of, parsed
from stillfresh.stores.dynamodb.schema import META, Item, key_of
from stillfresh.stores.dynamodb.table import Table
from stillfresh.stores.listing import is_listed

FEWEST_ROWS: Final = 200
"""In one request; an entry is one row or two, and rows of tags stand between."""


class Lister:
    def __init__(self, table: Table, names: Names, clock: Clock) -> None:
        self._table = table
        self._names = names
        self._clock = clock

    async def entries(
        self, kind: str | None, search: str, after: tuple[str, str] | None, limit: int
    ) -> list[Entry]:
        start = None if after is None else key_of(self._names.pk(*after), META)
        rows = None if search else max(FEWEST_ROWS, 2 * limit)
        found: list[Entry] = []
        async for page in entries_of(self._table, self._names.pk_prefix, after=start, rows=rows):
            listed = [entry for group in page if (entry := self._entry(group)) is not None]
            found += [
                each for each in listed if is_listed((each.kind, each.id), kind, search, None)
            ]
            if len(found) >= limit:
                return found[:limit]
        return found

    def _entry(self, rows: Sequence[Item]) -> Entry | None:
        names = {self._names.named(row) for row in rows} - {None}
        name = names.pop() if names else None
        if name is None:
            return None
        row, lock = parsed(rows, self._clock())
        size = row.size if row is not None and row.copy is not None else None
        is_absent = row is not None and row.copy is not None and row.copy.value is None
        return Entry(*name, merged(row, lock), None if is_absent else size)
