"""Migrating: a schema from one revision to another, with everything that is stored.

A migration happens whole or not at all, in one transaction, and one at a time: it takes SQLite's
write lock, or on PostgreSQL the lock under which the engine makes the tables. A second process that
migrates at the same time finds it done.

This module needs Alembic, so it is imported only to migrate. It blocks; an event loop calls it in a thread.
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
# The RETURNING clause is not needed, and SQLite has it only since 3.35; the rest is layout.
_TIDIER: Final = [
    (re.compile(r" RETURNING [^\n]*version_num;$", re.MULTILINE), ";"),
    (re.compile(r"^-- Running upgrade .*-> (\w+)$", re.MULTILINE), r"-- Revision \1"),
    (re.compile(r"\n\)\n (?=WITH)"), "\n) "),
    (re.compile(r" +$", re.MULTILINE), ""),
]
# Alembic keeps state for the whole process, so one thread at a time runs it.
_alembic: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class SqliteTarget:
    """A SQLite file."""

    path: str

    schema: ClassVar[None] = None
    dialect: ClassVar[str] = "sqlite"

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class PostgresTarget:
    """A schema of a PostgreSQL database. The source may hold a password, and is not shown."""

    source: str = field(repr=False)
    schema: str
    shown: str

    dialect: ClassVar[str] = "postgresql+asyncpg"

    def __str__(self) -> str:
        return self.shown


SchemaTarget = SqliteTarget | PostgresTarget


def current_revision(target: SchemaTarget) -> str | None:
    """The revision that a schema is at, known to this release or not; None without tables."""
    return _run(target, lambda connection: _read_revision(connection, target), locks=False)


def taken_names(target: SchemaTarget) -> list[str]:
    """The names of our views that another table or view has there."""

    def work(connection: sa.Connection) -> list[str]:
        if target.schema is None:
            return list(connection.scalars(sa.text(TAKEN_ON_SQLITE)))
        return list(connection.scalars(sa.text(TAKEN_ON_POSTGRES.format(schema=":schema")), {"schema": target.schema}))

    return _run(target, work, locks=False)


def up(target: SchemaTarget, revision: str = REVISION) -> str | None:
    """Migrate to a later revision, and return the one it was at.

    Raises:
        InvalidValue: There is no such revision, or it is an earlier one.
        Corrupt: The schema is at a revision that this release does not know.
    """

    def work(connection: sa.Connection) -> str | None:
        before = _read_revision(connection, target)
        _check_up(target, before, revision)
        if target.schema is not None and not sa.inspect(connection).has_schema(target.schema):
            connection.execute(sa.schema.CreateSchema(target.schema))
        command.upgrade(_config(target.schema, connection=connection), revision)
        return before

    return _run(target, work)


def down(target: SchemaTarget, revision: str) -> str | None:
    """Migrate to an earlier revision, and return the one it was at. ``base`` removes everything.

    Raises:
        InvalidValue: There is no such revision, or it is a later one.
        Corrupt: The schema is at a revision that this release does not know.
    """

    def work(connection: sa.Connection) -> str | None:
        before = _read_revision(connection, target)
        _check_down(target, before, revision)
        command.downgrade(_config(target.schema, connection=connection), revision)
        if revision == BASE:
            # Without tables there is no revision to record.
            sa.Table(VERSION_TABLE, sa.MetaData(), schema=target.schema).drop(connection)
        return before

    return _run(target, work)


def sql(target: SchemaTarget, revision: str = REVISION) -> str:
    """The statements that `up` would run, as a script; empty when there is nothing to do.

    Raises:
        InvalidValue: There is no such revision, or it is an earlier one.
        Corrupt: The schema is at a revision that this release does not know.
    """

    def work(connection: sa.Connection) -> str:
        before = _read_revision(connection, target)
        _check_up(target, before, revision)
        if before == revision:
            return ""
        text = _render(target.dialect, before, revision)
        if target.schema is None:
            return f"BEGIN IMMEDIATE;\n\n{text}\n\nCOMMIT;\n"
        name, literal = (mark + target.schema.replace(mark, mark * 2) + mark for mark in ('"', "'"))
        head = f"BEGIN;\n\n{_LOCK.format(literal)};\n\n"
        if not sa.inspect(connection).has_schema(target.schema):
            head += f"CREATE SCHEMA {name};\n\n"
        return f"{head}{in_schema(text, name)}\n\nCOMMIT;\n"

    return _run(target, work, locks=False)


def render(engine: str) -> str:
    """The statements that make an empty database ready, for ``sqlite`` or for any schema of ``postgres``."""
    with _alembic:
        return _render(SqliteTarget.dialect if engine == "sqlite" else PostgresTarget.dialect, None, REVISION)


# For the revisions ------------------------------------------------------------


def on_postgres() -> bool:
    """Whether the migration that is running runs on PostgreSQL."""
    return op.get_context().dialect.name == "postgresql"


def schema_name() -> str | None:
    """The schema that the migration that is running is for; None on SQLite."""
    return op.get_context().version_table_schema


def run(statement: str) -> None:
    """Run one statement as it is written, with the schema's name in place of ``{schema}``."""
    schema = schema_name()
    if schema is not None:
        statement = in_schema(statement, op.get_context().dialect.identifier_preparer.quote_schema(schema))
    # SQLAlchemy takes a word behind a colon for a parameter.
    op.execute(sa.text(statement.replace(":", r"\:")))


