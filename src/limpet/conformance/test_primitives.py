"""The ten primitives, called on the engine itself.

Nothing is between the test and the engine: no retries, no checks, no sweeper. For the sync API a
call runs as that API runs it, in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
import pytest_asyncio

import limpet
from limpet import codec
from limpet.conformance.conftest import Elapse, OpenStore, SetBack
from limpet.conformance.plugin import NOT_JUDGED
from limpet.conformance.support import (
    PATIENCE_S,
    Blocking,
    assert_counted,
    in_thread,
    session_of,
    stands_still,
)
from limpet.engine import Engine
from limpet.errors import Closed, Compacted, TransientError
from limpet.keys import Span, pattern_span, prefix_span
from limpet.model import (
    ABSENT,
    BEGINNING,
    FAMILIES,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Change,
    Commit,
    Condition,
    Delete,
    Entry,
    Equals,
    Expire,
    Family,
    FieldEquals,
    Guard,
    HeldBy,
    Patch,
    Put,
    Refusal,
    Revision,
    Touch,
    Version,
    Window,
    Write,
    fingerprint,
)

T = TypeVar("T")

ALL = Span("", None)
KEEP_FIVE = Window(changes=5, age_ms_min=0)


class Primitives:
    """The primitives of an engine on one namespace, called the way the store of the test calls them."""

    def __init__(self, store: Any) -> None:
        self.engine: Engine = session_of(store).engine
        self.name: str = store.name
        self._runner = store._twin._runner if isinstance(store, Blocking) else None

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call of the engine the way the store of the test does."""
        return await call if self._runner is None else await asyncio.to_thread(self._runner.run, call)

    async def read(self, *keys: str, **options: Any) -> list[Entry | None]:
        return await self.run(self.engine.read(self.name, keys, **options))

    async def scan(self, span: Span = ALL, **options: Any) -> Any:
        return await self.run(self.engine.scan(self.name, span, **options))

    async def count(self, span: Span = ALL, **options: Any) -> int:
        return await self.run(self.engine.count(self.name, span, **options))

    async def commit(self, *writes: Write, guards: tuple[Guard, ...] = (), **options: Any) -> Commit | Refusal:
        batch = Batch(guards, writes, options.pop("request_id", limpet.new_request_id()), **options)
        return await self.run(self.engine.commit(self.name, batch))

    async def must_commit(self, *writes: Write, **options: Any) -> Commit:
        """Commit, and fail the test on a refusal."""
        outcome = await self.commit(*writes, **options)
        assert isinstance(outcome, Commit)
        return outcome

    async def must_refuse(self, *writes: Write, **options: Any) -> Refusal:
        """Commit, and fail the test unless it is refused."""
        outcome = await self.commit(*writes, **options)
        assert isinstance(outcome, Refusal)
        return outcome

    async def changes(self, after: int = 0, **options: Any) -> Any:
        return await self.run(self.engine.changes(self.name, after, **options))

    async def due(self, **options: Any) -> list[Expire]:
        return await self.run(self.engine.due(self.name, **options))

    async def trim(self, window: Window) -> int:
        return await self.run(self.engine.trim(self.name, window))

    async def status(self) -> limpet.Status:
        return await self.run(self.engine.status(self.name))

    async def log(self, **options: Any) -> list[Change]:
        """The whole log, page by page."""
        found: list[Change] = []
        after, head = (await self.status()).floor, (await self.status()).revision
        while after < head:
            page = await self.changes(after, **options)
            found += page.changes
            after = page.next_after
        return found

    async def image(self) -> list[Any]:
        """All entries, the log and the counters, to compare before and after."""
        entries = [(await self.scan(family=family)).entries for family in FAMILIES]
        status = await self.status()
        return [entries, await self.log(), status.revision, status.keys, status.size_bytes, status.log_changes]


@pytest_asyncio.fixture(loop_scope="module")
async def primitives(open_store: OpenStore) -> Primitives:
    """The primitives of an engine on an empty namespace without a sweeper."""
    return Primitives(await open_store(namespace=f"q-{uuid.uuid4().hex[:12]}", sweep=False))


def put(key: str, value: object = 1, **options: Any) -> Put:
    return Put(key, codec.encode(value), **options)


def only(commit: Commit) -> Entry:
    assert len(commit.entries) == 1
    assert commit.entries[0] is not None
    return commit.entries[0]


# read -------------------------------------------------------------------------


async def test_a_read_sees_what_was_acknowledged(primitives: Primitives) -> None:
    """A read sees every commit that was acknowledged before it began."""
    for number in range(50):
        entry = only(await primitives.must_commit(put("a", number)))
        assert await primitives.read("a") == [entry]
    await primitives.must_commit(Delete("a"))
    assert await primitives.read("a") == [None]


async def test_a_read_of_another_handle_sees_what_was_acknowledged(open_store: OpenStore) -> None:
    """A read sees every commit that was acknowledged before it began."""
    writer, reader = Primitives(await open_store(sweep=False)), Primitives(await open_store(sweep=False))

    for number in range(50):
        entry = only(await writer.must_commit(put("a", number)))
        assert await reader.read("a") == [entry]


async def test_reads_among_writers_never_go_back(open_store: OpenStore) -> None:
    """A read sees every commit that was acknowledged before it began."""
    primitives = Primitives(await open_store(sweep=False))
    acknowledged = 0

    async def write() -> None:
        nonlocal acknowledged
        for _ in range(40):
            number = only(await primitives.must_commit(Add("n", 1))).value
            acknowledged = max(acknowledged, number)

    async def read() -> None:
        for _ in range(100):
            before = acknowledged
            (found,) = await primitives.read("n")
            assert (0 if found is None else found.value) >= before

    await asyncio.gather(write(), write(), read(), read())
    assert acknowledged == 80


async def test_a_read_answers_in_the_order_of_its_keys(primitives: Primitives) -> None:
    """Several keys in one read come from one moment."""
    commit = await primitives.must_commit(put("a"), put("b", [2]), put("c", b"3"))
    a, b, c = commit.entries

    assert await primitives.read("c", "a", "missing", "b", "a") == [c, a, None, b, a]
    assert await primitives.read() == []
    many = [f"k{number}" for number in range(1000)]
    assert await primitives.read(*many) == [None] * 1000


async def test_several_keys_are_read_at_one_moment(primitives: Primitives) -> None:
    """Several keys in one read come from one moment."""
    keys = ["a", "b", "c", "d"]
    await primitives.must_commit(*(put(key, 0) for key in keys))
    over = False

    async def write(writer: int) -> None:
        nonlocal over
        for number in range(60):
            await primitives.must_commit(*(put(key, writer * 1000 + number) for key in keys))
        over = True

    async def read() -> None:
        while not over:
            found = await primitives.read(*keys)
            assert len({entry and entry.stored for entry in found}) == 1
            await asyncio.sleep(0)

    await asyncio.gather(write(1), write(2), read(), read())


async def test_what_expired_reads_as_absent(primitives: Primitives, elapse: Elapse) -> None:
    """An expired entry reads as absent, swept or not."""
    await primitives.must_commit(put("short", ttl_ms=300), put("long", ttl_ms=60_000), put("ever"))
    await primitives.must_commit(Put("job", b"{}", ttl_ms=300, family="lock"))
    assert None not in await primitives.read("short", "long", "ever")
    await elapse(0.4)

    before = [entry is None for entry in await primitives.read("short", "long", "ever")]
    await primitives.must_commit(*await primitives.due())
    after = [entry is None for entry in await primitives.read("short", "long", "ever")]

    assert before == after == [True, False, False]
    assert await primitives.read("short") == [None]
    assert await primitives.read("job", family="lock") == [None]
    assert [entry.key for entry in (await primitives.scan()).entries] == ["ever", "long"]


async def test_families_do_not_meet(primitives: Primitives) -> None:
    """A read sees every commit that was acknowledged before it began."""
    data = only(await primitives.must_commit(put("x", "data")))
    lock = only(await primitives.must_commit(Put("x", codec.encode("lock"), ttl_ms=60_000, family="lock")))

    assert await primitives.read("x") == [data]
    assert await primitives.read("x", family="lock") == [lock]
    assert await primitives.read("x", family="receipt") == [None]


async def test_a_brief_batch_is_answered_with_all_but_the_fields_of_records(primitives: Primitives) -> None:
    """A brief batch does and returns the same, except that entries of records may lack their value."""
    await primitives.must_commit(put("record", limpet.Fields(x=1, y="long")), put("plain", 1))
    patch = Patch("record", {"x": codec.encode_field(2, "x")}, if_exists=True)
    remembered: dict[str, Any] = {"request_id": "mine", "digest": b"digest", "receipt_ms": 600_000}

    done = await primitives.must_commit(patch, Add("plain", 1), is_brief=True, **remembered)

    (record, plain) = await primitives.read("record", "plain")
    assert record is not None
    assert dict(record.value) == {"x": 2, "y": "long"}
    assert_same_entry(done.entries[0], record)
    assert done.entries[1] == plain
    again = await primitives.must_commit(patch, Add("plain", 1), **remembered)
    assert again == msgspec.structs.replace(done, entries=(record, plain), replayed=True)
    touched = await primitives.must_commit(Touch("record", 60_000), is_brief=True)
    assert_same_entry(touched.entries[0], (await primitives.read("record"))[0])


async def test_a_brief_batch_that_is_refused_is_answered_with_all_but_the_fields_of_records(
    primitives: Primitives,
) -> None:
    """A brief batch does and returns the same, except that entries of records may lack their value."""
    await primitives.must_commit(put("record", limpet.Fields(x=1, y="long")), put("plain", 1))
    (record, plain) = await primitives.read("record", "plain")
    guards = (Guard("record", FieldEquals("x", codec.encode_field(2, "x"))),)
    patch = Patch("record", {"x": b"3"})

    refused = await primitives.must_refuse(patch, guards=guards, is_brief=True)
    too_large = await primitives.must_refuse(patch, is_brief=True, value_bytes_max=1)
    mismatch = await primitives.must_refuse(Patch("plain", {"x": b"3"}), is_brief=True)

    assert (refused.reason, refused.guard) == ("guard", guards[0])
    assert_same_entry(refused.found, record)
    assert (too_large.reason, too_large.size_bytes) == ("size", 9)
    assert_same_entry(too_large.found, record)
    assert (mismatch.reason, mismatch.found) == ("type", plain)
    assert await primitives.read("record", "plain") == [record, plain]


