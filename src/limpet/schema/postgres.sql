-- Limpet's tables on PostgreSQL, schema revision 0002. The word in braces stands for their schema.
-- Plain SQL can read all of it: a JSON value is jsonb, a record is a jsonb object of its fields.
-- Written by python -m limpet.schema.render, from the migrations.

CREATE TABLE {schema}.limpet_schema (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT limpet_schema_pkc PRIMARY KEY (version_num)
);

-- Revision 0001

CREATE TABLE {schema}.limpet_store (
    id TEXT NOT NULL,
    epoch BIGINT NOT NULL
);

COMMENT ON TABLE {schema}.limpet_store IS 'One row: the id and the epoch of this store.';

CREATE TABLE {schema}.limpet_namespaces (
    namespace TEXT COLLATE "C" NOT NULL,
    revision BIGINT NOT NULL,
    floor BIGINT NOT NULL,
    at_ms BIGINT NOT NULL,
    keys BIGINT NOT NULL,
    size_bytes BIGINT NOT NULL,
    log_changes BIGINT NOT NULL,
    log_bytes BIGINT NOT NULL,
    superseded JSONB,
    floor_print TEXT,
    PRIMARY KEY (namespace)
) WITH (fillfactor = 20);

COMMENT ON TABLE {schema}.limpet_namespaces IS 'One row for each namespace: its counters. A writer holds its lock.';

CREATE TABLE {schema}.limpet_entries (
    namespace TEXT COLLATE "C" NOT NULL,
    family TEXT COLLATE "C" NOT NULL,
    key TEXT COLLATE "C" NOT NULL,
    kind TEXT NOT NULL,
    value JSONB,
    stored BYTEA NOT NULL,
    is_lossy BOOLEAN,
    size_bytes BIGINT NOT NULL,
    version BIGINT NOT NULL,
    revision BIGINT NOT NULL,
    created_revision BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    updated_ms BIGINT NOT NULL,
    expires_ms BIGINT,
    meta TEXT,
    replaced_bytes BIGINT DEFAULT '0' NOT NULL,
    PRIMARY KEY (namespace, family, key)
) WITH (fillfactor = 80);

COMMENT ON TABLE {schema}.limpet_entries IS 'The map. The value is in stored, to the byte. In value it is as jsonb, for queries: raw bytes have no such form, and where is_lossy is true it is only an approximation, as of 1e22, -0.0 and U+0000.';

CREATE INDEX limpet_due ON {schema}.limpet_entries (namespace, family, expires_ms) WHERE expires_ms IS NOT NULL;

CREATE TABLE {schema}.limpet_changes (
    namespace TEXT COLLATE "C" NOT NULL,
    revision BIGINT NOT NULL,
    last_revision BIGINT NOT NULL,
    at_ms BIGINT NOT NULL,
    op TEXT NOT NULL,
    family TEXT NOT NULL,
    cause TEXT,
    size_bytes BIGINT NOT NULL,
    key TEXT COLLATE "C" NOT NULL,
    kind TEXT,
    value BYTEA,
    version BIGINT NOT NULL,
    entry_revision BIGINT NOT NULL,
    created_revision BIGINT NOT NULL,
    created_ms BIGINT NOT NULL,
    updated_ms BIGINT NOT NULL,
    expires_ms BIGINT,
    meta TEXT,
    PRIMARY KEY (namespace, revision)
);

COMMENT ON TABLE {schema}.limpet_changes IS 'The log. A value is stored to the byte.';

-- The time of a commit. now() is the start of the transaction, which may have waited since.
CREATE FUNCTION {schema}.limpet_now_ms() RETURNS bigint LANGUAGE sql VOLATILE
RETURN floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;

-- The exact bytes of a value that a driver sends: JSON as it is, raw bytes in hexadecimal. STABLE, because
-- convert_to is: PostgreSQL would not inline an IMMUTABLE function that calls it.
CREATE FUNCTION {schema}.limpet_stored(kind text, sent text) RETURNS bytea LANGUAGE sql STABLE
RETURN CASE kind WHEN 'bytes' THEN decode(sent, 'hex') ELSE convert_to(sent, 'UTF8') END;

