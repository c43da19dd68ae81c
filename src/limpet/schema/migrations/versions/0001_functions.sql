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

-- Lock the row of a namespace, and read the entries under these keys, expired or not.
CREATE FUNCTION {schema}.limpet_hold(ns text, families text[], keys text[], seen_ms bigint DEFAULT 0)
RETURNS TABLE (
    last_revision bigint, floor bigint, at_ms bigint, key_count bigint, size_bytes bigint, log_changes bigint,
    log_bytes bigint, family text, key text, kind text, stored bytea, version bigint, revision bigint,
    created_revision bigint, created_ms bigint, updated_ms bigint, expires_ms bigint, meta text
) LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    taken {schema}.limpet_namespaces;
BEGIN
    taken := {schema}.limpet_take(ns, seen_ms);
    -- A separate statement, because it must see what was committed while the one above waited.
    RETURN QUERY
    SELECT taken.revision, taken.floor, taken.at_ms, taken.keys, taken.size_bytes, taken.log_changes, taken.log_bytes,
        a.family, a.key, e.kind, e.stored, e.version, e.revision,
        e.created_revision, e.created_ms, e.updated_ms, e.expires_ms, e.meta
    FROM unnest(families, keys) AS a (family, key)
    LEFT JOIN LATERAL (
        SELECT * FROM {schema}.limpet_entries t
        WHERE t.namespace = ns AND t.family = a.family AND t.key = a.key OFFSET 0
    ) AS e ON true;
END $$;

-- Write what a client planned while it held the lock of limpet_hold. Each row is an entry as a change
-- left it, in order; a row without a revision is a receipt, which is stored but not logged.
CREATE FUNCTION {schema}.limpet_apply(
    ns text, channel text, now_ms bigint, new_revision bigint, new_keys bigint, new_size bigint, new_changes bigint,
    new_log bigint, ops text[], revisions text[], last_revisions text[], causes text[], families text[], keys text[],
    kinds text[], vals text[], approximations text[], weights text[], sizes text[], versions text[],
    entry_revisions text[], created_revisions text[], createds text[], updateds text[], expires text[], metas text[]
) RETURNS void LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    WITH left_over AS (
        SELECT DISTINCT ON (r.family, r.key) r.*
        FROM unnest(
            ops, families, keys, kinds, vals, approximations, weights::bigint[], versions::bigint[],
            entry_revisions::bigint[], created_revisions::bigint[], createds::bigint[], updateds::bigint[],
            expires::bigint[], metas
        ) WITH ORDINALITY AS r (
            op, family, key, kind, stored, approximation, weight, version, revision, created_revision,
            created_ms, updated_ms, expires_ms, meta, n
        )
        ORDER BY r.family, r.key, r.n DESC
    ), erased AS (
        DELETE FROM {schema}.limpet_entries e
        WHERE e.ctid = ANY (ARRAY(
            SELECT t.row_id FROM left_over r
            CROSS JOIN LATERAL (
                SELECT f.ctid AS row_id FROM {schema}.limpet_entries f
                WHERE f.namespace = ns AND f.family = r.family AND f.key = r.key OFFSET 0
            ) AS t
            WHERE r.op IN ('delete', 'expire')
        ))
    )
    INSERT INTO {schema}.limpet_entries AS e
    SELECT ns, r.family, r.key, r.kind,
        CASE WHEN r.kind <> 'bytes' THEN coalesce(r.approximation, r.stored)::jsonb END,
        {schema}.limpet_stored(r.kind, r.stored), CASE WHEN r.approximation IS NOT NULL THEN true END,
        r.weight, r.version, r.revision, r.created_revision, r.created_ms, r.updated_ms, r.expires_ms, r.meta
    FROM left_over r WHERE r.op NOT IN ('delete', 'expire')
    ON CONFLICT (namespace, family, key) DO UPDATE SET
        kind = excluded.kind, value = excluded.value, stored = excluded.stored,
        is_lossy = excluded.is_lossy, size_bytes = excluded.size_bytes,
        version = excluded.version, revision = excluded.revision, created_revision = excluded.created_revision,
        created_ms = excluded.created_ms, updated_ms = excluded.updated_ms, expires_ms = excluded.expires_ms,
        meta = excluded.meta;

    IF new_revision IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO {schema}.limpet_changes
    SELECT ns, r.revision, r.last_revision, now_ms, r.op, r.family, r.cause, r.size, r.key,
        CASE WHEN r.op <> 'touch' THEN r.kind END,
        CASE WHEN r.op <> 'touch' THEN {schema}.limpet_stored(r.kind, r.stored) END,
        r.version, r.entry_revision, r.created_revision, r.created_ms, r.updated_ms, r.expires_ms, r.meta
    FROM unnest(
        ops, revisions::bigint[], last_revisions::bigint[], causes, families, keys, kinds, vals, sizes::bigint[],
        versions::bigint[], entry_revisions::bigint[], created_revisions::bigint[], createds::bigint[],
        updateds::bigint[], expires::bigint[], metas
    ) AS r (
        op, revision, last_revision, cause, family, key, kind, stored, size, version, entry_revision,
        created_revision, created_ms, updated_ms, expires_ms, meta
    ) WHERE r.revision IS NOT NULL;
    UPDATE {schema}.limpet_namespaces n
    SET revision = new_revision, at_ms = now_ms, keys = new_keys, size_bytes = new_size, log_changes = new_changes,
        log_bytes = new_log
    WHERE n.namespace = ns;
    PERFORM pg_notify(channel, ns);
