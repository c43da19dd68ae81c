"""Locks: leases with a fencing token.

A lock is an entry in the ``lock`` family of its namespace. Acquiring creates it, and the
revision that did is the token: greater than every earlier one on that name. Refreshing
touches it, which moves its revision but not its creation, so the holder's fence holds.
Because locks live in the namespace they protect, ``fence=lock`` is checked in the very
commit it guards: a holder that was paused past its time cannot write any more.

Callers of one opened engine that wait for the same lock stand in line: only the first of
them asks the engine and follows the log, so that a release costs the same however many wait.

Time alone promises nothing. A holder that must be sure passes the fence.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Coroutine
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from limpet import codec
from limpet.checks import check_number
from limpet.clock import check_wait, ttl_to_ms
from limpet.draft import Fence
from limpet.errors import (
    Ambiguous,
    BrokenError,
    Closed,
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
    from limpet.turns import Turn

__all__ = ["Lock", "LockInfo", "end_all", "lock_info"]

log = logging.getLogger(__name__)

CANCEL_AGAIN_S: Final = 0.5
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


async def end_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, however they do.

    Once may not be enough: `asyncio.wait_for` loses a cancellation that comes at the moment of its result, before
    Python 3.12 (python/cpython#86296), and a task that goes round in a loop then goes on.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            # Looked at, so that asyncio does not complain of an error that nobody has seen.
            task.exception()


_leaving: set[asyncio.Future[None]] = set()


class Lock:
    """A lease on a name. Ownership is this handle, not the task or thread that uses it.

    Use it with ``async with``: it renews itself, and when it is lost the body is cancelled
    and `LockLost` is raised, unless ``cancel=False``.

    Attributes:
        name: What is locked.
        token: The fencing token of the last holding; None before the first. It stays readable when the
            lock is released or lost, and then fences nothing: `fence` and `check` refuse.
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
        # Whether this handle has the lock to give back, as far as it knows. The token stays when that is over.
        self._is_held = token is not None
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
        if self._is_held and not self.lost:
            await self._release_after(kind)
        if not self.lost:
            return
        token = self.token or 0
        # Our own cancellation is taken back, whatever the body made of it; one from elsewhere stays.
        ours = body is not None and self._cancelled and body.uncancel() <= self._cancelling
        if kind is None or (ours and issubclass(kind, asyncio.CancelledError)):
            raise LockLost(self.name, token=token) from error

    async def _release_after(self, kind: type[BaseException] | None) -> None:
        """Give the lock back after the body. What the body did, or its own error, matters more than how that ends."""
        try:
            await self.release()
        except LockExpired:
            pass
        except (TransientError, Ambiguous, BrokenError) as error:
            # The lease ends by itself.
            self._is_held = False
            self._warn("could not be released, and ends when its time is over", error)
        except Exception as error:
            self._is_held = False
            if kind is None:
                raise
            self._warn("could not be released, and ends when its time is over", error)

    # By hand ------------------------------------------------------------------

    async def acquire(self) -> Lock:
        """Take the lock, waiting for it as long as was asked for. Raises `LockHeld`."""
        if self._is_held and not self.lost:
            raise InvalidValue(f"lock {self.name!r} is held by this very handle already")
        give_up = self._session.clock.monotonic() + self._wait_s
        if self._wait_s == 0:
            return await self._acquire(give_up)
        turn = self._session.turns.turn(("lock", self._namespace, self.name))
        try:
            if not turn.join():
                await self._stand_in_line(turn, give_up)
            return await self._acquire(give_up)
        finally:
            turn.leave()

    async def _stand_in_line(self, turn: Turn, give_up: float) -> None:
        """Wait for the turn to ask, or until waiting is over: then the engine is asked once, to say who holds it."""
        await self._wait_until(give_up, turn.wait())
        if not turn.is_up:
            turn.leave()

    async def _acquire(self, give_up: float) -> Lock:
        clock = self._session.clock
        value = codec.encode({"holder": self._holder})
        refused_ms = None
        while True:
            asked = clock.monotonic()
            outcome = await self._ask(Put(self.name, value, self._ttl_ms, family="lock"))
            if isinstance(outcome, Commit):
                entry = outcome.entries[0]
                assert entry is not None
                self.token, self.lost, self._cancelled = entry.created_revision, False, False
                self._is_held = True
                self._hold_from(asked)
                return self
            assert outcome.found is not None
            held = lock_info(outcome.found, outcome.at_ms)
            left = give_up - clock.monotonic()
            if left <= 0:
                raise LockHeld(self.name, holder=held.holder, token=held.token, remaining=held.remaining)
            # Where time stands still, because the engine's clock was set back, the little that is left stays the same.
            least_s = RETRY_S if outcome.at_ms == refused_ms else 0.0
            refused_ms = outcome.at_ms
            await self._await_release(outcome.found.revision, min(left, max(held.remaining, least_s)))

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
        self._is_held = False

    def check(self) -> None:
        """Raise `LockLost` when the lock is lost, or when its time may be over before anything is heard."""
        if self.token is None or not self._is_held or self._deadline is None:
            raise LockNotHeld(self.name)
        if self.lost or self._session.clock.monotonic() >= self._deadline:
            self.lost = True
            raise LockLost(self.name, token=self.token)

    @property
    def fence(self) -> Fence:
        """The lock's name and token, to fence writes with."""
        if self.token is None or not self._is_held:
            raise LockNotHeld(self.name)
        return Fence(self.name, self.token, self._namespace)

    # Inside -------------------------------------------------------------------

    def _held_token(self) -> int:
        if self.token is None or not self._is_held:
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
        try:
            outcome = await asking
            if isinstance(outcome, Commit):
                await self._commit(Guard(self.name, HeldBy(outcome.revision), "lock"), Delete(self.name, family="lock"))
        except Exception as error:
            self._warn("may have been granted to a cancelled caller, and then ends when its time is over", error)

    async def _await_release(self, revision: int, longest_s: float) -> None:
        """Wait until the log tells of a release, or until the holder's time is over."""
        until = self._session.clock.monotonic() + min(longest_s, WAIT_TURN_S)
        try:
            await self._wait_until(until, self._released(revision))
        except Closed:
            raise
        except LimpetError:
            # The log cannot be followed just now. Asking again at once would keep the engine busy for nothing.
            await self._session.clock.sleep(min(longest_s, RETRY_S))

    async def _wait_until(self, until: float, work: Coroutine[Any, Any, None]) -> bool:
        """Wait for something, but not for longer. False when it was not done by then, and was cancelled."""
        if until == math.inf:
            await work
            return True
        clock = self._session.clock
        doing = asyncio.ensure_future(work)
        over: asyncio.Future[None] | None = None
        try:
            while not doing.done() and (left_s := until - clock.monotonic()) > 0:
                over = asyncio.ensure_future(clock.sleep(left_s))
                await asyncio.wait((doing, over), return_when=asyncio.FIRST_COMPLETED)
            is_done = doing.done()
        finally:
            await end_all(*([doing] if over is None else [doing, over]))
        if is_done:
            doing.result()
        return is_done

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
                after = feed.next_after
        finally:
            hub.leave()

    async def _renew(self) -> None:
        """Renew the lease until that fails for good, and then count the lock as lost, whatever the reason was."""
        try:
            await self._renew_until_it_fails()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody has cancelled this task: it is a failure of what it waited for.
            self._lose(error)
        except Exception as error:
            self._lose(error)

    async def _renew_until_it_fails(self) -> None:
        clock = self._session.clock
        pause_s = self._ttl_ms / 3000
        while True:
            assert self._deadline is not None
            await clock.sleep(min(pause_s, max(0.0, self._deadline - clock.monotonic())))
            now = clock.monotonic()
            # An answer that does not come in time is a loss. A process that was paused is late, and tries once more.
            until = self._deadline if now < self._deadline else now + self._ttl_ms / 3000
            try:
                if not await self._wait_until(until, self.refresh()):
                    raise LockLost(self.name, token=self.token or 0)
                pause_s = self._ttl_ms / 3000
            except (TransientError, Ambiguous):
                # A touch may be repeated, so it does not matter whether this one was applied.
                if clock.monotonic() >= self._deadline:
                    raise
                pause_s = min(RETRY_S, self._ttl_ms / 10_000)

    def _lose(self, error: BaseException) -> None:
        self.lost = True
        self._warn("is lost, because it could not be renewed", error)
        if self._body is not None:
            self._cancelled = True
            self._body.cancel()

    def _warn(self, what: str, error: BaseException) -> None:
        # The kind of error alone: the words of a driver may hold a value.
        log.warning("lock %r (token %s) %s: %s", self.name, self.token, what, type(error).__name__)

    async def _stop_renewal(self) -> None:
        renewal, self._renewal = self._renewal, None
        if renewal is not None and renewal is not asyncio.current_task():
            await end_all(renewal)

    def __repr__(self) -> str:
        state = "lost" if self.lost else "free" if not self._is_held else f"token {self.token}"
        return f"Lock({self.name!r}, {state})"
