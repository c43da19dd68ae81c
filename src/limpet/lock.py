"""Locks: leases with a fencing token.

A lock is an entry in the ``lock`` family of its namespace. Acquiring creates it, and the
revision that did is the token: greater than every earlier one on that name. Refreshing
touches it, which moves its revision but not its creation, so the holder's fence holds.
Because locks live in the namespace they protect, ``fence=lock`` is checked in the very
commit it guards: a holder that was paused past its time cannot write any more.

Time alone promises nothing. A holder that must be sure passes the fence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from limpet import codec
from limpet.batch import Fence
from limpet.checks import check_number
from limpet.clock import check_wait, ttl_to_ms
from limpet.errors import (
    BrokenError,
    InvalidValue,
    LimpetError,
    LockExpired,
    LockHeld,
    LockLost,
    LockNotHeld,
    TransientError,
)
from limpet.keys import check_key, check_text
from limpet.model import ABSENT, Batch, Commit, Delete, Entry, Guard, HeldBy, Put, Refusal, Touch, Write

if TYPE_CHECKING:
    from limpet.session import Session

__all__ = ["Lock", "LockInfo", "lock_info"]

RETRY_S: Final = 0.1
WAIT_TURN_S: Final = 5.0


class LockInfo(msgspec.Struct, frozen=True):
    """Who holds a lock, under which token, and for how many seconds more."""

    name: str
    holder: str
    token: int
    remaining: float


def lock_info(entry: Entry, now_ms: int) -> LockInfo:
    """What a lock's entry says, at the engine's time."""
    assert entry.expires_ms is not None
    remaining = max(0, entry.expires_ms - now_ms) / 1000
    return LockInfo(entry.key, entry.value["holder"], entry.created_revision, remaining)


_leaving: set[asyncio.Future[None]] = set()


class Lock:
    """A lease on a name. Ownership is this handle, not the task or thread that uses it.

    Use it with ``async with``: it renews itself, and when it is lost the body is cancelled
    and `LockLost` is raised, unless ``cancel=False``.

    Attributes:
        name: What is locked.
        token: The fencing token while held; None before.
        lost: Whether the lock was held and then lost.
    """

    def __init__(
        self,
        session: Session,
        namespace: str,
        name: str,
        *,
        ttl: float | timedelta,
        wait: float = 0.0,
        holder: str | None = None,
        cancel: bool = True,
        token: int | None = None,
    ) -> None:
        self.name = check_key(name)
        self.token = None if token is None else check_number(token, "a lock's token")
        self.lost = False
        self._session = session
        self._namespace = namespace
        self._ttl_ms = ttl_to_ms(ttl)
        self._wait_s = check_wait(wait, "how long to wait for a lock")
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        if holder is not None and holder != "":
            self._holder = check_text(holder, "the holder of a lock")
        self._cancel = cancel
        self._is_taken_up = token is not None
        # Of a lock that was taken up by its token, nobody knows until it is refreshed.
        self._deadline: float | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._body: asyncio.Task[object] | None = None
        self._cancelled = False
        self._cancelling = 0

    # As a context -------------------------------------------------------------

    async def __aenter__(self) -> Lock:
        await (self.refresh() if self._is_taken_up else self.acquire())
        self._body = asyncio.current_task() if self._cancel else None
        self._cancelling = 0 if self._body is None else self._body.cancelling()
        self._renewal = asyncio.get_running_loop().create_task(self._renew(), name=f"limpet-lock-{self.name}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        body, self._body = self._body, None
        await self._stop_renewal()
        if self.token is not None and not self.lost:
            try:
                await self.release()
            except LockExpired:
                pass
            except (TransientError, BrokenError):
                # It will expire by itself, and what the body did matters more.
                return
        if not self.lost:
            return
        token = self.token or 0
        # Our own cancellation is taken back, whatever the body made of it; somebody else's stays.
        ours = body is not None and self._cancelled and body.uncancel() <= self._cancelling
        if kind is None or (ours and issubclass(kind, asyncio.CancelledError)):
            raise LockLost(self.name, token=token) from error

    # By hand ------------------------------------------------------------------

    async def acquire(self) -> Lock:
        """Take the lock, waiting for it as long as was asked for. Raises `LockHeld`."""
        if self.token is not None and not self.lost:
            raise InvalidValue(f"lock {self.name!r} is held by this very handle already")
        clock = self._session.clock
        give_up = clock.monotonic() + self._wait_s
        value = codec.encode({"holder": self._holder})
        while True:
            asked = clock.monotonic()
            outcome = await self._ask(Put(self.name, value, self._ttl_ms, family="lock"))
            if isinstance(outcome, Commit):
                entry = outcome.entries[0]
                assert entry is not None
                self.token, self.lost, self._cancelled = entry.created_revision, False, False
                self._hold_from(asked)
                return self
            assert outcome.found is not None
            held = lock_info(outcome.found, outcome.at_ms)
            left = give_up - clock.monotonic()
            if left <= 0:
                raise LockHeld(self.name, holder=held.holder, token=held.token, remaining=held.remaining)
            await self._await_release(outcome.found.revision, min(left, held.remaining))

    async def refresh(self, ttl: float | timedelta | None = None) -> None:
        """Extend the lease from now on. Raises `LockExpired` or `LockNotHeld`."""
        if ttl is not None:
            self._ttl_ms = ttl_to_ms(ttl)
        token = self._held_token()
        asked = self._session.clock.monotonic()
        outcome = await self._commit(Guard(self.name, HeldBy(token), "lock"), Touch(self.name, self._ttl_ms, "lock"))
        if isinstance(outcome, Refusal):
            self.lost = True
            raise LockExpired(self.name, token=token)
        self._hold_from(asked)

    async def release(self) -> None:
        """Give the lock back. Only one's own: raises `LockExpired` or `LockNotHeld`."""
        token = self._held_token()
        await self._stop_renewal()
        outcome = await self._commit(Guard(self.name, HeldBy(token), "lock"), Delete(self.name, family="lock"))
        if isinstance(outcome, Refusal):
            self.lost = True
            raise LockExpired(self.name, token=token)
        self.token = None

    def check(self) -> None:
        """Raise `LockLost` when the lock is lost, or when its time may be over before anything is heard."""
        if self.token is None or self._deadline is None:
            raise LockNotHeld(self.name)
        if self.lost or self._session.clock.monotonic() >= self._deadline:
            self.lost = True
            raise LockLost(self.name, token=self.token)

    @property
    def fence(self) -> Fence:
        """The lock's name and token, to fence writes with."""
        if self.token is None:
            raise LockNotHeld(self.name)
        return Fence(self.name, self.token, self._namespace)

    # Inside -------------------------------------------------------------------

    def _held_token(self) -> int:
        if self.token is None:
            raise LockNotHeld(self.name)
        if self.lost:
            raise LockExpired(self.name, token=self.token)
        return self.token

    def _hold_from(self, asked: float) -> None:
        # Counted from before the request: what the answer took has eaten from the lease. The
        # margin covers what lies between looking at this and acting on it.
        ttl_s = self._ttl_ms / 1000
        self._deadline = asked + ttl_s - min(max(0.5, ttl_s / 10), ttl_s / 4)

    async def _commit(self, guard: Guard, write: Write) -> Commit | Refusal:
        return await self._session.commit(self._namespace, Batch((guard,), (write,)))

    async def _ask(self, write: Put) -> Commit | Refusal:
        """Ask for the lock. Whoever is cancelled meanwhile may be granted it all the same, and gives it back."""
        asking = asyncio.ensure_future(self._commit(Guard(self.name, ABSENT, "lock"), write))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            leaving = asyncio.ensure_future(self._give_back(asking))
            _leaving.add(leaving)
            leaving.add_done_callback(_leaving.discard)
            # Shielded, so that being cancelled again leaves nothing behind either.
            await asyncio.shield(leaving)
            raise

    async def _give_back(self, asking: asyncio.Future[Commit | Refusal]) -> None:
        with contextlib.suppress(LimpetError):
            outcome = await asking
            if isinstance(outcome, Commit):
                await self._commit(Guard(self.name, HeldBy(outcome.revision), "lock"), Delete(self.name, family="lock"))

    async def _await_release(self, revision: int, longest_s: float) -> None:
        """Wait until the log tells of a release, or until the holder's time is over."""
        told = asyncio.ensure_future(self._released(revision))
        over = asyncio.ensure_future(self._session.clock.sleep(min(longest_s, WAIT_TURN_S)))
        try:
            await asyncio.wait((told, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
            over.cancel()
            await asyncio.gather(told, over, return_exceptions=True)

    async def _released(self, revision: int) -> None:
        hub = self._session.hub(self._namespace)
        status = await hub.join()
        after = max(revision, status.floor)
        try:
            while True:
                feed = await hub.changes(after, None)
                if feed is None:
                    await hub.news()
                    continue
                if any(
                    change.family == "lock" and change.key == self.name and change.after is None
                    for change in feed.changes
                ):
                    return
                after = feed.head
        finally:
            hub.leave()

    async def _renew(self) -> None:
        clock = self._session.clock
        while True:
            ttl_s = self._ttl_ms / 1000
            assert self._deadline is not None
            await clock.sleep(min(ttl_s / 3, max(0.0, self._deadline - clock.monotonic())))
            try:
                await self.refresh()
            except TransientError:
                if clock.monotonic() < self._deadline:
                    await clock.sleep(min(RETRY_S, ttl_s / 10))
                    continue
                self.lost = True
            except (LockExpired, LockNotHeld, BrokenError):
                self.lost = True
            if self.lost:
                if self._body is not None:
                    self._cancelled = True
                    self._body.cancel()
                return

    async def _stop_renewal(self) -> None:
        renewal, self._renewal = self._renewal, None
        if renewal is not None and renewal is not asyncio.current_task():
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)

    def __repr__(self) -> str:
        state = "lost" if self.lost else "free" if self.token is None else f"token {self.token}"
        return f"Lock({self.name!r}, {state})"
