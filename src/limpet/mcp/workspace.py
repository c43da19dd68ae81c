"""A namespace as one caller may use it: every call is checked and run by the dispatcher of the server.

Reading, putting, appending, deleting and locking are the operations of `limpet.server.operations`. Those that only a
model needs are here: to read an entry without its value, to change members of a value that may have changed since it
was read, to learn what changed since, and to wait for a change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final

from limpet.codec import Stored, decode, encode
from limpet.draft import Fence
from limpet.edit import merge_into
from limpet.errors import Compacted, Conflict, InvalidValue, PermissionDenied, TypeMismatch
from limpet.keys import PAGE_BYTES, Span, key_span, pattern_span, prefix_span
from limpet.mcp import values
from limpet.model import ABSENT, KEEP, Change, Entry
from limpet.pages import latest_changes, span_after
from limpet.server import requests
from limpet.server.dispatch import Caller, Dispatcher
from limpet.server.namespaces import WrittenNamespaces
from limpet.server.operations import FETCH, Operation, Reach, Right
from limpet.server.requests import Int64, Strict
from limpet.store import Store

__all__ = [
    "CHANGES_MAX",
    "DIFFERENCES",
    "EDIT",
    "WAIT",
    "Concealed",
    "Differences",
    "Edit",
    "Unlisted",
    "Wait",
    "Workspace",
]

WAIT_S_MAX: Final = 60.0
CHANGES_MAX: Final = 50
LOOK_BACK: Final = 16
"""How many changes of a key are read to find the value of a revision: a touch in between carries none."""


class Concealed:
    """A caller that may not see values, whatever its rights are otherwise."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.name, self.writer = caller.name, caller.writer

    def may(self, namespace: str, right: Right, spans: Sequence[Span]) -> bool:
        """Whether it has a right, which is never ``reveal``."""
        return right != "reveal" and self._caller.may(namespace, right, spans)

    def is_valid(self) -> bool:
        """Whether the token of the caller, if it has one, is still valid."""
        return is_valid(self._caller)


def is_valid(caller: Caller) -> bool:
    """Whether a caller's token has not been revoked. A caller without one is valid."""
    return not hasattr(caller, "is_valid") or bool(caller.is_valid())


class Unlisted(WrittenNamespaces):
    """Keeps no list of the namespaces: as in any program that opens a store, this process sweeps those that it uses."""

    def add(self, namespace: str) -> None:
        """Remember nothing."""


class Workspace:
    """One namespace for one caller."""

    def __init__(self, dispatcher: Dispatcher, caller: Caller, namespace: str) -> None:
        self._dispatcher = dispatcher
        self.caller = caller
        self.namespace = namespace

    async def run(self, operation: Operation, request: Any) -> dict[str, Any]:
        """Run an operation, if the caller has the rights that it takes."""
        return await self._dispatcher.run(operation, self.namespace, request, self.caller)

    async def admit(self, operation: Operation, request: Any) -> Store:
        """The store, for a stream that the caller may have. A stream repeats this, as rights may end."""
        if not is_valid(self.caller):
            raise PermissionDenied(f"the token of {self.caller.name!r} is no longer valid")
        return await self._dispatcher.admit(operation, self.namespace, request, self.caller)

    def may_see(self, span: Span) -> bool:
        """Whether the caller may see the values of these keys."""
        rights: tuple[Right, ...] = ("read", "reveal")
        return all(self.caller.may(self.namespace, right, [span]) for right in rights)

    async def read(self, key: str) -> tuple[Entry | None, bool]:
        """An entry, and whether its value may be seen; where it may not, the entry comes without it."""
        if self.may_see(key_span(key)):
            try:
                return (await self.run(FETCH, requests.Entry(key=key))).get("entry"), True
            except PermissionDenied:
                # A token for another server: that one decides what it shows.
                pass
        entries = (await self.run(HEADS, Page(prefix=key, limit=1)))["entries"]
        return (entries[0] if entries and entries[0].key == key else None), False

    async def page(self, prefix: str, *, after: str | None, limit: int, values: bool) -> tuple[list[Entry], bool, bool]:
        """Entries under a prefix, whether there are more, and whether they come with their values."""
        request = Page(prefix=prefix, after=after, limit=limit)
        if values and self.may_see(prefix_span(prefix)):
            try:
                answer = await self.run(ENTRIES, request)
            except PermissionDenied:
                pass
            else:
                return answer["entries"], answer["has_more"], True
        answer = await self.run(HEADS, request)
        return answer["entries"], answer["has_more"], False


# Reading ----------------------------------------------------------------------


class Page(Strict, frozen=True, kw_only=True):
    """A page of entries."""

    prefix: str
    limit: int
    after: str | None = None


async def _heads(store: Store, request: Page) -> dict[str, Any]:
    """Entries without their values: the engine does not send them."""
    span: Span | None = span_after(prefix_span(request.prefix), request.after)
    found: list[Entry] = []
    while span is not None and len(found) < request.limit:
        page = await store._scan_page(span, values=False, limit=request.limit - len(found))
        found += page.entries
        span = None if page.cursor is None else span_after(span, page.cursor)
    return {"entries": found, "has_more": span is not None}


async def _entries(store: Store, request: Page) -> dict[str, Any]:
    found: list[Entry] = []
    size_bytes = 0
    async for entry in store.scan(request.prefix, after=request.after, limit=request.limit + 1):
        if len(found) == request.limit or size_bytes > PAGE_BYTES:
            return {"entries": found, "has_more": True}
        found.append(entry)
        size_bytes += entry.size_bytes
    return {"entries": found, "has_more": False}


