"""Copies of a SQLite store: a backup of one that is in use, and a store made from a backup.

A backup is one file, taken of a single moment while others read and write. What is made from it is in a new epoch
and counts on above every revision that the store may have given since the backup: a position, an entry or a token from
the time that the backup does not know then matches nothing.
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
"""Is told how many pages were copied, and of how many."""

PAGES: Final = 2_048
BUSY_S: Final = 5.0
_JOURNALS: Final = ("-wal", "-shm", "-journal")
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class Copy(NamedTuple):
    """What a copy holds.

    Attributes:
        size_bytes: The size of the file.
        namespaces: How many namespaces are in it.
        epoch: The epoch of the store.
        aside: Where the file is that was in its place.
    """

    size_bytes: int
    namespaces: int
    epoch: int
    aside: Path | None = None


def back_up(source: Path, target: Path, *, force: bool = False, progress: Progress = lambda *_: None) -> Copy:
    """Copy a store that may be in use into a file of its own.

    Raises:
        InvalidValue: There is a file already, or the source is no store.
        Unavailable: There is no room, or the source is locked for long.
    """
    if target.exists() and not force:
        raise InvalidValue(f"{target} is there already: give another name, or --force to replace it")
    _refuse_journals(target)
    with _translated(target), _reading(source, "mode=rw") as store:
        found = _identify(store, source)
        with _spare(target) as spare:
            _copy(store, spare, 0o600, progress)
            if force:
                os.replace(spare, target)
            else:
                _give_name(spare, target)
        _settle(target)
    return Copy(target.stat().st_size, len(found.revisions), found.epoch)


def restore(backup: Path, target: Path, *, skip: int, progress: Progress = lambda *_: None) -> Copy:
    """Make a store from a backup, in a new epoch, and keep the file that was in its place.

    Each namespace goes on ``skip`` revisions above the highest that the backup or that file has.

    Raises:
        InvalidValue: The backup is no store, or is the very file to be restored.
        Corrupt: The backup is damaged.
        Unavailable: Somebody has the store open, or there is no room.
    """
    # What a symbolic link leads to is restored, and the link stays.
    target = target.resolve()
    if target.exists() and os.path.samefile(backup, target):
        raise InvalidValue(f"{backup} is the store itself, and cannot be restored from itself")
    with _translated(target), _alone(target) as present:
        before = _Found(0, {}) if present is None else _identify(present, target)
        with _reading(backup, _as_backup(backup)) as saved, _spare(target) as spare:
            found = _identify(saved, backup)
            _copy(saved, spare, 0o600, progress)
            epoch = 1 + max(found.epoch, before.epoch)
            _raise(spare, epoch, _raised(found, before, skip))
            aside = _put_in_place(spare, target)
    return Copy(target.stat().st_size, len({*found.revisions, *before.revisions}), epoch, aside)


# What a file holds ------------------------------------------------------------


class _Found(NamedTuple):
    """The store in a file: its epoch, and the revision and the time of each namespace."""

    epoch: int
    revisions: dict[str, tuple[int, int]]


def _identify(connection: sqlite3.Connection, shown: Path) -> _Found:
    ours = connection.execute("SELECT count(*) FROM sqlite_master WHERE name IN ('limpet_store', ?)", (VERSION_TABLE,))
    if ours.fetchone() != (2,):
        raise InvalidValue(f"{shown} is a SQLite database, and no Limpet store")
    revision = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
    if revision is None or not is_behind(revision[0]):
        require(None if revision is None else revision[0], str(shown))
    identity = connection.execute("SELECT id, epoch FROM limpet_store").fetchone()
    if identity is None:
        raise Corrupt(f"{shown} does not say what store it is: its table limpet_store is empty")
    rows = connection.execute("SELECT namespace, revision, at_ms FROM limpet_namespaces")
    return _Found(identity[1], {namespace: (number, at_ms) for namespace, number, at_ms in rows})


def _raised(found: _Found, before: _Found, skip: int) -> dict[str, tuple[int, int]]:
    """Where each namespace goes on: above all that either file has given, and at no earlier time."""
    nothing = (0, 0)
    raised = {}
    for namespace in {*found.revisions, *before.revisions}:
        one, other = found.revisions.get(namespace, nothing), before.revisions.get(namespace, nothing)
        raised[namespace] = (max(one[0], other[0]) + skip, max(one[1], other[1]))
    return raised


def _raise(file: Path, epoch: int, raised: dict[str, tuple[int, int]]) -> None:
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as store:
        store.execute("BEGIN IMMEDIATE")
        store.execute("UPDATE limpet_store SET epoch = ?", (epoch,))
        for namespace, (revision, at_ms) in raised.items():
            # Of a namespace that the backup does not have, all changes are gone.
            store.execute(
                "INSERT INTO limpet_namespaces (namespace, revision, floor, at_ms, keys, size_bytes, log_changes,"
                " log_bytes) VALUES (?1, ?2, ?2, ?3, 0, 0, 0, 0)"
                " ON CONFLICT (namespace) DO UPDATE SET revision = ?2, at_ms = ?3",
                (namespace, revision, at_ms),
            )
        store.execute("COMMIT")


# Files ------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(file: Path, how: str) -> Iterator[sqlite3.Connection]:
    """A file of one moment, whatever others write to it."""
    uri = f"file:{quote(str(file.absolute()))}?{how}"
    with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        yield connection


def _as_backup(file: Path) -> str:
    """How a backup is read: as it is, unless there is a journal beside it that belongs to it."""
    # SQLite would make a journal for a plain copy of a store, and leave it there.
    is_whole = not any(Path(f"{file}{journal}").exists() for journal in _JOURNALS)
    return "mode=ro&immutable=1" if is_whole else "mode=ro"


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[sqlite3.Connection | None]:
    """The store in a file, while nobody else has it open; None where there is none that can be read."""
    if not file.exists():
        yield None
        return
    with contextlib.closing(sqlite3.connect(file, isolation_level=None, timeout=BUSY_S)) as connection:
        try:
            # Whoever has the file open holds a lock on its write-ahead log. Giving that up needs all of them gone.
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
            # That may be why a backup is restored.
            yield None
            return
        yield connection


@contextlib.contextmanager
def _spare(target: Path) -> Iterator[Path]:
    """A name beside the target for what is not finished yet."""
    spare = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        yield spare
    finally:
        for journal in ("", *_JOURNALS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{spare}{journal}")


def _copy(source: sqlite3.Connection, file: Path, mode: int, progress: Progress) -> None:
    """Copy what a connection reads into a new file, look whether it is whole, and see it on the disk."""
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as copy:
        # The source is in a transaction: so all pages are of one moment, and writers do not make it begin again.
        source.backup(copy, pages=PAGES, progress=lambda _, left, total: progress(total - left, total))
        # One file, without a journal beside it that could be forgotten.
        copy.execute("PRAGMA journal_mode = DELETE").fetchone()
        problems = [row[0] for row in copy.execute("PRAGMA quick_check(3)")]
    if problems != ["ok"]:
        raise Corrupt(f"the copy is damaged, so nothing was replaced: {'; '.join(map(str, problems))}")
    with file.open("rb+") as written:
        os.fsync(written.fileno())


def _put_in_place(spare: Path, target: Path) -> Path | None:
    """Give the finished file its name. The one that had it gets another, and whose it is stays as it was."""
    if not target.exists():
        _give_name(spare, target)
        _settle(target)
        return None
    present = target.stat()
    os.chmod(spare, present.st_mode & 0o777)
    if os.geteuid() == 0:
        os.chown(spare, present.st_uid, present.st_gid)
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = target.with_name(f"{target.name}.before-restore-{moment}")
    while aside.exists():
        aside = target.with_name(f"{aside.name}-again")
    try:
        # So there is no moment without a file of this name: whoever opened it then would make an empty one.
        os.link(target, aside)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(target, aside)
    for journal in _JOURNALS:
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{target}{journal}", f"{aside}{journal}")
    os.replace(spare, target)
    _settle(target)
    return aside


def _give_name(spare: Path, target: Path) -> None:
    """Give a file a name that no other has."""
    try:
        # Unlike a rename, a link never takes the place of a file that somebody made meanwhile.
        os.link(spare, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(spare, target)


def _refuse_journals(target: Path) -> None:
    """A journal beside a file says that it is a store in use, and would be taken for the copy's own."""
    for journal in _JOURNALS:
        if Path(f"{target}{journal}").exists():
            raise InvalidValue(f"{target} is a store in use: {target.name}{journal} is beside it. Give another name")


def _settle(file: Path) -> None:
    """See the name of a file on the disk."""
    folder = os.open(file.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _translated(target: Path) -> Iterator[None]:
    """Errors of files and of SQLite as ours. Nothing was put in the place of anything then."""
    try:
        yield
    except FileExistsError as error:
        raise InvalidValue(f"{target} was made by somebody else meanwhile: look at it, and choose") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InvalidValue(f"cannot write {target}: {error.strerror}") from error
    except PermissionError as error:
        raise PermissionDenied(f"cannot write {target}: {error.strerror}") from error
    except OSError as error:
        reason = "there is no room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        raise Unavailable(f"cannot write {target}: {reason}") from error
    except sqlite3.OperationalError as error:
        raise Unavailable(f"cannot copy now: {error}") from error
    except sqlite3.DatabaseError as error:
        raise Corrupt(f"cannot copy: {error}") from error
