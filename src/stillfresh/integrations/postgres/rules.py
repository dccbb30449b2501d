"""From tables and tag templates to the SQL of an outbox. Pure: text in, text out.

`changed` has a row for each tag that a statement made stale, with the number of its transaction
(`xid`); the empty tag stands for everything. `consumer` has a row for each consumer: `seen` is the
snapshot whose transactions it has delivered, all of them and no others. So the order of commits
does not matter, and neither does a transaction that stays open: its rows are those that `seen`
does not contain when they appear.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Final, TypeAlias

from stillfresh.engine import MAX_TAGS
from stillfresh.errors import ConfigError, shown

Tables: TypeAlias = Mapping[str, str | Sequence[str]]
"""Tag templates by table: `{"products": "product:{id}"}`, or several templates in a list."""

NAME: Final = r'(?:"(?:[^"\0]|"")+"|[^\W\d][\w$]*)'
TABLE: Final = re.compile(rf"({NAME})(?:\.({NAME}))?")
QUOTE: Final = "$stillfresh"
"""Begins the quotes of the SQL below."""
KEPT: Final = "1 hour"
"""A consumer that was last caught up longer ago is dropped, and begins with everything stale."""
KEPT_BY_WRITERS: Final = "2 hours"
"""Writers replace older rows by "everything is stale", in slices.

One write in a thousand does so (one in a hundred if it has ten rows), because finding old rows may
mean to pass deleted rows that are not vacuumed yet. It drops twice the rows added since.
"""

SETUP: Final = """\
DO $stillfresh_setup$ BEGIN
IF current_setting('server_encoding') = 'SQL_ASCII' THEN
    RAISE 'the encoding of this database is SQL_ASCII: nobody knows what its tags read';
END IF;
IF to_regclass('stillfresh_outbox.consumer') IS NOT NULL THEN
    RETURN;
END IF;
CREATE SCHEMA stillfresh_outbox;
CREATE TABLE stillfresh_outbox.changed (
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    number bigint GENERATED ALWAYS AS IDENTITY,
    tag text NOT NULL,
    at timestamptz NOT NULL DEFAULT statement_timestamp()
);
CREATE INDEX changed_in_order ON stillfresh_outbox.changed (xid, number);
CREATE TABLE stillfresh_outbox.consumer (
    name text PRIMARY KEY,
    seen pg_snapshot,
    system bigint NOT NULL,
    caught_up_at timestamptz NOT NULL DEFAULT statement_timestamp()
);
END $stillfresh_setup$;
"""

FUNCTION: Final = """\
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $stillfresh$
DECLARE told bigint;
BEGIN
    CASE TG_OP
    WHEN 'INSERT' THEN
        INSERT INTO stillfresh_outbox.changed (tag) SELECT DISTINCT tag FROM ({new}) tags;
    WHEN 'UPDATE' THEN
        INSERT INTO stillfresh_outbox.changed (tag) SELECT tag FROM ({old} UNION {new}) tags;
    WHEN 'DELETE' THEN
        INSERT INTO stillfresh_outbox.changed (tag) SELECT DISTINCT tag FROM ({old}) tags;
    ELSE
        INSERT INTO stillfresh_outbox.changed (tag) VALUES ('');
    END CASE;
    GET DIAGNOSTICS told = ROW_COUNT;
    IF told = 0 THEN
        RETURN NULL;
    END IF;
    IF current_setting('stillfresh.notify', true) IS DISTINCT FROM 'off' THEN
        PERFORM pg_notify('stillfresh_outbox', '');
    END IF;
    IF random() < told / 1000.0 AND current_setting('transaction_isolation') = 'read committed'
        AND statement_timestamp() > interval '{kept}'
        + (SELECT at FROM stillfresh_outbox.changed ORDER BY xid, number LIMIT 1)
    THEN
        WITH dropped AS (DELETE FROM stillfresh_outbox.changed WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM stillfresh_outbox.changed ORDER BY xid, number
            LIMIT 2000 + 2 * told FOR UPDATE SKIP LOCKED)) RETURNING 1)
        INSERT INTO stillfresh_outbox.changed (tag) SELECT '' FROM dropped LIMIT 1;
    END IF;
    RETURN NULL;
END $stillfresh$"""

TRIGGERS: Final = {
    "INSERT": "REFERENCING NEW TABLE AS new_rows",
    "UPDATE": "REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows",
    "DELETE": "REFERENCING OLD TABLE AS old_rows",
    "TRUNCATE": "",
}

TRIGGERED: Final = """\
DO $stillfresh_table$ BEGIN
IF (SELECT count(*) FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid
    WHERE tgrelid = {table_text}::regclass AND tgenabled <> 'D'
    AND pronamespace = 'stillfresh_outbox'::regnamespace AND proname = '{name}') < {count}
THEN
CREATE OR REPLACE FUNCTION stillfresh_outbox.{name}() {body};
REVOKE ALL ON FUNCTION stillfresh_outbox.{name}() FROM PUBLIC;
{triggers}
INSERT INTO stillfresh_outbox.changed (tag) VALUES ('');
PERFORM pg_notify('stillfresh_outbox', '');
END IF;
END $stillfresh_table$;
"""

OTHERS_DROPPED: Final = """\
DO $stillfresh_others$ DECLARE other regprocedure; BEGIN
FOR other IN SELECT oid FROM pg_proc WHERE pronamespace = 'stillfresh_outbox'::regnamespace
    AND proname <> ALL ('{{{names}}}') LOOP
    EXECUTE pg_catalog.format('DROP FUNCTION %s CASCADE', other);
