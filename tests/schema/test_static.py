"""The static files, the migrations and the description of the tables say the same."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import create_async_engine

from limpet import schema
from limpet.schema import REVISION, REVISIONS, ddl, migrate
from limpet.schema.migrate import PostgresTarget, SqliteTarget
from limpet.schema.render import ENGINES, static, write
from limpet.schema.tables import tables
from tests.schema.conftest import NewUrl
from tests.schema.support import ask, catalog, engine_of, make, make_by_hand, target_of

FOLDER = Path(schema.__file__).parent


@pytest.mark.parametrize("engine", ENGINES)
def test_a_static_file_is_what_the_migrations_render(engine: str) -> None:
    """If not: python -m limpet.schema.render."""
    assert ddl(engine) == static(engine)


def test_the_files_are_written_as_they_are(tmp_path: Path) -> None:
    write(tmp_path)

    for engine in ENGINES:
        assert (tmp_path / f"{engine}.sql").read_bytes() == (FOLDER / f"{engine}.sql").read_bytes()


def test_the_known_revisions_are_those_of_the_migrations() -> None:
    scripts = list(ScriptDirectory(FOLDER / "migrations").walk_revisions())

    assert [script.revision for script in reversed(scripts)] == list(REVISIONS)
    assert all(script.module.downgrade for script in scripts)


# Catalogs ---------------------------------------------------------------------


def migrated(url: str, target: str = REVISION) -> str:
    """A database that was migrated step by step."""
    for revision in REVISIONS[: REVISIONS.index(target) + 1]:
        migrate.up(target_of(url), revision)
    return url


def test_a_store_made_at_once_is_the_same_as_one_migrated_step_by_step(url: str, new_url: NewUrl) -> None:
    make(url)

    assert catalog(url) == catalog(migrated(new_url(engine_of(url))))


def test_a_store_made_by_hand_is_the_same_as_one_that_was_opened(url: str, new_url: NewUrl) -> None:
    by_hand = new_url(engine_of(url))
    make(url)
    make_by_hand(by_hand)

    assert catalog(url) == catalog(by_hand)
    assert ask(url, "SELECT id FROM limpet_store") != ask(by_hand, "SELECT id FROM limpet_store")
    make(by_hand)


def test_going_down_and_up_again_leads_to_the_same(url: str) -> None:
    make(url)
    before = catalog(url)

    for revision in reversed(REVISIONS[:-1]):
        migrate.down(target_of(url), revision)
        assert catalog(url) != before
    migrate.up(target_of(url))

    assert catalog(url) == before


def test_the_description_makes_the_tables_that_the_migrations_make(url: str, new_url: NewUrl) -> None:
    """The table that counts the revisions is Alembic's own, and views and functions are no tables."""
    described = new_url(engine_of(url))
    make(url)
    create_all(described)

    made, wanted = catalog(url), catalog(described)
    kinds = ("table", "index") if engine_of(url) == "sqlite" else ("tables", "columns", "constraints", "indexes")
    for kind in kinds:
        ours = {row for row in made[kind] if "limpet_schema" not in row and not is_of_view(row)}
        assert ours == wanted[kind]
        assert ours


def is_of_view(row: str) -> bool:
    return row.startswith(("('state'", "('plugin_kv_storage'"))


def create_all(url: str) -> None:
    target = target_of(url)
    if isinstance(target, SqliteTarget):
        engine = sa.create_engine(f"sqlite:///{target.path}", poolclass=sa.NullPool)
        tables("sqlite").create_all(engine)
    else:
        asyncio.run(create_all_on_postgres(target))


async def create_all_on_postgres(target: PostgresTarget) -> None:
    engine = create_async_engine("postgresql+asyncpg://", connect_args={"dsn": target.source}, poolclass=sa.NullPool)
    async with engine.begin() as connection:
        await connection.execute(sa.schema.CreateSchema(target.schema))
        await connection.run_sync(tables("postgres", target.schema).create_all)


# The weight of opening --------------------------------------------------------


def loaded_by_opening(url: str) -> set[str]:
    """The modules that a fresh interpreter has loaded once it has opened and used a store."""
    script = (
        "import json, sys, limpet.sync\n"
        f"with limpet.sync.open({url!r}) as store:\n"
        "    store.put('key', 1)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("option", ["", "migrate=auto"])
@pytest.mark.parametrize("exists", [False, True], ids=["empty", "up-to-date"])
def test_opening_loads_nothing_that_only_migrating_needs(url: str, exists: bool, option: str) -> None:
    if exists:
        make(url)
    address = f"{url}{'&' if '?' in url else '?'}{option}" if option else url

    loaded = loaded_by_opening(address)

    heavy: Any = {name for name in loaded if name.split(".")[0] in ("alembic", "sqlalchemy", "mako", "greenlet")}
    assert heavy == set()
    assert "limpet.schema" in loaded
    assert "limpet.schema.migrate" not in loaded
