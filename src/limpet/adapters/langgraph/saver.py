"""The checkpointer: what LangGraph needs to interrupt, resume, replay and branch a graph.

A checkpoint is one entry, and so are the writes of a task on it; `records` tells how they are stored. With ``own`` a
thread has one writer, see `ownership`.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_id,
    get_serializable_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, TASKS

import limpet
from limpet import sync
from limpet.adapters.langgraph import records
from limpet.adapters.langgraph.keys import join
from limpet.adapters.langgraph.ownership import Owners, Run, ThreadLost, owner_key
from limpet.adapters.langgraph.records import Found, StoredWrite
from limpet.adapters.langgraph.source import Source
from limpet.draft import Draft, Fence
from limpet.errors import Conflict, InvalidValue
from limpet.keys import BATCH_WRITES_MAX

__all__ = ["Saver"]

LEASE_S: Final = 60.0
RUNTIME: Final = "__pregel_runtime"

# The channels that start nodes in a compiled graph of states. After a step that wrote to none of them, it is done.
_STARTS: Final = ("branch:", "join:", TASKS)


class Saver(BaseCheckpointSaver[str]):
    """A LangGraph checkpointer on any engine, whose threads have one writer each.

    Args:
        store: A URL, or a store opened by `limpet.open` or `limpet.sync.open`. A URL is opened at the first call, in
            the namespace ``langgraph``, and closed by `aclose` or `close`. A store that is given stays open.
        own: Whether a run owns its thread while it runs. Without it, two runs of one thread fork it.
        lease: How many seconds a thread stays owned by a run that writes nothing more and has not ended.
        serde: The serializer of values; LangGraph's own when not given.
    """

    def __init__(
        self,
        store: limpet.Store | sync.Store | str,
        own: bool = True,
        *,
        lease: float = LEASE_S,
        serde: SerializerProtocol | None = None,
    ) -> None:
        super().__init__(serde=serde)
        self._source = Source(store, "langgraph")
        self._owners = Owners(lease)
        self._own = own

    # Reading, awaited -----------------------------------------------------------------

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that a config names, or the newest of its thread."""
        return await self._source.arun(lambda store: self._get(store, config))

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Checkpoints, the newest of a thread first."""
        async for found in self._source.aiterate(lambda store: self._list(store, config, filter, before, limit)):
            yield found

    # Writing, awaited -----------------------------------------------------------------

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint. Raises `ThreadOwned` or `ThreadLost`."""
        return await self._source.arun(lambda store: self._put(store, config, checkpoint, metadata))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store the writes of a task; what a retry writes again stays as it is."""
        await self._source.arun(lambda store: self._put_writes(store, config, writes, task_id, task_path))

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete a thread. Raises `ThreadOwned` while a run owns it."""
        await self._source.arun(lambda store: self._delete_thread(store, thread_id))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints whose metadata have one of these run ids. Reads the metadata of all threads."""
        await self._source.arun(lambda store: self._delete_for_runs(store, run_ids))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all checkpoints of a thread, with their writes, to another."""
        await self._source.arun(lambda store: self._copy_thread(store, source_thread_id, target_thread_id))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete all checkpoints of threads but the newest of each namespace, or with ``delete`` all of them."""
        await self._source.arun(lambda store: self._prune(store, thread_ids, strategy))

    async def atake_over(self, thread_id: str) -> bool:
        """Own a thread for the next run of this saver, now; its owner's late writes are refused.

        For a run that is known to be dead, when its lease should not be waited for. False if no run owned it.
        """
        return await self._source.arun(lambda store: self._owners.take_over(store, thread_id))

    async def aclose(self) -> None:
        """Close what was opened from a URL."""
        await self._source.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # The same without await -----------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See `aget_tuple`."""
        return self._source.run(lambda store: self._get(store, config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """See `alist`."""
        yield from self._source.iterate(lambda store: self._list(store, config, filter, before, limit))

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See `aput`."""
        return self._source.run(lambda store: self._put(store, config, checkpoint, metadata))

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """See `aput_writes`."""
        self._source.run(lambda store: self._put_writes(store, config, writes, task_id, task_path))

    def delete_thread(self, thread_id: str) -> None:
        """See `adelete_thread`."""
        self._source.run(lambda store: self._delete_thread(store, thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """See `adelete_for_runs`."""
        self._source.run(lambda store: self._delete_for_runs(store, run_ids))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """See `acopy_thread`."""
        self._source.run(lambda store: self._copy_thread(store, source_thread_id, target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """See `aprune`."""
        self._source.run(lambda store: self._prune(store, thread_ids, strategy))

    def take_over(self, thread_id: str) -> bool:
        """See `atake_over`."""
        return self._source.run(lambda store: self._owners.take_over(store, thread_id))

    def close(self) -> None:
        """Close what was opened from a URL by methods without await."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get_next_version(self, current: str | None, channel: None) -> str:
        """The version of a channel that comes after another. Text, so that it sorts the same everywhere."""
        number = 0 if current is None else int(str(current).partition(".")[0])
        return f"{number + 1:032}"

    # The work -------------------------------------------------------------------------

    async def _get(self, store: limpet.Store, config: RunnableConfig) -> CheckpointTuple | None:
        thread_id, checkpoint_ns = _place_of(config)
        run = self._owners.run_of(thread_id, config["configurable"].get(RUNTIME)) if self._own else None
        if run is not None and checkpoint_ns == "":
            # The first thing a run does. One that may not write is stopped before its nodes have any effect.
            await self._owners.begin(store, run, thread_id)
        found = await records.read(store, thread_id, checkpoint_ns, get_checkpoint_id(config))
        return None if found is None else found.as_tuple(self.serde)

    async def _list(
        self,
        store: limpet.Store,
        config: RunnableConfig | None,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> AsyncIterator[CheckpointTuple]:
        names: Mapping[str, Any] = {} if config is None else config["configurable"]
        only, earlier = names.get("checkpoint_id"), None if before is None else get_checkpoint_id(before)
        parts = [str(names[name]) for name in ("thread_id", "checkpoint_ns") if name in names]
        start = records.key_of(parts[0], parts[1], earlier) if earlier and len(parts) == 2 else None
        left = limit
        async for found in records.scan(store, *parts, before=start, limit=limit):
            if left is not None and left <= 0:
                return
            if (only and found.stored.id != only) or (earlier and found.stored.id >= earlier):
                continue
            metadata = found.metadata(self.serde)
            if filter and any(metadata.get(name) != value for name, value in filter.items()):
                continue
            left = None if left is None else left - 1
            yield found.as_tuple(self.serde, metadata)

    async def _put(
        self, store: limpet.Store, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata
    ) -> RunnableConfig:
        thread_id, checkpoint_ns = _place_of(config)
        parent_id: str | None = config["configurable"].get("checkpoint_id")
        stored = records.Stored(
            thread_id,
            checkpoint_ns,
            checkpoint["id"],
            parent_id,
            self.serde.dumps_typed(checkpoint),
            self.serde.dumps_typed(get_serializable_checkpoint_metadata(config, metadata)),
        )
        key, value = records.key_of(thread_id, checkpoint_ns, stored.id), records.encode(stored)

        def draw() -> Draft:
            return store.batch().put(key, value)

        ends = "last" if checkpoint_ns == "" and _is_last(checkpoint, metadata) else None
        await self._write(store, config, draw, is_checkpoint=True, ends=ends)
        return records.config_of(stored, stored.id)  # type: ignore[no-any-return]

    async def _put_writes(
        self,
        store: limpet.Store,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str,
    ) -> None:
        thread_id, checkpoint_ns = _place_of(config)
        checkpoint_id: str = config["configurable"]["checkpoint_id"]
        made = [
            StoredWrite(WRITES_IDX_MAP.get(channel, index), channel, self.serde.dumps_typed(value))
            for index, (channel, value) in enumerate(writes)
        ]
        if not made:
            return None
        new = records.make_writes(checkpoint_id, task_id, task_path, made)
        key = records.key_of(thread_id, checkpoint_ns, checkpoint_id) + "/" + join(task_id)
        found: limpet.Entry | None = None

        def draw() -> Draft:
            merged = new if found is None else records.merge(records.decode_writes(found), new)
            return store.batch().expect(key, found).put(key, records.encode(merged))

        is_end = checkpoint_ns == "" and any(channel in (ERROR, INTERRUPT) for channel, _ in writes)
        while True:
            try:
                return await self._write(store, config, draw, is_checkpoint=False, ends="stopped" if is_end else None)
            except Conflict as conflict:
                if conflict.key != key:
                    raise
                found = conflict.current

    async def _write(
        self,
        store: limpet.Store,
        config: RunnableConfig,
        draw: Callable[[], Draft],
        *,
        is_checkpoint: bool,
        ends: str | None,
    ) -> None:
        thread_id, _ = _place_of(config)
        if not self._own:
            await draw().commit()
        elif (run := self._owners.run_of(thread_id, config["configurable"].get(RUNTIME))) is not None:
            await self._owners.commit(store, run, thread_id, draw, is_checkpoint=is_checkpoint, ends=ends)
        elif is_checkpoint and "metadata" in config and "checkpoint_id" not in config["metadata"]:
            await self._update(store, config, draw)
        else:
            await self._owners.commit_free(store, thread_id, draw)

    async def _update(self, store: limpet.Store, config: RunnableConfig, draw: Callable[[], Draft]) -> None:
        """Store a state that was changed by hand, if the thread is still where it was read.

        A caller of update_state that names a checkpoint wants a branch of it, and does not come here.
        """
        thread_id, checkpoint_ns = _place_of(config)
        async with self._owning(store, thread_id) as fence:
            newest = await records.newest_id(store, thread_id, checkpoint_ns)
            if newest != config["configurable"].get("checkpoint_id"):
                raise ThreadLost(thread_id)
            assert fence is not None
            await draw().fence(fence).commit()

    # Whole threads --------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _owning(self, store: limpet.Store, thread_id: str) -> AsyncIterator[Fence | None]:
        """Own a thread for work on all of it."""
        if not self._own:
            yield None
            return
        run = Run(None)
        fence = await self._owners.hold(store, run, thread_id)
        try:
            yield fence
        finally:
            await self._owners.release(store, run, thread_id)

    async def _delete_thread(self, store: limpet.Store, thread_id: str) -> None:
        async with self._owning(store, thread_id) as fence:
            await store.delete_prefix(records.prefix_of(thread_id), fence=fence)
            await store.delete(owner_key(thread_id), fence=fence)

    async def _delete_for_runs(self, store: limpet.Store, run_ids: Sequence[str]) -> None:
        wanted = set(run_ids)
        doomed: dict[str, builtins.list[Found]] = {}
        if wanted:
            async for found in records.scan(store):
                if found.metadata(self.serde).get("run_id") in wanted:
                    doomed.setdefault(found.stored.thread_id, []).append(found)
        for thread_id, each in doomed.items():
            await self._delete(store, thread_id, each)

    async def _copy_thread(self, store: limpet.Store, source: str, target: str) -> None:
        if source == target:
            raise InvalidValue("a thread cannot be copied to itself")
        async with self._owning(store, target) as fence:
            async for found in records.scan(store, source):
                # One by one, because a checkpoint and its writes may be more than fits in a batch.
                for key, value in found.moved_to(target):
                    await store.put(key, value, fence=fence)

    async def _prune(self, store: limpet.Store, thread_ids: Sequence[str], strategy: str) -> None:
        if strategy not in ("keep_latest", "delete"):
            raise InvalidValue(f"a strategy is 'keep_latest' or 'delete', not {strategy!r}")
        for thread_id in thread_ids:
            if strategy == "delete":
                await self._delete_thread(store, thread_id)
                continue
            found = [each async for each in records.scan(store, thread_id)]
            kept = _latest(found, self.serde)
            await self._delete(store, thread_id, [each for each in found if each.stored not in kept])

    async def _delete(self, store: limpet.Store, thread_id: str, found: Iterable[Found]) -> None:
        """Delete checkpoints of a thread with their writes."""
        keys = [key for each in found for key in each.all_keys()]
        if not keys:
            return
        async with self._owning(store, thread_id) as fence:
            for first in range(0, len(keys), BATCH_WRITES_MAX):
                draft = store.batch() if fence is None else store.batch().fence(fence)
                for key in keys[first : first + BATCH_WRITES_MAX]:
                    draft.delete(key)
                await draft.commit()


def _place_of(config: RunnableConfig) -> tuple[str, str]:
    names = config["configurable"]
    return str(names["thread_id"]), names.get("checkpoint_ns", "")


def _is_last(checkpoint: Checkpoint, metadata: CheckpointMetadata) -> bool:
    """Whether a run ends with this checkpoint, because nothing that it wrote starts a node.

    For a graph that was put together by hand from channels of any names this may be wrong. Then its run takes the
    thread again with its next write, and another run may be faster.
    """
    updated = checkpoint.get("updated_channels")
    return (
        metadata.get("source") == "loop"
        and updated is not None
        and not any(channel.startswith(_STARTS) for channel in updated)
    )


def _latest(found: Iterable[Found], serde: SerializerProtocol) -> set[Any]:
    """The checkpoints to keep: the newest of each namespace, and those that its delta channels are made up from."""
    kept: set[Any] = set()
    needs: dict[str, tuple[str | None, set[str]]] = {}
    for each in found:
        stored = each.stored
        namespace = stored.checkpoint_ns
        if namespace not in needs:
            kept.add(stored)
            deltas = set(each.metadata(serde).get("counters_since_delta_snapshot") or ())
        elif stored.id == needs[namespace][0] and needs[namespace][1]:
            kept.add(stored)
            deltas = needs[namespace][1]
        else:
            continue
        values = serde.loads_typed(stored.checkpoint)["channel_values"] if deltas else {}
        needs[namespace] = (stored.parent_id, {channel for channel in deltas if channel not in values})
    return kept
