"""The whole table, entry by entry: what eviction and listings walk along (S1, I7)."""

from collections.abc import AsyncIterator, Sequence
from itertools import groupby

from stillfresh.stores.dynamodb.rows import Lock, Row, lock_of, row_of
from stillfresh.stores.dynamodb.schema import LOCK, META, Item
from stillfresh.stores.dynamodb.table import Table


async def entries_of(
    table: Table, prefix: str, *, after: Item | None = None, rows: int | None = None
) -> AsyncIterator[list[list[Item]]]:
    """The rows of each entry together; an entry may be cut by the end of a page."""
    kept: list[Item] = []
    async for page in table.scan(prefix, after=after, rows=rows):
        found = [row for row in page["Items"] if row["sk"]["S"] in {META, LOCK}]
        groups = [list(group) for _, group in groupby([*kept, *found], pk_of)]
        kept = groups.pop() if groups else []
        yield groups
    yield [kept] if kept else []


def parsed(rows: Sequence[Item], now: float) -> tuple[Row | None, Lock | None]:
    by_role = {row["sk"]["S"]: row for row in rows}
    row, lock = by_role.get(META), by_role.get(LOCK)
    return (row_of(row, now) if row else None), (lock_of(lock) if lock else None)


def pk_of(item: Item) -> str:
    pk: str = item["pk"]["S"]
    return pk
