"""Records of byte fields under dotted keys: the state of tasks, for workers and the sweeper behind them.

A key is ``gbe.state.tasks.email-send.job_1``. Its first segment is the namespace, the rest is the key in it. On Redis
the segments are joined by colons, so that ``HGETALL {gbe}:state:tasks:…`` shows the fields there; everywhere else the
key is stored as it is written.

Fields are raw bytes and are not interpreted, with one exception: two fields of decimal digits are compared as numbers,
because as text "9" comes after "10".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from datetime import timedelta
from typing import Final, Literal, Self

import msgspec

from limpet.checks import check_number
from limpet.clock import TTL_S_MAX, check_wait
from limpet.codec import Fields
from limpet.draft import Fence, Fencing, as_fields
from limpet.errors import Conflict, InvalidKey, InvalidValue, TransientError
from limpet.keys import check_key, check_namespace, check_text
from limpet.model import ABSENT, Entry, Filter, Sentinel, Test
from limpet.request_ids import new_request_id
from limpet.store import Store
from limpet.store import open as open_store

__all__ = ["Record", "ScanFilter", "StateStore", "StateStoreConfig", "Task", "TaskState", "requeue_stuck"]

TaskState = Literal["pending", "claimed", "running", "completed", "failed", "cancelled"]
Plain = Mapping[str, str | int | None]
TERMINAL: Final = frozenset({"completed", "failed", "cancelled"})


class StateStoreConfig(msgspec.Struct, frozen=True):
    """Where the records are.

    Attributes:
        url: The URL of an engine: ``redis://…``, ``postgresql://…``, ``sqlite:///…``, ``memory:``.
        sweep: Whether this process removes expired records.
    """

    url: str
    sweep: bool = True


class Record(msgspec.Struct, frozen=True):
    """Fields, and in how many seconds they expire; None means never."""

    fields: dict[str, bytes]
    ttl: float | None = None


class ScanFilter(msgspec.Struct, frozen=True):
    """A test of one field in a scan. A record without the field passes only ``ne``."""

    field: str
    op: Literal["eq", "ne", "lt", "le", "gt", "ge"]
    value: bytes
    max_results: int | None = None

    @property
    def where(self) -> Filter:
        """The same test as a filter of the store."""
        return Filter((Test(self.field, self.op, (b"\0" + _check_bytes(self.field, self.value),), raw=True),))


class StateStore:
    """A store of records. Open it with `connect`, and close it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._separator = ":" if store.traits.engine == "redis" else "."

    @classmethod
    async def connect(cls, config: StateStoreConfig | str) -> Self:
        """Open the store of a config or a URL."""
        config = StateStoreConfig(config) if isinstance(config, str) else config
        return cls(await open_store(config.url, sweep=config.sweep))

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def ping(self) -> bool:
        """Whether the engine replies."""
        try:
            await self._store.status()
        except TransientError:
            return False
        return True

    # Whole records ------------------------------------------------------------

    async def get(self, key: str) -> Record | None:
        """The record under a key, with the time it has left; None when it is absent."""
        store, name = self._resolve(key)
        entry = await store.record(name).entry()
        if entry is None:
            return None
        if entry.expires_ms is None:
            return _record(entry, None)
        now_ms = (await store.status()).now_ms
        return _record(entry, max(0.0, (entry.expires_ms - now_ms) / 1000))

    async def put(self, key: str, record: Record | Mapping[str, bytes], ttl: float | timedelta | None = None) -> None:
        """Replace the whole record, in one step. Fields that are not in the new record are removed."""
        fields, record_ttl = (record.fields, record.ttl) if isinstance(record, Record) else (record, None)
        store, name = self._resolve(key)
        await store.record(name).put(_check_fields(fields), ttl=record_ttl if ttl is None else ttl)

    async def delete(self, key: str) -> bool:
        """End a record. False when there was none."""
        store, name = self._resolve(key)
        return await store.delete(name)

    async def touch(self, key: str, ttl: float | timedelta | None) -> bool:
        """Change only when a record expires; None for never. False when it is absent."""
        store, name = self._resolve(key)
        commit = await store.batch().touch(name, ttl)._make_brief().commit()
        return commit.entries[0] is not None

    # Fields -------------------------------------------------------------------

    async def get_field(self, key: str, field: str) -> bytes | None:
        """One field; None when there is no such record or field."""
        store, name = self._resolve(key)
        entry = await store.record(name).entry()
        return None if entry is None else _record(entry, None).fields.get(field)

    async def set_field(self, key: str, field: str, value: bytes | None) -> None:
        """Write one field and leave the others alone; None clears it."""
        await self.set_fields(key, {field: value})

    async def set_fields(
        self,
        key: str,
        fields: Mapping[str, bytes | None],
        *,
        fence: Fencing | Fence | None = None,
    ) -> None:
        """Write some fields and leave the others alone; None clears one. An absent record is made."""
        store, name = self._resolve(key)
        draft = store.batch().set(name, _replace_none(fields))._make_brief()
        await (draft if fence is None else draft.fence(fence)).commit()

    async def compare_and_swap(
        self,
        key: str,
        field: str,
        expected: bytes | None,
        new: bytes,
        *,
        set: Mapping[str, bytes | None] | None = None,
    ) -> bool:
        """Write a field, and others with it, if it holds the expected value. Of several callers, one wins.

        Args:
            key: The record.
            field: The field that decides.
            expected: The value that it must hold; None means that it must not exist.
            new: The value to write.
            set: Further fields to write in the same step; None clears one.
        """
        store, name = self._resolve(key)
        wanted: bytes | Sentinel = ABSENT if expected is None else _check_bytes(field, expected)
        further = None if set is None else _replace_none(set)
        return await store.record(name).swap(field, wanted, _check_bytes(field, new), set=further)

    # Finding ------------------------------------------------------------------

    async def scan(
        self, prefix: str, filter: ScanFilter | None = None, *, fields: Collection[str] | None = None
    ) -> AsyncIterator[tuple[str, Record]]:
        """The records under a prefix, in order of their keys. The prefix names the namespace.

        With ``fields``, the records have only these fields, and the others are not decoded.
        """
        space, dot, rest = check_key(prefix).partition(".")
        if filter is not None and not isinstance(filter, ScanFilter):
            raise InvalidValue(f"a filter is a ScanFilter, not something of type {type(filter).__name__}")
        if isinstance(fields, str | bytes):
            raise InvalidValue("fields is a list of names, such as ['state'], not one name")
        if not dot:
            raise InvalidKey(prefix, "a prefix needs a whole first segment, which is the namespace: 'gbe.'")
        store = self._store.namespace(check_namespace(space))
        now_ms = (await store.status()).now_ms
        left = None if filter is None or filter.max_results is None else check_number(filter.max_results, "max_results")
        async for entry in store.scan(self._inner(prefix, rest), where=None if filter is None else filter.where):
            if left == 0:
                return
            if entry.kind != "record":
                continue
            ttl = None if entry.expires_ms is None else max(0.0, (entry.expires_ms - now_ms) / 1000)
            left = None if left is None else left - 1
            yield f"{space}.{entry.key.replace(self._separator, '.')}", _record(entry, ttl, fields)

    async def index(self, prefix: str, field: str) -> bool:
        """Keep an index of a field, so that scans that filter by it need not read every record.

        It covers the whole namespace that the prefix names. Fields of decimal digits are indexed as numbers.
        """
        return await self._store.namespace(check_namespace(check_key(prefix).partition(".")[0])).index(field)

    def task(self, task_type: str, task_id: str, *, root: str = "gbe.state.tasks") -> Task:
        """The state of one task: ``gbe.state.tasks.{task_type}.{task_id}``."""
        return Task(self, f"{root}.{task_type}.{task_id}", task_type, task_id)

    async def now_ms(self, key: str) -> int:
        """The time of the engine, in milliseconds since 1970."""
        store, _ = self._resolve(key)
        return (await store.status()).now_ms

    def _resolve(self, key: str) -> tuple[Store, str]:
        """The namespace of a key, and the key in it."""
        space, dot, rest = check_key(key).partition(".")
        if not dot or not rest:
            raise InvalidKey(key, "it needs a first segment, which is the namespace, a dot and more: 'gbe.state.x'")
        return self._store.namespace(check_namespace(space)), self._inner(key, rest)

    def _inner(self, key: str, rest: str) -> str:
        if ":" in rest:
            raise InvalidKey(
                key, "segments are joined by dots; a colon is not allowed, because it stands for a dot on Redis"
            )
        return rest.replace(".", self._separator)


