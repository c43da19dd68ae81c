"""The operations: one table of what can be asked of a namespace, for NATS, HTTP and the command line.

A row has a name, the shape of a request, the right that it takes, and the function that runs it on a store. What a
face is given besides (a subject, a path, a header) it makes into a request. An answer is a JSON object, in the forms
of `limpet.protocol.json`. What goes wrong is raised, and told by `limpet.protocol.codes`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

import limpet
from limpet.codec import Fields
from limpet.draft import Draft, Expectation
from limpet.errors import InvalidValue
from limpet.keys import PAGE_BYTES, PAGE_MAX, Span, check_key, fit, key_span, pattern_span, prefix_span
from limpet.model import (
    ABSENT,
    ANY,
    KEEP,
    Add,
    Batch,
    Commit,
    Condition,
    Delete,
    Equals,
    FieldEquals,
    Filter,
    Sentinel,
    Write,
)
from limpet.pages import latest_changes, lock_page
from limpet.protocol.json import bytes_of, entry_as_json, event_as_json, field_of, lock_as_json, plain, status_as_json
from limpet.semantic.store import Envelope, SemanticStore
from limpet.server import requests
from limpet.store import Store

__all__ = ["OPERATIONS", "Operation", "Reach", "Right", "depends_on_value"]

Right = Literal["read", "write", "lock", "reveal", "admin"]
"""What a caller may be allowed. ``read`` shows keys, numbers and times; values take ``reveal`` besides."""

Answer = dict[str, Any]

WAIT_S_MAX: Final = 30.0
HISTORY_MAX: Final = 1000


# What runs them ---------------------------------------------------------------


async def _get(store: Store, asked: requests.Get) -> Answer:
    entry = await store.entry(asked.key)
    return {"exists": False} if entry is None else {"exists": True, "value": plain(entry.value)}


async def _set(store: Store, asked: requests.Set) -> Answer:
    await store.put(asked.key, asked.value, ttl=asked.ttl, request_id=asked.request_id)
    return {}


async def _delete(store: Store, asked: requests.Delete) -> Answer:
    return {"deleted": await store.delete(asked.key, **_conditions(asked))}


async def _list(store: Store, asked: requests.List) -> Answer:
    page = await store.keys(asked.prefix, limit=asked.limit, after=asked.after)
    keys = page.keys[: fit(map(len, page.keys))]
    return {"keys": keys, "count": len(keys), "truncated": page.truncated or len(keys) < page.count}


async def _entry(store: Store, asked: requests.Entry) -> Answer:
    entry = await store.entry(asked.key)
    if entry is None:
        return {"exists": False}
    return {"exists": True, "entry": entry_as_json(entry, with_value=asked.with_value)}


async def _put(store: Store, asked: requests.Put) -> Answer:
    ttl = _kept(UNSET if asked.keep_ttl else asked.ttl)
    entry = await store.put(asked.key, _content(asked), ttl=ttl, meta=asked.meta, **_conditions(asked))
    return {"entry": entry_as_json(entry, with_value=False)}


async def _cas(store: Store, asked: requests.Cas) -> Answer:
    entry = await store.put(asked.key, asked.value, ttl=asked.ttl, **_conditions(asked))
    return {"version": entry.version, "revision": entry.revision}


async def _incr(store: Store, asked: requests.Incr) -> Answer:
    return {"value": await store.add(asked.key, asked.by, ttl=_kept(asked.ttl), **_conditions(asked))}


async def _take(store: Store, asked: requests.Take) -> Answer:
    found = await store.take(asked.key, ABSENT, **_conditions(asked))
    return {"exists": False} if found is ABSENT else {"exists": True, "value": plain(found)}


async def _touch(store: Store, asked: requests.Touch) -> Answer:
    entry = await store.touch(asked.key, asked.ttl, **_conditions(asked))
    return {"exists": False} if entry is None else {"exists": True, "entry": entry_as_json(entry, with_value=False)}


async def _fields(store: Store, asked: requests.FieldsOf) -> Answer:
    writes = asked.set is not UNSET or asked.unset is not UNSET
    if [asked.get is not UNSET, writes, asked.swap is not UNSET].count(True) != 1:
        raise InvalidValue("fields has one of get, swap, and set with unset")
    record = store.record(asked.key)
    if not isinstance(asked.get, UnsetType):
        held = await record.fields()
        if held is None:
            return {"exists": False}
        chosen = held if asked.get is None else Fields({name: held[name] for name in asked.get if name in held})
        return {"exists": True, "fields": plain(chosen)}
    conditions: dict[str, Any] = {"fence": _fence(asked.fence), "request_id": asked.request_id}
    if not isinstance(asked.swap, UnsetType):
        swap = asked.swap
        expected = ABSENT if swap.expected is UNSET else field_of(swap.expected)
        return {"swapped": await record.swap(swap.field, expected, field_of(swap.new), **conditions)}
    given = {} if isinstance(asked.set, UnsetType) else {name: field_of(item) for name, item in asked.set.items()}
    unset = () if isinstance(asked.unset, UnsetType) else asked.unset
    entry = await record.set(given, unset=unset, if_exists=asked.if_exists, **conditions)
    return {"version": entry.version, "revision": entry.revision}


async def _batch(store: Store, asked: requests.Batch) -> Answer:
    draft = store.batch(request_id=asked.request_id)
    for guard in asked.guards:
        draft.expect(guard.key, guard.expect.expectation())
    for fence in asked.fences:
        draft.fence(limpet.Fence(fence.name, fence.token))
    for write in asked.writes:
        _draft(draft, write)
    commit = await draft.commit()
    entries = [None if entry is None else entry_as_json(entry, with_value=False) for entry in commit.entries]
    taken = [
        None if write.op != "take" or ended is None else plain(ended.value)
        for write, ended in zip(asked.writes, commit.ended, strict=True)
    ]
    return {"revision": commit.revision, "entries": entries, "taken": taken, "replayed": commit.replayed}


def _draft(draft: Draft, write: requests.BatchWrite) -> None:
    given = None if isinstance(write.ttl, UnsetType) else write.ttl
    kept = _kept(write.ttl)
    match write.op:
        case "put":
            draft.put(write.key, _content(write), ttl=given, meta=write.meta)
        case "create":
            draft.create(write.key, _content(write), ttl=given, meta=write.meta)
        case "add":
            draft.add(write.key, write.by, ttl=kept)
        case "set":
            fields = {} if isinstance(write.fields, UnsetType) else write.fields
            changed = {name: field_of(item) for name, item in fields.items()}
            draft.set(write.key, changed, unset=write.unset, if_exists=write.if_exists, ttl=kept)
        case "touch":
            if isinstance(write.ttl, UnsetType):
                raise requests.MissingField("ttl")
            draft.touch(write.key, write.ttl)
        case "delete":
            draft.delete(write.key)
        case "take":
            draft.take(write.key)


async def _scan(store: Store, asked: requests.Scan) -> Answer:
    if not 1 <= asked.limit <= PAGE_MAX:
        raise InvalidValue(f"a page holds 1 to {PAGE_MAX:,} entries", path="$.limit")
    where: Filter | None = None
    for test in asked.where:
        where = test.filter() if where is None else where & test.filter()
    page: list[Answer] = []
    size_bytes, cursor = 0, None
    async for entry in store.scan(asked.prefix, where=where, limit=asked.limit + 1, after=asked.after):
        if len(page) == asked.limit or size_bytes > PAGE_BYTES:
            cursor = page[-1]["key"]
            break
        page.append(entry_as_json(entry, with_value=asked.values))
        size_bytes += entry.size_bytes if asked.values else len(entry.key)
    return {"entries": page, "truncated": cursor is not None, "cursor": cursor}


async def _history(store: Store, asked: requests.History) -> Answer:
    if not 1 <= asked.limit <= HISTORY_MAX:
        raise InvalidValue(f"a history has 1 to {HISTORY_MAX:,} changes", path="$.limit")
    changes, has_more = await latest_changes(store, asked.key, limit=asked.limit, before=asked.before)
    return {
        "changes": [event_as_json(change) for change in changes],
        "truncated": has_more,
        "cursor": changes[0].revision if has_more and changes else None,
    }


async def _lock(store: Store, asked: requests.Lock) -> Answer:
    if not 0 <= asked.wait <= WAIT_S_MAX:
        raise InvalidValue(f"a lock is waited for 0 to {WAIT_S_MAX:.0f} seconds", path="$.wait")
    lock = await store.lock(asked.name, ttl=asked.ttl, wait=asked.wait, holder=asked.holder).acquire()
    return {"token": lock.token}


async def _refresh(store: Store, asked: requests.Refresh) -> Answer:
    await store.lock(asked.name, ttl=asked.ttl, token=asked.token).refresh()
    return {}


async def _unlock(store: Store, asked: requests.Unlock) -> Answer:
    if asked.token is not None:
        if asked.reason is not None:
            raise InvalidValue("a lock is given back by its token, or ended for a reason: give one of them")
        await store.lock(asked.name, ttl=1, token=asked.token).release()
        return {}
    if asked.reason is None:
        raise requests.MissingField("token")
    if not asked.reason.strip() or len(asked.reason) > requests.REASON_MAX:
        raise InvalidValue(f"a reason has 1 to {requests.REASON_MAX} characters", path="$.reason")
    return {"released": await end_lock(store, asked.name)}


async def end_lock(store: Store, name: str) -> bool:
    """End a lock, whoever holds it. Returns whether anybody did."""
    batch = Batch((), (Delete(check_key(name), family="lock"),))
    outcome = await store._session.commit(store.name, batch)
    return isinstance(outcome, Commit) and outcome.ended[0] is not None


async def _locks(store: Store, asked: requests.Locks) -> Answer:
    if not 1 <= asked.limit <= PAGE_MAX:
        raise InvalidValue(f"a page holds 1 to {PAGE_MAX:,} locks", path="$.limit")
    locks, has_more = await lock_page(store, asked.prefix, after=asked.after, limit=asked.limit)
    return {
        "locks": [lock_as_json(lock) for lock in locks],
        "truncated": has_more,
        "cursor": locks[-1].name if has_more and locks else None,
    }


async def _outcome(store: Store, asked: requests.Outcome) -> Answer:
    commit = await store.outcome(asked.request_id)
    if commit is None:
        return {"applied": False}
    entries = [None if entry is None else entry_as_json(entry, with_value=False) for entry in commit.entries]
    return {"applied": True, "revision": commit.revision, "entries": entries}


async def _status(store: Store, _: requests.Status) -> Answer:
    return status_as_json(await store.status())


async def _watch(_: Store, __: requests.Watch) -> Answer:
    raise InvalidValue("a watch is a stream of its own, and no part of anything else")


async def _kv_get(kept: SemanticStore, asked: requests.KvGet) -> Answer:
    envelope = await kept.kv_get(asked.key)
    return {"exists": False} if envelope is None else {"exists": True, **envelope.to_dict()}


async def _kv_put(kept: SemanticStore, asked: requests.KvPut) -> Answer:
    envelope = await kept.kv_put(
        asked.key,
        asked.value,
        writer=asked.last_writer,
        semantics=asked.semantics,
        expected_version=asked.expected_version,
        request_id=asked.request_id,
        spec_ref=asked.spec_ref,
        held=asked.held,
    )
    return _put_away(envelope)


async def _kv_delete(kept: SemanticStore, asked: requests.KvDelete) -> Answer:
    deleted = await kept.kv_delete(
        asked.key,
        writer=asked.last_writer,
        expected_version=asked.expected_version,
        request_id=asked.request_id,
        held=asked.held,
    )
    return {"deleted": deleted}


async def _kv_list(kept: SemanticStore, asked: requests.KvList) -> Answer:
    found = await kept.kv_list(asked.prefix, purpose=asked.purpose, limit=asked.limit, after=asked.after)
    return {
        "entries": [envelope.to_dict() for envelope in found.envelopes],
        "truncated": found.cursor is not None,
        "cursor": found.cursor,
    }


async def _kv_batch(kept: SemanticStore, asked: requests.KvBatch) -> Answer:
    items = [msgspec.to_builtins(item) for item in asked.items]
    found = await kept.kv_batch(items, writer=asked.last_writer, request_id=asked.request_id, held=asked.held)
    return {"entries": [None if envelope is None else _put_away(envelope) for envelope in found]}


def _put_away(envelope: Envelope) -> Answer:
    """An envelope that was written. Its value is known to whoever sent it, who may not be allowed to read one."""
    return {**envelope.to_dict(with_value=False), "replayed": envelope.replayed}


def _conditions(asked: Any) -> dict[str, Any]:
    """What a write says besides, as a store takes it."""
    expect = ANY if asked.expect is None else asked.expect.expectation()
    return {"expect": expect, "fence": _fence(asked.fence), "request_id": asked.request_id}


def _kept(ttl: requests.TTL | UnsetType) -> requests.TTL | Literal[Sentinel.KEEP]:
    """A time to live that stays as it is where none is given."""
    return KEEP if isinstance(ttl, UnsetType) else ttl


def _fence(fence: requests.Fence | None) -> limpet.Fence | None:
    return None if fence is None else limpet.Fence(fence.name, fence.token)


def _content(asked: requests.Put | requests.BatchWrite) -> Any:
    """What is to be stored: a value, a record or raw bytes."""
    if [asked.value is not UNSET, asked.fields is not UNSET, asked.bytes is not UNSET].count(True) != 1:
        raise InvalidValue(f"a put of {asked.key!r} has one of value, fields and bytes")
    if not isinstance(asked.fields, UnsetType):
        return Fields({name: field_of(item) for name, item in asked.fields.items()})
    return asked.value if isinstance(asked.bytes, UnsetType) else bytes_of(asked.bytes)


# What they reach --------------------------------------------------------------


class Reach(NamedTuple):
    """The keys and the lock names that a request is about, as spans. ``keys`` are those that it names one by one."""

    spans: Sequence[Span] = ()
    keys: Sequence[str] = ()


def _of_key(asked: Any) -> Reach:
    fence = [] if getattr(asked, "fence", None) is None else [key_span(asked.fence.name)]
    return Reach([key_span(asked.key), *fence], [asked.key])


def _of_semantic(asked: Any) -> Reach:
    written = [item.key for item in asked.items] if isinstance(asked, requests.KvBatch) else [asked.key]
    held = [] if getattr(asked, "held", None) is None else [asked.held.key]
    return Reach([key_span(key) for key in (*written, *held)], written)


def _of_name(asked: Any) -> Reach:
    return Reach([key_span(asked.name)])


def _of_prefix(asked: Any) -> Reach:
    return Reach([prefix_span(asked.prefix)])


def _of_pattern(asked: requests.Watch) -> Reach:
    return Reach([pattern_span(asked.pattern)])


def _of_batch(asked: requests.Batch) -> Reach:
    written = [check_key(write.key) for write in asked.writes]
    others = (*(guard.key for guard in asked.guards), *(fence.name for fence in asked.fences))
    return Reach([key_span(key) for key in (*written, *others)], written)


def depends_on_value(part: Expectation | Condition | Filter | Write) -> bool:
    """Whether the answer to a request with this part depends on a value that is stored.

    A caller who may repeat such a request learns the value, by its answer or by guessing, so it takes ``reveal``: a
    condition on a value or a field, a filter, a take, and an add, whose refusal tells how large the counter is. What
    depends on versions, revisions, times, sizes and kinds alone does not.
    """
    return isinstance(part, Equals | FieldEquals | Filter | Add) or (isinstance(part, Delete) and part.take)


def _guesses(asked: Any) -> bool:
    """Whether a request has an expectation, or a write of a batch, that depends on a value."""
    expected = [getattr(asked, "expect", None), *(guard.expect for guard in getattr(asked, "guards", ()))]
    writes = asked.writes if isinstance(asked, requests.Batch) else ()
    return any(one is not None and depends_on_value(one.expectation()) for one in expected) or any(
        depends_on_value(_VALUE_WRITES[write.op]) for write in writes if write.op in _VALUE_WRITES
    )


# The writes of a batch that are not decided by their kind alone, as the rule above knows them.
_VALUE_WRITES: Final[dict[str, Write]] = {"add": Add("", 0), "take": Delete("", take=True)}


def _asks_for_fields(asked: requests.FieldsOf) -> bool:
    return asked.get is not UNSET


def _only_sets_fields(asked: requests.FieldsOf) -> bool:
    return asked.get is UNSET and asked.swap is UNSET


def _is_forced(asked: requests.Unlock) -> bool:
    return asked.token is None and asked.reason is not None


def _looks_at_no_value(asked: requests.Scan) -> bool:
    return not asked.values and not asked.where


class Operation(NamedTuple):
    """A row of the table.

    Attributes:
        right: What it takes.
        reach: Which keys and locks a request is about.
        reveals: Whether its answer may hold a value.
        only_reads: Tells of a request whether it changes nothing though others of this name do.
        is_care: Tells of a request whether it overrules other callers, which takes the right ``admin``.
        conceals: Tells of a request whether it shows no value though others of this name do.
        is_semantic: Whether it runs on the semantic entries of a namespace, and not on the namespace itself.
    """

    name: str
    request: type[requests.Request]
    right: Right
    run: Callable[[Any, Any], Awaitable[Answer]]
    reach: Callable[[Any], Reach]
    reveals: bool = False
    only_reads: Callable[[Any], bool] | None = None
    conceals: Callable[[Any], bool] | None = None
    is_semantic: bool = False
    is_care: Callable[[Any], bool] | None = None

    def right_for(self, asked: Any) -> Right:
        """What a certain request takes."""
        if self.is_care is not None and self.is_care(asked):
            return "admin"
        return "read" if self.only_reads is not None and self.only_reads(asked) else self.right

    def reveals_for(self, asked: Any) -> bool:
        """Whether the answer to a certain request may hold a value, or tell whether a guess of one is right."""
        shows = self.reveals and not (self.conceals is not None and self.conceals(asked))
        return shows or _guesses(asked)


_EVERYTHING: Final = Reach([Span("", None)])


def _table(*rows: Operation) -> dict[str, Operation]:
    return {row.name: row for row in rows}


OPERATIONS: Final = _table(
    Operation("get", requests.Get, "read", _get, _of_key, reveals=True),
    Operation("set", requests.Set, "write", _set, _of_key),
    Operation("delete", requests.Delete, "write", _delete, _of_key),
    Operation("list", requests.List, "read", _list, _of_prefix),
    Operation(
        "entry", requests.Entry, "read", _entry, _of_key, reveals=True, conceals=lambda asked: not asked.with_value
    ),
    Operation("put", requests.Put, "write", _put, _of_key),
    Operation("cas", requests.Cas, "write", _cas, _of_key),
    Operation("incr", requests.Incr, "write", _incr, _of_key, reveals=True),
    Operation("take", requests.Take, "write", _take, _of_key, reveals=True),
    Operation("touch", requests.Touch, "write", _touch, _of_key),
    Operation(
        "fields",
        requests.FieldsOf,
        "write",
        _fields,
        _of_key,
        reveals=True,
        only_reads=_asks_for_fields,
        conceals=_only_sets_fields,
    ),
    Operation("batch", requests.Batch, "write", _batch, _of_batch),
    Operation("scan", requests.Scan, "read", _scan, _of_prefix, reveals=True, conceals=_looks_at_no_value),
    Operation("history", requests.History, "read", _history, _of_key, reveals=True),
    Operation("watch", requests.Watch, "read", _watch, _of_pattern, reveals=True),
    Operation("lock", requests.Lock, "lock", _lock, _of_name),
    Operation("refresh", requests.Refresh, "lock", _refresh, _of_name),
    Operation("unlock", requests.Unlock, "lock", _unlock, _of_name, is_care=_is_forced),
    Operation("locks", requests.Locks, "read", _locks, _of_prefix),
    Operation("outcome", requests.Outcome, "read", _outcome, lambda _: _EVERYTHING),
    Operation("status", requests.Status, "read", _status, lambda _: _EVERYTHING),
    Operation("kv_get", requests.KvGet, "read", _kv_get, _of_semantic, reveals=True, is_semantic=True),
    Operation("kv_put", requests.KvPut, "write", _kv_put, _of_semantic, is_semantic=True),
    Operation("kv_delete", requests.KvDelete, "write", _kv_delete, _of_semantic, is_semantic=True),
    Operation("kv_list", requests.KvList, "read", _kv_list, _of_prefix, reveals=True, is_semantic=True),
    Operation("kv_batch", requests.KvBatch, "write", _kv_batch, _of_semantic, is_semantic=True),
)
