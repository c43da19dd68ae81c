"""Migrating: a schema from one revision to another, with everything that is stored.

A migration happens whole or not at all, in one transaction, and one at a time: it takes SQLite's
write lock, or on PostgreSQL the lock under which the engine makes the tables. Whoever comes second
finds it done.

Nothing imports this but what migrates. It blocks; an event loop calls it in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import quote

from limpet.errors import Corrupt, InvalidValue, LimpetError, PermissionDenied, Unavailable
from limpet.schema import (
    REVISION,
    REVISIONS,
    TAKEN_ON_POSTGRES,
    TAKEN_ON_SQLITE,
    VERSION_TABLE,
    in_schema,
    require,
)

try:
    import sqlalchemy as sa
    from alembic import command, op, util
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
except ModuleNotFoundError as missing:
    raise InvalidValue(f"migrating needs {missing.name}: pip install 'limpet[migrate]'") from missing

T = TypeVar("T")

BASE: Final = "base"
"""The revision before the first: no tables."""

BUSY_S: Final = 60.0
CONNECT_S: Final = 10.0

# In a text that is for any schema, this stands for the schema, quoted.
_ANY_SCHEMA: Final = sa.quoted_name("{schema}", quote=False)
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended('limpet ' || {}, 0))"
# Nobody reads the answer, and SQLite has it since 3.35 only; the rest is for the eye.
_TIDIER: Final = [
    (re.compile(r" RETURNING [^\n]*version_num;$", re.MULTILINE), ";"),
    (re.compile(r"^-- Running upgrade .*-> (\w+)$", re.MULTILINE), r"-- Revision \1"),
    (re.compile(r"\n\)\n (?=WITH)"), "\n) "),
    (re.compile(r" +$", re.MULTILINE), ""),
]
# Alembic's own state is the process's, so one thread at a time is in it.
_alembic: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class SqliteTarget:
    """A file."""

    path: str

    schema: ClassVar[None] = None
    dialect: ClassVar[str] = "sqlite"

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class PostgresTarget:
    """A schema of a database. The source may hold a password, and is not shown."""

    source: str = field(repr=False)
    schema: str
    shown: str

    dialect: ClassVar[str] = "postgresql+asyncpg"

    def __str__(self) -> str:
        return self.shown


SchemaTarget = SqliteTarget | PostgresTarget


def found(place: SchemaTarget) -> str | None:
    """The revision that a schema is at, known or not; None where there are no tables."""
    return _run(place, lambda connection: _current(connection, place), locks=False)


def taken(place: SchemaTarget) -> list[str]:
    """The names of our views that something else has there."""

    def work(connection: sa.Connection) -> list[str]:
        if place.schema is None:
            return list(connection.scalars(sa.text(TAKEN_ON_SQLITE)))
        return list(connection.scalars(sa.text(TAKEN_ON_POSTGRES.format(schema=":schema")), {"schema": place.schema}))

    return _run(place, work, locks=False)


def up(place: SchemaTarget, target: str = REVISION) -> str | None:
    """Migrate to a later revision, and tell which one it was at.

    Raises:
        InvalidValue: There is no such revision, or it is an earlier one.
        Corrupt: The schema is at a revision that this release does not know.
    """

    def work(connection: sa.Connection) -> str | None:
        before = _current(connection, place)
        _check_up(place, before, target)
        if place.schema is not None and not sa.inspect(connection).has_schema(place.schema):
            connection.execute(sa.schema.CreateSchema(place.schema))
        command.upgrade(_config(place.schema, connection=connection), target)
        return before

    return _run(place, work)


def down(place: SchemaTarget, target: str) -> str | None:
    """Migrate to an earlier revision, and tell which one it was at. ``base`` removes everything.

    Raises:
        InvalidValue: There is no such revision, or it is a later one.
        Corrupt: The schema is at a revision that this release does not know.
    """

    def work(connection: sa.Connection) -> str | None:
        before = _current(connection, place)
        _check_down(place, before, target)
        command.downgrade(_config(place.schema, connection=connection), target)
        if target == BASE:
            # Nothing is left, so nothing is left to tell its revision.
            sa.Table(VERSION_TABLE, sa.MetaData(), schema=place.schema).drop(connection)
        return before

    return _run(place, work)


def sql(place: SchemaTarget, target: str = REVISION) -> str:
    """What `up` would run, as a script; empty when there is nothing to do.

    Raises:
        InvalidValue: There is no such revision, or it is an earlier one.
        Corrupt: The schema is at a revision that this release does not know.
    """

    def work(connection: sa.Connection) -> str:
        before = _current(connection, place)
        _check_up(place, before, target)
        if before == target:
            return ""
        text = _text(place.dialect, before, target)
        if place.schema is None:
            return f"BEGIN IMMEDIATE;\n\n{text}\n\nCOMMIT;\n"
        name, literal = (mark + place.schema.replace(mark, mark * 2) + mark for mark in ('"', "'"))
        head = f"BEGIN;\n\n{_LOCK.format(literal)};\n\n"
        if not sa.inspect(connection).has_schema(place.schema):
            head += f"CREATE SCHEMA {name};\n\n"
        return f"{head}{in_schema(text, name)}\n\nCOMMIT;\n"

    return _run(place, work, locks=False)


def rendered(engine: str) -> str:
    """What makes an empty database ready, for ``sqlite`` or for any schema of ``postgres``."""
    with _alembic:
        return _text(SqliteTarget.dialect if engine == "sqlite" else PostgresTarget.dialect, None, REVISION)


# For the revisions ------------------------------------------------------------


def on_postgres() -> bool:
    """Whether the migration that is running runs on PostgreSQL."""
    return op.get_context().dialect.name == "postgresql"


def schema_name() -> str | None:
    """The schema that the migration that is running is for; None on SQLite."""
    return op.get_context().version_table_schema


def run(statement: str) -> None:
    """Run one statement as it is written, with the schema's name for ``{schema}``."""
    schema = schema_name()
    if schema is not None:
        statement = in_schema(statement, op.get_context().dialect.identifier_preparer.quote_schema(schema))
    # A word behind a colon would be taken for a parameter.
    op.execute(sa.text(statement.replace(":", r"\:")))