-- Lock the row of a namespace to the end of the transaction: the namespace has one writer at a time. The time is the
-- latest of the clock, the time recorded there, and the time that the caller has seen.
CREATE FUNCTION {schema}.limpet_take(ns text, seen_ms bigint DEFAULT 0) RETURNS {schema}.limpet_namespaces
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    counters {schema}.limpet_namespaces;
BEGIN
    SELECT * INTO counters FROM {schema}.limpet_namespaces n WHERE n.namespace = ns FOR UPDATE;
    IF NOT FOUND THEN
        INSERT INTO {schema}.limpet_namespaces VALUES (ns, 0, 0, 0, 0, 0, 0, 0, NULL) ON CONFLICT DO NOTHING;
        SELECT * INTO counters FROM {schema}.limpet_namespaces n WHERE n.namespace = ns FOR UPDATE;
    END IF;
    counters.at_ms := greatest(counters.at_ms, {schema}.limpet_now_ms(), seen_ms);
    RETURN counters;
END $$;

-- Notify the processes that listen, if there are any: a notification makes all commits of the server wait for each other.
-- Who listens holds one lock for each of 16 parts of the namespaces, shared. A commit tries to take the lock of its part
-- for itself: it gets that if no process listens. One that begins to listen meanwhile waits until this commit is visible,
-- and reads the log then.
CREATE FUNCTION {schema}.limpet_notify(channel text, ns text) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended(channel, hashtext(ns) & 15)) THEN
        PERFORM pg_notify(channel, ns);
    END IF;
END $$;

-- A revision of a plan, when it is applied. A plan is made before revisions and times are known: see
-- limpet.commit.relative, which has the numbers from which on they are relative.
CREATE FUNCTION {schema}.limpet_revision(planned bigint, before bigint) RETURNS bigint LANGUAGE sql IMMUTABLE
RETURN CASE WHEN planned < 1152921504606846976 THEN planned ELSE before + planned - 1152921504606846976 END;

-- A time of a plan, when it is applied: as it is, relative to now, or one that was kept.
CREATE FUNCTION {schema}.limpet_time(planned bigint, now_ms bigint) RETURNS bigint LANGUAGE sql IMMUTABLE
RETURN CASE
    WHEN planned < 1125899906842624 THEN planned
    WHEN planned < 2251799813685248 THEN now_ms + planned - 1125899906842624
    ELSE planned - 2251799813685248
END;

-- Compare what plans have read with what is stored, and write those plans for which all of it is the same. A plan is a
-- unit, named by its number from 1; a stale unit writes nothing, and the entries that it has read are returned as they
-- are. Nothing is decided here but that: what a write does was planned by limpet.transition.
-- Each row to write is an entry as a change leaves it, in order. A row without a revision is a receipt or a mark of a
-- superseded request, which is stored but not logged. A row with the op touch has no value, because it changes none.
CREATE FUNCTION {schema}.limpet_apply(
    ns text, channel text, name text, seen_ms bigint, unit_changes text[], unit_keys text[], unit_sizes text[],
    unit_logs text[], read_units text[], read_families text[], read_keys text[], read_revisions text[],
    read_updated text[], read_expires text[], read_expired text[], read_values text[], units text[], ops text[],
    revisions text[], last_revisions text[], causes text[], families text[], keys text[], kinds text[], vals text[],
    approximations text[], weights text[], sizes text[], versions text[], entry_revisions text[],
    created_revisions text[], createds text[], updateds text[], expires text[], metas text[]
) RETURNS TABLE (
    unit int, before bigint, at_ms bigint, family text, key text, kind text, stored bytea, version bigint,
    revision bigint, created_revision bigint, created_ms bigint, updated_ms bigint, expires_ms bigint, meta text,
    size_bytes bigint
) LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    taken {schema}.limpet_namespaces;
    now_ms bigint;
    stale int[];
    has_written boolean := false;
