"""``limpet migrate``: its output, its exit codes, and its confirmation."""

from __future__ import annotations

from pathlib import Path

import pytest

import limpet.sync
from limpet.schema import REVISION, migrate
from tests.cli.support import Limpet
from tests.schema.support import FIRST, ask, folder_of, make, run_script, target_of


@pytest.fixture
def shown(url: str) -> str:
    """The URL as it is shown: without credentials and without options."""
    return url.partition("?")[0].replace("postgres@", "***@")


@pytest.fixture
def run(url: str) -> Limpet:
    return Limpet(url)


@pytest.fixture
def store(url: str) -> str:
    """A store that is as this release needs it, with something in it."""
    with limpet.sync.open(url, sweep=False) as store:
        store.put("key", 1)
    return url


def test_the_status_of_a_store_that_is_as_it_should_be(run: Limpet, store: str, shown: str) -> None:
    result = run("migrate", "status")

    assert result.exit_code == 0
    assert result.stdout == (
        f"url          {shown}\n"
        f"revision     {REVISION}\n"
        f"needed       {REVISION}\n"
        "next         nothing: it is as this release needs it\n"
    )


@pytest.mark.parametrize(
    ("revision", "advice"),
    [
        (FIRST, "'limpet migrate up', or open the store with ?migrate=auto"),
        ("0099", "use the release of Limpet that wrote it, or a later one"),
    ],
)
def test_the_status_of_another_revision_tells_the_way_on(run: Limpet, store: str, revision: str, advice: str) -> None:
    ask(store, f"UPDATE limpet_schema SET version_num = '{revision}'")

    result = run("--json", "migrate", "status")

    assert result.exit_code == 6
    assert f'"revision":"{revision}","needed":"{REVISION}","next":"{advice}"' in result.stdout


def test_the_status_of_a_database_without_tables_makes_none(run: Limpet, url: str) -> None:
    result = run("migrate", "status")

    assert result.exit_code == 6
    assert "revision     none\n" in result.stdout
    assert "'limpet migrate up' makes them" in result.stdout
    assert migrate.current_revision(target_of(url)) is None


def test_down_and_up_say_where_they_came_from(run: Limpet, store: str, shown: str) -> None:
    down = run("migrate", "down", FIRST, "--yes")
    refused = run("get", "key")
    up = run("migrate", "up")
    again = run("migrate", "up", REVISION)

    assert (down.exit_code, refused.exit_code, up.exit_code, again.exit_code) == (0, 6, 0, 0)
    assert down.stdout == f"{shown} is at schema revision {FIRST}; it was at {REVISION}\n"
    assert "'limpet migrate up'" in refused.stderr
    assert up.stdout == f"{shown} is at schema revision {REVISION}; it was at {FIRST}\n"
    assert again.stdout == f"{shown} is at schema revision {REVISION} already\n"
    assert run("get", "key").stdout == "1\n"


def test_down_and_up_as_json(run: Limpet, store: str, shown: str) -> None:
    assert run.json("migrate", "down", FIRST, "--yes") == {"url": shown, "before": REVISION, "revision": FIRST}
    assert run.json("migrate", "up") == {"url": shown, "before": FIRST, "revision": REVISION}


def test_up_makes_the_tables_where_there_are_none(run: Limpet, url: str, shown: str) -> None:
    result = run("migrate", "up")

    assert result.stdout == f"{shown} is at schema revision {REVISION}; it had no tables\n"
    assert run("put", "key", "1").exit_code == 0


@pytest.mark.parametrize(
    ("answer", "exit_code", "revision"), [("y\n", 0, FIRST), ("n\n", 1, REVISION), ("", 1, REVISION)]
)
def test_down_asks_first(run: Limpet, store: str, shown: str, answer: str, exit_code: int, revision: str) -> None:
    result = run("migrate", "down", FIRST, stdin=answer)

    assert result.exit_code == exit_code
    assert f"Migrate {shown} down to {FIRST}? [y/N]" in result.stderr
    assert "EVERYTHING" not in result.stderr
    assert migrate.current_revision(target_of(store)) == revision


