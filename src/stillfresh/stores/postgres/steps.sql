-- The store's atomic steps, functions that the server runs: each call is one statement.
--
-- So no client holds a lock while it thinks, or while it is paused. A step locks its rows, or inserts
-- them, one after the other in the order of their keys, so that no two steps wait for each other;
-- then it looks and writes. Each statement of a function sees what was committed before it began, and
-- what a step has locked nobody else changes.
--
-- The token is the fence, compared in the step that writes; its time only permits a takeover. A
-- token is made here, of what its asker drew and what the server draws: an `acquire` that is done
-- late or twice never grants the same one again, and one that is sent again finds its lease by its
-- asker.
--
-- A put, an invalidation and a deletion have no token. Their fence is the stamp: every change of a
-- row takes the next number of the sequence `stamps` while the row is locked, and they carry `in_as_of`,
-- the newest stamp that their sender has heard, and the life in which it was. A row that has changed
-- since then is left alone, and its sender is told the newest stamp to ask again with. So a statement
-- that is done late, or twice, or after its sender gave up, does nothing to what came after it. Too low
-- a stamp is safe and costs a round trip; one of another life, or one that was never given out, is none.
-- For this a row outlives what it says: a deletion, and an invalidation of nothing, leave an empty
-- row with their stamp, which `evict` drops after a while. A put without a row is done only until
-- `in_good_until`, which is sooner than that. A copy also changes by its age: a put on the condition
-- that there is no live copy must be sent after the copy's end, or the copy may have refused it before.
--
-- An invalidation by tag and a publication or put with the tag come one after the other, by a
-- lock of that tag, which is taken before those of rows. Tags share locks: a server has room for few.
--
-- No wait for a lock is long (a client that left would go on waiting), and no plan reads all rows. None
-- is compiled: up to version 17, forbidding a plan makes it look so costly that it would be, each time.
-- Each is made once: for arrays the server would otherwise plan anew at every call, as long as it runs.

CREATE OR REPLACE FUNCTION {schema}.clock(given float8) RETURNS float8 LANGUAGE sql VOLATILE
AS $$ SELECT coalesce($1, extract(epoch FROM clock_timestamp())::float8) $$;

-- The present transaction does not wait for the disk: a crash that loses it costs a load, and no value.
-- Never after what a sender relies on: that an old lease is void, that something is stored or gone.
CREATE OR REPLACE FUNCTION {schema}.need_not_last() RETURNS void LANGUAGE sql VOLATILE
AS $$ SELECT set_config('synchronous_commit', 'off', true) $$;

CREATE OR REPLACE FUNCTION {schema}.base64(bytea) RETURNS text LANGUAGE sql IMMUTABLE
AS $$ SELECT translate(encode($1, 'base64'), E'\n', '') $$;

-- A line of news: a kind and an id, and the generation that was published; without one it is void.
-- A line with one field is a tag.
CREATE OR REPLACE FUNCTION {schema}.news(kind bytea, id bytea, generation text) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$ SELECT {schema}.base64($1) || ' ' || {schema}.base64($2) || coalesce(' ' || $3, '') $$;

-- Notifications are sent in pieces, since one has less than 8,000 bytes. They are numbered: the server
-- drops the second of two that are the same.
CREATE OR REPLACE FUNCTION {schema}.tell(news text) RETURNS void LANGUAGE plpgsql
AS $$
DECLARE
    bytes bytea := convert_to(news, 'UTF8'); -- of text every piece would be counted from the start
    last int := (length(bytes) - 1) / 7000;
BEGIN
    IF {pushes} THEN
        FOR at IN 0 .. coalesce(last, -1) LOOP
            PERFORM pg_notify('{channel}', at || CASE WHEN at < last THEN '+' ELSE '.' END
                || convert_from(substr(bytes, at * 7000 + 1, 7000), 'UTF8'));
        END LOOP;
    END IF;
END $$;

CREATE OR REPLACE FUNCTION {schema}.lock_of(tag bytea) RETURNS int8 LANGUAGE sql IMMUTABLE
AS $$ SELECT hashtextextended('{channel} ' || (get_byte(decode(md5($1), 'hex'), 0) & 31), 0) $$;

CREATE OR REPLACE FUNCTION {schema}.last_stamp() RETURNS int8 LANGUAGE sql VOLATILE
AS $$ SELECT coalesce(pg_sequence_last_value('{schema}.stamps'), 0) $$;

