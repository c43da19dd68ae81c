"""``limpet doctor``: whether a store is healthy, and what is not.

A file is checked first, without opening the store and without changing anything: a damaged file, or one of another
program, must not be repaired or get our tables by being checked. The store is opened last, unless a check forbids it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from limpet.cli.arguments import Setup
from limpet.clock import format_duration
from limpet.engine import Finding, FindingLevel, WithTables
from limpet.errors import Corrupt, LimpetError
from limpet.keys import VALUE_BYTES_MAX
from limpet.model import Status, Traits
from limpet.opening import open_session
from limpet.schema import describe_taken
from limpet.store import Store
from limpet.urls import Address, find_examiner

CLOCK_S_MAX: Final = 1.0
DISK_BYTES_MIN: Final = 64_000_000
SAMPLE: Final = 500

_DECISIVE: Final = ("file", "schema", "integrity")
_SURVIVES: Final = {
    "none": "nothing: it ends with the process",
    "seconds": "a crash of the server only once it is some seconds old",
    "process": "a killed process, but not always a power cut",
    "disk": "a power cut",
    "quorum": "a lost machine",
}


def examine(setup: Setup) -> Iterator[Finding]:
    """Check a store from the outside in. A bad finding ends the checks where going on could do harm."""
    try:
        file = setup.file
    except LimpetError as error:
        yield Finding("url", "bad", str(error))
        return
    if file is not None:
        may_open = True
        for finding in _examine_file(setup, file):
            yield finding
            may_open = may_open and not (finding.level == "bad" and finding.check in _DECISIVE)
        if not may_open:
            return
    yield from _examine_store(setup)


# The file ---------------------------------------------------------------------


def _examine_file(setup: Setup, file: Path) -> Iterator[Finding]:
    if not file.is_file():
        problem = "is not a file" if file.exists() else "does not exist"
        yield Finding(
            "file", "bad", f"{file} {problem}{setup.why}", "Name the store by --url or LIMPET_URL; a write makes one."
        )
        return
    yield Finding("file", "ok", f"{file} has {file.stat().st_size:,} bytes")
    yield _check_writable(file)
    yield _check_disk(file)
    examine_content = find_examiner(Address.parse(setup.url))
    if examine_content is not None:
        yield from examine_content(file)


def _check_writable(file: Path) -> Finding:
    # SQLite makes its -wal and -shm beside the file.
    for path in (file, file.absolute().parent):
        if not os.access(path, os.W_OK):
            return Finding("writable", "bad", f"{path} may not be written by this user", "Check its owner and mode.")
    return Finding("writable", "ok", "the file and its folder may be written by this user")


def _check_disk(file: Path) -> Finding:
    free_bytes = shutil.disk_usage(file.absolute().parent).free
    found = f"{free_bytes:,} bytes are free on its disk"
    if free_bytes < DISK_BYTES_MIN:
        return Finding("disk", "warn", found, "A full disk refuses writes. Make room.")
    return Finding("disk", "ok", found)


# The store --------------------------------------------------------------------


def _examine_store(setup: Setup) -> Iterator[Finding]:
    try:
        setup.check(make=False)
        yield from asyncio.run(_examine_opened(setup))
    except LimpetError as error:
        yield Finding("open", "bad", str(error))


async def _examine_opened(setup: Setup) -> list[Finding]:
    began = time.perf_counter()
    session = await open_session(setup.url, clock=None, max_value_bytes=VALUE_BYTES_MAX, window=None)
    try:
        store = Store(session, setup.namespace)
        traits, status = store.traits, await store.status()
        encryption = await _check_encryption(store)
        engine = session.engine
        taken = engine.taken if isinstance(engine, WithTables) else None
    finally:
        await session.close()
    took_ms = (time.perf_counter() - began) * 1000
    level: FindingLevel = "warn" if traits.durability in ("none", "seconds") else "ok"
    return [
        Finding("open", "ok", f"opened {setup.shown_url} in {took_ms:.0f} ms"),
        Finding("durability", level, f"an acknowledged write survives {_SURVIVES[traits.durability]}"),
        encryption,
        *([] if taken is None else _check_names(taken)),
        _check_clock(status, traits),
    ]


async def _check_encryption(store: Store) -> Finding:
    """Whether values can be decrypted with the present keys. One page is enough: keys are changed all at once."""
    if not store.traits.encrypted:
        return Finding("encryption", "ok", "values are not encrypted")
    try:
        decrypted = [entry.key async for entry in store.scan(limit=SAMPLE)]
    except Corrupt as error:
        return Finding("encryption", "bad", str(error), "Open it with the keys that it was written with.")
    return Finding("encryption", "ok", f"values are encrypted, and a sample of {len(decrypted):,} could be decrypted")


def _check_names(taken: tuple[str, ...]) -> list[Finding]:
    """Whether tables or views of other programs have the names of our views."""
    if not taken:
        return [Finding("names", "ok", "no other program has the name of one of Limpet's views")]
    advice = "Rename it, or give Limpet its own file or schema."
    return [Finding("names", "warn", describe_taken(name), advice) for name in taken]


def _check_clock(status: Status, traits: Traits) -> Finding:
    """Whether the time of the store stands still, or differs from the clock of this host."""
    behind_s, ahead_s = status.behind_ms / 1000, status.now_ms / 1000 - time.time()
    if behind_s > CLOCK_S_MAX:
        found = (
            f"time stands still for {format_duration(behind_s)}: the {traits.clock}'s clock is behind the latest time "
            "that was recorded in this namespace by as much"
        )
        advice = (
            "The clock was set back. Until it has caught up, nothing expires and no lock runs out. Set it right if it "
            "is wrong; if it is right, wait, or delete the key or release the lock that cannot wait."
        )
        return Finding("clock", "warn", found, advice)
    if abs(ahead_s) > CLOCK_S_MAX:
        direction = "ahead of" if ahead_s > 0 else "behind"
        found = f"the store's time is {format_duration(abs(ahead_s))} {direction} this host's clock"
        return Finding("clock", "warn", found, "Entries expire by the store's time. One of the two clocks is wrong.")
    return Finding("clock", "ok", "the store's time and this host's clock agree")
