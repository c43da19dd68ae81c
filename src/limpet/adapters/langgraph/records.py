"""How checkpoints and their writes are stored.

    checkpoint/THREAD/NAMESPACE/CHECKPOINT             a checkpoint with its metadata and its parent
    checkpoint/THREAD/NAMESPACE/CHECKPOINT/TASK        the writes of one task on it

The ids of checkpoints grow with time, so the newest is the last of its namespace, and one scan backwards has a history
with its writes. What the framework's serializer makes is stored as it is, in one raw value for an entry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final

import msgspec
from langgraph.checkpoint.base import CheckpointTuple, writes_sort_key
from langgraph.checkpoint.serde.base import SerializerProtocol

import limpet
from limpet.adapters.langgraph.keys import join
from limpet.errors import Corrupt

__all__ = ["Found", "Stored", "StoredWrite", "StoredWrites", "decode_writes", "newest_id", "read", "scan"]

PAGE: Final = 500

Typed = tuple[str, bytes]


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="checkpoint"):
    """A stored checkpoint."""

    thread_id: str
    checkpoint_ns: str
    id: str
    parent_id: str | None
    checkpoint: Typed
    metadata: Typed


class StoredWrite(msgspec.Struct, frozen=True, array_like=True):
    """One write of a task: to a channel, under an index that says which of the task's writes it is."""

    index: int
    channel: str
    value: Typed


class StoredWrites(msgspec.Struct, frozen=True, array_like=True, tag="writes"):
    """The stored writes of a task."""

    checkpoint_id: str
    task_id: str
    # By index: the path differs between calls for one task.
    writes: dict[int, tuple[str, StoredWrite]]


_decoder: msgspec.msgpack.Decoder[Stored | StoredWrites] = msgspec.msgpack.Decoder(Stored | StoredWrites)
encode = msgspec.msgpack.Encoder().encode


def decode(entry: limpet.Entry) -> Stored | StoredWrites:
    """Read an entry."""
    try:
        return _decoder.decode(entry.value)
    except (msgspec.MsgspecError, TypeError) as error:
        raise Corrupt(f"{entry.key!r} holds no checkpoint that this version can read") from error


def decode_writes(entry: limpet.Entry) -> StoredWrites:
    """Read an entry that has the writes of a task."""
    found = decode(entry)
    if not isinstance(found, StoredWrites):
        raise Corrupt(f"{entry.key!r} holds no writes of a task")
    return found


class Found(msgspec.Struct, frozen=True):
    """A checkpoint with the writes on it."""

    stored: Stored
    writes: list[StoredWrites]

    def all_keys(self) -> list[str]:
        """The keys of the checkpoint and of the writes on it, these first."""
        head = key_of(self.stored.thread_id, self.stored.checkpoint_ns, self.stored.id)
        return [*(f"{head}/{join(each.task_id)}" for each in self.writes), head]

    def moved_to(self, thread_id: str) -> Iterator[tuple[str, bytes]]:
        """The keys and values of the same checkpoint in another thread."""
        moved = msgspec.structs.replace(self.stored, thread_id=thread_id)
        keys = Found(moved, self.writes).all_keys()
        yield from zip(keys, map(encode, (*self.writes, moved)), strict=True)

    def metadata(self, serde: SerializerProtocol) -> Any:
        """Read the metadata."""
        return serde.loads_typed(self.stored.metadata)

    def as_tuple(self, serde: SerializerProtocol, metadata: Any = None) -> CheckpointTuple:
        """Make what the framework calls a checkpoint tuple."""
        stored = self.stored
        written = [
            (writes_sort_key(path, each.task_id, write.index), each.task_id, write)
            for each in self.writes
            for path, write in each.writes.values()
        ]
        written.sort(key=lambda found: found[0])
        return CheckpointTuple(
            config=config_of(stored, stored.id),
            checkpoint=serde.loads_typed(stored.checkpoint),
            metadata=self.metadata(serde) if metadata is None else metadata,
            parent_config=config_of(stored, stored.parent_id) if stored.parent_id else None,
            pending_writes=[(task, write.channel, serde.loads_typed(write.value)) for _, task, write in written],
        )


