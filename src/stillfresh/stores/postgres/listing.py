"""Walks along the whole table of a PostgreSQL store, in slices: listing and counting."""

from typing import Final

from stillfresh.stores.contract import After, StoredEntry, StoreStats
from stillfresh.stores.postgres.link import PgLink
from stillfresh.stores.postgres.schema import (
    EMPTY,
    FIELDS,
    NAME_OF_ROW,
    WHOLE,
    WIDTH,
    Row,
    id_of,
    key_of,
    name_of,
    quoted,
    record_of,
)

STRETCH: Final = 2_000
"""Rows that one statement looks at."""
COUNTED: Final = 50
"""Slices that are counted; the count of a larger table is an estimate."""
FIRST: Final = (b"", b"")
"""Before all kinds and ids."""

KIND: Final = WIDTH + 1
"""Where the kind is in a row of the listing."""
BEHIND: Final = "FROM {schema}.entry e WHERE (e.kind, e.key) {past} ($1, $2)"
ORDER: Final = "ORDER BY e.kind, e.key LIMIT"
BEFORE: Final = "AND (e.kind, e.key) < (${}, '')"
"""The next possible kind. With an equal sign the planner would sort all rows of the kind."""
END: Final = f"SELECT e.kind, e.key {BEHIND} {{of_kind}} {ORDER} 1 OFFSET {STRETCH - 1}"
"""Where a slice ends; nothing if it is the last."""
LIST: Final = f"""
    SELECT {FIELDS}, NULL::bytea, octet_length(e.value), e.kind, e.id
    FROM (SELECT e.* {BEHIND} {{of_kind}} {ORDER} {STRETCH}) e
    WHERE NOT {EMPTY} AND position($3 IN {NAME_OF_ROW}) > 0 {ORDER} $4
"""  # noqa: S608 (our own texts)
COUNT: Final = f"""
    SELECT count(*) FILTER (WHERE s.is_whole), count(*) FILTER (WHERE s.held_until > coalesce($3,
            extract(epoch FROM clock_timestamp())::float8)), count(*),
        (array_agg(s.kind))[{STRETCH}], (array_agg(s.key))[{STRETCH}]
    FROM (SELECT e.kind, e.key, e.held_until, {WHOLE} AS is_whole {BEHIND} {ORDER} {STRETCH}) s
"""  # noqa: S608 (our own texts)
SIZE: Final = """
    SELECT (pg_total_relation_size(c.oid) + pg_total_relation_size('{schema}.tag'))::int8,
        greatest(c.reltuples, 0)::float8
    FROM pg_class c WHERE c.oid = '{schema}.entry'::regclass
"""


async def list_entries(
    link: PgLink, schema: str, kind: str | None, search: str, *, after: After, limit: int
) -> list[StoredEntry]:
    """One slice after the other, until there are enough entries or no more rows."""
    at = FIRST if after is None else (name_of(after[0]), key_of(name_of(after[1])))
    names = {"schema": quoted(schema), "past": ">"}
    of_kind = ""
    end_of_kind: list[bytes] = []
    if kind is not None:
        first = (name_of(kind), b"")
        of_kind = BEFORE
        end_of_kind = [first[0] + b"\0"]
        if at < first:
            at = first
            names["past"] = ">="  # an id may be empty
    entries: list[StoredEntry] = []
    while True:
        find = LIST.format(of_kind=of_kind.format(5), **names)
        left = limit - len(entries)
        rows = await link.run(find, (*at, name_of(search), left, *end_of_kind))
        entries += filter(None, map(_entry, rows))
        if len(entries) == limit:
            return entries
        if len(rows) == left:  # some of them are damaged: go on behind the last one
            at = (rows[-1][KIND], rows[-1][0])
        else:
            end_of = END.format(of_kind=of_kind.format(3), **names)
            ends = await link.run(end_of, (*at, *end_of_kind))
            if not ends:
                return entries
            at = (ends[0][0], ends[0][1])
        names["past"] = ">"


def _entry(row: Row) -> StoredEntry | None:
    """An entry, its value UNREAD; None if its row is damaged."""
    size, kind_name, name = row[WIDTH:]
    generation = row[1]
    record = record_of(row, known=generation)
    kind = id_of(kind_name, None)
    id_ = id_of(row[0], name)
    if record is None or kind is None or id_ is None:
        return None
    return StoredEntry(kind, id_, record, size)


async def count(link: PgLink, schema: str, now: float | None) -> StoreStats:
    """`bytes` are those of the tables, their indexes and their free space."""
    names = {"schema": quoted(schema), "past": ">"}
    ((size, rows),) = await link.run(SIZE.format(**names))
    copies = leases = looked_at = 0
    at = list(FIRST)
    for _ in range(COUNTED):
        ((slice_copies, slice_leases, number, *at),) = await link.run(
            COUNT.format(**names), (*at, now)
        )
        copies += slice_copies
        leases += slice_leases
        looked_at += number
        if at[0] is None:
            return StoreStats(copies, leases, size)
    scale = max(1.0, rows / looked_at)
    return StoreStats(round(copies * scale), round(leases * scale), size)