END $$;

-- Write a group of puts, in one call. It does what limpet.transition.plan does, and a test compares the two. Each
-- put makes one change, so its revision is known, and the entry that it replaces need not be read first. Where that
-- does not hold, because an expired entry is replaced, or the namespace has no row yet, it refuses the group, and the
-- client calls limpet_commit instead.
-- A put that is its whole batch may expect a revision of its key, or 0 if the key must be absent. Where that does not
-- hold, the put is left out: it has no row in the result, uses no revision, and the client calls limpet_commit for it.
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
        RAISE EXCEPTION 'limpet: a namespace begins with limpet_commit' USING ERRCODE = 'LP001';
    END IF;
    IF superseded_ids ?| array_append(causes, cause) THEN
        RAISE EXCEPTION 'limpet: this request was superseded by its own retry';
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
            CASE WHEN e.version > 1 THEN e.replaced_bytes ELSE 0 END AS replaced_bytes
    ), logged AS (
        INSERT INTO {schema}.limpet_changes
        SELECT ns, w.revision, w.revision + coalesce(lasts[w.n]::bigint - w.n, 0), now_ms, 'put', w.family,
            coalesce(causes[w.n], cause || '.' || coalesce(lasts[w.n], w.n::text)), w.size_bytes, w.key,
            w.kind, w.stored, w.version, w.revision, w.created_revision, w.created_ms, now_ms, w.expires_ms, w.meta
        FROM written w
    ), counted AS (
        UPDATE {schema}.limpet_namespaces t SET keys = t.keys + s.keys, size_bytes = t.size_bytes + s.size_bytes
        FROM (
            SELECT count(*) FILTER (WHERE w.version = 1) AS keys, sum(w.size_bytes - w.replaced_bytes) AS size_bytes
            FROM written w WHERE w.family = 'data' AND w.size_bytes <> w.replaced_bytes
            HAVING count(*) > 0
        ) AS s
        WHERE t.namespace = ns
    )
    SELECT w.n, w.revision, w.version, w.created_revision, w.created_ms, now_ms FROM written w;
    GET DIAGNOSTICS done = ROW_COUNT;
    IF done < put_count THEN
        RAISE EXCEPTION 'limpet: what has expired ends with limpet_commit' USING ERRCODE = 'LP001';
    END IF;
    PERFORM pg_notify(channel, ns);
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
        RAISE EXCEPTION 'limpet: a namespace begins with limpet_commit' USING ERRCODE = 'LP001';
    END IF;
    IF superseded_ids ?| ARRAY[named, cause] THEN
        RAISE EXCEPTION 'limpet: this request was superseded by its own retry';
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
        weight - CASE WHEN e.version > 1 THEN e.replaced_bytes ELSE 0 END
    INTO new_version, first_revision, first_ms, grown;
    -- If an entry was expected and there was none, this has just made one, of version 1.
    IF NOT FOUND OR new_version = 1 AND expected > 0 THEN
        RAISE EXCEPTION 'limpet: what has expired, or is not as expected, is for limpet_commit' USING ERRCODE = 'LP001';
    END IF;

    INSERT INTO {schema}.limpet_changes VALUES (
        ns, new_revision, new_revision, now_ms, 'put', fam, coalesce(named, cause || '.1'), weight, name, sort, bytes,
        new_version, new_revision, first_revision, first_ms, now_ms, now_ms + ttl, info
    );
    IF grown <> 0 AND fam = 'data' THEN
        UPDATE {schema}.limpet_namespaces n
        SET keys = n.keys + (new_version = 1)::int, size_bytes = n.size_bytes + grown
        WHERE n.namespace = ns;
    END IF;
    PERFORM pg_notify(channel, ns);
    RETURN NEXT;
