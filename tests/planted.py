"""Bugs on purpose: a test of the tests.

Each function here breaks one promise inside a running Limpet. Loaded as a pytest plugin with the
environment variable ``LIMPET_PLANTED`` naming one of them, it breaks the Limpet that the suite then
judges. `tests/test_planted_bugs.py` runs the suite once for each and fails if the suite passes.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from limpet import hub, model, transition
from limpet.commit import group as commit_group
from limpet.engines import memory
from limpet.engines.memory_namespace import Namespace
from limpet.engines.nats import alarms, log
from limpet.engines.postgres import engine as postgres
from limpet.engines.postgres import sql
from limpet.engines.redis import engine as redis
from limpet.engines.sqlite import cache, foreign, group
from limpet.engines.sqlite import engine as sqlite
from limpet.engines.sqlite.group import GroupWriter
from limpet.errors import Ambiguous, Unavailable
from limpet.model import Batch, Change, Commit, Entry, Expire, HeldBy, LogPage, Refusal, Window

# Any name below may move with the code it breaks.
# mypy: disable-error-code="method-assign, attr-defined, assignment"


def version_not_restarting() -> None:
    """A key that is created again goes on counting from its earlier life."""
    right, latest = transition._make_entry, dict[str, int]()

    def wrong(write: Any, current: Entry | None, *rest: Any) -> Entry | Refusal:
        entry = right(write, current, *rest)
        if isinstance(entry, Refusal):
            return entry
        if current is None and write.key in latest:
            entry = msgspec.structs.replace(entry, version=latest[write.key] + 1)
        latest[write.key] = entry.version
        return entry

    transition._make_entry = wrong


def revision_reused() -> None:
    """A delete gives its revision back."""
    right = Namespace._store

    def wrong(self: Any, change: Change, weight_bytes: int) -> None:
        right(self, change, weight_bytes)
        if change.op == "delete":
            # Those that were skipped before it too, or the bug would show in some runs only.
            self.counters.revision = change.entry.revision

    Namespace._store = wrong


def early_expiry() -> None:
    """Everything expires a tenth of a second too soon."""
    right = model.live

    def wrong(entry: Entry | None, now_ms: int) -> Entry | None:
        return right(entry, now_ms + 100)

    for module in (transition, memory, sqlite):
        module.live = wrong


def expired_visible_in_scan() -> None:
    """A scan shows what has expired until the sweeper comes."""
    right = memory.MemoryEngine.scan

    async def wrong(self: Any, *args: Any, **options: Any) -> Any:
        memory.live = lambda entry, now_ms: entry
        try:
            return await right(self, *args, **options)
        finally:
            memory.live = model.live

    memory.MemoryEngine.scan = wrong


def refused_batch_leaves_a_trace() -> None:
    """A refused batch has done its first write."""
    right = memory.MemoryEngine.commit

    async def wrong(self: Any, namespace: str, batch: Batch) -> Commit | Refusal:
        outcome = await right(self, namespace, batch)
        if isinstance(outcome, Refusal) and len(batch.writes) > 1:
            await right(self, namespace, msgspec.structs.replace(batch, guards=(), writes=batch.writes[:1]))
        return outcome

    memory.MemoryEngine.commit = wrong


def group_shares_fate() -> None:
    """Where one member of a group is refused, all are."""
    right = GroupWriter._commit_group

    def wrong(self: Any, group: Any) -> Sequence[Any]:
        outcomes = right(self, group)
        refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
        return [refusals[0]] * len(outcomes) if refusals else outcomes

    GroupWriter._commit_group = wrong


def watch_drops_when_full() -> None:
    """A watcher that is behind gets the newest changes, and no sign that others are missing."""
    right = hub.Watch._follow

    async def wrong(self: Any) -> None:
        await right(self)
        while len(self._ready) > 64:
            self._ready.popleft()

    hub.Watch._follow = wrong


def lock_without_fence_check() -> None:
    """A fence always holds."""
    right = transition._holds
    transition._holds = lambda condition, found: isinstance(condition, HeldBy) or right(condition, found)


def receipt_in_a_second_step() -> None:
    """The write first, its receipt with the next commit that happens to come."""
    right, late = Namespace.commit, dict[int, dict[str, Entry]]()

    def wrong(self: Any, batch: Batch, now_ms: int) -> Any:
        receipts = self.map["receipt"]
        receipts |= late.pop(id(self), {})
        earlier = dict(receipts)
        outcome = right(self, batch, now_ms)
        late[id(self)] = {key: entry for key, entry in receipts.items() if key not in earlier}
        self.map["receipt"] = earlier
        return outcome

    Namespace.commit = wrong


def late_request_is_done() -> None:
    """A request is done that comes after its own retry."""
    commit_group.may_be_superseded = lambda batch: False


# Two for each engine, after faults that engines have had -------------------------------------------------------------


def rewritten_entry_is_due() -> None:
    """Memory: an entry that was written again is due at its old moment."""
    right = memory.MemoryEngine.due

    async def wrong(self: Any, namespace: str, *, limit: int = 500) -> list[Expire]:
        state = self._state(namespace)
        now_ms = state.now_ms(self._memory.clock)
        stale = [Expire(item[2], item[3], item[1]) for item in state.expiries if item[0] <= now_ms]
        return stale[:limit] or await right(self, namespace, limit=limit)

    memory.MemoryEngine.due = wrong


def log_page_without_its_past() -> None:
    """Memory: a page of the log does not say which change it follows, so another history is taken for the same."""
    right = memory.MemoryEngine._read_log

    def wrong(self: Any, *args: Any) -> LogPage:
        return msgspec.structs.replace(right(self, *args), before=model.BEGINNING)

    memory.MemoryEngine._read_log = wrong


def stale_cache() -> None:
    """SQLite: a commit through another connection does not end the cache."""
    right, first = cache.WalHeader.read, weakref.WeakKeyDictionary[Any, bytes]()
    cache.WalHeader.read = lambda self: first.setdefault(self, right(self))


def expired_entry_comes_back() -> None:
    """SQLite: when the clock is set back, reads go back with it."""
    sqlite.SqliteEngine._now_ms = lambda self: self._clock.now_ms()


def superseded_request_is_done() -> None:
    """PostgreSQL: a first attempt does not look for the mark of its retry, and is applied after it."""
    right = postgres.encode_units

    def wrong(units: Sequence[Any]) -> list[list[Any]]:
        for unit in units:
            unit.expected = {entry_id: one for entry_id, one in unit.expected.items() if entry_id[0] != "superseded"}
        return right(units)

    postgres.encode_units = wrong


def handle_forgets_the_time() -> None:
    """PostgreSQL: a handle does not remember which time it has seen, so what it saw expire is back."""
    postgres.PostgresEngine._observe_time = lambda self, namespace, server_ms: server_ms


def foreign_key_is_overwritten() -> None:
    """Redis: a first write does not check whether another program uses the key."""
    _edit_script((rb"call\('EXISTS', unpack\(\w+\)\) > 0", b"false"), (rb"\w+ ~= 'none'", b"false"))


def seen_expiry_is_not_recorded() -> None:
    """Redis: what a reader saw expire is back when the clock is set back."""
    _edit_script((rb"if saw_expiry and \w+ then", b"if false then"))


def expected_revision_is_not_compared() -> None:
    """Redis: the short way puts a value over any revision."""
    _edit_script((rb"wanted ~= old_revision", b"wanted == nil"))


def patches_are_counted_wrong() -> None:
    """Redis: a field that a patch replaces goes on counting."""
    _edit_script((rb"at and -field_bytes\(record\[at \+ 1\]\)", b"at and 0"))


def overwritten_change_is_skipped() -> None:
    """NATS: of two changes of a key that come one after the other, a reader of the log gets the second."""
    append = log.Log.append

    def wrong(self: log.Log, item: log.LogItem) -> None:
        if self._items and self._items[-1].entry_id == item.entry_id:
            self._items.pop()
        append(self, item)

    log.Log.append = wrong


def alarm_is_kept_twice() -> None:
    """NATS: an entry that was made again at the same moment is due twice."""

    def wrong(self: Any, subject: str, seq: int, headers: bytes, stored_ms: int) -> None:
        alarm = self._stream.subjects.parse_alarm(subject)
        heapq.heappush(self._heap, alarm)
        self._numbers[alarm] = seq

    alarms.Alarms.take = wrong


# Two for each of: lost replies, long gaps before a retry, trimming, wake-ups, and the follower of a hub --------------


def lost_reply_is_unavailable() -> None:
    """Redis: a commit whose reply was lost is reported as not applied."""
    _hide_ambiguity(redis.RedisEngine)


def retry_is_sent_as_new() -> None:
    """PostgreSQL: a retry is not recognised as one."""
    right = postgres.PostgresEngine.commit

    async def wrong(self: Any, namespace: str, batch: Batch) -> Commit | Refusal:
        return await right(self, namespace, msgspec.structs.replace(batch, request_id=None, retry_since=None))

    postgres.PostgresEngine.commit = wrong


def recall_reads_the_first_changes() -> None:
    """Memory: a retry looks for its first attempt in the next 20 changes alone."""

    def wrong(self: Any, after: int, request_id: str) -> list[Change]:
        following = [change for change in self.log if change.revision > after]
        return [change for change in following[:20] if change.cause == request_id]

    Namespace.find_changes = wrong


def recall_reads_the_latest_changes() -> None:
    """SQLite: a retry looks for its first attempt in the latest 1,000 changes alone."""
    latest = "revision > (SELECT max(revision) - 1000 FROM limpet_changes)"
    group.CHANGES_OF_REQUEST = f"{group.CHANGES_OF_REQUEST} AND {latest}"


def trimmed_changes_are_hidden() -> None:
    """SQLite: trimming moves the floor and deletes nothing."""
    sqlite.DROP_CHANGES = f"{sqlite.DROP_CHANGES} AND false"


def superseded_marks_stay() -> None:
    """Memory: the marks of superseded requests are never forgotten."""
    right = memory.MemoryEngine.trim

    async def wrong(self: Any, namespace: str, window: Window) -> int:
        kept = dict(self._state(namespace).map["superseded"])
        dropped = await right(self, namespace, window)
        self._state(namespace).map["superseded"] = kept
        return dropped

    memory.MemoryEngine.trim = wrong


def commits_wake_no_waiter() -> None:
    """Memory: a commit wakes no waiter, so each waits until its time is over."""
    memory.Wakeup.notify = lambda self, namespace: None


def other_processes_are_noticed_late() -> None:
    """SQLite: a waiter looks for commits of other processes every three seconds."""
    setattr(foreign, "LOOK_S", 3.0)  # noqa: B010


def follower_outlives_its_watches() -> None:
    """A hub goes on reading the log after its last watch has ended."""
    right = hub.Hub.leave

    def wrong(self: Any) -> None:
        follower, self._follower = self._follower, None
        right(self)
        self._follower = follower

    hub.Hub.leave = wrong


def replaced_follower_goes_on() -> None:
    """A hub's follower that missed its cancellation goes on beside the one that replaced it."""
    right = hub.Hub._follow

    async def wrong(self: Any) -> None:
        await right(self)
        while self._follower is not None:
            self._add_page(await self.engine.changes(self.namespace, self.end.revision, wait_s=hub.WAIT_S))

    hub.Hub._follow = wrong


