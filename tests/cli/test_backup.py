"""Backups from the command line: a copy of a store that is in use, a store made from it, and the epoch that follows."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.errors import Compacted, Conflict, LockLost
from tests.cli.support import Limpet, start, terminal, wait_for_end


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Where the backup of this test is to be."""
    return tmp_path / "saved" / "state.db"


@pytest.fixture(autouse=True)
def folder(saved: Path) -> None:
    saved.parent.mkdir()


def files(folder: Path) -> set[str]:
    return {found.name for found in folder.iterdir()}


@contextlib.contextmanager
def opened(url: str, **options: Any) -> Iterator[limpet.sync.Store]:
    with limpet.sync.open(url, sweep=False, **options) as store:
        yield store


# Backing up -------------------------------------------------------------------


def test_a_backup_is_a_store(run: Limpet, saved: Path) -> None:
    run("put", "theme", "dark")
    run("-n", "other", "put", "k", "1")

    done = run("backup", str(saved))

    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{saved} has {saved.stat().st_size:,} bytes and 2 namespaces\n"
    assert files(saved.parent) == {"state.db"}
    assert Limpet(f"sqlite:///{saved}")("get", "theme").stdout == '"dark"\n'


def test_a_backup_is_its_owners_alone(run: Limpet, saved: Path) -> None:
    """Values may be secrets, whatever the umask is."""
    run("put", "token", "secret")
    before = os.umask(0)
    try:
        assert run("backup", str(saved)).exit_code == 0
    finally:
        os.umask(before)

    assert saved.stat().st_mode & 0o777 == 0o600


def test_a_backup_replaces_nothing_unless_forced(run: Limpet, saved: Path) -> None:
    run("put", "k", "1")
    run("backup", str(saved))
    run("put", "k", "2")
    first = saved.read_bytes()

    refused = run("backup", str(saved))
    assert refused.exit_code == 7
    assert "--force" in refused.stderr
    assert saved.read_bytes() == first

    assert run("backup", str(saved), "--force").exit_code == 0
    assert Limpet(f"sqlite:///{saved}")("get", "k").stdout == "2\n"


def test_a_store_in_use_is_not_replaced_by_a_backup(run: Limpet, saved: Path) -> None:
    """Its write-ahead log would be taken for that of the copy."""
    run("put", "k", "1")
    with opened(f"sqlite:///{saved}") as other:
        other.put("mine", 1)

        refused = run("backup", str(saved), "--force")

        assert refused.exit_code == 7
        assert "in use" in refused.stderr
        assert other.get("mine") == 1


def test_a_backup_is_of_one_moment_while_others_write(run: Limpet, url: str, saved: Path) -> None:
    """A writer never rests, and keeps two keys equal. The store is large enough to be copied in several steps."""
    with opened(url) as store:
        for number in range(14):
            store.put(f"large/{number}", secrets.token_bytes(990_000))
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                store.batch().put("a", number).put("z", number).commit()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(3):
                done = run("backup", str(saved), "--force")
                assert done.exit_code == 0, done.stderr
                with opened(f"sqlite:///{saved}") as copy:
                    found = copy.scan()
                    pair = {entry.key: entry.value for entry in found if entry.key in "az"}
                    assert pair.get("a") == pair.get("z")
                    assert copy.status().keys == len(copy.keys().keys)
        finally:
            stop.set()
            writer.join()


def test_a_large_backup_shows_how_far_it_is(run: Limpet, url: str, saved: Path) -> None:
    with opened(url) as store:
        for number in range(22):
            store.put(f"large/{number}", secrets.token_bytes(990_000))

    with terminal("--url", url, "backup", str(saved)) as screen:
        assert screen.end() == 0
        assert "copying 100 %" in screen.seen
    assert "copying" not in run("backup", str(saved), "--force").stderr


def test_a_backup_of_nothing_makes_nothing(run: Limpet, file: Path, saved: Path) -> None:
    done = run("backup", str(saved))

    assert done.exit_code == 3
    assert not file.exists()
    assert files(saved.parent) == set()


