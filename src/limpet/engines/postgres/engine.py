"""The PostgreSQL engine: many processes and machines on one database.

A namespace has one row, which a writer locks until the end of its transaction. So revisions become
visible in their order, and a watcher misses no change. Writes are grouped: while this process runs one
transaction of a namespace, the next group gathers.

A group is planned here by `limpet.transition`, and a function on the server compares what the plan has read
and writes what it leaves, in one round trip (`limpet.commit.committer`, `units`). Puts have a shorter way: a
function decides and writes those that are usual, and leaves the others to a plan (`server_groups`). A test
compares it with `plan`.

Watchers read the table of changes. A notification only wakes them, and they also poll from time to time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qsl, urlencode

import asyncpg

from limpet.clock import Clock
from limpet.commit.committer import Committer
from limpet.commit.group import NotApplied
from limpet.commit.log import check_after
from limpet.commit.relative import Moment, resolve_receipt
from limpet.commit.storage import Apply, Head, ReplyLost, Stale, Unit
from limpet.engines.postgres import sql
from limpet.engines.postgres.connections import CONNECT_S, PostgresConnections, connect
from limpet.engines.postgres.errors import DRIVER_ERRORS, is_about_one_row, is_connection_lost, translate_error
from limpet.engines.postgres.filters import filter_sql
from limpet.engines.postgres.rows import (
    array_text,
    change_from_row,
    entry_from_row,
    fingerprint_from_row,
    span_bounds,
)
from limpet.engines.postgres.server_groups import LEFT_TO_PLAN, SUPERSEDED, plain_puts, put_arguments, put_results
from limpet.engines.postgres.units import decode_replies, encode_units
from limpet.engines.server_engine import CommitResult, ReadResult, Ticket, with_last_positions
from limpet.engines.sql_indexes import literal, postgres_expressions, postgres_name, postgres_parts
from limpet.errors import Ambiguous, InvalidValue, LimpetError
from limpet.index import CANDIDATES_MAX, IndexProbe
from limpet.keys import Span
from limpet.model import (
    BEGINNING,
    Change,
    Commit,
    Entry,
    Expire,
    Family,
    Filter,
    LogPage,
    Put,
    ScanPage,
    Status,
    Window,
)
from limpet.request_ids import new_request_id
from limpet.schema import TAKEN_ON_POSTGRES
from limpet.urls import Address

if TYPE_CHECKING:
    from limpet.schema.migrate import SchemaTarget

TRIM_CHANGES_MAX: Final = 5_000
INDEXES_KNOWN_S: Final = 5.0
DEFINE_S: Final = 3600.0

_DRIVER_OPTIONS: Final = ("sslmode", "sslrootcert", "sslcert", "sslkey", "host", "application_name")
_IDENTIFIER: Final = re.compile(r"[^\0]{1,63}\Z")


async def open(address: Address, clock: Clock) -> PostgresEngine:
    """Open ``postgresql://user@host/database?schema=name``, creating the tables if there are none."""
    schema = _schema(address)
    pooler = address.take("pooler", "no", ("no", "yes")) == "yes"
    migrates = address.take("migrate", "no", ("no", "auto")) == "auto"
    connect_here = functools.partial(connect, _data_source(address), pooler=pooler)
    engine = PostgresEngine(connect_here, schema, str(address), has_sessions=not pooler)
    try:
        await engine.prepare(functools.partial(_migrate, address) if migrates else None)
    except BaseException:
        await engine.close()
        raise
    return engine


async def open_over(pool: asyncpg.Pool, *, claims: Collection[str] = ()) -> PostgresEngine:
    """Open an engine on a caller's own pool, in the current schema of its connections. Closing leaves the pool open.

    ``claims`` are names of our views that no other table or view may have there.
    """
    try:
        schema, path = await pool.fetchrow("SELECT current_schema(), current_setting('search_path')")
        taken = {name for (name,) in await pool.fetch(TAKEN_ON_POSTGRES.format(schema="$1::text"), schema or "")}
    except Exception as error:
        raise translate_error(error, "the pool's database") from error
    # PostgreSQL skips a schema that is missing or forbidden, and the next one of the path may be shared by all.
    first = _first_schema(path)
    if schema is None or first not in (schema, "$user", "pg_temp"):
        raise InvalidValue(
            f"the pool's search_path starts with the schema {first!r}, which is missing or may not be used: "
            "create it, or grant its use"
        )
    for name in taken.intersection(claims):
        raise InvalidValue(
            f"the pool's schema {schema} has a table or view {name!r} that Limpet did not make; nothing was read or "
            f"written. Rename it (ALTER TABLE {name} RENAME TO old_{name}), use a schema of its own, or let "
            "'limpet adopt' take it over"
        )
    engine = PostgresEngine(
        functools.partial(pool.acquire, timeout=CONNECT_S),
        schema,
        f"the pool's schema {schema}",
        return_to_caller=pool.release,
    )
    await engine.prepare()
    return engine