BEGIN
    taken := {schema}.limpet_take(ns, seen_ms);
    now_ms := taken.at_ms;
    IF taken.superseded ? name THEN
        RAISE EXCEPTION 'limpet: this request was superseded by its own retry' USING ERRCODE = 'LP002';
    END IF;

    -- Separate statements, because they must see what was committed while the one above waited.
    SELECT coalesce(array_agg(DISTINCT r.unit), '{}') INTO stale
    FROM unnest(
        read_units::int[], read_families, read_keys, read_revisions::bigint[], read_updated::bigint[],
        read_expires::bigint[], read_expired::boolean[]
    ) AS r (unit, family, key, revision, updated_ms, expires_ms, has_expired)
    LEFT JOIN LATERAL (
        SELECT t.revision, t.updated_ms, t.expires_ms FROM {schema}.limpet_entries t
        WHERE t.namespace = ns AND t.family = r.family AND t.key = r.key OFFSET 0
    ) AS e ON true
    WHERE coalesce(e.expires_ms <= now_ms, false) <> r.has_expired OR r.revision <> coalesce(
        e.revision, CASE WHEN r.family = 'superseded' THEN (taken.superseded -> r.key ->> 1)::bigint END, -1
    -- A server that lost its last writes gives their revisions again. Then the times differ.
    ) OR e.updated_ms <> r.updated_ms OR e.revision >= 0 AND e.expires_ms IS DISTINCT FROM r.expires_ms;

    IF cardinality(ops) > 0 THEN
        WITH fresh AS (
            SELECT u.*, taken.revision + sum(u.changes) OVER (ORDER BY u.n) - u.changes AS before
            FROM unnest(unit_changes::bigint[], unit_keys::bigint[], unit_sizes::bigint[], unit_logs::bigint[])
                WITH ORDINALITY AS u (changes, keys, size_bytes, log_bytes, n)
            WHERE u.n <> ALL (stale)
        ), planned AS (
            SELECT r.n, r.op, r.cause, r.family, r.key, r.kind, r.sent, r.approximation, r.weight::bigint AS weight,
                r.size::bigint AS size, r.version::bigint AS version, r.meta,
                {schema}.limpet_revision(r.revision::bigint, f.before::bigint) AS revision,
                {schema}.limpet_revision(r.last_revision::bigint, f.before::bigint) AS last_revision,
                {schema}.limpet_revision(r.entry_revision::bigint, f.before::bigint) AS entry_revision,
                {schema}.limpet_revision(r.created_revision::bigint, f.before::bigint) AS created_revision,
                {schema}.limpet_time(r.created::bigint, now_ms) AS created_ms,
                {schema}.limpet_time(r.updated::bigint, now_ms) AS updated_ms,
                {schema}.limpet_time(r.expires::bigint, now_ms) AS expires_ms
            FROM unnest(
                units, ops, revisions, last_revisions, causes, families, keys, kinds, vals, approximations, weights,
                sizes, versions, entry_revisions, created_revisions, createds, updateds, expires, metas
            ) WITH ORDINALITY AS r (
                unit, op, revision, last_revision, cause, family, key, kind, sent, approximation, weight, size,
                version, entry_revision, created_revision, created, updated, expires, meta, n
            )
            JOIN fresh f ON f.n = r.unit::int
        ), latest AS (
            SELECT DISTINCT ON (p.family, p.key) p.*, t.row_id
            FROM planned p
            LEFT JOIN LATERAL (
                SELECT f.ctid AS row_id FROM {schema}.limpet_entries f
                WHERE f.namespace = ns AND f.family = p.family AND f.key = p.key OFFSET 0
            ) AS t ON true
            WHERE p.family <> 'superseded'
            ORDER BY p.family, p.key, p.n DESC
        ), erased AS (
            DELETE FROM {schema}.limpet_entries e
            WHERE e.ctid = ANY (ARRAY(SELECT l.row_id FROM latest l WHERE l.op IN ('delete', 'expire')))
        ), touched AS (
            UPDATE {schema}.limpet_entries e SET revision = l.entry_revision, expires_ms = l.expires_ms
            FROM latest l WHERE l.op = 'touch' AND e.ctid = l.row_id
        ), written AS (
            INSERT INTO {schema}.limpet_entries AS e
            SELECT ns, l.family, l.key, l.kind,
                CASE WHEN l.kind <> 'bytes' THEN coalesce(l.approximation, l.sent)::jsonb END,
                {schema}.limpet_stored(l.kind, l.sent), CASE WHEN l.approximation IS NOT NULL THEN true END,
                l.weight, l.version, l.entry_revision, l.created_revision, l.created_ms, l.updated_ms, l.expires_ms,
                l.meta
            FROM latest l WHERE l.op NOT IN ('delete', 'expire', 'touch')
            ON CONFLICT (namespace, family, key) DO UPDATE SET
                kind = excluded.kind, value = excluded.value, stored = excluded.stored,
                is_lossy = excluded.is_lossy, size_bytes = excluded.size_bytes,
                version = excluded.version, revision = excluded.revision, created_revision = excluded.created_revision,
                created_ms = excluded.created_ms, updated_ms = excluded.updated_ms, expires_ms = excluded.expires_ms,
                meta = excluded.meta
        ), logged AS (
            INSERT INTO {schema}.limpet_changes
            SELECT ns, p.revision, p.last_revision, now_ms, replace(p.op, 'rewrite', 'touch'), p.family, p.cause,
                p.size, p.key, CASE WHEN p.op <> 'rewrite' THEN p.kind END,
                CASE WHEN p.op <> 'rewrite' THEN {schema}.limpet_stored(p.kind, p.sent) END,
                p.version, p.entry_revision, p.created_revision, p.created_ms, p.updated_ms, p.expires_ms, p.meta
            FROM planned p WHERE p.revision IS NOT NULL
        )
        UPDATE {schema}.limpet_namespaces n
        SET revision = n.revision + s.changes, at_ms = now_ms, keys = n.keys + s.keys,
            size_bytes = n.size_bytes + s.size_bytes, log_changes = n.log_changes + s.changes,
            log_bytes = n.log_bytes + s.log_bytes,
            superseded = CASE WHEN m.marks IS NULL THEN n.superseded ELSE coalesce(n.superseded, '{}') || m.marks END
        FROM (
            SELECT sum(f.changes) AS changes, sum(f.keys) AS keys, sum(f.size_bytes) AS size_bytes,
                sum(f.log_bytes) AS log_bytes
            FROM fresh f
        ) AS s, (
            -- A mark has its time, and the latest revision: it is another one whenever a retry has made a change.
            SELECT jsonb_object_agg(p.key, jsonb_build_array(now_ms, (
                SELECT taken.revision + sum(f.changes) FROM fresh f
            ))) AS marks
            FROM planned p WHERE p.family = 'superseded'
        ) AS m
        WHERE n.namespace = ns AND s.changes IS NOT NULL;
        has_written := FOUND;
    END IF;
    IF has_written THEN
        PERFORM {schema}.limpet_notify(channel, ns);
    ELSIF NOT ('-2' = ANY (read_revisions)) THEN
        -- It has only locked a row, and such a commit need not wait for the disk. Not where an entry was expected that
        -- is not known: its reply is followed by writes, perhaps in this transaction.
        SET LOCAL synchronous_commit = off;
    END IF;

    RETURN QUERY
    SELECT u.n::int, (taken.revision + sum(u.changes) OVER (ORDER BY u.n) - u.changes)::bigint, now_ms,
        NULL::text, NULL::text, NULL::text, NULL::bytea, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint,
        NULL::bigint, NULL::bigint, NULL::text, NULL::bigint
    FROM unnest(unit_changes::bigint[]) WITH ORDINALITY AS u (changes, n)
    WHERE u.n <> ALL (stale);
    IF cardinality(stale) > 0 THEN
        RETURN QUERY
        SELECT r.unit, NULL::bigint, now_ms, r.family, r.key, e.kind,
            CASE WHEN r.needs_value OR e.size_bytes <= 2048 THEN e.stored END,
            e.version,
            coalesce(e.revision, CASE WHEN r.family = 'superseded' THEN (taken.superseded -> r.key ->> 1)::bigint END),
            e.created_revision, e.created_ms, e.updated_ms, e.expires_ms, e.meta, e.size_bytes
        FROM unnest(read_units::int[], read_families, read_keys, read_values::boolean[])
            AS r (unit, family, key, needs_value)
        LEFT JOIN LATERAL (
            SELECT * FROM {schema}.limpet_entries t
            WHERE t.namespace = ns AND t.family = r.family AND t.key = r.key OFFSET 0
        ) AS e ON true
        WHERE r.unit = ANY (stale);
    END IF;