def assert_same_entry(found: Entry | None, entry: Entry | None) -> None:
    """Fail unless both are the same entry; the one found may lack its value."""
    assert found is not None
    assert entry is not None
    assert found in (entry, entry.without_value())


WRITTEN: tuple[Family, ...] = ("data", "lock", "audit", "recoverable")


async def test_the_same_key_in_two_families_is_two_entries(primitives: Primitives) -> None:
    """A commit writes several families together; the same key in two of them is two entries."""
    commit = await primitives.must_commit(
        *(Put("x", codec.encode(family), 60_000, family=family) for family in WRITTEN)
    )
    guards = tuple(Guard("x", Version(1), family) for family in WRITTEN)
    again = await primitives.must_commit(
        Put("x", b"2", family="audit"), Delete("x", family="recoverable"), guards=guards
    )

    assert [entry.value for entry in commit.entries if entry is not None] == list(WRITTEN)
    revisions = [entry.revision for entry in commit.entries if entry is not None]
    assert revisions == sorted({*revisions})
    found = {family: await primitives.read("x", family=family) for family in WRITTEN}
    assert found == {
        "data": [commit.entries[0]],
        "lock": [commit.entries[1]],
        "audit": [again.entries[0]],
        "recoverable": [None],
    }
    assert [(await primitives.scan(family=family)).entries for family in WRITTEN] == [
        [entry for entry in found[family] if entry is not None] for family in WRITTEN
    ]
    assert [(change.family, change.op) for change in await primitives.log()][-2:] == [
        ("audit", "put"),
        ("recoverable", "delete"),
    ]
    refused = await primitives.must_refuse(put("x", 3), guards=(Guard("x", Version(1), "audit"),))
    assert (refused.found, (await primitives.status()).keys) == (again.entries[0], 1)


async def test_what_is_kept_beside_the_data_is_not_shown_with_it(open_store: OpenStore, elapse: Elapse) -> None:
    """The audit trail and recoverable copies appear in no scan, watch or history."""
    store = await open_store(namespace=f"q-{uuid.uuid4().hex[:12]}", sweep=False)
    primitives = Primitives(store)
    async with store.watch(initial=True) as watch:
        assert (await anext(watch)).op == "synced"
        await primitives.must_commit(
            put("a"),
            Put("a", b"1", family="audit"),
            Put("b", b"1", family="audit"),
            Put("b", b"1", 200, family="recoverable"),
        )
        await elapse(0.3)
        await store.sweep()
        await primitives.must_commit(put("end"))

        assert [(await anext(watch)).key for _ in range(2)] == ["a", "end"]
    assert [entry.key async for entry in store.scan()] == ["a", "end"]
    assert (await store.keys()).keys == ["a", "end"]
    assert [event.op async for event in store.history("a")] == ["put"]
    assert [event.op async for event in store.history("b")] == []
    assert await primitives.read("b", family="recoverable") == [None]


# scan -------------------------------------------------------------------------

STRANGE = ["\x01", " ", "%", "*", "A", "Z", "_", "a", "a\x01", "a ", "aa", "a\ud7ff", "a\ue000", "b", "z", "é", "￿"]
STRANGE += ["\U00010000", "\U0010ffff", "\U0010ffff\U0010ffff"]


async def test_a_scan_goes_in_code_point_order(primitives: Primitives) -> None:
    """Order is code-point order of the keys.

    Code units would put U+10000 before U+E000, and a collation would put É beside e.
    """
    shuffled = random.Random(1).sample(STRANGE, len(STRANGE))
    for key in shuffled:
        await primitives.must_commit(put(key))

    found = [entry.key for entry in (await primitives.scan()).entries]

    assert found == sorted(STRANGE)
    assert sorted(STRANGE) == sorted(STRANGE, key=str.encode)


@pytest.mark.parametrize("prefix", ["", "a", "a\ud7ff", "\U0010ffff", "é", "%", "_", "missing"])
async def test_a_span_is_a_range_of_that_order(primitives: Primitives, prefix: str) -> None:
    """Order is code-point order of the keys."""
    await primitives.must_commit(*(put(key) for key in STRANGE))

    found = [entry.key for entry in (await primitives.scan(prefix_span(prefix))).entries]

    assert found == [key for key in sorted(STRANGE) if key.startswith(prefix)]


async def test_keys_that_come_and_go_keep_the_order(primitives: Primitives) -> None:
    """Order is code-point order of the keys."""
    dice, model = random.Random(5), set[str]()
    for _ in range(30):
        keys = {f"k{dice.randrange(400):03}" for _ in range(20)}
        gone = {key for key in keys if dice.random() < 0.4}
        await primitives.must_commit(*(Delete(key) if key in gone else put(key) for key in keys))
        model = (model | keys) - gone
        assert [entry.key for entry in (await primitives.scan()).entries] == sorted(model)


@pytest.mark.parametrize("limit", [1, 2, 7, 10, 50, 500])
async def test_pages_join_without_a_seam(primitives: Primitives, limit: int) -> None:
    """A page that ends early has a cursor to continue after; a page without a cursor was the last."""
    entries = [
        entry for entry in (await primitives.must_commit(*(put(f"k{number:02}") for number in range(50)))).entries
    ]

    found: list[Entry] = []
    start: str | None = ""
    while start is not None:
        part = await primitives.scan(Span(start, None), limit=limit)
        assert len(part.entries) <= limit
        found += part.entries
        start = None if part.cursor is None else part.cursor + "\0"

    assert found == entries


@pytest.mark.parametrize("options", [{"limit": 1}, {"limit": 7}, {"limit": 50}, {"values": False}, {"filtered": True}])
async def test_pages_in_reverse_join_without_a_seam(primitives: Primitives, options: dict[str, Any]) -> None:
    """In reverse, the order is the opposite, and a page continues before its cursor."""
    for start in (0, 100, 200):
        await primitives.must_commit(*(put(f"k{number:03}", {"n": number}) for number in range(start, start + 100)))
    where = limpet.field("n").in_([3, 150, 151, 299]) if options.pop("filtered", False) else None

    found: list[str] = []
    stop: str | None = None
    while True:
        page = await primitives.scan(Span("k", stop), where=where, reverse=True, **options)
        assert len(page.entries) <= options.get("limit", 500)
        found += [entry.key for entry in page.entries]
        if page.cursor is None:
            break
        stop = page.cursor

    numbers = range(300) if where is None else [3, 150, 151, 299]
    assert found == [f"k{number:03}" for number in reversed(numbers)]


async def test_large_values_come_in_pages_in_reverse(primitives: Primitives) -> None:
    """In reverse, the order is the opposite, and a page continues before its cursor."""
    for number in range(12):
        await primitives.must_commit(put(f"k{number:02}", bytes([number]) * 900_000))

    found: list[bytes] = []
    stop: str | None = None
    while True:
        page = await primitives.scan(Span("", stop), reverse=True)
        found += [entry.value[:1] for entry in page.entries]
        if page.cursor is None:
            break
        stop = page.cursor

    assert found == [bytes([number]) for number in reversed(range(12))]


async def test_an_empty_span_in_reverse_has_no_cursor(primitives: Primitives, elapse: Elapse) -> None:
    """In reverse, the order is the opposite, and a page continues before its cursor."""
    assert await primitives.scan(reverse=True) == limpet.model.ScanPage([], None)
    await primitives.must_commit(put("a"), put("m", ttl_ms=300), put("z"))
    await elapse(0.4)

    for span in (Span("b", "c"), Span("b", "a"), Span("zz", None), Span("m", "m\0")):
        assert await primitives.scan(span, reverse=True) == limpet.model.ScanPage([], None)
    page = await primitives.scan(Span("a", "z"), limit=1, reverse=True)
    assert ([entry.key for entry in page.entries], page.cursor) == (["a"], None)


async def test_a_count_is_that_of_a_scan(primitives: Primitives, elapse: Elapse) -> None:
    """A count is the number of entries that a scan of the span would give."""
    assert await primitives.count() == 0
    for first in range(0, 700, 100):
        await primitives.must_commit(*(put(f"k{number:03}", number) for number in range(first, first + 100)))
    await primitives.must_commit(put("a"), put("k100", ttl_ms=300), put("k101", ttl_ms=60_000), put("z", ttl_ms=300))
    await primitives.must_commit(Put("k5", b"{}", ttl_ms=60_000, family="lock"), Delete("k200"))
    await elapse(0.4)

    spans = [ALL, Span("k", "l"), Span("k100", "k102"), Span("k100", "k101"), Span("k2", "k3"), Span("z", None)]
    for span in (*spans, Span("x", "y"), Span("b", "a")):
        found: list[str] = []
        start: str | None = span.start
        while start is not None:
            page = await primitives.scan(Span(start, span.stop), values=False)
            found += [entry.key for entry in page.entries]
            start = None if page.cursor is None else page.cursor + "\0"
        assert await primitives.count(span) == len(found), span
    assert await primitives.count() == 699
    assert await primitives.count(family="lock") == 1

    await primitives.must_commit(*await primitives.due())
    assert await primitives.count() == 699


async def test_namespaces_are_those_that_were_written_to(primitives: Primitives, open_store: OpenStore) -> None:
    """Every namespace that any process has written to is listed, and one that was not used is not."""
    unused, other_name = f"{primitives.name}-unused", f"{primitives.name}-other"
    other = await open_store(namespace=other_name)
    await primitives.read("k")
    before = await primitives.run(primitives.engine.namespaces())
    assert not {unused, other_name} & {*before}

    await primitives.must_commit(put("k"))
    await other.put("k", 1)
    await other.delete("k")

    found = await primitives.run(primitives.engine.namespaces())
    assert {primitives.name, other_name} <= {*found}
    assert unused not in found
    assert found == sorted(set(found))


async def test_an_empty_span_has_no_cursor(primitives: Primitives) -> None:
    """A page that ends early has a cursor to continue after; a page without a cursor was the last."""
    assert await primitives.scan() == limpet.model.ScanPage([], None)
    await primitives.must_commit(put("a"), put("z"))

    assert await primitives.scan(Span("b", "c")) == limpet.model.ScanPage([], None)
    assert (await primitives.scan(Span("a", "b"), limit=1)).cursor is None