# Inside -----------------------------------------------------------------------


def _check_up(place: SchemaTarget, before: str | None, target: str) -> None:
    _check_known(place, before)
    if target not in REVISIONS:
        raise InvalidValue(f"there is no schema revision {target!r}: known: {', '.join(REVISIONS)}")
    if before is not None and before > target:
        raise InvalidValue(f"{place} is at schema revision {before}: 'limpet migrate down {target}' goes back")


def _check_down(place: SchemaTarget, before: str | None, target: str) -> None:
    _check_known(place, before)
    if target not in (BASE, *REVISIONS):
        raise InvalidValue(f"there is no schema revision {target!r}: known: {', '.join((BASE, *REVISIONS))}")
    if before is None:
        raise InvalidValue(f"{place} has no Limpet store in it")
    if target != BASE and before < target:
        raise InvalidValue(f"{place} is at schema revision {before}: 'limpet migrate up {target}' goes on")


def _check_known(place: SchemaTarget, before: str | None) -> None:
    if before is not None and before not in REVISIONS:
        require(before, str(place))


def _current(connection: sa.Connection, place: SchemaTarget) -> str | None:
    options = {"version_table": VERSION_TABLE, "version_table_schema": place.schema}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def _text(dialect: str, before: str | None, target: str) -> str:
    """The statements between two revisions, on PostgreSQL for any schema. The caller holds _alembic."""
    written = io.StringIO()
    schema = None if dialect == SqliteTarget.dialect else _ANY_SCHEMA
    config = _config(schema, dialect_name=dialect, literal_binds=True)
    config.output_buffer = written
    command.upgrade(config, f"{before or BASE}:{target}", sql=True)
    text = written.getvalue()
    for pattern, better in _TIDIER:
        text = pattern.sub(better, text)
    return text.strip()


def _config(schema: str | None, **options: Any) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    config.attributes["options"] = {
        **options,
        "version_table": VERSION_TABLE,
        "version_table_schema": schema,
        "transactional_ddl": True,
    }
    return config


def _run(place: SchemaTarget, work: Callable[[sa.Connection], T], *, locks: bool = True) -> T:
    """Do some work in a transaction, which ends well or leaves nothing."""
    with _alembic, _translating(place):
        if isinstance(place, SqliteTarget):
            return _run_on_sqlite(place, work, locks)
        return asyncio.run(_run_on_postgres(place, work, locks))


def _run_on_sqlite(place: SqliteTarget, work: Callable[[sa.Connection], T], locks: bool) -> T:
    def connect() -> sqlite3.Connection:
        # By name, so that a file that is not there is not made.
        return sqlite3.connect(f"file:{quote(place.path)}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None)

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if locks else "BEGIN")
        result = work(connection)
        connection.commit()
    return result


async def _run_on_postgres(place: PostgresTarget, work: Callable[[sa.Connection], T], locks: bool) -> T:
    # It brings the whole mapper of objects along, which takes a while and which a file does without.
    from sqlalchemy.ext.asyncio import create_async_engine

    arguments = {
        "dsn": place.source,
        "timeout": CONNECT_S,
        # Behind a pooler others have used this connection, and left statements under the usual names.
        "prepared_statement_name_func": lambda: f"limpet_{uuid.uuid4().hex}",
    }
    engine = create_async_engine(f"{place.dialect}://", connect_args=arguments, poolclass=sa.NullPool)
    async with engine.begin() as connection:
        if locks:
            await connection.execute(sa.text(_LOCK.format(":schema")), {"schema": place.schema})
        return await connection.run_sync(work)


@contextlib.contextmanager
def _translating(place: SchemaTarget) -> Iterator[None]:
    """Errors of the tools and drivers as ours."""
    try:
        yield
    except LimpetError:
        raise
    except util.CommandError as error:
        raise Corrupt(f"{place} cannot be migrated: {error}") from error
    except ModuleNotFoundError as error:
        raise InvalidValue(f"migrating {place} needs {error.name}: pip install 'limpet[migrate,postgres]'") from error
    except Exception as error:
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
        raise _as_ours(cause, str(place)) from error


_PASSING: Final = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_NOMEM")


def _as_ours(error: BaseException, shown: str) -> BaseException:
    state = getattr(error, "sqlstate", None) or ""
    name = getattr(error, "sqlite_errorname", None) or ""
    # The first words only: what PostgreSQL says in detail shows rows.
    words = str(error).partition("\nDETAIL:")[0].partition("\nHINT:")[0]
    if state == "42501" or state.startswith("28") or name.startswith(("SQLITE_READONLY", "SQLITE_PERM")):
        return PermissionDenied(f"{shown}: {words}")
    if state.startswith("3D"):
        return InvalidValue(f"{shown}: {words}")
    if name.startswith(_PASSING) or state[:2] in ("08", "40", "53", "55", "57", "58"):
        return Unavailable(f"{shown} cannot be migrated now: {words}")
    if isinstance(error, OSError):
        return Unavailable(f"{shown} cannot be reached now: {type(error).__name__}")
    if state or name:
        return Corrupt(f"{shown} cannot be migrated: {words}")
    return error
