"""The operations: one table of what a caller can do in a namespace, for NATS, HTTP and the command line.

A row has a name, the shape of its request, the right that it takes, and the function that runs it on a store. NATS and
HTTP make a request out of what they receive besides: a subject, a path, a header. An answer is a JSON object, in the
forms of `limpet.protocol.json`. An error is raised; `limpet.protocol.codes` has its code on each wire.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from limpet.codec import Fields
from limpet.draft import Draft, Expectation, Fence
from limpet.errors import InvalidValue, ValueTooLarge
from limpet.keys import PAGE_BYTES, PAGE_MAX, Span, check_key, fit, pattern_span, prefix_span
from limpet.many import read_entries, take_keys
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
    Rule,
    Sentinel,
    Write,
)
from limpet.pages import latest_changes, lock_page
from limpet.protocol.json import entry_as_json, event_as_json, field_of, lock_as_json, plain, status_as_json
from limpet.semantic.store import Envelope, SemanticStore
from limpet.server import requests
from limpet.store import Store

__all__ = ["FETCH", "OPERATIONS", "Operation", "Reach", "Right", "depends_on_value"]

Right = Literal["read", "write", "lock", "reveal", "admin"]
"""A right that a caller may have. ``read`` shows keys, numbers and times; values take ``reveal`` besides."""

Answer = dict[str, Any]

WAIT_S_MAX: Final = 30.0
HISTORY_MAX: Final = 1000


# How they run -----------------------------------------------------------------


async def _get(store: Store, request: requests.Get) -> Answer:
    entry = await store.entry(request.key)
    return {"exists": False} if entry is None else {"exists": True, "value": plain(entry.value)}


async def _set(store: Store, request: requests.Set) -> Answer:
    await store.put(request.key, request.value, ttl=request.ttl, request_id=request.request_id)
    return {}


async def _delete(store: Store, request: requests.Delete) -> Answer:
    return {"deleted": await store.delete(request.key, **_conditions(request))}


async def _delete_prefix(store: Store, request: requests.DeletePrefix) -> Answer:
    if not 1 <= request.limit <= PAGE_MAX:
        raise InvalidValue(f"one request deletes 1 to {PAGE_MAX:,} keys", path="$.limit")
    deleted = await store.delete_prefix(request.prefix, limit=request.limit, fence=_fence(request.fence))
    return {"deleted": deleted, "truncated": deleted == request.limit}


async def _list(store: Store, request: requests.List) -> Answer:
    page = await store.keys(request.prefix, limit=request.limit, after=request.after, reverse=request.reverse)
    keys = page.keys[: fit(map(len, page.keys))]
    return {"keys": keys, "count": len(keys), "truncated": page.truncated or len(keys) < page.count}


async def _entry(store: Store, request: requests.Entry) -> Answer:
    entry = await store.entry(request.key)
    if entry is None:
        return {"exists": False}
    return {"exists": True, "entry": entry_as_json(entry, with_value=request.with_value)}


async def _fetch(store: Store, request: requests.Entry) -> Answer:
    """The entry itself, for an interface that sends its value in a form of its own."""
    entry = await store.entry(request.key)
    return {"exists": False} if entry is None else {"exists": True, "entry": entry}


async def _remaining(store: Store, request: requests.Remaining) -> Answer:
    remaining = await store.remaining(request.key)
    return {"exists": remaining != 0, "remaining": remaining}


async def _entries(store: Store, request: requests.Entries) -> Answer:
    found = await read_entries(store, take_keys(request.keys))
    size_bytes = sum(entry.size_bytes for entry in found.values() if entry is not None) if request.with_value else 0
    if size_bytes > PAGE_BYTES:
        raise ValueTooLarge(request.keys[0], size_bytes=size_bytes, limit_bytes=PAGE_BYTES, what="the answer to a read")
    shown = {
        key: None if entry is None else entry_as_json(entry, with_value=request.with_value)
        for key, entry in found.items()
    }
    return {"entries": [shown[key] for key in request.keys]}


async def _put(store: Store, request: requests.Put) -> Answer:
    ttl = _ttl_or_keep(UNSET if request.keep_ttl else request.ttl)
    entry = await store.put(
        request.key, _content(request, request.key), ttl=ttl, meta=request.meta, **_conditions(request)
    )
    return {"entry": entry_as_json(entry, with_value=False)}


async def _append(store: Store, request: requests.Append) -> Answer:
    content, fence = _content(request, request.prefix), _fence(request.fence)
    entry = await store.append(
        request.prefix, content, ttl=request.ttl, fence=fence, request_id=request.request_id, meta=request.meta
    )
    return {"entry": entry_as_json(entry, with_value=False)}


async def _cas(store: Store, request: requests.Cas) -> Answer:
    entry = await store.put(request.key, request.value, ttl=request.ttl, **_conditions(request))
    return {"version": entry.version, "revision": entry.revision}


async def _incr(store: Store, request: requests.Incr) -> Answer:
    rule, number = _counting(request)
    count = getattr(store, rule)
    ttl = _ttl_or_keep(request.ttl)
    return {"value": await count(request.key, number, ttl=ttl, ttl_if_new=request.ttl_if_new, **_conditions(request))}


def _counting(request: requests.Incr | requests.BatchWrite) -> tuple[Rule, int]:
    """What to do with an integer, and the number to do it with."""
    numbers: dict[Rule, int | UnsetType] = {
        "add": request.by,
        "minimum": request.minimum,
        "maximum": request.maximum,
    }
    given = [(rule, number) for rule, number in numbers.items() if not isinstance(number, UnsetType)]
    if len(given) > 1:
        raise InvalidValue(f"{request.key!r} is counted with one of by, minimum and maximum")
    return given[0] if given else ("add", 1)


async def _take(store: Store, request: requests.Take) -> Answer:
    found = await store.take(request.key, ABSENT, **_conditions(request))
    return {"exists": False} if found is ABSENT else {"exists": True, "value": plain(found)}


async def _touch(store: Store, request: requests.Touch) -> Answer:
    entry = await store.touch(request.key, request.ttl, **_conditions(request))
    return {"exists": False} if entry is None else {"exists": True, "entry": entry_as_json(entry, with_value=False)}


async def _fields(store: Store, request: requests.FieldsOf) -> Answer:
    writes = request.set is not UNSET or request.unset is not UNSET
    if [request.get is not UNSET, writes, request.swap is not UNSET].count(True) != 1:
        raise InvalidValue("fields has one of get, swap, and set with unset")
    record = store.record(request.key)
    if not isinstance(request.get, UnsetType):
        held = await record.fields()
        if held is None:
            return {"exists": False}
        chosen = held if request.get is None else Fields({name: held[name] for name in request.get if name in held})
        return {"exists": True, "fields": plain(chosen)}
    conditions: dict[str, Any] = {"fence": _fence(request.fence), "request_id": request.request_id}
    if not isinstance(request.swap, UnsetType):
        swap = request.swap
        expected = ABSENT if swap.expected is UNSET else field_of(swap.expected)
        return {"swapped": await record.swap(swap.field, expected, field_of(swap.new), **conditions)}
    given = {} if isinstance(request.set, UnsetType) else {name: field_of(item) for name, item in request.set.items()}
    unset = () if isinstance(request.unset, UnsetType) else request.unset
    entry = await record.set(given, unset=unset, if_exists=request.if_exists, **conditions)
    return {"version": entry.version, "revision": entry.revision}


async def _batch(store: Store, request: requests.Batch) -> Answer:
    draft = store.batch(request_id=request.request_id)
    for guard in request.guards:
        draft.expect(guard.key, guard.expect.expectation())
    for fence in request.fences:
        draft.fence(Fence(fence.name, fence.token))
    for write in request.writes:
        _draft(draft, write)
    commit = await draft.commit()
    entries = [None if entry is None else entry_as_json(entry, with_value=False) for entry in commit.entries]
    taken = [
        None if write.op != "take" or ended is None else plain(ended.value)
        for write, ended in zip(request.writes, commit.ended, strict=True)
    ]
    return {
        "revision": commit.revision,
        "entries": entries,
        "taken": taken,
        "kept": commit.kept,
        "replayed": commit.replayed,
    }


def _draft(draft: Draft, write: requests.BatchWrite) -> None:
    given = None if isinstance(write.ttl, UnsetType) else write.ttl
    ttl = _ttl_or_keep(write.ttl)
    match write.op:
        case "put":
            draft.put(write.key, _content(write, write.key), ttl=given, meta=write.meta)
        case "create":
            draft.create(write.key, _content(write, write.key), ttl=given, meta=write.meta, or_keep=write.or_keep)
        case "add":
            rule, number = _counting(write)
            getattr(draft, rule)(write.key, number, ttl=ttl, ttl_if_new=write.ttl_if_new)
        case "set":
            fields = {} if isinstance(write.fields, UnsetType) else write.fields
            changed = {name: field_of(item) for name, item in fields.items()}
            draft.set(write.key, changed, unset=write.unset, if_exists=write.if_exists, ttl=ttl)
        case "touch":
            if isinstance(write.ttl, UnsetType):
                raise requests.MissingField("ttl")
            draft.touch(write.key, write.ttl)
        case "delete":
            draft.delete(write.key)
        case "take":
            draft.take(write.key)


async def _scan(store: Store, request: requests.Scan) -> Answer:
    if not 1 <= request.limit <= PAGE_MAX:
        raise InvalidValue(f"a page holds 1 to {PAGE_MAX:,} entries", path="$.limit")
    where = requests.filter_of(request.where) if request.where else None
    page: list[Answer] = []
    size_bytes, cursor = 0, None
    options: dict[str, Any] = {"where": where, "after": request.after, "reverse": request.reverse}
    async for entry in store.scan(request.prefix, limit=request.limit + 1, **options):
        if len(page) == request.limit or size_bytes > PAGE_BYTES:
            cursor = page[-1]["key"]
            break
        page.append(entry_as_json(entry, with_value=request.values))
        size_bytes += entry.size_bytes if request.values else len(entry.key)
    return {"entries": page, "truncated": cursor is not None, "cursor": cursor}


async def _children(store: Store, request: requests.Children) -> Answer:
    page = await store.children(request.prefix, delimiter=request.delimiter, limit=request.limit, after=request.after)
    kept = page.children[: fit(len(child.key) for child in page.children)]
    is_cut = page.truncated or len(kept) < len(page.children)
    return {
        "children": [{"key": child.key, "folder": child.is_folder, "keys": child.keys} for child in kept],
        "truncated": is_cut,
        "cursor": kept[-1].key if is_cut else None,
    }


async def _history(store: Store, request: requests.History) -> Answer:
    if not 1 <= request.limit <= HISTORY_MAX:
        raise InvalidValue(f"a history has 1 to {HISTORY_MAX:,} changes", path="$.limit")
    changes, has_more = await latest_changes(store, request.key, limit=request.limit, before=request.before)
    return {
        "changes": [event_as_json(change) for change in changes],
        "truncated": has_more,
        "cursor": changes[0].revision if has_more and changes else None,
    }


async def _lock(store: Store, request: requests.Lock) -> Answer:
    if not 0 <= request.wait <= WAIT_S_MAX:
        raise InvalidValue(f"a lock is waited for 0 to {WAIT_S_MAX:.0f} seconds", path="$.wait")
    lock = await store.lock(request.name, ttl=request.ttl, wait=request.wait, holder=request.holder).acquire()
    return {"token": lock.token}


async def _refresh(store: Store, request: requests.Refresh) -> Answer:
    await store.lock(request.name, ttl=request.ttl, token=request.token).refresh()
    return {}


async def _unlock(store: Store, request: requests.Unlock) -> Answer:
    if request.token is not None:
        if request.reason is not None:
            raise InvalidValue("a lock is given back by its token, or ended for a reason: give one of them")
        await store.lock(request.name, ttl=1, token=request.token).release()
        return {}
    if request.reason is None:
        raise requests.MissingField("token")
    if not request.reason.strip() or len(request.reason) > requests.REASON_MAX:
        raise InvalidValue(f"a reason has 1 to {requests.REASON_MAX} characters", path="$.reason")
    return {"released": await end_lock(store, request.name)}


async def end_lock(store: Store, name: str) -> bool:
    """End a lock, no matter which caller holds it. Returns whether it was held."""
    batch = Batch((), (Delete(check_key(name), family="lock"),))
    outcome = await store._session.commit(store.name, batch)
    return isinstance(outcome, Commit) and outcome.ended[0] is not None


async def _locks(store: Store, request: requests.Locks) -> Answer:
    if not 1 <= request.limit <= PAGE_MAX:
        raise InvalidValue(f"a page holds 1 to {PAGE_MAX:,} locks", path="$.limit")
    locks, has_more = await lock_page(store, request.prefix, after=request.after, limit=request.limit)
    return {
        "locks": [lock_as_json(lock) for lock in locks],
        "truncated": has_more,
        "cursor": locks[-1].name if has_more and locks else None,
    }


async def _outcome(store: Store, request: requests.Outcome) -> Answer:
    commit = await store.outcome(request.request_id)
    if commit is None:
        return {"applied": False}
    entries = [None if entry is None else entry_as_json(entry, with_value=False) for entry in commit.entries]
    return {"applied": True, "revision": commit.revision, "entries": entries}


async def _status(store: Store, _: requests.Status) -> Answer:
    return status_as_json(await store.status())


async def _watch(_: Store, __: requests.Watch) -> Answer:
    raise InvalidValue("a watch is a stream: it cannot be called as an operation")


async def _kv_get(store: SemanticStore, request: requests.KvGet) -> Answer:
    envelope = await store.kv_get(request.key)
    return {"exists": False} if envelope is None else {"exists": True, **envelope.to_dict()}


async def _kv_put(store: SemanticStore, request: requests.KvPut) -> Answer:
    envelope = await store.kv_put(
        request.key,
        request.value,
        writer=request.last_writer,
        semantics=request.semantics,
        expected_version=request.expected_version,
        request_id=request.request_id,
        spec_ref=request.spec_ref,
        held=request.held,
    )
    return _written_envelope(envelope)


async def _kv_delete(store: SemanticStore, request: requests.KvDelete) -> Answer:
    deleted = await store.kv_delete(
        request.key,
        writer=request.last_writer,
        expected_version=request.expected_version,
        request_id=request.request_id,
        held=request.held,
    )
    return {"deleted": deleted}


async def _kv_list(store: SemanticStore, request: requests.KvList) -> Answer:
    found = await store.kv_list(request.prefix, purpose=request.purpose, limit=request.limit, after=request.after)
    return {
        "entries": [envelope.to_dict() for envelope in found.envelopes],
        "truncated": found.cursor is not None,
        "cursor": found.cursor,
    }


async def _kv_batch(store: SemanticStore, request: requests.KvBatch) -> Answer:
    items = [msgspec.to_builtins(item) for item in request.items]
    found = await store.kv_batch(items, writer=request.last_writer, request_id=request.request_id, held=request.held)
    return {"entries": [None if envelope is None else _written_envelope(envelope) for envelope in found]}


def _written_envelope(envelope: Envelope) -> Answer:
    """An envelope after a write, without its value: its caller sent that, and may lack the right to read one."""
    return {**envelope.to_dict(with_value=False), "replayed": envelope.replayed}


def _conditions(request: Any) -> dict[str, Any]:
    """The expectation, the fence and the request id of a write, as a store takes them."""
    expect = ANY if request.expect is None else request.expect.expectation()
    return {"expect": expect, "fence": _fence(request.fence), "request_id": request.request_id}


def _ttl_or_keep(ttl: requests.TTL | UnsetType) -> requests.TTL | Literal[Sentinel.KEEP]:
    """The time to live of a write that leaves it as it is unless the request has one."""
    return KEEP if isinstance(ttl, UnsetType) else ttl


def _fence(fence: requests.Fence | None) -> Fence | None:
    return None if fence is None else Fence(fence.name, fence.token)


def _content(request: requests.Put | requests.Append | requests.BatchWrite, key: str) -> Any:
    """The value, the record or the raw bytes to store."""
    if [request.value is not UNSET, request.fields is not UNSET, request.bytes is not UNSET].count(True) != 1:
        raise InvalidValue(f"a put of {key!r} has one of value, fields and bytes")
    if not isinstance(request.fields, UnsetType):
        return Fields({name: field_of(item) for name, item in request.fields.items()})
    return request.value if isinstance(request.bytes, UnsetType) else request.bytes


# Which keys they reach --------------------------------------------------------


class Reach(NamedTuple):
    """The keys and the lock names that a request is about, as spans, for the check of rights.

    Attributes:
        keys: Those that the request names one by one. They are not checked here: the store does that.
    """

    spans: Sequence[Span] = ()
    keys: Sequence[str] = ()


def _reach_keys(keys: Sequence[str]) -> Reach:
    return Reach([Span(key, key + "\0") for key in keys], keys)


def _reach_key(request: Any) -> Reach:
    fence = getattr(request, "fence", None)
    return _reach_keys([request.key] if fence is None else [request.key, fence.name])


def _reach_all(request: requests.Entries) -> Reach:
    return _reach_keys(request.keys)


def _reach_semantic(request: Any) -> Reach:
    written = [item.key for item in request.items] if isinstance(request, requests.KvBatch) else [request.key]
    held = getattr(request, "held", None)
    return _reach_keys(written if held is None else [*written, held.key])


def _reach_name(request: Any) -> Reach:
    return _reach_keys([request.name])


def _reach_prefix(request: Any) -> Reach:
    fence = getattr(request, "fence", None)
    names = () if fence is None else (fence.name,)
    return Reach([prefix_span(request.prefix), *_reach_keys(names).spans], names)


def _reach_append(request: requests.Append) -> Reach:
    # Named by its prefix, so that the appends of one caller are done in the order in which they came.
    reach = _reach_prefix(request)
    return Reach(reach.spans, [request.prefix, *reach.keys])


def _reach_pattern(request: requests.Watch) -> Reach:
    return Reach([pattern_span(request.pattern)])


def _reach_batch(request: requests.Batch) -> Reach:
    written, guarded = [write.key for write in request.writes], [guard.key for guard in request.guards]
    return _reach_keys([*written, *guarded, *(fence.name for fence in request.fences)])


def depends_on_value(part: Expectation | Condition | Filter | Write) -> bool:
    """Whether the answer to a request with this part depends on a stored value.

    A caller that may repeat such a request learns the value, by its answer or by guessing, so it takes ``reveal``: a
    condition on a value or a field, a filter, a take, and an add, whose refusal shows how large the counter is.
    Versions, revisions, times, sizes and kinds take no ``reveal``.
    """
    return isinstance(part, Equals | FieldEquals | Filter | Add) or (isinstance(part, Delete) and part.take)


def _needs_reveal(request: Any) -> bool:
    """Whether a request has an expectation, or a write of a batch, whose answer depends on a value."""
    expected = [getattr(request, "expect", None), *(guard.expect for guard in getattr(request, "guards", ()))]
    writes = request.writes if isinstance(request, requests.Batch) else ()
    return any(one is not None and depends_on_value(one.expectation()) for one in expected) or any(
        depends_on_value(_VALUE_WRITES[write.op]) for write in writes if write.op in _VALUE_WRITES
    )


# The writes of a batch whose answer depends on a value, each as an example for `depends_on_value`.
_VALUE_WRITES: Final[dict[str, Write]] = {"add": Add("", 0), "take": Delete("", take=True)}


def _reads_fields(request: requests.FieldsOf) -> bool:
    return request.get is not UNSET


def _only_sets_fields(request: requests.FieldsOf) -> bool:
    return request.get is UNSET and request.swap is UNSET


def _is_forced(request: requests.Unlock) -> bool:
    return request.token is None and request.reason is not None


def _needs_no_value(request: requests.Scan) -> bool:
    return not request.values and not request.where


class Operation(NamedTuple):
    """A row of the table.

    Attributes:
        right: The right that a request takes.
        reach: Returns the keys and locks that a request is about.
        reveals: Whether an answer may hold a value.
        only_reads: Returns whether a request changes nothing, where other requests of this operation do.
        is_care: Returns whether a request overrules other callers, which takes the right ``admin``.
        conceals: Returns whether an answer holds no value, where other answers of this operation do.
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

    def right_for(self, request: Any) -> Right:
        """The right that this request takes."""
        if self.is_care is not None and self.is_care(request):
            return "admin"
        return "read" if self.only_reads is not None and self.only_reads(request) else self.right

    def reveals_for(self, request: Any) -> bool:
        """Whether the answer to this request may hold a value, or show whether a guess of one is right."""
        shows = self.reveals and not (self.conceals is not None and self.conceals(request))
        return shows or _needs_reveal(request)