-- The number of the present life; a new one if it was lost with a crash or a failover.
CREATE OR REPLACE FUNCTION {schema}.present_life() RETURNS int8 LANGUAGE plpgsql
AS $$
DECLARE
    present int8;
BEGIN
    IF pg_is_in_recovery() THEN -- it has no unlogged tables
        RAISE EXCEPTION 'a standby changes nothing' USING ERRCODE = 'read_only_sql_transaction';
    END IF;
    SELECT l.number INTO present FROM {schema}.life l WHERE l.is_only;
    IF present IS NULL THEN
        INSERT INTO {schema}.life (number)
        VALUES (('x' || left(md5(gen_random_uuid()::text), 16))::bit(64)::int8)
        ON CONFLICT DO NOTHING;
        SELECT l.number INTO present FROM {schema}.life l WHERE l.is_only;
    END IF;
    RETURN present;
END $$;

-- More than any stamp of a tag whose invalidation is forgotten, if that is more than `in_since`.
CREATE OR REPLACE FUNCTION {schema}.forgotten(in_since int8) RETURNS int8 LANGUAGE plpgsql
AS $$
DECLARE
    lowest int8;
BEGIN
    SELECT min(x.epoch) INTO lowest FROM {schema}.epoch x;
    IF lowest > in_since AND (SELECT count(*) FROM {schema}.epoch) >= {remembered} THEN
        RETURN lowest;
    END IF;
    RETURN 0;
END $$;

-- The locks of tags, in one order.
CREATE OR REPLACE FUNCTION {schema}.share_locks(in_tags bytea[]) RETURNS void LANGUAGE sql VOLATILE
AS $$
    SELECT pg_advisory_xact_lock_shared(g.lock) FROM (
        SELECT DISTINCT {schema}.lock_of(tag) AS lock FROM unnest(in_tags) s (tag) ORDER BY lock) g;
$$;

-- A row that says nothing has no tags.
CREATE OR REPLACE FUNCTION {schema}.untag_empty(in_kind bytea, in_keys bytea[]) RETURNS void
LANGUAGE sql VOLATILE
AS $$
    DELETE FROM {schema}.tag x USING {schema}.entry e
    WHERE x.kind = in_kind AND x.key = ANY (in_keys)
        AND e.kind = in_kind AND e.key = ANY (in_keys) AND e.key = x.key AND {empty};
$$;

CREATE OR REPLACE FUNCTION {schema}.read(in_known text[], in_kind bytea, in_keys bytea[])
RETURNS TABLE ({record})
LANGUAGE plpgsql STABLE SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT {fields}, CASE WHEN e.generation = g.known THEN NULL ELSE e.value END
    FROM unnest(in_keys, in_known) g (key, known), LATERAL (SELECT * FROM {schema}.entry e
        WHERE e.kind = in_kind AND e.key = g.key AND NOT ({empty})
        OFFSET 0) e; -- a join may read all of the kind
END $$;

CREATE OR REPLACE FUNCTION {schema}.acquire(in_askers text[], in_lease_for float8, in_kind bytea,
    in_keys bytea[], in_ids bytea[], in_seen text[], in_failures int8[], in_take_over boolean[],
    in_tags bytea[], in_tagged bytea[], in_now float8)
RETURNS TABLE (outcome text, epoch int8, {record})
LANGUAGE plpgsql {settings}
AS $$
#variable_conflict use_column
DECLARE
    t float8;
    last_end float8;
    inserted int;
    granted bytea[];
