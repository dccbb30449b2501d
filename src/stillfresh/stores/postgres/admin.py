"""Creates, updates and shows the schema of a PostgreSQL store: `stillfresh table`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from psycopg.errors import InvalidSchemaName, UndefinedTable

from stillfresh.errors import StoreError
from stillfresh.stores.postgres.address import options_of
from stillfresh.stores.postgres.link import LOST, PgConnection, connected_to, refused
from stillfresh.stores.postgres.schema import (
    OLDEST_SERVER,
    SCHEMA,
    SETTINGS,
    VERSION,
    checked_schema,
    quoted,
    steps,
    tables,
)

PATIENCE: Final = 10.0
"""Seconds for each host."""
ONE_AT_A_TIME: Final = "SELECT pg_advisory_xact_lock(hashtext('stillfresh table create'))"


@dataclass(frozen=True)
class SchemaState:
    """The state of a schema. `version` is None if there are no tables."""

    schema: str
    version: int | None = None
    is_unlogged: bool | None = None
    pushes: bool | None = None


async def describe(url: str) -> SchemaState:
    """Return the state of the schema that an address names. Raises StoreError."""
    async with _connected(url) as (connection, schema):
        return await _state(connection, schema)


async def create(
    url: str, *, unlogged: bool | None = None, pushes: bool | None = None
) -> SchemaState:
    """Create the schema, or update it to this release's version, in one transaction.

    `unlogged` and `pushes` that are left out stay as they are; at first, tables are logged and
    changes are pushed. Returns the state.
    """
    async with _connected(url) as (connection, schema):
        if connection.info.server_version < OLDEST_SERVER:
            raise StoreError(
                f"PostgreSQL 14 or newer is needed; the server's version is "
                f"{connection.info.server_version // 10_000}"
            )
        async with connection.transaction():
            await connection.execute(ONE_AT_A_TIME)
            await _make(connection, schema, unlogged=unlogged, pushes=pushes)
        return await _state(connection, schema)


async def _make(
    connection: PgConnection, schema: str, *, unlogged: bool | None, pushes: bool | None
) -> None:
    before = await _state(connection, schema)
    version = before.version or 0
    if version > VERSION:
        raise StoreError(
            f"the schema {schema} has version {version}, which is newer than this release of "
            f"stillfresh ({VERSION}); update stillfresh"
        )
    name = quoted(schema)
    run = connection.execute
    cursor = await run(b"SELECT to_regnamespace($1)", (name,))
    row = await cursor.fetchone()
    if row is None or row[0] is None:  # a role that may not create a schema may use one
        await run(f"CREATE SCHEMA {name}".encode())
    is_unlogged = bool(before.is_unlogged if unlogged is None else unlogged)
    for number in range(version + 1, VERSION + 1):
        await run(tables(number, schema, unlogged=is_unlogged).encode())
    if version and is_unlogged != before.is_unlogged:
        for table in ("entry", "tag", "epoch"):
            kind = "UNLOGGED" if is_unlogged else "LOGGED"
            await run(f"ALTER TABLE {name}.{table} SET {kind}".encode())
    if pushes is None:
        pushes = before.pushes is not False
    statement = f"UPDATE {name}.setting SET version = $1, is_unlogged = $2, pushes = $3"  # noqa: S608 (checked)
    await run(statement.encode(), (VERSION, is_unlogged, pushes))
    await run(steps(schema, pushes=pushes).encode())


async def _state(connection: PgConnection, schema: str) -> SchemaState:
    try:
        async with connection.transaction():
            cursor = await connection.execute(SETTINGS.format(schema=quoted(schema)).encode())
            row = await cursor.fetchone()
    except (InvalidSchemaName, UndefinedTable):
        row = None
    if row is None:
        return SchemaState(schema)
    return SchemaState(schema, *row[:3])


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[tuple[PgConnection, str]]:
    hosts, options = options_of(url)
    schema = checked_schema(options.get("schema", SCHEMA))
    try:
        connection = await connected_to(hosts, PATIENCE)
        try:
            yield connection, schema
        finally:
            await connection.close()
    except LOST as exc:
        raise refused(exc, schema) from exc