def _record(entry: Entry, ttl: float | None, only: Collection[str] | None = None) -> Record:
    """The fields of an entry as bytes; JSON that others wrote there is its text."""
    assert isinstance(entry.stored, Mapping)
    stored = entry.stored.items()
    return Record({name: item.removeprefix(b"\0") for name, item in stored if only is None or name in only}, ttl)


def _check_bytes(name: str, value: object) -> bytes:
    if not isinstance(value, bytes):
        raise InvalidValue(f"field {name!r} must be bytes, not of type {type(value).__name__}: encode it first")
    return value


def _check_fields(fields: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: _check_bytes(name, value) for name, value in as_fields(fields).items()}


def _replace_none(fields: Mapping[str, bytes | None]) -> dict[str, bytes | Sentinel]:
    return {name: ABSENT if value is None else _check_bytes(name, value) for name, value in as_fields(fields).items()}


# Tasks ------------------------------------------------------------------------


class Task:
    """The state of one task, and the steps that a worker takes with it.

    A worker that claims a task gets a token, and each further step needs the token that the task has then. So a worker
    that was thought dead, and whose task was given to another, changes nothing.
    """

    def __init__(self, states: StateStore, key: str, task_type: str, task_id: str) -> None:
        self._states = states
        self.key = key
        self.task_type = task_type
        self.task_id = task_id

    async def create(self, **fields: str | int | None) -> bool:
        """Make the task, pending. False when it exists already."""
        now_ms = await self._states.now_ms(self.key)
        described: Plain = {
            "task_type": self.task_type,
            "task_id": self.task_id,
            "created_at": now_ms,
            "updated_at": now_ms,
        }
        store, name = self._states._resolve(self.key)
        try:
            await store.create(name, Fields(_encode({**described, **fields, "state": "pending"})))
        except Conflict:
            return False
        return True

    async def fields(self) -> dict[str, str] | None:
        """Its fields as text; None when there is no such task."""
        record = await self._states.get(self.key)
        return None if record is None else {name: value.decode() for name, value in record.fields.items()}

    async def claim(self, worker: str, *, timeout_s: float) -> str | None:
        """Take a pending task, in one step: its token, or None when another worker has it."""
        now_ms = await self._states.now_ms(self.key)
        token = new_request_id()
        times = {"updated_at": now_ms, "timeout_at": now_ms + _ms(timeout_s, "timeout_s")}
        fields = _encode_or_clear({"worker": worker, "claim": token, **times})
        taken = await self._states.compare_and_swap(self.key, "state", b"pending", b"claimed", set=fields)
        return token if taken else None

    async def step(self, token: str, number: int, *, timeout_s: float) -> bool:
        """Record that a step is done. False when another worker has the task by now."""
        now_ms = await self._states.now_ms(self.key)
        more: Plain = {"state": "running", "current_step": number, "timeout_at": now_ms + _ms(timeout_s, "timeout_s")}
        return await self._move(token, token, now_ms, more)

    async def complete(self, token: str, *, result_ref: str | None = None) -> bool:
        """Record that the task is completed. Of all workers that ever held it, one gets True."""
        return await self._finish(token, "completed", {"result_ref": result_ref})

    async def fail(self, token: str, error: str) -> bool:
        """Record that the task failed."""
        return await self._finish(token, "failed", {"error": error})

    async def _finish(self, token: str, state: TaskState, more: Mapping[str, str | None]) -> bool:
        now_ms = await self._states.now_ms(self.key)
        return await self._move(token, f"{state} {token}", now_ms, {"state": state, "timeout_at": None, **more})

    async def _move(self, token: str, after: str, now_ms: int, more: Plain) -> bool:
        fields = _encode_or_clear({**more, "updated_at": now_ms})
        token = check_text(token, "the token of a task")
        return await self._states.compare_and_swap(self.key, "claim", token.encode(), after.encode(), set=fields)


