-- What `stillfresh table create` ran at version 1 of the schema, in the last release that had it.

-- The tables of a PostgreSQL store (S11). One row for each id, with its copy, its lease and its last
-- failure; one for each tag of an id. Times are seconds. Names are bytes, since text cannot hold
-- every id: in the order of bytes they are in the order of Python's strings. An index takes no long
-- names: the key of a long id is its beginning and its hash, and `id` has the whole of it.

CREATE TABLE "old_release".setting (
    version integer NOT NULL,
    is_unlogged boolean NOT NULL,
    pushes boolean NOT NULL
);

INSERT INTO "old_release".setting VALUES (1, false, true);

CREATE  TABLE "old_release".entry (
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

ALTER TABLE "old_release".entry ALTER COLUMN value SET STORAGE EXTERNAL;

CREATE  TABLE "old_release".tag (
    tag bytea NOT NULL,
    kind bytea NOT NULL,
    key bytea NOT NULL,
    late boolean NOT NULL DEFAULT false, -- I26: it came with the copy
    PRIMARY KEY (tag, kind, key, late)
);

CREATE INDEX tag_of ON "old_release".tag (kind, key);

-- I26: when each tag was invalidated last, by the count of such invalidations.
CREATE SEQUENCE "old_release".epochs;

CREATE  TABLE "old_release".epoch (
    tag bytea PRIMARY KEY,
    epoch int8 NOT NULL
);

CREATE INDEX epoch_order ON "old_release".epoch (epoch);

-- The store's atomic steps, functions that the server runs: each call is one statement (S2, S11).
--
-- So no client holds a lock while it thinks, or while it is paused. A step locks its rows, in the
-- order of their keys, so that no two steps wait for each other; then it reads the clock; then it
-- looks and writes. Each statement of a function sees what was committed before it began, and what
-- a step has locked nobody else changes.
--
-- The token is the fence, compared in the step that writes; its time only permits a takeover. A
-- token is made here, of what its asker drew and what the server draws: an `acquire` that is done
-- late or twice never grants the same one again, and one that is sent again finds its lease by its
-- asker (S8).
--
-- I26: an invalidation by tag and a publication that tells the tag come one after the other, by a
-- lock of that tag, which is taken before those of rows. Tags share locks: a server has room for few.
--
-- No wait for a lock is long (a client that left would go on waiting), and no plan reads all rows. None
-- is compiled: up to version 17, forbidding a plan makes it look so costly that it would be, each time.

CREATE OR REPLACE FUNCTION "old_release".clock(given float8) RETURNS float8 LANGUAGE sql VOLATILE
AS $$ SELECT coalesce($1, extract(epoch FROM clock_timestamp())::float8) $$;

CREATE OR REPLACE FUNCTION "old_release".base64(bytea) RETURNS text LANGUAGE sql IMMUTABLE
AS $$ SELECT translate(encode($1, 'base64'), E'\n', '') $$;

-- A line of news: a kind and an id, and the generation that was published; without one it is void.
-- A line with one field is a tag.
CREATE OR REPLACE FUNCTION "old_release".news(kind bytea, id bytea, generation text) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$ SELECT "old_release".base64($1) || ' ' || "old_release".base64($2) || coalesce(' ' || $3, '') $$;

-- S10: in pieces, since a notification has less than 8,000 bytes. They are numbered: the server
-- drops the second of two that are the same.
CREATE OR REPLACE FUNCTION "old_release".tell(news text) RETURNS void LANGUAGE plpgsql
AS $$
DECLARE
    bytes bytea := convert_to(news, 'UTF8'); -- of text every piece would be counted from the start
    last int := (length(bytes) - 1) / 7000;
BEGIN
    IF true THEN
        FOR at IN 0 .. coalesce(last, -1) LOOP
            PERFORM pg_notify('old_release', at || CASE WHEN at < last THEN '+' ELSE '.' END
                || convert_from(substr(bytes, at * 7000 + 1, 7000), 'UTF8'));
        END LOOP;
    END IF;
END $$;

CREATE OR REPLACE FUNCTION "old_release".lock_of(tag bytea) RETURNS int8 LANGUAGE sql IMMUTABLE
AS $$ SELECT hashtextextended('old_release ' || (get_byte(decode(md5($1), 'hex'), 0) & 31), 0) $$;

CREATE OR REPLACE FUNCTION "old_release".last_epoch() RETURNS int8 LANGUAGE sql VOLATILE
AS $$ SELECT coalesce(pg_sequence_last_value('"old_release".epochs'), 0) $$;

CREATE OR REPLACE FUNCTION "old_release".read(in_kind bytea, in_keys bytea[], in_known text[])
RETURNS TABLE (key bytea, generation text, fetched_at float8, fresh_for float8,
    stale_for float8, error_for float8, mark int2, held_until float8, failures int8,
    retry_at float8, error bytea, is_absent boolean, value bytea)
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT e.key, e.generation, e.fetched_at, e.fresh_for, e.stale_for, e.error_for, e.mark,
    e.held_until, e.failures, e.retry_at, e.error, e.value IS NULL, CASE WHEN e.generation = g.known THEN NULL ELSE e.value END
    FROM unnest(in_keys, in_known) g (key, known), LATERAL (SELECT * FROM "old_release".entry e
        WHERE e.kind = in_kind AND e.key = g.key OFFSET 0) e; -- a join may read all of the kind
END $$;

CREATE OR REPLACE FUNCTION "old_release".acquire(in_kind bytea, in_keys bytea[], in_ids bytea[],
    in_seen text[], in_failures int8[], in_take_over boolean[], in_tags bytea[],
    in_tagged bytea[], in_asker text, in_lease_for float8, in_now float8)
RETURNS TABLE (outcome text, token text, epoch int8, key bytea, generation text, fetched_at float8, fresh_for float8,
    stale_for float8, error_for float8, mark int2, held_until float8, failures int8,
    retry_at float8, error bytea, is_absent boolean, value bytea)
LANGUAGE plpgsql SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    t float8;
    last_end float8;
    inserted int;
    locked int;
    granted bytea[];
BEGIN
    LOOP
        t := "old_release".clock(in_now);
        INSERT INTO "old_release".entry (kind, key, id, token, held_until)
        SELECT in_kind, g.key, g.id, in_asker || left(replace(gen_random_uuid()::text, '-', ''), 16), t + in_lease_for
        FROM unnest(in_keys, in_ids) g (key, id) ORDER BY g.key
        ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS inserted = ROW_COUNT;
        PERFORM 1 FROM "old_release".entry e WHERE e.kind = in_kind AND e.key = ANY (in_keys)
        ORDER BY e.key FOR UPDATE;
        GET DIAGNOSTICS locked = ROW_COUNT;
        EXIT WHEN locked = cardinality(in_keys); -- else one was deleted meanwhile
    END LOOP;
    t := "old_release".clock(in_now);
    last_end := t + greatest(in_lease_for, 120.0) + 5.0;
    UPDATE "old_release".entry e SET token = in_asker || left(replace(gen_random_uuid()::text, '-', ''), 16), held_until = t + in_lease_for
    FROM unnest(in_keys, in_seen, in_failures, in_take_over) g (key, seen, failures, take_over)
    WHERE e.kind = in_kind AND e.key = g.key
        AND (e.token IS NULL OR NOT starts_with(e.token, in_asker) OR e.held_until <= t)
        AND (e.generation IS NULL OR e.generation = g.seen)
        AND (g.take_over OR e.token IS NULL OR e.held_until <= t OR e.held_until > last_end)
        AND (g.failures IS NULL OR e.failures IS NULL OR e.failures = g.failures);
    SELECT array_agg(e.key) INTO granted FROM "old_release".entry e
    WHERE e.kind = in_kind AND e.key = ANY (in_keys)
        AND starts_with(e.token, in_asker) AND e.held_until > t;
    IF inserted < locked THEN -- the tags of the last lease, and those that came with the copy
        DELETE FROM "old_release".tag x WHERE x.kind = in_kind AND x.key = ANY (granted) AND NOT x.late
            AND NOT EXISTS (SELECT FROM unnest(in_tags, in_tagged) g (tag, key)
                WHERE g.tag = x.tag AND g.key = x.key);
    END IF;
    INSERT INTO "old_release".tag (tag, kind, key)
    SELECT g.tag, in_kind, g.key FROM unnest(in_tags, in_tagged) g (tag, key)
    WHERE g.key = ANY (granted) ON CONFLICT DO NOTHING;
    RETURN QUERY SELECT o.outcome, e.token, "old_release".last_epoch(), e.key, e.generation, e.fetched_at, e.fresh_for, e.stale_for, e.error_for, e.mark,
    e.held_until, e.failures, e.retry_at, e.error, e.value IS NULL,
        CASE WHEN o.outcome = 'newer' THEN e.value END
    FROM unnest(in_keys, in_seen, in_take_over) g (key, seen, take_over)
    JOIN "old_release".entry e ON e.kind = in_kind AND e.key = g.key,
    LATERAL (SELECT CASE
        WHEN starts_with(e.token, in_asker) AND e.held_until > t THEN 'lease'
        WHEN e.generation IS NOT NULL AND e.generation IS DISTINCT FROM g.seen THEN 'newer'
        WHEN NOT g.take_over AND e.held_until > t AND e.held_until <= last_end THEN 'held'
        ELSE 'newer' END) o (outcome);
END $$;

CREATE OR REPLACE FUNCTION "old_release".forget_empty(in_kind bytea, in_keys bytea[])
RETURNS void LANGUAGE sql
AS $$
    WITH gone AS (
        DELETE FROM "old_release".entry e WHERE e.kind = in_kind AND e.key = ANY (in_keys) AND e.generation IS NULL AND e.token IS NULL AND e.failures IS NULL
        RETURNING e.kind, e.key
    )
    DELETE FROM "old_release".tag x USING gone g WHERE x.kind = g.kind AND x.key = g.key;
$$;

-- I26: an id with a tag that was invalidated since its lease was granted is past: its lease ends.
-- Returns what was published; `in_again`: also by the same call, whose answer got lost.
CREATE OR REPLACE FUNCTION "old_release".publish(in_kind bytea, in_keys bytea[], in_tokens text[],
    in_generations text[], in_fetched_at float8[], in_fresh_for float8[], in_stale_for float8[],
    in_error_for float8[], in_marks int2[], in_values bytea[], in_epochs int8[], in_told boolean[],
    in_tags bytea[], in_tagged bytea[], in_again boolean, in_now float8)
RETURNS SETOF bytea
LANGUAGE plpgsql SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    t float8;
    published bytea[];
    past bytea[];
    news text;
BEGIN
    PERFORM pg_advisory_xact_lock_shared(g.lock)
    FROM (SELECT DISTINCT "old_release".lock_of(tag) AS lock FROM unnest(in_tags) s (tag) ORDER BY lock) g;
    PERFORM 1 FROM "old_release".entry e WHERE e.kind = in_kind AND e.key = ANY (in_keys)
    ORDER BY e.key FOR UPDATE;
    IF cardinality(in_tags) > 0 THEN
        SELECT array_agg(DISTINCT g.key) INTO past
        FROM unnest(in_keys, in_epochs) g (key, epoch) JOIN unnest(in_tags, in_tagged) s (tag, key)
            USING (key) LEFT JOIN "old_release".epoch x ON x.tag = s.tag
        WHERE x.epoch > g.epoch OR g.epoch < "old_release".last_epoch() - 1000;
        UPDATE "old_release".entry e SET token = NULL, held_until = NULL
        FROM unnest(in_keys, in_tokens) g (key, token)
        WHERE e.kind = in_kind AND e.key = g.key AND e.token = g.token AND e.key = ANY (past);
        PERFORM "old_release".forget_empty(in_kind, past);
    END IF;
    t := "old_release".clock(in_now);
    WITH done AS (
        UPDATE "old_release".entry e SET generation = g.generation, fetched_at = g.fetched_at,
            fresh_for = g.fresh_for, stale_for = g.stale_for, error_for = g.error_for,
            mark = g.mark, value = g.value, token = NULL, held_until = NULL, failures = NULL,
            retry_at = NULL, error = NULL
        FROM unnest(in_keys, in_tokens, in_generations, in_fetched_at, in_fresh_for, in_stale_for,
                in_error_for, in_marks, in_values)
            g (key, token, generation, fetched_at, fresh_for, stale_for, error_for, mark, value)
        WHERE e.kind = in_kind AND e.key = g.key AND e.token = g.token AND e.held_until > t
        RETURNING e.key, coalesce(e.id, e.key) AS id, e.generation
    )
    SELECT array_agg(d.key), string_agg("old_release".news(in_kind, d.id, d.generation), E'\n')
    INTO published, news FROM done d;
    DELETE FROM "old_release".tag x USING unnest(in_keys, in_told) g (key, told)
    WHERE x.kind = in_kind AND x.key = g.key AND g.told AND x.late AND x.key = ANY (published);
    INSERT INTO "old_release".tag (tag, kind, key, late)
    SELECT g.tag, in_kind, g.key, true FROM unnest(in_tags, in_tagged) g (tag, key)
    WHERE g.key = ANY (published) ON CONFLICT DO NOTHING;
    PERFORM "old_release".tell(news);
    RETURN QUERY SELECT unnest(published);
    IF in_again THEN
        RETURN QUERY SELECT e.key FROM unnest(in_keys, in_generations) g (key, generation)
        JOIN "old_release".entry e ON e.kind = in_kind AND e.key = g.key AND e.generation = g.generation;
    END IF;
END $$;

CREATE OR REPLACE FUNCTION "old_release".renew(in_kind bytea, in_keys bytea[], in_tokens text[],
    in_lease_for float8, in_now float8)
RETURNS SETOF bytea
LANGUAGE plpgsql SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    t float8;
BEGIN
    PERFORM 1 FROM "old_release".entry e WHERE e.kind = in_kind AND e.key = ANY (in_keys)
    ORDER BY e.key FOR UPDATE;
    t := "old_release".clock(in_now);
    RETURN QUERY UPDATE "old_release".entry e SET held_until = t + in_lease_for
    FROM unnest(in_keys, in_tokens) g (key, token)
    WHERE e.kind = in_kind AND e.key = g.key AND e.token = g.token AND e.held_until > t
    RETURNING e.key;
END $$;

CREATE OR REPLACE FUNCTION "old_release".release(in_kind bytea, in_keys bytea[], in_tokens text[],
    in_failures int8[], in_retry_at float8[], in_errors bytea[])
RETURNS void
LANGUAGE plpgsql SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off
AS $$
BEGIN
    PERFORM 1 FROM "old_release".entry e WHERE e.kind = in_kind AND e.key = ANY (in_keys)
    ORDER BY e.key FOR UPDATE;
    UPDATE "old_release".entry e SET token = NULL, held_until = NULL,
        failures = coalesce(g.failures, e.failures), retry_at = coalesce(g.retry_at, e.retry_at),
        error = coalesce(g.error, e.error)
    FROM unnest(in_keys, in_tokens, in_failures, in_retry_at, in_errors)
        g (key, token, failures, retry_at, error)
    WHERE e.kind = in_kind AND e.key = g.key AND e.token = g.token;
    PERFORM "old_release".forget_empty(in_kind, in_keys);
END $$;

-- Of any kinds, by their order. A mark never goes down.
CREATE OR REPLACE FUNCTION "old_release".invalidate(in_kinds bytea[], in_keys bytea[], in_ids bytea[],
    in_mark int2)
RETURNS void
LANGUAGE plpgsql SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off
AS $$
BEGIN
    PERFORM 1 FROM "old_release".entry e WHERE (e.kind, e.key) IN (SELECT * FROM unnest(in_kinds, in_keys))
    ORDER BY e.kind, e.key FOR UPDATE;
    UPDATE "old_release".entry e SET token = NULL, held_until = NULL,
        mark = CASE WHEN e.generation IS NULL THEN e.mark ELSE greatest(e.mark, in_mark) END
    WHERE (e.kind, e.key) IN (SELECT * FROM unnest(in_kinds, in_keys))
        AND (e.token IS NOT NULL OR e.mark < in_mark);
    WITH gone AS (
        DELETE FROM "old_release".entry e
        WHERE (e.kind, e.key) IN (SELECT * FROM unnest(in_kinds, in_keys)) AND e.generation IS NULL AND e.token IS NULL AND e.failures IS NULL
        RETURNING e.kind, e.key
    )
    DELETE FROM "old_release".tag x USING gone g WHERE x.kind = g.kind AND x.key = g.key;
    PERFORM "old_release".tell(string_agg("old_release".news(g.kind, coalesce(g.id, g.key), NULL), E'\n'))
    FROM unnest(in_kinds, in_keys, in_ids) g (kind, key, id);
END $$;

-- Along the index: where a table is new, sorting all that a tag has looks cheap.
CREATE OR REPLACE FUNCTION "old_release".tagged(in_tag bytea, in_after_kind bytea, in_after_key bytea,
    in_most int)
RETURNS TABLE (kind bytea, key bytea, id bytea)
LANGUAGE sql SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off SET enable_sort = off SET enable_bitmapscan = off
AS $$
    SELECT DISTINCT ON (x.kind, x.key) x.kind, x.key, e.id FROM "old_release".tag x, LATERAL (
        SELECT e.id FROM "old_release".entry e WHERE e.kind = x.kind AND e.key = x.key OFFSET 0) e
    WHERE x.tag = in_tag AND (x.kind, x.key) > (in_after_kind, in_after_key)
    ORDER BY x.kind, x.key LIMIT in_most;
$$;

-- The next ids that have the tag, with all leases that were taken before this began.
CREATE OR REPLACE FUNCTION "old_release".invalidate_tag(in_tag bytea, in_name bytea, in_mark int2,
    in_after_kind bytea, in_after_key bytea, in_most int)
RETURNS TABLE (kind bytea, key bytea, id bytea)
LANGUAGE plpgsql SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    kinds bytea[];
    keys bytea[];
    ids bytea[];
BEGIN
    IF in_after_kind = '' THEN
        PERFORM pg_advisory_xact_lock("old_release".lock_of(in_tag));
        INSERT INTO "old_release".epoch AS x (tag, epoch) VALUES (in_tag, nextval('"old_release".epochs'))
        ON CONFLICT (tag) DO UPDATE SET epoch = excluded.epoch;
        DELETE FROM "old_release".epoch WHERE tag IN (SELECT x.tag FROM "old_release".epoch x
            WHERE x.epoch <= "old_release".last_epoch() - 1000 FOR UPDATE SKIP LOCKED);
        PERFORM "old_release".tell("old_release".base64(in_name));
    END IF;
    SELECT array_agg(s.kind), array_agg(s.key), array_agg(s.id) INTO kinds, keys, ids FROM (
        SELECT * FROM "old_release".tagged(in_tag, in_after_kind, in_after_key, in_most)) s;
    PERFORM "old_release".invalidate(kinds, keys, ids, in_mark);
    RETURN QUERY SELECT * FROM unnest(kinds, keys, ids);
END $$;

CREATE OR REPLACE FUNCTION "old_release".delete(in_kind bytea, in_keys bytea[], in_ids bytea[])
RETURNS void
LANGUAGE plpgsql SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off
AS $$
BEGIN
    PERFORM 1 FROM "old_release".entry e WHERE e.kind = in_kind AND e.key = ANY (in_keys)
    ORDER BY e.key FOR UPDATE;
    DELETE FROM "old_release".tag x WHERE x.kind = in_kind AND x.key = ANY (in_keys);
    DELETE FROM "old_release".entry e WHERE e.kind = in_kind AND e.key = ANY (in_keys);
    PERFORM "old_release".tell(string_agg("old_release".news(in_kind, coalesce(g.id, g.key), NULL), E'\n'))
    FROM unnest(in_keys, in_ids) g (key, id);
END $$;

-- Looks at the next rows. One that somebody has locked is in use.
CREATE OR REPLACE FUNCTION "old_release".evict(in_before float8, in_after_kind bytea,
    in_after_key bytea, in_most int)
RETURNS TABLE (dropped int8, last_kind bytea, last_key bytea)
LANGUAGE plpgsql SET lock_timeout = '5s' SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    kinds bytea[];
    keys bytea[];
    number int8;
BEGIN
    SELECT array_agg(s.kind), array_agg(s.key) INTO kinds, keys FROM (
        SELECT e.kind, e.key FROM "old_release".entry e
        WHERE (e.kind, e.key) > (in_after_kind, in_after_key)
        ORDER BY e.kind, e.key LIMIT in_most) s;
    WITH old AS (
        SELECT e.kind, e.key FROM "old_release".entry e
        WHERE (e.kind, e.key) IN (SELECT * FROM unnest(kinds, keys))
            AND greatest(coalesce(e.held_until, 0), CASE WHEN e.generation IS NULL
                THEN coalesce(e.retry_at, 0)
                ELSE e.fetched_at + (e.fresh_for + greatest(e.stale_for, e.error_for)) END)
                < in_before
        ORDER BY e.kind, e.key FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM "old_release".entry e USING old o WHERE e.kind = o.kind AND e.key = o.key
        RETURNING e.kind, e.key
    ), untagged AS (
        DELETE FROM "old_release".tag x USING gone g WHERE x.kind = g.kind AND x.key = g.key
    )
    SELECT count(*) INTO number FROM gone;
    RETURN QUERY SELECT number, kinds[in_most], keys[in_most];
END $$;
