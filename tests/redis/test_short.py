"""The short way of usual writes: it decides as the plan does, and leaves to the long way exactly what is unusual.

Random groups go to the engine and, one batch after the other, to `plan`. The order is that in which they are applied:
first those that the short way applies, then those that it leaves.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import msgspec
import pytest

import limpet
from limpet import codec
from limpet.commit import committer
from limpet.engines.redis import engine as redis_engine
from limpet.engines.redis import requests as redis_requests
from limpet.engines.redis.connection import Connection
from limpet.engines.redis.engine import UNUSUAL_GROUPS, RedisEngine
from limpet.engines.redis.requests import ITEMS_MIN, TEST_CLOCK_KEY
from limpet.engines.server_engine import Ticket
from limpet.errors import Ambiguous, Conflict, Corrupt, TypeMismatch
from limpet.keys import prefix_span
from limpet.model import (
    ABSENT,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Change,
    Commit,
    Condition,
    Delete,
    Entry,
    FieldEquals,
    Guard,
    Patch,
    Put,
    Refusal,
    Revision,
    Status,
    Write,
    live,
)
from limpet.request_ids import new_request_id
from limpet.transition import plan
from tests.engines import unique
from tests.proxy import Fault
from tests.redis.support import command, engine_of, proxy_of, server

PROGRAMS: Final = int(os.environ.get("LIMPET_MODEL_EXAMPLES") or 100)
GROUPS: Final = 30
KEYS: Final = ("a", "b", "c", "d/e", "é\U0001f41a", "%_*\\")
VALUE_BYTES_MAX: Final = 40
NO_REVISION: Final = 1_000_000


@pytest.fixture
async def store() -> AsyncIterator[limpet.Store]:
    """A store whose time is set by `command`. Other processes of a test run have databases of their own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw63").removeprefix("gw")
    url = f"{os.environ['LIMPET_TEST_REDIS'].rpartition('/')[0]}/{worker}?clock=test"
    async with limpet.open(url, namespace=unique(), sweep=False) as opened:
        yield opened
        await command(opened, "DEL", TEST_CLOCK_KEY)


