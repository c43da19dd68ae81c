"""The audit trail: what it records, what it hides, and that no change of it goes unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import random
import re
import sqlite3
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.codec import encode_field
from limpet.conformance.support import count, fail
from limpet.errors import Corrupt
from limpet.model import FAMILIES
from limpet.model import Delete as Remove
from limpet.model import Put as Write
from limpet.semantic import seal as sealing
from limpet.semantic.audit import Keys
from limpet.semantic.rows import rows_of
from limpet.semantic.seal import seal
from limpet.semantic.store import Audit, Delete, Put, Semantics, SemanticStore, VersionConflict
from limpet.semantic.verify import verify
from tests.engines import ENGINES, unique, url_of
from tests.processes import PATIENCE_S
from tests.semantic.support import CHECKPOINT, KEY, SECRET, WRITER, audit, lock_of
from tests.semantic.trails import replace, rows_in, tamper

START = "tenant/acme/project/docs/"


@pytest.fixture(params=ENGINES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[limpet.Store]:
    async with limpet.open(url_of(request.param, tmp_path), namespace=unique("audited")) as store:
        yield store


@pytest.fixture
def kept(store: limpet.Store) -> SemanticStore:
    return SemanticStore(store, audit=audit())


async def put(kept: SemanticStore, value: dict[str, Any], key: str = KEY, **options: Any) -> Any:
    return await kept.kv_put(key, value, **{"writer": WRITER, "semantics": CHECKPOINT, **options})


async def load_rows(store: limpet.Store, prefix: str = "") -> list[dict[str, Any]]:
    return [row async for row in rows_of(store, prefix=prefix)]


def hash_of(namespace: str, key: str, value: Any, secret: bytes = SECRET) -> str:
    """The keyed hash as the document describes it, made by hand."""
    place = json.dumps([namespace, key], separators=(",", ":"))
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return "1:" + hmac.new(secret, f"value\0{place}\0{text}".encode(), hashlib.sha256).hexdigest()


# What it records ----------------------------------------------------------------


async def test_every_write_of_a_crowd_is_written_and_recorded(kept: SemanticStore) -> None:
    """Each write stands on the last row of its key, so that of a crowd one would get through at a time."""
    engine, callers = count(kept.store), 150

    written = await asyncio.gather(*(put(kept, {"n": number}) for number in range(callers)))

    assert sorted(envelope.version for envelope in written) == list(range(1, callers + 1))
    assert len(await load_rows(kept.store)) == callers
    assert engine.refused <= callers // 10


async def test_batches_of_the_same_keys_in_any_order_do_not_wait_for_each_other_in_vain(kept: SemanticStore) -> None:
    keys = [f"{START}{number}" for number in range(4)]

    async def write(number: int) -> None:
        order = random.Random(number).sample(keys, len(keys))
        items = [Put(key, {"n": number}, Semantics("checkpoint")) for key in order]
        await kept.kv_batch(items, writer=WRITER)

    await asyncio.wait_for(asyncio.gather(*map(write, range(30))), PATIENCE_S)

    assert len(await load_rows(kept.store)) == 30 * len(keys)


async def test_every_change_leaves_a_row(kept: SemanticStore) -> None:
    await put(kept, {"n": 1}, request_id="r-1", spec_ref="adr/7")
    await put(kept, {"n": 2}, request_id="r-2", writer="service")
    with pytest.raises(VersionConflict):
        await put(kept, {"n": 3}, expected_version=9)
    await put(kept, {"n": 2}, request_id="r-2", writer="service")
    await kept.kv_delete(KEY, writer="operator:cleanup", request_id="r-3")
    await kept.kv_delete(KEY, writer="operator:cleanup")

    first, second, third = await load_rows(kept.store)

    one, two = (hash_of(kept.store.name, KEY, {"n": number}) for number in (1, 2))
    assert {**first, "revision": 0, "at_ms": 0} == {
        "seq": None,
        "revision": 0,
        "at_ms": 0,
        "key": KEY,
        "n": 1,
        "op": "put",
        "writer": WRITER,
        "directive": "nightly-sync",
        "purpose": "checkpoint",
        "semantics": CHECKPOINT,
        "requestId": "r-1",
        "version": 1,
        "before": None,
        "after": one,
        "specRef": "adr/7",
    }
    assert (second["before"], second["after"], second["directive"], second["version"]) == (one, two, "service", 2)
    assert (third["op"], third["before"], third["after"], third["version"]) == ("delete", two, None, 2)
    assert (third["directive"], third["purpose"]) == ("cleanup", "checkpoint")
    entry = await kept.store.entry(KEY)
    assert entry is None


async def test_the_entry_itself_says_what_its_hash_is(kept: SemanticStore) -> None:
    await put(kept, {"n": 1})
    entry = await kept.store.entry(KEY)
    assert entry is not None
    assert entry.meta["hash"] == hash_of(kept.store.name, KEY, {"n": 1})


async def test_an_expiry_leaves_a_row_with_what_it_was_for(kept: SemanticStore) -> None:
    await put(kept, {"by": "w1"}, semantics=lock_of(0.1), expected_version=0)
    await asyncio.sleep(0.15)
    assert (await kept.verify()).pending == 1
    await kept.seal()
    await put(kept, {"by": "w2"}, semantics=lock_of(0.1), expected_version=0)
    await asyncio.sleep(0.15)
    # No sealer ran meanwhile: the next write records it.
    await put(kept, {"by": "w3"}, semantics=lock_of(60), expected_version=0)

    rows = await load_rows(kept.store)

    assert [row["op"] for row in rows] == ["put", "expire", "put", "expire", "put"]
    assert (rows[1]["semantics"], rows[1]["purpose"], rows[1]["writer"]) == (lock_of(0.1), "lock", WRITER)
    assert (rows[1]["before"], rows[1]["after"], rows[1]["requestId"]) == (rows[0]["after"], None, None)
    assert (await kept.verify()).problems == ()


async def test_a_copy_goes_when_its_key_was_written_for_good(kept: SemanticStore) -> None:
    engine, name = kept.store._session.engine, kept.store.name
    brief = SemanticStore(kept.store, audit=audit(grace_s=60))
    # Long enough to be written again before that, also on a slow machine.
    await put(brief, {"token": "t"}, semantics={**CHECKPOINT, "ttlSeconds": 2})
    assert await engine.read(name, [f"live/{KEY}"], family="recoverable") != [None]
    await put(brief, {"token": "u"})
    await asyncio.sleep(2.05)
    await brief.seal()

    assert await engine.read(name, [f"live/{KEY}"], family="recoverable") == [None]
    assert [row["op"] for row in await load_rows(kept.store)] == ["put", "put"]
    # A delete leaves no copy either.
    await put(brief, {"token": "v"}, semantics={**CHECKPOINT, "ttlSeconds": 60})
    await kept.kv_delete(KEY, writer=WRITER)
    assert await engine.read(name, [f"live/{KEY}", f"over/{KEY}"], family="recoverable") == [None, None]


async def test_a_copy_that_was_changed_is_not_recovered(kept: SemanticStore) -> None:
    await put(kept, {"n": 1}, semantics={**CHECKPOINT, "ttlSeconds": 0.1})
    await asyncio.sleep(0.15)
    await kept.seal()
    engine, name = kept.store._session.engine, kept.store.name
    (recoverable,) = await engine.read(name, [f"over/{KEY}"], family="recoverable")
    assert recoverable is not None
    forged = Write(recoverable.key, b'{"n":2}', 60_000, recoverable.meta_json, family="recoverable")
    await kept.store.batch().include(forged).commit()

    with pytest.raises(limpet.errors.NotFound):
        await kept.recover(KEY, writer="operator")


async def test_a_sealer_that_fails_goes_on_and_one_whose_store_is_closed_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = limpet.ManualClock()
    store = await limpet.open("memory:", clock=clock, sweep=False)
    async with SemanticStore(store, audit=audit()) as kept:
        await put(kept, {"n": 1})
        failing = fail(store, before=5)
        for _ in range(100):
            clock.advance(1)
            await asyncio.sleep(0)
            if (await load_rows(store))[0]["seq"] is not None:
                break
        assert failing.before == 0
        assert any("failed and is tried again" in record.getMessage() for record in caplog.records)
        await store.close()
        clock.advance(5)
        await asyncio.sleep(0)


async def test_a_batch_leaves_a_row_for_each_key(kept: SemanticStore) -> None:
    await put(kept, {"n": 0}, f"{START}gone")
    items = [Put(f"{START}{n}", {"n": n}, Semantics("cursor"), expected_version=0) for n in range(30)]
    await kept.kv_batch([*items, Delete(f"{START}gone", 1)], writer=WRITER, request_id="b-1")

    rows = await load_rows(kept.store, prefix=START)

    assert [row["op"] for row in rows] == ["put", *["put"] * 30, "delete"]
    assert {row["requestId"] for row in rows[1:]} == {"b-1"}


async def test_the_trail_is_no_part_of_the_data(kept: SemanticStore) -> None:
    await put(kept, {"n": 1}, semantics={**CHECKPOINT, "ttlSeconds": 60})
    await kept.seal()

    assert (await kept.store.keys()).keys == [KEY]
    assert (await kept.store.status()).keys == 1
    assert [event.key async for event in kept.store.history(KEY)] == [KEY]


# Sealing ----------------------------------------------------------------------


async def test_rows_are_sealed_in_the_order_of_their_revisions(kept: SemanticStore) -> None:
    numbers = list(range(150))
    random.Random(7).shuffle(numbers)
    for number in numbers:
        await put(kept, {"n": number}, f"{START}{number % 20}")
    before = await load_rows(kept.store)
    sealed = await kept.seal()
    after = await load_rows(kept.store)

    assert sealed == 150
    assert [row.pop("seq") for row in after] == list(range(1, 151))
    assert [{**row, "seq": None} for row in after] == before
    report = await kept.verify()
    assert (report.sealed, report.unsealed, report.keys, report.problems) == (150, 0, 20, ())
    assert report.anchor.startswith("150@")


async def test_a_row_that_is_sealed_while_the_trail_is_shown_is_shown_once(kept: SemanticStore) -> None:
    """Sealed rows were read first and new ones after them: one that was sealed in between was in neither."""
    await put(kept, {"n": 1})
    await kept.seal()
    await put(kept, {"n": 2})
    rows = rows_of(kept.store)
    first = await anext(rows)
    await kept.seal()

    assert [first["n"], *[row["n"] async for row in rows]] == [1, 2]
    assert [row["n"] for row in await load_rows(kept.store)] == [1, 2]


async def test_sealers_at_once_seal_each_row_once(kept: SemanticStore) -> None:
    for number in range(40):
        await put(kept, {"n": number}, f"{START}{number % 7}")

    async def write() -> None:
        for number in range(30):
            await put(kept, {"n": -number}, f"{START}{number % 7}")

    await asyncio.gather(write(), *(seal(kept.store, audit()) for _ in range(4)))
    await kept.seal()

    report = await kept.verify()
    assert (report.sealed, report.unsealed, report.problems) == (70, 0, ())


@pytest.mark.slow
async def test_a_row_is_sealed_by_itself_within_five_seconds(store: limpet.Store) -> None:
    async with SemanticStore(store, audit=audit()) as kept:
        began = asyncio.get_running_loop().time()
        await put(kept, {"n": 1})
        async with asyncio.timeout(PATIENCE_S):
            while (await load_rows(store))[0]["seq"] is None:  # noqa: ASYNC110 - a sealer notifies no one
                await asyncio.sleep(0.05)
        # Nothing waits but the sealer's own turn, which is two seconds.
        assert asyncio.get_running_loop().time() - began < 5
        async with asyncio.timeout(PATIENCE_S):
            while await store.locks():  # noqa: ASYNC110 - nor is there an event for its end
                await asyncio.sleep(0.05)
    before = (await store.status()).revision
    async with SemanticStore(store, audit=audit()):
        await asyncio.sleep(0.05)
    assert (await store.status()).revision == before


async def test_writers_go_on_while_the_trail_is_verified(kept: SemanticStore) -> None:
    stop = asyncio.Event()

    async def write(name: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            await put(kept, {"n": number}, f"{START}{name}/{number % 5}")
            if number % 7 == 0:
                await kept.kv_delete(f"{START}{name}/{number % 5}", writer=WRITER)
            await asyncio.sleep(0)

    async def look() -> None:
        for _ in range(6):
            assert (await kept.verify()).problems == ()
            await kept.seal()
            await asyncio.sleep(0.01)
        stop.set()

    await asyncio.gather(look(), write("a"), write("b"))
    assert (await kept.verify()).problems == ()


async def test_a_key_of_another_name_goes_on_where_the_old_one_ended(store: limpet.Store) -> None:
    await put(SemanticStore(store, audit=Audit(b"a" * 32, key_id="old")), {"n": 1})
    later = SemanticStore(store, audit=Audit(b"b" * 32, key_id="new", older={"old": b"a" * 32}))
    await put(later, {"n": 2})
    await later.seal()

    rows = await load_rows(store)
    assert [row["after"][:4] for row in rows] == ["old:", "new:"]
    assert rows[1]["before"] == rows[0]["after"]
    assert (await later.verify()).problems == ()
    # Without the old key its signatures cannot be checked.
    assert not (await verify(store, Audit(b"b" * 32, key_id="new"))).is_sound


# Secrets ----------------------------------------------------------------------


async def test_no_row_holds_a_secret_or_a_plain_hash_of_one(kept: SemanticStore) -> None:
    dice = random.Random(11)
    secrets = [f"{dice.getrandbits(160):040x}" for _ in range(1000)]
    for first in range(0, 1000, 25):
        items = [
            Put(f"{START}{number}", {"token": secrets[number]}, Semantics("checkpoint"), expected_version=0)
            for number in range(first, first + 25)
        ]
        await kept.kv_batch(items, writer=WRITER)
        if first == 500:
            await kept.seal()
    engine, name = kept.store._session.engine, kept.store.name
    text = ""
    for family in FAMILIES:
        if family in ("data", "receipt"):
            continue
        span: limpet.keys.Span | None = limpet.keys.Span("", None)
        while span is not None:
            found = await engine.scan(name, span, family=family)
            text += "".join(f"{entry.key}{entry.stored!r}{entry.meta_json!r}" for entry in found.entries)
            span = None if found.cursor is None else limpet.keys.Span(found.cursor + "\0", None)

    assert text.count('"after"') >= 1000
    digests = {digits[:32] for digits in re.findall("[0-9a-f]{32,}", text)}
    for secret in secrets:
        assert secret not in text
        value = {"token": secret}
        for plain in (secret, json.dumps(value), json.dumps(value, separators=(",", ":"))):
            for kind in ("sha256", "sha1", "md5", "blake2b", "sha512"):
                assert hashlib.new(kind, plain.encode()).hexdigest()[:32] not in digests
    report = await kept.verify()
    assert (report.sealed + report.unsealed, report.problems) == (1000, ())


async def test_equal_values_of_two_keys_have_different_hashes(kept: SemanticStore) -> None:
    await put(kept, {"on": True}, f"{START}a")
    await put(kept, {"on": True}, f"{START}b")
    first, second = await load_rows(kept.store)
    assert first["after"] != second["after"]


# Tampering --------------------------------------------------------------------


async def test_what_was_changed_by_other_means_is_found(kept: SemanticStore) -> None:
    store = kept.store
    for name in "abcd":
        await put(kept, {"n": 1}, f"{START}{name}")
    await store.put(f"{START}a", {"n": 2}, meta=limpet.KEEP)
    await store.delete(f"{START}b")
    await store.put(f"{START}new", {"n": 1})
    await store.put(f"{START}c", {"n": 1}, meta={"lastWriter": "another:writer"})

    found = {problem.place for problem in (await kept.verify()).problems if problem.kind == "unaudited"}
    assert found == {f"{START}a", f"{START}b", f"{START}c", f"{START}new"}
    # The next write of the key records what it really found.
    await put(kept, {"n": 3}, f"{START}a")
    row = (await load_rows(store, prefix=f"{START}a"))[-1]
    assert row["before"] == hash_of(store.name, f"{START}a", {"n": 2})
    places = [problem.place for problem in (await kept.verify()).problems]
    assert f"new/{START}a/0000000002" in places


async def test_an_older_state_of_all_of_it_is_found_by_an_anchor(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    async with limpet.open(f"sqlite:///{file}") as store:
        kept = SemanticStore(store, audit=audit())
        await put(kept, {"n": 1})
        await kept.seal()
    older = file.read_bytes()
    async with limpet.open(f"sqlite:///{file}") as store:
        kept = SemanticStore(store, audit=audit())
        await put(kept, {"n": 2})
        await kept.seal()
        anchor = (await kept.verify()).anchor
        assert (await kept.verify(anchor=anchor)).problems == ()
    replace(file, older)
    async with limpet.open(f"sqlite:///{file}") as store:
        kept = SemanticStore(store, audit=audit())
        assert (await kept.verify()).problems == ()
        assert [problem.kind for problem in (await kept.verify(anchor=anchor)).problems] == ["rolled_back"]
        await put(kept, {"n": 3})
        await kept.seal()
        assert "rolled_back" in {problem.kind for problem in (await kept.verify(anchor=anchor)).problems}
        assert (await kept.verify(anchor="0@")).is_sound
        for wrong in ("", "x@y", "12"):
            with pytest.raises(limpet.errors.InvalidValue):
                await kept.verify(anchor=wrong)


async def test_a_row_taken_out_with_the_help_of_an_older_copy_is_found(
    store: limpet.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Signed parts of an older state fit each other: only a reader of the newer one can detect the missing row."""
    kept = SemanticStore(store, audit=audit())
    await put(kept, {"n": 1}, f"{START}first")
    await kept.seal()
    copies = [entry for entry in await audit_entries(store, "chain") if entry is not None]
    await put(kept, {"n": 2}, f"{START}victim", writer="villain:theft")
    await put(kept, {"n": 3}, f"{START}third")
    await put(kept, {"n": 4}, f"{START}fourth")
    await kept.seal()
    anchor = (await kept.verify()).anchor
    assert anchor.startswith("4@")

    # The attacker has the database, the older end of the chain, and no key.
    links = [one for one in await audit_entries(store, *(f"sealed/{seq:016}" for seq in (2, 3, 4))) if one is not None]
    attack = store.batch().delete(f"{START}victim").include(Remove(f"head/{START}victim", family="audit"))
    for one in links:
        attack.include(Remove(one.key, family="audit"))
    for one in links[1:]:
        row = one.value["row"]
        attack.include(Write(f"new/{row['key']}/{row['n']:010}", encode_field(row), family="audit"))
    for one in copies:
        assert one.stored is not None
        attack.include(Write(one.key, one.stored, family="audit"))
    await attack.commit()

    # One that knows of nothing seals what is there, and finds it sound.
    restarted = SemanticStore(store, audit=audit())
    if restarted.store.traits.engine == "sqlite":
        # Also if the chain has become longer than it was.
        await put(restarted, {"n": 5}, f"{START}fifth")
        await put(restarted, {"n": 6}, f"{START}sixth")
    await restarted.seal()
    assert (await restarted.verify()).is_sound
    assert "rolled_back" in {problem.kind for problem in (await restarted.verify(anchor=anchor)).problems}

    # One that was there refuses to go on and logs it, and so does one that was given the anchor.
    for witness in (kept, SemanticStore(store, audit=audit(), anchor=anchor)):
        caplog.clear()
        await put(restarted, {"n": 7}, f"{START}next")
        with pytest.raises(Corrupt, match=r"went back.*4@"):
            await witness.seal()
        assert [record.event for record in caplog.records if record.levelname == "ERROR"] == ["auditRolledBack"]  # type: ignore[attr-defined]
        assert "rolled_back" in {problem.kind for problem in (await witness.verify()).problems}