# Two that were found by reading ------------------------------------------------------------------------------------


def foreign_hash_is_patched() -> None:
    """Redis: a record is patched without a look at its hash, which another program may have replaced."""
    _edit_script((rb"call\('HLEN', prefix \.\. key\)", b""))


def expiry_by_the_bare_clock() -> None:
    """PostgreSQL: a scan takes the clock of the server, also where the namespace has recorded a later time."""
    for name in ("SCAN", "SCAN_KEYS"):
        text = getattr(sql, name)
        bare = text.replace(sql._TIME, "{schema}.limpet_now_ms()")
        assert bare != text, "the bug has lost its target"
        setattr(sql, name, bare)


def _hide_ambiguity(engine: Any) -> None:
    right = engine.commit

    async def wrong(self: Any, namespace: str, batch: Batch) -> Commit | Refusal:
        try:
            outcome: Commit | Refusal = await right(self, namespace, batch)
        except Ambiguous as error:
            raise Unavailable(str(error)) from error
        return outcome

    engine.commit = wrong


def _edit_script(*edits: tuple[bytes, bytes]) -> None:
    """Have the Redis engine send a script with another text."""
    right = redis.load_script

    def wrong(**options: Any) -> tuple[bytes, str]:
        text, _ = right(**options)
        for pattern, replacement in edits:
            text, times = re.subn(pattern, replacement, text)
            assert times == 1, f"{pattern!r} is found {times} times: the bug has lost its target"
        return text, hashlib.sha1(text, usedforsecurity=False).hexdigest()

    redis.load_script = wrong


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        version_not_restarting,
        revision_reused,
        early_expiry,
        expired_visible_in_scan,
        refused_batch_leaves_a_trace,
        group_shares_fate,
        watch_drops_when_full,
        lock_without_fence_check,
        receipt_in_a_second_step,
        late_request_is_done,
        rewritten_entry_is_due,
        log_page_without_its_past,
        stale_cache,
        expired_entry_comes_back,
        superseded_request_is_done,
        handle_forgets_the_time,
        foreign_key_is_overwritten,
        seen_expiry_is_not_recorded,
        expected_revision_is_not_compared,
        patches_are_counted_wrong,
        overwritten_change_is_skipped,
        alarm_is_kept_twice,
        lost_reply_is_unavailable,
        retry_is_sent_as_new,
        recall_reads_the_first_changes,
        recall_reads_the_latest_changes,
        trimmed_changes_are_hidden,
        superseded_marks_stay,
        commits_wake_no_waiter,
        other_processes_are_noticed_late,
        follower_outlives_its_watches,
        replaced_follower_goes_on,
        foreign_hash_is_patched,
        expiry_by_the_bare_clock,
    )
}


def pytest_configure() -> None:
    """Plant the bug that the environment names."""
    BUGS[os.environ["LIMPET_PLANTED"]]()