async def test_a_filtered_page_has_a_cursor_to_go_on(primitives: Primitives) -> None:
    """A page that ends early has a cursor to continue after; a page without a cursor was the last.

    With a filter a page may be empty and still not be the last.
    """
    for start in range(0, 700, 100):
        await primitives.must_commit(*(put(f"k{number:03}", {"n": number}) for number in range(start, start + 100)))
    where = limpet.field("n").in_([3, 350, 351, 699])

    found: list[int] = []
    start_key: str | None = ""
    while start_key is not None:
        part = await primitives.scan(Span(start_key, None), where=where, limit=2)
        assert len(part.entries) <= 2
        found += [entry.value["n"] for entry in part.entries]
        start_key = None if part.cursor is None else part.cursor + "\0"

    assert found == [3, 350, 351, 699]


async def test_expired_entries_do_not_end_a_scan(primitives: Primitives, elapse: Elapse) -> None:
    """A page that ends early has a cursor to continue after; a page without a cursor was the last."""
    await primitives.must_commit(*(put(f"k{number:02}", ttl_ms=300 if number < 40 else None) for number in range(50)))
    await elapse(0.4)

    found: list[str] = []
    start: str | None = ""
    while start is not None:
        part = await primitives.scan(Span(start, None), limit=4)
        found += [entry.key for entry in part.entries]
        start = None if part.cursor is None else part.cursor + "\0"

    assert found == [f"k{number:02}" for number in range(40, 50)]


async def test_large_values_come_in_slices_too(primitives: Primitives) -> None:
    """A page that ends early has a cursor to continue after; a page without a cursor was the last."""
    for number in range(12):
        await primitives.must_commit(put(f"k{number:02}", bytes([number]) * 900_000))

    found: list[bytes] = []
    start: str | None = ""
    while start is not None:
        part = await primitives.scan(Span(start, None))
        found += [entry.value[:1] for entry in part.entries]
        start = None if part.cursor is None else part.cursor + "\0"

    assert found == [bytes([number]) for number in range(12)]


@pytest.mark.parametrize("value", [None, 17, "text", b"raw", limpet.Fields(a=1, b=b"2"), {"large": "x" * 10_000}])
async def test_a_scan_without_values(primitives: Primitives, value: Any) -> None:
    """Without values, entries come with everything else."""
    await primitives.must_commit(put("a", 0, ttl_ms=60_000))
    entry = only(await primitives.must_commit(put("a", value, ttl_ms=60_000, meta_json=b'{"by":"me"}')))

    (found,) = (await primitives.scan(values=False)).entries

    assert found.stored is None
    assert found == entry.without_value()
    assert (found.version, found.revision, found.created_revision) == (2, entry.revision, entry.created_revision)
    assert (await primitives.scan()).entries == [entry]


async def test_a_filtered_scan_without_values(primitives: Primitives) -> None:
    """Without values, entries come with everything else."""
    await primitives.must_commit(put("a", {"n": 1}), put("b", {"n": 2}), put("c", {"n": 1}))

    found = (await primitives.scan(where=limpet.field("n") == 1, values=False)).entries

    assert [(entry.key, entry.stored) for entry in found] == [("a", None), ("c", None)]


# commit -----------------------------------------------------------------------


async def test_guards_do_not_see_the_writes(primitives: Primitives) -> None:
    """Guards see the state before the batch."""
    await primitives.must_commit(put("a", 1), put("gone", 1))

    await primitives.must_commit(
        put("a", 2),
        put("new", 1),
        Delete("gone"),
        guards=(Guard("a", Equals(b"1")), Guard("new", ABSENT), Guard("gone", PRESENT)),
    )
    refusal = await primitives.must_refuse(put("other", 1), put("new", 2), guards=(Guard("other", PRESENT),))

    assert (refusal.reason, refusal.key, refusal.found) == ("guard", "other", None)


async def test_every_condition_is_judged_before_the_batch(primitives: Primitives) -> None:
    """Guards see the state before the batch."""
    record = only(await primitives.must_commit(Patch("r", {"state": b'"new"'})))
    holding: list[Condition] = [
        Version(record.version),
        Revision(record.revision),
        PRESENT,
        Equals({"state": b'"new"'}),
        FieldEquals("state", b'"new"'),
        FieldEquals("other", ABSENT),
        HeldBy(record.created_revision),
    ]
    failing: list[Condition] = [
        ABSENT,
        Version(record.version + 1),
        Revision(record.revision + 1),
        Equals(b'{"state":"new"}'),
        FieldEquals("state", b'"old"'),
        FieldEquals("state", ABSENT),
        HeldBy(record.created_revision + 1),
    ]

    for condition in failing:
        refusal = await primitives.must_refuse(put("x"), guards=(Guard("r", condition),))
        assert refusal.guard == Guard("r", condition)
    await primitives.must_commit(put("x"), guards=tuple(Guard("r", condition) for condition in holding))
    for condition in [*holding, *failing]:
        missing = await primitives.commit(put("y"), guards=(Guard("missing", condition),))
        assert isinstance(missing, Commit) == (condition is ABSENT)


async def test_the_first_guard_that_fails_is_reported(primitives: Primitives) -> None:
    """Guards see the state before the batch."""
    await primitives.must_commit(put("a"))
    guards = (Guard("a", PRESENT), Guard("b", PRESENT), Guard("c", PRESENT), Guard("a", ABSENT))

    refusal = await primitives.must_refuse(put("d"), guards=guards)

    assert (refusal.key, refusal.guard) == ("b", guards[1])