def test_who_removes_everything_is_warned(run: Limpet, store: str, shown: str) -> None:
    refused = run("migrate", "down", "base", stdin="n\n")
    assert "This deletes EVERYTHING that is stored there." in refused.stderr
    assert migrate.current_revision(target_of(store)) == REVISION

    done = run("migrate", "down", "base", "--yes")

    assert done.stdout == f"{shown} has no tables any more; it was at schema revision {REVISION}\n"
    assert migrate.current_revision(target_of(store)) is None


def test_sql_prints_what_up_would_run(run: Limpet, store: str) -> None:
    run("migrate", "down", FIRST, "--yes")

    result = run("migrate", "sql")

    assert result.exit_code == 0
    assert result.stdout.startswith("BEGIN")
    assert result.stdout.endswith("COMMIT;\n")
    assert migrate.current_revision(target_of(store)) == FIRST
    assert run.json("migrate", "sql") == {"revision": REVISION, "sql": result.stdout}
    run_script(store, result.stdout)
    assert run("get", "key").stdout == "1\n"


def test_sql_prints_nothing_where_there_is_nothing_to_do(run: Limpet, store: str, shown: str) -> None:
    result = run("migrate", "sql")

    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"limpet: {shown} is at schema revision {REVISION}: there is nothing to do\n"


def test_a_revision_that_is_not_known_is_rejected(run: Limpet, store: str) -> None:
    result = run("migrate", "up", "0099")

    assert result.exit_code == 7
    assert "there is no schema revision '0099': known: 0001, 0002" in result.stderr


@pytest.mark.parametrize("words", [("status",), ("up",), ("down", FIRST, "--yes"), ("sql",)])
def test_a_file_that_is_not_there_is_not_made(sqlite_url: str, words: tuple[str, ...]) -> None:
    lost = folder_of(sqlite_url) / "lost.db"

    result = Limpet(f"sqlite:///{lost}")("migrate", *words)

    assert result.exit_code == 3
    assert f"there is no store at sqlite:///{lost}: no such file" in result.stderr
    assert not lost.exists()


@pytest.mark.parametrize("url", ["memory:", "memory:name", "nosuch://host"])
def test_an_engine_without_tables_is_refused(url: str) -> None:
    result = Limpet(url)("migrate", "up")

    assert result.exit_code == 7
    assert "has no tables: migrating is for sqlite: and postgresql: URLs" in result.stderr


def test_a_misspelt_option_is_refused_and_nothing_else_is_migrated(run: Limpet, store: str) -> None:
    """Without its schema, a URL would name the tables of another store."""
    result = Limpet(store.replace("schema=", "schmea=") if "schema=" in store else f"{store}?schmea=x")("migrate", "up")

    assert result.exit_code == 7
    assert "unknown option 'schmea'" in result.stderr


def test_the_options_of_an_engine_are_known(store: str) -> None:
    more = "&pooler=yes" if "?" in store else "?synchronous=normal"

    assert Limpet(f"{store}{more}&migrate=auto")("migrate", "status").exit_code == 0


def test_a_command_can_migrate_as_it_opens(run: Limpet, store: str) -> None:
    run("migrate", "down", FIRST, "--yes")

    result = run("get", "key", "--url", f"{store}{'&' if '?' in store else '?'}migrate=auto")

    assert result.stdout == "1\n"
    assert migrate.current_revision(target_of(store)) == REVISION


def test_a_path_with_odd_characters_is_a_path(tmp_path: Path) -> None:
    file = tmp_path / "a?b#c %20.db"
    url = f"sqlite:///{tmp_path}/a%3Fb%23c%20%2520.db"
    make(url)
    assert file.exists()

    assert Limpet(url)("migrate", "down", FIRST, "--yes").exit_code == 0
    assert Limpet(url)("migrate", "up").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".db") == [file.name]