def config_of(stored: Stored, checkpoint_id: str) -> Any:
    """Make the config that names a checkpoint."""
    names = {
        "thread_id": stored.thread_id,
        "checkpoint_ns": stored.checkpoint_ns,
        "checkpoint_id": checkpoint_id,
    }
    return {"configurable": names}


def prefix_of(*parts: str) -> str:
    """The prefix of all checkpoints, of those of a thread, or of those of a namespace of it."""
    return join("checkpoint", *parts, "")


def key_of(thread_id: str, checkpoint_ns: str, checkpoint_id: str) -> str:
    """The key of a checkpoint."""
    return join("checkpoint", thread_id, checkpoint_ns, checkpoint_id)


async def read(store: limpet.Store, thread_id: str, checkpoint_ns: str, checkpoint_id: str | None) -> Found | None:
    """Read a checkpoint with its writes: the newest, or the one of an id."""
    if checkpoint_id is None:
        return await _read_newest(store, thread_id, checkpoint_ns)
    key = key_of(thread_id, checkpoint_ns, checkpoint_id)
    entry = await store.entry(key)
    if entry is None:
        return None
    writes = [decode_writes(each) async for each in store.scan(f"{key}/")]
    return Found(_checkpoint(entry), writes)


async def _read_newest(store: limpet.Store, thread_id: str, checkpoint_ns: str) -> Found | None:
    prefix, after = prefix_of(thread_id, checkpoint_ns), None
    while True:
        last = await _last(store, prefix, after)
        if last is None:
            return None
        found = decode(last)
        if isinstance(found, Stored):
            # The writes of a checkpoint sort behind it, so this one has none.
            return Found(found, [])
        complete = await read(store, thread_id, checkpoint_ns, found.checkpoint_id)
        if complete is not None:
            return complete
        # The process ended between a task's writes and the checkpoint that they are of.
        after = key_of(thread_id, checkpoint_ns, found.checkpoint_id)


async def newest_id(store: limpet.Store, thread_id: str, checkpoint_ns: str) -> str | None:
    """The id of the newest checkpoint."""
    found = await _read_newest(store, thread_id, checkpoint_ns)
    return None if found is None else found.stored.id


async def _last(store: limpet.Store, prefix: str, after: str | None) -> limpet.Entry | None:
    async for entry in store.scan(prefix, reverse=True, limit=1, after=after):
        return entry
    return None


async def scan(
    store: limpet.Store, *parts: str, before: str | None = None, limit: int | None = None
) -> AsyncIterator[Found]:
    """Iterate over checkpoints with their writes, the newest of a namespace first.

    ``limit`` is how many a caller is likely to take, so that no more is read than that.
    """
    prefix, after = prefix_of(*parts), before
    size = PAGE if limit is None else min(PAGE, 2 * limit + 8)
    waiting: dict[tuple[str, str], list[StoredWrites]] = {}
    while True:
        count = 0
        async for entry in store.scan(prefix, reverse=True, after=after, limit=size):
            count, after = count + 1, entry.key
            found = decode(entry)
            if isinstance(found, Stored):
                yield Found(found, waiting.pop((entry.key, found.id), []))
            else:
                head = entry.key.rpartition("/")[0]
                waiting.setdefault((head, found.checkpoint_id), []).append(found)
        if count < size:
            return
        size = PAGE


def _checkpoint(entry: limpet.Entry) -> Stored:
    found = decode(entry)
    if not isinstance(found, Stored):
        raise Corrupt(f"{entry.key!r} holds no checkpoint")
    return found


def merge(found: StoredWrites, new: StoredWrites) -> StoredWrites:
    """Add writes to those that are stored. Of two with one index the first stays, unless the index is special.

    A retry writes the same again; the special ones (errors, interrupts, what resumes them) are written anew.
    """
    kept = {index: write for index, write in new.writes.items() if index < 0 or index not in found.writes}
    return StoredWrites(found.checkpoint_id, found.task_id, {**found.writes, **kept})


def make_writes(checkpoint_id: str, task_id: str, task_path: str, writes: Iterable[StoredWrite]) -> StoredWrites:
    """Make the stored form of a task's writes."""
    return StoredWrites(checkpoint_id, task_id, {write.index: (task_path, write) for write in writes})