REFUSED: dict[str, tuple[Write, ...]] = {
    "type of an add": (put("new"), Add("text", 1)),
    "type of a patch": (put("new"), Patch("text", {"a": b"1"})),
    "overflow": (put("new"), Add("full", 1)),
    "missing": (Delete("text"), Patch("missing", {"a": b"1"}, if_exists=True)),
    "size": (put("text", 5), Patch("record", {"b": b'"' + b"x" * 200 + b'"'})),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_write_that_is_refused_refuses_all(primitives: Primitives, case: str) -> None:
    """A refused batch leaves no trace: no change, no event, no revision."""
    await primitives.must_commit(put("text", "t"), put("full", 2**63 - 1), Patch("record", {"a": b"1"}))
    before = await primitives.image()

    refusal = await primitives.must_refuse(
        *REFUSED[case], value_bytes_max=100, receipt_ms=60_000, digest=b"digest", request_id="request-1"
    )

    assert refusal.key == REFUSED[case][1].key
    assert await primitives.image() == before
    assert await primitives.read("request-1", family="receipt") == [None]


async def test_a_batch_that_fails_its_guard_leaves_no_trace(primitives: Primitives) -> None:
    """A refused batch leaves no trace: no change, no event, no revision."""
    await primitives.must_commit(put("a"), put("b", ttl_ms=60_000))
    before = await primitives.image()

    await primitives.must_refuse(
        put("a", 2),
        put("new"),
        Delete("b"),
        Put("job", b"{}", ttl_ms=5000, family="lock"),
        guards=(Guard("a", ABSENT),),
    )

    assert await primitives.image() == before


async def test_a_refused_batch_leaves_the_expired_where_they_are(primitives: Primitives, elapse: Elapse) -> None:
    """A refused batch leaves no trace: no change, no event, no revision.

    A write over an expired key logs its expiry. A refused write does not.
    """
    await primitives.must_commit(put("old", ttl_ms=300), put("text", "t"))
    await elapse(0.4)
    before = await primitives.image()

    await primitives.must_refuse(put("old", 2), Add("text", 1))
    assert await primitives.image() == before
    assert len(await primitives.due()) == 1
    commit = await primitives.must_commit(put("old", 2))

    happened = [("put", "old"), ("put", "text"), ("expire", "old"), ("put", "old")]
    assert [(change.op, change.key) for change in await primitives.log()] == happened
    assert only(commit).version == 1


async def test_every_change_has_a_revision_of_its_own(primitives: Primitives) -> None:
    """Each change has its own revision, growing in the order of the writes."""
    await primitives.must_commit(put("gone"), put("touched"))
    start = (await primitives.status()).revision

    commit = await primitives.must_commit(
        put("z"), Delete("gone"), Touch("touched", 5000), Add("n", 1), Patch("r", {"a": b"1"}), put("a")
    )
    made = (await primitives.changes(start)).changes

    assert [(change.op, change.key) for change in made] == [
        ("put", "z"),
        ("delete", "gone"),
        ("touch", "touched"),
        ("put", "n"),
        ("patch", "r"),
        ("put", "a"),
    ]
    revisions = [change.revision for change in made]
    assert revisions == sorted({*revisions})
    assert start < revisions[0]
    assert {change.commit for change in made} == {commit.revision} == {revisions[-1]}
    assert [entry and entry.revision for entry in commit.entries] == [
        None if change.op == "delete" else change.revision for change in made
    ]


async def test_concurrent_commits_share_no_revision(open_store: OpenStore) -> None:
    """Each change has its own revision, growing in the order of the writes."""
    handles = [Primitives(await open_store(sweep=False)) for _ in range(2)]

    commits = await asyncio.gather(
        *(handles[number % 2].must_commit(put(f"a{number}"), put(f"b{number}")) for number in range(60))
    )

    pairs = [tuple(entry.revision for entry in commit.entries if entry is not None) for commit in commits]
    assert all(first < second for first, second in pairs)
    flat = [revision for pair in sorted(pairs) for revision in pair]
    assert flat == sorted({*flat})


async def test_revisions_only_grow(primitives: Primitives) -> None:
    """Revisions may skip numbers; do not count on consecutive ones."""
    seen = [0]
    for number in range(40):
        commit = await primitives.must_commit(Delete("a") if number % 3 == 2 else put("a"))
        assert commit.revision > seen[-1]
        assert (await primitives.status()).revision == commit.revision
        seen.append(commit.revision)


async def test_a_gap_between_revisions_is_no_gap_in_the_log(primitives: Primitives) -> None:
    """Revisions may skip numbers; do not count on consecutive ones.

    Reading after a revision that was skipped goes on with the next that exists.
    """
    commits = [await primitives.must_commit(put(f"k{number}")) for number in range(20)]
    revisions = [commit.revision for commit in commits]

    for after in range(revisions[0], revisions[-1] + 1):
        page = await primitives.changes(after)
        assert [change.revision for change in page.changes] == [each for each in revisions if each > after]


async def test_what_changes_nothing_uses_no_revision(primitives: Primitives) -> None:
    """Revisions may skip numbers; do not count on consecutive ones."""
    revision = (await primitives.must_commit(put("a"))).revision

    for writes in ((Delete("b"),), (Touch("b", 5),), (Expire("a", revision),), (Expire("b", 1),)):
        commit = await primitives.must_commit(*writes)
        assert (commit.entries, commit.ended) == ((None,), (None,))
    check = await primitives.must_commit(guards=(Guard("a", PRESENT),))

    assert check.revision == revision
    assert (await primitives.status()).revision == revision


async def test_a_refusal_carries_the_entry_found(primitives: Primitives) -> None:
    """A refusal carries the entry found, so the caller need not read again."""
    await primitives.must_commit(put("a", {"v": 1}, meta_json=b'{"by":"me"}', ttl_ms=60_000), put("text", "t"))
    a, text = await primitives.read("a", "text")

    assert (await primitives.must_refuse(put("b"), guards=(Guard("a", ABSENT),))).found == a
    assert (await primitives.must_refuse(put("a"), guards=(Guard("a", Version(7)),))).found == a
    assert (await primitives.must_refuse(Add("text", 1))).found == text
    assert (await primitives.must_refuse(Patch("text", {"a": b"1"}))).found == text
    assert (await primitives.must_refuse(put("a"), guards=(Guard("missing", PRESENT),))).found is None


async def test_a_refusal_does_not_find_what_has_expired(primitives: Primitives, elapse: Elapse) -> None:
    """A refusal carries the entry found, so the caller need not read again."""
    await primitives.must_commit(put("a", ttl_ms=300))
    await elapse(0.4)

    refusal = await primitives.must_refuse(put("a"), guards=(Guard("a", PRESENT),))

    assert refusal.found is None
    assert refusal.at_ms <= (await primitives.status()).now_ms


async def test_what_a_refusal_found_can_be_expected(primitives: Primitives) -> None:
    """A refusal carries the entry found, so the caller need not read again."""
    await primitives.must_commit(put("a", 1))
    refusal = await primitives.must_refuse(put("a", 2), guards=(Guard("a", ABSENT),))
    assert refusal.found is not None

    commit = await primitives.must_commit(put("a", 2), guards=(Guard("a", Revision(refusal.found.revision)),))

    assert only(commit).version == 2


async def test_a_repeated_request_is_answered_from_its_receipt(primitives: Primitives) -> None:
    """A request that was applied before returns its first result and changes nothing."""
    await primitives.must_commit(put("old", "value"), put("touched", "value"))
    writes = (put("a", [1]), Add("n", 5), Delete("old", take=True), Touch("touched", 60_000), Delete("missing"))
    options: dict[str, Any] = {"request_id": "request-1", "digest": b"digest", "receipt_ms": 60_000}
    first = await primitives.must_commit(*writes, **options)
    await primitives.must_commit(put("a", 2), Add("n", 100), put("old", "new"), Delete("touched"))
    before = await primitives.image()

    again = await primitives.must_commit(*writes, **options)

    assert again.replayed
    assert not first.replayed
    assert (again.revision, again.entries, again.ended, again.at_ms) == (
        first.revision,
        first.entries,
        first.ended,
        first.at_ms,
    )
    assert await primitives.image() == before


async def test_another_digest_is_refused(primitives: Primitives) -> None:
    """A request that was applied before returns its first result and changes nothing."""
    await primitives.must_commit(put("a", 1), request_id="request-1", digest=b"one", receipt_ms=60_000)
    before = await primitives.image()

    refusal = await primitives.must_refuse(put("a", 2), request_id="request-1", digest=b"two", receipt_ms=60_000)

    assert (refusal.reason, refusal.key) == ("stale_request", "request-1")
    assert await primitives.image() == before


RETRIED: dict[str, tuple[Write, ...]] = {
    "put": (put("a", 2),),
    "put of a record": (put("a", limpet.Fields(x=b"1")),),
    "add": (Add("n", 5),),
    "patch": (Patch("r", {"b": b"2"}, unset=("a",)),),
    "touch": (Touch("a", 60_000),),
    "delete": (Delete("a"),),
    "take": (Delete("a", take=True),),
    "lock": (Put("job", b'{"holder":"me"}', ttl_ms=60_000, family="lock"),),
    "over an expired key": (put("short", 2),),
    "batch": (put("z", 1), Delete("a", take=True), Delete("missing"), Add("n", 1), Touch("r", 60_000)),
}


@pytest.mark.parametrize("case", RETRIED)
async def test_a_retry_finds_its_first_attempt_in_the_log(primitives: Primitives, elapse: Elapse, case: str) -> None:
    """A request that was applied before returns its first result and changes nothing.

    The first attempt keeps no receipt. The engine recognises it by the change it left in the log.
    """
    await primitives.must_commit(put("a", "value"), put("n", 1), Patch("r", {"a": b"1"}), put("short", 1, ttl_ms=300))
    await elapse(0.4)
    since = (await primitives.status()).revision
    first = await primitives.must_commit(*RETRIED[case], request_id="request-1")
    before = await primitives.image()

    again = await primitives.must_commit(*RETRIED[case], request_id="request-1", retry_since=since)

    assert again.replayed
    assert (again.revision, again.entries, again.ended, again.at_ms) == (
        first.revision,
        first.entries,
        first.ended,
        first.at_ms,
    )
    assert await primitives.image() == before


async def test_retries_of_one_request_that_come_together_are_applied_once(primitives: Primitives) -> None:
    """A request that was applied before returns its first result and changes nothing.

    A caller that gave up waiting for its retry sends another, and an engine may commit both in one group.
    """
    await primitives.must_commit(put("n", 1))
    since = (await primitives.status()).revision

    commits = await asyncio.gather(
        *(primitives.must_commit(Add("n", 5), request_id="request-1", retry_since=since) for _ in range(4))
    )

    assert sorted(commit.replayed for commit in commits) == [False, True, True, True]
    assert len({(commit.revision, commit.entries, commit.at_ms) for commit in commits}) == 1
    assert [only(commit).value for commit in commits] == [6] * 4
    assert (await primitives.status()).revision == commits[0].revision


@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "guarded"])
async def test_attempts_of_one_request_through_two_handles_are_applied_once(
    open_store: OpenStore, guarded: bool
) -> None:
    """A request that was applied before returns its first result and changes nothing.

    Its first attempt and two retries meet, in any order, with deletes that undo what they have done.
    """
    handles = [Primitives(await open_store(sweep=False)) for _ in range(2)]
    await handles[0].must_commit(put("n", 1))
    chance = random.Random(7)

    async def send(handle: Primitives, pause_ms: int, write: Write, options: dict[str, Any]) -> None:
        await asyncio.sleep(pause_ms / 1000)
        with contextlib.suppress(TransientError):
            await handle.commit(write, **options)

    for number in range(12):
        request_id, key = f"request-{number}", f"key-{number}"
        guards = (Guard(key, ABSENT),) if guarded else ()
        writes: list[Write] = [put(key, 1), Add(key, 1), Patch(key, {"a": b"1"})]
        write = chance.choice(writes)
        first: dict[str, Any] = {"request_id": request_id, "guards": guards}
        retry = {**first, "retry_since": (await handles[0].status()).revision}
        sent: list[tuple[Write, dict[str, Any]]]
        sent = [(write, first), (write, retry), (write, retry), (Delete(key), {}), (Delete(key), {})]
        chance.shuffle(sent)

        await asyncio.gather(*(send(chance.choice(handles), chance.randrange(5), *one) for one in sent))

        assert sum(change.cause == request_id for change in await handles[0].log()) <= 1


async def test_a_retry_that_was_not_applied_is_applied(primitives: Primitives) -> None:
    """A request that was applied before returns its first result and changes nothing."""
    await primitives.must_commit(put("n", 1))
    since = (await primitives.status()).revision
    await primitives.must_commit(Add("n", 1), request_id="another request")

    commit = await primitives.must_commit(Add("n", 5), request_id="request-1", retry_since=since)

    assert not commit.replayed
    assert only(commit).value == 7


@pytest.mark.parametrize("case", ["add", "batch"])
async def test_a_late_retry_is_not_applied_again(open_store: OpenStore, elapse: Elapse, case: str) -> None:
    """A request that was applied before returns its first result and changes nothing.

    A caller slept for an hour before its retry. The log still has the request.
    """
    store = await open_store(namespace=f"q-{uuid.uuid4().hex[:12]}", sweep=False)
    primitives = Primitives(store)
    await primitives.must_commit(put("a", "value"), put("n", 1), Patch("r", {"a": b"1"}))
    since = (await primitives.status()).revision
    await primitives.must_commit(*RETRIED[case], request_id="request-1")
    if stands_still(store):
        await elapse(3600)
    await primitives.must_commit(put("n", 5))
    before = await primitives.image()

    again = await primitives.must_commit(*RETRIED[case], request_id="request-1", retry_since=since)

    assert again.replayed
    assert await primitives.image() == before


async def test_a_retry_of_what_changed_nothing_runs_again_after_its_receipt(
    primitives: Primitives, elapse: Elapse
) -> None:
    """A request that was applied before returns its first result and changes nothing.

    A batch that only checks leaves nothing but its receipt. When that has expired, a retry checks again.
    """
    await primitives.must_commit(put("a"))
    options: dict[str, Any] = {"guards": (Guard("a", PRESENT),), "request_id": "request-1", "receipt_ms": 300}
    first = await primitives.must_commit(**options)
    assert await primitives.must_commit(**options, retry_since=0) == msgspec.structs.replace(first, replayed=True)
    await elapse(0.4)

    again = await primitives.must_commit(**options, retry_since=0)

    assert not again.replayed
    assert again.at_ms > first.at_ms


async def test_a_guarded_retry_is_not_refused_by_its_own_first_attempt(primitives: Primitives) -> None:
    """A request that was applied before returns its first result and changes nothing."""
    since = (await primitives.status()).revision
    options: dict[str, Any] = {"request_id": "request-1", "guards": (Guard("a", ABSENT),)}
    first = await primitives.must_commit(put("a"), **options)

    again = await primitives.must_commit(put("a"), retry_since=since, **options)

    assert again.entries == first.entries
    await primitives.must_refuse(put("a"), guards=(Guard("a", ABSENT),))