def _reach_prefix(request: Page) -> Reach:
    return Reach([prefix_span(request.prefix)])


def _reach_key(request: Any) -> Reach:
    names = [request.key] if request.fence is None else [request.key, request.fence.name]
    return Reach([key_span(name) for name in names], names)


HEADS: Final = Operation("scan", Page, "read", _heads, _reach_prefix)
ENTRIES: Final = HEADS._replace(run=_entries, reveals=True)


# Editing ----------------------------------------------------------------------


class Edit(Strict, frozen=True, kw_only=True):
    """Change members of a value that was read at a revision; 0 where there was none."""

    key: str
    revision: Int64
    set: dict[str, Any]
    remove: list[str]
    fence: requests.Fence | None = None


class Differences(Strict, frozen=True, kw_only=True):
    """What is there now, and what has changed since a revision."""

    key: str
    revision: Int64
    fence: requests.Fence | None = None


async def _edit(store: Store, request: Edit) -> dict[str, Any]:
    base = await _stored_at(store, request.key, request.revision)
    if base is None:
        raise Conflict(request.key, expected=f"revision {request.revision}", current=await store.entry(request.key))
    mine = {} if base is ABSENT else decode(base)
    if not isinstance(mine, dict):
        raise TypeMismatch(request.key, expected="an object with members", found="another value, which put replaces")
    for path in request.remove:
        values.remove(mine, path)
    for path, new in request.set.items():
        values.replace(mine, path, new)
    merge = merge_into(request.key, None if base is ABSENT else base, encode(mine), None)
    theirs: Entry | None = None

    async def change(found: Entry | None) -> Any:
        nonlocal theirs
        theirs = found
        return await merge(found)

    fence = None if request.fence is None else Fence(request.fence.name, request.fence.token)
    entry = await store._change(request.key, change, ttl=KEEP, fence=fence, meta=KEEP)
    others = [] if theirs is None else [*_paths(base, theirs.stored)]
    return {"revision": 0 if entry is None else entry.revision, "others_changed": others}


async def _stored_at(store: Store, key: str, revision: int) -> Any:
    """What a key held at a revision of its own: the value, ABSENT for revision 0, or None where it is not known."""
    if revision == 0:
        return ABSENT
    now = await store.entry(key)
    if now is not None and now.revision == revision:
        return now.stored
    changes, _ = await latest_changes(store, key, limit=LOOK_BACK, before=revision + 1)
    if not changes or changes[-1].revision != revision:
        return None
    for change in reversed(changes):
        if change.op != "touch":
            return None if change.entry is None or change.op not in ("put", "patch") else change.entry.stored
    return None


async def _differences(store: Store, request: Differences) -> dict[str, Any]:
    now, base = await store.entry(request.key), await _stored_at(store, request.key, request.revision)
    found: dict[str, Any] = {"entry": now, "paths": None}
    if base is not None and now is not None:
        found["paths"] = [*_paths(base, now.stored)]
    return found


def _paths(base: Any, stored: Stored | None) -> Iterator[str]:
    before = {} if base is ABSENT else decode(base)
    return values.differences(before, None if stored is None else decode(stored))


EDIT: Final = Operation("edit", Edit, "write", _edit, _reach_key, reveals=True)
DIFFERENCES: Final = Operation("differences", Differences, "read", _differences, _reach_key, reveals=True)


# Waiting ----------------------------------------------------------------------


class Wait(Strict, frozen=True, kw_only=True):
    """Wait for changes of keys: one key, or with ``*`` at its end all that start with it."""

    pattern: str
    after: Int64 | None = None
    seconds: int | float = 30


async def _wait(store: Store, request: Wait) -> dict[str, Any]:
    """The changes after a revision, at most `CHANGES_MAX`. Without one, those from now on."""
    if not 0 <= request.seconds <= WAIT_S_MAX:
        raise InvalidValue(f"a change is waited for 0 to {WAIT_S_MAX:.0f} seconds", path="$.seconds")
    status = await store.status()
    after = status.revision if request.after is None else request.after
    if not 0 <= after <= status.revision:
        raise InvalidValue(f"revision {after} is not written yet: the latest is {status.revision}", path="$.after")
    try:
        found = await _changes_since(store, request.pattern, after)
        if not found and request.seconds:
            async with store.watch(request.pattern, after=after) as watch:
                await asyncio.wait_for(anext(watch), request.seconds)
            found = await _changes_since(store, request.pattern, after)
    except TimeoutError:
        found = []
    except Compacted:
        return {"changes": [], "revision": status.revision, "missed": True}
    changes = [{"key": change.key, "op": change.op, "revision": change.revision} for change in found]
    return {"changes": changes, "revision": changes[-1]["revision"] if changes else after, "missed": False}


async def _changes_since(store: Store, pattern: str, after: int) -> list[Change]:
    span, status = pattern_span(pattern), await store.status()
    found: list[Change] = []
    while after < status.revision and len(found) < CHANGES_MAX:
        page = await store._log_page(after, span)
        found += page.changes
        after = page.next_after
    return found[:CHANGES_MAX]


def _reach_pattern(request: Wait) -> Reach:
    return Reach([pattern_span(request.pattern)])


WAIT: Final = Operation("watch", Wait, "read", _wait, _reach_pattern)
