"""Elections: one of several candidates leads, and a former leader cannot write as the leader.

The lead is the lock of the election's name, renewed until it is resigned or lost. So its
token is greater than that of every earlier leader, ``fence=election`` is checked in the
commit it guards, and a leader that was paused past its lease is refused. A lock taken by
hand under that name makes candidates wait as well.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from limpet.draft import Fence
from limpet.errors import Closed, Compacted, InvalidValue, LockExpired
from limpet.keys import key_span
from limpet.lock import RETRY_S, Lock, LockInfo, lock_info
from limpet.waiters import topic_of

if TYPE_CHECKING:
    from limpet.session import Session

__all__ = ["Election"]


class Election:
    """A candidate in an election. This handle leads, not the task or thread that uses it.

    Use it with ``async with``: the body runs while it leads, and when the lead is lost the body
    is cancelled and `LockLost` is raised, unless ``cancel=False``. Or `campaign` and `resign` by
    hand, and check ``lost``.
    """

    _make_lock: Callable[..., Lock] = Lock

    def __init__(
        self,
        session: Session,
        namespace: str,
        name: str,
        *,
        ttl: float | timedelta,
        wait: float | None = None,
        candidate: str | None = None,
        cancel: bool = True,
    ) -> None:
        self._session = session
        self._namespace = namespace
        self._ttl = ttl
        self._wait_s = math.inf if wait is None else wait
        self._candidate = candidate
        self._cancel = cancel
        self._lock = self._new_lock(name, cancel=cancel)

    @property
    def name(self) -> str:
        """The name of the election."""
        return self._lock.name

    @property
    def token(self) -> int | None:
        """The fencing token of the last lead; None before the first. It stays readable when the lead is over."""
        return self._lock.token

    @property
    def lost(self) -> bool:
        """Whether it led and then lost the lead."""
        return self._lock.lost

    @property
    def fence(self) -> Fence:
        """The name and token, to fence writes with."""
        return self._lock.fence

    def check(self) -> None:
        """Raise `LockLost` when the lead is lost, or when its lease may be over by now."""
        self._lock.check()

    async def campaign(self) -> Self:
        """Wait until no one else leads, and lead: until `resign`, or until the lead is lost. Raises `LockHeld`."""
        await self._lead(cancel=False)
        return self

    async def resign(self) -> None:
        """Give up the lead. Raises `LockExpired` or `LockNotHeld` when this candidate does not lead."""
        await self._lock.release()

    async def __aenter__(self) -> Self:
        await self._lead(cancel=self._cancel)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self._lock.__aexit__(kind, error, trace)

    async def leader(self) -> LockInfo | None:
        """The current leader, its token and remaining seconds; None when no one leads."""
        entry = await self._session.read(self._namespace, self.name, family="lock")
        if entry is None:
            return None
        status = await self._session.retry(lambda: self._session.engine.status(self._namespace))
        return lock_info(entry, status.now_ms)

    async def observe(self) -> AsyncIterator[LockInfo | None]:
        """The current leader, and again whenever it changes; None while no one leads. Ends when the store closes."""
        leader = await self.leader()
        with contextlib.suppress(Closed):
            while True:
                yield leader
                leader = await self._await_change(leader)

    async def _await_change(self, known: LockInfo | None) -> LockInfo | None:
        """Wait until the leader is another than the known one."""
        while True:
            try:
                return await self._follow_change(known)
            except Compacted:
                # The log has a gap, as after a restored backup. The present leader can still be read.
                await self._session.clock.sleep(RETRY_S)

    async def _follow_change(self, known: LockInfo | None) -> LockInfo | None:
        """Follow the log from now on until the leader is another than the known one."""
        hub = self._session.hub(self._namespace)
        after = (await hub.join()).revision
        try:
            while _token(leader := await self.leader()) == _token(known):
                has_changed = False
                while not has_changed:
                    page = await self._session.retry(functools.partial(hub.changes, after, None))
                    if page is None:
                        after = max(after, await hub.wait(topic_of(key_span(self.name), "lock")))
                        continue
                    after = page.next_after
                    has_changed = any(change.family == "lock" and change.key == self.name for change in page.changes)
        finally:
            hub.leave()
        return leader

    async def _lead(self, *, cancel: bool) -> None:
        if self._lock._is_held and not self.lost:
            # A leader whose fenced write was refused may campaign again before its renewal has noticed the loss.
            with contextlib.suppress(LockExpired):
                await self._lock.refresh()
                raise InvalidValue(f"this candidate leads {self.name!r} already")
        # A new lock for each lead, so that a task left over from a lost one cannot disturb the next.
        lock = self._new_lock(self.name, cancel=cancel)
        await lock.__aenter__()
        self._lock = lock

    def _new_lock(self, name: str, *, cancel: bool) -> Lock:
        return self._make_lock(
            self._session,
            self._namespace,
            name,
            ttl=self._ttl,
            wait=self._wait_s,
            holder=self._candidate,
            cancel=cancel,
        )

    def __repr__(self) -> str:
        state = "lost" if self.lost else "following" if not self._lock._is_held else f"leading, token {self.token}"
        return f"Election({self.name!r}, {state})"


def _token(leader: LockInfo | None) -> int | None:
    return None if leader is None else leader.token