def schema_target(address: Address) -> SchemaTarget:
    """Where the tables of a URL are, for a migration."""
    from limpet.schema.migrate import PostgresTarget

    return PostgresTarget(_data_source(address), _schema(address), str(address))


def _migrate(address: Address) -> None:
    from limpet.schema.migrate import up

    up(schema_target(address))


def _schema(address: Address) -> str:
    address.allow("schema", "pooler", "migrate", *_DRIVER_OPTIONS)
    address.take("sslmode", "prefer", ("disable", "allow", "prefer", "require", "verify-ca", "verify-full"))
    schema = address.options.get("schema", "public")
    if not _IDENTIFIER.match(schema) or len(schema.encode()) > 63:
        raise InvalidValue(f"{address}: a schema has a name of 1 to 63 bytes")
    return schema


def _data_source(address: Address) -> str:
    """The URL with only those options that the driver reads."""
    body, _, query = address.url.rpartition("?") if "?" in address.url.rpartition("@")[2] else (address.url, "", "")
    options = [(name, value) for name, value in parse_qsl(query) if name in _DRIVER_OPTIONS]
    return f"{body}?{urlencode(options)}" if options else body


def _first_schema(path: str) -> str:
    """The first schema that a search_path names."""
    quoted = re.match(r'\s*"((?:[^"]|"")*)"', path)
    return path.partition(",")[0].strip().lower() if quoted is None else quoted[1].replace('""', '"')


