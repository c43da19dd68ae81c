"""``limpet doctor`` and ``limpet stat``: the health of a store. Every problem here is a real one."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.cli import health
from limpet.engines.sqlite import examine
from limpet.schema import REVISION
from tests.cli.support import Limpet
from tests.docs_support import ROOT

OTHER_USER = 65_534


@pytest.fixture
def healthy(run: Limpet) -> Limpet:
    """A store with something in it."""
    run("put", "k", "1")
    run("field", "set", "r", "a=1", "-n", "jobs")
    return run


def meddle(file: Path, statement: str, *parameters: object) -> None:
    """Do to the file what Limpet never would."""
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute(statement, parameters)


def ms_ago(seconds: float) -> int:
    return round((time.time() - seconds) * 1000)


def findings(run: Limpet, *words: str) -> dict[str, dict[str, Any]]:
    """What the doctor found, by check, with its exit code held to it."""
    result = run("--json", "doctor", *words)
    found = {document["check"]: document for document in map(json.loads, result.stdout.splitlines())}
    is_bad = any(document["level"] == "bad" for document in found.values())
    assert result.exit_code == (6 if is_bad else 0), result.output
    assert result.stderr == ""
    return found


def result_of(found: dict[str, Any]) -> tuple[str, str]:
    return found["level"], found["finding"]


# Health -----------------------------------------------------------------------


def test_a_healthy_store_is_well_in_every_respect(healthy: Limpet, file: Path, url: str) -> None:
    result = healthy("doctor")

    assert result.exit_code == 0
    shown = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert {level for level, _, _ in shown} == {"ok"}
    facts = {check: finding for _, check, finding in shown}
    assert facts.pop("file") == f"{file} has {file.stat().st_size:,} bytes"
    assert re.fullmatch(r"[\d,]+ bytes are free on its disk", facts.pop("disk"))
    assert re.fullmatch(rf"opened {re.escape(url)} in \d+ ms", facts.pop("open"))
    assert re.fullmatch(r"the journal mode is wal, and its file has [\d,]+ bytes", facts.pop("journal"))
    assert facts == {
        "writable": "the file and its folder may be written by this user",
        "schema": f"the schema has revision {REVISION}, as this release needs",
        "integrity": "SQLite finds no damage in the file",
        "namespaces": "default (1 keys), jobs (1 keys)",
        "counts": "the counts of every namespace match its rows",
        "log": "the log has 2 changes of 5 bytes",
        "values": "every value can be read",
        "expired": "nothing that has expired waits to be swept",
        "durability": "an acknowledged write survives a power cut",
        "encryption": "values are not encrypted",
        "names": "no other program has the name of one of Limpet's views",
        "clock": "the store's time and this host's clock agree",
    }


def test_every_check_is_in_the_reference(healthy: Limpet) -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    section = page.partition("### `limpet doctor`")[2].partition("\n## ")[0]

    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == ["url", *findings(healthy)]


def test_looking_changes_nothing(healthy: Limpet, file: Path, url: str) -> None:
    before = file.read_bytes()

    healthy("doctor")

    assert file.read_bytes() == before
    with limpet.sync.open(url) as store:
        assert store.status().revision == 1


def test_it_looks_while_others_write(healthy: Limpet, url: str) -> None:
    with limpet.sync.open(url) as store, store.lock("n", ttl=30):
        store.put("k", 2)

        assert {found["level"] for found in findings(healthy).values()} == {"ok"}


def test_less_durability_is_reported(healthy: Limpet, url: str) -> None:
    found = findings(healthy, "--url", f"{url}?synchronous=normal")

    assert result_of(found["durability"]) == (
        "ok",
        "an acknowledged write survives a killed process, but not always a power cut",
    )


def test_an_empty_store_is_healthy(run: Limpet, url: str) -> None:
    limpet.sync.open(url).close()

    assert result_of(findings(run)["namespaces"]) == ("ok", "nothing was written yet")


# The wrong place --------------------------------------------------------------


def test_a_store_that_is_not_there_is_not_made(run: Limpet, file: Path) -> None:
    result = run("doctor")

    assert result.exit_code == 6
    assert result.stdout == (
        f"bad   file        {file} does not exist\n"
        "                  Name the store by --url or LIMPET_URL; a write makes one.\n"
    )
    assert not file.exists()


def test_the_default_is_explained() -> None:
    assert "limpet.db does not exist (the default, because neither" in Limpet()("doctor").stdout


def test_a_folder_is_no_file(run: Limpet, file: Path) -> None:
    file.mkdir()

    assert result_of(findings(run)["file"]) == ("bad", f"{file} is not a file")


def test_a_text_file_is_reported(run: Limpet, file: Path) -> None:
    file.write_text("no database at all, only words " * 20)

    found = findings(run)

    assert result_of(found["integrity"]) == ("bad", f"{file} cannot be read: file is not a database")
    assert "open" not in found


def test_a_database_of_others_is_reported_and_left_alone(run: Limpet, file: Path) -> None:
    meddle(file, "CREATE TABLE songs (title TEXT)")
    before = file.read_bytes()

    found = findings(run)

    assert result_of(found["schema"]) == ("bad", f"{file} is a SQLite file without a Limpet store")
    assert "the right file" in found["schema"]["advice"]
    assert "open" not in found
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("statement", "revision"),
    [
        ("UPDATE limpet_schema SET version_num = '0099'", "revision 0099"),
        ("UPDATE limpet_schema SET version_num = '0001'", "revision 0001"),
        ("DELETE FROM limpet_schema", "no revision"),
    ],
)
def test_another_schema_is_reported(healthy: Limpet, file: Path, statement: str, revision: str) -> None:
    meddle(file, statement)

    found = findings(healthy)

    assert result_of(found["schema"]) == (
        "bad",
        f"the schema has {revision}, and this release needs revision {REVISION}",
    )
    assert ("limpet migrate up" in found["schema"]["advice"]) == (revision == "revision 0001")
    assert "open" not in found


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("state.db", "'state.db' is not an engine URL"),
        ("user:hunter2@host", "is not an engine URL|unknown engine 'user'"),
    ],
)
def test_a_malformed_url_is_reported(url: str, words: str) -> None:
    result = Limpet(url)("doctor")

    assert result.exit_code == 6
    assert re.search(words, result.stdout)
    assert "hunter2" not in result.output


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nosuch://user:hunter2@host/db", "unknown engine 'nosuch'"),
        ("memory:", "memory: ends with the process that opens it"),
        ("sqlite:state.db", "write sqlite:///relative.db"),
    ],
)
def test_a_store_that_cannot_be_opened_is_reported(url: str, words: str) -> None:
    found = findings(Limpet(url))

    assert found["open"]["level"] == "bad"
    assert words in found["open"]["finding"]
    assert "hunter2" not in str(found)


def test_a_namespace_that_is_not_allowed_is_reported(healthy: Limpet) -> None:
    found = findings(healthy, "-n", "Not Allowed")

    assert found["open"]["level"] == "bad"
    assert "'Not Allowed' is not allowed" in found["open"]["finding"]


# Ailments ---------------------------------------------------------------------


def test_damage_is_found(healthy: Limpet, file: Path, url: str) -> None:
    with limpet.sync.open(url) as store:
        for number in range(2000):
            store.put(f"key/{number:04}", "x" * 50)
    with file.open("r+b") as content:
        content.seek(file.stat().st_size // 2)
        content.write(b"\xde\xad\xbe\xef" * 3000)

    found = findings(healthy)

    level, finding = result_of(found["integrity"])
    assert level == "bad"
    assert finding.startswith("SQLite finds damage: ") or "malformed" in finding
    assert "limpet restore FILE" in found["integrity"]["advice"]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE limpet_changes SET total_keys = 7 WHERE namespace = 'jobs'",
        "UPDATE limpet_changes SET logged_changes = 7 WHERE namespace = 'jobs'",
        "UPDATE limpet_entries SET revision = 1000 WHERE namespace = 'jobs'",
        "DELETE FROM limpet_entries WHERE namespace = 'jobs'",
    ],
)
def test_counts_that_do_not_match_are_found(healthy: Limpet, file: Path, statement: str) -> None:
    meddle(file, statement)

    found = findings(healthy)

    assert result_of(found["counts"]) == ("bad", "the counts of jobs do not match its rows")


def test_values_that_cannot_be_read_are_found(healthy: Limpet, file: Path) -> None:
    meddle(file, "UPDATE limpet_entries SET value = '{broken'")

    assert result_of(findings(healthy)["values"]) == ("bad", "2 values cannot be read")


def test_bytes_are_readable_whatever_they_are(healthy: Limpet, url: str) -> None:
    with limpet.sync.open(url) as store:
        store.put("bytes", b"\xff{")
        store.record("record").put({"bytes": b"\xff{"})

    assert findings(healthy)["values"]["level"] == "ok"


def test_what_no_process_sweeps_is_reported(run: Limpet, url: str) -> None:
    clock = limpet.ManualClock(time.time() - 7200)
    with limpet.sync.open(url, clock=clock, sweep=False, namespace="sessions") as store:
        store.put("a", 1, ttl=10)
        store.put("b", 1, ttl=20)

    found = findings(run)

    level, finding = result_of(found["expired"])
    assert level == "warn"
    assert re.fullmatch(r"2 entries have expired, the first 1h59m\d+s ago, and wait to be swept; .*", finding)
    assert "limpet watch" in found["expired"]["advice"]


def test_what_the_sweeper_has_not_come_to_yet_is_no_ailment(healthy: Limpet, url: str) -> None:
    with limpet.sync.open(url, sweep=False) as store:
        store.put("a", 1, ttl=0.001)
        time.sleep(0.01)

    assert findings(healthy)["expired"]["level"] == "ok"


def test_a_log_that_no_process_trims_is_reported(healthy: Limpet, url: str, file: Path) -> None:
    meddle(file, "UPDATE limpet_changes SET at_ms = ? WHERE namespace = 'jobs'", ms_ago(2 * 86_400))

    found = findings(healthy)

    level, finding = result_of(found["log"])
    assert level == "warn"
    assert re.fullmatch(r"the log is longer than needed: jobs \(1 changes, 3 bytes, back to 2d(\d+s)? ago\)", finding)
    assert "limpet watch" in found["log"]["advice"]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE limpet_changes SET logged_changes = 999999999",
        "UPDATE limpet_changes SET logged_bytes = 999999999",
    ],
)
def test_a_log_that_is_young_may_be_long(healthy: Limpet, file: Path, statement: str) -> None:
    """The last minute is always kept, however much it is."""
    meddle(file, statement)

    young = findings(healthy)["log"]["level"]
    meddle(file, "UPDATE limpet_changes SET at_ms = ?", ms_ago(3600))

    assert (young, findings(healthy)["log"]["level"]) == ("ok", "warn")


def test_a_clock_that_was_set_back_is_reported(healthy: Limpet, file: Path) -> None:
    meddle(file, "UPDATE limpet_namespaces SET at_ms = ?", ms_ago(-3600))

    found = findings(healthy)

    level, finding = result_of(found["clock"])
    assert level == "warn"
    assert re.fullmatch(r"time stands still for (1h|59m5\ds): the host's clock is behind the latest .*", finding)
    assert "nothing expires and no lock runs out" in found["clock"]["advice"]


def test_another_journal_mode_is_reported_and_changed_by_opening(healthy: Limpet, file: Path) -> None:
    meddle(file, "PRAGMA journal_mode = DELETE")

    found = findings(healthy)

    assert result_of(found["journal"]) == ("warn", "the journal mode is delete")
    assert findings(healthy)["journal"]["level"] == "ok"


def test_a_journal_that_is_not_emptied_is_reported(healthy: Limpet, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "WAL_BYTES_MAX", 1000)
    with limpet.sync.open(url) as store:
        store.put("k", "x" * 10_000)

        found = findings(healthy)

    assert found["journal"]["level"] == "warn"
    assert "A reader that never ends" in found["journal"]["advice"]


def test_a_disk_that_is_nearly_full_is_reported(healthy: Limpet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "DISK_BYTES_MIN", 10**18)

    found = findings(healthy)

    assert found["disk"]["level"] == "warn"
    assert "Make room" in found["disk"]["advice"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter."""
    folder = Path(tempfile.mkdtemp(prefix="limpet-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


# Everything is imported first: another user may not be able to.
AS_OTHER_USER = f"""
import os
from limpet.cli import health, main
from limpet.engines.sqlite import engine, examine
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({OTHER_USER})
    os.setuid({OTHER_USER})
main(prog_name="limpet")
"""


def as_other_user(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the rights of another user, where we are root and no right is refused."""
    return subprocess.run([sys.executable, "-c", AS_OTHER_USER, *words], capture_output=True, text=True, check=False)


def test_a_file_that_may_not_be_written_is_reported(open_folder: Path) -> None:
    file = open_folder / "state.db"
    Limpet(f"sqlite:///{file}")("put", "k", "1")
    file.chmod(0o444)

    done = as_other_user("--url", f"sqlite:///{file}", "doctor")

    assert done.returncode == 6, done.stderr
    assert f"bad   writable    {file} may not be written by this user\n" in done.stdout


def test_a_folder_that_may_not_be_written_is_reported(open_folder: Path) -> None:
    file = open_folder / "state.db"
    Limpet(f"sqlite:///{file}")("put", "k", "1")
    file.chmod(0o666)
    open_folder.chmod(0o555)

    done = as_other_user("--url", f"sqlite:///{file}", "doctor")

    assert done.returncode == 6, done.stderr
    assert f"bad   writable    {open_folder} may not be written by this user\n" in done.stdout
    assert f"bad   integrity   {file} cannot be read now: " in done.stdout


# stat -------------------------------------------------------------------------


def test_stat_tells_what_there_is_and_who_holds_locks(run: Limpet, url: str) -> None:
    run("put", "k", "1")
    with limpet.sync.open(url) as store, store.lock("night\tly", ttl=30, holder="worker\x1b7") as held:
        shown = run("stat").stdout.splitlines()
        token = held.token

    facts = dict(line.split(maxsplit=1) for line in shown)
    assert re.fullmatch(
        rf"night\\tly is held by worker\\u001b7 for another \d\d\.\ds unless renewed \(token {token}\)",
        facts.pop("lock"),
    )
    assert len(facts.pop("store_id")) == 16
    assert facts == {
        "url": url,
        "namespace": "default",
        "engine": "sqlite",
        "durability": "disk",
        "encrypted": "no",
        "keys": "1",
        "bytes": "2",
        "revision": "2",
        "log_changes": "2",
        "log_bytes": facts["log_bytes"],
        "log_after": "0",
        "epoch": "1",
    }


def test_stat_says_when_no_lock_is_held(healthy: Limpet) -> None:
    assert healthy("stat").stdout.splitlines()[-1] == "lock         none is held"


def test_stat_hides_a_password(healthy: Limpet, url: str) -> None:
    shown = healthy("stat", "--url", f"{url}?synchronous=normal").stdout

    assert "durability   process" in shown
    assert f"url          {url}\n" in shown
