"""The PostgreSQL engine: many processes and machines on one database.

A namespace has one row that whoever writes holds to the end of its transaction, so revisions
become visible in their order and a watcher misses nothing. Writes are grouped: while one
transaction of a namespace is under way here, the next group gathers.

There are two ways to commit a group. An ordinary one (puts, touches and deletes of distinct
keys) is decided and written by a function on the server, in one round trip; puts that nothing
guards have a quicker function of their own. Any other group is decided here by
`limpet.transition.plan`, in a transaction that holds the namespace: read, plan, write, commit.
All are held to the same suite, and the functions to `plan` itself.

The table of changes is the truth for watchers. A notification is only a doorbell, and behind
it they look by themselves from time to time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qsl, urlencode

import asyncpg
import msgspec

from limpet import codec
from limpet.clock import Clock, wake
from limpet.codec import Stored
from limpet.commit.group import NotApplied
from limpet.commit.receipts import may_be_superseded, superseded_error
from limpet.engines.server_engine import (
    CommitResult,
    ReadResult,
    ServerEngine,
    Ticket,
    request_group,
    weight_bytes,
    with_last_positions,
)
from limpet.engines.sql_columns import as_stored, as_text
from limpet.engines.sql_indexes import literal, postgres_expressions, postgres_name, postgres_parts, quoted
from limpet.errors import (
    Compacted,
    Corrupt,
    InvalidValue,
    LimpetError,
    PermissionDenied,
    Unavailable,
)
from limpet.index import CANDIDATES_MAX, IndexProbe
from limpet.keys import KEY_BYTES_MAX, Span
from limpet.model import (
    ABSENT,
    BEGINNING,
    KEEP,
    PRESENT,
    Batch,
    Change,
    Commit,
    Delete,
    Durability,
    Entry,
    Expire,
    Family,
    Filter,
    Guard,
    HeldBy,
    LogPage,
    Put,
    Refusal,
    Revision,
    ScanPage,
    Status,
    Test,
    Touch,
    Traits,
    Version,
    Window,
    Write,
    fingerprint,
)
from limpet.request_ids import new_request_id
from limpet.schema import (
    REVISION,
    SHARED_SCHEMA,
    TAKEN_ON_POSTGRES,
    VERSION_TABLE,
    ddl,
    in_schema,
    is_behind,
    require,
    warn_of_taken,
)
from limpet.transition import plan, recall
from limpet.urls import Address

if TYPE_CHECKING:
    from limpet.schema.migrate import Place

T = TypeVar("T")

SLICE_BYTES_MAX: Final = 4_000_000
EXAMINED_MAX: Final = 5_000
CONNECT_S: Final = 10.0
INDEXES_KNOWN_S: Final = 5.0
COMMAND_S: Final = 60.0
DEFINE_S: Final = 3600.0
ABANDONED_S: Final = 1.0

_KEEP_MS: Final = -1
_STOPPED_MS: Final = 5_000
_TRANSACTION_MS: Final = 30_000
_SETTINGS: Final = {
    # A database may have another default, by which a commit that waited would be refused.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    # Nobody else's functions stand in for those of PostgreSQL; our own tables are named with their schema.
    "search_path": "pg_catalog, pg_temp",
    # Each statement has its index. Planned while a table is small, it would read all of it, also when it has grown.
    "enable_seqscan": "off",
    # Whoever is stopped in the middle of a transaction shall not stop all others for long.
    "idle_in_transaction_session_timeout": str(_STOPPED_MS),
}
# Behind every key: more of the last code point than a key has room for.
_BEYOND: Final = "\U0010ffff" * (KEY_BYTES_MAX // 4 + 1)
_DRIVERS_OWN: Final = ("sslmode", "sslrootcert", "sslcert", "sslkey", "host", "application_name")
_IDENTIFIER: Final = re.compile(r"[^\0]{1,63}\Z")

_ENTRY: Final = "key, kind, stored, version, revision, created_revision, created_ms, updated_ms, expires_ms, meta"
_ENTRY_ALONE: Final = _ENTRY.replace("kind, stored", "NULL, NULL")
# The time of the namespace $1: the server's clock, or the latest time that was recorded there if that is later. It is
# asked for once in a statement, and only where something expires.
_TIME: Final = (
    "(SELECT greatest({schema}.limpet_now_ms(), (SELECT at_ms FROM {schema}.limpet_namespaces WHERE namespace = $1)))"
)
# What has expired is read as well, and left out here: so this handle knows what it has seen expire.
_READ: Final = (
    f"SELECT {_ENTRY}, expires_ms <= {_TIME} FROM {{schema}}.limpet_entries"
    " WHERE namespace = $1 AND family = $2 AND key = ANY ($3::text::text[])"
)
# Before PostgreSQL 17 a table that was not analysed yet would be read through to the last of its keys.
_READ_EACH: Final = (
    "SELECT found.* FROM unnest($3::text::text[]) AS asked (name) CROSS JOIN LATERAL ("
    + _READ.replace("key = ANY ($3::text::text[])", "key = asked.name")
    + " OFFSET 0) AS found"
)
_PAGE: Final = (
    "SELECT {columns} FROM {schema}.limpet_entries WHERE namespace = $1 AND family = $2 AND key >= $3 AND key < $4"
    " AND (expires_ms IS NULL OR expires_ms > time.now_ms){sought} ORDER BY key LIMIT $5"
)
# A page comes with its time, also where it is empty: so this handle knows how late it was. $6 is what it knew before.
_AT_A_TIME: Final = (
    f"SELECT found.*, time.now_ms FROM (SELECT greatest({_TIME}, $6) AS now_ms) AS time"
    " LEFT JOIN LATERAL ({page}) AS found ON true ORDER BY found.key"
)
_KEYS: Final = _AT_A_TIME.replace("{page}", _PAGE).replace("{columns}", _ENTRY_ALONE).replace("{sought}", "")
# Of a page with values, as many as are bearable in one answer; the last but one column says how many it would have.
_SCAN: Final = _AT_A_TIME.replace(
    "{page}",
    f"SELECT {_ENTRY}, total FROM ("
    "SELECT *, sum(size_bytes) OVER (ORDER BY key) - size_bytes AS before, count(*) OVER () AS total FROM ("
    + _PAGE.replace("{columns}", "*")
    + f") AS page) AS counted WHERE before <= {SLICE_BYTES_MAX}",
)
# Arrays hold text, which the driver knows. For any other it has to ask the server first, on each connection.
# It also takes half a microsecond for each item, so what every put has goes as one text: see `_array`.
_PUT: Final = (
    "SELECT revision, version, created_revision, created_ms, at_ms"
    " FROM {schema}.limpet_put($1, $2, $3, $4, $5::text::text[], string_to_array($6, E'\\n'), $7, $8, $9, $10, $11,"
    " $12, $13, $14, $15)"
)
_INDEXES: Final = (
    "SELECT obj_description(indexrelid, 'pg_class') FROM pg_catalog.pg_index WHERE indrelid = $1::text::regclass"
    " AND indisvalid AND obj_description(indexrelid, 'pg_class') LIKE '[\"%'"
)
_PUT_ONE: Final = "SELECT * FROM {schema}.limpet_put_one($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
_COMMIT: Final = (
    "SELECT batch, write, guard, last_revision, at_ms, kind, stored, version, revision, created_revision,"
    " created_ms, updated_ms, expires_ms, meta FROM {schema}.limpet_commit($1, $2, $3, $4, $5, $6, $7, $8, $9, $10,"
    " $11, $12, $13, $14, $15, $16, $17, $18, $19, $20)"
)
_HOLD: Final = "SELECT * FROM {schema}.limpet_hold($1, $2, $3, $4)"
_APPLY: Final = (
    "SELECT {schema}.limpet_apply($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18,"
    " $19, $20, $21, $22, $23, $24, $25, $26)"
)
_LOG: Final = (
    "op, revision, last_revision, at_ms, cause, family, key, kind, value, version, entry_revision, created_revision,"
    " created_ms, updated_ms, expires_ms, meta"
)
_CAUSED: Final = f"SELECT {_LOG} FROM {{schema}}.limpet_changes WHERE namespace = $1 AND revision > $2 AND cause = $3"
_SUPERSEDE: Final = (
    "UPDATE {schema}.limpet_namespaces"
    " SET superseded = coalesce(superseded, '{}') || jsonb_build_object($2::text, {schema}.limpet_now_ms())"
    " WHERE namespace = $1"
)
_SUPERSEDED: Final = (
    "SELECT name FROM unnest($2::text[]) AS asked (name)"
    " JOIN {schema}.limpet_namespaces n ON n.namespace = $1 AND n.superseded ? name"
)
_TOLD_BY: Final = "revision, last_revision, at_ms, version, created_revision, family, cause"
_LAST_UP_TO: Final = (
    f"SELECT {_TOLD_BY} FROM {{schema}}.limpet_changes WHERE namespace = $1 AND revision <= $2"
    " ORDER BY revision DESC LIMIT 1"
)
_FEED: Final = (
    "SELECT n.revision, n.floor, c.*, n.floor_print, b.* FROM {schema}.limpet_namespaces n"
    f" LEFT JOIN LATERAL ({_LAST_UP_TO}) AS b ON true LEFT JOIN LATERAL ("
    f"SELECT {_LOG}, count(*) OVER () AS total, sum(size_bytes) OVER (ORDER BY revision) - size_bytes AS before FROM ("
    "SELECT * FROM {schema}.limpet_changes WHERE namespace = $1 AND revision > $2"
    " AND ($4::text IS NULL OR family = 'data' AND key >= $4 AND key < $5)"
    f" ORDER BY revision LIMIT $3) AS page) AS c ON c.before <= {SLICE_BYTES_MAX}"
    " WHERE n.namespace = $1 ORDER BY c.revision"
)
_DUE: Final = (
    "SELECT key, revision, family, expires_ms FROM {schema}.limpet_entries WHERE namespace = $1"
    f" AND expires_ms <= greatest({_TIME}, $3) AND family <> 'receipt' ORDER BY expires_ms LIMIT $2"
)
_STATUS: Final = (
    "SELECT revision, floor, keys, size_bytes, log_changes, log_bytes, (SELECT epoch FROM {schema}.limpet_store),"
    " greatest(clock_ms, at_ms), clock_ms"
    " FROM (SELECT $1::text, {schema}.limpet_now_ms()) AS a (namespace, clock_ms)"
    " LEFT JOIN {schema}.limpet_namespaces USING (namespace)"
)
_TAKE: Final = "SELECT revision, at_ms, log_changes, log_bytes FROM {schema}.limpet_take($1, $2)"
_OLDEST: Final = (
    "SELECT revision, at_ms, size_bytes FROM {schema}.limpet_changes WHERE namespace = $1 ORDER BY revision LIMIT $2"
)
_DROP_CHANGES: Final = "DELETE FROM {schema}.limpet_changes WHERE namespace = $1 AND revision <= $2"
_SET_FLOOR: Final = (
    "UPDATE {schema}.limpet_namespaces SET floor = $2, log_changes = log_changes - $3, log_bytes = log_bytes - $4,"
    " floor_print = $5 WHERE namespace = $1"
)
_DROP_RECEIPTS: Final = (
    f"DELETE FROM {{schema}}.limpet_entries WHERE namespace = $1 AND family = 'receipt' AND expires_ms <= {_TIME}"
)
_FORGET_SUPERSEDED: Final = (
    "UPDATE {schema}.limpet_namespaces SET superseded = ("
    "SELECT jsonb_object_agg(name, at_ms) FROM jsonb_each(superseded) AS one (name, at_ms)"
    " WHERE at_ms::bigint >= {schema}.limpet_now_ms() - 3600000) WHERE namespace = $1 AND superseded IS NOT NULL"
)
_DEFAULTS: Final = (
    "SELECT pg_is_in_recovery(), current_setting('default_transaction_isolation'),"
    " current_setting('default_transaction_read_only')"
)
_IS_MADE: Final = (
    "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE n.nspname = $1 AND c.relname = 'limpet_store'"
)
_REVISION: Final = f"SELECT version_num FROM {{schema}}.{VERSION_TABLE}"
_STORE: Final = "SELECT id, epoch FROM {schema}.limpet_store"
_RAISE_EPOCH: Final = "UPDATE {schema}.limpet_store SET epoch = epoch + 1 RETURNING epoch"
_SKIP_REVISIONS: Final = "UPDATE {schema}.limpet_namespaces SET revision = revision + $1"


async def open(address: Address, clock: Clock) -> PostgresEngine:
    """Open ``postgresql://user@host/database?schema=name``, making the tables when there are none."""
    schema = _schema(address)
    pooler = address.take("pooler", "no", ("no", "yes")) == "yes"
    migrates = address.take("migrate", "no", ("no", "auto")) == "auto"

    async def connect() -> Any:
        connection = await asyncpg.connect(
            _data_source(address),
            timeout=CONNECT_S,
            command_timeout=COMMAND_S,
            # Behind a pooler the next statement may run on another connection, which knows no prepared ones.
            statement_cache_size=0 if pooler else 100,
            server_settings={} if pooler else _SETTINGS,
        )
        try:
            if not pooler and connection.get_server_version().major >= 17:
                # Also for one that is stopped in the middle of a statement, which does not count as idle.
                await connection.execute(f"SET transaction_timeout = {_TRANSACTION_MS}")
        except BaseException:
            # Whoever is cancelled here has nobody else to close it.
            connection.terminate()
            raise
        return connection

    engine = PostgresEngine(connect, schema, str(address), has_sessions=not pooler)
    try:
        await engine.prepare(functools.partial(_migrate, address) if migrates else None)
    except BaseException:
        await engine.close()
        raise
    return engine