class PostgresEngine(PostgresConnections):
    """A handle on the tables of one schema."""

    _reads_at_once = 2

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        schema: str,
        display_name: str,
        *,
        has_sessions: bool = True,
        return_to_caller: Callable[[Any], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(connect, schema, display_name, has_sessions=has_sessions, return_to_caller=return_to_caller)
        self._indexed: set[tuple[str, str]] = set()
        self._indexed_until = 0.0

    def _init_process_state(self) -> None:
        super()._init_process_state()
        self._committer = Committer(self, self._display_name, self._hold)

    # The ten primitives, except those that `ServerEngine` has -----------------

    async def scan(
        self,
        namespace: str,
        span: Span,
        *,
        family: Family = "data",
        where: Filter | None = None,
        values: bool = True,
        limit: int = 500,
        reverse: bool = False,
    ) -> ScanPage:
        """See `Engine.scan`."""
        self._check_open()
        if not values and where is None:
            text = self._sql(sql.reverse_order(sql.SCAN_KEYS) if reverse else sql.SCAN_KEYS)
            rows = await self._fetch_page(text, namespace, family, span, limit)
            entries = [entry_from_row(row[:10]) for row in rows[:limit]]
            return ScanPage(entries, entries[-1].key if len(rows) > limit else None)
        conditions, operands = ("", []) if where is None else filter_sql(where)
        text = self._sql(sql.reverse_order(sql.SCAN) if reverse else sql.SCAN).replace("{conditions}", conditions)
        rows = await self._fetch_page(text, namespace, family, span, limit, *operands)
        is_whole = not rows or rows[0][10] == len(rows) <= limit
        entries = [entry_from_row(row[:10]) for row in rows[:limit]]
        cursor = None if is_whole else entries[-1].key
        if where is not None:
            # The server found all entries that may match. The filter itself decides, as on every engine.
            entries = [entry for entry in entries if entry.stored is not None and where.matches(entry.stored)]
            entries = entries if values else [entry.without_value() for entry in entries]
        return ScanPage(entries, cursor)

    async def count(self, namespace: str, span: Span, *, family: Family = "data") -> int:
        """See `Engine.count`."""
        self._check_open()
        seen_ms = self._seen_ms.get(namespace, 0)
        ((count, now_ms),) = await self._fetch(sql.COUNT, namespace, family, *span_bounds(span), seen_ms)
        self._observe_time(namespace, now_ms)
        return int(count)

    async def namespaces(self) -> list[str]:
        """See `Engine.namespaces`."""
        self._check_open()
        return sorted(name for (name,) in await self._fetch(sql.NAMESPACES))

    async def due(self, namespace: str, *, limit: int = 500) -> list[Expire]:
        """See `Engine.due`."""
        self._check_open()
        rows = await self._fetch(sql.DUE, namespace, limit, self._seen_ms.get(namespace, 0))
        if not rows:
            return []
        self._observe_time(namespace, rows[-1][8])
        known, due = self._committer.known(namespace), []
        known.see_time(max(known.now_ms(), rows[-1][8]))
        for row in rows:
            entry, size_bytes, family = entry_from_row(row[:10]), row[10], row[11]
            # The sweeper ends them next, and then they need not be read once more.
            known.set((family, entry.key), Head(entry, size_bytes))
            due.append(Expire(entry.key, entry.revision, family))
        return due

    async def trim(self, namespace: str, window: Window) -> int:
        """See `Engine.trim`."""
        self._check_open()
        await self._fetch(sql.DROP_RECEIPTS, namespace)
        await self._fetch(sql.FORGET_SUPERSEDED, namespace)
        # Check without locking the namespace first: usually there is nothing to drop.
        status = await self.status(namespace)
        oldest = await self._fetch(sql.OLDEST_CHANGES, namespace, status.floor, 1)
        count, size_bytes = status.log_changes, status.log_bytes
        if not window.excess(oldest, count=count, size_bytes=size_bytes, now_ms=status.now_ms)[0]:
            return 0
        return await self._shield(self._trim(namespace, window))

    async def _trim(self, namespace: str, window: Window) -> int:
        try:
            async with self._transaction() as connection:
                taken = await connection.fetchrow(self._sql(sql.TAKE), namespace, self._seen_ms.get(namespace, 0))
                before, now_ms, count, size_bytes = taken
                oldest = await connection.fetch(self._sql(sql.OLDEST_CHANGES), namespace, before, TRIM_CHANGES_MAX)
                dropped, freed_bytes, floor = window.excess(oldest, count=count, size_bytes=size_bytes, now_ms=now_ms)
                if dropped:
                    last = await connection.fetchrow(self._sql(sql.LAST_CHANGE), namespace, floor)
                    floor_print = fingerprint_from_row(last)
                    await connection.execute(self._sql(sql.DROP_CHANGES), namespace, before, floor)
                    await connection.execute(
                        self._sql(sql.SET_FLOOR), namespace, floor, dropped, freed_bytes, floor_print
                    )
        except Exception as error:
            raise self._translate(error) from error
        return dropped

    async def status(self, namespace: str) -> Status:
        """See `Engine.status`."""
        self._check_open()
        (found,) = await self._fetch(sql.STATUS, namespace)
        revision, floor, keys, size_bytes, log_changes, log_bytes, epoch, server_ms, clock_ms = found
        now_ms = self._observe_time(namespace, server_ms)
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
            behind_ms=max(0, now_ms - clock_ms),
        )

    # Committing ---------------------------------------------------------------

    async def _commit_group(self, namespace: str, group: list[Ticket], since: int) -> Sequence[CommitResult]:
        puts = plain_puts(group)
        # The functions for puts need the row of the namespace, which exists once this handle has committed there. In a
        # transaction nothing could follow when they refuse.
        if puts is None or namespace not in self._latest or self._has_odd_defaults:
            return await self._commit_planned(namespace, group, since)
        # They tell nothing of what is there where a guard fails, which is likely while others write the same entry.
        if self._committer.is_contended(namespace, (ticket.batch for ticket in group)):
            return await self._commit_planned(namespace, group, since)
        results = await self._put_on_server(namespace, group, puts, since)
        left_out = [ticket for ticket, result in zip(group, results, strict=True) if result is None]
        if not left_out:
            return cast("Sequence[CommitResult]", results)
        for ticket in left_out:
            self._committer.known(namespace).note_left_out(ticket.batch)
        try:
            later = iter(await self._commit_planned(namespace, left_out, since))
        except Exception as error:
            if len(left_out) == len(group):
                raise
            # The rest of the group was applied, so that this error is not for all of it.
            later = iter(await self._commit_each(namespace, left_out, since, error))
        return [next(later) if result is None else result for result in results]

    async def _put_on_server(
        self, namespace: str, group: list[Ticket], puts: list[Put], since: int
    ) -> Sequence[Commit | Ambiguous | None]:
        """Let the server put values, in one round trip; None in place of a batch that it leaves out."""
        name = new_request_id()
        # Encoding may fail because of a batch, so it comes before anything is sent.
        arguments = put_arguments(group, puts, name)
        statement, seen_ms = sql.PUT if len(puts) > 1 else sql.PUT_ONE, self._seen_ms.get(namespace, 0)
        is_sent = False
        try:
            async with self._statement() as connection:
                is_sent = True
                rows = await connection.fetch(self._sql(statement), namespace, self._channel, name, *arguments, seen_ms)
                results = put_results(group, puts, rows)
        except Exception as error:
            if isinstance(error, asyncpg.PostgresError) and error.sqlstate in (LEFT_TO_PLAN, SUPERSEDED):
                return [None] * len(group)
            if self._may_be_applied(error, is_sent=is_sent):
                return [
                    self._ambiguous(ticket.batch.request_id or f"{name}.{position}", since, error)
                    for position, ticket in with_last_positions(group)
                ]
            raise self._translate_not_applied(error) from error
        self._committer.known(namespace).note_results([ticket.batch for ticket in group], results)
        self._record_revision(namespace, max((one.revision for one in results if one is not None), default=0))
        return results

    async def _commit_planned(self, namespace: str, group: list[Ticket], since: int) -> Sequence[CommitResult]:
        """Plan a group here, and let the server compare and write."""
        results = await self._committer.commit(
            namespace, [ticket.batch for ticket in group], since, lambda position: not group[position].future.done()
        )
        self._record_revision(namespace, max((one.revision for one in results if isinstance(one, Commit)), default=0))
        return results

    async def apply(self, namespace: str, name: str, units: Sequence[Unit]) -> Sequence[Moment | Stale]:
        """See `Storage.apply`."""
        arguments = encode_units(units)
        is_sent = False
        try:
            async with self._statement() as connection:
                is_sent = True
                return await self._apply_on(connection, namespace, name, units, arguments)
        except Exception as error:
            if self._may_be_applied(error, is_sent=is_sent):
                raise ReplyLost from error
            raise self._translate_not_applied(error) from error

    @contextlib.asynccontextmanager
    async def _hold(self, namespace: str) -> AsyncIterator[Apply]:
        """Apply in one transaction: what is read first is locked until it is written."""

        async def apply(name: str, units: Sequence[Unit]) -> Sequence[Moment | Stale]:
            return await self._apply_on(connection, namespace, name, units, encode_units(units))

        is_committing = False
        try:
            async with self._transaction() as connection:
                yield apply
                is_committing = True
        except Exception as error:
            if is_committing and is_connection_lost(error):
                raise ReplyLost from error
            raise self._translate_not_applied(error) from error

    async def _apply_on(
        self, connection: Any, namespace: str, name: str, units: Sequence[Unit], arguments: list[list[Any]]
    ) -> Sequence[Moment | Stale]:
        seen_ms = self._seen_ms.get(namespace, 0)
        rows = await connection.fetch(self._sql(sql.APPLY), namespace, self._channel, name, seen_ms, *arguments)
        return decode_replies(units, rows)

    async def find_changes(self, namespace: str, after: int, origin: str) -> list[Change]:
        """See `Storage.find_changes`."""
        rows = await self._fetch(sql.CHANGES_OF_REQUEST, namespace, after, origin)
        return [change_from_row(row) for row in rows]

    def _may_be_applied(self, error: Exception, *, is_sent: bool) -> bool:
        """Whether a statement was sent, and its effect is unknown or its reply cannot be read."""
        is_unexpected = is_sent and not isinstance(error, asyncpg.PostgresError | LimpetError)
        return is_unexpected or is_connection_lost(error)

    def _translate_not_applied(self, error: Exception) -> Exception:
        """The error of a group that the server rolled back, or that was never sent."""
        if isinstance(error, asyncpg.PostgresError):
            translated = self._translate(error)
            return NotApplied(translated) if is_about_one_row(error) else translated
        # Any other error is about a batch that could not be encoded.
        return self._translate(error) if isinstance(error, DRIVER_ERRORS) else error

    # Reading ------------------------------------------------------------------

    async def _read_all(self, namespace: str, family: Family, keys: list[str]) -> Sequence[ReadResult]:
        rows = await self._fetch(self._read_statement, namespace, family, array_text(keys))
        found: dict[str, Entry] = {}
        for row in rows:
            expires_ms = row[8]
            if expires_ms is not None and (row[10] or expires_ms <= self._seen_ms.get(namespace, 0)):
                self._observe_time(namespace, expires_ms)
            else:
                found[row[0]] = entry_from_row(row[:10])
        if family == "receipt":
            found = {key: resolve_receipt(entry) for key, entry in found.items()}
        return [found.get(key) for key in keys]

    async def _fetch_page(
        self, text: str, namespace: str, family: Family, span: Span, limit: int, *operands: object
    ) -> Sequence[Any]:
        """The rows of a page, and one more row if another page follows."""
        seen_ms = self._seen_ms.get(namespace, 0)
        rows = await self._run(text, namespace, family, *span_bounds(span), limit + 1, seen_ms, *operands)
        self._observe_time(namespace, rows[0][-1])
        return [] if rows[0][0] is None else rows

    async def _read_log(self, namespace: str, after: int, limit: int, span: Span | None) -> LogPage:
        bounds = (None, None) if span is None else span_bounds(span)
        rows = await self._fetch(sql.LOG_PAGE, namespace, after, limit, *bounds)
        revision, floor = (rows[0][0], rows[0][1]) if rows else (0, 0)
        check_after(after, floor=floor, revision=revision)
        changes = [change_from_row(row[2:18]) for row in rows if row[2] is not None]
        is_full = bool(changes) and (len(changes) == limit or len(changes) < rows[0][18])
        floor_print = (rows[0][20] if rows else None) or BEGINNING
        before = floor_print if not rows or rows[0][21] is None else fingerprint_from_row(rows[0][21:])
        if not limit:
            return LogPage([], after, before)
        return LogPage(changes, changes[-1].revision if is_full else revision, before)

    # Epochs -------------------------------------------------------------------

    async def raise_epoch(self, skip: int) -> int:
        """See `Restoring.raise_epoch`."""
        self._check_open()
        try:
            async with self._transaction() as connection:
                epoch: int = await connection.fetchval(self._sql(sql.RAISE_EPOCH))
                await connection.execute(self._sql(sql.SKIP_REVISIONS), skip)
        except Exception as error:
            raise self._translate(error) from error
        return epoch

    # Indexes ------------------------------------------------------------------

    async def index(self, namespace: str, field: str) -> None:
        """See `Indexing.index`."""
        name, comment = postgres_name(namespace, field), literal(json.dumps([namespace, field]))
        statements = []
        for kind, expression in zip("nt", postgres_expressions(field), strict=True):
            statements += [
                f"CREATE INDEX IF NOT EXISTS {name}_{kind} ON {self._table} (({expression}), key)"
                f" WHERE {_index_condition(namespace)}",
                f"COMMENT ON INDEX {self._schema_name}.{name}_{kind} IS {comment}",
            ]
        await self._define(*statements)

    async def unindex(self, namespace: str, field: str) -> None:
        """See `Indexing.unindex`."""
        name = f"{self._schema_name}.{postgres_name(namespace, field)}"
        await self._define(f"DROP INDEX IF EXISTS {name}_n, {name}_t")

    async def _define(self, *statements: str) -> None:
        """Run statements that change the schema of the database."""
        await self._shield(self._define_once(*statements))
        self._indexed_until = 0.0

    async def _define_once(self, *statements: str) -> None:
        try:
            async with self._transaction() as connection:
                if connection.get_server_version().major >= 17:
                    # An index of a large table takes longer than transactions may. A limit set here applies at once.
                    await connection.execute("SET LOCAL transaction_timeout = 0")
                for statement in statements:
                    await connection.execute(statement, timeout=DEFINE_S)
        except Exception as error:
            raise self._translate(error) from error

    async def indexes(self, namespace: str) -> list[str]:
        """See `Indexing.indexes`."""
        found = [json.loads(row[0]) for row in await self._run(sql.INDEX_COMMENTS, self._table)]
        self._indexed = {(space, field) for space, field in found}
        self._indexed_until = asyncio.get_running_loop().time() + INDEXES_KNOWN_S
        return sorted(field for space, field in self._indexed if space == namespace)

    async def candidates(self, namespace: str, span: Span, wanted: Sequence[IndexProbe]) -> list[str] | None:
        """See `Indexing.candidates`."""
        if asyncio.get_running_loop().time() >= self._indexed_until:
            await self.indexes(namespace)
        best: list[str] | None = None
        for probe in wanted:
            # If the index was dropped since, the search is slower and finds the same.
            if (namespace, probe.name) not in self._indexed:
                continue
            found: list[str] = []
            for condition, operands in postgres_parts(probe, 2):
                # Without the span: a plan made for all spans would use the key's index instead of this one.
                text = f"SELECT key FROM {self._table} WHERE {_index_condition(namespace)} AND {condition} LIMIT $1"
                found += [row[0] for row in await self._run(text, CANDIDATES_MAX + 1, *operands)]
            if len(found) <= CANDIDATES_MAX and (best is None or len(found) < len(best)):
                best = found
        return None if best is None else [key for key in best if key in span]

    @property
    def _table(self) -> str:
        return f"{self._schema_name}.limpet_entries"


def _index_condition(namespace: str) -> str:
    """Which entries an index of a namespace has: those that can have fields. A search repeats it to the letter."""
    return f"namespace = {literal(namespace)} AND family = 'data' AND kind IN ('json', 'record')"
