"""Files of other programs: JSON files and folders of them, shelves, and caches of diskcache."""

from __future__ import annotations

import dbm
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from limpet import codec
from limpet.codec import Stored
from limpet.errors import InvalidValue
from limpet.moving.entries import Brought, Rejected
from limpet.moving.sources.values import as_item, from_json, plain_pickle

__all__ = ["DiskCache", "JsonFiles", "Shelf"]

ROWS: Final = 500


class _Files:
    """What the sources in files share: they are read, and nothing is handed over."""

    needs_place = False
    shown: str

    def __init__(self, path: Path, namespace: str) -> None:
        self._path = path
        self._namespace = namespace
        self.shown = str(path)
        # A shelf may be in several files, which have other names.
        if not path.exists() and not isinstance(self, Shelf):
            raise InvalidValue(f"there is nothing to adopt at {self.shown!r}: no such file or folder")

    async def count(self) -> int | None:
        """See `ForeignData.count`."""
        return None

    def read(self) -> AsyncIterator[Brought | Rejected]:
        """See `ForeignData.read`."""
        raise NotImplementedError

    async def hand_over(self) -> str | None:
        """See `ForeignData.hand_over`."""
        return None

    async def finish(self) -> None:
        """See `ForeignData.finish`."""

    async def close(self) -> None:
        """See `ForeignData.close`."""

    def _item(self, key: Any, make: Callable[[], Stored], at_ms: int, expires_ms: int | None = None) -> Any:
        return as_item(self._namespace, key, make, version=1, created_ms=at_ms, updated_ms=at_ms, expires_ms=expires_ms)


class JsonFiles(_Files):
    """One JSON file, whose members are the entries; or a folder, in which each ``.json`` file is an entry."""

    async def read(self) -> AsyncIterator[Brought | Rejected]:
        """See `ForeignData.read`."""
        if self._path.is_dir():
            for file in sorted(self._path.rglob("*.json")):
                key = file.relative_to(self._path).with_suffix("").as_posix()
                yield self._item(key, partial(_read_json, file), _modified_ms(file))
            return
        for key, value in _members(self._path):
            yield self._item(key, partial(codec.encode, value), _modified_ms(self._path))


def _read_json(file: Path) -> Stored:
    return from_json(file.read_bytes())


def _members(file: Path) -> list[tuple[str, Any]]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidValue(f"{str(file)!r} is no JSON file: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise InvalidValue(f"{str(file)!r} holds no JSON object, whose members would be the entries")
    return list(found.items())


def _modified_ms(file: Path) -> int:
    return file.stat().st_mtime_ns // 1_000_000


class Shelf(_Files):
    """A shelf of Python's ``shelve``, of plain values."""

    async def read(self) -> AsyncIterator[Brought | Rejected]:
        """See `ForeignData.read`."""
        try:
            opened = dbm.open(str(self._path), "r")  # noqa: SIM115 - it is closed below
        except dbm.error as error:
            raise InvalidValue(f"{self.shown!r} is no shelf: {error}") from None
        at_ms = time.time_ns() // 1_000_000
        with opened as found:
            for name in found.keys():  # noqa: SIM118 - a dbm has no iterator
                pickled = found[name]
                key = name.decode(errors="backslashreplace") if isinstance(name, bytes) else name
                yield self._item(key, partial(_unpickle, pickled), at_ms)


def _unpickle(pickled: bytes) -> Stored:
    return codec.encode(plain_pickle(pickled))


class DiskCache(_Files):
    """A folder of ``diskcache.Cache``, of plain values. Its rows are in a SQLite file, and large values in files."""

    async def read(self) -> AsyncIterator[Brought | Rejected]:
        """See `ForeignData.read`."""
        file = self._path / "cache.db"
        if not file.is_file():
            raise InvalidValue(f"{self.shown!r} is no folder of diskcache: it has no cache.db")
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as cache:
            last = 0
            while True:
                rows = cache.execute(
                    "SELECT rowid, key, raw, store_time, expire_time, mode, filename, value FROM Cache"
                    " WHERE rowid > ? ORDER BY rowid LIMIT ?",
                    (last, ROWS),
                ).fetchall()
                for _, key, raw, stored_s, ends_s, mode, name, value in rows:
                    try:
                        own = key if raw else plain_pickle(key)
                    except InvalidValue as error:
                        yield Rejected(self._namespace, repr(key), str(error))
                        continue
                    make = self._reader(mode, name, value)
                    ends_ms = None if ends_s is None else int(ends_s * 1000) + 1
                    yield self._item(own, make, int(stored_s * 1000), ends_ms)
                if len(rows) < ROWS:
                    return
                last = rows[-1][0]

    def _reader(self, mode: int, name: str | None, value: Any) -> Callable[[], Stored]:
        def read() -> Stored:
            try:
                content = value if name is None else (self._path / name).read_bytes()
            except OSError:
                raise InvalidValue("the file of its value is missing") from None
            # 1 raw, 2 the bytes of a file, 3 the text of a file, 4 a pickle.
            if mode == 3 and isinstance(content, bytes):
                return codec.encode(content.decode())
            return codec.encode(plain_pickle(bytes(content)) if mode == 4 else content)

        return read