END $$;

-- Decide and write a group of ordinary batches in one call: puts, touches and deletes of distinct
-- keys, with guards on versions, revisions and existence. It does what limpet.transition.plan
-- does, and a test compares the two. A batch is identified by the position of its last write. Rows with a
-- guard are refusals and carry the entry found. Existing rows are written by their ctid, because a join that
-- was planned while the table was empty would read all of it later.
CREATE FUNCTION {schema}.limpet_commit(
    ns text, channel text, cause text, batches text[], ops text[], families text[], keys text[], kinds text[],
    vals text[], approximations text[], weights text[], ttls text[], metas text[], causes text[], guard_batches text[],
    guard_families text[], guard_keys text[], guard_tests text[], guard_numbers text[], seen_ms bigint DEFAULT 0
) RETURNS TABLE (
    batch int, write int, guard int, last_revision bigint, at_ms bigint, kind text, stored bytea,
    version bigint, revision bigint, created_revision bigint, created_ms bigint, updated_ms bigint,
    expires_ms bigint, meta text
) LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    taken {schema}.limpet_namespaces;
    now_ms bigint;
BEGIN
    taken := {schema}.limpet_take(ns, seen_ms);
    now_ms := taken.at_ms;
    IF taken.superseded ?| array_append(causes, cause) THEN
        RAISE EXCEPTION 'limpet: this request was superseded by its own retry';
    END IF;

    -- A separate statement, because it must see what was committed while the one above waited.
    RETURN QUERY
    WITH refused AS (
        SELECT DISTINCT ON (g.batch) g.batch, g.n, e.*
        FROM unnest(guard_batches::int[], guard_families, guard_keys, guard_tests, guard_numbers::bigint[])
            WITH ORDINALITY AS g (batch, family, key, test, number, n)
        LEFT JOIN LATERAL (
            SELECT t.kind, t.stored, t.version, t.revision, t.created_revision, t.created_ms, t.updated_ms,
                t.expires_ms, t.meta
            FROM {schema}.limpet_entries t
            WHERE t.namespace = ns AND t.family = g.family AND t.key = g.key
                AND (t.expires_ms IS NULL OR t.expires_ms > now_ms) OFFSET 0
        ) AS e ON true
        WHERE NOT CASE g.test
            WHEN 'absent' THEN e.version IS NULL
            WHEN 'present' THEN e.version IS NOT NULL
            WHEN 'version' THEN coalesce(e.version = g.number, false)
            WHEN 'revision' THEN coalesce(e.revision = g.number, false)
            WHEN 'held' THEN coalesce(e.created_revision = g.number, false)
        END
        ORDER BY g.batch, g.n
    ), met AS (
        SELECT a.*, e.*, e.version IS NOT NULL AS is_stored,
            e.version IS NOT NULL AND (e.expires_ms IS NULL OR e.expires_ms > now_ms) AS is_live
        FROM unnest(
            batches::int[], ops, families, keys, kinds, vals, approximations, weights::bigint[], ttls::bigint[], metas,
            causes
        ) WITH ORDINALITY AS a (batch, op, family, key, new_kind, sent, approximation, weight, ttl, new_meta, named, n)
        LEFT JOIN LATERAL (
            SELECT t.ctid AS row_id, t.kind, t.stored, t.size_bytes, t.version, t.revision,
                t.created_revision, t.created_ms, t.updated_ms, t.expires_ms, t.meta
            FROM {schema}.limpet_entries t
            WHERE t.namespace = ns AND t.family = a.family AND t.key = a.key OFFSET 0
        ) AS e ON true
        WHERE NOT EXISTS (SELECT FROM refused r WHERE r.batch = a.batch)
    ), numbered AS (
        -- An incarnation that expired unswept ends before the put that replaces it.
        SELECT m.*, m.op = 'put' AND m.is_stored AND NOT m.is_live AS is_ending, m.op = 'put' OR m.is_live AS acts,
            taken.revision + sum(
                CASE WHEN m.op = 'put' THEN 1 + (m.is_stored AND NOT m.is_live)::int ELSE m.is_live::int END
            ) OVER (ORDER BY m.batch, m.n) AS new_revision
        FROM met m
    ), decided AS (
        SELECT d.*,
            max(d.new_revision) OVER (PARTITION BY d.batch) AS last_revision,
            CASE WHEN d.op <> 'put' THEN d.version WHEN d.is_live THEN d.version + 1 ELSE 1 END AS after_version,
            CASE WHEN d.op IN ('put', 'touch') THEN d.new_revision ELSE d.revision END AS after_revision,
            CASE WHEN d.is_live THEN d.created_revision ELSE d.new_revision END AS after_created_revision,
            CASE WHEN d.is_live THEN d.created_ms ELSE now_ms END AS after_created_ms,
            CASE WHEN d.op = 'put' THEN now_ms ELSE d.updated_ms END AS after_updated_ms,
            CASE WHEN d.op NOT IN ('put', 'touch') OR d.ttl = -1 AND d.is_live THEN d.expires_ms
                WHEN d.ttl <> -1 THEN now_ms + d.ttl END AS after_expires_ms,
            CASE WHEN d.op <> 'put' OR d.new_meta = '' AND d.is_live THEN d.meta
                WHEN d.new_meta <> '' THEN d.new_meta END AS after_meta,
            CASE WHEN d.op = 'put' THEN d.weight WHEN d.op = 'delete' THEN octet_length(d.key)
                ELSE d.size_bytes END AS log_size
        FROM numbered d
    ), logged AS (
        INSERT INTO {schema}.limpet_changes
        SELECT ns, d.new_revision - 1, d.last_revision, now_ms, 'expire', d.family, NULL, octet_length(d.key), d.key,
            NULL, NULL, d.version, d.revision, d.created_revision, d.created_ms, d.updated_ms, d.expires_ms, d.meta
        FROM decided d WHERE d.is_ending
        UNION ALL
        SELECT ns, d.new_revision, d.last_revision, now_ms, CASE d.op WHEN 'take' THEN 'delete' ELSE d.op END,
            d.family, coalesce(d.named, cause || '.' || d.batch), d.log_size, d.key,
            CASE d.op WHEN 'put' THEN d.new_kind WHEN 'take' THEN d.kind END,
            CASE d.op WHEN 'put' THEN {schema}.limpet_stored(d.new_kind, d.sent) WHEN 'take' THEN d.stored END,
            d.after_version, d.after_revision, d.after_created_revision, d.after_created_ms, d.after_updated_ms,
            d.after_expires_ms, d.after_meta
        FROM decided d WHERE d.acts
    ), written AS (
        INSERT INTO {schema}.limpet_entries AS e
        SELECT ns, d.family, d.key, d.new_kind,
            CASE WHEN d.new_kind <> 'bytes' THEN coalesce(d.approximation, d.sent)::jsonb END,
            {schema}.limpet_stored(d.new_kind, d.sent), CASE WHEN d.approximation IS NOT NULL THEN true END,
            d.weight, d.after_version, d.after_revision, d.after_created_revision, d.after_created_ms,
            d.after_updated_ms, d.after_expires_ms, d.after_meta
        FROM decided d WHERE d.op = 'put'
        ON CONFLICT (namespace, family, key) DO UPDATE SET
            kind = excluded.kind, value = excluded.value, stored = excluded.stored,
            is_lossy = excluded.is_lossy, size_bytes = excluded.size_bytes,
            version = excluded.version, revision = excluded.revision, created_revision = excluded.created_revision,
            created_ms = excluded.created_ms, updated_ms = excluded.updated_ms, expires_ms = excluded.expires_ms,
            meta = excluded.meta
    ), touched AS (
        UPDATE {schema}.limpet_entries e SET revision = d.after_revision, expires_ms = d.after_expires_ms
        FROM decided d WHERE d.op = 'touch' AND d.acts AND e.ctid = d.row_id
    ), erased AS (
        DELETE FROM {schema}.limpet_entries e
        WHERE e.ctid = ANY (ARRAY(SELECT d.row_id FROM decided d WHERE d.op IN ('delete', 'take') AND d.acts))
    ), counted AS (
        UPDATE {schema}.limpet_namespaces n
        SET revision = s.revision, at_ms = now_ms, keys = n.keys + s.keys, size_bytes = n.size_bytes + s.size_bytes,
            log_changes = n.log_changes + s.changes, log_bytes = n.log_bytes + s.log_bytes
        FROM (
            SELECT max(d.new_revision) AS revision,
                count(*) + count(*) FILTER (WHERE d.is_ending) AS changes,
                sum(d.log_size) + coalesce(sum(octet_length(d.key)) FILTER (WHERE d.is_ending), 0) AS log_bytes,
                count(*) FILTER (WHERE d.family = 'data' AND d.op = 'put' AND NOT d.is_stored)
                    - count(*) FILTER (WHERE d.family = 'data' AND d.op IN ('delete', 'take')) AS keys,
                coalesce(sum(CASE WHEN d.op = 'put' THEN d.weight - coalesce(d.size_bytes, 0)
                    WHEN d.op IN ('delete', 'take') THEN -d.size_bytes END) FILTER (WHERE d.family = 'data'), 0)
                    AS size_bytes
            FROM decided d WHERE d.acts
        ) AS s
        WHERE n.namespace = ns AND s.revision IS NOT NULL
        RETURNING pg_notify(channel, ns)::text
    )
    SELECT d.batch, d.n::int, NULL::int, d.last_revision, now_ms,
        CASE WHEN d.op IN ('touch', 'take') THEN d.kind END,
        CASE WHEN d.op IN ('touch', 'take') THEN d.stored END,
        CASE WHEN d.acts THEN d.after_version END, d.after_revision, d.after_created_revision, d.after_created_ms,
        d.after_updated_ms, d.after_expires_ms, d.after_meta
    FROM decided d
    UNION ALL
    SELECT r.batch, NULL, r.n::int, NULL, now_ms, r.kind, r.stored,
        r.version, r.revision, r.created_revision, r.created_ms, r.updated_ms, r.expires_ms, r.meta
    FROM refused r;
END $$;