def test_a_backup_to_nowhere_says_so(run: Limpet, tmp_path: Path) -> None:
    run("put", "k", "1")

    done = run("backup", str(tmp_path / "missing" / "state.db"))

    assert done.exit_code == 7
    assert "No such file or directory" in done.stderr


@pytest.mark.parametrize("command", ["backup", "restore"])
@pytest.mark.parametrize(
    ("url", "tool"),
    [
        ("postgresql://user:secret@db/state", "pg_dump"),
        ("redis://:secret@db/0", "RDB"),
        ("nats://db:4222", "nats stream backup"),
        ("https://store.example", "the engine behind"),
    ],
)
def test_another_engine_has_tools_of_its_own(command: str, url: str, tool: str, saved: Path) -> None:
    saved.touch()

    done = Limpet(url)(command, str(saved))

    assert done.exit_code == 7
    assert tool in done.stderr
    assert "limpet epoch --raise" in done.stderr
    assert "secret" not in done.stderr


# Restoring --------------------------------------------------------------------


def test_a_restored_store_holds_what_was_saved(run: Limpet, file: Path, url: str, saved: Path) -> None:
    run("put", "k", "1")
    run("backup", str(saved))
    run("put", "k", "2")
    run("put", "later", "1")

    done = run("restore", str(saved))

    assert done.exit_code == 0
    assert done.stdout == f"{url} is restored, in epoch 2, with 1 namespace\n"
    assert run("get", "k").stdout == "1\n"
    assert run("get", "later").exit_code == 3
    assert run("doctor").exit_code == 0
    # What was there is kept, and is a store as well.
    (aside,) = (found for found in file.parent.iterdir() if ".before-restore-" in found.name)
    assert str(aside) in done.stderr
    assert Limpet(f"sqlite:///{aside}")("get", "k").stdout == "2\n"
    assert files(saved.parent) == {"state.db"}


def test_what_was_seen_before_a_restore_matches_nothing(run: Limpet, url: str, saved: Path) -> None:
    """The store gives as many changes again. An entry, a revision, a position and a token are from before."""
    run("put", "k", "1")
    run("backup", str(saved))
    with opened(url) as store:
        entry = store.put("k", "lost")
        lock = store.lock("nightly", ttl=3600)
        lock.acquire()
        assert lock.token is not None
        fence = limpet.Fence("nightly", lock.token)
        with store.watch(after=0) as watch:
            position = next(watch).position

    assert run("restore", str(saved)).exit_code == 0

    with opened(url) as store:
        written = store.put("k", "new")
        assert written.version == entry.version
        assert written.revision > entry.revision
        with pytest.raises(Conflict):
            store.put("k", "x", expect=entry)
        with pytest.raises(Conflict):
            store.put("k", "x", expect=limpet.Revision(entry.revision))
        again = store.lock("nightly", ttl=3600)
        again.acquire()
        assert again.token is not None
        assert again.token > fence.token
        with pytest.raises(LockLost):
            store.put("k", "x", fence=fence)
        with pytest.raises(Compacted), store.watch(after=position):
            pass
        with store.watch(initial=True) as watch:
            assert next(watch).value == "new"
    result = run("watch", "--after", str(position), "--count", "1")
    assert result.exit_code == 7
    assert "--initial" in result.stderr


def test_every_namespace_goes_on_above_what_it_gave(run: Limpet, url: str, saved: Path) -> None:
    """One is not in the backup at all, and one has gone far since."""
    run("put", "k", "1")
    run("backup", str(saved))
    with opened(url) as store:
        far = store.put("k", 2)
        later = store.namespace("later").put("k", 1)
        with store.namespace("later").watch(after=0) as watch:
            position = next(watch).position

    document = run.json("restore", str(saved), "--skip", "10")

    assert (document["epoch"], document["namespaces"]) == (2, 2)
    with opened(url) as store:
        assert far.revision + 10 < store.put("k", 3).revision <= far.revision + 20
        other = store.namespace("later")
        assert other.get("k") is None
        assert other.put("k", 2).revision > later.revision + 10
        with pytest.raises(Compacted), other.watch(after=position):
            pass


