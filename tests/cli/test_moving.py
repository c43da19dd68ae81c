"""Export, import and copy at the command line."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import limpet.sync
from tests.cli.support import Limpet, looked_at, start, wait_for_end


@pytest.fixture
def other(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/other.db"


def make_entries(url: str, count: int) -> None:
    with limpet.sync.open(url, sweep=False) as store:
        for start_at in range(0, count, 100):
            batch = store.batch()
            for number in range(start_at, start_at + 100):
                batch.put(f"{number:06}", "x" * 100)
            batch.commit()


def test_a_store_is_exported_and_imported(run: Limpet, other: str) -> None:
    run("put", "theme", "dark", "--ttl", "1h")
    run("put", "theme", "light", "--keep-ttl")
    run("-n", "trivia", "put", "k", "1")

    done = run("export", "state.ndjson")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "state.ndjson has 2 entries\n", "")
    brought = Limpet(other)("import", "state.ndjson")
    assert (brought.exit_code, brought.stdout, brought.stderr) == (0, "2 entries read, 2 written\n", "")
    again = Limpet(other)("import", "state.ndjson")
    assert again.stdout == "2 entries read, 0 written\n2 there already\n"

    ours, theirs = run.json("get", "theme"), Limpet(other).json("get", "theme")
    assert theirs["version"] == 2
    assert {**ours, "revision": 0, "created_revision": 0} == {**theirs, "revision": 0, "created_revision": 0}


def test_an_export_goes_through_a_pipe(run: Limpet, other: str) -> None:
    run("put", "theme", "dark")
    run("-n", "trivia", "put", "k", "1")

    piped = run("export", "-", "trivia").stdout_bytes
    header, line, end = map(json.loads, piped.splitlines())
    assert (header["namespaces"], line["key"], end["entries"]) == ({"trivia": 1}, "k", 1)
    assert Limpet(other)("import", "-", stdin=piped).stdout == "1 entry read, 1 written\n"
    assert Limpet(other)("-n", "trivia", "get", "k").stdout == "1\n"


def test_the_reader_of_an_export_may_leave(url: str) -> None:
    make_entries(url, 6_000)
    shell = f"{sys.executable} -m limpet --url {url} export - | head -n 1"

    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)

    assert (done.stdout.startswith('{"limpet":"export"'), done.stderr) == (True, "")


def test_only_the_namespaces_that_are_named_are_imported(run: Limpet, other: str) -> None:
    run("put", "theme", "dark")
    run("-n", "trivia", "put", "k", "1")
    run("export", "x")

    assert Limpet(other).json("import", "x", "trivia")["written"] == 1
    assert Limpet(other)("namespaces").stdout == "trivia\n"


def test_a_store_is_copied(run: Limpet, url: str, other: str) -> None:
    run("put", "theme", "dark")
    run("append", "event/", "1")

    assert Limpet()("copy", url, other, "--dry-run").stdout == "3 entries read, 3 would be written\n"
    assert not Path(other.removeprefix("sqlite:///")).exists()
    assert Limpet()("copy", url, other).stdout == "3 entries read, 3 written\n"
    assert Limpet(other)("append", "event/", "2").stdout == "event/0000000000000002\n"
    run("put", "theme", "light")
    refused = Limpet()("copy", url, other)
    assert refused.exit_code == 4
    assert "'theme'" in refused.stderr
    assert "--on-conflict" in refused.stderr
    Limpet()("copy", url, other, "--on-conflict", "newer")
    assert Limpet(other)("get", "theme").stdout == '"light"\n'


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("export", "x"), 3, "no such file"),
        (("copy", "sqlite:///source.db", "sqlite:///x.db", "nothing"), 3, "nothing was written to namespace 'nothing'"),
        (("import", "missing"), 7, "cannot be read"),
        (("import", "state.db"), 7, "not an export"),
        (("copy", "sqlite:///missing.db", "sqlite:///x.db"), 3, "no such file"),
        (("copy", "memory:", "sqlite:///x.db"), 7, "ends with the process"),
    ],
)
def test_what_cannot_be_moved_is_an_error(run: Limpet, words: tuple[str, ...], code: int, text: str) -> None:
    Limpet("sqlite:///source.db")("put", "a", "1")
    Path("state.db" if words[-1] == "state.db" else "unused").write_text("text")

    result = (Limpet("sqlite:///target.db") if "import" in words else run)(*words)

    assert (result.exit_code, text in result.stderr) == (code, True), result.stderr


def test_a_terminal_shows_a_bar(url: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_entries(url, 6_000)
    monkeypatch.setenv("LIMPET_PROGRESS_AFTER", "0")

    code, seen = looked_at("copy", url, other)

    assert code == 0
    assert "copying" in seen
    assert "/6000" in seen
    assert "6,000 entries read, 6,000 written" in seen


# Adopting -----------------------------------------------------------------------


def make_table(file: Path, rows: int) -> None:
    with sqlite3.connect(file) as made:
        made.execute(
            "CREATE TABLE plugin_kv_storage (plugin_name TEXT, key TEXT, value TEXT, expires_at TIMESTAMP,"
            " created_at TIMESTAMP, updated_at TIMESTAMP, PRIMARY KEY (plugin_name, key))"
        )
        made.executemany(
            "INSERT INTO plugin_kv_storage VALUES ('bot', ?, ?, NULL, '2025-01-01', '2025-01-02')",
            [(f"key/{number:05}", str(number)) for number in range(rows)],
        )
    made.close()


def test_a_table_is_adopted_and_put_back(run: Limpet, tmp_path: Path, url: str) -> None:
    make_table(tmp_path / "state.db", 3)

    done = run.json("adopt", url, "--into", f"{url}?journal=wal")
    assert (done["read"], done["written"], done["rejected"]) == (3, 3, 0)
    assert run("-n", "bot", "get", "key/00001").stdout == "1\n"
    again = run("adopt", url, "--into", url)
    assert (again.exit_code, "adopted before" in again.stderr) == (7, True)
    assert run("adopt", url, "--into", url, "--undo").stdout == (
        "the table plugin_kv_storage is in its place, as it was\n"
    )
    absent = run("adopt", "x.json", "--into", "sqlite:///new.db")
    assert (absent.exit_code, Path("new.db").exists()) == (7, False)
    Path("x.json").write_text("{}")
    refused = run("adopt", "x.json", "--into", url, "--undo")
    assert refused.exit_code == 7


def test_what_is_killed_is_repeated(tmp_path: Path, url: str, other: str) -> None:
    """An adoption, an export, an import and a copy: killed at any moment, and run again, each has the same result."""
    make_table(tmp_path / "state.db", 6_000)
    into, third = f"{url}?journal=wal", f"sqlite:///{tmp_path}/third.db"
    for words in (
        ("adopt", url, "--into", into),
        ("export", "x.ndjson", "--url", url),
        ("import", "x.ndjson", "--url", other),
        ("copy", other, third),
    ):
        for delay_s in (0.4, 0.6, 0.9):
            process = start(*words)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(delay_s)
            process.kill()
            process.communicate()
        code, _, errors = wait_for_end(start(*words))
        # It may have been done before it was killed.
        assert code == 0 or "adopted before" in errors or "x.ndjson exists" in errors, errors

    Limpet(third)("export", "y.ndjson")
    first, last = (Path(name).read_bytes().splitlines()[1:] for name in ("x.ndjson", "y.ndjson"))
    assert len(last) == 6_001
    assert first == last
    with sqlite3.connect(tmp_path / "state.db") as file:
        assert file.execute("SELECT count(*) FROM plugin_kv_storage").fetchone() == (6_000,)
        assert file.execute("SELECT count(*) FROM plugin_kv_storage_before_limpet").fetchone() == (6_000,)
    file.close()