@pytest.mark.parametrize("case", RETRIED)
async def test_a_first_attempt_that_comes_after_its_retry_does_nothing(
    open_store: OpenStore, elapse: Elapse, case: str
) -> None:
    """A superseded request, which arrives after its own retry was answered, does nothing.

    A server was paused with the first attempt in memory, and another server has answered the retry meanwhile.
    """
    first, second = [Primitives(await open_store(sweep=False)) for _ in range(2)]
    await first.must_commit(put("a", "value"), put("n", 1), Patch("r", {"a": b"1"}), put("short", 1, ttl_ms=300))
    await elapse(0.4)
    since = (await first.status()).revision
    await second.must_commit(*RETRIED[case], request_id="request-1", retry_since=since)
    before = await second.image()

    with contextlib.suppress(TransientError):
        assert (await first.must_commit(*RETRIED[case], request_id="request-1")).replayed

    assert await first.image() == before
    assert not (await first.must_commit(put("b"), request_id="request-2")).replayed


async def test_a_first_attempt_that_comes_after_its_retry_was_refused_does_nothing(open_store: OpenStore) -> None:
    """A superseded request, which arrives after its own retry was answered, does nothing."""
    first, second = [Primitives(await open_store(sweep=False)) for _ in range(2)]
    await first.must_commit(put("a"))
    since = (await first.status()).revision
    options: dict[str, Any] = {"request_id": "request-1", "guards": (Guard("a", ABSENT),)}
    await second.must_refuse(put("a"), retry_since=since, **options)
    await first.must_commit(Delete("a"))
    before = await second.image()

    with contextlib.suppress(TransientError):
        await first.must_refuse(put("a"), **options)

    assert await first.image() == before


async def test_a_retry_without_a_name_harms_no_other_caller(primitives: Primitives) -> None:
    """A request that was applied before returns its first result and changes nothing.

    Without a request id there is no first attempt to find. Such a batch makes no sense, but a client may send it.
    """
    await primitives.must_commit(put("a"))
    outcomes = await asyncio.gather(
        primitives.commit(put("a", 2), request_id=None, retry_since=0),
        *(primitives.commit(put(f"other/{number}")) for number in range(4)),
    )

    assert [type(outcome) for outcome in outcomes] == [Commit] * 5


@pytest.mark.parametrize("case", ["put", "add"])
async def test_a_first_attempt_that_comes_after_its_retry_fails_no_other_caller(
    primitives: Primitives, case: str
) -> None:
    """A superseded request, which arrives after its own retry was answered, does nothing.

    Callers that commit at the same moment are not affected, although an engine may group their batches with it.
    """
    await primitives.must_commit(put("a"), put("n", 1))
    since = (await primitives.status()).revision
    await primitives.must_commit(*RETRIED[case], request_id="request-1", retry_since=since)
    before = await primitives.read("a", "n")

    late, *others = await asyncio.gather(
        primitives.commit(*RETRIED[case], request_id="request-1"),
        *(primitives.commit(put(f"other/{number}")) for number in range(8)),
        return_exceptions=True,
    )

    assert isinstance(late, TransientError) or (isinstance(late, Commit) and late.replayed)
    assert [type(other) for other in others] == [Commit] * 8
    assert await primitives.read("a", "n") == before


# changes ----------------------------------------------------------------------


async def test_what_is_readable_is_complete(open_store: OpenStore) -> None:
    """When a revision is readable, every smaller one is readable or will never exist.

    A reader reads the log while others write. No change is ever added later to the part that it has
    read.
    """
    handles = [Primitives(await open_store(sweep=False)) for _ in range(2)]
    looks: list[tuple[int, list[int]]] = []
    made: list[tuple[str, str, int]] = []
    over = False

    async def write(writer: int) -> None:
        for number in range(40):
            commit = await handles[writer % 2].must_commit(put(f"{writer}/{number}"), put(f"shared-{number % 3}"))
            made.extend(("put", entry.key, entry.revision) for entry in commit.entries if entry is not None)

    async def look(primitives: Primitives) -> None:
        while not over:
            page = await primitives.changes(0, limit=10_000)
            looks.append((page.next_after, [change.revision for change in page.changes]))
            await asyncio.sleep(0.001)

    looking = [asyncio.create_task(look(primitives)) for primitives in handles]
    await asyncio.gather(*(write(writer) for writer in range(6)))
    over = True
    await asyncio.gather(*looking)
    whole = [(change.op, change.key, change.revision) for change in await handles[0].log()]

    made.sort(key=lambda change: change[-1])
    assert len(made) == 480
    assert whole == made
    assert len(looks) > 2
    revisions, kept = [change[-1] for change in made], {change[-1] for change in whole}
    for head, seen in looks:
        # A change that is kept to the end was in every reading. Others were, until their key was written again.
        assert [revision for revision in seen if revision in kept] == [each for each in sorted(kept) if each <= head]
        assert seen == [revision for revision in revisions if revision in set(seen)]


@pytest.mark.parametrize("limit", [1, 3, 7, 500])
async def test_the_log_is_read_in_pages_without_a_seam(primitives: Primitives, limit: int) -> None:
    """When a revision is readable, every smaller one is readable or will never exist."""
    for number in range(10):
        await primitives.must_commit(
            put(f"a{number}"), put(f"b{number}"), Put(f"l{number}", b"{}", ttl_ms=60_000, family="lock")
        )
    whole = (await primitives.changes(0, limit=10_000)).changes

    found = await primitives.log(limit=limit)

    assert found == whole
    assert len(found) == 30
    assert [change.revision for change in found] == sorted({change.revision for change in found})


@pytest.mark.parametrize("limit", [1, 3, 7, 500])
async def test_no_seam_of_pages_hides_a_value(primitives: Primitives, limit: int) -> None:
    """When a revision is readable, every smaller one is readable or will never exist.

    Ten keys are written and then touched. A reader that goes page by page gets every value, wherever a page
    ends, and so does a reader that goes on after any change.
    """
    for number in range(10):
        await primitives.must_commit(put(f"k{number}", number, ttl_ms=60_000), put(f"other-{number}"))
    after = (await primitives.status()).revision
    for number in range(9, -1, -1):
        await primitives.must_commit(Touch(f"k{number}", 30_000), request_id=f"touch-{number}")

    whole = await primitives.log(limit=limit)

    values = {change.key: change.entry.value for change in whole if change.op == "put"}
    assert [values[f"k{number}"] for number in range(10)] == list(range(10))
    touches = [(change.key, change.cause) for change in whole if change.op == "touch"]
    assert touches == [(f"k{number}", f"touch-{number}") for number in range(9, -1, -1)]
    for start, change in enumerate(whole, 1):
        assert (await primitives.changes(change.revision)).changes == whole[start:]
    assert [change.op for change in (await primitives.changes(after)).changes] == ["touch"] * 10


async def test_a_span_shows_the_data_of_its_keys(primitives: Primitives) -> None:
    """When a revision is readable, every smaller one is readable or will never exist.

    With a span a page may be empty. Its `next_after` still gives how far it has read.
    """
    for number in range(30):
        await primitives.must_commit(put(f"noise-{number}"))
    await primitives.must_commit(put("a/1"), Put("a/1", b"{}", ttl_ms=60_000, family="lock"), put("b"))
    status = await primitives.status()

    found = await primitives.log(span=prefix_span("a/"), limit=5)
    nothing = await primitives.changes(0, span=pattern_span("missing"))

    assert [(change.family, change.key) for change in found] == [("data", "a/1")]
    assert (nothing.changes, nothing.next_after) == ([], status.revision)


async def test_a_feed_names_what_it_follows(primitives: Primitives) -> None:
    """A page of the log names the change that it follows: the one at the given revision, or the last one before it."""
    for number in range(5):
        lock = Put(f"l{number}", b"{}", ttl_ms=60_000, family="lock")
        await primitives.must_commit(put(f"a{number}"), put(f"b{number}"), lock)
    whole = (await primitives.changes(0)).changes
    revision, follows = 0, BEGINNING

    for change in whole:
        # Revisions may skip: a skipped one counts as the change before it.
        for after in range(revision, change.revision):
            for options in ({}, {"limit": 0}, {"limit": 1}, {"span": pattern_span("missing")}):
                assert (await primitives.changes(after, **options)).before == follows
        revision, follows = change.revision, fingerprint(change)
    assert (await primitives.changes(revision)).before == follows


async def test_a_feed_that_waited_names_what_it_follows(primitives: Primitives) -> None:
    """A page of the log names the change that it follows: the one at the given revision, or the last one before it."""
    await primitives.must_commit(put("a"))
    (change,) = (await primitives.changes(0)).changes
    waiting = asyncio.create_task(primitives.changes(change.revision, span=pattern_span("c"), wait_s=60.0))

    await primitives.must_commit(put("b"))
    await primitives.must_commit(put("c"))

    assert (await asyncio.wait_for(waiting, PATIENCE_S)).before == fingerprint(change)


async def test_a_feed_of_a_trimmed_log_names_what_it_follows(primitives: Primitives) -> None:
    """A page of the log names the change that it follows: the one at the given revision, or the last one before it."""
    await primitives.must_commit(put("a"), put("b"), put("c"))
    changes = (await primitives.changes(0)).changes

    assert await primitives.trim(Window(changes=1, age_ms_min=0)) == 2
    assert (await primitives.changes(changes[1].revision)).before == fingerprint(changes[1])

    assert await primitives.trim(Window(changes=0, age_ms_min=0)) == 1
    assert (await primitives.changes(changes[2].revision)).before == fingerprint(changes[2])


async def test_a_trimmed_revision_is_compacted(primitives: Primitives) -> None:
    """A revision that was trimmed, or that lies in the future, is refused as compacted."""
    revisions = [(await primitives.must_commit(put(f"k{number:02}"))).revision for number in range(20)]
    assert await primitives.trim(KEEP_FIVE) == 15
    floor = (await primitives.status()).floor

    for after in [0, *revisions[:14]]:
        with pytest.raises(Compacted) as caught:
            await primitives.changes(after)
        assert caught.value.oldest == floor
    assert len((await primitives.changes(floor)).changes) == 5


@pytest.mark.parametrize("ahead", [1, 1000, 2**60])
async def test_a_future_revision_is_compacted(primitives: Primitives, ahead: int) -> None:
    """A revision that was trimmed, or that lies in the future, is refused as compacted."""
    revision = (await primitives.must_commit(put("a"))).revision

    with pytest.raises(Compacted):
        await primitives.changes(revision + ahead)

    assert (await primitives.changes(revision)).changes == []


