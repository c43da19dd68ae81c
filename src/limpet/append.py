"""Appending: a new key under a prefix, so that the keys sort in the order of their commits.

A key ends in a number, which comes from a counter: an entry of the family ``sequence`` under the name of the prefix.
One batch moves the counter and puts the entries, and it is refused if the counter has moved since it was read. So a
greater number is a later commit, on every engine and for any number of processes, and no number comes twice, not even
after the last entry was deleted.

Callers of one opened store share commits: while one commit is on its way, the others wait, and the next commit takes
along up to 127 of them.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final

import msgspec

from limpet import codec
from limpet.clock import has_loop, wake
from limpet.draft import Draft, Fence, Fencing, digest_of, request_digest
from limpet.errors import Conflict, Corrupt, InvalidValue, RequestError
from limpet.keys import BATCH_BYTES_MAX, BATCH_WRITES_MAX, Span, check_key
from limpet.model import ABSENT, Commit, Entry, Guard, Put, Revision
from limpet.pages import span_after
from limpet.retry import jitter_s
from limpet.transition import read_receipt

if TYPE_CHECKING:
    from limpet.store import Store

__all__ = ["Appender", "append_entry", "make_key"]

DIGITS: Final = 16
NUMBER_MAX: Final = 10**DIGITS - 1
SHARED_MAX: Final = BATCH_WRITES_MAX - 1
SHARED_BYTES_MAX: Final = BATCH_BYTES_MAX - DIGITS
APPENDERS_MAX: Final = 1_024

_NUMBER: Final = re.compile(rf"[0-9]{{{DIGITS}}}\Z", re.ASCII)


def make_key(prefix: str, number: int) -> str:
    """The key of this number under a prefix."""
    if number > NUMBER_MAX:
        raise InvalidValue(f"no number is left under {prefix!r}: append to another prefix")
    return check_key(f"{prefix}{number:0{DIGITS}d}")


async def append_entry(store: Store, put: Put, fence: Fencing | Fence | None, request_id: str | None) -> Entry:
    """Append an entry. Until its number is known, the put has the prefix as its key."""
    make_key(put.key, 1)
    appender = _find_appender(store, put.key)
    if fence is None and request_id is None:
        return await appender.append(put)
    return await appender.append_alone(put, fence, request_id)


def _find_appender(store: Store, prefix: str) -> Appender:
    appenders = store._session.appenders
    # One for each event loop, which alone can wake its callers. Between loops, as between processes, the guard decides.
    name = (store.name, prefix, asyncio.get_running_loop() if has_loop() else None)
    found = appenders.get(name)
    if found is None:
        if len(appenders) >= APPENDERS_MAX:
            # Nothing is decided by what it knows, so that to forget it costs no more than a read.
            del appenders[next(iter(appenders))]
        found = appenders[name] = Appender(store, prefix)
    return found


class _Waiting:
    """A caller that waits for its entry."""

    __slots__ = ("outcome", "put", "waiter")

    def __init__(self, put: Put) -> None:
        self.put = put
        self.outcome: Entry | Exception | None = None
        self.waiter: asyncio.Future[None] | None = None

    def result(self) -> Entry:
        """Return the entry, or raise the error."""
        assert self.outcome is not None
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def end(self, outcome: Entry | Exception) -> None:
        """Set the outcome and wake the caller."""
        self.outcome = outcome
        if self.waiter is not None:
            wake(self.waiter)


class Appender:
    """Appends to one prefix, for all callers on one event loop or on none, one commit after the other."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        # The counter as it was last seen, perhaps out of date; None when it was not seen.
        self._counter: Entry | None = None
        self._queue: deque[_Waiting] = deque()
        self._is_running = False

    async def append(self, put: Put) -> Entry:
        """Append an entry, in one commit with those of the other callers that wait."""
        one = _Waiting(put)
        self._queue.append(one)
        if not has_loop():
            # The thread that had the turn before may have taken this caller along.
            await self._commit_waiting(one)
        else:
            one.waiter = asyncio.get_running_loop().create_future()
            if not self._is_running:
                self._is_running = True
                # In a task of its own: when a caller is cancelled, the entries of the others go on.
                self._store._session.start_to_finish(self._commit_all())
            await one.waiter
        return one.result()

    async def _commit_all(self) -> None:
        try:
            while self._queue:
                await self._commit_waiting(self._queue[0])
        finally:
            self._is_running = False

    async def _commit_waiting(self, one: _Waiting) -> None:
        """Commit for all who wait, unless another thread has done it for this one."""
        async with self._turn():
            if one.outcome is None:
                await self._commit_together(self._take())

    def _turn(self) -> AbstractAsyncContextManager[None]:
        return self._store._session.turns.hold([("append", self._store.name, self._prefix)])

    def _take(self) -> list[_Waiting]:
        """Take as many callers as one commit holds, without those that were cancelled."""
        taken: list[_Waiting] = []
        size_bytes = 0
        while self._queue and len(taken) < SHARED_MAX:
            one = self._queue[0]
            if one.waiter is None or not one.waiter.done():
                size_bytes += codec.size_bytes(one.put.stored)
                if taken and size_bytes > SHARED_BYTES_MAX:
                    break
                taken.append(one)
            self._queue.popleft()
        return taken

    async def _commit_together(self, group: list[_Waiting]) -> None:
        outcomes: Sequence[Entry | Exception]
        try:
            outcomes = await self._commit([one.put for one in group])
        except RequestError as error:
            # One of them may be to blame, and nothing was written.
            outcomes = [error] if len(group) == 1 else [await self._try_alone(one.put) for one in group]
        except Exception as error:
            outcomes = [error] * len(group)
        for one, outcome in zip(group, outcomes, strict=True):
            one.end(outcome)

    async def _try_alone(self, put: Put) -> Entry | Exception:
        try:
            return (await self._commit([put]))[0]
        except Exception as error:
            return error

    async def append_alone(self, put: Put, fence: Fencing | Fence | None, request_id: str | None) -> Entry:
        """Append an entry in a commit of its own: a lost fence, or a repeated request, concerns its caller only."""
        async with self._turn():
            return (await self._commit([put], fence, request_id))[0]

    # The commit ---------------------------------------------------------------

    async def _commit(
        self, puts: list[Put], fence: Fencing | Fence | None = None, request_id: str | None = None
    ) -> list[Entry]:
        """Put entries under the next numbers, in their order. The caller has the turn."""
        clock = self._store._session.clock
        # A retry is recognised by what its caller has sent: it may get another number.
        request = None if request_id is None else b"append" + digest_of((), tuple(puts))
        used = attempt = 0
        if self._counter is None:
            await self._read_counter()
        while True:
            attempt += 1
            started_at = clock.monotonic()
            used = max(used, await self._find_last() if self._counter is None else _number_in(self._counter))
            draft = self._draft(puts, used, request_id, request)
            if fence is not None:
                draft.fence(fence)
            outcome = await draft._attempt()
            if isinstance(outcome, Commit):
                # What a repeated request has returned says nothing of the counter now.
                self._counter = None if outcome.replayed else outcome.entries[-1]
                return [entry for entry in outcome.entries[:-1] if entry is not None]
            if request is not None and outcome.reason == "stale_request":
                return [await self._load_earlier(puts[0], outcome.key, request)]
            if outcome.guard is None or outcome.guard.family == "lock":
                raise draft._error_of(outcome)
            if outcome.guard.family == "data":
                used = max(used, await self._find_last())
            elif outcome.found is None or outcome.found.stored is not None:
                self._counter = outcome.found
            else:
                await self._read_counter()
            if attempt > 1:
                # Others append to this prefix now. At the first attempt, the counter may just have been an old one.
                await clock.sleep(jitter_s(clock.monotonic() - started_at))

    def _draft(self, puts: list[Put], used: int, request_id: str | None, request: bytes | None) -> Draft:
        """Draft the entries with their keys, and the counter as it is after them."""
        counter = self._counter
        writes = [
            msgspec.structs.replace(put, key=make_key(self._prefix, used + number))
            for number, put in enumerate(puts, 1)
        ]
        # No key is occupied, unless a caller has put one of this form by its name.
        guards = [Guard(write.key, ABSENT) for write in writes]
        guards.append(Guard(self._prefix, ABSENT if counter is None else Revision(counter.revision), "sequence"))
        moved = Put(self._prefix, b"%d" % (used + len(puts)), family="sequence")
        return self._store.batch(request_id=request_id).include(*writes, moved, guards=guards, request=request)

    async def _read_counter(self) -> None:
        store = self._store
        self._counter = await store._session.read(store.name, self._prefix, family="sequence")

    async def _find_last(self) -> int:
        """The greatest number under the prefix: where there is no counter, or a key was put by its name."""
        rest: Span | None = Span(self._prefix + "0", self._prefix + ":")
        while rest is not None:
            page = await self._store._scan_page(rest, values=False, reverse=True)
            for entry in page.entries:
                if _NUMBER.match(entry.key, len(self._prefix)):
                    return int(entry.key[len(self._prefix) :])
            rest = None if page.cursor is None else span_after(rest, page.cursor, reverse=True)
        return 0

    async def _load_earlier(self, put: Put, request_id: str, request: bytes) -> Entry:
        """The entry that this very request has appended: a server recognises a request by its numbers as well."""
        store = self._store
        found = await store._session.read(store.name, request_id, family="receipt")
        receipt = None if found is None else read_receipt(found)
        is_same = receipt is not None and receipt.digest.startswith(request_digest(request))
        entry = receipt.commit.entries[0] if receipt is not None and is_same else None
        if entry is None:
            raise Conflict(request_id, expected="the same request", current=None, reason="stale_request")
        return msgspec.structs.replace(entry, stored=put.stored)


def _number_in(counter: Entry) -> int:
    number = None if counter.stored is None else codec.counter(counter.stored)
    if number is None:
        raise Corrupt(f"the counter of the keys under {counter.key!r} is not a number: append to another prefix")
    return number
