"""Revision 0002: views for people and tools that read with plain SQL.

Where another program's table or view has one of these names already, our view is left out, and a downgrade leaves
theirs. In the schema ``public``, which all programs share by default, the view ``state`` is never made: it would be in
the way of an application's own table.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from limpet.schema.migrate import on_postgres, run, schema_name

revision = "0002"
down_revision = "0001"

# This view shows expired entries until they are swept, which helps to find out why a sweeper is behind.
_SQLITE = r"""CREATE VIEW IF NOT EXISTS plugin_kv_storage
    (plugin_name, key, value, expires_at, created_at, updated_at) AS
SELECT namespace, key,
    CASE kind WHEN 'bytes' THEN '\x' || lower(hex(value)) ELSE value END,
    strftime('%Y-%m-%d %H:%M:%f', expires_ms / 1000.0, 'unixepoch'),
    strftime('%Y-%m-%d %H:%M:%f', created_ms / 1000.0, 'unixepoch'),
    strftime('%Y-%m-%d %H:%M:%f', updated_ms / 1000.0, 'unixepoch')
FROM limpet_entries WHERE family = 'data'"""

# A view of one table can be written through, past revisions, log and watchers. The code of this
# error is the one that PostgreSQL has for views that cannot.
_REFUSE = """CREATE FUNCTION {schema}.limpet_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = '55000',
        MESSAGE = 'limpet: the view ' || TG_TABLE_NAME || ' is for reading only',
        HINT = 'Write through the store: a row written here would have no revision, and no watcher would hear of it.';
END $$"""

_POSTGRES = {
    "plugin_kv_storage": r"""
    (plugin_name, key, value, expires_at, created_at, updated_at) AS
    SELECT namespace, key,
        CASE kind WHEN 'bytes' THEN '\x' || encode(stored, 'hex') ELSE convert_from(stored, 'UTF8') END,
        to_timestamp(expires_ms / 1000.0), to_timestamp(created_ms / 1000.0), to_timestamp(updated_ms / 1000.0)
    FROM {schema}.limpet_entries WHERE family = 'data'""",
    "state": r"""
    (key, value, version, updated_at) AS
    SELECT key, CASE WHEN kind = 'bytes' THEN to_jsonb('\x' || encode(stored, 'hex')) ELSE value END, version,
        to_timestamp(updated_ms / 1000.0)
    FROM {schema}.limpet_entries
    WHERE namespace = 'state' AND family = 'data'
        AND (expires_ms IS NULL OR expires_ms > (SELECT greatest(
            {schema}.limpet_now_ms(), (SELECT n.at_ms FROM {schema}.limpet_namespaces n WHERE n.namespace = 'state')
        )))""",
}

# Create it and catch the error, because checking first would need the schema quoted as a literal too.
_UNLESS_TAKEN = """DO $$
BEGIN{unless}
    CREATE VIEW {{schema}}.{view}{definition};
    CREATE TRIGGER limpet_refuse INSTEAD OF INSERT OR UPDATE OR DELETE ON {{schema}}.{view}
    FOR EACH ROW EXECUTE FUNCTION {{schema}}.limpet_refuse();
EXCEPTION WHEN duplicate_table OR duplicate_object THEN
    RAISE NOTICE 'limpet: there is something else called {view} in this schema, so this view is left out';
END $$"""

_UNLESS_SHARED = """
    IF (SELECT relnamespace FROM pg_class WHERE oid = (SELECT max(tableoid) FROM {schema}.limpet_store))
        = to_regnamespace('public') THEN
        RETURN;
    END IF;"""

_OURS = """SELECT c.relname FROM pg_trigger t
JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE t.tgname = 'limpet_refuse' AND c.relkind = 'v' AND n.nspname = :schema"""


def upgrade() -> None:
    """Make the views, and on PostgreSQL the function by which they refuse to be written."""
    if not on_postgres():
        run(_SQLITE)
        return
    run(_REFUSE)
    for view, definition in _POSTGRES.items():
        unless = _UNLESS_SHARED if view == "state" else ""
        run(_UNLESS_TAKEN.format(view=view, definition=definition, unless=unless))


def downgrade() -> None:
    """Remove the views that are ours."""
    connection = op.get_bind()
    if on_postgres():
        for view in connection.scalars(sa.text(_OURS), {"schema": schema_name()}).all():
            # An operator may have renamed it, so it is found by its trigger.
            quoted = view.replace('"', '""')
            run(f'DROP VIEW {{schema}}."{quoted}"')
        run("DROP FUNCTION {schema}.limpet_refuse()")
        return
    found = connection.scalar(sa.text("SELECT sql FROM sqlite_master WHERE name = 'plugin_kv_storage'"))
    if found is not None and found.split() == _SQLITE.replace("IF NOT EXISTS ", "").split():
        run("DROP VIEW plugin_kv_storage")
