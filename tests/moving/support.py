"""What the tests of moving share: a store with all kinds of entries, and how to export and import one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import limpet
from limpet.moving.export import export_file, import_file
from limpet.moving.loader import Report

ODD = ["a", "a/b", "é\U0001f41a", "%_*\\", "line\nbreak", '"quoted"', "\u2028", "with space", "\x7f", "$bytes", "a..b"]


async def fill(store: limpet.Store) -> None:
    """All kinds of entries, and what is not moved."""
    for number, key in enumerate(ODD):
        await store.put(key, {"n": number, "f": 1.0, "z": -0.0, "big": 1e22, "t": "\0\u2028"}, meta={"by": key})
    ann = limpet.Store(store._session.with_writer("ann"), store.name)
    await ann.put("by ann", 1, meta={"by": "ann"})
    await ann.put("raw", b"\0\xff")
    await store.put("no bytes", b"")
    await store.put("null", None)
    await store.put("looks", {"$bytes": "AAAA"})
    await store.put("record", limpet.Fields({"b": b"\xff", "a": 1, "$json": {"$bytes": "x"}, "é": None}))
    await store.put("no fields", limpet.Fields())
    for _ in range(3):
        await store.put("versions", "again")
    await store.put("later", 1, ttl=3600)
    await store.put("deleted", 1)
    await store.delete("deleted")
    await store.append("event/", "first")
    await store.delete("event/0000000000000001")
    await store.append("event/", "second")
    await store.lock("door", ttl=60).acquire()


async def export(store: limpet.Store, file: Path, **options: Any) -> list[bytes]:
    """The lines of an export of the store's namespace."""
    options = {"redact": False, "force": True, "progress": lambda _: None, **options}
    await export_file(store, file, [store.name], **options)
    return file.read_bytes().splitlines(keepends=True)  # noqa: ASYNC240 - nothing else runs here


async def bring(store: limpet.Store, file: Path, **options: Any) -> Report:
    """Import a file."""
    options = {"policy": "refuse", "dry_run": False, "progress": lambda _: None, **options}
    return await import_file(store, file, [], **options)
