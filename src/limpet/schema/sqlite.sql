-- Limpet's tables on SQLite, schema revision 0002. Plain SQL can read all of it:
-- a JSON value is JSON text, a record is a JSON object of its fields.
-- Written by python -m limpet.schema.render, from the migrations.

CREATE TABLE limpet_schema (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT limpet_schema_pkc PRIMARY KEY (version_num)
);

-- Revision 0001

CREATE TABLE limpet_store (
    id TEXT NOT NULL,
    epoch INTEGER NOT NULL
);

CREATE TABLE limpet_namespaces (
    namespace TEXT NOT NULL,
    revision INTEGER NOT NULL,
    floor INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    keys INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    dropped_changes INTEGER NOT NULL,
    dropped_bytes INTEGER NOT NULL,
    floor_print TEXT,
    PRIMARY KEY (namespace)
) WITHOUT ROWID;

CREATE TABLE limpet_entries (
    namespace TEXT NOT NULL,
    family TEXT NOT NULL,
    "key" TEXT NOT NULL,
    kind TEXT NOT NULL,
    value BLOB NOT NULL,
    version INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    created_revision INTEGER NOT NULL,
    created_ms INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL,
    expires_ms INTEGER,
    meta TEXT,
    PRIMARY KEY (namespace, family, "key")
) WITHOUT ROWID;

CREATE INDEX limpet_due ON limpet_entries (namespace, family, expires_ms) WHERE expires_ms IS NOT NULL;

CREATE TABLE limpet_changes (
    namespace TEXT NOT NULL,
    revision INTEGER NOT NULL,
    last_revision INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    op TEXT NOT NULL,
    family TEXT NOT NULL,
    cause TEXT,
    size_bytes INTEGER NOT NULL,
    "key" TEXT NOT NULL,
    kind TEXT,
    value BLOB,
    version INTEGER NOT NULL,
    entry_revision INTEGER NOT NULL,
    created_revision INTEGER NOT NULL,
    created_ms INTEGER NOT NULL,
    updated_ms INTEGER NOT NULL,
    expires_ms INTEGER,
    meta TEXT,
    total_keys INTEGER,
    total_bytes INTEGER,
    logged_changes INTEGER,
    logged_bytes INTEGER,
    PRIMARY KEY (namespace, revision)
) WITHOUT ROWID;

CREATE VIEW limpet_counters AS
SELECT n.namespace, max(n.revision, ifnull(c.revision, 0)) AS revision, n.floor,
    max(n.at_ms, ifnull(c.at_ms, 0)) AS at_ms,
    ifnull(c.total_keys, n.keys) AS keys, ifnull(c.total_bytes, n.size_bytes) AS size_bytes,
    ifnull(c.logged_changes, n.dropped_changes) - n.dropped_changes AS log_changes,
    ifnull(c.logged_bytes, n.dropped_bytes) - n.dropped_bytes AS log_bytes,
    n.dropped_changes, n.dropped_bytes, n.floor_print
FROM limpet_namespaces AS n LEFT JOIN limpet_changes AS c ON c.namespace = n.namespace
    AND c.revision = (SELECT max(m.revision) FROM limpet_changes AS m WHERE m.namespace = n.namespace);

INSERT INTO limpet_store VALUES (lower(hex(randomblob(8))), 1);

INSERT INTO limpet_schema (version_num) VALUES ('0001');

-- Revision 0002

CREATE VIEW IF NOT EXISTS plugin_kv_storage
    (plugin_name, key, value, expires_at, created_at, updated_at) AS
SELECT namespace, key,
    CASE kind WHEN 'bytes' THEN '\x' || lower(hex(value)) ELSE value END,
    strftime('%Y-%m-%d %H:%M:%f', expires_ms / 1000.0, 'unixepoch'),
    strftime('%Y-%m-%d %H:%M:%f', created_ms / 1000.0, 'unixepoch'),
    strftime('%Y-%m-%d %H:%M:%f', updated_ms / 1000.0, 'unixepoch')
FROM limpet_entries WHERE family = 'data';

UPDATE limpet_schema SET version_num='0002' WHERE limpet_schema.version_num = '0001';