async def test_the_end_of_the_chain_is_logged(store: limpet.Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="limpet.semantic")
    kept = SemanticStore(store, audit=audit())
    await put(kept, {"n": 1})
    await kept.seal()

    logged = [record.anchor for record in caplog.records if getattr(record, "event", "") == "auditAnchor"]  # type: ignore[attr-defined]

    assert logged == [(await kept.verify()).anchor]


async def test_a_sealer_goes_on_over_what_others_sealed_and_pruned(store: limpet.Store) -> None:
    kept, other = SemanticStore(store, audit=audit()), SemanticStore(store, audit=audit())
    for number in range(6):
        await put(kept, {"n": number})
        await (kept if number % 3 == 0 else other).seal()
        if number % 2:
            await other.prune(before=timedelta(days=-1))

    assert await kept.seal() == 0
    assert (await kept.verify()).is_sound


async def audit_entries(store: limpet.Store, *keys: str) -> list[limpet.Entry | None]:
    return await store._session.engine.read(store.name, keys, family="audit")


def content_of(file: Path) -> bytes:
    return file.read_bytes()


@pytest.fixture
async def evidence(tmp_path: Path) -> Path:
    """A trail with all that there can be: sealed, not sealed, deleted, expired, recovered."""
    file = tmp_path / "evidence.db"
    clock = limpet.ManualClock()
    async with limpet.open(f"sqlite:///{file}", clock=clock) as store:
        kept = SemanticStore(store, audit=audit())
        for number in range(40):
            await put(kept, {"n": number}, f"{START}{number % 9}")
        await put(kept, {"by": "w1"}, f"{START}lock", semantics=lock_of(5), expected_version=0)
        await kept.kv_delete(f"{START}3", writer=WRITER)
        clock.advance(6)
        await kept.seal()
        await kept.recover(f"{START}lock", writer="operator")
        for number in range(20):
            await put(kept, {"n": -number}, f"{START}{number % 6}")
        await kept.kv_delete(f"{START}5", writer=WRITER)
        report = await kept.verify()
        assert (report.sealed, report.unsealed, report.problems) == (43, 22, ())
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return file