# Inside -----------------------------------------------------------------------


def _check_up(target: SchemaTarget, before: str | None, revision: str) -> None:
    _check_known(target, before)
    if revision not in REVISIONS:
        raise InvalidValue(f"there is no schema revision {revision!r}: known: {', '.join(REVISIONS)}")
    if before is not None and before > revision:
        raise InvalidValue(f"{target} is at schema revision {before}: 'limpet migrate down {revision}' goes back")


def _check_down(target: SchemaTarget, before: str | None, revision: str) -> None:
    _check_known(target, before)
    if revision not in (BASE, *REVISIONS):
        raise InvalidValue(f"there is no schema revision {revision!r}: known: {', '.join((BASE, *REVISIONS))}")
    if before is None:
        raise InvalidValue(f"{target} has no Limpet store in it")
    if revision != BASE and before < revision:
        raise InvalidValue(f"{target} is at schema revision {before}: 'limpet migrate up {revision}' goes on")


def _check_known(target: SchemaTarget, before: str | None) -> None:
    if before is not None and before not in REVISIONS:
        require(before, str(target))


def _read_revision(connection: sa.Connection, target: SchemaTarget) -> str | None:
    options = {"version_table": VERSION_TABLE, "version_table_schema": target.schema}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def _render(dialect: str, before: str | None, revision: str) -> str:
    """The statements between two revisions, on PostgreSQL for any schema. The caller holds _alembic."""
    written = io.StringIO()
    schema = None if dialect == SqliteTarget.dialect else _ANY_SCHEMA
    config = _config(schema, dialect_name=dialect, literal_binds=True)
    config.output_buffer = written
    command.upgrade(config, f"{before or BASE}:{revision}", sql=True)
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


def _run(target: SchemaTarget, work: Callable[[sa.Connection], T], *, locks: bool = True) -> T:
    """Run some work in a transaction, which is committed whole or rolled back."""
    with _alembic, _translate_errors(target):
        if isinstance(target, SqliteTarget):
            return _run_on_sqlite(target, work, locks)
        return asyncio.run(_run_on_postgres(target, work, locks))


def _run_on_sqlite(target: SqliteTarget, work: Callable[[sa.Connection], T], locks: bool) -> T:
    def connect() -> sqlite3.Connection:
        # As a URI with mode=rw, so that a missing file is not made.
        return sqlite3.connect(f"file:{quote(target.path)}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None)

    engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if locks else "BEGIN")
        result = work(connection)
        connection.commit()
    return result


async def _run_on_postgres(target: PostgresTarget, work: Callable[[sa.Connection], T], locks: bool) -> T:
    # This imports SQLAlchemy's whole ORM, which takes a while and which SQLite does not need.
    from sqlalchemy.ext.asyncio import create_async_engine

    arguments = {
        "dsn": target.source,
        "timeout": CONNECT_S,
        # Behind a pooler other clients may have left statements under the usual names on this connection.
        "prepared_statement_name_func": lambda: f"limpet_{uuid.uuid4().hex}",
    }
    engine = create_async_engine(f"{target.dialect}://", connect_args=arguments, poolclass=sa.NullPool)
    async with engine.begin() as connection:
        if locks:
            await connection.execute(sa.text(_LOCK.format(":schema")), {"schema": target.schema})
        return await connection.run_sync(work)


@contextlib.contextmanager
def _translate_errors(target: SchemaTarget) -> Iterator[None]:
    """Raise errors of the tools and drivers as ours."""
    try:
        yield
    except LimpetError:
        raise
    except util.CommandError as error:
        raise Corrupt(f"{target} cannot be migrated: {error}") from error
    except ModuleNotFoundError as error:
        raise InvalidValue(f"migrating {target} needs {error.name}: pip install 'limpet[migrate,postgres]'") from error
    except Exception as error:
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig is not None else error
        raise _translate(cause, str(target)) from error


_PASSING: Final = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_NOMEM")


def _translate(error: BaseException, shown: str) -> BaseException:
    state = getattr(error, "sqlstate", None) or ""
    name = getattr(error, "sqlite_errorname", None) or ""
    # Without DETAIL and HINT, in which PostgreSQL shows values of rows.
    message = str(error).partition("\nDETAIL:")[0].partition("\nHINT:")[0]
    if state == "42501" or state.startswith("28") or name.startswith(("SQLITE_READONLY", "SQLITE_PERM")):
        return PermissionDenied(f"{shown}: {message}")
    if state.startswith("3D"):
        return InvalidValue(f"{shown}: {message}")
    if name.startswith(_PASSING) or state[:2] in ("08", "40", "53", "55", "57", "58"):
        return Unavailable(f"{shown} cannot be migrated now: {message}")
    if isinstance(error, OSError):
        return Unavailable(f"{shown} cannot be reached now: {type(error).__name__}")
    if state or name:
        return Corrupt(f"{shown} cannot be migrated: {message}")
    return error
