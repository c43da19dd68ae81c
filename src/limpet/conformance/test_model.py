"""An engine compared with a model of it, under random batches.

The model is a dict and a list, driven by `limpet.transition.plan`, which decides what every
write does. An engine whose server decides, in whatever language, must decide the same.
Revisions are the engine's own, since they may skip: the model takes them from the engine's log.

``LIMPET_MODEL_EXAMPLES`` sets how many programs of thirty steps each engine runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import limpet
import limpet.sync
from limpet import codec
from limpet.conformance.support import assert_counted
from limpet.engine import Engine
from limpet.keys import Span, prefix_span
from limpet.model import (
    ABSENT,
    KEEP,
    PRESENT,
    Add,
    Batch,
    Change,
    Commit,
    Condition,
    Create,
    Delete,
    Entry,
    Equals,
    Expire,
    Family,
    FieldEquals,
    Filter,
    Guard,
    HeldBy,
    Import,
    Patch,
    Put,
    Refusal,
    Revision,
    Touch,
    Version,
    Write,
    join_origin,
    live,
)
from limpet.opening import open_engine
from limpet.transition import Plan, plan, recall

EXAMPLES = int(os.environ.get("LIMPET_MODEL_EXAMPLES") or 100)
STEPS = 30

# The model plans with revisions that no engine has reached, and then replaces them by the engine's.
FAR: Final = 2**62
DAY_MS: Final = 86_400_000
VALUE_BYTES_MAX: Final = 60

# Shrink every difference to a small program, although that takes time.
pytestmark = [pytest.mark.timeout(900 + EXAMPLES)] if find_spec("pytest_timeout") else []

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def test_an_engine_decides_as_the_plan_does(beside: type[Beside]) -> None:
    """The commit has the last revision and, for each write, the entry after it.

    Random batches of all writes under all guards go to the engine and to `plan`. Commits,
    refusals, entries and the log must agree, over repeated requests, lost answers, expiries,
    sweeps, ends and new beginnings.
    """
    run_state_machine_as_test(
        beside,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=False,
            print_blob=True,
            database=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def beside(url: str, face: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[type[Beside]]:
    """The state machine for this engine, run on a loop, or without one as the sync API does."""
    # Keep the example database of hypothesis out of the folder that the suite is run from.
    set_hypothesis_home_dir(tmp_path / "hypothesis")
    clock = limpet.ManualClock()
    runner = limpet.sync.Runner()
    loop = asyncio.new_event_loop()
    run: Run = runner.run if face == "sync" else loop.run_until_complete
    engine: Engine = run(open_engine(url, clock))
    runner.inline = engine.traits.inline

    def turn(now_ms: int) -> bool:
        is_ours = engine.traits.clock == "host"
        return is_ours or bool(request.config.hook.pytest_limpet_turn(url=url, now_ms=now_ms))

    class BesideThis(Beside):
        def __init__(self) -> None:
            super().__init__(engine, clock, run, turn)

    yield BesideThis
    runner.inline = False
    run(engine.close())
    runner.stop()
    loop.close()
    set_hypothesis_home_dir(None)


# The requests. Guards are made from the entries there are, so that most of them hold. --

KEYS: Final = ("a", "a/b", "é\U0001f41a", "%_*\\")
LOCKS: Final = ("a", "gate")

keys = st.sampled_from(KEYS)
small = st.sampled_from([0, 1, -1, 1.0, -0.0, True, None, "", "x", [1], {"n": 1}, {"n": 1.0, "s": "x"}, {"$text": "x"}])
long = "long" * 20
fields = st.dictionaries(
    st.sampled_from(["n", "s", "é '\""]), small | st.sampled_from([b"", b"x\xff", long]), max_size=2
)
values = st.one_of(
    small,
    st.sampled_from([codec.INT_MAX, codec.INT_MIN, b"", b"\0raw", "text" * 5]),
    fields.map(codec.Fields),
    fields.map(codec.Fields),
).map(codec.encode)
ttls = st.sampled_from([None, None, None, 1, 5, 50, 1000, 700_000])
kept_ttls: st.SearchStrategy[Any] = st.just(KEEP) | ttls
metas: st.SearchStrategy[Any] = st.sampled_from([None, KEEP, b'{"by":"me"}', b"{}"])


FAR_MS: Final = 250_000_000_000_000
"""A time that no clock of a test reaches."""
IMPORTED: Final = {
    "version": st.sampled_from([1, 7, 2**52]),
    "created_ms": st.sampled_from([0, 1_700_000_000_000]),
    "updated_ms": st.sampled_from([1, 1_800_000_000_000]),
}


@st.composite
def patches(draw: st.DrawFn) -> Patch:
    written = {name: codec.encode_field(item) for name, item in draw(fields).items()}
    unset = tuple(sorted(draw(st.sets(st.sampled_from(["n", "s"]), max_size=1)) - written.keys()))
    return Patch(draw(keys), written, unset, draw(st.sampled_from([False, False, True])), draw(kept_ttls), draw(metas))


puts = st.builds(Put, keys, values, kept_ttls, metas)
# Expire adds its number to the revision found: 0 hits.
writes = st.one_of(
    puts,
    puts,
    patches(),
    patches(),
    st.builds(Add, keys, st.sampled_from([1, 0, -3, codec.INT_MAX]), kept_ttls, metas),
    st.builds(
        Import,
        keys,
        values,
        meta_json=st.sampled_from([None, b"{}"]),
        **IMPORTED,
        expires_ms=st.just(FAR_MS) | st.none(),
    ),
    st.builds(Create, keys, values, ttls, st.sampled_from([None, b'{"m":1}'])),
    st.builds(Touch, keys, ttls),
    st.builds(Delete, keys, st.booleans()),
    st.builds(Expire, keys, st.sampled_from([0, 0, 1])),
)
# What programs write most, and what an engine may have a short way for.
single_writes = st.one_of(
    st.builds(Put, keys, small.map(codec.encode)),
    st.builds(Add, keys, st.sampled_from([1, -3])),
    st.builds(Patch, keys, fields.map(lambda given: {name: codec.encode_field(item) for name, item in given.items()})),
    writes,
)
batches = st.lists(writes, min_size=1, max_size=4, unique_by=lambda write: write.key)
aims = st.tuples(
    keys,
    st.sampled_from(["presence", "version", "revision", "equals", "member", "fence"]),
    st.sampled_from([True, True, True, True, False]),
)
requests = st.sampled_from([None, None, None, "one", "two"])
filters = st.one_of(
    st.none(),
    st.builds(
        lambda name, compare, value: getattr(limpet.field(name), compare)(value),
        st.sampled_from(["n", "s"]),
        st.sampled_from(["__eq__", "__ne__", "__lt__", "__ge__"]),
        st.sampled_from([0, 1, 1.0, True, "x", b"x\xff"]),
    ),
    st.just(limpet.field("n").exists() & limpet.field("s").not_in(["x"])),
)


class Model:
    """An engine, reduced to a map and a log."""

    def __init__(self) -> None:
        self.map: dict[tuple[Family, str], Entry] = {}
        self.log: list[Change] = []
        self.revision = 0
        self.answers: dict[str, tuple[bytes, Commit, int]] = {}

    def find(self, family: Family, key: str) -> Entry | None:
        """Read the map. Receipts are in `answers` instead."""
        return self.map.get((family, key))

    def apply(self, change: Change) -> None:
        """Apply a change to the map and append it to the log."""
        address = change.family, change.key
        if change.after is None:
            del self.map[address]
        else:
            self.map[address] = change.after
        self.log.append(change)
        self.revision = change.revision


class Beside(RuleBasedStateMachine):
    """One program: a new namespace, and steps that go to the engine and to the model."""

    def __init__(self, engine: Engine, clock: limpet.ManualClock, run: Run, turn: Callable[[int], bool]) -> None:
        super().__init__()
        self.engine = engine
        self.clock = clock
        self.turn = turn
        # Whether we can set the engine's time. Where we cannot, no entry of this test expires.
        self.hosted = turn(clock.now_ms())
        self.run = run
        self.namespace = f"model-{uuid.uuid4().hex[:12]}"
        self.model = Model()
        self.commits = 0
        self.last: tuple[Batch, int] | None = None
        self.last_ms = 0

    # Steps that write ---------------------------------------------------------

    @initialize(wanted=st.lists(puts, min_size=2, max_size=4, unique_by=lambda write: write.key))
    def begin(self, wanted: list[Write]) -> None:
        """Some entries to begin with."""
        self._commit(self._batch((), tuple(map(self._write, wanted)), None))

    @rule(wanted=batches, request=requests)
    def commit(self, wanted: list[Write], request: str | None) -> None:
        """Some writes."""
        self._commit(self._batch((), tuple(map(self._write, wanted)), request))

    @rule(aimed=st.lists(aims, min_size=1, max_size=3), wanted=batches | st.just([]), request=requests)
    def commit_if(self, aimed: list[tuple[str, str, bool]], wanted: list[Write], request: str | None) -> None:
        """Some writes under guards, or guards alone."""
        guards = tuple(self._guard(*aim) for aim in aimed)
        self._commit(self._batch(guards, tuple(map(self._write, wanted)), request))

    @rule(write=writes)
    def write(self, write: Write) -> None:
        """A single write."""
        self._commit(self._batch((), (self._write(write),), None))

    @rule(
        write=single_writes,
        kind=st.sampled_from([None, None, "presence", "revision", "revision", "equals", "member", "member"]),
        hit=st.sampled_from([True, True, False]),
        writer=st.sampled_from([None, None, "ann"]),
    )
    def write_unnamed(self, write: Write, kind: str | None, hit: bool, writer: str | None) -> None:
        """A single write that the engine names, perhaps under a guard on its key."""
        guards = () if kind is None else (self._guard(write.key, kind, hit),)
        self._commit(Batch(guards, (self._write(write),), value_bytes_max=VALUE_BYTES_MAX, writer=writer))

    @rule(
        name=st.sampled_from(LOCKS),
        act=st.sampled_from(["acquire", "refresh", "release"]),
        ttl_ms=st.sampled_from([5, 50, 1000]),
        hit=st.sampled_from([True, True, True, False]),
    )
    def lock(self, name: str, act: str, ttl_ms: int, hit: bool) -> None:
        """A batch as locks make it."""
        is_held = live(self.model.find("lock", name), self._now_ms()) is not None
        ttl_ms = self._ttl(ttl_ms)
        guard = Guard(name, HeldBy(self._number("lock", name, "created_revision") + (not hit)), "lock")
        write: Write = Touch(name, ttl_ms, "lock") if act == "refresh" else Delete(name, family="lock")
        if act == "acquire" or (hit and not is_held):
            guard, write = Guard(name, ABSENT, "lock"), Put(name, b'{"holder":"me"}', ttl_ms, family="lock")
        self._commit(self._batch((guard,), (write,), None))

    @rule(wanted=writes, family=st.sampled_from(["audit", "recoverable"]), ttl_ms=ttls, gone=st.booleans())
    def beside(self, wanted: Write, family: Family, ttl_ms: int | None, gone: bool) -> None:
        """A write with something that is kept beside it, under the same key."""
        ttl_ms = None if ttl_ms is None else self._ttl(ttl_ms)
        other: Write = Delete(wanted.key, family=family) if gone else Put(wanted.key, b"1", ttl_ms, family=family)
        self._commit(self._batch((), (self._write(wanted), other), None))

    @precondition(lambda self: self.last is not None)
    @rule(answered=st.booleans())
    def again(self, answered: bool) -> None:
        """The last request once more, unchanged, or as the retry of a caller that got no reply."""
        assert self.last is not None
        batch, since = self.last
        if not answered:
            batch = msgspec.structs.replace(batch, retry_since=since)
        elif batch.receipt_ms is None:
            # Without a receipt the engine cannot recognise it, so it needs another request id.
            self.commits += 1
            batch = msgspec.structs.replace(batch, request_id=f"request-{self.commits}")
        self._commit(batch)

    # Steps in time ------------------------------------------------------------

    @rule(ms=st.sampled_from([None, None, 0, 1, 50, 1000, 600_000]), early=st.booleans(), sweeps=st.booleans())
    def wait(self, ms: int | None, early: bool, sweeps: bool) -> None:
        """Advance the clock if we can, by so much or to the next expiry, perhaps sweep, and compare the entries."""
        if self.hosted:
            now_ms = self.clock.now_ms()
            coming = [entry.expires_ms for entry in self.model.map.values() if (entry.expires_ms or 0) > now_ms]
            if ms is None:
                ms = min(filter(None, coming), default=now_ms) - now_ms - early
            self.turn(self.clock.after(max(0, ms) / 1000))
            self.clock.advance(max(0, ms) / 1000)
        if sweeps:
            self._sweep()
        self._compare_entries(prefix_span(""), None, True, 500)
        self._compare_read(KEYS, "data")

    def _sweep(self) -> None:
        due: list[Expire] = self.run(self.engine.due(self.namespace))
        now_ms = self._now_ms()
        expected = {
            Expire(key, entry.revision, family)
            for (family, key), entry in self.model.map.items()
            if live(entry, now_ms) is None
        }
        assert set(due) == expected
        assert len(due) == len(expected)
        if due:
            self._commit(self._batch((), tuple(due), None))

    # Steps that read --------------------------------------------------------

    @rule(
        prefix=st.sampled_from(["", "a", "a/", "é", "zz"]),
        where=filters,
        with_values=st.booleans(),
        back=st.integers(0, 12),
        limit=st.sampled_from([1, 2, 500]),
    )
    def look(self, prefix: str, where: Filter | None, with_values: bool, back: int, limit: int) -> None:
        """The status of the namespace, the entries under a prefix, and their latest changes."""
        self._compare_status()
        self._compare_entries(prefix_span(prefix), where, with_values, limit)
        self._compare_log(back, prefix_span(prefix) if with_values else None, limit)

    @rule(
        wanted=st.lists(keys, min_size=1, max_size=4), family=st.sampled_from(["data", "lock", "audit", "recoverable"])
    )
    def read(self, wanted: list[str], family: Family) -> None:
        """Some entries, in the order of the keys."""
        self._compare_read(wanted, family)

    def _compare_read(self, wanted: Sequence[str], family: Family) -> None:
        found = self.run(self.engine.read(self.namespace, wanted, family=family))
        now_ms = self._now_ms()
        _same(found, [live(self.model.find(family, key), now_ms) for key in wanted])

    def _compare_status(self) -> None:
        status = self.run(self.engine.status(self.namespace))
        data = [entry for (family, _), entry in self.model.map.items() if family == "data"]
        assert status.revision == self.model.revision
        assert status.keys == len(data)
        if data:
            assert_counted(self.engine, status.size_bytes, sum(entry.weight_bytes for entry in data))
        assert (status.floor, status.log_changes) == (0, len(self.model.log))

    def _compare_entries(self, span: Span, where: Filter | None, with_values: bool, limit: int) -> None:
        now_ms = self._now_ms()
        expected = [
            entry if with_values else entry.without_value()
            for (family, key), entry in sorted(self.model.map.items())
            if family == "data" and key in span and live(entry, now_ms) is not None and _matches(where, entry)
        ]
        found: list[Entry] = []
        rest: Span | None = span
        while rest is not None:
            part = self.run(self.engine.scan(self.namespace, rest, where=where, values=with_values, limit=limit))
            assert len(part.entries) <= limit
            assert part.cursor is None or part.cursor in rest
            found += part.entries
            rest = None if part.cursor is None else Span(part.cursor + "\0", span.stop)
        _same(found, expected)

    def _compare_log(self, back: int, span: Span | None, limit: int) -> None:
        """The log from some change on, of the data in a span, or of all families."""
        start = max(0, len(self.model.log) - back)
        after = self.model.log[start - 1].revision if start else 0
        expected = [
            change
            for change in self.model.log
            if change.revision > after and (span is None or (change.family == "data" and change.key in span))
        ]
        _same(self._comparable(self._changes(after, span, limit)), self._comparable(expected))

    # How a batch is made ------------------------------------------------------

    def _now_ms(self) -> int:
        # At time 0 every entry is live, which is right where nothing expires.
        return self.clock.now_ms() if self.hosted else 0

    def _ttl(self, ttl_ms: int) -> int:
        return ttl_ms if self.hosted else ttl_ms + DAY_MS

    def _batch(self, guards: tuple[Guard, ...], writes: tuple[Write, ...], request: str | None) -> Batch:
        self.commits += 1
        writer = (None, None, "bob")[self.commits % 3]
        if request is None:
            return Batch(guards, writes, f"request-{self.commits}", value_bytes_max=VALUE_BYTES_MAX, writer=writer)
        digest = hashlib.blake2b(repr((guards, writes)).encode("utf-8", "backslashreplace"), digest_size=16).digest()
        receipt = (request, digest, self._ttl(300_000))
        return Batch(guards, writes, *receipt, value_bytes_max=VALUE_BYTES_MAX, writer=writer)

    def _write(self, write: Write) -> Write:
        """The write with real numbers: Expire gets a revision, and a ttl is long if the clock is a server's."""
        if isinstance(write, Expire):
            return Expire(write.key, self._number("data", write.key, "revision") + write.revision)
        if isinstance(write, Delete) or write.ttl_ms is None or write.ttl_ms is KEEP:
            return write
        return msgspec.structs.replace(write, ttl_ms=self._ttl(write.ttl_ms))

    def _guard(self, key: str, kind: str, hit: bool) -> Guard:
        """A guard of this kind that holds, if that is possible, or one that narrowly does not."""
        found = live(self.model.find("data", key), self._now_ms())
        if kind == "fence" and (not hit or live(self.model.find("lock", LOCKS[0]), self._now_ms()) is not None):
            token = self._number("lock", LOCKS[0], "created_revision")
            return Guard(LOCKS[0], HeldBy(token + (not hit)), "lock")
        if kind == "presence" or found is None:
            return Guard(key, ABSENT if (found is None) == hit else PRESENT)
        assert found.stored is not None
        condition: Condition
        match kind:
            case "version":
                condition = Version(found.version + (not hit))
            case "revision":
                condition = Revision(found.revision + (not hit))
            case "equals":
                condition = Equals(found.stored if hit else b"77")
            case _:
                member = codec.member(found.stored, "n")
                condition = FieldEquals("n", b"77" if not hit else ABSENT if member is None else member)
        return Guard(key, condition)

    def _number(self, family: Family, key: str, name: Literal["revision", "created_revision"]) -> int:
        found = self.model.find(family, key)
        return 1 if found is None else int(getattr(found, name))

    # How a reply is compared with the plan -------------------------------------

    def _commit(self, batch: Batch) -> None:
        """Commit, and compare the reply and the log with the plan."""
        model, since = self.model, self.model.revision
        answer: Commit | Refusal = self.run(self.engine.commit(self.namespace, batch))
        now_ms = self.clock.now_ms() if self.hosted else answer.at_ms
        if batch.retry_since is not None:
            earlier = recall(batch, [change for change in model.log if change.revision > batch.retry_since], model.find)
            if earlier is not None:
                # A log need not repeat the value that a touch did not write, so the reply may lack it; nor does it
                # have what was kept.
                _same(_without_touched(batch, answer), _without_touched(batch, earlier))
                return
        self.last, self.last_ms = None if batch.request_id is None else (batch, since), now_ms
        if batch.receipt_ms is not None and batch.request_id in model.answers:
            digest, first, until_ms = model.answers[batch.request_id]
            if now_ms < until_ms:
                stale = Refusal("stale_request", batch.request_id, None, now_ms)
                _same(answer, msgspec.structs.replace(first, replayed=True) if digest == batch.digest else stale)
                return
        outcome = plan(batch, model.find, now_ms=now_ms, revision=FAR)
        if isinstance(outcome, Refusal) or isinstance(answer, Refusal):
            _same(answer, outcome)
            return
        self._learn(batch, outcome, answer)
        if batch.receipt_ms is not None:
            assert batch.request_id is not None
            model.answers[batch.request_id] = batch.digest, answer, now_ms + batch.receipt_ms

    def _learn(self, batch: Batch, outcome: Plan, answer: Commit) -> None:
        """Take the revisions from the engine's log, compare with the plan, and apply it to the model."""
        fresh = self._changes(self.model.revision, None, 500)
        if batch.request_id is None:
            causes = {change.cause for change in fresh} - {None}
            assert len(causes) <= 1
            for cause in causes:
                # A caller that got no reply retries under this name. Where the engine works inline, it always gets one.
                if not self.engine.traits.inline:
                    self.last = msgspec.structs.replace(batch, request_id=cause), self.model.revision
                origin = join_origin(cause, batch.writer)
                changes = tuple(
                    change if change.op == "expire" else msgspec.structs.replace(change, origin=origin)
                    for change in outcome.changes
                )
                outcome = msgspec.structs.replace(outcome, changes=changes)
        planned = [change.revision for change in outcome.changes]
        assert len(fresh) == len(outcome.changes)
        real = dict(zip(planned, (change.revision for change in fresh), strict=True))

        def translate(entry: Entry | None) -> Entry | None:
            return entry and msgspec.structs.replace(
                entry,
                revision=real.get(entry.revision, entry.revision),
                created_revision=real.get(entry.created_revision, entry.created_revision),
            )

        last = max(real.values(), default=self.model.revision)
        commit = msgspec.structs.replace(
            outcome.commit,
            revision=last,
            entries=tuple(map(translate, outcome.commit.entries)),
            ended=tuple(map(translate, outcome.commit.ended)),
        )
        _same(answer, commit)
        expected = [
            msgspec.structs.replace(change, entry=translate(change.entry), revision=real[change.revision], commit=last)
            for change in outcome.changes
        ]
        _same(self._comparable(fresh), self._comparable(expected))
        for change in expected:
            self.model.apply(change)

    def _changes(self, after: int, span: Span | None, limit: int) -> list[Change]:
        """The log, page by page."""
        found: list[Change] = []
        while True:
            page = self.run(self.engine.changes(self.namespace, after, span=span, limit=limit))
            assert len(page.changes) <= limit
            found += page.changes
            if not page.changes:
                break
            assert after < page.changes[-1].revision <= page.next_after
            after = page.next_after
        revisions = [change.revision for change in found]
        assert revisions == sorted(set(revisions))
        return found

    def _comparable(self, changes: Sequence[Change]) -> list[Change]:
        """Changes without the values that a log may leave out: those of a touch, whose entry may have it or not.

        The log keeps the value that was taken, to answer a retry.
        """
        return [
            msgspec.structs.replace(change, entry=change.entry.without_value()) if change.op == "touch" else change
            for change in changes
        ]


def _matches(where: Filter | None, entry: Entry) -> bool:
    return where is None or (entry.stored is not None and where.matches(entry.stored))


def _without_touched(batch: Batch, answer: Commit | Refusal) -> Commit | Refusal:
    if isinstance(answer, Refusal):
        return answer
    entries = tuple(
        None
        if write.key in answer.kept
        else entry.without_value()
        if entry is not None and isinstance(write, Touch)
        else entry
        for entry, write in zip(answer.entries, batch.writes, strict=True)
    )
    return msgspec.structs.replace(answer, entries=entries)


def _same(found: object, expected: object) -> None:
    """Fail on a difference, and show details that a repr would hide."""
    if found != expected:
        shown = [msgspec.json.format(msgspec.json.encode(side)).decode() for side in (found, expected)]
        pytest.fail(f"found {found!r}\n{shown[0]}\nexpected {expected!r}\n{shown[1]}")