async def test_a_namespace_that_was_never_written_is_at_zero(primitives: Primitives) -> None:
    """A revision that was trimmed, or that lies in the future, is refused as compacted."""
    page = await primitives.changes(0)

    assert (page.changes, page.next_after) == ([], 0)
    with pytest.raises(Compacted):
        await primitives.changes(1)


@pytest.mark.face("async")
async def test_a_wait_ends_when_a_change_arrives(primitives: Primitives) -> None:
    """A wait ends early when a change arrives, from this process or another."""
    for number in range(5):
        after = (await primitives.status()).revision
        waiting = asyncio.create_task(primitives.changes(after, wait_s=60.0))
        await asyncio.sleep(0.02)
        assert not waiting.done()

        await primitives.must_commit(put("a", number))

        page = await asyncio.wait_for(waiting, 2)
        assert [change.entry.value for change in page.changes] == [number]


@pytest.mark.face("async")
async def test_a_wait_ends_when_another_handle_writes(primitives: Primitives, open_store: OpenStore) -> None:
    """A wait ends early when a change arrives, from this process or another."""
    other = Primitives(await open_store(namespace=primitives.name, sweep=False))
    waiting = asyncio.create_task(primitives.changes(0, wait_s=60.0))
    await asyncio.sleep(0.05)

    await other.must_commit(put("a"))

    assert len((await asyncio.wait_for(waiting, 5)).changes) == 1


@pytest.mark.face("async")
async def test_a_wait_ends_soon_when_another_handle_writes(primitives: Primitives, open_store: OpenStore) -> None:
    """A wait ends within a second of the commit that ends it, from this process or another."""
    other = Primitives(await open_store(namespace=primitives.name, sweep=False))

    async def write() -> float:
        await other.must_commit(put("a"))
        return time.monotonic()

    await assert_woken_soon(primitives, write)


@pytest.mark.face("async")
async def test_a_wait_ends_soon_when_another_process_writes(primitives: Primitives, url: str) -> None:
    """A wait ends within a second of the commit that ends it, from this process or another.

    Where no other process can reach the database, another thread with its own loop writes.
    """
    if primitives.engine.traits.durability == "none":

        async def write_in_thread() -> float:
            return await asyncio.to_thread(write_elsewhere, url, primitives.name)

        await assert_woken_soon(primitives, write_in_thread)
        return
    call = f"from {__name__} import write_on_request; write_on_request({url!r}, {primitives.name!r})"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", call, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    source, target = process.stdout, process.stdin

    async def write() -> float:
        target.write(b"\n")
        return float(await asyncio.wait_for(source.readline(), PATIENCE_S))

    try:
        assert await asyncio.wait_for(source.readline(), PATIENCE_S) == b"ready\n"
        await assert_woken_soon(primitives, write)
    finally:
        target.close()
        assert await process.wait() == 0


WAKE_S = 1.0


async def assert_woken_soon(primitives: Primitives, write: Callable[[], Awaitable[float]]) -> None:
    """Fail unless waiters are woken within a second. ``write`` returns when its commit was acknowledged.

    One wait of five may take longer, because the machine may be busy.
    """
    late_s: list[float] = []
    for _ in range(5):
        after = (await primitives.status()).revision
        waiting = asyncio.create_task(primitives.changes(after, wait_s=10.0))
        await asyncio.sleep(0.05)
        acknowledged_s = await write()
        assert len((await asyncio.wait_for(waiting, PATIENCE_S)).changes) == 1
        delay_s = time.monotonic() - acknowledged_s
        late_s += [delay_s] if delay_s > WAKE_S else []
        assert len(late_s) < 2, f"waiters were woken after {' and '.join(f'{one:.1f} s' for one in late_s)}"


def write_elsewhere(url: str, namespace: str) -> float:
    """Write once through a store of its own; returns when it was acknowledged."""
    with limpet.sync.open(url, namespace=namespace, sweep=False) as store:
        store.put("from elsewhere", 1)
        return time.monotonic()


def write_on_request(url: str, namespace: str) -> None:
    """Write once for each line of the standard input, and print when it was acknowledged."""
    with limpet.sync.open(url, namespace=namespace, sweep=False) as store:
        print("ready", flush=True)
        for _ in sys.stdin:
            store.put("from elsewhere", 1)
            print(time.monotonic(), flush=True)


@pytest.mark.face("async")
async def test_a_wait_that_is_cancelled_ends_at_once(primitives: Primitives) -> None:
    """A wait that is cancelled ends at once, and as cancelled."""
    await primitives.must_commit(put("a"))
    after = (await primitives.status()).revision
    for moment_s in (0.0, 0.002, 0.1):
        waiting = asyncio.create_task(primitives.changes(after, wait_s=60.0))
        await asyncio.sleep(moment_s)

        waiting.cancel()

        assert await asyncio.wait({waiting}, timeout=5) == ({waiting}, set())
        assert waiting.cancelled()
    assert (await primitives.changes(after)).changes == []


@pytest.mark.face("async")
async def test_a_wait_for_nothing_ends_in_time(primitives: Primitives) -> None:
    """A wait ends early when a change arrives, from this process or another."""
    revision = (await primitives.must_commit(put("a"))).revision
    loop = asyncio.get_running_loop()
    begun = loop.time()

    page = await asyncio.wait_for(primitives.changes(revision, wait_s=0.2), PATIENCE_S)

    assert (page.changes, page.next_after) == ([], revision)
    assert loop.time() - begun >= 0.15


@pytest.mark.face("async")
async def test_a_change_in_another_namespace_is_no_news(primitives: Primitives, open_store: OpenStore) -> None:
    """A wait ends early when a change arrives, from this process or another."""
    other = Primitives(await open_store(namespace=f"{primitives.name}-b", sweep=False))
    waiting = asyncio.create_task(primitives.changes(0, wait_s=60.0))
    await asyncio.sleep(0.02)
    await other.must_commit(put("a"))
    await asyncio.sleep(0.1)

    assert not waiting.done() or waiting.result().changes == []
    waiting.cancel()


@pytest.mark.face("async")
async def test_a_change_between_looking_and_waiting_is_not_slept_through(primitives: Primitives) -> None:
    """A wait ends early when a change arrives, from this process or another."""
    dice = random.Random(11)

    async def write() -> None:
        for number in range(100):
            await primitives.must_commit(put(f"a{number}", number))
            await asyncio.sleep(dice.choice((0, 0, 0.001)))

    writing = asyncio.create_task(write())
    seen: list[int] = []
    head = 0
    while len(seen) < 100:
        page = await asyncio.wait_for(primitives.changes(head, wait_s=60.0), 5)
        seen += [change.entry.value for change in page.changes]
        head = page.next_after
    await writing

    assert seen == list(range(100))


# due --------------------------------------------------------------------------


async def test_an_entry_is_due_from_its_moment_on(primitives: Primitives, elapse: Elapse) -> None:
    """An entry is due from the millisecond it expires, and not before."""
    entry = only(await primitives.must_commit(put("a", ttl_ms=500)))
    assert entry.expires_ms is not None
    assert await primitives.due() == []
    await elapse(0.48)

    for _ in range(60):
        before = (await primitives.status()).now_ms
        found = await primitives.due()
        after = (await primitives.status()).now_ms
        if after < entry.expires_ms:
            assert found == []
        if before >= entry.expires_ms:
            assert found == [Expire("a", entry.revision)]
        await elapse(0.001)

    assert await primitives.due() == [Expire("a", entry.revision)]


@pytest.mark.parametrize("family", ["lock", "audit", "recoverable"])
async def test_every_family_is_due_but_receipts_are_not(primitives: Primitives, elapse: Elapse, family: Family) -> None:
    """An entry is due from the millisecond it expires, and not before."""
    entry = only(await primitives.must_commit(Put("job", b"{}", ttl_ms=300, family=family)))
    await primitives.must_commit(put("ever"), request_id="request-1", digest=b"d", receipt_ms=300)
    await elapse(0.4)

    assert await primitives.due() == [Expire("job", entry.revision, family)]


async def test_what_was_written_again_is_due_at_its_new_moment(primitives: Primitives, elapse: Elapse) -> None:
    """An entry is due from the millisecond it expires, and not before."""
    await primitives.must_commit(put("longer", ttl_ms=300), put("for ever", ttl_ms=300), put("gone", ttl_ms=300))
    await primitives.must_commit(put("kept", ttl_ms=300))
    await primitives.must_commit(Touch("longer", 60_000), put("for ever"), Delete("gone"))
    kept = only(await primitives.must_commit(put("kept", 2, ttl_ms=KEEP)))
    await elapse(0.4)

    assert await primitives.due() == [Expire("kept", kept.revision)]


async def test_what_was_made_again_at_the_same_moment_is_due_once(primitives: Primitives, elapse: Elapse) -> None:
    """An entry is due from the millisecond it expires, and not before.

    An entry that is made, ended and made again within a millisecond expires at the same moment twice.
    """
    for _ in range(3):
        await primitives.must_commit(put("a", ttl_ms=300), Put("job", b"{}", ttl_ms=300, family="lock"))
        assert await primitives.due() == []
        await primitives.must_commit(Delete("a"), Delete("job", family="lock"))
    commit = await primitives.must_commit(put("a", ttl_ms=300), Put("job", b"{}", ttl_ms=300, family="lock"))
    await elapse(0.4)

    due = await primitives.due()

    first, second = (entry.revision for entry in commit.entries if entry is not None)
    assert sorted(due, key=lambda each: each.key) == [Expire("a", first), Expire("job", second, "lock")]


async def test_only_what_is_still_due_is_ended(primitives: Primitives, elapse: Elapse) -> None:
    """An entry is due from the millisecond it expires, and not before."""
    await primitives.must_commit(put("a", ttl_ms=300), put("b", ttl_ms=300))
    await elapse(0.4)
    due = await primitives.due()
    await primitives.must_commit(put("a", "written again"))

    commit = await primitives.must_commit(*sorted(due, key=lambda each: each.key))

    assert [ended and ended.key for ended in commit.ended] == [None, "b"]
    assert [entry.value for entry in (await primitives.scan()).entries] == ["written again"]
    happened = [("put", "a"), ("expire", "a"), ("put", "a")]
    assert [(change.op, change.key) for change in await primitives.log(span=pattern_span("a"))] == happened
    again = await primitives.must_commit(*due)
    assert again.ended == (None, None)


