"""Elections: one of several candidates leads, and whoever no longer does cannot write as if.

The lead is the lock of the election's name, renewed until it is resigned or lost. So its
token is greater than that of every earlier leader, ``fence=election`` is checked in the
commit it guards, and a leader that was paused past its time is refused. A lock taken by
hand under that name keeps candidates waiting as well.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from limpet.draft import Fence
from limpet.errors import Closed, Compacted, InvalidValue, LockExpired
from limpet.lock import RETRY_S, Lock, LockInfo, lock_info

if TYPE_CHECKING:
    from limpet.session import Session

__all__ = ["Election"]


class Election:
    """A candidate in an election. Whether it leads is a matter of this handle.

    Use it with ``async with``: the body runs while it leads, and when the lead is lost the body
    is cancelled and `LockLost` is raised, unless ``cancel=False``. Or `campaign` and `resign` by
    hand, and look at ``lost``.
    """

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
        """What is led."""
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
        """Raise `LockLost` when the lead is lost, or when its time may be over before anything is heard."""
        self._lock.check()

    async def campaign(self) -> Self:
        """Wait until nobody else leads, and lead: until `resign`, or until the lead is lost. Raises `LockHeld`."""
        await self._lead(cancel=False)
        return self

    async def resign(self) -> None:
        """Let another lead. Raises `LockExpired` or `LockNotHeld` when this one does not."""
        await self._lock.release()

    async def __aenter__(self) -> Self:
        await self._lead(cancel=self._cancel)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        await self._lock.__aexit__(kind, error, trace)

    async def leader(self) -> LockInfo | None:
        """Who leads now, under which token and for how many seconds more; None when nobody does."""
        entry = await self._session.read(self._namespace, self.name, family="lock")
        if entry is None:
            return None
        status = await self._session.retrying(lambda: self._session.engine.status(self._namespace))
        return lock_info(entry, status.now_ms)

    async def observe(self) -> AsyncIterator[LockInfo | None]:
        """Who leads now, and again whenever that has changed; None while nobody does. Ends when the store closes."""
        leader = await self.leader()
        with contextlib.suppress(Closed):
            while True:
                yield leader
                leader = await self._next_after(leader)

    async def _next_after(self, known: LockInfo | None) -> LockInfo | None:
        """Wait until somebody else leads than the one known."""
        while True:
            try:
                return await self._follow(known)
            except Compacted:
                # The log cannot tell what came in between, as after a restored backup. Who leads now can be read.
                await self._session.clock.sleep(RETRY_S)

    async def _follow(self, known: LockInfo | None) -> LockInfo | None:
        """Follow the log from now on until somebody else leads than the one known."""
        hub = self._session.hub(self._namespace)
        after = (await hub.join()).revision
        try:
            while _token(leader := await self.leader()) == _token(known):
                told = False
                while not told:
                    feed = await self._session.retrying(functools.partial(hub.changes, after, None))
                    if feed is None:
                        await hub.news()
                        continue
                    after = feed.next_after
                    told = any(change.family == "lock" and change.key == self.name for change in feed.changes)
        finally:
            hub.leave()
        return leader

    async def _lead(self, *, cancel: bool) -> None:
        if self._lock._is_held and not self.lost:
            # Whoever was refused a fenced write comes here before its renewal has noticed.
            with contextlib.suppress(LockExpired):
                await self._lock.refresh()
                raise InvalidValue(f"this candidate leads {self.name!r} already")
        # A lock of its own for each lead: what is left of a lost one cannot disturb the next.
        lock = self._new_lock(self.name, cancel=cancel)
        await lock.__aenter__()
        self._lock = lock

    def _new_lock(self, name: str, *, cancel: bool) -> Lock:
        return Lock(
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