BEGIN
    t := {schema}.clock(in_now);
    INSERT INTO {schema}.entry AS e (kind, key, id, token, held_until, changed, changed_at)
    SELECT in_kind, g.key, g.id, {token}, t + in_lease_for, nextval('{schema}.stamps'), t
    FROM unnest(in_keys, in_ids, in_askers) g (key, id, asker) ORDER BY g.key
    ON CONFLICT (kind, key) DO UPDATE SET mark = e.mark WHERE false; -- it is locked
    GET DIAGNOSTICS inserted = ROW_COUNT;
    t := {schema}.clock(in_now);
    last_end := t + greatest(in_lease_for, {longest_lease}) + {max_skew};
    UPDATE {schema}.entry e SET id = g.id, token = {token}, held_until = t + in_lease_for,
        changed = CASE WHEN g.take_over THEN nextval('{schema}.stamps') ELSE e.changed END,
        changed_at = CASE WHEN g.take_over THEN t ELSE e.changed_at END
    FROM unnest(in_keys, in_ids, in_askers, in_seen, in_failures, in_take_over)
        g (key, id, asker, seen, failures, take_over)
    WHERE e.kind = in_kind AND e.key = g.key
        AND (e.token IS NULL OR NOT starts_with(e.token, g.asker) OR e.held_until <= t)
        AND (e.generation = g.seen OR NOT ({whole}))
        AND (g.take_over OR e.token IS NULL OR e.held_until <= t OR e.held_until > last_end)
        AND (g.failures IS NULL OR e.failures IS NULL OR e.failures = g.failures);
    SELECT array_agg(e.key) INTO granted
    FROM unnest(in_keys, in_askers) g (key, asker)
    JOIN {schema}.entry e ON e.kind = in_kind AND e.key = g.key
    WHERE starts_with(e.token, g.asker) AND e.held_until > t;
    IF inserted < cardinality(in_keys) THEN -- the tags of the last lease, and those that came with the copy
        DELETE FROM {schema}.tag x WHERE x.kind = in_kind AND x.key = ANY (granted) AND NOT x.late
            AND NOT EXISTS (SELECT FROM unnest(in_tags, in_tagged) g (tag, key)
                WHERE g.tag = x.tag AND g.key = x.key);
    END IF;
    INSERT INTO {schema}.tag (tag, kind, key)
    SELECT g.tag, in_kind, g.key FROM unnest(in_tags, in_tagged) g (tag, key)
    WHERE g.key = ANY (granted) ON CONFLICT DO NOTHING;
    IF NOT true = ANY (in_take_over) THEN
        PERFORM {schema}.need_not_last();
    END IF;
    RETURN QUERY SELECT o.outcome, {schema}.last_stamp(), {fields},
        CASE WHEN o.outcome = 'newer' THEN e.value END
    FROM unnest(in_keys, in_askers, in_seen, in_take_over) g (key, asker, seen, take_over)
    JOIN {schema}.entry e ON e.kind = in_kind AND e.key = g.key,
    LATERAL (SELECT CASE
        WHEN starts_with(e.token, g.asker) AND e.held_until > t THEN 'lease'
        WHEN {whole} AND e.generation IS DISTINCT FROM g.seen THEN 'newer'
        WHEN NOT g.take_over AND e.held_until > t AND e.held_until <= last_end THEN 'held'
        ELSE 'newer' END) o (outcome);
END $$;

-- An id with a tag that was invalidated since its lease was granted is past: its lease ends.
-- Returns what was published; `in_again`: also by the same call, whose answer got lost.
CREATE OR REPLACE FUNCTION {schema}.publish(in_kind bytea, in_keys bytea[], in_tokens text[],
    in_generations text[], in_fetched_at float8[], in_fresh_for float8[], in_stale_for float8[],
    in_error_for float8[], in_marks int2[], in_values bytea[], in_versions bytea[],
    in_epochs int8[], in_told boolean[], in_tags bytea[], in_tagged bytea[], in_again boolean,
    in_now float8)
RETURNS TABLE (key bytea, stamp int8)
LANGUAGE plpgsql {settings}
AS $$
#variable_conflict use_column
DECLARE
    t float8;
    published bytea[];
    stamps int8[];
    past bytea[];
    floor int8;
    news text;
