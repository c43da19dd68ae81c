"""A copy of a whole stream without its values, in this process, for as long as it is used.

NATS finds the last message of a subject, but does not list subjects in order. So a process that scans,
watches or counts follows the stream: every message is delivered once, without its body, and then each new
one. A read is as new as the stream was when the read began, because it first waits for all messages that
were stored by then.

A process that only sweeps follows the alarms instead: an entry that expires has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from limpet.engines.nats.connection import Connection
from limpet.engines.nats.messages import EntryId, Message, decode_touched, parse
from limpet.engines.nats.stream import NamespaceStream
from limpet.engines.sorted_keys import SortedKeys
from limpet.errors import Unavailable
from limpet.keys import Span
from limpet.model import BEGINNING, FAMILIES, Expire, Family, Status, Window, fingerprint, live

__all__ = ["Alarms", "Mirror"]

IDLE_S: Final = 60.0
LOOK_S: Final = 0.05
# After so long without a message, delivery is started again; each further time after twice as long.
STALL_S: Final = 2.0
# After so long without a message, waiters get an error. While messages come, they wait as long as it takes.
PROGRESS_S: Final = 10.0
# The ends of keys are kept at least twice as long after they were trimmed, so resuming misses none.
BEHIND_S_MAX: Final = 300.0
END_MS: Final = 600_000
ENDS_MAX: Final = 500
STALE_MAX: Final = 64
RECEIPTS_MIN: Final = 1000

_json = msgspec.json.Encoder().encode


class Follower:
    """Follows the messages of a stream in their order, without their bodies."""

    def __init__(self, stream: NamespaceStream, connect: Callable[[], Any], subject: str = ">") -> None:
        self._stream = stream
        self._connect = connect
        self._subject = subject
        self._connection: Connection | None = None
        # The connection that messages last came on, and the Limpet header of the last of them.
        self._last_connection: Connection | None = None
        self._last_header = b""
        self._number = b""
        self._name = ""
        self._delivered = 0
        self._store_id = ""
        self._moved = asyncio.Event()
        self._moved_at = 0.0
        self._stall_s = STALL_S
        self._used_at = 0.0
        self._caught_up_at = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._starting = asyncio.Lock()
        self.position = 0

    def take(self, subject: str, seq: int, headers: bytes) -> None:
        """Add a message."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget everything."""
        self.position = 0

    async def catch_up(self) -> None:
        """Wait until all messages that are in the stream now have been delivered."""
        loop = asyncio.get_running_loop()
        self._used_at = loop.time()
        await self._start()
        seq = await self._next_seq()
        if seq is None:
            self._caught_up_at = loop.time()
            return
        last = int((await self._stream.info())["state"]["last_seq"])
        progress, progress_at = (self.position, seq), loop.time()
        while seq is not None and seq <= last:
            await self._wait_for(seq)
            if self.position >= last:
                break
            if progress != (self.position, seq):
                progress, progress_at = (self.position, seq), loop.time()
            elif loop.time() - progress_at > PROGRESS_S:
                raise Unavailable(
                    f"stream {self._stream.name}: the server has delivered no message for {PROGRESS_S:g} s, "
                    f"at message {self.position} of {last}; try again, or check what keeps the server busy"
                )
            seq = await self._next_seq()
        self._caught_up_at = loop.time()

    async def _next_seq(self) -> int | None:
        """The number of the next message that was not delivered yet."""
        found = await self._stream.get({"seq": self.position + 1, "next_by_subj": self._subject})
        return None if found is None else found[1]

    async def _wait_for(self, seq: int) -> None:
        """Wait for a message, which may be dropped before it is delivered."""
        loop = asyncio.get_running_loop()
        if self.position >= seq:
            return
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._moved.wait()
        if self._starting.locked():
            # Another task is starting delivery, which may take a while.
            return
        is_stalled = loop.time() - self._moved_at > self._stall_s
        if is_stalled:
            self._stall_s *= 2
        if is_stalled or self._connection is None or self._connection.is_lost:
            self.stop()
            await self._start()

    async def _start(self) -> None:
        """Start delivery, from our position."""
        if self._is_running():
            return
        async with self._starting:
            if self._is_running():
                return
            connection: Connection = await self._connect()
            behind_s = asyncio.get_running_loop().time() - self._caught_up_at
            is_other = self._store_id != self._stream.store_id or behind_s > BEHIND_S_MAX
            if is_other or (self._last_connection not in (None, connection) and not await self._is_same_stream()):
                self.clear()
                self._store_id = self._stream.store_id
                # A load that is interrupted is resumed too, or it might never end.
                self._caught_up_at = asyncio.get_running_loop().time()
            self._last_connection = connection
            delivered, self._number = connection.subscribe(self._on_message)
            self._connection, self._name, self._delivered = connection, os.urandom(8).hex(), 0
            config: dict[str, object] = {
                "name": self._name,
                "deliver_subject": delivered,
                "ack_policy": "none",
                "headers_only": True,
                "flow_control": True,
                "idle_heartbeat": 5_000_000_000,
                "inactive_threshold": 30_000_000_000,
                "mem_storage": True,
                "num_replicas": 1,
                "deliver_policy": "all",
            }
            if self.position:
                config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": self.position + 1}
            if self._subject != ">":
                config["filter_subject"] = self._subject
            name = self._stream.name
            request = {"stream_name": name, "config": config, "action": "create"}
            try:
                await self._stream.api(f"CONSUMER.CREATE.{name}.{self._name}", request)
            except BaseException:
                self.stop()
                raise
            loop = asyncio.get_running_loop()
            self._moved_at = loop.time()
            if self._idle_timer is None:
                self._idle_timer = loop.call_later(IDLE_S, self._stop_if_idle)

    async def _is_same_stream(self) -> bool:
        """Whether the stream still has the message that was last delivered.

        A server may come back with a backup of the stream, which has the same name and other messages under the same
        numbers.
        """
        if not self.position or not self._last_header:
            return not self.position
        found = await self._stream.get({"seq": self.position})
        return found is not None and _limpet_header(found[2]) == self._last_header

    def _is_running(self) -> bool:
        return self._connection is not None and not self._connection.is_lost and self._store_id == self._stream.store_id

    def _on_message(self, subject: bytes, reply: bytes, headers: bytes, _: bytes) -> None:
        connection = self._connection
        if connection is None:
            return
        if headers.startswith(b"NATS/1.0 100"):
            stalled = headers.find(b"\r\nNats-Consumer-Stalled: ")
            if stalled >= 0:
                reply = headers[stalled + 25 : headers.index(b"\r\n", stalled + 2)]
            if reply:
                connection.send(reply.decode())
            return
        words = reply.split(b".")
        at = 5 if len(words) == 9 else 7
        seq, delivered = int(words[at]), int(words[at + 1])
        if delivered != self._delivered + 1:
            # A message is missing in between. The next read starts delivery again from our position.
            self.stop()
            return
        self._delivered = delivered
        self.take(subject.decode(), seq, headers)
        self.position, self._last_header = seq, _limpet_header(headers)
        self._moved_at, self._stall_s = connection._loop.time(), STALL_S
        self._moved.set()

    def stop(self) -> None:
        """Stop delivery."""
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_lost:
            connection.unsubscribe(self._number)
            connection.send(f"$JS.API.CONSUMER.DELETE.{self._stream.name}.{self._name}")
        self._moved.set()

    def _stop_if_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._idle_timer = None
        if self._connection is None:
            return
        if loop.time() - self._used_at > IDLE_S:
            self.stop()
        else:
            self._caught_up_at = loop.time()
            self._idle_timer = loop.call_later(IDLE_S, self._stop_if_idle)


