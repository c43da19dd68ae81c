"""Pruning the audit trail: what is removed, what is left to verify, and who can hide behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.conformance.support import fail
from limpet.errors import Corrupt, InvalidValue
from limpet.model import Delete, Put
from limpet.semantic.rows import has_trail, rows_of
from limpet.semantic.store import Audit, InvalidField, SemanticStore
from limpet.semantic.verify import Report, verify
from tests.engines import ENGINES, unique, url_of
from tests.semantic.support import CHECKPOINT, WRITER, audit
from tests.semantic.trails import replace, rows_in, tamper

START = "tenant/acme/project/docs/"
ALL = timedelta(hours=-1)


@pytest.fixture(params=ENGINES)
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SemanticStore]:
    async with limpet.open(url_of(request.param, tmp_path), namespace=unique("pruned")) as store:
        yield SemanticStore(store, audit=audit())


@pytest.fixture
async def timed() -> AsyncIterator[tuple[SemanticStore, limpet.ManualClock]]:
    """A trail whose time is turned by hand."""
    clock = limpet.ManualClock()
    async with limpet.open("memory:", clock=clock, sweep=False) as store:
        yield SemanticStore(store, audit=audit()), clock


async def put(kept: SemanticStore, name: str, number: int, **semantics: Any) -> None:
    await kept.kv_put(f"{START}{name}", {"n": number}, writer=WRITER, semantics={**CHECKPOINT, **semantics})


async def write(kept: SemanticStore, rows: int, *, keys: int = 5, first: int = 0) -> None:
    for number in range(first, first + rows):
        await put(kept, f"{number % keys}", number)


async def load_rows(kept: SemanticStore) -> list[dict[str, Any]]:
    return [row async for row in rows_of(kept.store)]


async def places(kept: SemanticStore) -> dict[str, bytes]:
    """Everything in the trail, as it is stored."""
    engine, name = kept.store._session.engine, kept.store.name
    part = await engine.scan(name, limpet.keys.Span("", None), family="audit", limit=1000)
    return {entry.key: entry.stored for entry in part.entries if isinstance(entry.stored, bytes)}


async def replay(kept: SemanticStore, changes: dict[str, bytes | None]) -> None:
    """Put something in the trail, or remove it, as an attacker might who can write the database."""
    writes = [
        Delete(key, family="audit") if stored is None else Put(key, stored, family="audit")
        for key, stored in changes.items()
    ]
    await kept.store.batch().include(*writes).commit()


def kinds(report: Report) -> set[str]:
    return {problem.kind for problem in report.problems}


# What it removes --------------------------------------------------------------------


async def test_what_is_left_of_a_pruned_trail_is_sound(kept: SemanticStore) -> None:
    await write(kept, 70)
    await put(kept, "ended", 1)
    await kept.kv_delete(f"{START}ended", writer=WRITER)
    await kept.seal()
    await asyncio.sleep(0.02)
    (last,) = (await load_rows(kept))[-1:]
    await asyncio.sleep(0.02)
    await write(kept, 10)
    await kept.seal()
    await write(kept, 3)

    before = datetime.fromtimestamp(last["at_ms"] / 1000, UTC) + timedelta(milliseconds=1)
    tried = await kept.prune(before=before, dry_run=True)
    assert (await kept.verify()).pruned == 0
    pruned = await kept.prune(before=before)

    assert pruned == tried
    assert (pruned.rows, pruned.to_ms, pruned.unaudited) == (72, last["at_ms"], 0)
    report = await kept.verify()
    assert (report.problems, report.sealed, report.unsealed, report.keys) == ((), 10, 3, 6)
    assert (report.pruned, report.pruned_to_ms) == (72, last["at_ms"])
    assert [row["seq"] for row in await load_rows(kept)] == [*range(73, 83), None, None, None]
    # All goes on: writing, sealing, pruning again.
    await put(kept, "ended", 2)
    await kept.seal()
    assert (await kept.prune(before=ALL)).rows == 14
    assert (await kept.prune(before=ALL)).rows == 0
    await write(kept, 5)
    report = await kept.verify()
    assert (report.problems, report.pruned, report.sealed, report.unsealed) == ((), 86, 0, 5)
    assert (await kept.kv_get(f"{START}ended")) is not None


async def test_rows_are_pruned_by_age_and_only_when_they_are_sealed(
    timed: tuple[SemanticStore, limpet.ManualClock],
) -> None:
    kept, clock = timed
    for day in range(5):
        await write(kept, 2)
        if day < 3:
            await kept.seal()
        clock.advance(86_400)

    assert (await kept.prune(before=timedelta(days=4, hours=12))).rows == 2
    assert (await kept.prune(before=ALL)).rows == 4
    assert [row["seq"] for row in await load_rows(kept)] == [None] * 4
    assert (await kept.verify()).problems == ()
    with pytest.raises(InvalidValue, match="time zone"):
        await kept.prune(before=datetime(2026, 1, 1))
    with pytest.raises(InvalidField, match="not audited"):
        await SemanticStore(kept.store).prune(before=ALL)


async def test_what_expired_is_recorded_and_recovered_after_its_row_was_pruned(
    timed: tuple[SemanticStore, limpet.ManualClock],
) -> None:
    kept, clock = timed
    await put(kept, "brief", 1, ttlSeconds=60)
    await kept.seal()
    clock.advance(30)
    assert (await kept.prune(before=ALL)).rows == 1
    clock.advance(31)

    report = await kept.verify()
    assert (report.problems, report.pending) == ((), 1)
    assert (await kept.recover(f"{START}brief", writer="operator")).value == {"n": 1}
    assert [row["op"] for row in await load_rows(kept)] == ["expire", "recover"]
    assert (await kept.verify()).problems == ()


async def test_a_pruned_trail_goes_on_under_another_audit_key(
    timed: tuple[SemanticStore, limpet.ManualClock],
) -> None:
    kept, _ = timed
    old = SemanticStore(kept.store, audit=Audit(b"a" * 32, key_id="old"))
    await write(old, 9)
    await old.seal()
    await old.prune(before=ALL)
    later = SemanticStore(kept.store, audit=Audit(b"b" * 32, key_id="new", older={"old": b"a" * 32}))
    await write(later, 2)
    await later.seal()
    assert (await later.verify()).problems == ()
    await later.prune(before=ALL)

    assert (await later.verify()).problems == ()
    assert not (await verify(kept.store, Audit(b"b" * 32, key_id="new"))).is_sound


async def test_a_namespace_whose_rows_are_all_pruned_still_has_a_trail(
    timed: tuple[SemanticStore, limpet.ManualClock],
) -> None:
    kept, _ = timed
    assert not await has_trail(kept.store)
    await write(kept, 1)
    await kept.seal()
    await kept.prune(before=ALL)
    assert await has_trail(kept.store)


# Crashes and crowds -----------------------------------------------------------------


class Crash(Exception):
    """Stands for a process that is gone."""


async def test_whoever_comes_after_a_crash_finds_a_sound_trail_and_goes_on(kept: SemanticStore) -> None:
    await write(kept, 130)
    await kept.seal()

    def crash(rows: int) -> None:
        raise Crash

    with pytest.raises(Crash):
        await kept.prune(before=ALL, progress=crash)

    report = await kept.verify()
    assert (report.problems, report.pruned, report.sealed) == ((), 60, 70)
    counts: list[int] = []
    assert (await kept.prune(before=ALL, progress=counts.append)).rows == 70
    assert counts == [60]
    report = await kept.verify()
    assert (report.problems, report.pruned, report.sealed) == ((), 130, 0)


@pytest.mark.parametrize("lost", ["before", "after"])
async def test_a_step_that_is_cut_off_is_done_or_not_done(kept: SemanticStore, lost: str) -> None:
    """Every call on its way fails in turn, before it took place or behind it."""
    await write(kept, 3)
    await kept.seal()
    for _ in range(2):
        fail(kept.store, **{lost: 1})
        with contextlib.suppress(limpet.errors.LimpetError):
            await kept.prune(before=ALL)
        assert (await kept.verify()).problems == ()
    await kept.prune(before=ALL)

    report = await kept.verify()
    assert (report.problems, report.pruned, report.sealed) == ((), 3, 0)


async def test_of_those_who_prune_at_once_each_row_is_removed_by_one(kept: SemanticStore) -> None:
    await write(kept, 130)
    await kept.seal()

    *done, _, _ = await asyncio.gather(
        kept.prune(before=ALL), kept.prune(before=ALL), write(kept, 10, first=130), kept.seal()
    )
    await kept.seal()

    report = await kept.verify()
    assert report.problems == ()
    assert sum(one.rows for one in done) == report.pruned >= 130
    assert report.pruned + report.sealed == 140


# Tampering --------------------------------------------------------------------------


@pytest.fixture
async def cut() -> AsyncIterator[SemanticStore]:
    """A trail of 20 rows of which 12 are pruned, and some that are not sealed."""
    clock = limpet.ManualClock()
    async with limpet.open("memory:", clock=clock, sweep=False) as store:
        kept = SemanticStore(store, audit=audit())
        await write(kept, 12)
        await put(kept, "once", 1)
        await kept.seal()
        clock.advance(60)
        await write(kept, 7)
        await kept.seal()
        await kept.prune(before=timedelta(seconds=30))
        await write(kept, 2)
        report = await kept.verify()
        assert (report.problems, report.pruned, report.sealed, report.unsealed) == ((), 13, 7, 2)
        yield kept


@pytest.mark.parametrize("seq", [14, 17, 20])
async def test_a_row_that_is_removed_beyond_the_mark_is_found(cut: SemanticStore, seq: int) -> None:
    await replay(cut, {f"sealed/{seq:016}": None})
    assert "missing" in kinds(await cut.verify())


async def test_a_mark_that_is_removed_is_found(cut: SemanticStore) -> None:
    await replay(cut, {"mark": None})
    assert kinds(await cut.verify()) == {"altered", "missing", "rolled_back"}
    assert kinds(await SemanticStore(cut.store, audit=audit()).verify()) == {"altered", "missing"}


async def test_a_mark_of_an_empty_chain_that_is_removed_is_found(cut: SemanticStore) -> None:
    await cut.prune(before=ALL)
    pasts = {key: None for key in await places(cut) if key.startswith("past/")}
    await replay(cut, {"mark": None, **pasts})
    assert "missing" in kinds(await cut.verify())


@pytest.mark.parametrize("member", ["seq", "link", "at_ms", "keys", "mac"])
async def test_a_mark_that_is_altered_is_found(cut: SemanticStore, member: str) -> None:
    mark = json.loads((await places(cut))["mark"])
    mark[member] = mark[member] + 1 if isinstance(mark[member], int) else mark[member][:-1] + "-"
    await replay(cut, {"mark": json.dumps(mark, separators=(",", ":"), sort_keys=True).encode()})
    assert "altered" in kinds(await cut.verify())


async def test_a_mark_that_is_put_back_is_found(cut: SemanticStore) -> None:
    older = await places(cut)
    await cut.seal()
    await cut.prune(before=ALL)
    newer = await places(cut)
    put_back = {key: stored for key, stored in older.items() if key == "mark" or key.startswith("past/")}

    await replay(cut, {"mark": older["mark"]})
    assert not (await cut.verify()).is_sound
    await replay(cut, dict(put_back))
    assert "missing" in kinds(await cut.verify())
    await replay(cut, {key: newer[key] for key in put_back})
    assert (await cut.verify()).is_sound


async def test_one_key_cannot_be_put_back_to_what_it_was_before_its_rows_were_pruned(cut: SemanticStore) -> None:
    """Its head, its entry and what is kept of it agree, and no link is left that would contradict."""
    key = f"{START}once"
    older = await places(cut)
    entry = await cut.store.entry(key)
    assert entry is not None
    await put(cut, "once", 2)
    await cut.seal()
    await cut.prune(before=ALL)
    await replay(cut, {name: older[name] for name in (f"head/{key}", f"past/{key}")})
    await cut.store.delete(key)
    await cut.store.put(key, entry.value, meta=entry.meta)

    assert [(one.kind, one.place) for one in (await cut.verify()).problems] == [("altered", "mark")]


async def test_all_of_it_put_back_to_before_a_pruning_is_found_by_an_anchor(cut: SemanticStore) -> None:
    older, anchor = await places(cut), (await cut.verify()).anchor
    assert anchor.startswith("20/13@")
    await cut.prune(before=ALL)
    later = (await cut.verify(anchor=anchor)).anchor
    assert later.startswith("20/20@")
    assert (await cut.verify(anchor=later)).problems == ()
    now = await places(cut)
    await replay(cut, {**dict.fromkeys(set(now) - set(older), None), **older})

    # Who was there knows better, without an anchor.
    assert kinds(await cut.verify()) == {"rolled_back"}
    cut = SemanticStore(cut.store, audit=audit())
    assert (await cut.verify(anchor=anchor)).problems == ()
    cut = SemanticStore(cut.store, audit=audit())
    assert kinds(await cut.verify(anchor=later)) == {"rolled_back"}
    assert kinds(await cut.verify(anchor=f"13/13@{'x' * 9}")) == {"rolled_back"}
    for wrong in ("20/@x", "20/x@y", "/20@x"):
        with pytest.raises(InvalidValue):
            await cut.verify(anchor=wrong)


async def test_a_trail_that_is_not_sound_is_not_pruned(cut: SemanticStore) -> None:
    """Pruning a trail that was tampered with would remove the evidence."""
    before = await places(cut)
    altered = before[f"sealed/{15:016}"].replace(b"nightly-sync", b"nightly-sink")
    await replay(cut, {f"sealed/{15:016}": altered})
    with pytest.raises(Corrupt, match="nothing was pruned"):
        await cut.prune(before=ALL)
    assert set(await places(cut)) == set(before)
    await replay(cut, {f"sealed/{15:016}": before[f"sealed/{15:016}"]})
    with pytest.raises(Corrupt, match="anchor"):
        await cut.prune(before=ALL, anchor="15@1:abc")


async def test_changes_by_other_means_do_not_stop_pruning_and_are_counted(cut: SemanticStore) -> None:
    await cut.store.put(f"{START}once", {"n": 5})
    await put(cut, "once", 6)
    await cut.seal()
    assert kinds(await cut.verify()) == {"unaudited"}

    assert (await cut.prune(before=ALL)).unaudited == 1
    assert (await cut.verify()).problems == ()


@pytest.mark.slow
async def test_each_of_50_random_tamperings_after_a_pruning_is_found(tmp_path: Path) -> None:
    evidence, file = tmp_path / "evidence.db", tmp_path / "tampered.db"
    clock = limpet.ManualClock()
    async with limpet.open(f"sqlite:///{evidence}", clock=clock) as store:
        kept = SemanticStore(store, audit=audit())
        await write(kept, 20)
        await kept.seal()
        clock.advance(60)
        await write(kept, 12)
        await kept.kv_delete(f"{START}3", writer=WRITER)
        await kept.seal()
        await kept.prune(before=timedelta(seconds=30))
        await write(kept, 4)
    with contextlib.closing(sqlite3.connect(evidence)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    original = evidence.read_bytes()
    unseen: list[str] = []
    for seed in range(-1, 50):
        replace(file, original)
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            before = rows_in(database)
            done = "nothing" if seed < 0 else tamper(database, random.Random(1000 + seed))
            assert (rows_in(database) == before) == (seed < 0)
        async with limpet.open(f"sqlite:///{file}", sweep=False, clock=clock) as store:
            if (await verify(store, audit())).is_sound:
                unseen.append(done)

    assert unseen == ["nothing"]