END $$;

-- Write a group of puts, in one call. It does what limpet.transition.plan does, and a test compares the two. Each
-- put makes one change, so its revision is known, and the entry that it replaces need not be read first. Where that
-- does not hold, because an expired entry is replaced, or the namespace has no row yet, it refuses the group, and the
-- client calls limpet_apply instead.
-- A put that is its whole batch may expect a revision of its key, or 0 if the key must be absent. Where that does not
-- hold, the put is left out: it has no row in the result, uses no revision, and the client calls limpet_apply for it.
-- weight is the sum over all keys and values. lasts has, for each put, the position of the last put of its batch.
-- A column with the default for all puts is NULL: family data, kind json, the weight of key and value, no
-- time to live, no meta, each put the last of its batch, a cause made of the group's cause and the position, and
-- no expected revision.
CREATE FUNCTION {schema}.limpet_put(
    ns text, channel text, cause text, weight bigint, keys text[], vals text[], families text[], kinds text[],
    approximations text[], weights text[], ttls text[], metas text[], lasts text[], causes text[],
    expectations text[], seen_ms bigint DEFAULT 0
) RETURNS TABLE (
    number int, revision bigint, version bigint, created_revision bigint, created_ms bigint, at_ms bigint
) LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    put_count bigint := cardinality(keys);
    -- The numbers of the puts to write, if some are left out.
    kept int[];
    before bigint;
    now_ms bigint;
    superseded_ids jsonb;
    done bigint;
