"""The statements of the PostgreSQL engine. ``{schema}`` stands for the quoted schema of the tables.

A commit runs in functions on the server (``limpet_put``, ``limpet_put_one`` and ``limpet_apply``), which the migrations
create. Everything else is plain SQL and stands here.
"""

from __future__ import annotations

from typing import Final

from limpet.engines.sql_columns import SWEPT
from limpet.schema import VERSION_TABLE

PAGE_BYTES_MAX: Final = 4_000_000

ENTRY_COLUMNS: Final = (
    "key, kind, stored, version, revision, created_revision, created_ms, updated_ms, expires_ms, meta"
)
_ENTRY_WITHOUT_VALUE: Final = ENTRY_COLUMNS.replace("kind, stored", "NULL, NULL")
LOG_COLUMNS: Final = (
    "op, revision, last_revision, at_ms, cause, family, key, kind, value, version, entry_revision, created_revision,"
    " created_ms, updated_ms, expires_ms, meta"
)
FINGERPRINT_COLUMNS: Final = "revision, last_revision, at_ms, version, created_revision, family, cause"

# The time of the namespace $1: the server's clock, or the latest recorded time of the namespace if that is later.
# PostgreSQL evaluates it once in a statement, and only if an entry with an expiry is met.
_TIME: Final = (
    "(SELECT greatest({schema}.limpet_now_ms(), (SELECT at_ms FROM {schema}.limpet_namespaces WHERE namespace = $1)))"
)

# Reading ----------------------------------------------------------------------

# Expired entries are read too, and left out by the engine, so that this handle knows what it has seen expire.
READ: Final = (
    f"SELECT {ENTRY_COLUMNS}, expires_ms <= {_TIME} FROM {{schema}}.limpet_entries"
    " WHERE namespace = $1 AND family = $2 AND key = ANY ($3::text::text[])"
)
# Before PostgreSQL 17, ANY on a table that was not analysed yet reads the whole namespace.
READ_EACH: Final = (
    "SELECT found.* FROM unnest($3::text::text[]) AS wanted (name) CROSS JOIN LATERAL ("
    + READ.replace("key = ANY ($3::text::text[])", "key = wanted.name")
    + " OFFSET 0) AS found"
)

_PAGE: Final = (
    "SELECT {columns} FROM {schema}.limpet_entries WHERE namespace = $1 AND family = $2 AND key >= $3 AND key < $4"
    " AND (expires_ms IS NULL OR expires_ms > time.now_ms){conditions} ORDER BY key LIMIT $5"
)
# A page comes with its time, even if it is empty, so that the time of this handle never goes back. $6 is the latest
# time that the handle has seen.
_PAGE_WITH_TIME: Final = (
    f"SELECT found.*, time.now_ms FROM (SELECT greatest({_TIME}, $6) AS now_ms) AS time"
    " LEFT JOIN LATERAL ({page}) AS found ON true ORDER BY found.key"
)
SCAN_KEYS: Final = (
    _PAGE_WITH_TIME.replace("{page}", _PAGE).replace("{columns}", _ENTRY_WITHOUT_VALUE).replace("{conditions}", "")
)
# A page with values ends at PAGE_BYTES_MAX. The last column but one is the number of rows without that limit.
# `filters.filter_sql` makes the text for {conditions}.
SCAN: Final = _PAGE_WITH_TIME.replace(
    "{page}",
    f"SELECT {ENTRY_COLUMNS}, total FROM ("
    "SELECT *, sum(size_bytes) OVER (ORDER BY key) - size_bytes AS before, count(*) OVER () AS total FROM ("
    + _PAGE.replace("{columns}", "*")
    + f") AS page) AS counted WHERE before <= {PAGE_BYTES_MAX}",
)


def reverse_order(page: str) -> str:
    """One of the two statements above, with the last keys first."""
    return page.replace("ORDER BY key", "ORDER BY key DESC").replace("ORDER BY found.key", "ORDER BY found.key DESC")


_IN_SPAN: Final = "FROM {schema}.limpet_entries WHERE namespace = $1 AND family = $2 AND key >= $3 AND key < $4"
# Those that have expired are found by their time. By their keys, each entry of the span would be read for it.
_EXPIRED: Final = (
    "FROM (SELECT key FROM {schema}.limpet_entries WHERE namespace = $1 AND family = $2 AND expires_ms <= now_ms"
    " OFFSET 0) AS expired WHERE key >= $3 AND key < $4"
)
COUNT: Final = (
    f"SELECT (SELECT count(*) {_IN_SPAN}) - (SELECT count(*) {_EXPIRED}), now_ms"
    f" FROM (SELECT greatest({_TIME}, $5) AS now_ms) AS time"
)
NAMESPACES: Final = "SELECT namespace FROM {schema}.limpet_namespaces WHERE revision > 0"
# A part for each family, as the index has them. So no receipt is stepped over, and none is read beyond the limit.
DUE: Final = (
    f"SELECT due.* FROM (SELECT greatest({_TIME}, $3) AS now_ms OFFSET 0) AS time,"
    f" unnest('{{{','.join(SWEPT)}}}'::text[]) AS swept (family), LATERAL ("
    f"SELECT {_ENTRY_WITHOUT_VALUE}, size_bytes, e.family FROM {{schema}}.limpet_entries AS e WHERE namespace = $1"
    " AND e.family = swept.family AND expires_ms <= now_ms ORDER BY expires_ms LIMIT $2"
    ") AS due ORDER BY due.expires_ms LIMIT $2"
)
STATUS: Final = (
    "SELECT revision, floor, keys, size_bytes, log_changes, log_bytes, (SELECT epoch FROM {schema}.limpet_store),"
    " greatest(clock_ms, at_ms), clock_ms"
    " FROM (SELECT $1::text, {schema}.limpet_now_ms()) AS a (namespace, clock_ms)"
    " LEFT JOIN {schema}.limpet_namespaces USING (namespace)"
)

