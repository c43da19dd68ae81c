"""Stores that are read with plain SQL, and the catalog of a database."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import sqlite3
from pathlib import Path
from typing import Any

import asyncpg

import limpet.sync
from limpet.engines.sql_indexes import quoted
from limpet.schema import ddl
from limpet.schema.migrate import PostgresTarget, SchemaTarget, SqliteTarget
from limpet.urls import Address

FIRST = "0001"


def target_of(url: str) -> SchemaTarget:
    """Where the tables of a URL are."""
    address = Address.parse(url)
    found: SchemaTarget = importlib.import_module(
        f"limpet.engines.{'sqlite' if address.scheme == 'sqlite' else 'postgres'}.engine"
    ).schema_target(address)
    return found


def engine_of(url: str) -> str:
    return "sqlite" if url.startswith("sqlite") else "postgres"


def make(url: str) -> None:
    """Make a store, as the first who opens it does."""
    limpet.sync.open(url, sweep=False).close()


def ask(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement in the database of a store, as an operator would, and commit it."""
    target = target_of(url)
    if isinstance(target, SqliteTarget):
        with contextlib.closing(sqlite3.connect(target.path)) as connection, connection:
            return connection.execute(statement).fetchall()
    return asyncio.run(_ask(target, statement))


def run_script(url: str, script: str) -> None:
    """Run a script of statements in the database of a store."""
    target = target_of(url)
    if isinstance(target, SqliteTarget):
        with contextlib.closing(sqlite3.connect(target.path)) as connection:
            connection.executescript(script)
    else:
        asyncio.run(_run_script(target, script))


def make_by_hand(url: str) -> None:
    """Make the tables from the static file, as a deployment might that makes them itself."""
    target = target_of(url)
    if isinstance(target, SqliteTarget):
        run_script(url, ddl("sqlite"))
    else:
        schema = quoted(target.schema)
        run_script(url, f"CREATE SCHEMA {schema};\n" + ddl("postgres").replace("{schema}", schema))


async def _connect(target: PostgresTarget) -> Any:
    path = quoted(target.schema)
    return await asyncpg.connect(target.source, server_settings={"search_path": path})


async def _ask(target: PostgresTarget, statement: str) -> list[tuple[Any, ...]]:
    connection = await _connect(target)
    try:
        return [tuple(row) for row in await connection.fetch(statement)]
    finally:
        await connection.close()


async def _run_script(target: PostgresTarget, script: str) -> None:
    connection = await _connect(target)
    try:
        await connection.execute(script)
    finally:
        await connection.close()


# Catalogs ---------------------------------------------------------------------

_OBJECTS = {
    "tables": """
        SELECT c.relname, c.relkind, c.reloptions, obj_description(c.oid, 'pg_class')
        FROM pg_class c WHERE c.relnamespace = $1 AND c.relkind <> 'i'""",
    "columns": """
        SELECT c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, l.collname,
            pg_get_expr(d.adbin, d.adrelid)
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        LEFT JOIN pg_collation l ON l.oid = a.attcollation
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE c.relnamespace = $1 AND c.relkind <> 'i' AND a.attnum > 0 AND NOT a.attisdropped""",
    "constraints": """
        SELECT t.relname, k.conname, pg_get_constraintdef(k.oid)
        FROM pg_constraint k JOIN pg_class t ON t.oid = k.conrelid WHERE t.relnamespace = $1""",
    "indexes": """
        SELECT c.relname, pg_get_indexdef(c.oid)
        FROM pg_class c WHERE c.relnamespace = $1 AND c.relkind = 'i'""",
    "functions": "SELECT p.proname, pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.pronamespace = $1",
    "views": "SELECT c.relname, pg_get_viewdef(c.oid) FROM pg_class c WHERE c.relnamespace = $1 AND c.relkind = 'v'",
    "triggers": """
        SELECT c.relname, pg_get_triggerdef(t.oid)
        FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid WHERE c.relnamespace = $1""",
}


def catalog(url: str) -> dict[str, set[str]]:
    """The catalog of the objects of a store, without the name of its schema."""
    target = target_of(url)
    if isinstance(target, SqliteTarget):
        found = ask(url, "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        kinds = {kind for kind, _, _ in found}
        return {kind: {f"{name}: {' '.join(sql.split())}" for its, name, sql in found if its == kind} for kind in kinds}
    return asyncio.run(_catalog(target))


async def _catalog(target: PostgresTarget) -> dict[str, set[str]]:
    connection = await _connect(target)
    try:
        oid = await connection.fetchval("SELECT oid FROM pg_namespace WHERE nspname = $1", target.schema)
        found = {kind: await connection.fetch(statement, oid) for kind, statement in _OBJECTS.items()}
    finally:
        await connection.close()
    here = re.compile(rf'"?{re.escape(target.schema)}"?')
    return {
        kind: {repr(tuple(here.sub("HERE", str(cell)) for cell in row)) for row in rows} for kind, rows in found.items()
    }


def folder_of(url: str) -> Path:
    """The folder of a SQLite store."""
    target = target_of(url)
    assert isinstance(target, SqliteTarget)
    return Path(target.path).parent
