"""Connections, transactions and notifications of the PostgreSQL engine, and how a store's tables are found or made."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import asyncpg
import msgspec

from limpet.clock import wake
from limpet.engines.postgres import sql
from limpet.engines.postgres.errors import is_connection_lost, translate_error
from limpet.engines.server_engine import ServerEngine
from limpet.engines.sql_indexes import quoted
from limpet.errors import Corrupt, Unavailable
from limpet.model import Durability, Traits
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

__all__ = ["COMMAND_S", "CONNECT_S", "PostgresConnections", "connect", "durability_of"]

T = TypeVar("T")

CONNECT_S: Final = 10.0
COMMAND_S: Final = 60.0
ABANDONED_S: Final = 1.0
"""How long closing waits for statements whose callers were cancelled."""

_IDLE_TRANSACTION_MS: Final = 5_000
_TRANSACTION_MS: Final = 30_000
_SETTINGS: Final = {
    # A database may have another default, under which a commit that had to wait would be refused.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    # No function of another schema may shadow one of PostgreSQL. Our own tables are named with their schema.
    "search_path": "pg_catalog, pg_temp",
    # Each statement has its index. One that was planned while a table was small would go on to read all of it.
    "enable_seqscan": "off",
    # A process that stops in the middle of a transaction must not block all others for long.
    "idle_in_transaction_session_timeout": str(_IDLE_TRANSACTION_MS),
}


async def connect(data_source: str, *, pooler: bool) -> Any:
    """Open a connection of our own, to a server or to a pooler in front of it."""
    connection = await asyncpg.connect(
        data_source,
        timeout=CONNECT_S,
        command_timeout=COMMAND_S,
        # Behind a pooler the next statement may run in another session, which lacks the prepared ones.
        statement_cache_size=0 if pooler else 100,
        server_settings={} if pooler else _SETTINGS,
    )
    try:
        if not pooler and connection.get_server_version().major >= 17:
            # For a process that stops in the middle of a statement, when its session does not count as idle.
            await connection.execute(f"SET transaction_timeout = {_TRANSACTION_MS}")
    except BaseException:
        # A caller that is cancelled here never gets the connection, so it is closed here.
        connection.terminate()
        raise
    return connection


class PostgresConnections(ServerEngine):
    """The part of the engine that runs statements: on its own connections or on those of a caller's pool."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        schema: str,
        display_name: str,
        *,
        has_sessions: bool = True,
        return_to_caller: Callable[[Any], Awaitable[None]] | None = None,
    ) -> None:
        self.traits = Traits(engine="postgres", durability="disk", clock="server", inline=False)
        self.taken: tuple[str, ...] = ()
        super().__init__(connect, display_name)
        self._return_to_caller = return_to_caller
        self._schema = schema
        self._has_sessions = has_sessions
        # Whether a caller's pool or a pooler configures the sessions, and whether their defaults do not suit us.
        self._is_guest = return_to_caller is not None or not has_sessions
        self._has_odd_defaults = False
        self._store_id, self._channel = "", ""
        self._read_statement = sql.READ_EACH
        self._sql = functools.cache(lambda statement: statement.replace("{schema}", quoted(schema)))

    def _init_process_state(self) -> None:
        super()._init_process_state()
        # Statements that run on although their caller was cancelled.
        self._abandoned: set[asyncio.Future[Any]] = set()

    async def close(self) -> None:
        """See `Engine.close`."""
        if not self._closed and self._abandoned:
            await asyncio.wait({*self._abandoned}, timeout=ABANDONED_S)
            for task in self._abandoned:
                task.cancel()
        await super().close()

    # Opening ------------------------------------------------------------------

    async def prepare(self, migrate: Callable[[], None] | None = None) -> None:
        """Create the tables if there are none, and read the store's identity and the durability of its commits."""
        try:
            revision = await self._identify()
            if migrate is not None and is_behind(revision):
                await asyncio.to_thread(migrate)
                revision = await self._identify()
        except Exception as error:
            raise self._translate(error) from error
        require(revision, self._display_name)

    async def _identify(self) -> str | None:
        """Read the schema revision of the tables and, if it is ours, the identity of the store."""
        async with self._borrow_connection() as connection:
            self._read_statement = sql.READ if connection.get_server_version().major >= 17 else sql.READ_EACH
            in_recovery, isolation, read_only = await connection.fetchrow(sql.SESSION_DEFAULTS)
        if in_recovery:
            raise Unavailable(f"{self._display_name} is a replica, which takes no writes")
        self._has_odd_defaults = (isolation, read_only) != ("read committed", "off")
        async with self._transaction() as connection:
            found = await connection.fetchval("SELECT to_regclass($1)", f"{self._schema_name}.limpet_store")
            if found is None:
                await self._make_tables(connection)
            elif await connection.fetchval("SELECT to_regclass($1)", f"{self._schema_name}.{VERSION_TABLE}") is None:
                return None
            revision: str | None = await connection.fetchval(self._sql(sql.SCHEMA_REVISION))
            # The tables of another revision may lack the columns that the next statements read.
            if revision != REVISION:
                return revision
            store_id: str | None = await connection.fetchval(self._sql(sql.STORE_ID))
            if store_id is None:
                raise Corrupt(f"{self._display_name} has no store id: its table limpet_store is empty")
            settings = await connection.fetchrow(sql.DURABILITY_SETTINGS)
            taken = await connection.fetch(TAKEN_ON_POSTGRES.format(schema="$1::text"), self._schema)
        self._store_id = store_id
        self._channel = f"limpet_{self._store_id}"
        self.traits = msgspec.structs.replace(self.traits, durability=durability_of(*settings))
        self.taken = tuple(name for (name,) in taken)
        # In the shared schema we do not claim the name of the view state.
        is_ours = self._schema != SHARED_SCHEMA
        warn_of_taken([name for name in self.taken if is_ours or name != "state"], self._display_name)
        return revision

    async def _make_tables(self, connection: Any) -> None:
        # Of several processes that find no tables, one creates them; the others wait here and then find them.
        await connection.execute(sql.LOCK_CREATION, self._schema)
        # Not to_regclass, which would repeat what this transaction has found before.
        if await connection.fetchval(sql.HAS_TABLES, self._schema):
            return
        if not await connection.fetchval("SELECT 1 FROM pg_namespace WHERE nspname = $1", self._schema):
            await connection.execute(f"CREATE SCHEMA {self._schema_name}")
        await connection.execute(in_schema(ddl("postgres"), self._schema_name))

    @property
    def _schema_name(self) -> str:
        return quoted(self._schema)

    # Connections --------------------------------------------------------------

    async def _release(self, connection: Any, *, lost: bool = False) -> None:
        if self._return_to_caller is None:
            self._return_to_pool(connection, lost=lost)
            return
        try:
            # A caller's pool needs every connection back, broken ones too.
            with contextlib.suppress(Exception):
                if lost:
                    connection.terminate()
                await self._return_to_caller(connection)
        finally:
            self._free_slots.release()

    async def _disconnect(self, connection: Any) -> None:
        await connection.close(timeout=CONNECT_S)

    def _abort(self, connection: Any) -> None:
        connection.terminate()

    def _is_closed(self, connection: Any) -> bool:
        return bool(connection.is_closed())

    def _is_connection_lost(self, error: BaseException) -> bool:
        return is_connection_lost(error)

    def _translate_driver_error(self, error: Exception) -> Exception:
        if self._is_guest and isinstance(error, asyncpg.SerializationError | asyncpg.ReadOnlySQLTransactionError):
            # The defaults of the role have changed since opening. The caller tries again, then in a transaction that
            # overrides them.
            self._has_odd_defaults = True
        return translate_error(error, self._display_name)

    # Statements ---------------------------------------------------------------

    async def _fetch(self, statement: str, *parameters: object) -> Sequence[Any]:
        """Run a statement of `sql` that may be run again."""
        return await self._run(self._sql(statement), *parameters)

    async def _run(self, text: str, *parameters: object) -> Sequence[Any]:
        is_wanted = True

        async def fetch() -> Sequence[Any]:
            try:
                async with self._statement() as connection:
                    # If the caller was cancelled while this waited for a connection, nothing has to be sent.
                    rows: Sequence[Any] = await connection.fetch(text, *parameters) if is_wanted else ()
            except Exception as error:
                raise self._translate(error) from error
            return rows

        try:
            return await self._shield(fetch())
        except asyncio.CancelledError:
            is_wanted = False
            raise

    async def _shield(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish the work even if the caller is cancelled.

        Interrupting a statement would cost its connection, and the driver would leave an error that was never
        retrieved, which the event loop logs.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            task.add_done_callback(_retrieve_error)
            raise

    def _statement(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """A connection for one statement; in a transaction if the defaults of the session do not suit us."""
        return self._transaction() if self._has_odd_defaults else self._borrow_connection()

    @contextlib.asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Any]:
        # The isolation is set here, whatever the role, the pooler or a caller's pool has as default: a statement must
        # see what others committed while it waited.
        async with self._borrow_connection() as connection, connection.transaction(isolation="read_committed"):
            if self._is_guest:
                mode = "SET TRANSACTION READ WRITE; " if self._has_odd_defaults else ""
                timeout = f"SET LOCAL idle_in_transaction_session_timeout = {_IDLE_TRANSACTION_MS}"
                await connection.execute(f"{mode}{timeout}")
            yield connection

    # Notifications ------------------------------------------------------------

    def _listen_to(self, namespace: str) -> None:
        # One channel serves all namespaces of the store.
        if self._has_sessions:
            self._keep_listening(self._channel, self._listen_once)

    async def _listen_once(self) -> None:
        connection = await self._acquire()
        ended = asyncio.get_running_loop().create_future()
        try:
            connection.add_termination_listener(lambda _: wake(ended))
            await connection.execute(sql.WILL_LISTEN, self._channel)
            await connection.add_listener(self._channel, self._on_notification)
            # Changes before this moment came without a notification, so all waiters read again.
            self._wakeup.notify_all()
            await ended
        finally:
            await self._release(connection, lost=True)

    def _on_notification(self, _connection: object, _pid: int, _channel: str, namespace: str) -> None:
        self._wakeup.notify(namespace)


def _retrieve_error(task: asyncio.Future[Any]) -> None:
    """Retrieve an error that no caller waits for, so that the event loop does not log it."""
    if not task.cancelled():
        task.exception()


def durability_of(fsync: str, synchronous_commit: str, standbys: str) -> Durability:
    """What a commit survives under these settings of the server."""
    if synchronous_commit == "off":
        # A commit is written within three times wal_writer_delay, 0.6 s by default. Without fsync it may never be
        # synced, and a power cut may destroy everything.
        return "seconds" if fsync == "on" else "none"
    if fsync == "off":
        return "process"
    return "quorum" if standbys and synchronous_commit != "local" else "disk"