# Committing -------------------------------------------------------------------

# Arrays are arrays of text, which the driver can encode. For any other type it queries the server first, on each
# connection. It also takes half a microsecond per item, so that the columns of every put go as one text: see
# `rows.array_text`.
PUT: Final = (
    "SELECT number, revision, version, created_revision, created_ms, at_ms"
    " FROM {schema}.limpet_put($1, $2, $3, $4, $5::text::text[], string_to_array($6, E'\\n'), $7, $8, $9, $10, $11,"
    " $12, $13, $14, $15, $16)"
)
PUT_ONE: Final = "SELECT * FROM {schema}.limpet_put_one($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)"
APPLY: Final = f"SELECT * FROM {{schema}}.limpet_apply({', '.join(f'${number}' for number in range(1, 36))})"
CHANGES_OF_REQUEST: Final = (
    f"SELECT {LOG_COLUMNS} FROM {{schema}}.limpet_changes WHERE namespace = $1 AND revision > $2 AND cause = $3"
)

# The log ----------------------------------------------------------------------

LAST_CHANGE: Final = (
    f"SELECT {FINGERPRINT_COLUMNS} FROM {{schema}}.limpet_changes WHERE namespace = $1 AND revision <= $2"
    " ORDER BY revision DESC LIMIT 1"
)
# What was trimmed stays in the index until it is vacuumed. So whatever begins at the oldest change begins at the floor.
_LAST_KEPT_CHANGE: Final = LAST_CHANGE.replace("revision <= $2", "revision <= $2 AND revision > n.floor")
LOG_PAGE: Final = (
    "SELECT n.revision, n.floor, c.*, n.floor_print, b.* FROM {schema}.limpet_namespaces n"
    f" LEFT JOIN LATERAL ({_LAST_KEPT_CHANGE}) AS b ON true LEFT JOIN LATERAL ("
    f"SELECT {LOG_COLUMNS}, count(*) OVER () AS total,"
    " sum(size_bytes) OVER (ORDER BY revision) - size_bytes AS before FROM ("
    "SELECT * FROM {schema}.limpet_changes WHERE namespace = $1 AND revision > $2"
    " AND ($4::text IS NULL OR family = 'data' AND key >= $4 AND key < $5)"
    f" ORDER BY revision LIMIT $3) AS page) AS c ON c.before <= {PAGE_BYTES_MAX}"
    " WHERE n.namespace = $1 ORDER BY c.revision"
)

# Trimming ---------------------------------------------------------------------

TAKE: Final = "SELECT floor, at_ms, log_changes, log_bytes FROM {schema}.limpet_take($1, $2)"
OLDEST_CHANGES: Final = (
    "SELECT revision, at_ms, size_bytes FROM {schema}.limpet_changes WHERE namespace = $1 AND revision > $2"
    " ORDER BY revision LIMIT $3"
)
DROP_CHANGES: Final = "DELETE FROM {schema}.limpet_changes WHERE namespace = $1 AND revision > $2 AND revision <= $3"
SET_FLOOR: Final = (
    "UPDATE {schema}.limpet_namespaces SET floor = $2, log_changes = log_changes - $3, log_bytes = log_bytes - $4,"
    " floor_print = $5 WHERE namespace = $1"
)
DROP_RECEIPTS: Final = (
    f"DELETE FROM {{schema}}.limpet_entries WHERE namespace = $1 AND family = 'receipt' AND expires_ms <= {_TIME}"
)
FORGET_SUPERSEDED: Final = (
    "UPDATE {schema}.limpet_namespaces SET superseded = ("
    "SELECT jsonb_object_agg(name, mark) FROM jsonb_each(superseded) AS one (name, mark)"
    " WHERE (mark ->> 0)::bigint >= {schema}.limpet_now_ms() - 3600000) WHERE namespace = $1 AND superseded IS NOT NULL"
)

# Opening and maintenance ------------------------------------------------------

SESSION_DEFAULTS: Final = (
    "SELECT pg_is_in_recovery(), current_setting('default_transaction_isolation'),"
    " current_setting('default_transaction_read_only')"
)
HAS_TABLES: Final = (
    "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE n.nspname = $1 AND c.relname = 'limpet_store'"
)
LOCK_CREATION: Final = "SELECT pg_advisory_xact_lock(hashtextextended('limpet ' || $1, 0))"
SCHEMA_REVISION: Final = f"SELECT version_num FROM {{schema}}.{VERSION_TABLE}"
STORE_ID: Final = "SELECT id FROM {schema}.limpet_store"
DURABILITY_SETTINGS: Final = (
    "SELECT current_setting('fsync'), current_setting('synchronous_commit'),"
    " current_setting('synchronous_standby_names')"
)
RAISE_EPOCH: Final = "UPDATE {schema}.limpet_store SET epoch = epoch + 1 RETURNING epoch"
SKIP_REVISIONS: Final = "UPDATE {schema}.limpet_namespaces SET revision = revision + $1"
INDEX_COMMENTS: Final = (
    "SELECT obj_description(indexrelid, 'pg_class') FROM pg_catalog.pg_index WHERE indrelid = $1::text::regclass"
    " AND indisvalid AND obj_description(indexrelid, 'pg_class') LIKE '[\"%'"
)

# Said before LISTEN, and held by the session: see limpet_notify.
WILL_LISTEN: Final = "SELECT pg_advisory_lock_shared(hashtextextended($1, part)) FROM generate_series(0, 15) AS part"