BEGIN
    PERFORM {schema}.share_locks(in_tags);
    PERFORM 1 FROM {schema}.entry e WHERE e.kind = in_kind AND e.key = ANY (in_keys)
    ORDER BY e.key FOR UPDATE;
    IF cardinality(in_tags) > 0 THEN
        floor := {schema}.forgotten((SELECT min(epoch) FROM unnest(in_epochs) s (epoch)));
        SELECT array_agg(DISTINCT g.key) INTO past
        FROM unnest(in_keys, in_epochs) g (key, epoch) JOIN unnest(in_tags, in_tagged) s (tag, key)
            USING (key) LEFT JOIN {schema}.epoch x ON x.tag = s.tag
        WHERE g.epoch < floor OR x.epoch > g.epoch AND x.epoch <= {schema}.last_stamp();
        UPDATE {schema}.entry e SET token = NULL, held_until = NULL
        FROM unnest(in_keys, in_tokens) g (key, token)
        WHERE e.kind = in_kind AND e.key = g.key AND e.token = g.token AND e.key = ANY (past);
        PERFORM {schema}.untag_empty(in_kind, past);
    END IF;
    t := {schema}.clock(in_now);
    WITH done AS (
        UPDATE {schema}.entry e SET generation = g.generation, fetched_at = g.fetched_at,
            fresh_for = g.fresh_for, stale_for = g.stale_for, error_for = g.error_for,
            mark = g.mark, value = g.value, version = coalesce(g.version, CASE WHEN {whole} THEN e.version END),
            token = NULL, held_until = NULL, failures = NULL, retry_at = NULL, error = NULL,
            replaced = {replaced}, changed = nextval('{schema}.stamps'), changed_at = t
        FROM unnest(in_keys, in_tokens, in_generations, in_fetched_at, in_fresh_for, in_stale_for,
                in_error_for, in_marks, in_values, in_versions)
            g (key, token, generation, fetched_at, fresh_for, stale_for, error_for, mark, value,
                version)
        WHERE e.kind = in_kind AND e.key = g.key AND e.token = g.token AND e.held_until > t
        RETURNING e.key, {name} AS id, e.generation, e.changed
    )
    SELECT array_agg(d.key), array_agg(d.changed),
        string_agg({schema}.news(in_kind, d.id, d.generation), E'\n')
    INTO published, stamps, news FROM done d;
    DELETE FROM {schema}.tag x USING unnest(in_keys, in_told) g (key, told)
    WHERE x.kind = in_kind AND x.key = g.key AND g.told AND x.late AND x.key = ANY (published);
    INSERT INTO {schema}.tag (tag, kind, key, late)
    SELECT g.tag, in_kind, g.key, true FROM unnest(in_tags, in_tagged) g (tag, key)
    WHERE g.key = ANY (published) ON CONFLICT DO NOTHING;
    PERFORM {schema}.tell(news);
    RETURN QUERY SELECT * FROM unnest(published, stamps);
    IF in_again THEN
        RETURN QUERY SELECT e.key, e.changed FROM unnest(in_keys, in_generations) g (key, generation)
        JOIN {schema}.entry e ON e.kind = in_kind AND e.key = g.key AND e.generation = g.generation;
    END IF;
END $$;

-- Key by key, in their order: look, decide as `stores/rules.py` does, write.
CREATE OR REPLACE FUNCTION {schema}.put(in_kind bytea, in_keys bytea[], in_ids bytea[],
    in_generations text[], in_fetched_at float8[], in_fresh_for float8[], in_stale_for float8[],
    in_error_for float8[], in_marks int2[], in_values bytea[], in_is_unread boolean[],
    in_versions bytea[], in_when int2[], in_seen text[], in_seen_marks int2[], in_retags boolean[],
    in_told boolean[], in_tags bytea[], in_tagged bytea[], in_late boolean[], in_life int8,
    in_as_of int8, in_good_until float8, in_now float8)
RETURNS TABLE (key bytea, outcome text, version bytea, stamp int8, life int8, now float8)
LANGUAGE plpgsql {settings}
AS $$
#variable_conflict use_column
DECLARE
    t float8;
    present int8;
    is_known boolean;
    floor int8;
    past bytea[] := '{{}}';
    g record;
    e record;
    is_there boolean;
    has_copy boolean;
    is_live boolean;
    done text;
    done_version bytea;
    done_stamp int8;
    stored bytea[] := '{{}}';
    news text[] := '{{}}';