BEGIN
    IF expectations IS NOT NULL THEN
        now_ms := ({schema}.limpet_take(ns, seen_ms)).at_ms;
        -- A session of a caller's pool could have planned the next statement while the table was small.
        SET LOCAL enable_seqscan = off;
        -- A separate statement, because it must see what was committed while the one above waited.
        SELECT array_agg(a.n::int ORDER BY a.n),
            sum(coalesce(a.weight::bigint, octet_length(a.key) + octet_length(a.sent)))
        INTO kept, weight
        FROM unnest(families, keys, vals, weights, expectations)
            WITH ORDINALITY AS a (family, key, sent, weight, expected, n)
        WHERE a.expected IS NULL OR a.expected::bigint = coalesce((
            SELECT CASE WHEN t.expires_ms <= now_ms THEN -1 ELSE t.revision END FROM {schema}.limpet_entries t
            WHERE t.namespace = ns AND t.family = coalesce(a.family, 'data') AND t.key = a.key
        ), 0);
        IF kept IS NULL THEN
            RETURN;
        END IF;
        IF cardinality(kept) < put_count THEN
            put_count := cardinality(kept);
        ELSE
            kept := NULL;
        END IF;
    END IF;

    UPDATE {schema}.limpet_namespaces n
    SET revision = n.revision + put_count, at_ms = greatest(n.at_ms, {schema}.limpet_now_ms(), seen_ms),
        log_changes = n.log_changes + put_count, log_bytes = n.log_bytes + weight
    WHERE n.namespace = ns
    RETURNING n.revision - put_count, n.at_ms, n.superseded INTO before, now_ms, superseded_ids;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'limpet: a namespace begins with limpet_apply' USING ERRCODE = 'LP001';
    END IF;
    IF superseded_ids ?| array_append(causes, cause) THEN
        RAISE EXCEPTION 'limpet: this request was superseded by its own retry' USING ERRCODE = 'LP002';
    END IF;

    -- A separate statement, because it must see what was committed while the one above waited.
    RETURN QUERY
    WITH written AS (
        INSERT INTO {schema}.limpet_entries AS e
        SELECT ns, coalesce(a.family, 'data'), a.key, coalesce(a.kind, 'json'),
            CASE WHEN a.kind = 'bytes' THEN NULL ELSE coalesce(a.approximation, a.sent)::jsonb END,
            {schema}.limpet_stored(a.kind, a.sent), CASE WHEN a.approximation IS NOT NULL THEN true END,
            coalesce(a.weight::bigint, octet_length(a.key) + octet_length(a.sent)), 1, a.revision, a.revision,
            now_ms, now_ms, now_ms + a.ttl::bigint, a.meta
        FROM (
            SELECT p.*, before + CASE WHEN kept IS NULL THEN p.n ELSE array_position(kept, p.n::int) END AS revision
            FROM unnest(families, keys, kinds, vals, approximations, weights, ttls, metas)
                WITH ORDINALITY AS p (family, key, kind, sent, approximation, weight, ttl, meta, n)
            WHERE kept IS NULL OR p.n = ANY (kept)
        ) AS a
        ON CONFLICT (namespace, family, key) DO UPDATE SET
            kind = excluded.kind, value = excluded.value, stored = excluded.stored,
            is_lossy = excluded.is_lossy, size_bytes = excluded.size_bytes,
            version = e.version + 1, revision = excluded.revision, updated_ms = excluded.updated_ms,
            expires_ms = excluded.expires_ms, meta = excluded.meta, replaced_bytes = e.size_bytes
        WHERE e.expires_ms IS NULL OR e.expires_ms > now_ms
        -- All that the log needs: an item of an array is found by going through those before it.
        RETURNING coalesce(kept[e.revision - before], e.revision - before)::int AS n, e.family, e.key, e.kind, e.stored,
            e.size_bytes, e.version, e.revision, e.created_revision, e.created_ms, e.expires_ms, e.meta,
            CASE WHEN e.created_revision < e.revision THEN e.replaced_bytes ELSE 0 END AS replaced_bytes
    ), logged AS (
        INSERT INTO {schema}.limpet_changes
        SELECT ns, w.revision, w.revision + coalesce(lasts[w.n]::bigint - w.n, 0), now_ms, 'put', w.family,
            coalesce(causes[w.n], cause || '.' || coalesce(lasts[w.n], w.n::text)), w.size_bytes, w.key,
            w.kind, w.stored, w.version, w.revision, w.created_revision, w.created_ms, now_ms, w.expires_ms, w.meta
        FROM written w
    ), counted AS (
        UPDATE {schema}.limpet_namespaces t SET keys = t.keys + s.keys, size_bytes = t.size_bytes + s.size_bytes
        FROM (
            SELECT count(*) FILTER (WHERE w.created_revision = w.revision) AS keys,
                sum(w.size_bytes - w.replaced_bytes) AS size_bytes
            FROM written w WHERE w.family = 'data' AND w.size_bytes <> w.replaced_bytes
            HAVING count(*) > 0
        ) AS s
        WHERE t.namespace = ns
    )
    SELECT w.n, w.revision, w.version, w.created_revision, w.created_ms, now_ms FROM written w;
    GET DIAGNOSTICS done = ROW_COUNT;
    IF done < put_count THEN
        RAISE EXCEPTION 'limpet: what has expired ends with limpet_apply' USING ERRCODE = 'LP001';
    END IF;
    PERFORM {schema}.limpet_notify(channel, ns);