@pytest.mark.parametrize("seed", range(PROGRAMS))
async def test_groups_of_single_writes_are_decided_as_the_plan_does(
    store: limpet.Store, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over keys that are fresh, live, expired, with meta, records or another program's, and sometimes with an index."""
    # Every second program sends what has a short way in a request of its own, however little it is.
    monkeypatch.setattr(redis_requests, "ITEMS_MIN", 1 if seed % 2 else redis_requests.ITEMS_MIN)
    program = Program(store, random.Random(seed))

    for _ in range(GROUPS):
        await program.step()

    assert program.short_writes > 0


class Program:
    """A program of random groups, and the state that `plan` makes of them."""

    def __init__(self, store: limpet.Store, dice: random.Random) -> None:
        self.store = store
        self.engine: RedisEngine = engine_of(store)
        self.namespace = store.name
        self.dice = dice
        self.now_ms = 1_000_000
        self.map: dict[str, Entry] = {}
        self.log: list[Change] = []
        self.foreign: set[str] = set()
        self.has_index = False
        self.short_writes = 0

    # What happens ---------------------------------------------------------------

    async def step(self) -> None:
        """Something unusual perhaps, and then a group."""
        self.now_ms += self.dice.choice([0, 0, 1, 5, 40])
        await command(self.store, "SET", TEST_CLOCK_KEY, self.now_ms)
        await self._disturb()
        size = self.dice.choice([1, 1, 1, 2, 4, 8])
        batches = [self._make_batch() for _ in range(size)]
        await self._commit(batches)
        await self._compare_state()

    async def _disturb(self) -> None:
        key, roll = self.dice.choice(KEYS), self.dice.random()
        if roll < 0.1 and key not in self.map:
            await command(self.store, "SET", f"{{{self.namespace}}}:{key}", "another program's")
            self.foreign.add(key)
        elif roll < 0.2 and self.foreign:
            key = self.foreign.pop()
            await command(self.store, "DEL", f"{{{self.namespace}}}:{key}")
        elif roll < 0.25 and not self.has_index and self.short_writes:
            await self.engine.index(self.namespace, "n")
            self.has_index = True
        elif roll < 0.4 and self.has_index:
            await self.engine.unindex(self.namespace, "n")
            self.has_index = False
            self.engine._unusual.clear()

    def _make_batch(self) -> Batch:
        dice, key = self.dice, self.dice.choice(KEYS)
        if dice.random() < 0.15:
            return self._make_puts()
        found = live(self.map.get(key), self.now_ms)
        # An expectation that does not hold is one that no batch of this group can meet.
        revision = Revision(found.revision if found is not None else NO_REVISION)
        write: Write
        conditions: list[Condition] = []
        match dice.randrange(12):
            case 0 | 1:
                write = Put(key, codec.encode(dice.choice([0, -1, 10**14, {"n": 1}, "é", b"raw", limpet.Fields(n=1)])))
            case 2 | 3:
                value = codec.encode(dice.choice([1, {"n": 2}]))
                write = Put(key, value, KEEP, KEEP) if dice.random() < 0.5 else Put(key, value)
                narrow: Condition = dice.choice([revision, revision, Revision(NO_REVISION), ABSENT, PRESENT])
                conditions = [ABSENT if found is None and dice.random() < 0.8 else narrow]
            case 4 | 5:
                write = Add(
                    key,
                    dice.choice([1, -7, 10**14, 10**15, codec.INT_MAX]),
                    rule=dice.choice(["add", "add", "add", "minimum", "maximum"]),
                    new_ttl_ms=dice.choice([None, None, None, 30]),
                )
            case 6 | 7:
                write = Patch(key, self._make_fields(), if_exists=dice.random() < 0.2)
            case 8 | 9:
                held = None if found is None or found.stored is None else codec.member(found.stored, "n")
                conditions = [FieldEquals("n", ABSENT if held is None else held)]
                if dice.random() < 0.3:
                    conditions = [FieldEquals("n", dice.choice([ABSENT, b"77", b"\0\xff"]))]
                unset = ("s",) if dice.random() < 0.1 else ()
                fields = {name: field for name, field in self._make_fields().items() if name not in unset}
                write = Patch(key, fields, unset, if_exists=dice.random() < 0.8)
            case 10:
                value = codec.encode(dice.choice([5, {"n": 1}, limpet.Fields(n=1, s=b"\xff")]))
                ttl_ms, meta_json = dice.choice([None, 3, 30, 1000]), dice.choice([None, b'{"by":1}'])
                write = Put(key, value, ttl_ms, meta_json)
            case _:
                write = Delete(key) if dice.random() < 0.5 else Put(key, b"2", ttl_ms=KEEP, meta_json=KEEP)
        guards = tuple(Guard(key, condition) for condition in conditions)
        is_brief, writer = dice.random() < 0.5, self._make_writer()
        return Batch(guards, (write,), value_bytes_max=VALUE_BYTES_MAX, is_brief=is_brief, writer=writer)

    def _make_writer(self) -> str | None:
        return self.dice.choice([None, None, None, None, None, "ann", 'a "b" \\', "é\\"])

    def _make_puts(self) -> Batch:
        """A batch of several puts, one of which may have no short way."""
        dice = self.dice
        keys = dice.sample(KEYS, dice.randrange(2, 5))
        puts = [Put(key, codec.encode(dice.choice([0, {"n": 1}, "é"]))) for key in keys]
        if dice.random() < 0.2:
            puts[-1] = dice.choice([Put(keys[-1], b"\0raw"), Put(keys[-1], b"1", 30), Put(keys[-1], b"1", KEEP, KEEP)])
        guards = (Guard(keys[0], PRESENT),) if dice.random() < 0.1 else ()
        return Batch(guards, tuple(puts), value_bytes_max=VALUE_BYTES_MAX, writer=self._make_writer())

    def _make_fields(self) -> dict[str, bytes]:
        values = [1, 2.5, None, "", "x" * 30, b"", b"\0", b"x\xff", {"$": 1}]
        names = self.dice.sample(["n", "s", "é '\""], self.dice.randrange(3))
        return {name: codec.encode_field(self.dice.choice(values)) for name in names}

    # What is expected -----------------------------------------------------------

    async def _commit(self, batches: list[Batch]) -> None:
        is_lone = len(batches) == 1 and self.dice.random() < 0.5
        # An expectation that never held looks as if another process had been faster.
        self.engine._committer.known(self.namespace).contention._until.clear()
        short = [] if self.namespace in self.engine._unusual else self._find_short(batches)
        with Spy(self.engine) as spy:
            if is_lone:
                self.engine._busy.discard(self.namespace)
                results: Sequence[Any] = await asyncio.gather(
                    self.engine.commit(self.namespace, batches[0]), return_exceptions=True
                )
            else:
                loop = asyncio.get_running_loop()
                group = [Ticket(batch, loop.create_future()) for batch in batches]
                results = await self.engine._commit_group(self.namespace, group, self.revision)

        left = sorted({*range(len(batches))} - {*self._expect_short(batches, results, short, spy.names)})
        sent = [msgspec.structs.replace(batch, request_id=None) for batch in spy.sent]
        assert sent == [batches[number] for number in left]
        causes = dict(zip(left, spy.causes, strict=True))
        for number in _in_order_of_commit(left, batches, results):
            self._expect(batches[number], results[number], causes[number])

    def _find_short(self, batches: list[Batch]) -> list[int]:
        """The numbers of the batches that must go the short way."""
        others = {key for batch in batches if not _is_item(batch) for key in _keys(batch)}
        short = [number for number, batch in enumerate(batches) if others.isdisjoint(_keys(batch))]
        return short if not others or len(short) >= max(redis_requests.ITEMS_MIN, len(batches) / 2) else []

    def _expect_short(
        self, batches: list[Batch], results: Sequence[Any], short: list[int], names: list[str]
    ) -> list[int]:
        """Check the short way. Returns the numbers of the batches that it must have applied, and not left."""
        applied: list[int] = []
        left_keys: set[str] = set()
        for place, number in enumerate(short, 1):
            batch = batches[number]
            if not left_keys.isdisjoint(_keys(batch)) or not self._is_usual(batch):
                left_keys.update(_keys(batch))
            else:
                applied.append(number)
                self._expect(batch, results[number], f"{names[0]}.{place}")
        self.short_writes += len(applied)
        return applied

    def _is_usual(self, batch: Batch) -> bool:
        """Whether the short way must decide a batch."""
        if len(batch.writes) > 1:
            return all(self._is_usual(Batch((), (put,))) for put in batch.writes)
        (write,), stored = batch.writes, self.map.get(batch.writes[0].key)
        if self.has_index or (stored is None and write.key in self.foreign):
            return False
        if stored is not None:
            if live(stored, self.now_ms) is None:
                return False
            if isinstance(write, Put) and stored.kind == "record":
                return False
            if isinstance(write, Add) and isinstance(stored.stored, bytes) and len(stored.stored) > 15:
                return False
        outcome = plan(batch, self._find, now_ms=self.now_ms, revision=0)
        if isinstance(outcome, Refusal):
            is_record = stored is None or stored.kind == "record"
            return outcome.reason == "guard" and (isinstance(write, Put) or is_record)
        keeps = not isinstance(write, Put) or write.ttl_ms is KEEP
        return keeps or stored is None or stored.expires_ms is None

    def _expect(self, batch: Batch, result: Any, cause: str) -> None:
        """Apply a batch to the state, and compare its result. The cause is the name under which it would be retried."""
        write = batch.writes[0]
        outcome = plan(batch, self._find, now_ms=self.now_ms, revision=self.revision, cause=cause)
        if isinstance(outcome, Refusal):
            found = outcome.found
            if batch.is_brief and found is not None and found.kind == "record":
                assert result in (outcome, msgspec.structs.replace(outcome, found=found.without_value()))
            else:
                assert result == outcome
            return
        after, expected = outcome.commit.entries[0], outcome.commit
        if any(self._is_foreign(write.key, left) for write, left in zip(batch.writes, expected.entries, strict=True)):
            assert isinstance(result, TypeMismatch)
            return
        if batch.is_brief and isinstance(write, Patch) and after is not None:
            # It may come with its value, if it was planned here.
            brief = msgspec.structs.replace(expected, entries=(after.without_value(),))
            assert result in (expected, brief)
        else:
            assert result == expected
        for change in outcome.changes:
            self.log.append(change)
            self.map.pop(change.key, None)
            if change.after is not None:
                self.map[change.key] = change.after

    def _is_foreign(self, key: str, after: Entry | None) -> bool:
        """Whether an entry cannot be stored, because another program holds its key."""
        stored = self.map.get(key)
        is_ours = stored is not None and (stored.kind == "record" or after is None or after.kind != "record")
        return key in self.foreign and after is not None and not is_ours

    @property
    def revision(self) -> int:
        return self.log[-1].revision if self.log else 0

    def _find(self, family: str, key: str) -> Entry | None:
        return self.map.get(key)

    async def _compare_state(self) -> None:
        """Compare the entries, the keys in order, what is due, the log and the counters."""
        engine, name = self.engine, self.namespace
        shown = {key: entry for key, entry in sorted(self.map.items()) if live(entry, self.now_ms) is not None}
        assert await engine.read(name, KEYS) == [shown.get(key) for key in KEYS]
        assert (await engine.scan(name, prefix_span(""))).entries == list(shown.values())
        assert {item.key for item in await engine.due(name)} == self.map.keys() - shown.keys()
        assert (await engine.changes(name, 0, limit=10_000)).changes == self.log
        status = await engine.status(name)
        logged = [change.entry.weight_bytes if change.after else len(change.key.encode()) for change in self.log]
        assert _counts(status) == (
            self.revision,
            len(self.map),
            sum(entry.weight_bytes for entry in self.map.values()),
            len(self.log),
            sum(logged),
        )


def _counts(status: Status) -> tuple[int, ...]:
    return status.revision, status.keys, status.size_bytes, status.log_changes, status.log_bytes


def _in_order_of_commit(numbers: list[int], batches: list[Batch], results: Sequence[Any]) -> list[int]:
    """Batches that were planned, in the order in which they were applied; those on one key stay in their own order."""
    latest: dict[str, tuple[int, bool]] = {}
    places: dict[int, tuple[int, bool]] = {}
    written = [(entry, result) for result in results if isinstance(result, Commit) for entry in result.entries]
    commits = {entry.revision: commit.revision for entry, commit in written if entry is not None}
    for number in numbers:
        keys, result = _keys(batches[number]), results[number]
        if isinstance(result, Commit):
            # One that changes nothing has the revision of the commit before it.
            place = (result.revision, (*result.entries, *result.ended) == (None, None))
            latest |= dict.fromkeys(keys, place)
        places[number] = max(latest.get(key, (0, False)) for key in keys)
        if isinstance(result, Refusal) and result.found is not None:
            # One that another program's key has stopped is sent again by itself, and may then come after this.
            places[number] = (commits.get(result.found.revision, result.found.revision), True)
    return sorted(numbers, key=places.__getitem__)


def _keys(batch: Batch) -> list[str]:
    return [write.key for write in batch.writes]


def _is_item(batch: Batch) -> bool:
    """Whether a batch is one for the short way, written once more in other words."""
    condition = batch.guards[0].condition if batch.guards else None
    if len(batch.writes) > 1:
        singles = [Batch((), (put,)) for put in batch.writes]
        return not batch.guards and all(_is_item(one) and one.writes[0].ttl_ms is None for one in singles)  # type: ignore[union-attr]
    match batch.writes[0]:
        case Put(stored=bytes(stored), ttl_ms=ttl_ms, meta_json=meta_json):
            keeps_all_or_nothing = (ttl_ms, meta_json) in ((None, None), (KEEP, KEEP))
            return keeps_all_or_nothing and stored[0] != 0 and condition is not PRESENT
        case Add(by=by, rule=rule, new_ttl_ms=new_ttl_ms):
            return abs(by) < 10**15 and rule == "add" and new_ttl_ms is None
        case Patch(unset=unset):
            return unset == ()
        case _:
            return False


class Spy:
    """Sees the names of requests, and which batches are sent the long way under which causes."""

    def __init__(self, engine: RedisEngine) -> None:
        self._engine = engine
        self._commit_long = engine._commit_long
        self.names: list[str] = []
        self.sent: list[Batch] = []
        self.causes: list[str] = []

    def __enter__(self) -> Spy:
        self._engine._commit_long = self._see  # type: ignore[assignment,method-assign]
        for module in (redis_engine, committer):
            module.new_request_id = self._name  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        del self._engine._commit_long
        for module in (redis_engine, committer):
            module.new_request_id = new_request_id  # type: ignore[attr-defined]

    def _name(self) -> str:
        self.names.append(new_request_id())
        return self.names[-1]

    async def _see(self, namespace: str, batches: Sequence[Batch], since: int) -> Any:
        assert not self.sent
        self.sent, before = [*batches], len(self.names)
        results = await self._commit_long(namespace, batches, since)
        name = self.names[before]
        self.causes = [batch.request_id or f"{name}.{place}" for place, batch in enumerate(batches, 1)]
        return results


# What else must hold ------------------------------------------------------------------------------------------


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The verbs of the script that connections of this process send."""
    sent: list[str] = []
    send = Connection.send

    def see(connection: Connection, words: tuple[Any, ...], on_reply: Any) -> None:
        if words[0] == "EVALSHA":
            sent.append(words[4])
        send(connection, words, on_reply)

    monkeypatch.setattr(Connection, "send", see)
    return sent


async def test_a_usual_write_is_one_request_and_an_unusual_one_is_two(store: limpet.Store, requests: list[str]) -> None:
    entry = await store.put("key", 1)
    await store.create("fresh", 1)
    await store.put("key", 2, expect=entry)
    await store.add("count", 1)
    record = store.record("job")
    await record.set(state="open", raw=b"\xff")
    assert await record.swap("state", "open", "done")
    assert await record.swap("raw", b"\xff", b"\xfe")
    assert await record.swap("other", ABSENT, 1)
    await store.batch().put("key", 1).put("fresh", 2).put("another", 3).commit()
    assert requests == ["write"] * 9

    requests.clear()
    with pytest.raises(Conflict):
        await store.put("key", 3, expect=entry)
    with pytest.raises(Conflict):
        await store.create("key", 3)
    assert not await record.swap("state", "open", "done")
    assert not await store.record("missing").swap("state", "open", "done")
    assert requests == ["write"] * 4

    await store.touch("job", 60)
    requests.clear()
    assert await record.swap("state", "done", "open")
    assert not await record.swap("state", "done", "open")
    await record.set(n=1)
    assert requests == ["write"] * 3

    requests.clear()
    await store.add("count", 10**15)
    await store.put("key", 4, ttl=60)
    assert requests == ["apply"] * 2

    requests.clear()
    await store.update("key", lambda value: value + 1)
    assert requests[1:] == ["write"]
    changed = await store.entry("key")
    assert changed is not None
    assert (changed.value, changed.expires_ms is None) == (5, False)

    requests.clear()
    await store.put("key", 5)
    assert requests == ["write", "apply"]


async def test_where_all_is_left_the_next_groups_go_the_long_way_at_once(
    store: limpet.Store, requests: list[str]
) -> None:
    """An index concerns every write. It would be two requests for each, for as long as there is an index."""
    await store.index("n")
    requests.clear()

    for number in range(UNUSUAL_GROUPS):
        await store.put("key", number)
    assert requests == ["write", *["apply"] * UNUSUAL_GROUPS]

    await store.unindex("n")
    requests.clear()
    await store.put("key", "last")
    assert requests == ["write"]


async def test_most_of_a_group_goes_the_short_way_and_the_rest_the_long_way(
    store: limpet.Store, requests: list[str]
) -> None:
    """Writes of one key keep their order, so that those beside a delete go the long way with it."""
    engine, loop = engine_of(store), asyncio.get_running_loop()
    puts = [store.batch().put(f"key/{number}", number) for number in range(ITEMS_MIN)]
    others = [store.batch().put("a", 1), store.batch().delete("a"), store.batch().add("a", 2)]
    group = [Ticket(draft._make_batch(), loop.create_future()) for draft in (*others[:1], *puts, *others[1:])]

    results = await engine._commit_group(store.name, group, 0)

    assert requests == ["write", "apply"]
    assert [result.revision for result in results if isinstance(result, Commit)] == [17, *range(1, 17), 18, 19]
    assert await store.get("a") == 2


@pytest.mark.parametrize("fault", ["lose", "cut"])
async def test_a_mixed_group_whose_line_breaks_is_done_once(fault: Fault) -> None:
    with proxy_of(server()) as proxy:
        async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
            await store.put("first", 0)
            proxy.fault(fault)

            await asyncio.gather(
                *(store.add("count") for _ in range(2 * ITEMS_MIN)),
                *(store.add(f"for a while/{number % 3}", ttl=60) for number in range(6)),
            )

            assert proxy.is_done
            assert await store.get("count") == 2 * ITEMS_MIN
            assert [entry.value async for entry in store.scan("for a while/")] == [2, 2, 2]
            assert (await store.status()).revision == 1 + 2 * ITEMS_MIN + 6


@pytest.mark.parametrize("kind", ["short", "planned"])
async def test_a_batch_may_expect_the_revision_that_one_before_it_gets(store: limpet.Store, kind: str) -> None:
    """A plan does not know that revision. A refusal that shows the entry as expected would be wrong."""
    engine, loop = engine_of(store), asyncio.get_running_loop()
    ttl_ms = None if kind == "short" else 60_000
    first = Batch((), (Put("key", b"1", ttl_ms),))
    second = Batch((Guard("key", Revision(1)),), (Put("key", b"2", ttl_ms),))

    results = await engine._commit_group(store.name, [Ticket(one, loop.create_future()) for one in (first, second)], 0)

    assert [result.revision for result in results if isinstance(result, Commit)] == [1, 2]


async def test_time_does_not_go_back(store: limpet.Store) -> None:
    await command(store, "SET", TEST_CLOCK_KEY, 2_000_000)
    await store.put("key", 1)
    await store.record("job").set(n=1)
    await command(store, "SET", TEST_CLOCK_KEY, 1_000_000)

    await store.put("key", 2)
    await store.add("count", 1)
    await store.record("job").set(n=2)

    assert {change.at_ms for change in (await engine_of(store).changes(store.name, 0)).changes} == {2_000_000}
    assert {entry.updated_ms async for entry in store.scan()} == {2_000_000}


async def test_if_the_log_is_replaced_nothing_is_written(store: limpet.Store) -> None:
    await store.put("key", 1)
    await store.record("job").set(n=b"1")
    await command(store, "SET", f"limpet:{{{store.name}}}:log", "another program's")

    for write in (store.put("key", 2), store.add("count"), store.record("job").set(n=b"2")):
        with pytest.raises(Corrupt):
            await write

    assert (await store.get("key"), await store.get("count")) == (1, None)
    assert await command(store, "HGETALL", f"{{{store.name}}}:job") == [b"n", b"1"]
    assert (await store.status()).revision == 2


async def test_a_lost_reply_is_found_under_the_name_of_each_write() -> None:
    """One of the group was left, and has no change. The numbers of the others stay what they were."""
    with proxy_of(server()) as proxy:
        async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
            await store.put("a", 1)
            await store.record("job").set(state="open")
            drafts = [
                store.batch().put("a", 2),
                store.batch().create("a", 3),
                store.batch().add("count", 4),
                store.batch().swap("job", "state", "open", "done"),
            ]
            loop = asyncio.get_running_loop()
            group = [Ticket(draft._make_batch(), loop.create_future()) for draft in drafts]
            proxy.fault("lose")

            results = await engine_of(store)._commit_group(store.name, group, 2)

            outcomes = []
            for result in results:
                assert isinstance(result, Ambiguous)
                assert result.request_id is not None
                outcome = await store.outcome(result.request_id)
                outcomes.append(outcome and [(entry.key, entry.revision) for entry in outcome.entries if entry])
            assert outcomes == [[("a", 3)], None, [("count", 4)], [("job", 5)]]


@pytest.mark.parametrize("fault", ["lose", "cut"])
async def test_a_group_whose_line_breaks_is_done_once(fault: Fault) -> None:
    with proxy_of(server()) as proxy:
        async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
            await store.record("job").set(state="open")
            proxy.fault(fault)

            results: list[Any] = await asyncio.gather(
                *(store.add("count") for _ in range(5)),
                *(store.record("job").swap("state", "open", number) for number in range(5)),
                *(store.create("fresh", number) for number in range(5)),
                return_exceptions=True,
            )

            assert proxy.is_done
            assert sorted(results[:5]) == [1, 2, 3, 4, 5]
            assert sorted(results[5:10]) == [False] * 4 + [True]
            assert sorted(type(result).__name__ for result in results[10:]) == ["Conflict"] * 4 + ["Entry"]
            assert (await store.status()).revision == 8


@pytest.mark.parametrize("fault", ["lose", "cut"])
async def test_batches_whose_line_breaks_are_whole_and_done_once(fault: Fault) -> None:
    with proxy_of(server()) as proxy:
        async with limpet.open(proxy.url, namespace=unique(), sweep=False, writer='a "b"') as store:

            async def commit(number: int) -> None:
                for turn in range(4):
                    batch = store.batch()
                    for place in range(10):
                        batch.put(f"{number}/{turn}/{place}", place)
                    if number == turn:
                        proxy.fault(fault)
                    commit = await batch.put("hot", number).commit()
                    assert [entry.writer for entry in commit.entries if entry is not None] == ['a "b"'] * 11

            await asyncio.gather(*(commit(number) for number in range(4)))

            assert proxy.faults == 4
            log = (await engine_of(store).changes(store.name, 0, limit=1_000)).changes
            assert [change.revision for change in log] == list(range(1, 4 * 4 * 11 + 1))
            assert sorted({change.commit for change in log}) == list(range(11, len(log) + 1, 11))
            assert len({change.key for change in log}) == 4 * 4 * 10 + 1