BEGIN
    IF cardinality(in_tags) > 0 THEN
        PERFORM {schema}.share_locks(in_tags);
    END IF;
    t := {schema}.clock(in_now);
    present := {schema}.present_life();
    is_known := coalesce(in_life = present AND in_as_of <= {schema}.last_stamp(), false);
    IF is_known AND cardinality(in_tags) > 0 THEN
        floor := {schema}.forgotten(in_as_of);
        SELECT coalesce(array_agg(s.key), '{{}}') INTO past
        FROM unnest(in_tags, in_tagged) s (tag, key) LEFT JOIN {schema}.epoch x ON x.tag = s.tag
        WHERE in_as_of < floor OR x.epoch > in_as_of AND x.epoch <= {schema}.last_stamp();
    END IF;
    FOR g IN SELECT * FROM unnest(in_keys, in_ids, in_generations, in_fetched_at, in_fresh_for,
            in_stale_for, in_error_for, in_marks, in_values, in_is_unread, in_versions, in_when,
            in_seen, in_seen_marks)
        s (key, id, generation, fetched_at, fresh_for, stale_for, error_for, mark, value,
            is_unread, version, when_, seen, seen_mark) ORDER BY s.key
    LOOP
        LOOP
            SELECT e.generation, e.fetched_at, e.fresh_for, e.mark, e.version, e.changed,
                e.replaced, e.value IS NULL AS is_absent, {whole} AS is_whole INTO e
            FROM {schema}.entry e WHERE e.kind = in_kind AND e.key = g.key FOR UPDATE;
            is_there := FOUND;
            has_copy := is_there AND e.is_whole;
            is_live := has_copy AND NOT e.is_absent AND e.mark = 0
                AND t - e.fetched_at >= -{max_skew}
                AND greatest(t - e.fetched_at, 0) < e.fresh_for;
            done := CASE
                WHEN has_copy AND e.generation = g.generation THEN 'stored'
                WHEN is_there AND position({short_id} IN e.replaced) > 0 THEN 'replaced'
                WHEN NOT is_known OR g.key = ANY (past) THEN 'again'
                WHEN NOT is_there AND t > in_good_until THEN 'again'
                WHEN is_there AND e.changed > in_as_of AND e.changed <= {schema}.last_stamp()
                    THEN 'again'
                WHEN g.when_ = {no_live_copy} AND has_copy AND NOT e.is_absent AND e.mark = 0
                    AND e.fresh_for > 0 AND e.fetched_at + e.fresh_for <= t
                    AND e.fetched_at + e.fresh_for > in_good_until - {good_for} THEN 'again'
                WHEN g.is_unread AND NOT has_copy THEN 'refused'
                WHEN g.when_ = {no_live_copy} AND is_live THEN 'refused'
                WHEN g.when_ = {live_copy} AND NOT is_live THEN 'refused'
                WHEN g.when_ = {unchanged} AND has_copy
                    AND (e.generation IS DISTINCT FROM g.seen OR e.mark <> g.seen_mark)
                    THEN 'refused'
                WHEN g.when_ = {unchanged} AND NOT has_copy AND g.seen IS NOT NULL THEN 'refused'
                WHEN has_copy AND substr(e.version, 1, 1) <> substr(g.version, 1, 1) THEN 'mixed'
                WHEN has_copy AND e.version > g.version THEN 'kept'
                END;
            done_version := CASE WHEN has_copy THEN e.version END;
            done_stamp := e.changed;
            EXIT WHEN done IS NOT NULL;
            IF g.value IS NULL AND NOT g.is_unread
                    AND g.fresh_for + greatest(g.stale_for, g.error_for) = 0 THEN
                done_version := NULL; -- a deletion keeps no version
            END IF;
            IF is_there THEN
                UPDATE {schema}.entry e SET id = g.id, generation = g.generation,
                    fetched_at = g.fetched_at, fresh_for = g.fresh_for, stale_for = g.stale_for, error_for = g.error_for,
                    mark = g.mark, value = CASE WHEN g.is_unread THEN e.value ELSE g.value END,
                    version = coalesce(g.version, done_version), token = NULL, held_until = NULL,
                    failures = NULL, retry_at = NULL, error = NULL, replaced = {replaced},
                    changed = nextval('{schema}.stamps'), changed_at = t
                WHERE e.kind = in_kind AND e.key = g.key
                RETURNING e.version, e.changed INTO done_version, done_stamp;
            ELSE
                INSERT INTO {schema}.entry AS e (kind, key, id, generation, fetched_at, fresh_for,
                    stale_for, error_for, mark, value, version, changed, changed_at)
                VALUES (in_kind, g.key, g.id, g.generation, g.fetched_at, g.fresh_for,
                    g.stale_for, g.error_for, g.mark, g.value, g.version,
                    nextval('{schema}.stamps'), t)
                ON CONFLICT DO NOTHING
                RETURNING e.version, e.changed INTO done_version, done_stamp;
            END IF;
            IF FOUND THEN -- else another one inserted it meanwhile: look again
                done := 'stored';
                stored := array_append(stored, g.key);
                news := array_append(news,
                    {schema}.news(in_kind, coalesce(g.id, g.key), g.generation));
                EXIT;
            END IF;
        END LOOP;
        key := g.key;
        outcome := done;
        version := done_version;
        stamp := CASE done WHEN 'again' THEN {schema}.last_stamp() ELSE done_stamp END;
        life := CASE done WHEN 'again' THEN present END;
        now := t;
        RETURN NEXT;
    END LOOP;
    IF cardinality(stored) > 0 THEN
        DELETE FROM {schema}.tag x USING unnest(in_keys, in_retags, in_told) s (key, retags, told)
        WHERE x.kind = in_kind AND x.key = s.key AND x.key = ANY (stored)
            AND CASE WHEN x.late THEN s.told ELSE s.retags END
            AND (x.tag, x.key, x.late) NOT IN (SELECT * FROM unnest(in_tags, in_tagged, in_late));
        IF cardinality(in_tags) > 0 THEN
            INSERT INTO {schema}.tag (tag, kind, key, late)
            SELECT n.tag, in_kind, n.key, n.late
            FROM unnest(in_tags, in_tagged, in_late) n (tag, key, late)
            WHERE n.key = ANY (stored) ON CONFLICT DO NOTHING;
        END IF;
        PERFORM {schema}.tell(array_to_string(news, E'\n'));
    END IF;
