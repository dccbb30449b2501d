"""Short forms of the commonest steps, for one key each; nothing here runs SQL.

The functions of `steps.sql` take arrays, tags and conditions, and cost the server several times as
much as a plain statement. A short form does the same in the plain case, under the same conditions,
in one statement. In any other case it does nothing and returns no row: then the function is called,
which does the step or says why not.

A put that was stored before is not recognised here: its row has changed after the stamp that the
put carries. So nothing is done, and the function says that it was stored.

`ON CONFLICT DO UPDATE` locks the row before it looks at its condition and draws the stamp, so it
sees what was committed last, as the functions do. Each statement names its function for those who
look into `pg_stat_activity`.

A deletion of nothing leaves an empty row, which fences late messages. Its transaction need not wait
for the disk: a crash that loses the row also ends the server's life, and messages of an earlier
life do nothing.
"""

from base64 import b64encode
from typing import Any, Final, NamedTuple

from stillfresh.stores.contract import UNREAD, Copy, Put, When
from stillfresh.stores.postgres.schema import EMPTIED, EMPTY, FIELDS, REPLACED, quoted

READ: Final = f"""/* {{name}}.read() of one key */ SELECT * FROM (
    SELECT {FIELDS}, CASE WHEN e.generation = $1 THEN NULL ELSE e.value END
    FROM {{schema}}.entry e WHERE e.kind = $2 AND e.key = $3 AND NOT {EMPTY}) s"""  # noqa: S608 (our own texts)
_TIME: Final = "coalesce({}::float8, extract(epoch FROM clock_timestamp())::float8)"
_IS_KNOWN: Final = """EXISTS (SELECT FROM {{schema}}.life l WHERE l.is_only AND l.number = {life})
    AND {as_of} <= coalesce(pg_sequence_last_value('{{schema}}.stamps'), 0)"""
"""The sender's stamp is one of the present life."""
_NEWS: Final = "CASE WHEN {news}::text IS NOT NULL THEN pg_notify('{{name}}', {news}::text) END"
PUT: Final = f"""/* {{name}}.put() of one key */ WITH done AS (
    INSERT INTO {{schema}}.entry AS e (kind, key, generation, fetched_at, fresh_for, stale_for,
        error_for, mark, value, changed, changed_at)
    SELECT $1, $2, $3, $4::float8, $5::float8, $6::float8, $7::float8, $8::int2, $9::bytea,
        nextval('{{schema}}.stamps'), {_TIME.format("$10")}
    WHERE {_IS_KNOWN.format(life="$11::int8", as_of="$12::int8")}
        AND {_TIME.format("$10")} <= $13::float8
    ON CONFLICT (kind, key) DO UPDATE SET id = NULL, generation = excluded.generation,
        fetched_at = excluded.fetched_at, fresh_for = excluded.fresh_for,
        stale_for = excluded.stale_for, error_for = excluded.error_for, mark = excluded.mark,
        value = excluded.value, token = NULL, held_until = NULL, failures = NULL, retry_at = NULL,
        error = NULL, replaced = {REPLACED}, changed = nextval('{{schema}}.stamps'),
        changed_at = excluded.changed_at
    WHERE e.changed <= $12::int8 AND e.version IS NULL
    RETURNING e.key, e.changed, e.changed_at
), untagged AS (
    DELETE FROM {{schema}}.tag x USING done d WHERE x.kind = $1 AND x.key = $2
        AND CASE WHEN x.late THEN $14::boolean ELSE $15::boolean END
)
SELECT * FROM (
    SELECT d.key, 'stored'::text, NULL::bytea, d.changed, NULL::int8, d.changed_at,
        {_NEWS.format(news="$16")}
    FROM done d) s"""  # noqa: S608 (our own texts)
DELETE: Final = f"""/* {{name}}.delete() of one key */ WITH before AS (
    SELECT NOT EXISTS (SELECT FROM {{schema}}.entry e
        WHERE e.kind = $1 AND e.key = $2 AND NOT {EMPTY}) AS was_empty
), done AS (
    INSERT INTO {{schema}}.entry AS e (kind, key, changed, changed_at)
    SELECT $1, $2, nextval('{{schema}}.stamps'), {_TIME.format("$3")}
    WHERE {_IS_KNOWN.format(life="$4::int8", as_of="$5::int8")}
    ON CONFLICT (kind, key) DO UPDATE SET id = NULL, {EMPTIED},
        changed = nextval('{{schema}}.stamps'), changed_at = excluded.changed_at
    WHERE e.changed <= $5::int8
    RETURNING e.changed
), untagged AS (
    DELETE FROM {{schema}}.tag x USING done d WHERE x.kind = $1 AND x.key = $2
)
SELECT * FROM (
    SELECT d.changed, {_NEWS.format(news="$6")},
        CASE WHEN b.was_empty THEN set_config('synchronous_commit', 'off', true) END
    FROM done d, before b) s"""  # noqa: S608 (our own texts)


class StampFence(NamedTuple):
    """What a put carries, so that it does nothing to later changes."""

    life: int | None
    as_of: int
    good_until: float


class ShortForms:
    """The short forms for one schema."""

    def __init__(self, schema: str) -> None:
        names = {"schema": quoted(schema), "name": schema}
        self.read = READ.format(**names)
        self.put = PUT.format(**names)
        self.delete = DELETE.format(**names)


def is_plain(put: Put) -> bool:
    """True if the short form may do it: no condition, no tags to write, no version."""
    return (
        put.when is When.ALWAYS
        and not put.tags
        and not put.late
        and not put.copy.version
        and put.copy.value is not UNREAD
    )


def put_arguments(
    kind: bytes, key: bytes, put: Put, fence: StampFence, *, now: float | None
) -> list[Any]:
    """The parameters of `put`, but for the news."""
    copy: Copy = put.copy
    return [
        kind,
        key,
        copy.generation,
        float(copy.fetched_at),
        copy.policy.fresh_for,
        copy.policy.stale_for,
        copy.policy.error_for,
        int(copy.mark),
        copy.value,
        now,
        *fence,
        put.late is not None,
        put.tags is not None,
    ]


def news_of(kind: bytes, key: bytes, generation: str | None = None) -> str:
    """A notification of one line, as the functions send it. Without a generation, it is void."""
    line = f"0.{b64encode(kind).decode()} {b64encode(key).decode()}"
    return line if generation is None else f"{line} {generation}"