async def open_over(pool: asyncpg.Pool, *, claims: Collection[str] = ()) -> PostgresEngine:
    """Open an engine on a caller's own pool, in the schema that its connections work in. Closing leaves it open.

    ``claims`` are names of our views that nothing else may have there.
    """
    try:
        schema, path = await pool.fetchrow("SELECT current_schema(), current_setting('search_path')")
        taken = {name for (name,) in await pool.fetch(TAKEN_ON_POSTGRES.format(schema="$1::text"), schema or "")}
    except Exception as error:
        raise _translate(error, "the pool's database") from error
    # PostgreSQL passes over a schema that is missing or barred, and the next one of the path may be everybody's.
    first = _first_of(path)
    if schema is None or first not in (schema, "$user", "pg_temp"):
        raise InvalidValue(
            f"the pool's search_path starts with the schema {first!r}, which is missing or may not be used: "
            "make it, or grant its use"
        )
    for name in taken.intersection(claims):
        raise InvalidValue(
            f"the pool's schema {schema} has a table or view {name!r} that Limpet did not make; nothing was read or "
            f"written. Rename it (ALTER TABLE {name} RENAME TO old_{name}), or use a schema of its own; taking over "
            "such data is not supported yet"
        )
    engine = PostgresEngine(
        functools.partial(pool.acquire, timeout=CONNECT_S),
        schema,
        f"the pool's schema {schema}",
        give_back=pool.release,
    )
    await engine.prepare()
    return engine