END $$;

CREATE OR REPLACE FUNCTION {schema}.renew(in_kind bytea, in_keys bytea[], in_tokens text[],
    in_lease_for float8, in_now float8)
RETURNS SETOF bytea
LANGUAGE plpgsql {settings}
AS $$
DECLARE
    t float8;
BEGIN
    PERFORM 1 FROM {schema}.entry e WHERE e.kind = in_kind AND e.key = ANY (in_keys)
    ORDER BY e.key FOR UPDATE;
    t := {schema}.clock(in_now);
    RETURN QUERY UPDATE {schema}.entry e SET held_until = t + in_lease_for
    FROM unnest(in_keys, in_tokens) g (key, token)
    WHERE e.kind = in_kind AND e.key = g.key AND e.token = g.token AND e.held_until > t
    RETURNING e.key;
    PERFORM {schema}.need_not_last();
END $$;

CREATE OR REPLACE FUNCTION {schema}.release(in_kind bytea, in_keys bytea[], in_tokens text[],
    in_failures int8[], in_retry_at float8[], in_errors bytea[])
RETURNS void
LANGUAGE plpgsql {settings}
AS $$
BEGIN
    PERFORM 1 FROM {schema}.entry e WHERE e.kind = in_kind AND e.key = ANY (in_keys)
    ORDER BY e.key FOR UPDATE;
    UPDATE {schema}.entry e SET token = NULL, held_until = NULL,
        failures = coalesce(g.failures, e.failures), retry_at = coalesce(g.retry_at, e.retry_at),
        error = coalesce(g.error, e.error)
    FROM unnest(in_keys, in_tokens, in_failures, in_retry_at, in_errors)
        g (key, token, failures, retry_at, error)
    WHERE e.kind = in_kind AND e.key = g.key AND e.token = g.token;
    PERFORM {schema}.untag_empty(in_kind, in_keys);
    PERFORM {schema}.need_not_last();
END $$;

-- Of any kinds, by their order. A mark never goes down. Returns what has changed since `in_as_of`, and was
-- therefore left alone.
CREATE OR REPLACE FUNCTION {schema}.invalidate(in_kinds bytea[], in_keys bytea[], in_ids bytea[],
    in_mark int2, in_life int8, in_as_of int8, in_now float8,
    OUT kinds bytea[], OUT keys bytea[], OUT stamp int8, OUT life int8, OUT now float8)
LANGUAGE plpgsql {settings}
AS $$
#variable_conflict use_column
DECLARE
    is_known boolean;
    done_kinds bytea[];
    done_keys bytea[];
    news text;