@pytest.mark.slow
async def test_each_of_200_random_edits_removals_and_reorderings_is_found(evidence: Path, tmp_path: Path) -> None:
    file, original = tmp_path / "tampered.db", content_of(evidence)
    clock = limpet.ManualClock(1_700_000_010)
    unseen: list[str] = []
    for seed in range(-1, 200):
        replace(file, original)
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            before = rows_in(database)
            # The first time nothing is done, and nothing is found.
            done = "nothing" if seed < 0 else tamper(database, random.Random(seed))
            assert (rows_in(database) == before) == (seed < 0)
        async with limpet.open(f"sqlite:///{file}", sweep=False, clock=clock) as store:
            if (await verify(store, audit())).is_sound:
                unseen.append(done)

    assert unseen == ["nothing"]


async def test_rows_that_are_removed_before_they_are_sealed_are_found_by_count(kept: SemanticStore) -> None:
    await put(kept, {"n": 1})
    await kept.seal()
    for number in range(2, 6):
        await put(kept, {"n": number})
    engine, name = kept.store._session.engine, kept.store.name
    await kept.store.batch().include(limpet.model.Delete(f"new/{KEY}/0000000005", family="audit")).commit()

    report = await kept.verify()

    assert [(problem.kind, problem.place) for problem in report.problems] == [("missing", f"head/{KEY}")]
    assert "5 rows by count, and 4 are there" in report.problems[0].text
    assert (report.sealed, report.unsealed) == (1, 3)
    assert report.to_dict()["sound"] is False
    assert await engine.read(name, [f"head/{KEY}"], family="audit") != [None]


async def test_what_does_not_belong_to_the_trail_is_found(kept: SemanticStore) -> None:
    await put(kept, {"n": 1})
    await kept.store.batch().include(Write("other", b"1", family="audit")).commit()
    assert [problem.kind for problem in (await kept.verify()).problems] == ["unknown"]


async def test_a_head_that_was_spoilt_is_raised_to_writers(kept: SemanticStore) -> None:
    await put(kept, {"n": 1})
    await kept.store.batch().include(Write(f"head/{KEY}", b"{}", family="audit")).commit()
    with pytest.raises(Corrupt, match="verify"):
        await put(kept, {"n": 2})
    assert not (await kept.verify()).is_sound


def test_a_hash_names_its_key_and_its_purpose() -> None:
    keys = Keys(b"k" * 32, "one", {})
    assert keys.digest("row", b"x") != keys.digest("link", b"x")
    assert keys.matches("row", b"x", keys.digest("row", b"x"))
    for wrong in (None, "", 5, "two:abc", keys.digest("link", b"x"), "é"):
        assert not keys.matches("row", b"x", wrong)
    assert sealing.SEAL_S * 2 < 5