END LOOP;
END $stillfresh_others$;
"""


TAGS: Final = """\
SELECT t.tag FROM {} AS r, LATERAL (VALUES {}) AS t (tag) WHERE octet_length(t.tag) <= {}"""


def outbox_sql(tables: Tables) -> str:
    """Return the SQL that creates an outbox for these tables, for a migration tool.

    Run it in one transaction. It can be run again: tables whose templates changed get new triggers,
    and tables that are left out lose theirs.
    """
    functions = [
        _trigger_sql(table, templates_of(table, templates)) for table, templates in tables.items()
    ]
    names = ",".join(name for name, _ in functions)
    return SETUP + "".join(sql for _, sql in functions) + OTHERS_DROPPED.format(names=names)


def _trigger_sql(table: str, templates: Sequence[str]) -> tuple[str, str]:
    """The name of the table's function, which contains a hash of its text, and the SQL."""
    quoted = quoted_table(table)
    values = ", ".join(f"({_value(template)})" for template in templates)
    new = TAGS.format("new_rows", values, MAX_TAGS)
    old = TAGS.format("old_rows", values, MAX_TAGS)
    body = FUNCTION.format(new=new, old=old, kept=KEPT_BY_WRITERS)
    name = "changed_" + hashlib.sha256(f"{quoted} {body}".encode()).hexdigest()[:16]
    triggers = "\n".join(
        f"CREATE OR REPLACE TRIGGER stillfresh_{what.lower()}_{name[8:]} AFTER {what} ON {quoted} "
        f"{rows} FOR EACH STATEMENT EXECUTE FUNCTION stillfresh_outbox.{name}();"
        for what, rows in TRIGGERS.items()
    )
    sql = TRIGGERED.format(
        table_text=_literal(quoted), name=name, body=body, triggers=triggers, count=len(TRIGGERS)
    )
    return name, sql


def covers(seen: str, earlier: str) -> bool:
    """Whether all transactions that had ended in the snapshot `earlier` had ended in `seen`."""
    end, running = _snapshot(seen)
    earlier_end, earlier_running = _snapshot(earlier)
    still_running = {xid for xid in running if xid < earlier_end}
    return earlier_end <= end and still_running <= earlier_running


def has_ended(xid: int, seen: str) -> bool:
    """Whether this transaction had ended in the snapshot `seen`."""
    end, running = _snapshot(seen)
    return xid < end and xid not in running


def is_yet_to_begin(xid: int, now: str) -> bool:
    """Whether no transaction of this number had begun in the snapshot `now`."""
    end, _ = _snapshot(now)
    return xid >= end


def _snapshot(text: str) -> tuple[int, set[int]]:
    """Read PostgreSQL's `xmin:xmax:running`: the end, and the transactions that still ran."""
    _, end, running = text.split(":")
    if not running:
        return int(end), set()
    return int(end), {int(xid) for xid in running.split(",")}


def templates_of(table: str, given: object) -> list[str]:
    """One template or several, each checked."""
    templates = [given] if isinstance(given, str) else given
    if not isinstance(templates, list | tuple) or not templates:
        raise ConfigError(
            f"table {shown(table)}: its tags are a template such as 'product:{{id}}', or a list of "
            f"them, not {shown(given)}"
        )
    for template in templates:
        columns_of(table, template)
    return list(templates)


def columns_of(table: str, template: object) -> list[str]:
    """The columns that a template names. Raises ConfigError if it cannot be used."""
    subject = f"table {shown(table)}: the template {shown(template)}"
    try:
        parts = list(_parts(template)) if isinstance(template, str) else []
    except ValueError as exc:
        raise ConfigError(f"{subject}: {exc}; write columns as {{id}}") from None
    if not any(text for text, _ in parts):
        raise ConfigError(f"{subject}: write a name and then columns, as 'product:{{id}}'")
    if QUOTE in str(template) or "\0" in str(template):
        raise ConfigError(f"{subject}: may hold neither {QUOTE} nor a zero byte")
    return [column for _, column in parts if column is not None]


def quoted_table(table: object) -> str:
    """The name for SQL: folded and quoted."""
    match = TABLE.fullmatch(table) if isinstance(table, str) else None
    if match is None or QUOTE in match[0]:
        raise ConfigError(
            f"table {shown(table)}: write a table's name as SQL has it: products, shop.products "
            'or shop."Products"'
        )
    parts = [part for part in match.groups() if part is not None]
    return ".".join(part if part.startswith('"') else f'"{part.lower()}"' for part in parts)


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    """Pairs of text and the column after it, as `str.format` splits them."""
    for text, column, options, conversion in Formatter().parse(template):
        if column == "" or options or conversion:
            raise ValueError("columns have a name and nothing else in their braces")
        yield text, column


def _value(template: str) -> str:
    """The tag of row `r` in SQL; NULL if a column is. Compared byte by byte, as in the cache."""
    operands: list[str] = []
    for text, column in _parts(template):
        if text:
            operands.append(_literal(text))
        if column:
            operands.append(f"r.{_identifier(column)}::text")
    return '({}) COLLATE "C"'.format(" || ".join(operands))


def _literal(text: str) -> str:
    """A literal that is right for any `standard_conforming_strings` of the session."""
    escaped = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{escaped}'"


def _identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
