-- Version 2: puts. Every change of an entry takes a stamp, the next number of one sequence, and a
-- put, an invalidation and a deletion carry the newest stamp that their sender has heard: one that
-- arrives after a later change does nothing (docs/stores.md).

-- The functions of version 1 that return something else now, or do. Those of version 2 take other
-- arguments, if only in another order: a process of the old release that is still connected gets an
-- error, and does not misread an answer.
DROP FUNCTION IF EXISTS {schema}.read(bytea, bytea[], text[]);
DROP FUNCTION IF EXISTS {schema}.acquire(bytea, bytea[], bytea[], text[], int8[], boolean[], bytea[], bytea[],
    text, float8, float8);
DROP FUNCTION IF EXISTS {schema}.forget_empty(bytea, bytea[]);
DROP FUNCTION IF EXISTS {schema}.publish(bytea, bytea[], text[], text[], float8[], float8[], float8[], float8[],
    int2[], bytea[], int8[], boolean[], bytea[], bytea[], boolean, float8);
DROP FUNCTION IF EXISTS {schema}.invalidate(bytea[], bytea[], bytea[], int2);
DROP FUNCTION IF EXISTS {schema}.invalidate_tag(bytea, bytea, int2, bytea, bytea, int);
DROP FUNCTION IF EXISTS {schema}.delete(bytea, bytea[], bytea[]);
DROP FUNCTION IF EXISTS {schema}.evict(float8, bytea, bytea, int);
DROP FUNCTION IF EXISTS {schema}.last_epoch();

CREATE SEQUENCE {schema}.stamps;

-- `changed` is the stamp of the last change, `changed_at` its time. `replaced` has the beginnings of the
-- last generations that were replaced, the latest first. `version` is that of the value, if it has one.
ALTER TABLE {schema}.entry
    ADD COLUMN version bytea,
    ADD COLUMN changed int8 NOT NULL DEFAULT 0,
    ADD COLUMN changed_at float8 NOT NULL DEFAULT 0,
    ADD COLUMN replaced text NOT NULL DEFAULT '',
    ADD CHECK (substr(version, 1, 1) = 'i' AND octet_length(version) = 9
        OR substr(version, 1, 1) = 't' AND octet_length(version) <= 256);

-- A tag's epoch is a stamp as well. Loads of version 1, which counted otherwise, publish nothing more.
TRUNCATE {schema}.epoch;
DROP SEQUENCE {schema}.epochs;

-- A number that is drawn anew where stamps may have been lost: it is not in the log, so it is gone after a
-- crash and on a standby that takes over. A stamp means nothing in another life.
CREATE UNLOGGED TABLE {schema}.life (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    number int8 NOT NULL
);

INSERT INTO {schema}.life (number)
VALUES (('x' || left(md5(gen_random_uuid()::text), 16))::bit(64)::int8);
