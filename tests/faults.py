"""Every kind of write, and all that can be observed of it: for connections that fail in the middle of one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import limpet
from limpet.model import Commit, Entry

Act = Callable[[limpet.Store, limpet.Lock], Awaitable[Any]]

VERBS: dict[str, Act] = {
    "put": lambda store, _: store.put("plain", "new"),
    "put for a while": lambda store, _: store.put("plain", "new", ttl=60, meta={"by": "me"}),
    "put over an older version": lambda store, _: store.put("plain", "new", expect=limpet.Version(1)),
    "put over an equal value": lambda store, _: store.put("plain", "new", expect=limpet.equals("old")),
    "put over a member": lambda store, _: store.put("object", "new", expect=limpet.field("n") == 1),
    "create": lambda store, _: store.create("fresh", "new"),
    "add": lambda store, _: store.add("count", 3),
    "update": lambda store, _: store.update("count", lambda number: number + 3),
    "delete": lambda store, _: store.delete("plain"),
    "take": lambda store, _: store.take("plain"),
    "touch": lambda store, _: store.touch("plain", 60),
    "set": lambda store, _: store.record("job").set(state="done", worker=b"\xff"),
    "swap": lambda store, _: store.record("job").swap("state", "pending", "claimed", set={"worker": "w1"}),
    "fenced put": lambda store, lock: store.put("plain", "new", fence=lock),
    "batch": lambda store, _: store.batch().put("plain", 2).delete("other").put("fresh", 3).commit(),
    "batch of puts": lambda store, _: store.batch().put("plain", 2).put("fresh", 3, ttl=60).commit(),
    "batch with an add": lambda store, _: store.batch().put("plain", 2).add("count", 1).delete("other").commit(),
    "put with a request id": lambda store, _: store.put("plain", "new", request_id="mine"),
    "add with a request id": lambda store, _: store.add("count", 3, request_id="mine"),
    "take with a request id": lambda store, _: store.take("plain", request_id="mine"),
    "batch with a request id": lambda store, _: store.batch(request_id="mine").put("plain", 2).add("count", 1).commit(),
    "acquire": lambda store, _: store.lock("gate", ttl=60).acquire(),
    "refresh": lambda _, lock: lock.refresh(),
    "release": lambda _, lock: lock.release(),
}


async def prepared(store: limpet.Store) -> limpet.Lock:
    """Put entries that every verb can work on; returns a lock that is held."""
    await store.put("plain", "old")
    await store.put("other", "old")
    await store.put("object", {"n": 1})
    await store.add("count", 5)
    await store.record("job").put({"state": "pending"})
    return await store.lock("door", ttl=60).acquire()


def plainly(result: Any, number: Callable[[int], int] = lambda revision: revision) -> Any:
    """A result without its times."""
    match result:
        case Entry():
            revisions = (number(result.revision), number(result.created_revision))
            return result.key, result.version, *revisions, result.value, result.meta
        case Commit():
            entries, ended = ([plainly(entry, number) for entry in both] for both in (result.entries, result.ended))
            return number(result.revision), entries, ended
        case limpet.Lock():
            return number(result.token or 0)
        case _:
            return result


async def seen(store: limpet.Store, result: Any, *, ranked: bool = False) -> Any:
    """All that a caller or another client can observe afterwards, except the times.

    Ranked, revisions are replaced by their order: a repeated request may use up some.
    """
    log = (await store._session.engine.changes(store.name, 0)).changes
    entries = [entry async for entry in store.scan()]
    status = await store.status()
    used: set[int] = set()

    def everything(number: Callable[[int], int]) -> Any:
        logged = [(change.op, change.family, number(change.commit), plainly(change.entry, number)) for change in log]
        totals = (number(status.revision), status.keys, status.size_bytes, status.log_changes, status.log_bytes)
        held = [(lock.name, number(lock.token)) for lock in locks]
        return plainly(result, number), logged, [plainly(entry, number) for entry in entries], totals, held

    def note(revision: int) -> int:
        used.add(revision)
        return revision

    locks = await store.locks()
    found = everything(note)
    return everything(sorted(used).index) if ranked else found
