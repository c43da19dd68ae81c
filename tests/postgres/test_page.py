"""The documentation page of this engine: its statements, limits and results are true."""

from __future__ import annotations

import ast
import re

import pytest

import limpet
import limpet.sync
from limpet.engines import server_engine
from limpet.engines.postgres import connections
from limpet.engines.sql_indexes import quoted
from tests.cli.support import Limpet
from tests.docs_support import SITE, blocks
from tests.postgres.support import connected, new_schema, url_of

PAGE = SITE / "explanation" / "postgresql.md"
TEXTS = [block.text for block in blocks(PAGE)]
STORY = next(text for text in TEXTS if text.startswith("await "))
STATEMENTS = [text for text in TEXTS if text.startswith(("SELECT", "UPDATE"))]


@pytest.mark.parametrize("text", STATEMENTS, ids=lambda text: " ".join(text.split()[:6]))
async def test_a_statement_of_the_page_gives_what_it_says(store: limpet.Store, schema: str, text: str) -> None:
    story = compile(STORY, PAGE, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    await eval(story, {"store": store})  # noqa: S307 - our own page

    async with connected() as connection:
        await connection.execute(f"SET search_path = {quoted(schema)}")
        for statement, expected in re.findall(r"([^;]+;)\n((?:-- .*\n)*)", text):
            rows = [" | ".join(map(str, row)) for row in await connection.fetch(statement)]
            shown = [line.removeprefix("-- ") for line in expected.splitlines()]
            if shown:
                assert rows == shown


def test_every_block_of_the_page_is_run() -> None:
    # All but the program that writes a little, and the command that the next test runs.
    assert len(TEXTS) == len(STATEMENTS) + 2 >= 8


def test_the_command_of_the_page_begins_a_new_epoch() -> None:
    assert any(text.startswith("limpet epoch --raise --url") for text in TEXTS)
    url = url_of(new_schema())
    with limpet.sync.open(url, sweep=False) as store:
        entry = store.put("k", 1)

    assert Limpet(url).json("epoch", "--raise")["epoch"] == 2

    with limpet.sync.open(url, sweep=False) as store:
        assert store.put("k", 2).revision > entry.revision + 1_000_000


def test_the_page_names_the_limits_that_there_are() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())

    for sentence in (
        f"at most {server_engine.CONNECTIONS_MAX}, when it needs them",
        f"up to {server_engine.GROUP_MAX} commits",
        f"waits {connections.CONNECT_S:.0f} s for a connection and {connections.COMMAND_S:.0f} s for a statement",
    ):
        assert sentence in text
    assert server_engine.POLL_S == 0.5, "the page says: twice a second"


@pytest.mark.parametrize(
    ("fsync", "commit", "standbys", "word"),
    [
        ("on", "on", "", "disk"),
        ("on", "remote_write", "", "disk"),
        ("on", "remote_apply", "", "disk"),
        ("on", "on", "one", "quorum"),
        ("on", "remote_write", "one", "quorum"),
        ("on", "remote_apply", "one", "quorum"),
        ("on", "local", "one", "disk"),
        ("on", "local", "", "disk"),
        ("off", "on", "", "process"),
        ("off", "local", "", "process"),
        ("off", "on", "one", "process"),
        ("on", "off", "one", "seconds"),
        ("off", "off", "", "none"),
    ],
)
def test_the_table_of_durability_is_that_of_the_engine(fsync: str, commit: str, standbys: str, word: str) -> None:
    assert connections.durability_of(fsync, commit, standbys) == word
