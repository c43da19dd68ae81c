"""Export, import and copy at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import limpet.sync
from tests.cli.support import Limpet, looked_at


@pytest.fixture
def other(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/other.db"


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
        (("import", "missing"), 7, "cannot be read"),
        (("import", "state.db"), 7, "not an export"),
        (("copy", "sqlite:///missing.db", "sqlite:///x.db"), 3, "no such file"),
        (("copy", "memory:", "sqlite:///x.db"), 7, "ends with the process"),
    ],
)
def test_what_cannot_be_moved_is_an_error(run: Limpet, words: tuple[str, ...], code: int, text: str) -> None:
    Path("state.db" if words[-1] == "state.db" else "unused").write_text("text")

    result = (Limpet("sqlite:///target.db") if "import" in words else run)(*words)

    assert (result.exit_code, text in result.stderr) == (code, True), result.stderr


def test_a_terminal_shows_a_bar(url: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with limpet.sync.open(url, sweep=False) as store:
        for start in range(0, 6_000, 100):
            batch = store.batch()
            for number in range(start, start + 100):
                batch.put(f"{number:06}", "x" * 100)
            batch.commit()
    monkeypatch.setenv("LIMPET_PROGRESS_AFTER", "0")

    code, seen = looked_at("copy", url, other)

    assert code == 0
    assert "copying" in seen
    assert "/6000" in seen
    assert "6,000 entries read, 6,000 written" in seen