BEGIN
    now := {schema}.clock(in_now);
    life := {schema}.present_life();
    is_known := coalesce(in_life = life AND in_as_of <= {schema}.last_stamp(), false);
    WITH done AS (
        INSERT INTO {schema}.entry AS e (kind, key, id, changed, changed_at)
        SELECT g.kind, g.key, g.id, nextval('{schema}.stamps'), now
        FROM unnest(in_kinds, in_keys, in_ids) g (kind, key, id) ORDER BY g.kind, g.key
        ON CONFLICT (kind, key) DO UPDATE SET id = excluded.id, token = NULL, held_until = NULL,
            mark = CASE WHEN e.generation IS NULL THEN e.mark ELSE greatest(e.mark, in_mark) END,
            changed = nextval('{schema}.stamps'), changed_at = now
        WHERE is_known AND (e.changed <= in_as_of OR e.changed > {schema}.last_stamp())
        RETURNING e.kind, e.key, {name} AS id
    )
    SELECT array_agg(d.kind), array_agg(d.key),
        string_agg({schema}.news(d.kind, d.id, NULL), E'\n')
    INTO done_kinds, done_keys, news FROM done d;
    DELETE FROM {schema}.tag x USING {schema}.entry e
    WHERE (e.kind, e.key) IN (SELECT * FROM unnest(done_kinds, done_keys)) AND {empty}
        AND x.kind = e.kind AND x.key = e.key;
    PERFORM {schema}.tell(news);
    stamp := {schema}.last_stamp();
    SELECT array_agg(g.kind), array_agg(g.key) INTO kinds, keys
    FROM unnest(in_kinds, in_keys) g (kind, key)
    WHERE (g.kind, g.key) NOT IN (SELECT * FROM unnest(done_kinds, done_keys));
END $$;

-- Along the index: where a table is new, sorting all that a tag has looks cheap.
CREATE OR REPLACE FUNCTION {schema}.tagged(in_tag bytea, in_after_kind bytea, in_after_key bytea,
    in_most int)
RETURNS TABLE (kind bytea, key bytea, id bytea)
LANGUAGE sql {settings} SET enable_sort = off SET enable_bitmapscan = off
AS $$
    SELECT DISTINCT ON (x.kind, x.key) x.kind, x.key, e.id FROM {schema}.tag x, LATERAL (
        SELECT CASE WHEN octet_length(e.key) > {longest_key} THEN e.id END AS id FROM {schema}.entry e WHERE e.kind = x.kind AND e.key = x.key OFFSET 0) e
    WHERE x.tag = in_tag AND (x.kind, x.key) > (in_after_kind, in_after_key)
    ORDER BY x.kind, x.key LIMIT in_most;
$$;

-- The next ids that have the tag, with all leases that were taken before this began. Those that have
-- changed since `in_as_of` are returned, and left alone.
CREATE OR REPLACE FUNCTION {schema}.invalidate_tag(in_tag bytea, in_name bytea, in_mark int2,
    in_after_kind bytea, in_after_key bytea, in_most int, in_life int8, in_as_of int8, in_now float8,
    OUT kinds bytea[], OUT keys bytea[], OUT ids bytea[], OUT again_kinds bytea[],
    OUT again_keys bytea[], OUT stamp int8, OUT life int8, OUT now float8)
LANGUAGE plpgsql {settings}
AS $$
#variable_conflict use_column
BEGIN
    IF in_after_kind = '' THEN
        PERFORM pg_advisory_xact_lock({schema}.lock_of(in_tag));
        INSERT INTO {schema}.epoch AS x (tag, epoch) VALUES (in_tag, nextval('{schema}.stamps'))
        ON CONFLICT (tag) DO UPDATE SET epoch = excluded.epoch;
        DELETE FROM {schema}.epoch WHERE tag IN (SELECT x.tag FROM {schema}.epoch x
            WHERE x.epoch < (SELECT y.epoch FROM {schema}.epoch y
                ORDER BY y.epoch DESC OFFSET {remembered} LIMIT 1)
            FOR UPDATE SKIP LOCKED);
        PERFORM {schema}.tell({schema}.base64(in_name));
    END IF;
    SELECT array_agg(s.kind), array_agg(s.key), array_agg(s.id) INTO kinds, keys, ids FROM (
        SELECT * FROM {schema}.tagged(in_tag, in_after_kind, in_after_key, in_most)) s;
    SELECT d.kinds, d.keys, d.stamp, d.life, d.now
    INTO again_kinds, again_keys, stamp, life, now
    FROM {schema}.invalidate(kinds, keys, ids, in_mark, in_life, in_as_of, in_now) d;