class Mirror(Follower):
    """All entries of a namespace, without their values, and the order in which they were last changed."""

    def __init__(self, stream: NamespaceStream, connect: Callable[[], Any], notify: Callable[[], None]) -> None:
        super().__init__(stream, connect)
        self._notify = notify
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.floor = 0
        self.floor_print = BEGINNING
        self.revision = 0
        self.size_bytes = 0
        self.heads: dict[Family, dict[str, Message]] = {family: {} for family in FAMILIES}
        self._keys: dict[Family, SortedKeys] = {family: SortedKeys() for family in FAMILIES}
        self._ends: dict[EntryId, Message] = {}
        self._log: list[tuple[int, EntryId]] = []
        self._receipts_max = RECEIPTS_MIN
        self._is_sorted = True

    def take(self, subject: str, seq: int, headers: bytes) -> None:
        """Add a message."""
        entry_id = self._stream.subjects.entry_id(subject)
        if entry_id is None:
            if subject == self._stream.subjects.floor:
                self.floor_print = _header(headers, b"Limpet-Floor").decode()
                self.floor = int(self.floor_print.partition("-")[0])
                self._notify()
            return
        family, key = entry_id
        message = parse(key, seq, headers, None)
        self._stream.observe_time(message.at_ms)
        heads = self.heads[family]
        before = heads.get(key)
        if message.held is None:
            heads.pop(key, None)
            self._ends[entry_id] = message
        else:
            heads[key] = message
            self._ends.pop(entry_id, None)
            if before is None:
                self._keys[family].add(key)
        if family == "receipt":
            self._forget_receipts()
            return
        if family == "data":
            self.size_bytes += _weight(message) * (message.held is not None) - (_weight(before) if before else 0)
        self.revision = max(self.revision, seq)
        if message.op == "touch" and (before is None or before.value_seq != message.value_seq):
            # The write before it was replaced before we followed the stream.
            self._log.append((message.value_seq, entry_id))
            self._is_sorted = False
        self._log.append((seq, entry_id))
        if len(self._log) > 64 + 4 * (sum(map(len, self.heads.values())) + len(self._ends)):
            self._forget_stale()
        self._notify()

    def _forget_receipts(self) -> None:
        """Drop receipts that the server has expired, which it does without a message."""
        receipts = self.heads["receipt"]
        if len(receipts) > self._receipts_max:
            now_ms = self._stream.now_ms()
            for key in [key for key, message in receipts.items() if live(message.entry, now_ms) is None]:
                del receipts[key]
            self._receipts_max = 2 * len(receipts) + RECEIPTS_MIN

    def keys(self, family: Family, span: Span) -> Iterator[str]:
        """The keys of a span, in their order."""
        return self._keys[family].between(span, self.heads[family])

    def after(self, revision: int) -> Iterator[tuple[EntryId, Message]]:
        """The last change of each key, and the write before a touch, of all after a revision, in their order."""
        self._sort()
        # A copy, because messages may come while it is read.
        for item in self._log[self._index_after(revision) :]:
            message = self._find_change(item)
            if message is not None:
                yield item[1], message

    def before(self, revision: int) -> str:
        """The fingerprint of the change at a revision, or of the last one before it that is still in the log."""
        self._sort()
        last = self._index_after(revision) - 1
        for index in range(last, -1, -1):
            message = self._find_change(self._log[index])
            if message is not None:
                is_kept = message.seq > self.floor
                return fingerprint(message.change(self._log[index][1][0])) if is_kept else self.floor_print
            if last - index > STALE_MAX:
                # A key that is written over and over leaves many stale items.
                self._forget_stale()
                return self.before(revision)
        return self.floor_print

    def _sort(self) -> None:
        if not self._is_sorted:
            self._log.sort()
            self._is_sorted = True

    def _index_after(self, revision: int) -> int:
        return bisect_right(self._log, revision, key=lambda item: item[0])

    def _forget_stale(self) -> None:
        self._log = [item for item in self._log if self._find_change(item) is not None]

    def _find_change(self, item: tuple[int, EntryId]) -> Message | None:
        """The change of an item of the log; None if a later write has replaced it."""
        message = self._last_message(item[1])
        if message is None or message.seq == item[0]:
            return message
        return decode_touched(message) if message.op == "touch" and message.value_seq == item[0] else None

    def _last_message(self, entry_id: EntryId) -> Message | None:
        return self.heads[entry_id[0]].get(entry_id[1]) or self._ends.get(entry_id)

    def status(self) -> Status:
        """The namespace at a glance."""
        weights = [_weight(message) for _, message in self.after(self.floor)]
        return Status(
            store_id=self._stream.store_id,
            epoch=1,
            revision=max(self.revision, self.floor),
            floor=self.floor,
            keys=len(self.heads["data"]),
            size_bytes=self.size_bytes,
            log_changes=len(weights),
            log_bytes=sum(weights),
            now_ms=self._stream.now_ms(),
            behind_ms=self._stream.behind_ms(),
        )

    async def trim(self, window: Window) -> int:
        """Raise the floor, and drop the ends of keys that have been below it for a while."""
        now_ms = self._stream.now_ms()
        logged = [*self.after(self.floor)]
        oldest = [(message.seq, message.at_ms, _weight(message)) for _, message in logged]
        size_bytes = sum(weight for _, _, weight in oldest)
        dropped, _, floor = window.excess(oldest, count=len(oldest), size_bytes=size_bytes, now_ms=now_ms)
        if dropped:
            (family, _), last = logged[dropped - 1]
            floor_print = fingerprint(last.change(family))
            if not await self._stream.raise_floor(floor, floor_print):
                dropped = 0
            elif floor > self.floor:
                self.floor, self.floor_print = floor, floor_print
        old = [
            (entry_id, message)
            for entry_id, message in self._ends.items()
            if message.seq <= self.floor and message.at_ms < now_ms - END_MS
        ][:ENDS_MAX]
        await asyncio.gather(
            *(self._stream.purge(self._stream.subjects.of(entry_id), message.seq) for entry_id, message in old)
        )
        for entry_id, message in old:
            if self._ends.get(entry_id) is message:
                del self._ends[entry_id]
        return dropped