_EVERYTHING: Final = Reach([Span("", None)])


def _table(*rows: Operation) -> dict[str, Operation]:
    return {row.name: row for row in rows}


OPERATIONS: Final = _table(
    Operation("get", requests.Get, "read", _get, _reach_key, reveals=True),
    Operation("set", requests.Set, "write", _set, _reach_key),
    Operation("delete", requests.Delete, "write", _delete, _reach_key),
    Operation("delete_prefix", requests.DeletePrefix, "write", _delete_prefix, _reach_prefix),
    Operation("list", requests.List, "read", _list, _reach_prefix),
    Operation(
        "entry",
        requests.Entry,
        "read",
        _entry,
        _reach_key,
        reveals=True,
        conceals=lambda request: not request.with_value,
    ),
    Operation("remaining", requests.Remaining, "read", _remaining, _reach_key),
    Operation(
        "entries",
        requests.Entries,
        "read",
        _entries,
        _reach_all,
        reveals=True,
        conceals=lambda request: not request.with_value,
    ),
    Operation("put", requests.Put, "write", _put, _reach_key),
    Operation("append", requests.Append, "write", _append, _reach_append),
    Operation("cas", requests.Cas, "write", _cas, _reach_key),
    Operation("incr", requests.Incr, "write", _incr, _reach_key, reveals=True),
    Operation("take", requests.Take, "write", _take, _reach_key, reveals=True),
    Operation("touch", requests.Touch, "write", _touch, _reach_key),
    Operation(
        "fields",
        requests.FieldsOf,
        "write",
        _fields,
        _reach_key,
        reveals=True,
        only_reads=_reads_fields,
        conceals=_only_sets_fields,
    ),
    Operation("batch", requests.Batch, "write", _batch, _reach_batch),
    Operation("scan", requests.Scan, "read", _scan, _reach_prefix, reveals=True, conceals=_needs_no_value),
    Operation("children", requests.Children, "read", _children, _reach_prefix),
    Operation("history", requests.History, "read", _history, _reach_key, reveals=True),
    Operation("watch", requests.Watch, "read", _watch, _reach_pattern, reveals=True),
    Operation("lock", requests.Lock, "lock", _lock, _reach_name),
    Operation("refresh", requests.Refresh, "lock", _refresh, _reach_name),
    Operation("unlock", requests.Unlock, "lock", _unlock, _reach_name, is_care=_is_forced),
    Operation("locks", requests.Locks, "read", _locks, _reach_prefix),
    Operation("outcome", requests.Outcome, "read", _outcome, lambda _: _EVERYTHING),
    Operation("status", requests.Status, "read", _status, lambda _: _EVERYTHING),
    Operation("kv_get", requests.KvGet, "read", _kv_get, _reach_semantic, reveals=True, is_semantic=True),
    Operation("kv_put", requests.KvPut, "write", _kv_put, _reach_semantic, is_semantic=True),
    Operation("kv_delete", requests.KvDelete, "write", _kv_delete, _reach_semantic, is_semantic=True),
    Operation("kv_list", requests.KvList, "read", _kv_list, _reach_prefix, reveals=True, is_semantic=True),
    Operation("kv_batch", requests.KvBatch, "write", _kv_batch, _reach_semantic, is_semantic=True),
)

FETCH: Final = OPERATIONS["entry"]._replace(run=_fetch)
"""``entry`` with the `Entry` itself in its answer, in place of a JSON document: raw bytes stay bytes."""