END $$;

-- The same for a single put, the most frequent write: four statements that each find one row. Where the expected
-- revision is not there, it refuses the put.
CREATE FUNCTION {schema}.limpet_put_one(
    ns text, channel text, cause text, weight bigint, name text, sent text, fam text, sort text, approximation text,
    ttl bigint, info text, named text, expected bigint, seen_ms bigint DEFAULT 0
) RETURNS TABLE (new_revision bigint, new_version bigint, first_revision bigint, first_ms bigint, now_ms bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    bytes CONSTANT bytea := {schema}.limpet_stored(sort, sent);
    superseded_ids jsonb;
    grown bigint;
BEGIN
    UPDATE {schema}.limpet_namespaces n
    SET revision = n.revision + 1, at_ms = greatest(n.at_ms, {schema}.limpet_now_ms(), seen_ms),
        log_changes = n.log_changes + 1, log_bytes = n.log_bytes + weight
    WHERE n.namespace = ns
    RETURNING n.revision, n.at_ms, n.superseded INTO new_revision, now_ms, superseded_ids;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'limpet: a namespace begins with limpet_apply' USING ERRCODE = 'LP001';
    END IF;
    IF superseded_ids ?| ARRAY[named, cause] THEN
        RAISE EXCEPTION 'limpet: this request was superseded by its own retry' USING ERRCODE = 'LP002';
    END IF;

    INSERT INTO {schema}.limpet_entries AS e
    VALUES (
        ns, fam, name, sort, CASE WHEN sort <> 'bytes' THEN coalesce(approximation, sent)::jsonb END, bytes,
        CASE WHEN approximation IS NOT NULL THEN true END, weight, 1, new_revision, new_revision, now_ms, now_ms,
        now_ms + ttl, info
    )
    ON CONFLICT (namespace, family, key) DO UPDATE SET
        kind = excluded.kind, value = excluded.value, stored = excluded.stored,
        is_lossy = excluded.is_lossy, size_bytes = excluded.size_bytes,
        version = e.version + 1, revision = excluded.revision, updated_ms = excluded.updated_ms,
        expires_ms = excluded.expires_ms, meta = excluded.meta, replaced_bytes = e.size_bytes
    WHERE (e.expires_ms IS NULL OR e.expires_ms > now_ms) AND (expected IS NULL OR e.revision = expected)
    RETURNING e.version, e.created_revision, e.created_ms,
        weight - CASE WHEN e.created_revision < e.revision THEN e.replaced_bytes ELSE 0 END
    INTO new_version, first_revision, first_ms, grown;
    -- If an entry was expected and there was none, this has just made one.
    IF NOT FOUND OR first_revision = new_revision AND expected > 0 THEN
        RAISE EXCEPTION 'limpet: what has expired, or is not as expected, is for limpet_apply' USING ERRCODE = 'LP001';
    END IF;

    INSERT INTO {schema}.limpet_changes VALUES (
        ns, new_revision, new_revision, now_ms, 'put', fam, coalesce(named, cause || '.1'), weight, name, sort, bytes,
        new_version, new_revision, first_revision, first_ms, now_ms, now_ms + ttl, info
    );
    IF grown <> 0 AND fam = 'data' THEN
        UPDATE {schema}.limpet_namespaces n
        SET keys = n.keys + (first_revision = new_revision)::int, size_bytes = n.size_bytes + grown
        WHERE n.namespace = ns;
    END IF;
    PERFORM {schema}.limpet_notify(channel, ns);
    RETURN NEXT;
END $$;

INSERT INTO {schema}.limpet_store VALUES (left(replace(gen_random_uuid()::text, '-', ''), 16), 1);

INSERT INTO {schema}.limpet_schema (version_num) VALUES ('0001');

-- Revision 0002

CREATE FUNCTION {schema}.limpet_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = 'limpet: the view ' || TG_TABLE_NAME || ' is for reading only',
        HINT = 'Write through the store: a row written here would have no revision, and no watcher would hear of it.';
END $$;

DO $$
BEGIN
    CREATE VIEW {schema}.plugin_kv_storage
    (plugin_name, key, value, expires_at, created_at, updated_at) AS
    SELECT namespace, key,
        CASE kind WHEN 'bytes' THEN '\x' || encode(stored, 'hex') ELSE convert_from(stored, 'UTF8') END,
        to_timestamp(expires_ms / 1000.0), to_timestamp(created_ms / 1000.0), to_timestamp(updated_ms / 1000.0)
    FROM {schema}.limpet_entries WHERE family = 'data';
    CREATE TRIGGER limpet_refuse INSTEAD OF INSERT OR UPDATE OR DELETE ON {schema}.plugin_kv_storage
    FOR EACH ROW EXECUTE FUNCTION {schema}.limpet_refuse();
EXCEPTION WHEN duplicate_table OR duplicate_object THEN
    RAISE NOTICE 'limpet: there is something else called plugin_kv_storage in this schema, so this view is left out';
END $$;

DO $$
BEGIN
    IF (SELECT relnamespace FROM pg_class WHERE oid = (SELECT max(tableoid) FROM {schema}.limpet_store))
        = to_regnamespace('public') THEN
        RETURN;
    END IF;
    CREATE VIEW {schema}.state
    (key, value, version, updated_at) AS
    SELECT key, CASE WHEN kind = 'bytes' THEN to_jsonb('\x' || encode(stored, 'hex')) ELSE value END, version,
        to_timestamp(updated_ms / 1000.0)
    FROM {schema}.limpet_entries
    WHERE namespace = 'state' AND family = 'data'
        AND (expires_ms IS NULL OR expires_ms > (SELECT greatest(
            {schema}.limpet_now_ms(), (SELECT n.at_ms FROM {schema}.limpet_namespaces n WHERE n.namespace = 'state')
        )));
    CREATE TRIGGER limpet_refuse INSTEAD OF INSERT OR UPDATE OR DELETE ON {schema}.state
    FOR EACH ROW EXECUTE FUNCTION {schema}.limpet_refuse();
EXCEPTION WHEN duplicate_table OR duplicate_object THEN
    RAISE NOTICE 'limpet: there is something else called state in this schema, so this view is left out';
END $$;

UPDATE {schema}.limpet_schema SET version_num='0002' WHERE {schema}.limpet_schema.version_num = '0001';