def _weight(message: Message) -> int:
    """The size of a change in totals: its key and its value."""
    key = message.entry.key
    return message.size_bytes + (len(key) if key.isascii() else len(key.encode()))


def _limpet_header(headers: bytes) -> bytes:
    """The Limpet header of a message; empty where another program wrote it."""
    at = headers.find(b"\r\nLimpet: ")
    return b"" if at < 0 else headers[at + 2 : headers.index(b"\r\n", at + 2)]


def _header(headers: bytes, name: bytes) -> bytes:
    at = headers.index(b"\r\n" + name + b": ") + len(name) + 4
    return headers[at : headers.index(b"\r\n", at)]


class Alarms(Follower):
    """Which entries expire, and when."""

    def __init__(self, stream: NamespaceStream, connect: Callable[[], Any]) -> None:
        super().__init__(stream, connect, stream.subjects.alarms)
        self._heap: list[tuple[int, EntryId]] = []
        # The message number of each alarm. An alarm that is set again gets a new number, and stays one alarm.
        self._numbers: dict[tuple[int, EntryId], int] = {}
        self._done: dict[int, int] = {}
        self._due_lock = asyncio.Lock()

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._heap = []
        self._numbers = {}
        self._done = {}

    def take(self, subject: str, seq: int, headers: bytes) -> None:
        """Add an alarm."""
        alarm = self._stream.subjects.parse_alarm(subject)
        if alarm not in self._numbers:
            heapq.heappush(self._heap, alarm)
        self._numbers[alarm] = seq

    async def due(self, limit: int) -> list[Expire]:
        """The entries that are due now, as the writes that expire them."""
        async with self._due_lock:
            while True:
                now_ms = self._stream.now_ms()
                passed: list[tuple[int, EntryId]] = []
                while self._heap and self._heap[0][0] <= now_ms and len(passed) < limit:
                    passed.append(heapq.heappop(self._heap))
                heap, numbers = self._heap, {item: self._numbers[item] for item in passed}
                kept = passed
                try:
                    last = await self._stream.load_all({entry_id: None for _, entry_id in passed})
                    # An alarm that was set again meanwhile is checked again.
                    kept = [
                        item
                        for item in passed
                        if _expires_ms(last[item[1]]) == item[0] or self._numbers.get(item) != numbers[item]
                    ]
                finally:
                    for item in kept:
                        heapq.heappush(heap, item)
                if heap is not self._heap:
                    # The alarms were cleared meanwhile, and are delivered again.
                    continue
                for item in set(passed) - set(kept):
                    second = item[0] // 1000
                    self._done[second] = max(numbers[item], self._done.get(second, 0))
                    del self._numbers[item]
                if kept or len(passed) < limit:
                    break
            await self._drop_done(now_ms)
        ends = (
            (entry_id, last[entry_id]) for expires_ms, entry_id in kept if _expires_ms(last[entry_id]) == expires_ms
        )
        return [Expire(entry_id[1], message.seq, entry_id[0]) for entry_id, message in ends if message is not None]

    async def _drop_done(self, now_ms: int) -> None:
        """Purge the alarms of past seconds in which no entry is left to expire."""
        first = self._heap[0][0] // 1000 if self._heap else now_ms
        over = [second for second in self._done if second < first and second < now_ms // 1000]
        for second in over:
            seq = self._done.pop(second)
            await self._stream.purge(f"{self._stream.subjects.alarms_of(second)}>", seq)


def _expires_ms(message: Message | None) -> int | None:
    return None if message is None or message.held is None else message.held.expires_ms