def place(address: Address) -> Place:
    """Where the tables of a URL are, for whoever migrates them."""
    from limpet.schema.migrate import PostgresPlace

    return PostgresPlace(_data_source(address), _schema(address), str(address))


def _migrate(address: Address) -> None:
    from limpet.schema.migrate import up

    up(place(address))


def _schema(address: Address) -> str:
    address.allow("schema", "pooler", "migrate", *_DRIVERS_OWN)
    address.take("sslmode", "prefer", ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"))
    schema = address.options.get("schema", "public")
    if not _IDENTIFIER.match(schema) or len(schema.encode()) > 63:
        raise InvalidValue(f"{address}: a schema has a name of 1 to 63 bytes")
    return schema


def _data_source(address: Address) -> str:
    """The URL without the options that are ours."""
    body, _, query = address.url.rpartition("?") if "?" in address.url.rpartition("@")[2] else (address.url, "", "")
    options = [(name, value) for name, value in parse_qsl(query) if name in _DRIVERS_OWN]
    return f"{body}?{urlencode(options)}" if options else body


class PostgresEngine(ServerEngine):
    """A handle on the tables of one schema."""

    _reads_at_once = 2

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        schema: str,
        display_name: str,
        *,
        has_sessions: bool = True,
        give_back: Callable[[Any], Awaitable[None]] | None = None,
    ) -> None:
        self.traits = Traits(engine="postgres", durability="disk", log="every", clock="server", inline=False)
        self.taken: tuple[str, ...] = ()
        self._indexed: set[tuple[str, str]] = set()
        self._indexed_until = 0.0
        super().__init__(connect, display_name)
        self._give_back = give_back
        self._schema = schema
        self._has_sessions = has_sessions
        # Whether others set sessions up, and whether these have defaults under which no statement of ours may run.
        self._is_guest = give_back is not None or not has_sessions
        self._has_odd_defaults = False
        self._store_id, self._channel = "", ""
        self._read = _READ_EACH
        self._sql = functools.cache(lambda statement: statement.replace("{schema}", quoted(schema)))

    def _init_process_state(self) -> None:
        super()._init_process_state()
        # What goes on though its caller was cancelled.
        self._abandoned: set[asyncio.Future[Any]] = set()

    async def close(self) -> None:
        """See `Engine.close`."""
        if not self._closed and self._abandoned:
            await asyncio.wait({*self._abandoned}, timeout=ABANDONED_S)
            for task in self._abandoned:
                task.cancel()
        await super().close()

    # The eight primitives, but for those that are shared ------------------------

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
    ) -> ScanPage:
        """See `Engine.scan`."""
        self._check_open()
        if not values and where is None:
            rows = await self._page(self._sql(_KEYS), namespace, family, span, limit)
            entries = [_entry(row[:10]) for row in rows[:limit]]
            return ScanPage(entries, entries[-1].key if len(rows) > limit else None)
        sought, operands = ("", []) if where is None else _sought(where)
        sql = self._sql(_SCAN).replace("{sought}", sought)
        rows = await self._page(sql, namespace, family, span, limit, *operands)
        is_whole = not rows or rows[0][10] == len(rows) <= limit
        entries = [_entry(row[:10]) for row in rows[:limit]]
        cursor = None if is_whole else entries[-1].key
        if where is not None:
            # The server found all that may match; whether they do is decided where it is for every engine.
            entries = [entry for entry in entries if entry.stored is not None and where.matches(entry.stored)]
            entries = entries if values else [entry.without_value() for entry in entries]
        return ScanPage(entries, cursor)

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        self._check_open()
        rows = await self._fetch(_DUE, namespace, limit, self._seen_ms.get(namespace, 0))
        if rows:
            self._observe_time(namespace, rows[-1][3])
        return [Expire(key, revision, family) for key, revision, family, _ in rows]

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        self._check_open()
        await self._fetch(_DROP_RECEIPTS, namespace)
        await self._fetch(_FORGET_SUPERSEDED, namespace)
        # Whether there is anything to drop is asked without taking the writer's place.
        status, oldest = await self.status(namespace), await self._fetch(_OLDEST, namespace, 1)
        count, size_bytes = status.log_changes, status.log_bytes
        if not window.excess(oldest, count=count, size_bytes=size_bytes, now_ms=status.now_ms)[0]:
            return 0
        return await self._finished(self._trim(namespace, window))

    async def _trim(self, namespace: str, window: Window) -> int:
        try:
            async with self._transaction() as connection:
                taken = await connection.fetchrow(self._sql(_TAKE), namespace, self._seen_ms.get(namespace, 0))
                _, now_ms, count, size_bytes = taken
                oldest = await connection.fetch(self._sql(_OLDEST), namespace, EXAMINED_MAX)
                dropped, freed_bytes, floor = window.excess(oldest, count=count, size_bytes=size_bytes, now_ms=now_ms)
                if dropped:
                    last = _fingerprint(await connection.fetchrow(self._sql(_LAST_UP_TO), namespace, floor))
                    await connection.execute(self._sql(_DROP_CHANGES), namespace, floor)
                    await connection.execute(self._sql(_SET_FLOOR), namespace, floor, dropped, freed_bytes, last)
        except Exception as error:
            raise self._translate(error) from error
        return dropped

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        self._check_open()
        (found,) = await self._fetch(_STATUS, namespace)
        revision, floor, keys, size_bytes, log_changes, log_bytes, epoch, *times = found
        now_ms = self._observe_time(namespace, times[0])
        return Status(
            store_id=self._store_id,
            epoch=epoch,
            revision=revision or 0,
            floor=floor or 0,
            keys=keys or 0,
            size_bytes=size_bytes or 0,
            log_changes=log_changes or 0,
            log_bytes=log_bytes or 0,
            now_ms=now_ms,
            behind_ms=max(0, now_ms - times[1]),
        )

    # Committing ---------------------------------------------------------------

    async def _commit_group(self, namespace: str, group: list[Ticket], since: int) -> Sequence[CommitResult]:
        puts = _plain_puts(group)
        if puts is not None or _is_ordinary(group):
            return await self._commit_ordinary(namespace, group, puts, since)
        return await self._commit_planned(namespace, group, since)

    async def _commit_ordinary(
        self, namespace: str, group: list[Ticket], puts: list[Put] | None, since: int
    ) -> Sequence[CommitResult]:
        """Let the server decide and write a group, in one round trip."""
        name = new_request_id()
        place = (namespace, self._channel, name)
        # All that may fail because of what is in a batch comes before anything is sent.
        # In a transaction nothing could follow when the server has something against the short way.
        is_short = puts is not None and namespace in self._latest and not self._has_odd_defaults
        parameters = _put_parameters(group, puts) if puts is not None and is_short else _asked_columns(group)
        is_sent = False
        outcomes: Sequence[Commit | Refusal] | None = None
        try:
            async with self._statement() as connection:
                is_sent = True
                # The first that is written of a namespace takes the longer way, and so does the first from here.
                if puts is not None and is_short:
                    outcomes = await self._put_all(connection, place, group, puts, parameters)
                    parameters = _asked_columns(group) if outcomes is None else ()
                if outcomes is None:
                    seen_ms = self._seen_ms.get(namespace, 0)
                    rows = await connection.fetch(self._sql(_COMMIT), *place, *parameters, seen_ms)
                    outcomes = _outcomes(group, rows)
        except Exception as error:
            is_strange = is_sent and not isinstance(error, asyncpg.PostgresError | LimpetError)
            if is_strange or _is_connection_lost(error):
                # The statement was sent, and what became of it is not known, or cannot be understood.
                names = (ticket.batch.request_id or f"{name}.{mark}" for mark, ticket in with_last_positions(group))
                return [self._ambiguous(request_id, since, error) for request_id in names]
            if isinstance(error, asyncpg.RaiseError):
                # One of them comes after its own retry, and nothing was done. There each is decided by itself.
                return await self._commit_planned(namespace, group, since)
            raise self._undone(error) from error
        self._record_revision(namespace, max((one.revision for one in outcomes if isinstance(one, Commit)), default=0))
        return outcomes

    async def _put_all(
        self,
        connection: Any,
        place: tuple[str, str, str],
        group: list[Ticket],
        puts: list[Put],
        parameters: Iterable[object],
    ) -> Sequence[Commit] | None:
        """The same for a group of plain puts; None when the server has something against it."""
        try:
            sql, seen_ms = self._sql(_PUT if len(puts) > 1 else _PUT_ONE), self._seen_ms.get(place[0], 0)
            rows = await connection.fetch(sql, *place, *parameters, seen_ms)
        except asyncpg.PostgresError as error:
            if error.sqlstate == _NOT_FOR_PUT:
                return None
            raise
        return _put_outcomes(group, puts, rows)

    async def _commit_planned(self, namespace: str, group: list[Ticket], since: int) -> Sequence[CommitResult]:
        """Decide a group here, while its transaction holds the namespace."""
        asked = sorted({(one.family, one.key) for ticket in group for one in ticket.named_entries})
        named = [(ticket, ticket.batch.request_id or new_request_id()) for ticket in group]
        asked += [("receipt", request_id) for ticket, request_id in named if ticket.batch.receipt_ms is not None]
        # The row of the namespace comes beside each of these, so there must be one.
        asked = asked or [("data", "")]
        families, keys = [family for family, _ in asked], [key for _, key in asked]
        commits = False
        try:
            async with self._transaction() as connection:
                seen_ms = self._seen_ms.get(namespace, 0)
                held = await connection.fetch(self._sql(_HOLD), namespace, families, keys, seen_ms)
                work = _Work(namespace, held)
                outcomes: list[CommitResult] = []
                late = await self._late(connection, namespace, group)
                for ticket, request_id in named:
                    if may_be_superseded(ticket.batch) and request_group(request_id) in late:
                        outcomes.append(superseded_error())
                        continue
                    earlier = await self._earlier(connection, namespace, ticket.batch, work)
                    outcomes.append(earlier or work.settle(ticket.batch, request_id))
                if work.rows:
                    await connection.execute(
                        self._sql(_APPLY), namespace, self._channel, *work.totals(), *work.columns()
                    )
                commits = True
        except Exception as error:
            if commits and _is_connection_lost(error):
                return [self._ambiguous(request_id, since, error) for _, request_id in named]
            raise self._undone(error) from error
        self._record_revision(namespace, work.revision)
        return outcomes

    def _undone(self, error: Exception) -> Exception:
        """What a group fails with that the server rolled back, or that was never sent."""
        if isinstance(error, asyncpg.PostgresError):
            meaning = self._translate(error)
            return NotApplied(meaning) if (error.sqlstate or "")[:2] in _OF_ONE else meaning
        # What is not the driver's is about the batches, which could not be encoded.
        return self._translate(error) if isinstance(error, _OF_DRIVER) else error

    async def _earlier(self, connection: Any, namespace: str, batch: Batch, work: _Work) -> Commit | None:
        """What a request that is asked for again has done already. If nothing, it shall not happen any more."""
        if batch.retry_since is None or batch.request_id is None:
            return None
        rows = await connection.fetch(self._sql(_CAUSED), namespace, batch.retry_since, batch.request_id)
        earlier = recall(batch, map(_change, rows), work.find)
        if earlier is None:
            await connection.execute(self._sql(_SUPERSEDE), namespace, request_group(batch.request_id))
        return earlier

    async def _late(self, connection: Any, namespace: str, group: list[Ticket]) -> set[str]:
        """The names of calls in a group that were asked for again before they came."""
        names = {request_group(one.batch.request_id or "") for one in group if may_be_superseded(one.batch)}
        if not names:
            return names
        return {row[0] for row in await connection.fetch(self._sql(_SUPERSEDED), namespace, [*names])}

    # Reading ------------------------------------------------------------------

    async def _read_all(self, namespace: str, family: Family, keys: list[str]) -> Sequence[ReadResult]:
        rows = await self._fetch(self._read, namespace, family, _array(keys))
        found: dict[str, Entry] = {}
        for row in rows:
            expires_ms = row[8]
            if expires_ms is not None and (row[10] or expires_ms <= self._seen_ms.get(namespace, 0)):
                self._observe_time(namespace, expires_ms)
            else:
                found[row[0]] = _entry(row[:10])
        return [found.get(key) for key in keys]

    async def _page(
        self, sql: str, namespace: str, family: Family, span: Span, limit: int, *operands: object
    ) -> Sequence[Any]:
        """The rows of a page, and one more where there is more."""
        seen_ms = self._seen_ms.get(namespace, 0)
        rows = await self._run(sql, namespace, family, *_bounds(span), limit + 1, seen_ms, *operands)
        self._observe_time(namespace, rows[0][-1])
        return [] if rows[0][0] is None else rows

    async def _read_log(self, namespace: str, after: int, limit: int, span: Span | None) -> LogPage:
        bounds = (None, None) if span is None else _bounds(span)
        rows = await self._fetch(_FEED, namespace, after, limit, *bounds)
        revision, floor = (rows[0][0], rows[0][1]) if rows else (0, 0)
        if after < floor:
            raise Compacted(f"revision {after} was trimmed, the log starts after {floor}", oldest=floor)
        if after > revision:
            raise Compacted(f"revision {after} lies ahead of this store, which is at {revision}")
        changes = [_change(row[2:18]) for row in rows if row[2] is not None]
        is_full = bool(changes) and (len(changes) == limit or len(changes) < rows[0][18])
        floor_print = (rows[0][20] if rows else None) or BEGINNING
        before = floor_print if not rows or rows[0][21] is None else _fingerprint(rows[0][21:])
        if not limit:
            return LogPage([], after, before)
        return LogPage(changes, changes[-1].revision if is_full else revision, before)

    # Epochs -------------------------------------------------------------------

    async def raise_epoch(self, skip: int) -> int:
        """See `Restoring.raise_epoch`."""
        self._check_open()
        try:
            async with self._transaction() as connection:
                epoch: int = await connection.fetchval(self._sql(_RAISE_EPOCH))
                await connection.execute(self._sql(_SKIP_REVISIONS), skip)
        except Exception as error:
            raise self._translate(error) from error
        return epoch

    # Indexes ------------------------------------------------------------------

    async def index(self, namespace: str, field: str) -> None:
        """See `Indexing.index`."""
        name, about = postgres_name(namespace, field), literal(json.dumps([namespace, field]))
        statements = []
        for kind, expression in zip("nt", postgres_expressions(field), strict=True):
            statements += [
                f"CREATE INDEX IF NOT EXISTS {name}_{kind} ON {self._table} (({expression}), key)"
                f" WHERE {_indexed(namespace)}",
                f"COMMENT ON INDEX {self._schema_name}.{name}_{kind} IS {about}",
            ]
        await self._define(*statements)

    async def unindex(self, namespace: str, field: str) -> None:
        """See `Indexing.unindex`."""
        name = f"{self._schema_name}.{postgres_name(namespace, field)}"
        await self._define(f"DROP INDEX IF EXISTS {name}_n, {name}_t")

    async def _define(self, *statements: str) -> None:
        """Change the schema of the database."""
        await self._finished(self._define_once(*statements))
        self._indexed_until = 0.0

    async def _define_once(self, *statements: str) -> None:
        try:
            async with self._transaction() as connection:
                if connection.get_server_version().major >= 17:
                    # An index of a large table takes its time; a limit that is set here counts at once.
                    await connection.execute("SET LOCAL transaction_timeout = 0")
                for statement in statements:
                    await connection.execute(statement, timeout=DEFINE_S)
        except Exception as error:
            raise self._translate(error) from error

    async def indexes(self, namespace: str) -> list[str]:
        """See `Indexing.indexes`."""
        told = [json.loads(row[0]) for row in await self._run(_INDEXES, self._table)]
        self._indexed = {(space, field) for space, field in told}
        self._indexed_until = asyncio.get_running_loop().time() + INDEXES_KNOWN_S
        return sorted(field for space, field in self._indexed if space == namespace)

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        """See `Indexing.candidates`."""
        if asyncio.get_running_loop().time() >= self._indexed_until:
            await self.indexes(namespace)
        best: list[str] | None = None
        for one in wanted:
            # Should somebody have dropped it meanwhile, this takes longer, and finds the same.
            if (namespace, one.name) not in self._indexed:
                continue
            found: list[str] = []
            for condition, operands in postgres_parts(one, 2):
                # Not the span as well: a plan that is made once for all spans would rather go by that.
                sql = f"SELECT key FROM {self._table} WHERE {_indexed(namespace)} AND {condition} LIMIT $1"
                found += [row[0] for row in await self._run(sql, CANDIDATES_MAX + 1, *operands)]
            if len(found) <= CANDIDATES_MAX and (best is None or len(found) < len(best)):
                best = found
        return None if best is None else [key for key in best if key in span]

    @property
    def _schema_name(self) -> str:
        return quoted(self._schema)

    @property
    def _table(self) -> str:
        return f"{self._schema_name}.limpet_entries"

    # Connections --------------------------------------------------------------

    async def prepare(self, migrate: Callable[[], None] | None = None) -> None:
        """Make the tables when there are none, and read who this store is and how durable its commits are."""
        try:
            revision = await self._identify()
            if migrate is not None and is_behind(revision):
                await asyncio.to_thread(migrate)
                revision = await self._identify()
        except Exception as error:
            raise self._translate(error) from error
        require(revision, self._display_name)

    async def _identify(self) -> str | None:
        """Read the revision of the tables; and if it is ours, who this store is."""
        async with self._borrow_connection() as connection:
            self._read = _READ if connection.get_server_version().major >= 17 else _READ_EACH
            in_recovery, isolation, read_only = await connection.fetchrow(_DEFAULTS)
        if in_recovery:
            raise Unavailable(f"{self._display_name} is a replica, which takes no writes")
        self._has_odd_defaults = (isolation, read_only) != ("read committed", "off")
        async with self._transaction() as connection:
            found = await connection.fetchval("SELECT to_regclass($1)", f"{quoted(self._schema)}.limpet_store")
            if found is None:
                await self._make_tables(connection)
            elif await connection.fetchval("SELECT to_regclass($1)", f"{quoted(self._schema)}.{VERSION_TABLE}") is None:
                return None
            revision: str | None = await connection.fetchval(self._sql(_REVISION))
            # Of another revision, nobody knows what its tables look like.
            if revision != REVISION:
                return revision
            identity = await connection.fetchrow(self._sql(_STORE))
            if identity is None:
                raise Corrupt(f"{self._display_name} does not say what store it is: its table limpet_store is empty")
            settings = await connection.fetchrow(
                "SELECT current_setting('fsync'), current_setting('synchronous_commit'),"
                " current_setting('synchronous_standby_names')"
            )
            taken = await connection.fetch(TAKEN_ON_POSTGRES.format(schema="$1::text"), self._schema)
        self._store_id, _ = identity
        self._channel = f"limpet_{self._store_id}"
        self.traits = msgspec.structs.replace(self.traits, durability=_durability(*settings))
        self.taken = tuple(name for (name,) in taken)
        # In the schema that all share we claim no such name.
        is_ours = self._schema != SHARED_SCHEMA
        warn_of_taken([name for name in self.taken if is_ours or name != "state"], self._display_name)
        return revision

    async def _make_tables(self, connection: Any) -> None:
        # Of several that find nothing, one makes the tables; the others wait here and then find them.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('limpet ' || $1, 0))", self._schema)
        # Not to_regclass, which would answer from what this transaction has looked up before.
        if await connection.fetchval(_IS_MADE, self._schema):
            return
        if not await connection.fetchval("SELECT 1 FROM pg_namespace WHERE nspname = $1", self._schema):
            await connection.execute(f"CREATE SCHEMA {quoted(self._schema)}")
        await connection.execute(in_schema(ddl("postgres"), quoted(self._schema)))

    async def _release(self, connection: Any, *, lost: bool = False) -> None:
        if self._give_back is None:
            self._return_to_pool(connection, lost=lost)
            return
        try:
            # Somebody's pool wants all of them back, also those that are broken.
            with contextlib.suppress(Exception):
                if lost:
                    connection.terminate()
                await self._give_back(connection)
        finally:
            self._free_slots.release()

    async def _disconnect(self, connection: Any) -> None:
        await connection.close(timeout=CONNECT_S)

    def _abort(self, connection: Any) -> None:
        connection.terminate()

    def _is_closed(self, connection: Any) -> bool:
        return bool(connection.is_closed())

    def _is_connection_lost(self, error: BaseException) -> bool:
        return _is_connection_lost(error)

    def _translate_driver_error(self, error: Exception) -> Exception:
        if self._is_guest and isinstance(error, asyncpg.SerializationError | asyncpg.ReadOnlySQLTransactionError):
            # The defaults of the role have changed since. The next attempt, and there is one, asks for what it needs.
            self._has_odd_defaults = True
        return _translate(error, self._display_name)

    async def _fetch(self, statement: str, *parameters: object) -> Sequence[Any]:
        """Run one of our statements that may be run again."""
        return await self._run(self._sql(statement), *parameters)

    async def _run(self, sql: str, *parameters: object) -> Sequence[Any]:
        is_wanted = True

        async def fetch() -> Sequence[Any]:
            try:
                async with self._statement() as connection:
                    # A caller that was cancelled before there was a connection has asked for nothing.
                    rows: Sequence[Any] = await connection.fetch(sql, *parameters) if is_wanted else ()
            except Exception as error:
                raise self._translate(error) from error
            return rows

        try:
            return await self._finished(fetch())
        except asyncio.CancelledError:
            is_wanted = False
            raise

    async def _finished(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish what was begun, also when the caller is cancelled.

        A statement that is broken off costs its connection, and the driver then loses an error of its own, of which
        the event loop complains.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            task.add_done_callback(_retrieve)
            raise

    def _statement(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """A connection for one statement: by itself, or where the session's defaults are odd, in a transaction."""
        return self._transaction() if self._has_odd_defaults else self._borrow_connection()

    @contextlib.asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Any]:
        # Not as the role, the pooler or a caller's pool may have it: what others commit meanwhile must be seen.
        async with self._borrow_connection() as connection, connection.transaction(isolation="read_committed"):
            if self._is_guest:
                mode = "SET TRANSACTION READ WRITE; " if self._has_odd_defaults else ""
                await connection.execute(f"{mode}SET LOCAL idle_in_transaction_session_timeout = {_STOPPED_MS}")
            yield connection

    def _listen_to(self, namespace: str) -> None:
        # One channel tells of all namespaces of the store.
        if self._has_sessions:
            self._keep_listening(self._channel, self._listen_once)

    async def _listen_once(self) -> None:
        connection = await self._acquire()
        gone = asyncio.get_running_loop().create_future()
        try:
            connection.add_termination_listener(lambda _: wake(gone))
            await connection.add_listener(self._channel, self._heard)
            # What was missed before is found by looking.
            self._wakeup.notify_all()
            await gone
        finally:
            await self._release(connection, lost=True)

    def _heard(self, _connection: object, _pid: int, _channel: str, namespace: str) -> None:
        self._wakeup.notify(namespace)


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody waits for."""
    if not task.cancelled():
        task.exception()


# Ordinary groups ----------------------------------------------------------------
#
# A batch is known by the place of its last write in the group. By that, and the name of the group,
# it is also named in the log, unless its caller gave it a name.

_TESTS: Final = {Version: "version", Revision: "revision", HeldBy: "held"}
_NOT_FOR_PUT: Final = "LP001"
_OF_DRIVER: Final = (LimpetError, OSError, asyncpg.InterfaceError, asyncpg.InternalClientError)
# Something about a single row: it cannot be encoded, or breaks a constraint, a trigger or a policy of the database.
_OF_ONE: Final = frozenset({"22", "23", "P0", "44"})


def _is_ordinary(group: list[Ticket]) -> bool:
    """Whether the server's functions can decide a group: nothing in it looks at a value or at another batch."""
    written: set[tuple[Family, str]] = set()
    for ticket in group:
        batch = ticket.batch
        if not batch.writes or batch.receipt_ms is not None or batch.retry_since is not None:
            return False
        for guard in batch.guards:
            if type(guard.condition) not in _TESTS and guard.condition not in (ABSENT, PRESENT):
                return False
            if written and (guard.family, guard.key) in written:
                return False
        for write in batch.writes:
            if type(write) not in (Put, Touch, Delete) or (write.family, write.key) in written:
                return False
        written.update((write.family, write.key) for write in batch.writes)
    return True


def _plain_puts(group: list[Ticket]) -> list[Put] | None:
    """The puts of a group that has nothing else: of distinct keys, each without a guard, and keeping nothing."""
    puts: list[Put] = []
    for ticket in group:
        batch = ticket.batch
        if batch.guards or batch.receipt_ms is not None or batch.retry_since is not None or not batch.writes:
            return None
        for write in batch.writes:
            if type(write) is not Put or write.ttl_ms is KEEP or write.meta_json is KEEP:
                return None
            puts.append(write)
    is_distinct = len(puts) == 1 or len({(put.family, put.key) for put in puts}) == len(puts)
    return puts if is_distinct else None


def _put_parameters(group: list[Ticket], puts: list[Put]) -> Iterable[object]:
    """Puts as the server's function for many, or for a single one, takes them."""
    return _put_columns(group, puts) if len(puts) > 1 else _put_row(group[0], puts[0])


def _put_row(ticket: Ticket, put: Put) -> Iterable[object]:
    """A single put as the server's function takes it."""
    kind, text, nearest = _value_columns(put.stored)
    meta = _text(put.meta_json)
    return ticket.weight_bytes, put.key, text, put.family, kind, nearest, put.ttl_ms, meta, ticket.batch.request_id


def _put_columns(group: list[Ticket], puts: list[Put]) -> Iterable[object]:
    """Puts as the server's function takes them. What is the same for all is left out."""
    count = len(puts)
    kinds, values, nearests = zip(*[_value_columns(put.stored) for put in puts], strict=True)
    lasts = causes = None
    if count > len(group):
        lasts = [str(mark) for mark, ticket in with_last_positions(group) for _ in ticket.batch.writes]
    if any(ticket.batch.request_id for ticket in group):
        causes = [ticket.batch.request_id for ticket in group for _ in ticket.batch.writes]

    def unless(usual: object, column: Sequence[Any]) -> Sequence[Any] | None:
        return None if column.count(usual) == count else column

    return (
        sum(ticket.weight_bytes for ticket in group),
        _array([put.key for put in puts]),
        # JSON as it is stored has no line breaks, and neither have hexadecimal digits.
        "\n".join(values),
        unless("data", [put.family for put in puts]),
        unless("json", kinds),
        unless(None, nearests),
        # Only what is not sent as it is counted.
        None if kinds.count("json") == count else [str(weight_bytes(put)) for put in puts],
        unless(None, [_digits(put.ttl_ms) for put in puts]),
        unless(None, [_text(put.meta_json) for put in puts]),
        lasts,
        causes,
    )


def _put_outcomes(group: list[Ticket], puts: list[Put], rows: Sequence[Any]) -> list[Commit]:
    """What the server made of puts, batch by batch. Their revisions follow each other."""
    at_ms = rows[0][4]
    if len(puts) == 1:
        return [Commit(rows[0][0], (_put_entry(puts[0], rows[0]),), (None,), at_ms)]
    before = min(row[0] for row in rows) - 1
    entries: list[Any] = [None] * len(puts)
    for row in rows:
        place = row[0] - before - 1
        entries[place] = _put_entry(puts[place], row)
    commits = []
    for mark, ticket in with_last_positions(group):
        count = len(ticket.batch.writes)
        commits.append(Commit(before + mark, tuple(entries[mark - count : mark]), (None,) * count, at_ms))
    return commits


def _put_entry(put: Any, row: Sequence[Any]) -> Entry:
    """What a put left, by what the server told of it."""
    revision, version, created_revision, created_ms, at_ms = row
    expires_ms = None if put.ttl_ms is None else at_ms + put.ttl_ms
    return Entry(put.key, put.stored, version, revision, created_revision, created_ms, at_ms, expires_ms, put.meta_json)


def _asked_columns(group: list[Ticket]) -> list[list[Any]]:
    """A group as the server's function takes it: eleven columns of its writes, five of its guards."""
    writes: list[tuple[Any, ...]] = []
    guards: list[tuple[Any, ...]] = []
    for mark, ticket in with_last_positions(group):
        batch = ticket.batch
        writes += [(str(mark), *_write_row(write), batch.request_id) for write in batch.writes]
        guards += [(str(mark), guard.family, guard.key, *_test(guard)) for guard in batch.guards]
    return [*_turned(writes, 11), *_turned(guards, 5)]


def _write_row(write: Write) -> tuple[str | None, ...]:
    if isinstance(write, Put):
        ttl = str(_KEEP_MS) if write.ttl_ms is KEEP else _digits(write.ttl_ms)
        meta = "" if write.meta_json is KEEP else _text(write.meta_json)
        return "put", write.family, write.key, *_value_columns(write.stored), str(weight_bytes(write)), ttl, meta
    if isinstance(write, Touch):
        return "touch", write.family, write.key, None, None, None, None, _digits(write.ttl_ms), None
    assert isinstance(write, Delete)
    return "take" if write.take else "delete", write.family, write.key, None, None, None, None, None, None


def _turned(rows: list[tuple[Any, ...]], width: int) -> list[list[Any]]:
    """Rows as columns."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]


def _test(guard: Guard) -> tuple[str, str | None]:
    match guard.condition:
        case Version(number) | Revision(number) | HeldBy(number):
            # A number that bigint cannot hold is that of no entry, and nothing equals NULL.
            return _TESTS[type(guard.condition)], str(number) if codec.INT_MIN <= number <= codec.INT_MAX else None
        case condition:
            return ("absent" if condition is ABSENT else "present"), None


def _outcomes(group: list[Ticket], rows: Sequence[Any]) -> list[Commit | Refusal]:
    """What the server's function decided, batch by batch."""
    writes = [write for ticket in group for write in ticket.batch.writes]
    guards = [guard for ticket in group for guard in ticket.batch.guards]
    refusals: dict[int, Refusal] = {}
    done: dict[int, list[tuple[int, Any]]] = {}
    for row in rows:
        mark, place, guarded = row[0], row[1], row[2]
        if place is None:
            guard = guards[guarded - 1]
            found = None if row[7] is None else _entry((guard.key, *row[5:]))
            refusals[mark] = Refusal("guard", guard.key, found, row[4], guard=guard)
        else:
            done.setdefault(mark, []).append((place, row))
    outcomes: list[Commit | Refusal] = []
    for mark, _ in with_last_positions(group):
        if mark in refusals:
            outcomes.append(refusals[mark])
            continue
        entries: list[Entry | None] = []
        ended: list[Entry | None] = []
        placed = sorted(done[mark], key=lambda one: one[0])
        for place, row in placed:
            write = writes[place - 1]
            entry = None if row[7] is None else _entry((write.key, *row[5:]))
            if isinstance(write, Put) and entry is not None:
                entry = msgspec.structs.replace(entry, stored=write.stored)
            is_end = isinstance(write, Delete)
            entries.append(None if is_end else entry)
            ended.append(entry if is_end else None)
        _, first = placed[0]
        outcomes.append(Commit(first[3], tuple(entries), tuple(ended), first[4]))
    return outcomes


# Planned groups -----------------------------------------------------------------


class _Work:
    """What a group makes of the namespace it holds, gathered here and written at the end."""

    def __init__(self, namespace: str, held: Sequence[Any]) -> None:
        self.namespace = namespace
        self.revision, _, self._now_ms, self._keys, self._size_bytes, self._log_changes, self._log_bytes = held[0][:7]
        self._before = self.revision
        self._seen: dict[tuple[str, str], Entry | None] = {
            (row[7], row[8]): None if row[11] is None else _entry(row[8:]) for row in held
        }
        self.rows: list[tuple[Any, ...]] = []

    def find(self, family: Family, key: str) -> Entry | None:
        return self._seen.get((family, key))

    def settle(self, batch: Batch, request_id: str) -> Commit | Refusal | Exception:
        """Decide one batch and take in what it changes."""
        try:
            outcome = plan(batch, self.find, now_ms=self._now_ms, revision=self.revision, cause=request_id)
        except Exception as error:
            # A batch that cannot be decided is its caller's trouble and nobody else's.
            return error
        if isinstance(outcome, Refusal):
            return outcome
        for change in outcome.changes:
            self._apply(change)
        if outcome.receipt is not None:
            self._seen["receipt", outcome.receipt.key] = outcome.receipt
            self.rows.append(("put", None, None, None, "receipt", *_entry_columns(outcome.receipt, 0)))
        return outcome.commit

    def _apply(self, change: Change) -> None:
        entry, after = change.entry, change.after
        before = self._seen.get((change.family, entry.key))
        size_bytes = entry.weight_bytes
        self.revision = change.revision
        self._log_changes += 1
        self._log_bytes += size_bytes
        if change.family == "data":
            if before is not None:
                self._keys -= 1
                self._size_bytes -= before.weight_bytes
            if after is not None:
                self._keys += 1
                self._size_bytes += size_bytes
        self._seen[change.family, entry.key] = after
        head = (change.op, str(change.revision), str(change.commit), change.cause, change.family)
        self.rows.append((*head, *_entry_columns(entry, size_bytes)))

    def totals(self) -> tuple[int | None, ...]:
        """The row of the namespace as it will be; no revision where nothing is logged."""
        revision = None if self.revision == self._before else self.revision
        return self._now_ms, revision, self._keys, self._size_bytes, self._log_changes, self._log_bytes

    def columns(self) -> list[list[Any]]:
        """What each change left of its entry."""
        return _turned(self.rows, 18)


def _entry_columns(entry: Entry, size_bytes: int) -> tuple[str | None, ...]:
    return (
        entry.key,
        *_value_columns(entry.stored),
        str(entry.weight_bytes),
        str(size_bytes),
        str(entry.version),
        str(entry.revision),
        str(entry.created_revision),
        str(entry.created_ms),
        str(entry.updated_ms),
        _digits(entry.expires_ms),
        _text(entry.meta_json),
    )


# Filters ----------------------------------------------------------------------
#
# What the server looks for may be more than what matches, and never less: jsonb takes 1 for equal
# to 1.0, and holds some values in their nearest form only. So each condition below is met by all
# that match, and what is found is looked at again.


def _sought(where: Filter) -> tuple[str, list[Any]]:
    """A filter as conditions in SQL, with their operands from $7 on."""
    conditions: list[str] = []
    operands: list[Any] = []
    for test in where.tests:
        found = _condition(test, f"${len(operands) + 7}")
        if found is not None:
            conditions.append(f" AND {found[0]}")
            operands += found[1]
    return "".join(conditions), operands


def _condition(test: Test, operand: str) -> tuple[str, list[Any]] | None:
    """One test as a condition with one operand at most; None where the server cannot help."""
    # The name is part of the text, so that an index on this very expression can be used.
    name = "'" + test.name.replace("'", "''") + "'"
    if test.comparison == "exists":
        return f"value ? {name}", []
    # Raw bytes, and what looks like them, are wrapped in a record and bare in an object.
    if any(item[:1] == b"\0" or item.startswith(b'{"$') for item in test.operands):
        return None
    match test.comparison:
        case "eq" | "in":
            texts = [_nearest(text) or text for text in map(bytes.decode, test.operands)]
            return f"value -> {name} = ANY ({operand}::text[]::jsonb[])", [texts]
        case "ne" | "not_in":
            # Only what jsonb holds exactly is certain to be equal.
            texts = [text for text in map(bytes.decode, test.operands) if _nearest(text) is None]
            equal = f"(value -> {name})::text = ANY ({operand}::text[]::jsonb[]::text[])"
            return f"(is_nearest OR NOT coalesce({equal}, false))", [texts]
        case comparison:
            # A bound is sought inclusively: two numbers of 19 digits may be one in double precision.
            sign = "<=" if comparison in ("lt", "le") else ">="
            bound = codec.decode(test.operands[0])
            kind, cast = ("string", 'COLLATE "C"') if isinstance(bound, str) else ("number", "::float8")
            if isinstance(bound, bool) or not isinstance(bound, str | int | float) or "\0" in str(bound):
                return None
            side = f"(value ->> {name}) {cast} {sign} {operand}::{'text' if kind == 'string' else 'float8'}"
            right = f"CASE jsonb_typeof(value -> {name}) WHEN '{kind}' THEN {side} ELSE false END"
            return f"(is_nearest OR {right})", [bound if kind == "string" else float(bound)]


# Rows -------------------------------------------------------------------------


def _value_columns(stored: Stored | None) -> tuple[str | None, str | None, str | None]:
    """A value as its kind, its text, and, where jsonb cannot hold it exactly, its nearest form there.

    The text of raw bytes is hexadecimal.
    """
    kind, text = as_text(stored)
    if text is None:
        return None, None, None
    return (kind, text.hex(), None) if isinstance(text, bytes) else (kind, text, _nearest(text))


def _array(items: Iterable[str]) -> str:
    """An array of texts as the one text that the server reads it from."""
    return '{"' + '","'.join([item.replace("\\", "\\\\").replace('"', '\\"') for item in items]) + '"}'


def _text(json: Any) -> str | None:
    return None if json is None else json.decode()


def _digits(number: Any) -> str | None:
    return None if number is None else str(number)


# jsonb keeps numbers as decimals: 1e22 comes back as an integer, and -0.0 without its sign.
# A string in it holds no U+0000.
_EXPONENT: Final = re.compile(r"e[0-9]")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_NUMBER: Final = re.compile(r"[0-9]e[0-9]|-0\.0(?![0-9])")
_NUL: Final = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def _nearest(text: str) -> str | None:
    """What jsonb can hold of a JSON text; None when that is all of it."""
    if "\\u0000" not in text and "-0.0" not in text and _EXPONENT.search(text) is None:
        return None
    replaced = _NUL.sub(r"\1\\ufffd", text)
    if replaced == text and _NUMBER.search(_STRING.sub('""', text)) is None:
        return None
    return replaced


def _entry(row: Sequence[Any]) -> Entry:
    key, kind, stored, version, revision, created_revision, created_ms, updated_ms, expires_ms, meta = row
    return Entry(
        key,
        None if kind is None else as_stored(kind, stored),
        version,
        revision,
        created_revision,
        created_ms,
        updated_ms,
        expires_ms,
        None if meta is None else meta.encode(),
    )


def _change(row: Sequence[Any]) -> Change:
    op, revision, last_revision, at_ms, cause, family, *entry = row
    return Change(op, _entry(entry), revision, last_revision, at_ms, cause, family)


def _fingerprint(row: Sequence[Any]) -> str:
    """The fingerprint of a change, of the columns that it is made from."""
    revision, last_revision, at_ms, version, created_revision, family, cause = row
    entry = Entry("", None, version, revision, created_revision, 0, 0)
    return fingerprint(Change("put", entry, revision, last_revision, at_ms, cause, family))


def _indexed(namespace: str) -> str:
    """The entries of a namespace that can have fields, as an index and its searches both say it."""
    return f"namespace = {literal(namespace)} AND family = 'data' AND kind IN ('json', 'record')"


def _bounds(span: Span) -> tuple[str, str]:
    """A span for SQL, where no text holds U+0000. No key does either, so U+0001 bounds the same keys."""
    return span.start.replace("\0", "\1"), _BEYOND if span.stop is None else span.stop.replace("\0", "\1")


def _first_of(path: str) -> str:
    """The first schema that a search_path names."""
    quoted = re.match(r'\s*"((?:[^"]|"")*)"', path)
    return path.partition(",")[0].strip().lower() if quoted is None else quoted[1].replace('""', '"')


# Errors -----------------------------------------------------------------------


def _durability(fsync: str, synchronous_commit: str, standbys: str) -> Durability:
    if synchronous_commit == "off":
        # What is acknowledged is written within three times wal_writer_delay, 0.6 s by default. Where it is never
        # synced either, a power cut may take everything.
        return "seconds" if fsync == "on" else "none"
    if fsync == "off":
        return "process"
    return "quorum" if standbys and synchronous_commit != "local" else "disk"


def _is_connection_lost(error: BaseException) -> bool:
    """Whether the line broke, so that nobody can say what the server made of the last statement."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "")[:2] == "08" or (error.sqlstate or "")[:3] == "57P"
    return isinstance(error, OSError | TimeoutError | asyncpg.InterfaceError | asyncpg.InternalClientError)


# By the state, or by its class. What is not here will pass, or an operator can mend it: a table that is away, a full
# disk, a server that stops. Only damaged data, and what stands in the place of our tables, is Corrupt.
_STATES: Final[dict[str, Callable[[str], LimpetError]]] = {
    "42501": PermissionDenied,
    "28": PermissionDenied,
    "3D": InvalidValue,
    "42602": InvalidValue,
    "42939": InvalidValue,
    # Rules of the database itself, by constraints and triggers that are not ours. A unique key may be a race.
    "23": InvalidValue,
    "23505": Unavailable,
    "44": InvalidValue,
    "P0": InvalidValue,
    # The database has another encoding, which lacks a letter.
    "22021": InvalidValue,
    "22P05": InvalidValue,
    "22": Corrupt,
    "XX001": Corrupt,
    "XX002": Corrupt,
    "42701": Corrupt,
    "42710": Corrupt,
    "42723": Corrupt,
    "42P06": Corrupt,
    "42P07": Corrupt,
}
# Classes whose words name things of the database, of the server or of the connection, and never a value.
_WORDED: Final = frozenset({"08", "0A", "25", "28", "3D", "3F", "40", "42", "53", "54", "55", "57", "58"})


def _translate(error: Exception, display_name: str) -> Exception:
    """A driver's error as ours, for something that was not applied or that may be asked again."""
    if isinstance(error, LimpetError):
        return error
    if isinstance(error, asyncpg.PostgresError):
        state = error.sqlstate or ""
        made = _STATES.get(state) or _STATES.get(state[:2]) or Unavailable
        return made(f"{display_name}: {_without_values(error)}")
    # An error of TLS may be a ValueError too.
    if isinstance(error, OSError):
        return Unavailable(f"{display_name} cannot be reached now: {type(error).__name__}")
    if isinstance(error, ValueError | OverflowError):
        # Not what it says: it may have taken a part of a password for a port.
        return InvalidValue(f"{display_name}: the driver cannot use this URL, look at its host, port and options")
    if isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError):
        return Unavailable(f"{display_name} cannot be reached now: {type(error).__name__}")
    return error


def _without_values(error: asyncpg.PostgresError) -> str:
    """What the server said, without anything that may hold a value; and leave only that in the driver's error.

    Its details show whole rows. Its first words may be those of a trigger, which says what it likes. The driver's
    error stays the cause of ours, and whoever logs that prints it.
    """
    state = error.sqlstate or ""
    # The source files of procedural languages: what runs there chose the words.
    is_raised = (error.server_source_filename or "").startswith("pl")
    if state[:2] in _WORDED and not is_raised:
        words = str(error.message)
    else:
        words = f"the server refuses it, SQLSTATE {state} ({type(error).__name__})"
        if error.constraint_name and not is_raised:
            words += f", by the constraint {error.constraint_name}"
    error.args = (words,)
    error.message = words
    error.detail = error.hint = error.context = error.internal_query = None
    return words
