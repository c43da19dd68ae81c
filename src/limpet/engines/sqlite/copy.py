"""Copies of a SQLite store: a backup of a store in use, and a store restored from a backup.

A backup is one file that shows a single moment, taken while others read and write. A restored store is in a new epoch,
and its revisions continue above all that the store may have given since the backup. So a position, an entry or a token
from the time after the backup matches nothing in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from limpet.errors import Corrupt, InvalidValue, PermissionDenied, Unavailable
from limpet.schema import VERSION_TABLE, is_behind, require

__all__ = ["Copy", "Progress", "back_up", "restore"]

Progress = Callable[[int, int], None]
"""Called with the number of pages copied and the number of all pages."""

PAGES: Final = 2_048
BUSY_S: Final = 5.0
_JOURNALS: Final = ("-wal", "-shm", "-journal")
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class Copy(NamedTuple):
    """A finished copy.

    Attributes:
        size_bytes: The size of the file.
        namespaces: How many namespaces are in it.
        epoch: The epoch of the store.
        aside: The new name of the file that the copy replaced.
    """

    size_bytes: int
    namespaces: int
    epoch: int
    aside: Path | None = None


def back_up(source: Path, target: Path, *, force: bool = False, progress: Progress = lambda *_: None) -> Copy:
    """Copy a store that may be in use into another file.

    Raises:
        InvalidValue: The target exists, or the source is not a store.
        Unavailable: The disk is full, or the source stays locked.
    """
    if target.exists() and not force:
        raise InvalidValue(f"{target} exists already: give another name, or --force to replace it")
    _refuse_journals(target)
    with _translate_errors(target), _open_snapshot(source, "mode=rw") as store:
        found = _identify(store, source)
        with _unfinished_file(target) as unfinished:
            _copy(store, unfinished, 0o600, progress)
            if force:
                os.replace(unfinished, target)
            else:
                _rename_to_free(unfinished, target)
        _sync_folder(target)
    return Copy(target.stat().st_size, len(found.revisions), found.epoch)


def restore(backup: Path, target: Path, *, skip: int, progress: Progress = lambda *_: None) -> Copy:
    """Make a store from a backup, in a new epoch, and keep the file that it replaces under another name.

    Each namespace continues ``skip`` revisions above the highest in the backup and in the replaced file.

    Raises:
        InvalidValue: The backup is not a store, or is the target itself.
        Corrupt: The backup is damaged.
        Unavailable: A process has the store open, or the disk is full.
    """
    # Replace the file that a symbolic link points to, not the link.
    target = target.resolve()
    if target.exists() and os.path.samefile(backup, target):
        raise InvalidValue(f"{backup} is the store itself, and cannot be restored from itself")
    with _translate_errors(target), _open_alone(target) as present:
        before = _StoreState(0, {}) if present is None else _identify(present, target)
        with _open_snapshot(backup, _backup_options(backup)) as saved, _unfinished_file(target) as unfinished:
            found = _identify(saved, backup)
            _copy(saved, unfinished, 0o600, progress)
            epoch = 1 + max(found.epoch, before.epoch)
            _raise_epoch(unfinished, epoch, _next_revisions(found, before, skip))
            aside = _replace_target(unfinished, target)
    return Copy(target.stat().st_size, len({*found.revisions, *before.revisions}), epoch, aside)


# What a file holds ------------------------------------------------------------


class _StoreState(NamedTuple):
    """The store in a file: its epoch, and the revision and the time of each namespace."""

    epoch: int
    revisions: dict[str, tuple[int, int]]


def _identify(connection: sqlite3.Connection, shown: Path) -> _StoreState:
    ours = connection.execute("SELECT count(*) FROM sqlite_master WHERE name IN ('limpet_store', ?)", (VERSION_TABLE,))
    if ours.fetchone() != (2,):
        raise InvalidValue(f"{shown} is a SQLite database, but not a Limpet store")
    revision = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
    if revision is None or not is_behind(revision[0]):
        require(None if revision is None else revision[0], str(shown))
    identity = connection.execute("SELECT id, epoch FROM limpet_store").fetchone()
    if identity is None:
        raise Corrupt(f"{shown} has no store id: its table limpet_store is empty")
    rows = connection.execute("SELECT namespace, revision, at_ms FROM limpet_counters")
    return _StoreState(identity[1], {namespace: (number, at_ms) for namespace, number, at_ms in rows})


def _next_revisions(found: _StoreState, before: _StoreState, skip: int) -> dict[str, tuple[int, int]]:
    """The revision and the time at which each namespace continues: above and after both files."""
    nothing = (0, 0)
    next_revisions = {}
    for namespace in {*found.revisions, *before.revisions}:
        one, other = found.revisions.get(namespace, nothing), before.revisions.get(namespace, nothing)
        next_revisions[namespace] = (max(one[0], other[0]) + skip, max(one[1], other[1]))
    return next_revisions


def _raise_epoch(file: Path, epoch: int, next_revisions: dict[str, tuple[int, int]]) -> None:
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as store:
        store.execute("BEGIN IMMEDIATE")
        store.execute("UPDATE limpet_store SET epoch = ?", (epoch,))
        for namespace, (revision, at_ms) in next_revisions.items():
            # A namespace that is not in the backup has lost all its changes.
            store.execute(
                "INSERT INTO limpet_namespaces (namespace, revision, floor, at_ms, keys, size_bytes,"
                " dropped_changes, dropped_bytes) VALUES (?1, ?2, ?2, ?3, 0, 0, 0, 0)"
                " ON CONFLICT (namespace) DO UPDATE SET revision = ?2, at_ms = ?3",
                (namespace, revision, at_ms),
            )
        store.execute("COMMIT")


# Files ------------------------------------------------------------------------


@contextlib.contextmanager
def _open_snapshot(file: Path, options: str) -> Iterator[sqlite3.Connection]:
    """Open a file in a read transaction, which shows one moment whatever others write."""
    uri = f"file:{quote(str(file.absolute()))}?{options}"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        yield connection


def _backup_options(file: Path) -> str:
    """The options to read a backup with: immutable, unless a journal beside it belongs to it."""
    # Without immutable, SQLite would make a journal beside a backup and leave it there.
    is_whole = not any(Path(f"{file}{journal}").exists() for journal in _JOURNALS)
    return "mode=ro&immutable=1" if is_whole else "mode=ro"


@contextlib.contextmanager
def _open_alone(file: Path) -> Iterator[sqlite3.Connection | None]:
    """Open the store in a file that no other process has open; None if there is no readable store."""
    if not file.exists():
        yield None
        return
    with contextlib.closing(sqlite3.connect(file, isolation_level=None, timeout=BUSY_S)) as connection:
        try:
            # Every process that has the file open holds a lock on its WAL, so this fails until all have closed it.
            connection.execute("PRAGMA journal_mode = DELETE").fetchone()
            connection.execute("BEGIN EXCLUSIVE")
            _identify(connection, file)
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise Unavailable(
                    f"{file} is in use: stop every process that has it open, and restore it then"
                ) from error
            raise
        except (sqlite3.DatabaseError, Corrupt):
            # A damaged store may be the reason for the restore.
            yield None
            return
        yield connection


@contextlib.contextmanager
def _unfinished_file(target: Path) -> Iterator[Path]:
    """A temporary name beside the target. The file is removed unless it was renamed."""
    unfinished = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        yield unfinished
    finally:
        for journal in ("", *_JOURNALS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{unfinished}{journal}")


def _copy(source: sqlite3.Connection, file: Path, mode: int, progress: Progress) -> None:
    """Copy the database of a connection into a new file, check it, and sync it to disk."""
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as copy:
        # The source is in a transaction, so all pages show one moment and a writer does not restart the copy.
        source.backup(copy, pages=PAGES, progress=lambda _, left, total: progress(total - left, total))
        # A single file, without a journal that could be forgotten.
        copy.execute("PRAGMA journal_mode = DELETE").fetchone()
        problems = [row[0] for row in copy.execute("PRAGMA quick_check(3)")]
    if problems != ["ok"]:
        raise Corrupt(f"the copy is damaged, so nothing was replaced: {'; '.join(map(str, problems))}")
    with file.open("rb+") as written:
        os.fsync(written.fileno())


def _replace_target(unfinished: Path, target: Path) -> Path | None:
    """Replace the target by the finished file, with the same owner and mode. Return the new name of the old file."""
    if not target.exists():
        _rename_to_free(unfinished, target)
        _sync_folder(target)
        return None
    present = target.stat()
    os.chmod(unfinished, present.st_mode & 0o777)
    if os.geteuid() == 0:
        os.chown(unfinished, present.st_uid, present.st_gid)
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = target.with_name(f"{target.name}.before-restore-{moment}")
    while aside.exists():
        aside = target.with_name(f"{aside.name}-again")
    try:
        # A link, not a rename, so that the target always exists: a process that found none would make an empty store.
        os.link(target, aside)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(target, aside)
    for journal in _JOURNALS:
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{target}{journal}", f"{aside}{journal}")
    os.replace(unfinished, target)
    _sync_folder(target)
    return aside


def _rename_to_free(unfinished: Path, target: Path) -> None:
    """Rename a file to a name that no file has."""
    try:
        # Unlike a rename, a link never replaces a file that another process made meanwhile.
        os.link(unfinished, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(unfinished, target)


def _refuse_journals(target: Path) -> None:
    """Refuse a target with a journal: it is a store in use, and SQLite would apply its journal to the copy."""
    for journal in _JOURNALS:
        if Path(f"{target}{journal}").exists():
            raise InvalidValue(
                f"{target} is a store in use, because {target.name}{journal} is beside it: give another name"
            )


def _sync_folder(file: Path) -> None:
    """Sync the folder of a file, and so its name, to disk."""
    folder = os.open(file.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _translate_errors(target: Path) -> Iterator[None]:
    """Raise errors of files and of SQLite as ours. No file was replaced then."""
    try:
        yield
    except FileExistsError as error:
        raise InvalidValue(
            f"{target} was made by another process meanwhile: give another name, or remove it"
        ) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidValue(f"cannot write {target}: {error.strerror}") from error
    except PermissionError as error:
        raise PermissionDenied(f"cannot write {target}: {error.strerror}") from error
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        raise Unavailable(f"cannot write {target}: {reason}") from error
    except sqlite3.OperationalError as error:
        raise Unavailable(f"cannot copy now: {error}") from error
    except sqlite3.DatabaseError as error:
        raise Corrupt(f"cannot copy: {error}") from error
