"""Who may write a thread: one run at a time, under a lease with a fencing token.

A run takes the lock of its thread before it loads it. Each write is fenced by the lock's token and renews the
lease from time to time; the write that ends the run releases the lock in the same commit. A run that dies leaves its
lease behind, and the thread can be taken when that is over, or at once by `Owners.take_over`.

A lease alone does not stop a fork: a run may pause, and write after another run has come and gone. So a run whose
lease ended takes the thread again only if no other has had it since.

LangGraph gives a checkpointer no name of a run. What all writes of one run share, those of subgraphs too, is the
`RunControl` of its runtime. That a run is over without a last write (cancelled, or stopped at a static breakpoint)
shows when the functions in its runtimes are gone.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Final

import limpet
from limpet import codec
from limpet.adapters.langgraph.keys import join
from limpet.clock import ttl_to_ms
from limpet.draft import Draft, Fence, equals
from limpet.errors import Conflict, LockLost, StateError
from limpet.model import ABSENT, Batch, Commit, Delete, Entry, Guard, HeldBy, Put, Refusal, Touch

__all__ = ["Owners", "Run", "ThreadLost", "ThreadOwned"]

RUNS_MAX: Final = 1024
ATTEMPTS: Final = 8

Draw = Callable[[], Draft]


class ThreadOwned(StateError):
    """Another run owns the thread now. Has ``thread_id``, ``holder`` and ``remaining`` seconds of its lease."""

    code = "thread_owned"

    def __init__(self, thread_id: str, *, holder: str, remaining: float) -> None:
        super().__init__(
            f"thread {thread_id!r} is owned by another run, of {holder}, for up to {remaining:.1f} s more: wait until "
            f"that run has ended and load the thread again. If it is dead, call take_over({thread_id!r}) first"
        )
        self.thread_id, self.holder, self.remaining = thread_id, holder, remaining


class ThreadLost(StateError):
    """The thread went on without this run, whose late write was refused. Has ``thread_id``."""

    code = "thread_lost"

    def __init__(self, thread_id: str) -> None:
        super().__init__(
            f"thread {thread_id!r} was continued by another run after this one loaded it, or while this one wrote "
            "nothing for longer than its lease: this write would have forked the thread and was refused. Stop this "
            "run, load the thread again, and decide"
        )
        self.thread_id = thread_id


class Run:
    """A run of a graph on one thread, as this process sees it."""

    def __init__(self, control: object) -> None:
        self.id = uuid.uuid4().hex
        # Kept, so that no later run gets the same identity.
        self.control = control
        self.token: int | None = None
        self.refreshed_at = 0.0
        self.has_owned = False
        self.ended_by: str | None = None
        self.is_finished = False
        self._signs: weakref.WeakSet[Any] = weakref.WeakSet()

    def see(self, runtime: Any) -> None:
        """Note a sign of life: a function that the run keeps until it is over."""
        self._signs.add(runtime.stream_writer)

    @property
    def is_alive(self) -> bool:
        """Whether the run may still go on in this process."""
        return len(self._signs) > 0


class Owners:
    """The runs of this process that own threads, or have owned them."""

    def __init__(self, lease_s: float) -> None:
        self._lease_ms = ttl_to_ms(lease_s)
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._runs: dict[tuple[str, int], Run] = {}
        self._claims: dict[str, int] = {}
        self._lock = threading.Lock()

    def run_of(self, thread_id: str, runtime: Any) -> Run | None:
        """Find the run that writes; None for a write that belongs to no run, such as one of update_state."""
        control = getattr(runtime, "control", None)
        if control is None:
            return None
        with self._lock:
            key = (thread_id, id(control))
            run = self._runs.get(key)
            if run is None:
                self._drop_ended()
                run = self._runs[key] = Run(control)
            run.see(runtime)
            return run

    def _drop_ended(self) -> None:
        if len(self._runs) >= RUNS_MAX:
            self._runs = {key: run for key, run in self._runs.items() if run.is_alive}

    # Writing ------------------------------------------------------------------------

    async def commit(
        self, store: limpet.Store, run: Run, thread_id: str, draw: Draw, *, is_checkpoint: bool, ends: str | None
    ) -> None:
        """Commit a write of a run under its lease; with ``ends``, the last one, which gives the thread free."""
        for _ in range(ATTEMPTS):
            if run.ended_by is not None:
                if not is_checkpoint and run.token is None:
                    return await self._commit_late(store, run, thread_id, draw)
                # The run goes on, as one whose error has a handler does. From here on each of its checkpoints takes
                # the thread and gives it free, because none is known to be the last.
                ends = ends or "stopped"
            if run.token is None:
                await self._take(store, run, thread_id)
            token, now = run.token, store._session.clock.monotonic()
            assert token is not None
            is_refresh = ends is None and (now - run.refreshed_at) * 3000 > self._lease_ms
            # Before the commit, so that a write of another task that is refused by its release sees why.
            run.ended_by = ends or run.ended_by
            try:
                await self._fence(draw(), thread_id, token, ends is not None, is_refresh).commit()
            except LockLost:
                run.token = None if run.token == token else run.token
                continue
            if is_refresh:
                run.refreshed_at = now
            if ends is not None:
                run.token, run.is_finished = None, ends == "last"
            return None
        raise ThreadLost(thread_id)

    def _fence(self, draft: Draft, thread_id: str, token: int, is_end: bool, is_refresh: bool) -> Draft:
        """Let a write happen only under the token of its thread, and release or renew the lease with it."""
        name = lock_name(thread_id)
        held = (Guard(name, HeldBy(token), "lock"),)
        if is_end:
            return draft.include(Delete(name, family="lock"), guards=held)
        if is_refresh:
            return draft.include(Touch(name, self._lease_ms, "lock"), guards=held)
        return draft.include(guards=held)

    async def _commit_late(self, store: limpet.Store, run: Run, thread_id: str, draw: Draw) -> None:
        """Commit a write of a task that comes after another task has ended their run."""
        owner = owner_key(thread_id)
        try:
            await draw().expect(owner, equals(self._mine(run))).commit()
        except Conflict as conflict:
            if conflict.key != owner:
                raise
            # The last checkpoint of the run has what this write says, so only the history would have shown it.
            if not run.is_finished:
                raise ThreadLost(thread_id) from None

    def _mine(self, run: Run) -> dict[str, str]:
        return {"holder": self._holder, "run": run.id}

    async def commit_free(self, store: limpet.Store, thread_id: str, draw: Draw) -> Commit:
        """Commit a write that belongs to no run, while no run owns the thread."""
        name = lock_name(thread_id)
        while True:
            try:
                return await draw().include(guards=(Guard(name, ABSENT, "lock"),)).commit()
            except Conflict as conflict:
                if conflict.key != name or conflict.current is None:
                    raise
                if not await self._release_dead(store, name, conflict.current):
                    raise await self._owned(store, thread_id, conflict.current) from None

    # Owning -------------------------------------------------------------------------

    async def _take(self, store: limpet.Store, run: Run, thread_id: str) -> None:
        name, owner = lock_name(thread_id), owner_key(thread_id)
        # A claim is for a run that starts, not for the one that it was made against.
        claim = None if run.has_owned else self._claims.pop(thread_id, None)
        mine = self._mine(run)
        for _ in range(ATTEMPTS):
            now = store._session.clock.monotonic()
            # A run that had the thread before takes it again only if no other has had it since.
            guards = (Guard(owner, equals(mine), "data"),) if run.has_owned else ()
            lock: Put | Touch = Put(name, codec.encode(mine), self._lease_ms, family="lock")
            held: Guard = Guard(name, ABSENT, "lock")
            if claim is not None:
                held, lock = Guard(name, HeldBy(claim), "lock"), Touch(name, self._lease_ms, "lock")
            outcome = await _commit(store, Batch((held, *guards), (lock, Put(owner, codec.encode(mine)))))
            if isinstance(outcome, Commit):
                taken = outcome.entries[0]
                assert taken is not None
                run.token, run.refreshed_at, run.has_owned = taken.created_revision, now, True
                return
            if outcome.key == owner:
                raise ThreadLost(thread_id)
            if claim is not None:
                claim = None
                continue
            if outcome.found is None:
                continue
            if outcome.found.value.get("run") == run.id:
                # Another task of this run was first.
                run.token = outcome.found.created_revision
                return
            if not await self._release_dead(store, name, outcome.found):
                if run.has_owned:
                    raise ThreadLost(thread_id)
                raise await self._owned(store, thread_id, outcome.found)
        raise ThreadLost(thread_id)

    async def _release_dead(self, store: limpet.Store, name: str, lock: Entry) -> bool:
        """Release a lock that a run of this process has left behind. False when its run may be alive."""
        run_id, token = lock.value.get("run"), lock.created_revision
        with self._lock:
            run = next((run for run in self._runs.values() if run_id == run.id or token == run.token), None)
        if run is None:
            return False
        if run.is_alive:
            # An interrupt leaves a run in reference cycles, which look like a run that goes on.
            gc.collect()
        if run.is_alive:
            return False
        await _commit(store, _release(name, token))
        run.token = None
        return True

    async def _owned(self, store: limpet.Store, thread_id: str, lock: Entry) -> ThreadOwned:
        status = await store.status()
        remaining = 0.0 if lock.expires_ms is None else max(0, lock.expires_ms - status.now_ms) / 1000
        return ThreadOwned(thread_id, holder=lock.value["holder"], remaining=remaining)

    async def begin(self, store: limpet.Store, run: Run, thread_id: str) -> None:
        """Own a thread for a run that loads it."""
        if not run.has_owned:
            await self._take(store, run, thread_id)

    async def hold(self, store: limpet.Store, run: Run, thread_id: str) -> Fence:
        """Own a thread, wherever it is, for work on all of it."""
        await self._take(store, run, thread_id)
        assert run.token is not None
        return Fence(lock_name(thread_id), run.token, store.name)

    async def release(self, store: limpet.Store, run: Run, thread_id: str) -> None:
        """Give the thread free, if the run has it."""
        if run.token is not None:
            await _commit(store, _release(lock_name(thread_id), run.token))
            run.token = None

    async def take_over(self, store: limpet.Store, thread_id: str) -> bool:
        """Fence the owner of a thread off and claim it for its next run here. False if there was none."""
        name, owner = lock_name(thread_id), owner_key(thread_id)
        mine = {"holder": self._holder, "run": "taken over"}
        had_owner = False
        for _ in range(ATTEMPTS):
            outcome = await _commit(store, Batch((), (Delete(name, family="lock"),)))
            assert isinstance(outcome, Commit)
            had_owner = had_owner or outcome.ended[0] is not None
            lock = Put(name, codec.encode(mine), self._lease_ms, family="lock")
            outcome = await _commit(
                store, Batch((Guard(name, ABSENT, "lock"),), (lock, Put(owner, codec.encode(mine))))
            )
            if isinstance(outcome, Commit):
                taken = outcome.entries[0]
                assert taken is not None
                self._claims[thread_id] = taken.created_revision
                return had_owner
        raise await self._owned(store, thread_id, _found(outcome))


def lock_name(thread_id: str) -> str:
    """The name of a thread's lock."""
    return join("thread", thread_id)


def owner_key(thread_id: str) -> str:
    """The key of the entry that names the latest owner. Unlike the lock it stays."""
    return join("owner", thread_id)


def _release(name: str, token: int) -> Batch:
    return Batch((Guard(name, HeldBy(token), "lock"),), (Delete(name, family="lock"),))


async def _commit(store: limpet.Store, batch: Batch) -> Commit | Refusal:
    return await store._session.commit(store.name, batch)


def _found(outcome: Commit | Refusal) -> Entry:
    assert isinstance(outcome, Refusal)
    assert outcome.found is not None
    return outcome.found