async def test_not_more_is_due_than_requested(primitives: Primitives, elapse: Elapse) -> None:
    """An entry is due from the millisecond it expires, and not before."""
    await primitives.must_commit(*(put(f"k{number:02}", ttl_ms=300) for number in range(30)))
    await elapse(0.4)
    ended: set[str] = set()

    while due := await primitives.due(limit=7):
        assert len(due) <= 7
        await primitives.must_commit(*due)
        ended |= {each.key for each in due}

    assert len(ended) == 30
    assert (await primitives.status()).keys == 0


async def test_listing_what_is_due_changes_nothing(
    primitives: Primitives, elapse: Elapse, open_store: OpenStore
) -> None:
    """Listing them changes nothing; two callers get the same list."""
    other = Primitives(await open_store(namespace=primitives.name, sweep=False))
    await primitives.must_commit(*(put(f"k{number:02}", ttl_ms=300) for number in range(10)))
    await elapse(0.4)
    before = await primitives.image()

    first, second, third = await primitives.due(), await primitives.due(), await other.due()
    part = await primitives.due(limit=3)

    assert len(first) == 10
    assert sorted(map(repr, first)) == sorted(map(repr, second)) == sorted(map(repr, third))
    assert len(part) == 3
    assert {each.key for each in await primitives.due()} == {each.key for each in first}
    assert await primitives.image() == before


# trim -------------------------------------------------------------------------


async def test_the_oldest_changes_go_first(primitives: Primitives) -> None:
    """The oldest changes go first, and changes younger than the minimum stay."""
    for number in range(20):
        await primitives.must_commit(put(f"k{number:02}"))

    assert await primitives.trim(KEEP_FIVE) == 15

    assert [change.key for change in await primitives.log()] == [f"k{number}" for number in range(15, 20)]
    assert (await primitives.status()).log_changes == 5
    assert await primitives.trim(KEEP_FIVE) == 0


async def test_what_is_young_stays(primitives: Primitives, elapse: Elapse) -> None:
    """The oldest changes go first, and changes younger than the minimum stay."""
    await primitives.must_commit(put("old-1"), put("old-2"))
    await elapse(0.6)
    await primitives.must_commit(put("young-1"), put("young-2"))
    greedy = Window(age_ms=1, changes=0, size_bytes=0, age_ms_min=500)

    assert await primitives.trim(greedy) == 2
    assert [change.key for change in await primitives.log()] == ["young-1", "young-2"]
    await elapse(0.6)
    assert await primitives.trim(greedy) == 2
    assert await primitives.log() == []


async def test_each_bound_of_a_window_counts(primitives: Primitives, elapse: Elapse) -> None:
    """The oldest changes go first, and changes younger than the minimum stay."""
    for number in range(10):
        await primitives.must_commit(put(f"k{number}", bytes(98)))
    each_bytes = (await primitives.status()).log_bytes // 10
    assert_counted(primitives.engine, each_bytes, 100)
    await elapse(0.2)

    assert await primitives.trim(Window(age_ms_min=0)) == 0
    assert await primitives.trim(Window(changes=8, age_ms_min=0)) == 2
    assert await primitives.trim(Window(size_bytes=5 * each_bytes, age_ms_min=0)) == 3
    assert (await primitives.status()).log_bytes == 5 * each_bytes
    assert await primitives.trim(Window(age_ms=100, age_ms_min=0)) == 5


async def test_trimming_lets_go_of_receipts_past_their_time(primitives: Primitives, elapse: Elapse) -> None:
    """The oldest changes go first, and changes younger than the minimum stay."""
    await primitives.must_commit(put("a"), request_id="short", digest=b"d", receipt_ms=300)
    await primitives.must_commit(put("a"), request_id="long", digest=b"d", receipt_ms=60_000)
    await elapse(0.4)

    await primitives.trim(KEEP_FIVE)

    assert await primitives.read("short", family="receipt") == [None]
    assert (await primitives.must_commit(put("a"), request_id="long", digest=b"d", receipt_ms=60_000)).replayed
    assert not (await primitives.must_commit(put("a"), request_id="short", digest=b"d", receipt_ms=300)).replayed


async def test_a_large_log_is_trimmed_to_its_bound(primitives: Primitives) -> None:
    """The oldest changes go first, and changes younger than the minimum stay."""
    for start in range(0, 6000, 100):
        await primitives.must_commit(*(put(f"k{number:04}") for number in range(start, start + 100)))

    total = 0
    while dropped := await primitives.trim(KEEP_FIVE):
        total += dropped

    assert total == 5995
    assert [change.key for change in await primitives.log()] == [f"k{number}" for number in range(5995, 6000)]


async def test_trimming_moves_the_floor(primitives: Primitives) -> None:
    """Trimming moves the floor, so that a watcher behind it gets Compacted."""
    revisions = [(await primitives.must_commit(put(f"k{number:02}"))).revision for number in range(20)]
    assert (await primitives.status()).floor == 0

    await primitives.trim(KEEP_FIVE)

    status = await primitives.status()
    assert revisions[14] <= status.floor < revisions[15]
    assert status.revision == revisions[-1]
    with pytest.raises(Compacted) as caught:
        await primitives.changes(revisions[3], span=pattern_span("k19"))
    assert caught.value.oldest == status.floor


async def test_trimming_everything_leaves_the_revision(primitives: Primitives) -> None:
    """Trimming moves the floor, so that a watcher behind it gets Compacted."""
    commit = await primitives.must_commit(put("a"), put("b"))

    assert await primitives.trim(Window(changes=0, age_ms_min=0)) == 2

    status = await primitives.status()
    assert (status.floor, status.revision, status.log_changes) == (commit.revision, commit.revision, 0)
    assert (await primitives.changes(commit.revision)).changes == []
    with pytest.raises(Compacted):
        await primitives.changes(commit.revision - 1)
    assert (await primitives.must_commit(put("c"))).revision > commit.revision


async def test_trimming_nothing_moves_nothing(primitives: Primitives) -> None:
    """Trimming moves the floor, so that a watcher behind it gets Compacted."""
    assert await primitives.trim(KEEP_FIVE) == 0
    await primitives.must_commit(put("a"), put("b"))
    before = await primitives.image()

    assert await primitives.trim(KEEP_FIVE) == 0

    assert await primitives.image() == before
    assert (await primitives.status()).floor == 0


async def test_the_counters_are_those_of_what_trimming_left(primitives: Primitives) -> None:
    """After trimming, the counters of the log are those of the changes that are left."""
    for number in range(12):
        await primitives.must_commit(put(f"k{number:02}", "x" * number), Add("n", 1))
    await primitives.must_commit(Delete("k11"), Patch("r", {"x": b"1"}), put("last"))

    for changes in (20, 7, 2):
        await primitives.trim(Window(changes=changes, age_ms_min=0))

        status, left = await primitives.status(), await primitives.log()
        assert status.log_changes == len(left) <= changes
        assert_counted(primitives.engine, status.log_bytes, sum(change.entry.weight_bytes for change in left))
        with pytest.raises(Compacted):
            await primitives.changes(status.floor - 1)


async def test_what_trimming_drops_is_deleted(
    store: limpet.Store, url: str, request: pytest.FixtureRequest, elapse: Elapse
) -> None:
    """What trimming drops is deleted, and so are expired receipts and expired marks of superseded requests.

    They must not only be hidden from readers: a store that is written for years would fill its disk.
    """
    hour_passes = stands_still(store)
    primitives = Primitives(store)
    for number in range(60):
        options: dict[str, Any] = {"request_id": f"request-{number}"}
        if number % 2:
            options |= {"digest": b"d", "receipt_ms": 300}
        elif hour_passes:
            # Such a mark is remembered for an hour, which is too long to wait for.
            options |= {"retry_since": (await primitives.status()).revision}
        await primitives.must_commit(put(f"k{number % 5}", number), **options)
    await elapse(2 * 3600 if hour_passes else 0.4)

    while await primitives.trim(Window(changes=0, age_ms_min=0)):
        pass

    assert await primitives.read(*(f"request-{number}" for number in range(60)), family="receipt") == [None] * 60
    assert (await primitives.status()).log_changes == 0
    stored = await in_thread(lambda: request.config.hook.pytest_limpet_stored(url=url, namespace=store.name))
    if stored is None:
        pytest.skip(
            f"{NOT_JUDGED}whether trimming deletes anything on {url.partition(':')[0]}; "
            "give the suite a count of what is stored, by the hook pytest_limpet_stored"
        )
    # Five entries, perhaps with a place in an order each, and a few rows or messages about the namespace itself.
    assert 5 <= stored < 25, f"{stored} are stored"


@pytest.mark.face("async")
async def test_a_waiter_is_notified_of_trimming_or_gets_what_is_left(primitives: Primitives) -> None:
    """Trimming moves the floor, so that a watcher behind it gets Compacted."""
    waiting = asyncio.create_task(primitives.changes(0, wait_s=60.0))
    await asyncio.sleep(0.02)
    for number in range(20):
        await primitives.must_commit(put(f"k{number:02}"))
    await primitives.trim(KEEP_FIVE)

    try:
        page = await asyncio.wait_for(waiting, 5)
    except Compacted:
        return
    # The wait was answered before the trimming, from the very first change on.
    assert page.changes[0].key == "k00"


# status -----------------------------------------------------------------------


async def test_the_revision_is_that_of_the_latest_change(primitives: Primitives) -> None:
    """The revision is that of the latest change."""
    assert (await primitives.status()).revision == 0
    writes: list[Write] = [put("a"), Touch("a", 60_000), Add("n", 1), Delete("a"), Patch("r", {"a": b"1"})]
    writes.append(Put("job", b"{}", ttl_ms=60_000, family="lock"))
    for write in writes:
        commit = await primitives.must_commit(write)
        assert (await primitives.status()).revision == commit.revision == (await primitives.log())[-1].revision
    await primitives.must_refuse(put("x"), guards=(Guard("x", PRESENT),))
    assert (await primitives.status()).revision == commit.revision


async def test_the_revision_of_one_namespace_is_not_another_ones(primitives: Primitives, open_store: OpenStore) -> None:
    """The revision is that of the latest change."""
    other = Primitives(await open_store(namespace=f"{primitives.name}-b", sweep=False))
    await primitives.must_commit(put("a"), put("b"))

    assert (await other.status()).revision == 0
    assert ((await primitives.status()).keys, (await other.status()).keys) == (2, 0)