def test_a_history_goes_on_over_a_restore(run: Limpet, url: str, saved: Path) -> None:
    run("put", "k", "1")
    run("backup", str(saved))
    run("put", "k", "2")
    run("restore", str(saved))
    run("put", "k", "3")

    with opened(url) as store:
        assert [event.value for event in store.history("k")] == [1, 3]


def test_a_backup_restored_twice_gives_other_revisions(run: Limpet, file: Path, saved: Path) -> None:
    """The file is lost each time, so no process knows which revisions it assigned."""
    run("put", "k", "1")
    run("backup", str(saved))
    seen = []
    for _ in range(3):
        file.unlink()
        assert run("restore", str(saved)).exit_code == 0
        seen.append(run.json("stat")["revision"])

    assert len(set(seen)) == 3


def test_a_store_in_use_is_not_restored(run: Limpet, file: Path, url: str, saved: Path) -> None:
    """A process that has it open would go on writing to a file that has no name any more."""
    run("put", "k", "1")
    run("backup", str(saved))
    process = start("--url", url, "watch", "--initial")
    try:
        assert process.stdout is not None
        process.stdout.readline()

        refused = run("restore", str(saved))

        assert refused.exit_code == 6
        assert "stop every process" in refused.stderr
        assert not any("before-restore" in found.name for found in file.parent.iterdir())
        assert run.json("stat")["epoch"] == 1
    finally:
        process.terminate()
        wait_for_end(process)
    assert run("restore", str(saved)).exit_code == 0


def test_a_damaged_store_is_restored(run: Limpet, file: Path, saved: Path) -> None:
    """That is what backups are for. What is left of it is kept, its journal too."""
    run("put", "k", "1")
    run("backup", str(saved))
    file.write_bytes(b"not a database at all, " * 1000)
    Path(f"{file}-wal").write_bytes(b"and no journal")

    assert run("restore", str(saved)).exit_code == 0

    assert run("get", "k").stdout == "1\n"
    asides = [found.name for found in file.parent.iterdir() if ".before-restore-" in found.name]
    assert any(name.endswith("Z") for name in asides)
    assert any(name.endswith("-wal") for name in asides)


def test_a_store_is_restored_where_there_is_none(run: Limpet, file: Path, saved: Path) -> None:
    run("put", "k", "1")
    run("backup", str(saved))
    file.unlink()

    done = run("restore", str(saved))

    assert (done.exit_code, done.stderr) == (0, "")
    assert file.stat().st_mode & 0o777 == 0o600
    assert run("get", "k").stdout == "1\n"


