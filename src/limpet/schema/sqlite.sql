-- Limpet's tables on SQLite, schema version 1. Plain SQL can read all of it:
-- a JSON value is JSON text, a record is a JSON object of its fields.

CREATE TABLE limpet_store (
    id     TEXT    NOT NULL,
    epoch  INTEGER NOT NULL,
    schema INTEGER NOT NULL
);

-- One row a namespace: its revision counter, and what is kept of it.
CREATE TABLE limpet_namespaces (
    namespace   TEXT    NOT NULL PRIMARY KEY,
    revision    INTEGER NOT NULL,
    floor       INTEGER NOT NULL,
    at_ms       INTEGER NOT NULL,
    keys        INTEGER NOT NULL,
    size_bytes  INTEGER NOT NULL,
    log_changes INTEGER NOT NULL,
    log_bytes   INTEGER NOT NULL
) WITHOUT ROWID;

-- The map.
CREATE TABLE limpet_entries (
    namespace        TEXT    NOT NULL,
    family           TEXT    NOT NULL,
    key              TEXT    NOT NULL,
    kind             TEXT    NOT NULL,
    value                    NOT NULL,
    version          INTEGER NOT NULL,
    revision         INTEGER NOT NULL,
    created_revision INTEGER NOT NULL,
    created_ms       INTEGER NOT NULL,
    updated_ms       INTEGER NOT NULL,
    expires_ms       INTEGER,
    meta             TEXT,
    PRIMARY KEY (namespace, family, key)
) WITHOUT ROWID;

CREATE INDEX limpet_due ON limpet_entries (namespace, expires_ms) WHERE expires_ms IS NOT NULL;

-- The log.
CREATE TABLE limpet_changes (
    namespace        TEXT    NOT NULL,
    revision         INTEGER NOT NULL,
    last_revision    INTEGER NOT NULL,
    at_ms            INTEGER NOT NULL,
    op               TEXT    NOT NULL,
    family           TEXT    NOT NULL,
    cause            TEXT,
    size_bytes       INTEGER NOT NULL,
    key              TEXT    NOT NULL,
    kind             TEXT,
    value,
    version          INTEGER NOT NULL,
    entry_revision   INTEGER NOT NULL,
    created_revision INTEGER NOT NULL,
    created_ms       INTEGER NOT NULL,
    updated_ms       INTEGER NOT NULL,
    expires_ms       INTEGER,
    meta             TEXT,
    PRIMARY KEY (namespace, revision)
) WITHOUT ROWID;
