"""A pytest plugin for the tests of the OpenAI Agents SDK: its session on SQLite is one on the judged engine.

Tests that look into the database of that session are left out, and those by which a closed session stays closed: ours
opens again. They are known by the names they use.
"""

from __future__ import annotations

import inspect
import os
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from agents.extensions import memory

from limpet.adapters.openai_agents import Session

# What only a session on SQLite has.
_OF_SQLITE = re.compile(r"\._\w|sqlite3|aiosqlite|_table|SQLiteSession is closed")

_namespaces: dict[str, str] = {}


class JudgedSession(Session):
    """What the tests take for the session on SQLite: one database is one namespace."""

    def __init__(self, session_id: str, db_path: str | Path = ":memory:", **options: Any) -> None:
        made = f"judged-{uuid.uuid4().hex[:12]}"
        namespace = made if str(db_path) == ":memory:" else _namespaces.setdefault(str(db_path), made)
        super().__init__(session_id, os.environ["LIMPET_JUDGED_URL"], namespace=namespace, **options)
        with Path(os.environ["LIMPET_JUDGED_STORES"]).open("a") as stores:
            stores.write(f"{namespace}\n")


memory.AsyncSQLiteSession = JudgedSession  # type: ignore[misc, assignment]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about SQLite."""
    about = [each for each in items if isinstance(each, pytest.Function)]
    of_sqlite = [each for each in about if _OF_SQLITE.search(inspect.getsource(each.function))]
    config.hook.pytest_deselected(items=of_sqlite)
    items[:] = [each for each in items if each not in of_sqlite]