def test_what_a_link_leads_to_is_restored(run: Limpet, file: Path, saved: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.db"
    file.symlink_to(real)
    run("put", "k", "1")
    run("backup", str(saved))
    run("put", "k", "2")

    assert run("restore", str(saved)).exit_code == 0

    assert file.is_symlink()
    assert Limpet(f"sqlite:///{real}")("get", "k").stdout == "1\n"


def test_a_place_without_links_is_served(run: Limpet, file: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have no second name for a file."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    run("put", "k", "1")
    monkeypatch.setattr(os, "link", refuse)

    assert run("backup", str(saved)).exit_code == 0
    run("put", "k", "2")
    assert run("restore", str(saved)).exit_code == 0
    assert run("get", "k").stdout == "1\n"
    file.unlink()
    assert run("restore", str(saved)).exit_code == 0
    assert run("get", "k").stdout == "1\n"


def test_the_rights_of_the_file_stay(run: Limpet, file: Path, saved: Path) -> None:
    run("put", "k", "1")
    run("backup", str(saved))
    file.chmod(0o640)

    run("restore", str(saved))

    assert file.stat().st_mode & 0o777 == 0o640


def test_a_plain_copy_can_be_restored(run: Limpet, file: Path, saved: Path) -> None:
    """The file was copied while no process had it open."""
    run("put", "k", "1")
    saved.write_bytes(file.read_bytes())
    run("put", "k", "2")

    assert run("restore", str(saved)).exit_code == 0

    assert run("get", "k").stdout == "1\n"
    assert files(saved.parent) == {"state.db"}


@pytest.mark.parametrize("kind", ["text", "other database", "empty", "missing", "itself"])
def test_what_is_no_backup_is_refused(run: Limpet, file: Path, saved: Path, kind: str) -> None:
    run("put", "k", "1")
    match kind:
        case "text":
            saved.write_text("not a database " * 1000)
        case "other database":
            with contextlib.closing(sqlite3.connect(saved)) as other:
                other.execute("CREATE TABLE theirs (one)")
        case "empty":
            saved.touch()
        case "itself":
            saved = file
        case _:
            assert kind == "missing"

    done = run("restore", str(saved))

    assert done.exit_code == {"text": 6, "missing": 3}.get(kind, 7)
    assert run("get", "k").stdout == "1\n"
    assert run.json("stat")["epoch"] == 1
    assert {name for name in files(file.parent) if name.startswith((".", "state"))} <= {"state.db"}


def test_a_backup_of_an_earlier_schema_is_restored_and_migrated(run: Limpet, saved: Path) -> None:
    run("put", "k", "1")
    run("migrate", "down", "0001", "--yes")
    assert run("backup", str(saved)).exit_code == 0
    run("migrate", "up")
    run("put", "k", "2")

    assert run("restore", str(saved)).exit_code == 0

    assert run("get", "k").exit_code == 6
    assert run("migrate", "up").exit_code == 0
    assert run("get", "k").stdout == "1\n"


def test_a_backup_of_a_later_schema_is_refused(run: Limpet, saved: Path) -> None:
    run("put", "k", "1")
    run("backup", str(saved))
    with contextlib.closing(sqlite3.connect(saved)) as later, later:
        later.execute("UPDATE limpet_schema SET version_num = '9999'")

    refused = run("restore", str(saved))

    assert refused.exit_code == 6
    assert "9999" in refused.stderr
    assert run.json("stat")["epoch"] == 1


def test_an_encrypted_store_needs_no_keys_for_it(run: Limpet, url: str, saved: Path) -> None:
    keyring = limpet.Keyring({"k1": secrets.token_bytes(32)})
    with opened(url, encryption=keyring) as store:
        store.put("k", "secret")

    assert run("backup", str(saved)).exit_code == 0
    assert run("restore", str(saved)).exit_code == 0

    with opened(url, encryption=keyring) as store:
        assert store.get("k") == "secret"


# Epochs -----------------------------------------------------------------------


def test_the_epoch_is_shown_and_raised(run: Limpet, url: str) -> None:
    run("put", "k", "1")
    revision = run.json("stat")["revision"]

    assert run("epoch").stdout == f"{url} is in epoch 1\n"
    assert run.json("epoch", "--raise", "--skip", "10") == {"url": url, "epoch": 2}
    assert run("epoch").stdout == f"{url} is in epoch 2\n"

    assert revision + 10 <= run.json("stat")["revision"] < revision + 20
    assert run("get", "k").stdout == "1\n"


def test_the_epoch_of_an_encrypted_store_needs_no_keys(run: Limpet, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run("put", "k", "1")
    monkeypatch.setenv("LIMPET_ENCRYPTION_KEYS", "no key at all")

    assert run.json("epoch") == {"url": url, "epoch": 1}
    assert Limpet(f"{url}?encryption=file:missing").json("epoch", "--raise")["epoch"] == 2


def test_the_epoch_of_nothing_is_not_raised(run: Limpet, file: Path) -> None:
    assert run("epoch", "--raise").exit_code == 3
    assert not file.exists()
    assert Limpet("memory:")("epoch").exit_code == 7
