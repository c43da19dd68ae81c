"""A copy of a whole namespace without its values, in this process, for as long as it is used.

NATS finds the last message of a subject, but does not list subjects in order. So a process that scans, watches or
counts follows the stream: the last message of each subject is delivered once, without its body, and then each new one.
A read is as new as the stream was when the read began, because it first waits for all messages that were stored by
then. To a process that reads the log, the messages before the last ones are delivered too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from itertools import islice, takewhile
from typing import Any, Final

from limpet.engines.nats.connection import NoReply
from limpet.engines.nats.follower import Follower
from limpet.engines.nats.log import Log, LogItem
from limpet.engines.nats.messages import EntryId, Message, parse_floor, parse_head
from limpet.engines.nats.stream import NamespaceStream
from limpet.engines.sorted_keys import SortedKeys
from limpet.errors import Compacted
from limpet.keys import Span
from limpet.model import FAMILIES, Family, Status, Window, fingerprint, live

__all__ = ["Mirror"]

END_MS: Final = 600_000
RECEIPTS_MIN: Final = 1000
PRINTS_MAX: Final = 64
DROPPED_MAX: Final = 64
DOUBTS_AT_ONCE: Final = 500
TRIM_MAX: Final = 20_000
COUNTED_AT_ONCE: Final = 10_000
# The server is busy with the purge of a key for up to half a millisecond.
PURGES_PER_S: Final = 200
PURGES_MAX: Final = 2000
# So many are under way at a time, so that other requests need not wait for all of them.
PURGES_AT_ONCE: Final = 20
# So often the trimming process looks for what an earlier one has left.
COUNT_S: Final = 1800.0


class Mirror(Follower):
    """All entries of a namespace, without their values, and its log."""

    def __init__(self, stream: NamespaceStream, connect: Callable[[], Any], notify: Callable[[], None]) -> None:
        super().__init__(stream, connect)
        self._notify = notify
        self._resolving = asyncio.Lock()
        self._wants_log = False
        self._purged_at = time.monotonic()
        self._purges = float(PURGES_MAX)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.log = Log()
        self._has_log = False
        self.revision = 0
        self.size_bytes = 0
        self.heads: dict[Family, dict[str, Message]] = {family: {} for family in FAMILIES}
        self._keys: dict[Family, SortedKeys] = {family: SortedKeys() for family in FAMILIES}
        # How many entries of each family expire.
        self._expiring: Counter[Family] = Counter()
        # In the order of the messages.
        self._ends: dict[EntryId, Message] = {}
        self._receipts_max = RECEIPTS_MIN
        # The highest number that no message was delivered with.
        self._skipped = 0
        # Messages of other programs, before which changes may have been dropped, and since when.
        self._doubts: dict[EntryId, tuple[int, int]] = {}
        # Whether this process was the last to raise the floor: it purges what is below, so that not all do.
        self._is_trimmer = False
        self._own_floor = 0
        # Of each key, the bytes of messages below the floor that nothing needs any more.
        self._garbage: dict[EntryId, int] = {}
        self._counted_at: float | None = None
        self._prints: dict[int, str] = {}

    async def choose_first(self) -> str:
        """A process that only scans needs the last message of each key."""
        self._has_log = self._wants_log
        if self._has_log:
            self.log.start = await self._stream.floor()
        return "all" if self._has_log else "last_per_subject"

    def take(self, subject: str, seq: int, headers: bytes, stored_ms: int) -> None:
        """Add a message."""
        if seq > self.position + 1:
            self._skipped = seq - 1
        entry_id = self._stream.subjects.entry_id(subject)
        if entry_id is None:
            if subject == self._stream.subjects.floor:
                floor, floor_print = parse_floor(headers)
                self._is_trimmer = floor == self._own_floor or (self._is_trimmer and floor <= self.log.floor)
                self._raise_floor(floor, floor_print)
                self._notify()
            return
        message = parse_head(entry_id[1], seq, headers)
        self._stream.observe_time(message.at_ms)
        before = self._replace_last(entry_id, message)
        if entry_id[0] == "receipt":
            self._forget_receipts()
            return
        self.revision = max(self.revision, seq)
        if self._has_log and seq > self.log.start:
            self._check_whole(entry_id, message, before)
            self.log.append(LogItem(seq, message.at_ms or stored_ms, message.weight_bytes, entry_id))
        if before is not None and before.seq <= self.log.floor:
            self._add_garbage(entry_id, before.weight_bytes)
        self._notify()

    def _replace_last(self, entry_id: EntryId, message: Message) -> Message | None:
        """Set the last message of a key. Returns the one before."""
        family, key = entry_id
        heads = self.heads[family]
        before = heads.get(key)
        self._expiring[family] += _expires(message) - (before is not None and _expires(before))
        if family == "data":
            held_bytes = message.weight_bytes if message.held is not None else 0
            self.size_bytes += held_bytes - (0 if before is None else before.weight_bytes)
        if message.held is None:
            heads.pop(key, None)
            # To the end of the map, so that it is in the order of the messages.
            ended = self._ends.pop(entry_id, None)
            self._ends[entry_id] = message
            return before or ended
        heads[key] = message
        if before is None:
            self._keys[family].add(key)
        return before or self._ends.pop(entry_id, None)

    def _check_whole(self, entry_id: EntryId, message: Message, before: Message | None) -> None:
        """Note it if changes of the key were dropped before they were delivered here."""
        if message.prev is not None:
            self.log.lost = max(self.log.lost, _find_lost(message, before))
            return
        since = max(0 if before is None else before.seq, self.log.start)
        if self._skipped > since:
            self._doubts.setdefault(entry_id, (since, message.seq))

    def _forget_receipts(self) -> None:
        """Drop receipts that the server has expired, which it does without a message."""
        receipts = self.heads["receipt"]
        if len(receipts) > self._receipts_max:
            now_ms = self._stream.now_ms()
            for key in [key for key, message in receipts.items() if live(message.entry, now_ms) is None]:
                self._expiring["receipt"] -= _expires(receipts.pop(key))
            self._receipts_max = 2 * len(receipts) + RECEIPTS_MIN

    @property
    def has_log(self) -> bool:
        """Whether this process has begun to read the log, so that trimming it takes no more than that."""
        return self._has_log

    def keys(self, family: Family, span: Span, *, reverse: bool = False) -> Iterator[str]:
        """The keys of a span, in their order or its reverse."""
        return self._keys[family].between(span, self.heads[family], reverse=reverse)

    def count(self, family: Family, span: Span) -> int:
        """Count the live entries of a span."""
        heads = self.heads[family]
        if not self._expiring[family]:
            return self._keys[family].count(span, heads)
        now_ms = self._stream.now_ms()
        return sum(live(heads[key].held, now_ms) is not None for key in self.keys(family, span))

    def _last_message(self, entry_id: EntryId) -> Message | None:
        return self.heads[entry_id[0]].get(entry_id[1]) or self._ends.get(entry_id)

    # The log ------------------------------------------------------------------

    async def load_log(self) -> Log:
        """The log, with all that it has after its floor."""
        self._wants_log = True
        await self.catch_up()
        while not self._has_log:
            # Only the last message of each key was loaded: load all of them.
            self.stop()
            self.clear()
            await self.catch_up()
        async with self._resolving:
            while self._doubts:
                await self._resolve_doubts()
        return self.log

    async def _resolve_doubts(self) -> None:
        """Look whether the stream still has all messages of keys that other programs have written."""
        log, group = self.log, [*islice(self._doubts.items(), DOUBTS_AT_ONCE)]
        whole = await asyncio.gather(*(self._stream.keeps_all_since(entry_id, since) for entry_id, (since, _) in group))
        for (entry_id, (since, seq)), is_whole in zip(group, whole, strict=True):
            if not is_whole:
                log.lost = max(log.lost, seq - 1)
            if self._doubts.get(entry_id) == (since, seq):
                del self._doubts[entry_id]

    async def messages_of(self, items: Sequence[LogItem]) -> list[Message]:
        """The whole messages of changes."""
        found = await asyncio.gather(*map(self._message_of, items))
        messages = [message for message in found if message is not None]
        if len(messages) < len(items):
            lost = max(item.seq for item, message in zip(items, found, strict=True) if message is None)
            self.log.lost = max(self.log.lost, lost)
            raise Compacted(
                f"the change at revision {lost} was dropped before it was read, the log starts after it",
                oldest=self.log.oldest,
            )
        return messages

    async def _message_of(self, item: LogItem) -> Message | None:
        last = self._last_message(item.entry_id)
        if last is not None and last.seq == item.seq and last.op in ("touch", "expire"):
            # The log has no value of it.
            return last
        return await self._stream.at(item.entry_id, item.seq)

    async def before(self, revision: int) -> str:
        """The fingerprint of the change at a revision, or of the last one before it that is still in the log."""
        for _ in range(DROPPED_MAX):
            item = self.log.last_until(revision)
            if item is None:
                break
            if (known := self._prints.get(item.seq)) is not None:
                return known
            message = self._last_message(item.entry_id)
            if message is None or message.seq != item.seq:
                message = await self._message_of(item)
            if message is not None:
                return self.remember_print(item, message)
            # It was dropped, as one was that the server had no room for. The log goes on after it.
            revision = item.seq - 1
        return self.log.floor_print

    def remember_print(self, item: LogItem, message: Message) -> str:
        """The fingerprint of a change, which the next page of a reader needs again."""
        if len(self._prints) >= PRINTS_MAX:
            del self._prints[next(iter(self._prints))]
        found = self._prints[item.seq] = fingerprint(message.change(item.entry_id[0]))
        return found

    def status(self) -> Status:
        """The namespace at a glance. The log is loaded."""
        return Status(
            store_id=self._stream.store_id,
            epoch=1,
            revision=max(self.revision, self.log.floor),
            floor=self.log.oldest,
            keys=len(self.heads["data"]),
            size_bytes=self.size_bytes,
            log_changes=len(self.log),
            log_bytes=self.log.size_bytes,
            now_ms=self._stream.now_ms(),
            behind_ms=self._stream.behind_ms(),
        )

    # Trimming -----------------------------------------------------------------
    #
    # First the floor is raised. Then the messages below it go, key by key, except the last one of a key: that is what
    # the key holds. The end of a key stays for a while, for readers that were away, and then goes too.

    async def trim(self, window: Window) -> int:
        """Raise the floor, and purge what is below it. The log is loaded. Returns how many changes were dropped."""
        log = self.log
        # Not too many at once, because nothing else of this process runs meanwhile. The caller goes on to the end.
        oldest = ((item.seq, item.at_ms, item.weight_bytes) for item in islice(log.after(log.floor), TRIM_MAX))
        now_ms = self._stream.now_ms()
        dropped, _, floor = window.excess(oldest, count=len(log), size_bytes=log.size_bytes, now_ms=now_ms)
        if dropped:
            floor_print = await self.before(floor)
            if not floor_print.startswith(f"{floor}-"):
                # The change itself was dropped, so no position can be compared with it.
                floor_print = f"{floor}-0-{'0' * 12}"
            # Before it is sent: the message may be delivered here before its acknowledgement comes.
            self._own_floor = floor
            if not await self._stream.raise_floor(floor, floor_print):
                self._own_floor = dropped = 0
            elif log is self.log:
                self._is_trimmer = True
                self._raise_floor(floor, floor_print)
        # What an earlier process has left is counted when the log is within its window, and so is not long.
        await (self.purge_more() if dropped == TRIM_MAX else self.purge())
        return dropped

    def _raise_floor(self, floor: int, floor_print: str) -> None:
        for item in self.log.raise_floor(floor, floor_print):
            last = self._last_message(item.entry_id)
            if last is None or last.seq != item.seq:
                self._add_garbage(item.entry_id, item.weight_bytes)

    def _add_garbage(self, entry_id: EntryId, weight_bytes: int) -> None:
        if self._is_trimmer:
            self._garbage[entry_id] = self._garbage.get(entry_id, 0) + weight_bytes

    async def purge(self) -> None:
        """Drop messages below the floor that nothing needs: of a few keys a second, the largest of the oldest."""
        if self._is_trimmer and (self._counted_at is None or time.monotonic() - self._counted_at > COUNT_S):
            # Of a million keys, the server may not list the subjects in time. Then only this process's own are purged.
            with contextlib.suppress(NoReply):
                await self._count_garbage()
        await self.purge_more()

    async def purge_more(self) -> None:
        """Go on with a purge, if this process has begun one."""
        if not self._is_trimmer or not self._stream.exists or self._store_id != self._stream.store_id:
            return
        now = time.monotonic()
        self._purges = min(PURGES_MAX, self._purges + (now - self._purged_at) * PURGES_PER_S)
        self._purged_at = now
        garbage = self._garbage
        room = int(self._purges)
        chosen = dict(islice(self._old_ends(), room))
        oldest = islice(garbage, 2 * PURGES_MAX)
        for entry_id in nlargest(room - len(chosen), oldest, key=garbage.__getitem__):
            last = self._last_message(entry_id)
            # All up to the floor, but the last message stays if it is there.
            chosen.setdefault(entry_id, self.log.floor if last is None else min(last.seq - 1, self.log.floor))
        self._purges -= len(chosen)
        purged = {entry_id: garbage.pop(entry_id) for entry_id in chosen if entry_id in garbage}
        subjects = self._stream.subjects
        wanted = iter(chosen.items())
        try:
            while group := list(islice(wanted, PURGES_AT_ONCE)):
                await asyncio.gather(*(self._stream.purge(subjects.of(entry_id), seq) for entry_id, seq in group))
        except BaseException:
            garbage |= purged
            raise
        for entry_id, seq in chosen.items():
            end = self._ends.get(entry_id)
            if end is not None and end.seq <= seq:
                del self._ends[entry_id]

    def _old_ends(self) -> Iterator[tuple[EntryId, int]]:
        """The ends of keys that need not be kept any longer, the oldest first."""
        old_ms, floor = self._stream.now_ms() - END_MS, self.log.floor
        old = takewhile(lambda end: end[1].seq <= floor and end[1].at_ms < old_ms, self._ends.items())
        return ((entry_id, message.seq) for entry_id, message in old)

    async def _count_garbage(self) -> None:
        """Find the keys of which messages below the floor are left from an earlier process."""
        log = self.log
        kept: dict[EntryId, int] = {}
        for item in log.after(log.floor):
            kept[item.entry_id] = kept.get(item.entry_id, 0) + 1
        self._counted_at = time.monotonic()
        counts = await self._stream.count_messages()
        for number, (subject, count) in enumerate(counts.items(), 1):
            if number % COUNTED_AT_ONCE == 0:
                await asyncio.sleep(0)
                if log is not self.log:
                    return
            entry_id = self._stream.subjects.entry_id(subject)
            last = None if entry_id is None else self._last_message(entry_id)
            if entry_id is None or entry_id[0] == "receipt" or last is None:
                continue
            if count > kept.get(entry_id, 0) + (last.seq <= log.floor):
                self._add_garbage(entry_id, (count - 1) * last.weight_bytes)


def _expires(message: Message) -> bool:
    return message.held is not None and message.entry.expires_ms is not None


def _find_lost(message: Message, before: Message | None) -> int:
    """Up to which number changes of a key were dropped between two messages that were delivered; 0 if none was."""
    known, prev = 0 if before is None else before.seq, message.prev or 0
    # The end of a key is dropped only after the log was trimmed up to there.
    if prev == known or (prev == 0 and (before is None or before.held is None)):
        return 0
    return prev if prev > known else message.seq - 1
