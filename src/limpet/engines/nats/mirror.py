"""What a process knows of a whole stream without its values, for as long as somebody asks.

NATS finds the last message of a subject, and no subjects in an order. So whoever scans, watches or
counts follows the stream: every message is delivered once, without its body, and then each as it
comes. What is read here is as new as the stream was when it was asked, because the asker looks first
whether there is anything that has not been delivered yet.

Whoever only sweeps follows the alarms alone, of which an entry that expires has one.
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

from limpet.engines.nats.connection import Link
from limpet.engines.nats.messages import Message, Place, parse, written
from limpet.engines.nats.stream import Space
from limpet.engines.sorted_keys import SortedKeys
from limpet.errors import Unavailable
from limpet.keys import Span
from limpet.model import BEGINNING, FAMILIES, Expire, Family, Status, Window, fingerprint, live

__all__ = ["Alarms", "Mirror"]

IDLE_S: Final = 60.0
LOOK_S: Final = 0.05
# After so long without a message delivery is started again; each time without one, after twice as long.
STALL_S: Final = 2.0
# After so long without a message whoever waits is told. However long it takes while messages come.
PROGRESS_S: Final = 10.0
# Ends are kept at least twice as long after they were trimmed, so none is missed by resuming.
APART_S_MAX: Final = 300.0
END_MS: Final = 600_000
ENDS_MAX: Final = 500
STALE_MAX: Final = 64
RECEIPTS_MIN: Final = 1000

_json = msgspec.json.Encoder().encode


class Follower:
    """Follows the messages of a stream in their order, without their bodies."""

    def __init__(self, space: Space, link: Callable[[], Any], subject: str = ">") -> None:
        self._space = space
        self._link = link
        self._subject = subject
        self._on: Link | None = None
        # The line that messages last came on, and what the last of them said of itself.
        self._last_on: Link | None = None
        self._last_told = b""
        self._number = b""
        self._name = ""
        self._delivered = 0
        self._store_id = ""
        self._moved = asyncio.Event()
        self._moved_at = 0.0
        self._stall_s = STALL_S
        self._used_at = 0.0
        self._together_at = 0.0
        self._resting: asyncio.TimerHandle | None = None
        self._starting = asyncio.Lock()
        self.position = 0

    def take(self, subject: str, seq: int, headers: bytes) -> None:
        """Take a message."""
        raise NotImplementedError

    def clear(self) -> None:
        """Know nothing any more."""
        self.position = 0

    async def catch_up(self) -> None:
        """Know everything that was in the stream when this was asked."""
        loop = asyncio.get_running_loop()
        self._used_at = loop.time()
        await self._start()
        seq = await self._following()
        if seq is None:
            self._together_at = loop.time()
            return
        last = int((await self._space.info())["state"]["last_seq"])
        stood, stood_since = (self.position, seq), loop.time()
        while seq is not None and seq <= last:
            await self._reach(seq)
            if self.position >= last:
                break
            if stood != (self.position, seq):
                stood, stood_since = (self.position, seq), loop.time()
            elif loop.time() - stood_since > PROGRESS_S:
                raise Unavailable(
                    f"stream {self._space.stream}: the server has delivered no message for {PROGRESS_S:g} s, "
                    f"at message {self.position} of {last}; try again, or look at what keeps the server busy"
                )
            seq = await self._following()
        self._together_at = loop.time()

    async def _following(self) -> int | None:
        """The number of the next message that was not delivered yet."""
        found = await self._space.get({"seq": self.position + 1, "next_by_subj": self._subject})
        return None if found is None else found[1]

    async def _reach(self, seq: int) -> None:
        """Wait for a message, which may be gone before it is delivered."""
        loop = asyncio.get_running_loop()
        if self.position >= seq:
            return
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._moved.wait()
        if self._starting.locked():
            # Somebody else starts it, which takes as long as it takes.
            return
        is_stalled = loop.time() - self._moved_at > self._stall_s
        if is_stalled:
            self._stall_s *= 2
        if is_stalled or self._on is None or self._on.is_lost:
            self.rest()
            await self._start()

    async def _start(self) -> None:
        """Have messages delivered, from where we stand."""
        if self._is_running():
            return
        async with self._starting:
            if self._is_running():
                return
            link: Link = await self._link()
            apart_s = asyncio.get_running_loop().time() - self._together_at
            is_other = self._store_id != self._space.store_id or apart_s > APART_S_MAX
            if is_other or (self._last_on not in (None, link) and not await self._is_as_left()):
                self.clear()
                self._store_id = self._space.store_id
                # What is known from now on is resumed like any other, or a load that is interrupted would never end.
                self._together_at = asyncio.get_running_loop().time()
            self._last_on = link
            delivered, self._number = link.listen(self._heard)
            self._on, self._name, self._delivered = link, os.urandom(8).hex(), 0
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
            stream = self._space.stream
            asked = {"stream_name": stream, "config": config, "action": "create"}
            try:
                await self._space.api(f"CONSUMER.CREATE.{stream}.{self._name}", asked)
            except BaseException:
                self.rest()
                raise
            loop = asyncio.get_running_loop()
            self._moved_at = loop.time()
            if self._resting is None:
                self._resting = loop.call_later(IDLE_S, self._rest_if_idle)

    async def _is_as_left(self) -> bool:
        """Whether the stream still has the message that was last delivered.

        A server that was away may come back with a backup of the stream. It has the same name, and other messages
        under the same numbers.
        """
        if not self.position or not self._last_told:
            return not self.position
        found = await self._space.get({"seq": self.position})
        return found is not None and _told_in(found[2]) == self._last_told

    def _is_running(self) -> bool:
        return self._on is not None and not self._on.is_lost and self._store_id == self._space.store_id

    def _heard(self, subject: bytes, reply: bytes, headers: bytes, _: bytes) -> None:
        link = self._on
        if link is None:
            return
        if headers.startswith(b"NATS/1.0 100"):
            stalled = headers.find(b"\r\nNats-Consumer-Stalled: ")
            if stalled >= 0:
                reply = headers[stalled + 25 : headers.index(b"\r\n", stalled + 2)]
            if reply:
                link.tell(reply.decode())
            return
        words = reply.split(b".")
        at = 5 if len(words) == 9 else 7
        seq, delivered = int(words[at]), int(words[at + 1])
        if delivered != self._delivered + 1:
            # Something is missing in between. Whoever asks next starts again from where we stand.
            self.rest()
            return
        self._delivered = delivered
        self.take(subject.decode(), seq, headers)
        self.position, self._last_told = seq, _told_in(headers)
        self._moved_at, self._stall_s = link._loop.time(), STALL_S
        self._moved.set()

    def rest(self) -> None:
        """Have nothing delivered any more."""
        link, self._on = self._on, None
        if link is not None and not link.is_lost:
            link.forget(self._number)
            link.tell(f"$JS.API.CONSUMER.DELETE.{self._space.stream}.{self._name}")
        self._moved.set()

    def _rest_if_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._resting = None
        if self._on is None:
            return
        if loop.time() - self._used_at > IDLE_S:
            self.rest()
        else:
            self._together_at = loop.time()
            self._resting = loop.call_later(IDLE_S, self._rest_if_idle)


class Mirror(Follower):
    """All entries of a namespace, without their values, and the order in which they were last changed."""

    def __init__(self, space: Space, link: Callable[[], Any], rings: Callable[[], None]) -> None:
        super().__init__(space, link)
        self._rings = rings
        self.clear()

    def clear(self) -> None:
        """Know nothing any more."""
        super().clear()
        self.floor = 0
        self.floor_print = BEGINNING
        self.revision = 0
        self.size_bytes = 0
        self.heads: dict[Family, dict[str, Message]] = {family: {} for family in FAMILIES}
        self._keys: dict[Family, SortedKeys] = {family: SortedKeys() for family in FAMILIES}
        self._ends: dict[Place, Message] = {}
        self._log: list[tuple[int, Place]] = []
        self._receipts_max = RECEIPTS_MIN
        self._is_sorted = True

    def take(self, subject: str, seq: int, headers: bytes) -> None:
        """Take a message."""
        place = self._space.subjects.place(subject)
        if place is None:
            if subject == self._space.subjects.floor:
                self.floor_print = _header(headers, b"Limpet-Floor").decode()
                self.floor = int(self.floor_print.partition("-")[0])
                self._rings()
            return
        family, key = place
        message = parse(key, seq, headers, None)
        self._space.see_time(message.at_ms)
        heads = self.heads[family]
        before = heads.get(key)
        if message.held is None:
            heads.pop(key, None)
            self._ends[place] = message
        else:
            heads[key] = message
            self._ends.pop(place, None)
            if before is None:
                self._keys[family].add(key)
        if family == "receipt":
            self._forget_receipts()
            return
        if family == "data":
            self.size_bytes += _weight(message) * (message.held is not None) - (_weight(before) if before else 0)
        self.revision = max(self.revision, seq)
        if message.op == "touch" and (before is None or before.value_seq != message.value_seq):
            # What it lies on was gone before we came.
            self._log.append((message.value_seq, place))
            self._is_sorted = False
        self._log.append((seq, place))
        if len(self._log) > 64 + 4 * (sum(map(len, self.heads.values())) + len(self._ends)):
            self._forget_stale()
        self._rings()

    def _forget_receipts(self) -> None:
        """Let go of receipts that the server has dropped, which it does without a word."""
        receipts = self.heads["receipt"]
        if len(receipts) > self._receipts_max:
            now_ms = self._space.now_ms()
            for key in [key for key, message in receipts.items() if live(message.entry, now_ms) is None]:
                del receipts[key]
            self._receipts_max = 2 * len(receipts) + RECEIPTS_MIN

    def keys(self, family: Family, span: Span) -> Iterator[str]:
        """The keys of a span, in their order."""
        return self._keys[family].between(span, self.heads[family])

    def after(self, revision: int) -> Iterator[tuple[Place, Message]]:
        """The last change of each key, and what a touch lies on, of those after a revision, in their order."""
        self._sort()
        # Not while it is read: messages come in between.
        for item in self._log[self._index_after(revision) :]:
            message = self._told(item)
            if message is not None:
                yield item[1], message

    def before(self, revision: int) -> str:
        """The fingerprint of the change at a revision, or of the last one before it that is still to be told."""
        self._sort()
        last = self._index_after(revision) - 1
        for index in range(last, -1, -1):
            message = self._told(self._log[index])
            if message is not None:
                is_kept = message.seq > self.floor
                return fingerprint(message.change(self._log[index][1][0])) if is_kept else self.floor_print
            if last - index > STALE_MAX:
                # A key that is written over and over leaves many of these, which nobody needs.
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
        self._log = [item for item in self._log if self._told(item) is not None]

    def _told(self, item: tuple[int, Place]) -> Message | None:
        """The change of this number, if it still is to be told."""
        message = self._of(item[1])
        if message is None or message.seq == item[0]:
            return message
        return written(message) if message.op == "touch" and message.value_seq == item[0] else None

    def _of(self, place: Place) -> Message | None:
        return self.heads[place[0]].get(place[1]) or self._ends.get(place)

    def status(self) -> Status:
        """The namespace at a glance."""
        weights = [_weight(message) for _, message in self.after(self.floor)]
        return Status(
            store_id=self._space.store_id,
            epoch=1,
            revision=max(self.revision, self.floor),
            floor=self.floor,
            keys=len(self.heads["data"]),
            size_bytes=self.size_bytes,
            log_changes=len(weights),
            log_bytes=sum(weights),
            now_ms=self._space.now_ms(),
            behind_ms=self._space.behind_ms(),
        )

    async def trim(self, window: Window) -> int:
        """Move the floor, and drop the ends that have lain below it for a while."""
        now_ms = self._space.now_ms()
        told = [*self.after(self.floor)]
        oldest = [(message.seq, message.at_ms, _weight(message)) for _, message in told]
        size_bytes = sum(weight for _, _, weight in oldest)
        dropped, _, floor = window.excess(oldest, count=len(oldest), size_bytes=size_bytes, now_ms=now_ms)
        if dropped:
            (family, _), last = told[dropped - 1]
            floor_print = fingerprint(last.change(family))
            if not await self._space.raise_floor(floor, floor_print):
                dropped = 0
            elif floor > self.floor:
                self.floor, self.floor_print = floor, floor_print
        old = [
            (place, message)
            for place, message in self._ends.items()
            if message.seq <= self.floor and message.at_ms < now_ms - END_MS
        ][:ENDS_MAX]
        await asyncio.gather(
            *(self._space.purge(self._space.subjects.of(place), message.seq) for place, message in old)
        )
        for place, message in old:
            if self._ends.get(place) is message:
                del self._ends[place]
        return dropped


def _weight(message: Message) -> int:
    """What a change counts in totals: its key and its value."""
    key = message.entry.key
    return message.size_bytes + (len(key) if key.isascii() else len(key.encode()))


def _told_in(headers: bytes) -> bytes:
    """What a message says of its entry; nothing where it is none of ours."""
    at = headers.find(b"\r\nLimpet: ")
    return b"" if at < 0 else headers[at + 2 : headers.index(b"\r\n", at + 2)]


def _header(headers: bytes, name: bytes) -> bytes:
    at = headers.index(b"\r\n" + name + b": ") + len(name) + 4
    return headers[at : headers.index(b"\r\n", at)]


class Alarms(Follower):
    """When to look at which entry."""

    def __init__(self, space: Space, link: Callable[[], Any]) -> None:
        super().__init__(space, link, space.subjects.alarms)
        self._heap: list[tuple[int, Place]] = []
        # The number of each alarm. One that was set again has a new one, and is still one alarm.
        self._numbers: dict[tuple[int, Place], int] = {}
        self._done: dict[int, int] = {}
        self._asked = asyncio.Lock()

    def clear(self) -> None:
        """Know nothing any more."""
        super().clear()
        self._heap = []
        self._numbers = {}
        self._done = {}

    def take(self, subject: str, seq: int, headers: bytes) -> None:
        """Take an alarm."""
        alarm = self._space.subjects.alarmed(subject)
        if alarm not in self._numbers:
            heapq.heappush(self._heap, alarm)
        self._numbers[alarm] = seq

    async def due(self, limit: int) -> list[Expire]:
        """What is due now, as the writes that end it."""
        async with self._asked:
            while True:
                now_ms = self._space.now_ms()
                come: list[tuple[int, Place]] = []
                while self._heap and self._heap[0][0] <= now_ms and len(come) < limit:
                    come.append(heapq.heappop(self._heap))
                heap, numbers = self._heap, {item: self._numbers[item] for item in come}
                stays = come
                try:
                    last = await self._space.lasts({place: None for _, place in come})
                    # One that was set again while we looked is looked at again.
                    stays = [
                        item
                        for item in come
                        if _expires_ms(last[item[1]]) == item[0] or self._numbers.get(item) != numbers[item]
                    ]
                finally:
                    for item in stays:
                        heapq.heappush(heap, item)
                if heap is not self._heap:
                    # All was forgotten meanwhile, and is told anew.
                    continue
                for item in set(come) - set(stays):
                    second = item[0] // 1000
                    self._done[second] = max(numbers[item], self._done.get(second, 0))
                    del self._numbers[item]
                if stays or len(come) < limit:
                    break
            await self._drop_done(now_ms)
        ends = ((place, last[place]) for expires_ms, place in stays if _expires_ms(last[place]) == expires_ms)
        return [Expire(place[1], message.seq, place[0]) for place, message in ends if message is not None]

    async def _drop_done(self, now_ms: int) -> None:
        """Purge the alarms of seconds that are over and have nothing left to end."""
        first = self._heap[0][0] // 1000 if self._heap else now_ms
        over = [second for second in self._done if second < first and second < now_ms // 1000]
        for second in over:
            seq = self._done.pop(second)
            await self._space.purge(f"{self._space.subjects.alarms_of(second)}>", seq)


def _expires_ms(message: Message | None) -> int | None:
    return None if message is None or message.held is None else message.held.expires_ms