async def test_the_time_is_what_decides_about_expiry(
    primitives: Primitives, open_store: OpenStore, elapse: Elapse, set_back: SetBack
) -> None:
    """`now_ms` is the time that decides about expiry, and it never goes back."""
    other = Primitives(await open_store(namespace=primitives.name, sweep=False))
    entry = only(await primitives.must_commit(put("a", ttl_ms=1000)))
    await primitives.must_commit(put("b", ttl_ms=60_000))
    assert entry.expires_ms is not None
    assert (await primitives.status()).now_ms < entry.expires_ms
    await elapse(1.5)
    assert await primitives.read("a", "b", "c") == [None, *await primitives.read("b"), None]
    before = await primitives.status()
    assert before.now_ms >= entry.expires_ms
    (due,) = await primitives.due()
    await primitives.must_commit(due)

    await set_back(60)

    after = await primitives.status()
    assert after.now_ms >= before.now_ms
    assert (await other.status()).now_ms >= entry.expires_ms
    assert only(await other.must_commit(put("a"))).created_ms >= entry.expires_ms


async def test_the_status_has_for_how_long_time_stands_still(
    primitives: Primitives, elapse: Elapse, set_back: SetBack
) -> None:
    """`behind_ms` is how far the engine's clock is behind that time, which stands still meanwhile."""
    before = await primitives.status()
    assert before.behind_ms < 1000
    await primitives.must_commit(put("a"))

    is_set_back = await set_back(3600)

    after = await primitives.status()
    assert after.behind_ms == 3_600_000 or not is_set_back
    await elapse(1)
    assert (await primitives.status()).behind_ms == 3_599_000 or not is_set_back


async def test_what_was_read_as_expired_is_due_after_the_clock_was_set_back(
    primitives: Primitives, elapse: Elapse, set_back: SetBack
) -> None:
    """An expired entry reads as absent, swept or not."""
    await primitives.must_commit(put("a", ttl_ms=1000), put("b"), Put("a", b"{}", ttl_ms=1000, family="lock"))
    await elapse(1.5)
    assert await primitives.read("a", "x") == [None, None]

    await set_back(60)

    assert await primitives.read("a", "x") == [None, None]
    assert await primitives.read("a") == [None]
    assert await primitives.read("a", family="lock") == [None]
    assert [entry.key for entry in (await primitives.scan()).entries] == ["b"]
    assert sorted((one.family, one.key) for one in await primitives.due()) == [("data", "a"), ("lock", "a")]
    await primitives.must_refuse(Touch("b", None), guards=(Guard("a", PRESENT),))


async def test_the_revision_outlives_a_handle(primitives: Primitives, open_store: OpenStore) -> None:
    """The revision is that of the latest change."""
    commit = await primitives.must_commit(put("a"), put("b"))
    before = await primitives.status()
    again = Primitives(await open_store(namespace=primitives.name, sweep=False))

    after = await again.status()

    assert after.revision == commit.revision
    assert (after.store_id, after.epoch, after.keys) == (before.store_id, before.epoch, before.keys)


async def test_keys_and_bytes_are_counted(primitives: Primitives) -> None:
    """Keys and bytes count what is stored."""
    await primitives.must_commit(put("é", b"12345"), put("ab", {"a": 1}), Patch("r", {"x": b"12", "yy": b"\x00123"}))

    status = await primitives.status()

    assert status.keys == 3
    # é is two bytes and its value five; {"a":1} is seven; a record counts its names and fields.
    assert_counted(primitives.engine, status.size_bytes, (2 + 5) + (2 + 7) + (1 + 1 + 2 + 2 + 3))
    assert (status.log_changes, status.log_bytes) == (3, status.size_bytes)


async def test_counts_follow_every_kind_of_write(primitives: Primitives, elapse: Elapse) -> None:
    """Keys and bytes count what is stored."""
    dice = random.Random(9)
    for _ in range(60):
        key = f"k{dice.randrange(8)}"
        writes: list[Write] = [
            put(key, "x" * dice.randrange(50)),
            put(key, "x" * dice.randrange(50), ttl_ms=dice.randrange(1, 300)),
            Delete(key),
            Delete(key, take=True),
            Touch(key, 60_000),
            Add(f"n{key}", dice.randrange(1000)),
            Patch(f"r{key}", {"f": b'"' + b"y" * dice.randrange(9) + b'"'}, unset=("g",)),
        ]
        await primitives.must_commit(dice.choice(writes))
        if dice.random() < 0.1:
            await elapse(0.1)
            await primitives.must_commit(*await primitives.due())
    await elapse(0.4)
    await primitives.must_commit(*await primitives.due())

    entries = (await primitives.scan()).entries
    status = await primitives.status()

    assert status.keys == len(entries) > 5
    assert_counted(primitives.engine, status.size_bytes, sum(entry.weight_bytes for entry in entries))
    assert status.log_changes == len(await primitives.log())


async def test_what_has_expired_counts_until_it_is_swept(primitives: Primitives, elapse: Elapse) -> None:
    """Keys and bytes count what is stored."""
    await primitives.must_commit(put("a", ttl_ms=300), put("b"))
    await elapse(0.4)
    assert (await primitives.status()).keys == 2

    await primitives.must_commit(*await primitives.due())

    status = await primitives.status()
    assert status.keys == 1
    assert_counted(primitives.engine, status.size_bytes, 2)


async def test_locks_and_receipts_are_not_counted(primitives: Primitives) -> None:
    """Keys and bytes count what is stored."""
    await primitives.must_commit(put("a"), request_id="request-1", digest=b"d", receipt_ms=60_000)
    await primitives.must_commit(Put("job", b"{}", ttl_ms=60_000, family="lock"))

    status = await primitives.status()

    assert status.keys == 1
    assert_counted(primitives.engine, status.size_bytes, 2)


# close ------------------------------------------------------------------------

CALLS: dict[str, Callable[[Primitives], Awaitable[Any]]] = {
    "read": lambda primitives: primitives.read("a"),
    "read several": lambda primitives: primitives.read("a", "b"),
    "scan": lambda primitives: primitives.scan(),
    "scan far": lambda primitives: primitives.scan(limit=5000),
    "scan with a filter": lambda primitives: primitives.scan(where=limpet.field("a") == 1),
    "commit": lambda primitives: primitives.commit(put("a", 2)),
    "changes": lambda primitives: primitives.changes(0),
    "changes with a wait": lambda primitives: primitives.changes(0, wait_s=60.0),
    "due": lambda primitives: primitives.due(),
    "trim": lambda primitives: primitives.trim(KEEP_FIVE),
    "status": lambda primitives: primitives.status(),
}


@pytest.mark.face("async")
@pytest.mark.parametrize("call", CALLS)
async def test_later_calls_raise_closed(primitives: Primitives, open_store: OpenStore, call: str) -> None:
    """Commits that began are finished; later calls raise Closed."""
    other = Primitives(await open_store(namespace=primitives.name, sweep=False))
    entry = only(await primitives.must_commit(put("a")))
    await CALLS[call](primitives)
    before = await other.read("a")

    await primitives.engine.close()
    await primitives.engine.close()

    with pytest.raises(Closed):
        await asyncio.wait_for(CALLS[call](primitives), PATIENCE_S)
    assert await other.read("a") == before
    assert before[0] is not None
    assert before[0].created_revision == entry.created_revision


@pytest.mark.face("async")
async def test_commits_that_began_are_finished(primitives: Primitives, open_store: OpenStore) -> None:
    """Commits that began are finished; later calls raise Closed."""
    other = Primitives(await open_store(namespace=primitives.name, sweep=False))
    begun = [asyncio.create_task(primitives.commit(put(f"k{number}"), put(f"l{number}"))) for number in range(10)]
    await asyncio.sleep(0)

    await primitives.engine.close()

    commits = await asyncio.wait_for(asyncio.gather(*begun), PATIENCE_S)
    assert all(isinstance(commit, Commit) for commit in commits)
    assert (await other.status()).keys == 20


@pytest.mark.face("async")
async def test_a_commit_that_closing_met_is_done_or_not_done(primitives: Primitives, open_store: OpenStore) -> None:
    """Commits that began are finished; later calls raise Closed.

    Writers go on while the engine closes. A write that was answered is in the store, one that raised Closed is not.
    """
    other = Primitives(await open_store(namespace=primitives.name, sweep=False))
    answered: set[str] = set()

    async def write(writer: int) -> None:
        for number in range(10_000):
            key = f"{writer}/{number:04}"
            await primitives.must_commit(put(key))
            answered.add(key)
            await asyncio.sleep(0)

    writing = [asyncio.create_task(write(writer)) for writer in range(5)]
    await asyncio.sleep(0.03)
    await primitives.engine.close()
    ends = await asyncio.wait_for(asyncio.gather(*writing, return_exceptions=True), PATIENCE_S)

    assert [type(end) for end in ends] == [Closed] * 5
    assert {change.key for change in await other.log()} == answered
    assert answered


@pytest.mark.face("async")
async def test_a_waiter_is_notified_of_closing(primitives: Primitives, open_store: OpenStore) -> None:
    """Callers that wait for changes are woken and get Closed."""
    other = Primitives(await open_store(namespace=primitives.name, sweep=False))
    commit = await primitives.must_commit(put("a"))
    waiting = [asyncio.create_task(primitives.changes(commit.revision, wait_s=60.0)) for _ in range(3)]
    waiting.append(asyncio.create_task(primitives.changes(commit.revision, wait_s=60.0, span=pattern_span("b"))))
    elsewhere = asyncio.create_task(other.changes(commit.revision, wait_s=60.0))
    await asyncio.sleep(0.05)

    await primitives.engine.close()

    ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert [type(end) for end in ends] == [Closed] * 4
    later = await other.must_commit(put("b"))
    page = await asyncio.wait_for(elsewhere, 5)
    assert page.next_after in (commit.revision, later.revision)


@pytest.mark.face("sync")
async def test_closing_a_blocking_store_wakes_its_watches(open_store: OpenStore) -> None:
    """Callers that wait for changes are woken and get Closed."""
    store = await open_store()
    async with store.watch() as watch:
        waiting = asyncio.ensure_future(anext(watch, None))
        await asyncio.sleep(0.05)

        await store.close()

        assert await asyncio.wait_for(waiting, 5) is None
