"""T5, S15: what was tampered with in the tables of a PostgreSQL store.

As on the other servers (`test_tampered_servers.py`): a reader is given its own key's value, an
older one or none, never a mistake of ours; and what is loaded next is stored whole.
"""

import asyncio
from typing import Any

import psycopg
from hypothesis import given
from hypothesis import strategies as st
from psycopg.errors import IntegrityError

from stillfresh.stores.contract import Store
from stillfresh.stores.urls import store_for
from stillfresh.testing import ManualClock
from tests.kit.feed import NOW
from tests.kit.servers.postgres import PostgresServer
from tests.proof.test_tampered_servers import FEW, LIMIT, SLOW, used

TIMES = st.sampled_from(
    [float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1.7e308, -1.7e308, 5e-324, NOW, NOW + 30]
)
NUMBERS = st.sampled_from([0, -1, 1, 2**62, 2**63 - 1, -(2**63)])
TEXTS = st.sampled_from(["", "x", "\u20ac", "x" * 5_000, "0" * 64])
BYTES = st.sampled_from([b"", b"\xff", b"i", b"i" + bytes(8), b"t", b"t\xff", b"x" * 600])
COLUMNS: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("entry", "key"): BYTES,
    ("entry", "kind"): BYTES,
    ("entry", "id"): st.none() | BYTES,
    ("entry", "generation"): st.none() | TEXTS,
    ("entry", "fetched_at"): st.none() | TIMES,
    ("entry", "fresh_for"): st.none() | TIMES,
    ("entry", "stale_for"): st.none() | TIMES,
    ("entry", "error_for"): st.none() | TIMES,
    ("entry", "mark"): st.integers(-1, 3),
    ("entry", "token"): st.none() | TEXTS,
    ("entry", "held_until"): st.none() | TIMES,
    ("entry", "failures"): st.none() | NUMBERS,
    ("entry", "retry_at"): st.none() | TIMES,
    ("entry", "error"): st.none() | BYTES,
    ("entry", "version"): st.none() | BYTES,
    ("entry", "changed"): NUMBERS,
    ("entry", "changed_at"): TIMES,
    ("entry", "replaced"): TEXTS,
    ("tag", "tag"): BYTES,
    ("tag", "kind"): BYTES,
    ("tag", "key"): BYTES,
    ("tag", "late"): st.booleans(),
    ("epoch", "tag"): BYTES,
    ("epoch", "epoch"): NUMBERS,
    ("life", "number"): NUMBERS,
}
"""Not the bytes of a value: nobody can tell that `a` was not always `b`."""
TOGETHER = [
    ["token", "held_until"],
    ["failures", "retry_at", "error"],
    ["generation", "fetched_at", "fresh_for", "stale_for", "error_for"],
]
"""The table takes all of these, or none."""
WHOLE_TABLES = [
    "DELETE FROM {schema}.entry",
    "DELETE FROM {schema}.tag",
    "DELETE FROM {schema}.life",
    "UPDATE {schema}.entry SET value = NULL",
    "SELECT setval('{schema}.stamps', 1)",
    "SELECT setval('{schema}.stamps', 1000000)",
]


def tamper(connection: psycopg.Connection[Any], schema: str, data: st.DataObject) -> None:
    """Up to four changes: of a column, or of columns that go together, in one row or in all."""
    for _ in range(data.draw(st.integers(1, 4))):
        how = data.draw(st.sampled_from(["column", "together", "table"]))
        if how == "table":
            statement = data.draw(st.sampled_from(WHOLE_TABLES)).format(schema=schema)
            connection.execute(statement.encode())
            continue
        if how == "column":
            table, column = data.draw(st.sampled_from(sorted(COLUMNS)))
            columns = [column]
        else:
            table = "entry"
            columns = data.draw(st.sampled_from(TOGETHER))
        values = [data.draw(COLUMNS[table, column]) for column in columns]
        changes = ", ".join(f"{column} = %s" for column in columns)
        one = f" WHERE ctid = (SELECT min(ctid) FROM {schema}.{table})"
        where = data.draw(st.sampled_from(["", one]))
        try:
            connection.execute(f"UPDATE {schema}.{table} SET {changes}{where}".encode(), values)
        except IntegrityError:  # the table does not take it
            continue


@SLOW
class TestT5TamperedPostgres:
    @FEW
    @given(st.data())
    def test_each_key_of_a_tampered_postgres_store_has_its_own_value_or_none(
        self, postgres: PostgresServer, data: st.DataObject
    ) -> None:
        """Of whatever version; and what is refreshed is stored, with its tags."""
        url = postgres.new_store()
        schema = url.partition("schema=")[2].partition("&")[0]

        async def spoil() -> None:
            with psycopg.connect(postgres.address, autocommit=True) as connection:
                tamper(connection, schema, data)

        def new_store(clock: ManualClock) -> Store:
            return store_for(url, clock)

        asyncio.run(asyncio.wait_for(used(new_store, spoil), LIMIT))


def test_every_postgres_column_but_the_value_is_tampered_with(postgres: PostgresServer) -> None:
    """S15: also those that a later version of the schema adds."""
    schema = postgres.new_store().partition("schema=")[2].partition("&")[0]
    found = postgres.execute(
        f"SELECT table_name, column_name FROM information_schema.columns"
        f" WHERE table_schema = '{schema}' AND table_name <> 'setting'"
    )
    assert set(found) - COLUMNS.keys() == {("entry", "value"), ("life", "is_only")}
