"""A new store for each test, on each database that has tables."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

NewUrl = Callable[[str], str]


@pytest.fixture
def new_url(tmp_path: Path) -> Iterator[NewUrl]:
    """A function that returns the URL of an empty file or a missing schema, for ``sqlite`` or ``postgres``."""
    schemas: list[str] = []

    def new_url(engine: str) -> str:
        name = f"schema_{uuid.uuid4().hex[:12]}"
        if engine == "sqlite":
            path = tmp_path / f"{name}.db"
            # Migrating never makes a file.
            path.touch()
            return f"sqlite:///{path}"
        schemas.append(name)
        return f"{os.environ['LIMPET_TEST_POSTGRES']}?schema={name}"

    yield new_url
    if schemas:
        asyncio.run(_drop(schemas))


async def _drop(schemas: list[str]) -> None:
    connection = await asyncpg.connect(os.environ["LIMPET_TEST_POSTGRES"])
    try:
        for schema in schemas:
            await connection.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')
    finally:
        await connection.close()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, new_url: NewUrl) -> str:
    """The URL of an empty store, on both databases."""
    return new_url(request.param)


@pytest.fixture
def postgres_url(new_url: NewUrl) -> str:
    """A schema that is not there yet."""
    return new_url("postgres")


@pytest.fixture
def sqlite_url(new_url: NewUrl) -> str:
    """A file with nothing in it."""
    return new_url("sqlite")
