"""Locks: leases with a fencing token.

A lock is an entry in the ``lock`` family of its namespace. Acquiring creates it, and the
revision of its creation is the token: greater than every earlier one on that name.
Refreshing touches it, which changes its revision but not that of its creation, so the
holder's fence holds. Because locks live in the namespace they protect, ``fence=lock`` is
checked in the very commit it guards: a holder that was paused past its lease cannot write.

Callers of one opened engine that wait for the same lock queue up: only the first of them
calls the engine and follows the log, so that a release costs the same however many wait.

A lease can end while its holder is paused. A holder that must be sure passes the fence.
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
from limpet.keys import check_key, check_text, key_span
from limpet.model import ABSENT, Batch, Commit, Delete, Entry, Guard, HeldBy, Put, Refusal, Touch, Write
from limpet.waiters import topic_of

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
    """Read the entry of a lock, at the engine's time."""
    assert entry.expires_ms is not None
    remaining = max(0, entry.expires_ms - now_ms) / 1000
    return LockInfo(entry.key, entry.value["holder"], entry.created_revision, remaining)


async def end_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, with or without an error.

    One cancellation may not be enough: before Python 3.12, `asyncio.wait_for` loses a cancellation that comes at the
    moment of its result (python/cpython#86296), and a task with a loop then goes on.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            # Retrieve the error, so that asyncio does not log it as never retrieved.
            task.exception()


# Requests of cancelled callers that are being undone. asyncio itself keeps only weak references to tasks.
_cleanups: set[asyncio.Future[None]] = set()


class Lock:
    """A lease on a name. This handle owns it, not the task or thread that uses the handle.

    Use it with ``async with``: it renews itself, and when it is lost the body is cancelled
    and `LockLost` is raised, unless ``cancel=False``.

    Attributes:
        name: The name that is locked.
        token: The last fencing token; None before the first. It stays readable when the lock
            is released or lost, and then fences nothing: `fence` and `check` raise.
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
        # Whether this handle has the lock to release, as far as it knows. The token stays when it is released.
        self._is_held = token is not None
        # Unknown for a lock that was taken up by its token, until it is refreshed.
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
        # Take our own cancellation back, however the body handled it; one from elsewhere stays.
        is_ours = body is not None and self._cancelled and body.uncancel() <= self._cancelling
        if kind is None or (is_ours and issubclass(kind, asyncio.CancelledError)):
            raise LockLost(self.name, token=token) from error

    async def _release_after(self, kind: type[BaseException] | None) -> None:
        """Release the lock after the body. A failure of the release must not hide the result or error of the body."""
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
        """Take the lock, waiting for it as long as ``wait`` allows. Raises `LockHeld`."""
        if self._is_held and not self.lost:
            raise InvalidValue(f"lock {self.name!r} is held by this very handle already")
        give_up_at = self._session.clock.monotonic() + self._wait_s
        if self._wait_s == 0:
            return await self._acquire(give_up_at)
        turn = self._session.turns.turn(("lock", self._namespace, self.name))
        try:
            if not turn.join():
                await self._await_turn(turn, give_up_at)
            return await self._acquire(give_up_at)
        finally:
            turn.leave()

    async def _await_turn(self, turn: Turn, give_up_at: float) -> None:
        """Wait for the turn, or until ``wait`` is over. The engine is called either way: its refusal has the holder."""
        await self._wait_until(give_up_at, turn.wait())
        if not turn.is_up:
            turn.leave()

    async def _acquire(self, give_up_at: float) -> Lock:
        clock = self._session.clock
        value = codec.encode({"holder": self._holder})
        refused_ms = None
        while True:
            started_at = clock.monotonic()
            outcome = await self._request(Put(self.name, value, self._ttl_ms, family="lock"))
            if isinstance(outcome, Commit):
                entry = outcome.entries[0]
                assert entry is not None
                self.token, self.lost, self._cancelled = entry.created_revision, False, False
                self._is_held = True
                self._set_deadline(started_at)
                return self
            assert outcome.found is not None
            held = lock_info(outcome.found, outcome.at_ms)
            left_s = give_up_at - clock.monotonic()
            if left_s <= 0:
                raise LockHeld(self.name, holder=held.holder, token=held.token, remaining=held.remaining)
            # While time stands still, because the engine's clock was set back, `remaining` may stay near zero. Pause,
            # so that the engine is not called without end.
            least_s = RETRY_S if outcome.at_ms == refused_ms else 0.0
            refused_ms = outcome.at_ms
            await self._await_release(held.token, min(left_s, max(held.remaining, least_s)))

    async def refresh(self, ttl: float | timedelta | None = None) -> None:
        """Extend the lease from now on. Raises `LockExpired` or `LockNotHeld`."""
        if ttl is not None:
            self._ttl_ms = ttl_to_ms(ttl)
        token = self._require_token()
        started_at = self._session.clock.monotonic()
        outcome = await self._commit(Guard(self.name, HeldBy(token), "lock"), Touch(self.name, self._ttl_ms, "lock"))
        if isinstance(outcome, Refusal):
            self.lost = True
            raise LockExpired(self.name, token=token)
        self._set_deadline(started_at)

    async def release(self) -> None:
        """Give the lock back. Raises `LockExpired` or `LockNotHeld` when this handle does not hold it."""
        token = self._require_token()
        await self._stop_renewal()
        outcome = await self._commit(Guard(self.name, HeldBy(token), "lock"), Delete(self.name, family="lock"))
        if isinstance(outcome, Refusal):
            self.lost = True
            raise LockExpired(self.name, token=token)
        self._is_held = False

    def check(self) -> None:
        """Raise `LockLost` when the lock is lost, or when its lease may be over by now."""
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

    def _require_token(self) -> int:
        """Get the token of the held lock, or raise."""
        if self.token is None or not self._is_held:
            raise LockNotHeld(self.name)
        if self.lost:
            raise LockExpired(self.name, token=self.token)
        return self.token

    def _set_deadline(self, started_at: float) -> None:
        # Count from before the request, because the lease may have begun then. The margin covers the time between
        # reading the deadline and acting on it.
        ttl_s = self._ttl_ms / 1000
        self._deadline = started_at + ttl_s - min(max(0.5, ttl_s / 10), ttl_s / 4)

    async def _commit(self, guard: Guard, write: Write) -> Commit | Refusal:
        return await self._session.commit(self._namespace, Batch((guard,), (write,)))

    async def _request(self, write: Put) -> Commit | Refusal:
        """Request the lock. A caller that is cancelled meanwhile may still be granted it, and then releases it."""
        request = asyncio.ensure_future(self._commit(Guard(self.name, ABSENT, "lock"), write))
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            cleanup = asyncio.ensure_future(self._undo_request(request))
            _cleanups.add(cleanup)
            cleanup.add_done_callback(_cleanups.discard)
            # Shielded, so that a second cancellation does not leave the lock held either.
            await asyncio.shield(cleanup)
            raise

    async def _undo_request(self, request: asyncio.Future[Commit | Refusal]) -> None:
        try:
            outcome = await request
            if isinstance(outcome, Commit):
                await self._commit(Guard(self.name, HeldBy(outcome.revision), "lock"), Delete(self.name, family="lock"))
        except Exception as error:
            self._warn("may have been granted to a cancelled caller, and then ends when its time is over", error)

    async def _await_release(self, token: int, longest_s: float) -> None:
        """Wait until the lock with this token is released, or until the holder's lease is over."""
        until = self._session.clock.monotonic() + min(longest_s, WAIT_TURN_S)
        try:
            await self._wait_until(until, self._follow_release(token))
        except Closed:
            raise
        except LimpetError:
            # The log cannot be followed now. Pause, because calling again at once would only load the engine.
            await self._session.clock.sleep(min(longest_s, RETRY_S))

    async def _wait_until(self, until: float, work: Coroutine[Any, Any, None]) -> bool:
        """Run work until a deadline of the session's clock. False when it was not done by then, and was cancelled."""
        if until == math.inf:
            await work
            return True
        clock = self._session.clock
        task = asyncio.ensure_future(work)
        timer: asyncio.Future[None] | None = None
        try:
            while not task.done() and (left_s := until - clock.monotonic()) > 0:
                timer = asyncio.ensure_future(clock.sleep(left_s))
                await asyncio.wait((task, timer), return_when=asyncio.FIRST_COMPLETED)
            is_done = task.done()
        finally:
            await end_all(*([task] if timer is None else [task, timer]))
        if is_done:
            task.result()
        return is_done

    async def _follow_release(self, token: int) -> None:
        """Follow the log until the lock is released."""
        hub = self._session.hub(self._namespace)
        after = (await hub.join()).revision
        try:
            # It may have been released before. Reading the entry costs less than reading the log since it was acquired.
            entry = await self._session.read(self._namespace, self.name, family="lock")
            while entry is not None and entry.created_revision == token:
                page = await hub.changes(after, None)
                if page is None:
                    after = max(after, await hub.wait(topic_of(key_span(self.name), "lock")))
                    continue
                if any(
                    change.family == "lock" and change.key == self.name and change.after is None
                    for change in page.changes
                ):
                    return
                after = page.next_after
        finally:
            hub.leave()

    async def _renew(self) -> None:
        """Renew the lease until that fails for good. Then the lock counts as lost, whatever the reason."""
        try:
            await self._renew_until_it_fails()
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # This task was not cancelled; the work that it awaited was. That is a failure like any other.
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
            # A reply that does not come in time is a loss. A process that was paused past the deadline tries once more.
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
        # The type of the error alone: the message of a driver may hold a value.
        log.warning("lock %r (token %s) %s: %s", self.name, self.token, what, type(error).__name__)

    async def _stop_renewal(self) -> None:
        renewal, self._renewal = self._renewal, None
        if renewal is not None and renewal is not asyncio.current_task():
            await end_all(renewal)

    def __repr__(self) -> str:
        state = "lost" if self.lost else "free" if not self._is_held else f"token {self.token}"
        return f"Lock({self.name!r}, {state})"