END $$;

-- Leaves empty rows; returns as `invalidate` does.
CREATE OR REPLACE FUNCTION {schema}.delete(in_kinds bytea[], in_keys bytea[], in_ids bytea[],
    in_life int8, in_as_of int8, in_now float8,
    OUT kinds bytea[], OUT keys bytea[], OUT stamp int8, OUT life int8, OUT now float8)
LANGUAGE plpgsql {settings}
AS $$
#variable_conflict use_column
DECLARE
    is_known boolean;
    done_kinds bytea[];
    done_keys bytea[];
    news text;
BEGIN
    now := {schema}.clock(in_now);
    life := {schema}.present_life();
    is_known := coalesce(in_life = life AND in_as_of <= {schema}.last_stamp(), false);
    WITH done AS (
        INSERT INTO {schema}.entry AS e (kind, key, id, changed, changed_at)
        SELECT g.kind, g.key, g.id, nextval('{schema}.stamps'), now
        FROM unnest(in_kinds, in_keys, in_ids) g (kind, key, id) ORDER BY g.kind, g.key
        ON CONFLICT (kind, key) DO UPDATE SET id = excluded.id, {emptied},
            changed = nextval('{schema}.stamps'), changed_at = now
        WHERE is_known AND (e.changed <= in_as_of OR e.changed > {schema}.last_stamp())
        RETURNING e.kind, e.key, {name} AS id
    )
    SELECT array_agg(d.kind), array_agg(d.key),
        string_agg({schema}.news(d.kind, d.id, NULL), E'\n')
    INTO done_kinds, done_keys, news FROM done d;
    DELETE FROM {schema}.tag x
    WHERE (x.kind, x.key) IN (SELECT * FROM unnest(done_kinds, done_keys));
    PERFORM {schema}.tell(news);
    stamp := {schema}.last_stamp();
    SELECT array_agg(g.kind), array_agg(g.key) INTO kinds, keys
    FROM unnest(in_kinds, in_keys) g (kind, key)
    WHERE (g.kind, g.key) NOT IN (SELECT * FROM unnest(done_kinds, done_keys));
END $$;

-- Looks at the next rows. One that somebody has locked is in use. One that changed lately stays as an
-- empty row, with its stamp; its time is set back if the clock was.
CREATE OR REPLACE FUNCTION {schema}.evict(in_before float8, in_after_kind bytea,
    in_after_key bytea, in_most int, in_now float8)
RETURNS TABLE (dropped int8, last_kind bytea, last_key bytea)
LANGUAGE plpgsql {settings}
AS $$
DECLARE
    t float8 := {schema}.clock(in_now);
    kinds bytea[];
    keys bytea[];
    number int8;
BEGIN
    SELECT array_agg(s.kind), array_agg(s.key) INTO kinds, keys FROM (
        SELECT e.kind, e.key FROM {schema}.entry e
        WHERE (e.kind, e.key) > (in_after_kind, in_after_key)
        ORDER BY e.kind, e.key LIMIT in_most) s;
    WITH old AS (
        SELECT e.kind, e.key, {empty} AS is_empty, e.changed_at <= t - {trace} AS is_forgotten
        FROM {schema}.entry e
        WHERE (e.kind, e.key) IN (SELECT * FROM unnest(kinds, keys))
            AND greatest(coalesce(e.held_until, 0), CASE WHEN {whole} THEN {served_until}
                ELSE coalesce(e.retry_at, 0) END) < in_before
        ORDER BY e.kind, e.key FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM {schema}.entry e USING old o
        WHERE e.kind = o.kind AND e.key = o.key AND o.is_forgotten
    ), left_empty AS (
        UPDATE {schema}.entry e SET {emptied}, changed_at = least(e.changed_at, t) FROM old o
        WHERE e.kind = o.kind AND e.key = o.key AND NOT o.is_forgotten
            AND (NOT o.is_empty OR e.changed_at > t)
    ), untagged AS (
        DELETE FROM {schema}.tag x USING old o WHERE x.kind = o.kind AND x.key = o.key
    )
    SELECT count(*) INTO number FROM old o WHERE NOT o.is_empty;
    RETURN QUERY SELECT number, kinds[in_most], keys[in_most];
END $$;
