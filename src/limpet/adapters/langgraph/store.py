"""The long-term store: items of JSON under namespaces, without vectors.

    memory/LABEL/LABEL//KEY     an item; a namespace is the labels in front of the two slashes

Labels and keys are quoted, so both may have any characters, and a prefix of a namespace is a prefix of keys.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self

from langgraph.store.base import (
    BaseStore,
    GetOp,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    validate_op_namespace,
)

import limpet
from limpet import codec, sync
from limpet.adapters.langgraph.source import Source
from limpet.adapters.names import escape, unescape
from limpet.errors import Conflict, InvalidValue
from limpet.keys import BATCH_BYTES_MAX, BATCH_GUARDS_MAX, BATCH_WRITES_MAX, KEYS_MAX

__all__ = ["Store"]

ROOT: Final = "memory/"
PAGE: Final = 200
# Sorts behind every character that a key can have.
LAST: Final = "\U0010ffff"

Namespace = tuple[str, ...]


class Store(BaseStore):
    """A LangGraph store on any engine. It has no vectors: a search with a ``query`` is refused.

    Args:
        store: A URL, or a store opened by `limpet.open` or `limpet.sync.open`. A URL is opened at the first call, in
            the namespace ``langgraph``, and closed by `aclose` or `close`. A store that is given stays open.
        ttl: The default time to live, in minutes, and whether reading an item renews it, which it does if not given.
    """

    supports_ttl = True

    def __init__(self, store: limpet.Store | sync.Store | str, *, ttl: TTLConfig | None = None) -> None:
        self.ttl_config = ttl
        self._source = Source(store, "langgraph")

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Do several operations. Those that read see nothing of those that write, which share commits."""
        wanted = _check(ops)
        return await self._source.arun(lambda store: _run(store, wanted))

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """See `abatch`."""
        wanted = _check(ops)
        return self._source.run(lambda store: _run(store, wanted))

    async def aclose(self) -> None:
        """Close what was opened from a URL."""
        await self._source.aclose()

    def close(self) -> None:
        """Close what was opened from a URL by methods without await."""
        self._source.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check(ops: Iterable[Op]) -> list[Op]:
    wanted = list(ops)
    for op in wanted:
        validate_op_namespace(op)
        if isinstance(op, SearchOp) and op.query:
            raise InvalidValue("this store has no vectors: search by namespace and filter, without a query")
    return wanted


# Operations ---------------------------------------------------------------------------


async def _run(store: limpet.Store, ops: Sequence[Op]) -> list[Result]:
    results: list[Result] = [None] * len(ops)
    read = await _read(store, {_key(op.namespace, op.key) for op in ops if isinstance(op, GetOp)})
    renewed: dict[str, limpet.Entry] = {}
    puts: dict[str, PutOp] = {}
    for number, op in enumerate(ops):
        match op:
            case GetOp():
                entry = read.get(_key(op.namespace, op.key))
                results[number] = None if entry is None else Item(**_item(entry))
                found = [] if entry is None else [entry]
            case SearchOp():
                found = [entry async for entry in _search(store, op)]
                results[number] = [SearchItem(**_item(entry)) for entry in found]
            case ListNamespacesOp():
                results[number] = await _list_namespaces(store, op)
                continue
            case PutOp():
                # Of several puts of one item the last counts.
                puts[_key(op.namespace, op.key)] = op
                continue
            case _:
                raise InvalidValue(f"unknown operation of type {type(op).__name__}")
        if op.refresh_ttl:
            renewed.update((entry.key, entry) for entry in found if "ttl" in entry.meta)
    await _renew(store, [entry for key, entry in renewed.items() if key not in puts])
    await _write(store, puts)
    return results


async def _read(store: limpet.Store, keys: set[str]) -> dict[str, limpet.Entry]:
    found: dict[str, limpet.Entry] = {}
    for part in _parts(list(keys), KEYS_MAX):
        entries = await store.entries(part)
        found.update((entry.key, entry) for entry in entries if entry is not None)
    return found


def _parts(items: Sequence[Any], size: int) -> list[Any]:
    return [items[first : first + size] for first in range(0, len(items), size)]


async def _write(store: limpet.Store, puts: dict[str, PutOp]) -> None:
    draft, count, size_bytes = store.batch(), 0, 0
    for key, op in puts.items():
        more_bytes = 0 if op.value is None else codec.size_bytes(codec.encode(op.value))
        if count == BATCH_WRITES_MAX or (count and size_bytes + more_bytes > BATCH_BYTES_MAX):
            await draft.commit()
            draft, count, size_bytes = store.batch(), 0, 0
        if op.value is None:
            draft.delete(key)
        else:
            ttl_s = None if op.ttl is None else op.ttl * 60
            # The time to live stands beside the value, so that a read can renew it.
            draft.put(key, op.value, ttl=ttl_s, meta=None if op.ttl is None else {"ttl": ttl_s})
        count, size_bytes = count + 1, size_bytes + more_bytes
    if count:
        await draft.commit()


