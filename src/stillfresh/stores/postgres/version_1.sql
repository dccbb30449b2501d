-- The tables of a PostgreSQL store. One row for each id, with its copy, its lease and its last
-- failure; one for each tag of an id. Times are seconds. Names are bytes, since text cannot hold
-- every id: in the order of bytes they are in the order of Python's strings. An index takes no long
-- names: the key of a long id is its beginning and its hash, and `id` has the whole of it.

CREATE TABLE {schema}.setting (
    version integer NOT NULL,
    is_unlogged boolean NOT NULL,
    pushes boolean NOT NULL
);

INSERT INTO {schema}.setting VALUES (1, false, true);

CREATE {unlogged} TABLE {schema}.entry (
    kind bytea NOT NULL,
    key bytea NOT NULL,
    id bytea,
    generation text,
    fetched_at float8,
    fresh_for float8,
    stale_for float8,
    error_for float8,
    mark int2 NOT NULL DEFAULT 0,
    token text,
    held_until float8,
    failures int8,
    retry_at float8,
    error bytea,
    value bytea,
    PRIMARY KEY (kind, key),
    CHECK (mark BETWEEN 0 AND 2),
    CHECK (num_nulls(generation, fetched_at, fresh_for, stale_for, error_for) IN (0, 5)),
    CHECK (num_nulls(token, held_until) IN (0, 2)),
    CHECK (num_nulls(failures, retry_at, error) IN (0, 3)),
    CHECK (abs(fetched_at) < 'infinity' AND abs(held_until) < 'infinity'
        AND abs(retry_at) < 'infinity')
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);

ALTER TABLE {schema}.entry ALTER COLUMN value SET STORAGE EXTERNAL;

CREATE {unlogged} TABLE {schema}.tag (
    tag bytea NOT NULL,
    kind bytea NOT NULL,
    key bytea NOT NULL,
    late boolean NOT NULL DEFAULT false, -- it came with the copy
    PRIMARY KEY (tag, kind, key, late)
);

CREATE INDEX tag_of ON {schema}.tag (kind, key);

-- When each tag was invalidated last, by the count of such invalidations.
CREATE SEQUENCE {schema}.epochs;

CREATE {unlogged} TABLE {schema}.epoch (
    tag bytea PRIMARY KEY,
    epoch int8 NOT NULL
);

CREATE INDEX epoch_order ON {schema}.epoch (epoch);