async def requeue_stuck(
    states: StateStore,
    prefix: str,
    publish: Callable[[str, Record], Awaitable[None]],
    *,
    threshold_s: float,
) -> int:
    """Give back tasks that were not updated for too long: one pass of a sweeper.

    A task is made pending before it is published, with a compare-and-swap; so two sweepers at once publish it once. If
    a sweeper dies in between, the next pass finds the task again.

    Returns:
        How many tasks this pass gave back.
    """
    given_back = 0
    now_ms = await states.now_ms(f"{prefix.rstrip('.')}.x")
    stuck = ScanFilter("updated_at", "lt", b"%d" % (now_ms - _ms(threshold_s, "threshold_s")))
    async for key, record in states.scan(prefix, stuck, fields=("state", "updated_at")):
        if record.fields.get("state", b"").decode() in TERMINAL:
            continue
        reset: dict[str, bytes | None] = {"state": b"pending", "claim": None, "worker": None, "timeout_at": None}
        seen = record.fields["updated_at"]
        if await states.compare_and_swap(key, "updated_at", seen, b"%d" % now_ms, set=reset):
            await publish(key, await states.get(key) or record)
            given_back += 1
    return given_back


def _ms(seconds: object, what: str) -> int:
    """Seconds as milliseconds, at most as many as a time to live may have."""
    found = check_wait(seconds, what)
    if found > TTL_S_MAX:
        raise InvalidValue(f"{what} must not be more than a hundred years")
    return int(1000 * found)


def _encode(fields: Plain) -> dict[str, bytes]:
    return {name: _text(name, value) for name, value in fields.items() if value is not None}


def _encode_or_clear(fields: Plain) -> dict[str, bytes | None]:
    return {name: None if value is None else _text(name, value) for name, value in fields.items()}


def _text(name: str, value: object) -> bytes:
    """A field of a task: text, or a number as text."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidValue(f"field {name!r} of a task must be a str or an int, not of type {type(value).__name__}")
    try:
        return str(value).encode()
    except ValueError:
        raise InvalidValue(f"field {name!r} of a task holds a lone surrogate, or too large a number") from None