async def _renew(store: limpet.Store, entries: Sequence[limpet.Entry]) -> None:
    """Let items live as long again as when they were put, if no other has put them since."""
    for part in _parts(entries, BATCH_GUARDS_MAX):
        draft = store.batch()
        for entry in part:
            draft.expect(entry.key, entry).touch(entry.key, entry.meta["ttl"])
        try:
            await draft.commit()
        except Conflict:
            if len(part) > 1:
                for entry in part:
                    await _renew(store, [entry])


# Searching ----------------------------------------------------------------------------


async def _search(store: limpet.Store, op: SearchOp) -> AsyncIterator[limpet.Entry]:
    skip, left, after = op.offset, op.limit, None
    while left > 0:
        page = [entry async for entry in store.scan(_prefix(op.namespace_prefix), limit=PAGE, after=after)]
        for entry in page:
            if not _matches(entry.value, op.filter or {}):
                continue
            if skip > 0:
                skip -= 1
                continue
            yield entry
            left -= 1
            if left == 0:
                return
        if len(page) < PAGE:
            return
        after = page[-1].key


def _matches(value: Any, wanted: dict[str, Any]) -> bool:
    return all(_compare(value.get(name), each) for name, each in wanted.items())


def _compare(value: Any, wanted: Any) -> bool:
    """Whether a member of an item is as a filter wants it: equal, or as its operators say."""
    match wanted:
        case dict() if any(name.startswith("$") for name in wanted):
            return all(_apply(value, operator, operand) for operator, operand in wanted.items())
        case dict():
            return isinstance(value, dict) and _matches(value, wanted)
        case list() | tuple():
            is_alike = isinstance(value, list) and len(value) == len(wanted)
            return is_alike and all(map(_compare, value, wanted))
        case _:
            return bool(value == wanted)


def _apply(value: Any, operator: str, operand: Any) -> bool:
    match operator:
        case "$eq":
            return bool(value == operand)
        case "$ne":
            return bool(value != operand)
        case "$gt" | "$gte" | "$lt" | "$lte":
            order = _order(value, operand)
            if order is None:
                return False
            return {"$gt": order > 0, "$gte": order >= 0, "$lt": order < 0, "$lte": order <= 0}[operator]
        case _:
            raise ValueError(f"Unsupported operator: {operator}")


def _order(value: Any, operand: Any) -> int | None:
    """Compare two numbers, or texts that stand for numbers, or two other texts; None where there is no order."""
    try:
        left, right = float(value), float(operand)
    except (TypeError, ValueError):
        if not (isinstance(value, str) and isinstance(operand, str)):
            return None
        return (value > operand) - (value < operand)
    return (left > right) - (left < right)


# Namespaces ---------------------------------------------------------------------------


async def _list_namespaces(store: limpet.Store, op: ListNamespacesOp) -> list[Namespace]:
    conditions = op.match_conditions or ()
    found = {
        namespace[: op.max_depth]
        async for namespace in _namespaces(store, _shared(conditions))
        if all(_does_match(condition, namespace) for condition in conditions)
    }
    return sorted(found)[op.offset : op.offset + op.limit]


def _shared(conditions: Iterable[MatchCondition]) -> Namespace:
    """The labels that all namespaces begin with which the conditions match."""
    for condition in conditions:
        if condition.match_type == "prefix":
            return tuple(itertools.takewhile(lambda label: label != "*", condition.path))
    return ()


def _does_match(condition: MatchCondition, namespace: Namespace) -> bool:
    path = condition.path
    if len(namespace) < len(path):
        return False
    part = namespace[: len(path)] if condition.match_type == "prefix" else namespace[len(namespace) - len(path) :]
    return all(wanted in ("*", label) for wanted, label in zip(path, part, strict=True))


async def _namespaces(store: limpet.Store, prefix: Namespace) -> AsyncIterator[Namespace]:
    """The namespaces that have items. A large one is skipped, and not read to its end."""
    after, latest = None, None
    while True:
        page = await store.keys(_prefix(prefix), limit=PAGE, after=after)
        for key in page.keys:
            head = key[: key.index("//") + 2]
            if head != latest:
                latest = head
                yield _namespace(head)
        if not page.truncated or latest is None:
            return
        after = latest + LAST


# Keys ---------------------------------------------------------------------------------


def _prefix(namespace: Namespace) -> str:
    return ROOT + "".join(f"{escape(label)}/" for label in namespace)


def _key(namespace: Namespace, key: str) -> str:
    return f"{_prefix(namespace)}/{escape(key)}"


def _namespace(head: str) -> Namespace:
    return tuple(unescape(label) for label in head.removeprefix(ROOT).removesuffix("//").split("/"))


def _item(entry: limpet.Entry) -> dict[str, Any]:
    at = entry.key.index("//") + 2
    return {
        "namespace": _namespace(entry.key[:at]),
        "key": unescape(entry.key[at:]),
        "value": entry.value,
        "created_at": _time(entry.created_ms),
        "updated_at": _time(entry.updated_ms),
    }


def _time(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, UTC)
