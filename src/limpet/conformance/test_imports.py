"""Imports: entries that come from another store as they were there."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
import pytest_asyncio

import limpet
from limpet import codec
from limpet.codec import Fields
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import PATIENCE_S, assert_counted
from limpet.conformance.test_primitives import Primitives, only
from limpet.model import ABSENT, Guard, Import, Put, Revision

CREATED_MS = 1_600_000_000_123
UPDATED_MS = 1_650_000_000_456
FAR_MS = 250_000_000_000_000


def imported(key: str, value: object = 1, **options: Any) -> Import:
    times: Any = {"version": 7, "created_ms": CREATED_MS, "updated_ms": UPDATED_MS, **options}
    return Import(key, codec.encode(value), **times)


@pytest_asyncio.fixture(loop_scope="module")
async def primitives(open_store: OpenStore) -> Primitives:
    """The primitives of an engine on an empty namespace without a sweeper."""
    return Primitives(await open_store(namespace=f"i-{uuid.uuid4().hex[:12]}", sweep=False))


@pytest.mark.parametrize("value", [{"n": [1, 1e22]}, "", b"\0raw\xff", Fields(a=1, b=b"\xff"), Fields()], ids=repr)
@pytest.mark.parametrize("expires_ms", [None, FAR_MS])
async def test_an_import_keeps_what_it_brings(primitives: Primitives, value: Any, expires_ms: int | None) -> None:
    """An imported entry has the value, version, times, expiry, meta and writer that it was given."""
    wanted = imported("a/é", value, expires_ms=expires_ms, meta_json=b'{"by":"me"}', writer="ann")

    returned = only(await primitives.must_commit(wanted))
    (entry,) = await primitives.read("a/é")

    assert entry == returned
    assert (entry.stored, entry.version, entry.meta, entry.writer) == (wanted.stored, 7, {"by": "me"}, "ann")
    assert (entry.created_ms, entry.updated_ms, entry.expires_ms) == (CREATED_MS, UPDATED_MS, expires_ms)
    assert (await primitives.scan()).entries == [entry]


@pytest.mark.parametrize("family", ["recoverable", "audit", "sequence"])
async def test_an_import_writes_to_other_families(primitives: Primitives, family: Any) -> None:
    """An imported entry has the value, version, times, expiry, meta and writer that it was given."""
    await primitives.must_commit(imported("live/a", 5, family=family))

    (entry,) = await primitives.read("live/a", family=family)
    assert entry is not None
    assert (entry.value, entry.version, entry.created_ms, entry.updated_ms) == (5, 7, CREATED_MS, UPDATED_MS)
    assert await primitives.count() == 0


async def test_an_import_has_a_revision_of_its_own(primitives: Primitives) -> None:
    """An imported entry has a new revision, which is its creation revision as well."""
    before = only(await primitives.must_commit(Put("a", b"1"))).revision

    first, second = (await primitives.must_commit(imported("b"), imported("c"))).entries

    assert first is not None
    assert second is not None
    assert before < first.revision < second.revision
    assert (first.created_revision, second.created_revision) == (first.revision, second.revision)


@pytest.mark.parametrize("ttl_ms", [None, 3_600_000])
async def test_an_import_begins_a_new_incarnation(primitives: Primitives, ttl_ms: int | None) -> None:
    """An import replaces an entry that is there, and begins a new incarnation of the key."""
    before = only(await primitives.must_commit(Put("a", codec.encode(Fields(old=1)), ttl_ms, b'{"old":1}')))

    entry = only(await primitives.must_commit(imported("a", "new")))

    assert (entry.value, entry.meta, entry.expires_ms, entry.version) == ("new", {}, None, 7)
    assert before.revision < entry.created_revision == entry.revision
    assert await primitives.read("a") == [entry]
    status = await primitives.status()
    assert status.keys == 1
    assert_counted(primitives.engine, status.size_bytes, entry.weight_bytes)


async def test_writes_go_on_from_an_import(primitives: Primitives) -> None:
    """After an import the next write has the next version, and keeps the creation time."""
    brought = only(await primitives.must_commit(imported("a")))
    entry = only(await primitives.must_commit(Put("a", b"2"), guards=(Guard("a", Revision(brought.revision)),)))

    assert (entry.version, entry.created_ms, entry.created_revision) == (8, CREATED_MS, brought.created_revision)
    assert entry.updated_ms > UPDATED_MS


async def test_writes_beside_an_import_go_on_from_it(primitives: Primitives) -> None:
    """After an import the next write has the next version, and keeps the creation time.

    Commits that are made at once may be planned together: one that follows an import of an entry with an end finds
    that entry alive.
    """
    first, second = await asyncio.gather(
        primitives.must_commit(imported("a", expires_ms=FAR_MS)), primitives.must_commit(Put("a", b"2"))
    )

    entries = sorted((only(first), only(second)), key=lambda entry: entry.revision)
    assert [entry.version for entry in entries] in ([7, 8], [1, 7])
    assert [change.op for change in await primitives.log()] == ["put", "put"]


async def test_an_import_that_has_expired_is_absent(store: limpet.Store, open_store: OpenStore, elapse: Elapse) -> None:
    """An imported entry that has expired is absent, and is ended by one expire change."""
    at = Primitives(store)
    now_ms = (await at.status()).now_ms
    await at.must_commit(imported("gone", expires_ms=now_ms - 5), imported("later", expires_ms=now_ms + 500))

    assert await at.read("gone") == [None]
    await elapse(0.6)
    assert await at.read("gone", "later") == [None, None]
    async with asyncio.timeout(PATIENCE_S):
        while (await at.status()).keys:
            await elapse(0.5)
    ops = sorted((change.key, change.op) for change in await at.log())
    assert ops == [("gone", "expire"), ("gone", "put"), ("later", "expire"), ("later", "put")]


async def test_an_import_is_guarded(primitives: Primitives) -> None:
    """Imports are written like puts: with guards, in batches, under request ids, as put events."""
    await primitives.must_commit(Put("b", b"1"))
    before = await primitives.image()

    refusal = await primitives.must_refuse(
        imported("a"), imported("b"), guards=(Guard("a", ABSENT), Guard("b", ABSENT))
    )

    assert refusal.key == "b"
    assert await primitives.image() == before


async def test_an_import_is_repeated_by_its_request_id(primitives: Primitives) -> None:
    """Imports are written like puts: with guards, in batches, under request ids, as put events."""
    receipt = {"request_id": "r1", "digest": b"d", "receipt_ms": 60_000}
    first = await primitives.must_commit(imported("a", expires_ms=FAR_MS), **receipt)
    await primitives.must_commit(Put("a", b"2"))

    again = await primitives.must_commit(imported("a", expires_ms=FAR_MS), **receipt)

    assert again.replayed
    assert again.entries == first.entries


async def test_an_import_is_seen_as_a_put(primitives: Primitives) -> None:
    """Imports are written like puts: with guards, in batches, under request ids, as put events."""
    entry = only(await primitives.must_commit(imported("a", {"n": 1}), request_id="r9"))

    (change,) = await primitives.log()
    assert (change.op, change.entry, change.cause) == ("put", entry, "r9")
    assert change.at_ms > UPDATED_MS
