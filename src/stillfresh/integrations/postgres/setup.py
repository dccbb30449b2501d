"""Creates and drops an outbox in a database, and shows its consumers."""

import difflib
from typing import Final

from stillfresh.errors import ConfigError, shown
from stillfresh.integrations.postgres.database import OutboxLink, connected
from stillfresh.integrations.postgres.rules import (
    Tables,
    columns_of,
    outbox_sql,
    quoted_table,
    templates_of,
)

TYPES: Final = ("smallint", "integer", "bigint", "text", "character varying", "uuid")
"""Types of columns in a tag, whose text in the database equals Python's `str`.

A trigger sees no value in a virtual generated column of any type.
"""
ONE_AT_A_TIME: Final = """
BEGIN; SET LOCAL lock_timeout = '5s'; SELECT pg_advisory_xact_lock(hashtext('stillfresh_outbox'))"""

TABLE: Final = """
SELECT c.oid, c.relkind FROM pg_class c WHERE c.oid = to_regclass(%s)"""
COLUMNS: Final = """
SELECT a.attname, CASE a.attgenerated WHEN 'v' THEN 'virtual' ELSE
    format_type(coalesce(nullif(t.typbasetype, 0), t.oid), NULL) END
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""
LAGS: Final = """
SELECT name, extract(epoch FROM statement_timestamp() - caught_up_at)::float8
FROM stillfresh_outbox.consumer ORDER BY name"""


async def create_outbox(database: str, tables: Tables) -> None:
    """Create the outbox, and triggers on these tables; drop its triggers on all other tables.

    Changes nothing if everything is in place. Raises ConfigError for an unknown table or column.
    """
    sql = outbox_sql(tables)
    async with connected(database) as link:
        names: dict[int, str] = {}
        for table, templates in tables.items():
            oid = await _checked_oid(link, table, templates_of(table, templates))
            first_name = names.setdefault(oid, table)
            if first_name != table:
                raise ConfigError(
                    f"table {shown(table)}: is the same as {shown(first_name)}; name it once"
                )
        await link.ask(ONE_AT_A_TIME)
        await link.ask(sql)
        await link.ask("COMMIT")


async def drop_outbox(database: str) -> None:
    """Drop the triggers, the outbox and the positions of its consumers."""
    async with connected(database) as link:
        await link.ask(ONE_AT_A_TIME)
        await link.ask("DROP SCHEMA IF EXISTS stillfresh_outbox CASCADE")
        await link.ask("COMMIT")


async def consumer_lags(database: str) -> dict[str, float]:
    """Return how many seconds each consumer is behind: all older commits were delivered."""
    async with connected(database) as link:
        return dict(await link.ask(LAGS))


async def _checked_oid(link: OutboxLink, table: str, templates: list[str]) -> int:
    """The table's number in the database. Raises ConfigError if it cannot have these tags."""
    rows = await link.ask(TABLE, quoted_table(table))
    if not rows:
        raise ConfigError(
            f"table {shown(table)}: there is none in this database that this user sees; write "
            "schema.table if it is in another schema"
        )
    [(oid, kind)] = rows
    if kind not in {"r", "p"}:
        raise ConfigError(f"table {shown(table)}: is not a table; name tables, not views")
    columns: dict[str, str] = dict(await link.ask(COLUMNS, oid))
    for template in templates:
        for column in columns_of(table, template):
            _check_column(table, template, column, columns)
    return int(oid)


def _check_column(table: str, template: str, column: str, columns: dict[str, str]) -> None:
    subject = (
        f"table {shown(table)}: the template {shown(template)} names the column {shown(column)}"
    )
    if column not in columns:
        near = difflib.get_close_matches(column, columns, 1) or [", ".join(columns)]
        raise ConfigError(f"{subject}, which is not there; did you mean: {near[0]}")
    if columns[column] not in TYPES:
        raise ConfigError(
            f"{subject}, of type {columns[column]}, whose text differs from Python's; "
            f"allowed are {', '.join(TYPES)}"
        )
