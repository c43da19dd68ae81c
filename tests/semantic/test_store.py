"""Semantic entries on every engine, with a trail and without."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

import limpet
from limpet.errors import Conflict, InvalidValue, LockLost, NotFound, TypeMismatch
from limpet.protocol.codes import code_of
from limpet.semantic.store import (
    Audit,
    Delete,
    Envelope,
    InvalidField,
    InvalidKeyField,
    Observation,
    Put,
    Semantics,
    SemanticStore,
    VersionConflict,
    request_id_of,
)
from tests.engines import ENGINES, unique, url_of
from tests.processes import PATIENCE_S
from tests.semantic.support import CHECKPOINT, KEY, WRITER, audit, lock_of

OTHER = "tenant/acme/project/docs/onedrive/cursor"
SHORT_S = 0.1


@pytest.fixture(params=ENGINES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[limpet.Store]:
    async with limpet.open(url_of(request.param, tmp_path), namespace=unique("semantic")) as store:
        yield store


@pytest.fixture(params=["audited", "plain"])
async def kept(request: pytest.FixtureRequest, store: limpet.Store) -> AsyncIterator[SemanticStore]:
    """Semantic entries. Whatever a test did with them, the trail is sound."""
    semantic = SemanticStore(store, audit=audit() if request.param == "audited" else None)
    yield semantic
    if request.param == "audited":
        assert (await semantic.verify()).problems == ()


async def put(kept: SemanticStore, value: dict[str, Any], key: str = KEY, **options: Any) -> Envelope:
    return await kept.kv_put(key, value, **{"writer": WRITER, "semantics": CHECKPOINT, **options})


async def gone(kept: SemanticStore, key: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await kept.kv_get(key) is not None:  # noqa: ASYNC110 - no event for a moment that passes
            await asyncio.sleep(0.01)


# The envelope -----------------------------------------------------------------


async def test_the_envelope_is_as_the_document_spells_it(kept: SemanticStore) -> None:
    before = datetime.now(UTC)
    written = await put(kept, {"deltaToken": "abc", "snapshotId": 7}, request_id="r-1", spec_ref="adr/7")
    found = await kept.kv_get(KEY)

    assert found is not None
    document = found.to_dict()
    assert document == written.to_dict()
    moment = datetime.fromisoformat(document.pop("updatedAt"))
    assert abs(moment - before) < timedelta(minutes=5)
    assert moment.tzinfo is not None
    assert document == {
        "key": KEY,
        "value": {"deltaToken": "abc", "snapshotId": 7},
        "version": 1,
        "revision": written.revision,
        "lastWriter": WRITER,
        "semantics": CHECKPOINT,
        "requestId": "r-1",
        "specRef": "adr/7",
    }
    assert msgspec.json.decode(msgspec.json.encode(found.to_dict())) == found.to_dict()
    assert "value" not in found.to_dict(with_value=False)
    assert "abc" not in repr(found)


async def test_versions_count_and_revisions_go_on_where_versions_begin_again(kept: SemanticStore) -> None:
    first = await put(kept, {"n": 1})
    second = await put(kept, {"n": 2})
    assert await kept.kv_delete(KEY, writer=WRITER) is True
    assert await kept.kv_delete(KEY, writer=WRITER) is False
    third = await put(kept, {"n": 3})

    assert [one.version for one in (first, second, third)] == [1, 2, 1]
    assert first.revision < second.revision < third.revision
    assert await kept.kv_get(OTHER) is None


async def test_what_breaks_the_shape_is_refused_by_its_member(kept: SemanticStore) -> None:
    async def field_of(**options: Any) -> str:
        with pytest.raises(InvalidField) as refused:
            await put(kept, options.pop("value", {"n": 1}), **options)
        assert refused.value.to_dict()["field"] == refused.value.field
        assert code_of(refused.value).status == 400
        return refused.value.field

    assert await field_of(value=[1]) == "value"
    assert await field_of(value={"a": float("nan")}) == "value"
    assert await field_of(writer="") == "lastWriter"
    assert await field_of(writer="a b") == "lastWriter"
    assert await field_of(semantics={"producer": "x"}) == "semantics.purpose"
    assert await field_of(semantics={"purpose": "fun"}) == "semantics.purpose"
    assert await field_of(semantics={**CHECKPOINT, "consumerHints": "x"}) == "semantics.consumerHints"
    assert await field_of(semantics={**CHECKPOINT, "consumerHints": ["a", 3]}) == "semantics.consumerHints[1]"
    assert await field_of(semantics={**CHECKPOINT, "ttl": 3}) == "semantics.ttl"
    assert await field_of(semantics={**CHECKPOINT, "ttlSeconds": 0}) == "semantics.ttlSeconds"
    assert await field_of(semantics=Semantics("checkpoint", ttl_seconds=-1)) == "semantics.ttlSeconds"
    assert await field_of(semantics={"purpose": "lock"}, expected_version=0) == "semantics.ttlSeconds"
    assert await field_of(expected_version=-1) == "expectedVersion"
    assert await field_of(expected_version=True) == "expectedVersion"
    assert await field_of(request_id="") == "requestId"
    assert await field_of(spec_ref="") == "specRef"
    with pytest.raises(InvalidKeyField):
        await put(kept, {"n": 1}, key="docs/onedrive")
    assert (await kept.store.keys()).keys == []


async def test_semantics_may_be_a_struct_or_a_document(kept: SemanticStore) -> None:
    semantics = Semantics("feature_flag", producer="console", consumer_hints=("web",))
    await put(kept, {"on": True}, semantics=semantics)
    await put(kept, {"on": True}, OTHER, semantics=semantics.to_dict())

    first, second = await kept.kv_get(KEY), await kept.kv_get(OTHER)
    assert first is not None
    assert second is not None
    assert first.semantics == second.semantics == semantics


async def test_what_was_put_by_other_means_is_refused(store: limpet.Store) -> None:
    kept = SemanticStore(store)
    await store.put(KEY, {"n": 1})
    with pytest.raises(TypeMismatch, match="an envelope"):
        await kept.kv_get(KEY)
    await put(kept, {"n": 2})
    await store.put(KEY, [1], meta=limpet.KEEP)
    with pytest.raises(TypeMismatch, match="an envelope"):
        await kept.kv_get(KEY)


# Expected versions -----------------------------------------------------------------


async def test_a_conflict_has_the_version_and_the_value_found(kept: SemanticStore) -> None:
    await put(kept, {"n": 1}, expected_version=0)
    await put(kept, {"n": 2}, expected_version=1)

    with pytest.raises(VersionConflict) as refused:
        await put(kept, {"n": 3}, expected_version=1, request_id="r-9")

    conflict = refused.value
    assert (conflict.code, conflict.version, conflict.value) == ("version_conflict", 2, {"n": 2})
    document = conflict.to_dict()
    assert document.pop("message") == str(conflict)
    current = await kept.kv_get(KEY)
    assert current is not None
    assert document == {
        "code": "version_conflict",
        "key": KEY,
        "reason": "guard",
        "expectedVersion": 1,
        "version": 2,
        "revision": current.revision,
        "requestId": "r-9",
        "value": {"n": 2},
    }
    assert "value" not in conflict.to_dict(with_value=False)
    assert isinstance(conflict, Conflict)
    assert code_of(conflict).status == 409
    again = pickle.loads(pickle.dumps(conflict))  # noqa: S301 - our own
    assert (again.to_dict(), str(again)) == (conflict.to_dict(), str(conflict))


async def test_zero_expects_no_such_key_and_a_missing_key_has_no_version(kept: SemanticStore) -> None:
    with pytest.raises(VersionConflict) as missing:
        await put(kept, {"n": 1}, expected_version=1)
    assert (missing.value.version, missing.value.value) == (None, None)
    await put(kept, {"n": 1}, expected_version=0)
    with pytest.raises(VersionConflict) as there:
        await put(kept, {"n": 1}, expected_version=0)
    assert there.value.version == 1
    with pytest.raises(VersionConflict):
        await kept.kv_delete(KEY, writer=WRITER, expected_version=2)
    assert await kept.kv_delete(KEY, writer=WRITER, expected_version=1) is True


async def test_of_all_who_expect_the_same_version_one_wins(kept: SemanticStore) -> None:
    await put(kept, {"by": 0})

    async def one(number: int) -> bool:
        try:
            await put(kept, {"by": number}, expected_version=1)
        except VersionConflict:
            return False
        return True

    assert sum(await asyncio.gather(*(one(number) for number in range(8)))) == 1
    found = await kept.kv_get(KEY)
    assert found is not None
    assert found.version == 2


async def test_whoever_expects_nothing_always_gets_through(kept: SemanticStore) -> None:
    await asyncio.gather(*(put(kept, {"by": number}) for number in range(8)))

    found = await kept.kv_get(KEY)
    assert found is not None
    assert found.version == 8


# Request ids ----------------------------------------------------------------------


async def test_a_repeated_request_is_answered_with_its_first_result(kept: SemanticStore) -> None:
    first = await put(kept, {"n": 1}, request_id="r-1", expected_version=0)
    await put(kept, {"n": 2})
    again = await put(kept, {"n": 1}, request_id="r-1", expected_version=0)

    assert again.replayed
    assert not first.replayed
    assert again.to_dict() == first.to_dict()
    found = await kept.kv_get(KEY)
    assert found is not None
    assert found.version == 2
    assert await kept.kv_delete(KEY, writer=WRITER, request_id="r-2") is True
    assert await kept.kv_delete(KEY, writer=WRITER, request_id="r-2") is True
    assert await kept.kv_get(KEY) is None


async def test_a_request_id_with_another_request_is_stale(kept: SemanticStore) -> None:
    await put(kept, {"n": 1}, request_id="r-1")
    for changed in (
        {"value": {"n": 2}},
        {"writer": "other:one"},
        {"expected_version": 1},
        {"semantics": {**CHECKPOINT, "producer": "x"}},
        {"spec_ref": "adr/1"},
        {"key": OTHER},
    ):
        with pytest.raises(VersionConflict) as refused:
            await put(kept, changed.pop("value", {"n": 1}), **{"request_id": "r-1", **changed})  # type: ignore[arg-type]
        assert refused.value.reason == "stale_request"
        assert refused.value.code == "version_conflict"
    with pytest.raises(VersionConflict) as stale:
        await put(kept, {"n": 2}, request_id="r-1")
    assert (stale.value.version, stale.value.value) == (1, {"n": 1})
    with pytest.raises(VersionConflict):
        await kept.kv_delete(KEY, writer=WRITER, request_id="r-1")


async def test_a_refused_request_may_be_sent_again(kept: SemanticStore) -> None:
    await put(kept, {"n": 1})
    with pytest.raises(VersionConflict):
        await put(kept, {"n": 2}, expected_version=4, request_id="r-1")

    assert (await put(kept, {"n": 2}, expected_version=1, request_id="r-1")).version == 2


async def test_the_same_request_twice_at_once_is_done_once(kept: SemanticStore) -> None:
    answers = await asyncio.gather(*(put(kept, {"n": 1}, request_id="r-1") for _ in range(5)))

    assert {answer.version for answer in answers} == {1}
    assert sum(answer.replayed for answer in answers) == 4
    assert [await kept.kv_delete(KEY, writer=WRITER, request_id="r-2") for _ in range(2)] == [True, True]


def test_a_request_id_is_made_of_the_moment_and_the_workflow() -> None:
    at = datetime(2026, 3, 1, 2, 30, tzinfo=UTC)
    assert request_id_of("sync-42", at) == "2026-03-01T02:30:00.000Z/sync-42"
    assert request_id_of("sync-42", at.astimezone(timezone(timedelta(hours=5)))) == request_id_of("sync-42", at)
    assert request_id_of("sync-42", at, "page", 3) == "2026-03-01T02:30:00.000Z/sync-42/page/3"
    with pytest.raises(InvalidField):
        request_id_of("sync-42", datetime(2026, 3, 1))


# Listing ----------------------------------------------------------------------


async def test_a_list_goes_by_prefix_purpose_and_page(kept: SemanticStore) -> None:
    for number in range(5):
        await put(kept, {"n": number}, f"tenant/acme/project/docs/item/{number}")
    await put(kept, {"on": True}, "tenant/acme/project/docs/flag", semantics={"purpose": "feature_flag"})
    await put(kept, {"n": 0}, "tenant/acme-2/project/docs/item/0")
    await put(kept, {"n": 0}, "tenant/acme/project/docs2/item/0")

    whole = await kept.kv_list("tenant/acme/project/docs/")
    first = await kept.kv_list("tenant/acme/project/docs/", purpose="checkpoint", limit=3)
    rest = await kept.kv_list("tenant/acme/project/docs/", purpose="checkpoint", limit=3, after=first.cursor)

    assert [one.key.removeprefix("tenant/acme/project/docs/") for one in whole.envelopes] == [
        "flag",
        *(f"item/{number}" for number in range(5)),
    ]
    assert whole.cursor is None
    assert [one.value for one in first.envelopes + rest.envelopes] == [{"n": number} for number in range(5)]
    assert rest.cursor is None
    assert len((await kept.kv_list("tenant/acme/")).envelopes) == 7
    with pytest.raises(InvalidKeyField):
        await kept.kv_list("tenant/ac")
    with pytest.raises(InvalidField):
        await kept.kv_list("tenant/acme/", limit=0)


async def test_long_identifiers_have_short_names_that_lead_back(kept: SemanticStore) -> None:
    long = "https://example.org/drives/" + "X" * 200
    key = await kept.key("acme", "docs", "onedrive", long, "delta")
    await put(kept, {"n": 1}, key)

    assert await kept.key("acme", "docs", "onedrive", long, "delta") == key
    components = key.split("/")
    assert len(key) <= 128
    assert [await kept.identifier(one) for one in components[4:]] == ["onedrive", long, "delta"]
    assert [one.key for one in (await kept.kv_list("tenant/acme/")).envelopes] == [key]


# Several keys ---------------------------------------------------------------------


async def test_a_batch_happens_whole_or_not_at_all(kept: SemanticStore) -> None:
    await put(kept, {"n": 1})
    items: list[Any] = [
        Put(KEY, {"n": 2}, Semantics("checkpoint"), expected_version=1),
        {"op": "put", "key": OTHER, "value": {"at": 1}, "semantics": CHECKPOINT, "expectedVersion": 0},
    ]
    first = await kept.kv_batch(items, writer=WRITER, request_id="b-1")
    again = await kept.kv_batch(items, writer=WRITER, request_id="b-1")

    assert [one and (one.version, one.value) for one in first] == [(2, {"n": 2}), (1, {"at": 1})]
    assert [one and one.to_dict() for one in again] == [one and one.to_dict() for one in first]
    with pytest.raises(VersionConflict) as refused:
        await kept.kv_batch([Delete(KEY, 2), Delete(OTHER, 7)], writer=WRITER)
    assert (refused.value.key, refused.value.version) == (OTHER, 1)
    assert await kept.kv_get(KEY) is not None
    assert await kept.kv_batch([Delete(KEY, 2), Delete(OTHER, 1)], writer=WRITER) == [None, None]
    assert (await kept.kv_list("tenant/acme/")).envelopes == []


async def test_a_batch_says_which_item_is_wrong(kept: SemanticStore) -> None:
    good = {"op": "put", "key": KEY, "value": {}, "semantics": CHECKPOINT}
    for items, field in (
        ([], "items"),
        ([good, {"op": "put", "key": OTHER, "semantics": CHECKPOINT}], "items[1].value"),
        ([good, {**good, "value": 5}], "items[1].value"),
        ([good, {"op": "move", "key": OTHER}], "items[1].op"),
    ):
        with pytest.raises(InvalidField) as refused:
            await kept.kv_batch(items, writer=WRITER)  # type: ignore[arg-type]
        assert refused.value.field == field
    with pytest.raises(limpet.errors.InvalidKey, match="at most once"):
        await kept.kv_batch([good, good], writer=WRITER)
    assert await kept.kv_get(KEY) is None


# Locks ------------------------------------------------------------------------


async def test_a_lock_is_acquired_renewed_and_released_by_its_version(kept: SemanticStore) -> None:
    key = "tenant/acme/project/docs/locks/nightly"
    held = await put(kept, {"by": "w1"}, key, semantics=lock_of(60), expected_version=0)
    with pytest.raises(VersionConflict) as taken:
        await put(kept, {"by": "w2"}, key, semantics=lock_of(60), expected_version=0)
    assert taken.value.value == {"by": "w1"}
    renewed = await put(kept, {"by": "w1"}, key, semantics=lock_of(60), expected_version=held.version)

    assert renewed.token == held.token
    assert renewed.expires_at is not None
    for blind in (put(kept, {"by": "w2"}, key, semantics=lock_of(60)), kept.kv_delete(key, writer=WRITER)):
        with pytest.raises(InvalidField, match="expectedVersion"):
            await blind
    assert await kept.kv_delete(key, writer=WRITER, expected_version=renewed.version) is True


async def test_an_expired_lock_must_be_acquired_again(kept: SemanticStore) -> None:
    key = "tenant/acme/project/docs/locks/nightly"
    held = await put(kept, {"by": "w1"}, key, semantics=lock_of(SHORT_S), expected_version=0)
    await put(kept, {"n": 0})
    await gone(kept, key)

    with pytest.raises(VersionConflict, match="acquire it again") as over:
        await put(kept, {"by": "w1"}, key, semantics=lock_of(60), expected_version=held.version)
    assert over.value.reason == "lock_expired"
    with pytest.raises(LockLost):
        await put(kept, {"n": 1}, held=held)
    again = await put(kept, {"by": "w1"}, key, semantics=lock_of(60), expected_version=0)
    assert again.token > held.token
    assert (await put(kept, {"n": 1}, held=again)).version == 2
    with pytest.raises(LockLost):
        await kept.kv_delete(KEY, writer=WRITER, held=held)


async def test_a_write_may_be_fenced_by_a_lock_of_the_store(kept: SemanticStore) -> None:
    lock = await kept.store.lock("job", ttl=60).acquire()
    assert (await put(kept, {"n": 1}, fence=lock)).version == 1
    await lock.release()
    await kept.store.lock("job", ttl=60).acquire()
    with pytest.raises(LockLost):
        await put(kept, {"n": 2}, fence=limpet.Fence("job", 1))


# What expires -----------------------------------------------------------------


async def test_what_expires_is_absent_at_once_and_may_be_written_again(kept: SemanticStore) -> None:
    await put(kept, {"n": 1}, semantics={**CHECKPOINT, "ttlSeconds": SHORT_S})
    await gone(kept, KEY)

    assert (await kept.kv_list("tenant/acme/")).envelopes == []
    assert (await put(kept, {"n": 2}, expected_version=0)).version == 1


async def test_what_expired_can_be_recovered_for_a_while(kept: SemanticStore) -> None:
    semantics = {**CHECKPOINT, "ttlSeconds": SHORT_S}
    await put(kept, {"n": 1}, OTHER, semantics={**CHECKPOINT, "ttlSeconds": 3600})
    with pytest.raises(VersionConflict):
        await kept.recover(OTHER, writer="operator")
    await kept.kv_delete(OTHER, writer=WRITER)
    await put(kept, {"n": 1}, semantics=semantics, spec_ref="adr/7")
    await gone(kept, KEY)
    await kept.seal()

    back = await kept.recover(KEY, writer="operator")

    assert (back.value, back.last_writer, back.spec_ref, back.version) == ({"n": 1}, "operator", "adr/7", 1)
    assert back.semantics.to_dict() == semantics
    await gone(kept, KEY)
    # The one that expired before is not what is recovered after another.
    await put(kept, {"n": 2}, semantics=semantics)
    await gone(kept, KEY)
    assert (await kept.recover(KEY, writer="operator")).value == {"n": 2}
    await gone(kept, KEY)
    await put(kept, {"n": 3})
    await kept.kv_delete(KEY, writer=WRITER)
    for key in (KEY, OTHER):
        with pytest.raises(NotFound):
            await kept.recover(key, writer="operator")


async def test_what_another_process_has_recorded_meanwhile_is_recovered(
    store: limpet.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes that record an expiry, one is second: it said that there is nothing to recover."""
    kept, other = SemanticStore(store), SemanticStore(store)
    monkeypatch.setattr(kept._copies, "check_later", lambda *_: None)
    await put(kept, {"n": 1}, semantics={**CHECKPOINT, "ttlSeconds": SHORT_S})
    await gone(kept, KEY)
    record = kept._copies.record_expiry

    async def record_second(key: str, live: limpet.Entry) -> bool:
        assert await other._copies.record_expiry(key, live)
        return await record(key, live)

    monkeypatch.setattr(kept._copies, "record_expiry", record_second)

    assert (await kept.recover(KEY, writer="operator")).value == {"n": 1}


async def test_what_ended_otherwise_is_not_recovered(kept: SemanticStore) -> None:
    """A copy of what expired, or would have, is no copy of what was put since."""
    await put(kept, {"n": 1}, semantics={**CHECKPOINT, "ttlSeconds": 60})
    await put(kept, {"n": 2})
    await kept.kv_delete(KEY, writer=WRITER)
    await put(kept, {"n": 1}, OTHER, semantics={**CHECKPOINT, "ttlSeconds": SHORT_S})
    await gone(kept, OTHER)
    await kept.seal()
    await put(kept, {"n": 2}, OTHER)
    await kept.kv_delete(OTHER, writer=WRITER)

    for key in (KEY, OTHER):
        with pytest.raises(NotFound):
            await kept.recover(key, writer="operator")


async def test_ending_what_expired_leaves_it_to_be_recovered(kept: SemanticStore) -> None:
    await put(kept, {"n": 1}, semantics={**CHECKPOINT, "ttlSeconds": SHORT_S})
    await gone(kept, KEY)

    assert await kept.kv_delete(KEY, writer=WRITER) is False

    assert (await kept.recover(KEY, writer="operator")).value == {"n": 1}


async def test_recovery_ends_with_the_grace_that_the_store_was_given(store: limpet.Store) -> None:
    kept = SemanticStore(store, grace_s=SHORT_S)
    await put(kept, {"n": 1}, semantics={**CHECKPOINT, "ttlSeconds": SHORT_S})
    await asyncio.sleep(3 * SHORT_S)

    with pytest.raises(NotFound):
        await kept.recover(KEY, writer="operator")
    with pytest.raises(InvalidValue):
        SemanticStore(store, grace_s=0)


async def test_a_copy_goes_with_its_entry_and_is_in_no_listing(store: limpet.Store) -> None:
    """What has no time to live has none, and what was ended by hand leaves none."""
    kept = SemanticStore(store)
    await put(kept, {"n": 1}, semantics={**CHECKPOINT, "ttlSeconds": 60})
    assert [copy.live is not None for copy in await kept._copies.load([KEY, OTHER])] == [True, False]
    assert [entry.key async for entry in store.scan()] == [KEY]

    await put(kept, {"n": 2})
    await put(kept, {"n": 1}, OTHER, semantics={**CHECKPOINT, "ttlSeconds": 60})
    await kept.kv_delete(OTHER, writer=WRITER)

    for copy in await kept._copies.load([KEY, OTHER]):
        assert (copy.live, copy.expired) == (None, None)


async def test_recovery_ends_with_the_grace(store: limpet.Store) -> None:
    kept = SemanticStore(store, audit=audit(grace_s=SHORT_S))
    await put(kept, {"n": 1}, semantics={**CHECKPOINT, "ttlSeconds": SHORT_S})
    await asyncio.sleep(3 * SHORT_S)

    with pytest.raises(NotFound):
        await kept.recover(KEY, writer="operator")
    with pytest.raises(NotFound):
        await SemanticStore(store).recover(KEY, writer="operator")
    assert await rows(kept) == [("put", 1), ("expire", 2)]


async def rows(kept: SemanticStore) -> list[tuple[str, int]]:
    from limpet.semantic.rows import rows_of

    return [(row["op"], row["n"]) async for row in rows_of(kept.store)]


# Logs and observers -----------------------------------------------------------------


async def test_writes_are_logged_and_conflicts_are_warned_of_without_a_value(
    kept: SemanticStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="limpet.semantic")
    await put(kept, {"token": "s3cret"}, request_id="r-1")
    with pytest.raises(VersionConflict):
        await put(kept, {"token": "s3cret-2"}, request_id="r-2", expected_version=5)
    await kept.kv_delete(KEY, writer=WRITER, request_id="r-3")

    success, conflict, ended = caplog.records
    assert success.levelname == ended.levelname == "INFO"
    assert conflict.levelname == "WARNING"
    members = {"event": "kvPut", "directive": "nightly-sync", "key": KEY, "purpose": "checkpoint", "requestId": "r-1"}
    assert {name: success.__dict__[name] for name in (*members, "version")} == {**members, "version": 1}
    assert conflict.__dict__["correlationId"] == "r-2"
    assert (conflict.__dict__["version"], conflict.__dict__["expectedVersion"]) == (1, 5)
    assert (ended.__dict__["event"], ended.__dict__["purpose"]) == ("kvDelete", "checkpoint")
    assert "directive=nightly-sync" in success.getMessage()
    assert "s3cret" not in "".join(f"{record.getMessage()}{record.__dict__}" for record in caplog.records)


async def test_an_observer_is_notified_of_successes_and_conflicts(store: limpet.Store) -> None:
    observed: list[Observation] = []
    kept = SemanticStore(store, audit=audit(), observer=observed.append)
    await put(kept, {"n": 1}, request_id="r-1")
    await put(kept, {"n": 1}, request_id="r-1")
    with pytest.raises(VersionConflict):
        await put(kept, {"n": 2}, request_id="r-2", expected_version=9)

    assert [(one.outcome, one.purpose, one.namespace, one.key) for one in observed] == [
        (outcome, "checkpoint", store.name, KEY) for outcome in ("success", "replayed", "conflict")
    ]


def expiries(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.__dict__.get("event") == "kvExpire"]


async def wait_for_expiry_log(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not expiries(caplog):  # noqa: ASYNC110 - no event for a line in the log
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["audited", "entered", "not entered", "put by another"])
async def test_an_expiry_is_logged_with_what_it_was_for(
    store: limpet.Store, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    caplog.set_level(logging.INFO, logger="limpet.semantic")
    kept = SemanticStore(store, audit=audit() if form == "audited" else None)
    async with contextlib.AsyncExitStack() as entered:
        if form != "not entered":
            await entered.enter_async_context(kept)
        putting = SemanticStore(store) if form == "put by another" else kept
        if form == "put by another":
            # As if the process that put it were gone.
            putting._copies.check_later = lambda *_: None  # type: ignore[method-assign]
        await put(putting, {"by": "w1"}, semantics=lock_of(SHORT_S), expected_version=0)
        await wait_for_expiry_log(caplog)
    (expiry,) = expiries(caplog)
    assert expiry.__dict__["version"] == 1
    assert (expiry.__dict__["purpose"], expiry.__dict__["directive"]) == ("lock", "nightly-sync")
    assert expiry.__dict__["semantics"] == lock_of(SHORT_S)
    assert expiry.levelname == "INFO"


async def test_an_expiry_is_logged_once_whichever_process_notices(
    store: limpet.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that put it, two that look after everything, and one that acquires the lock again."""
    caplog.set_level(logging.INFO, logger="limpet.semantic")
    async with SemanticStore(store) as one, SemanticStore(store) as two:
        for number in range(3):
            await put(one, {"by": "w1"}, semantics=lock_of(SHORT_S), expected_version=0)
            await gone(one, KEY)
            await asyncio.gather(one.seal(), two.seal(), two.seal(), two.kv_delete(OTHER, writer=WRITER))
            await put(two, {"by": "w2"}, semantics=lock_of(SHORT_S), expected_version=0)
            await gone(one, KEY)
            await asyncio.gather(one.seal(), two.seal())
            assert len(expiries(caplog)) == 2 * (number + 1)


async def test_an_expiry_is_logged_when_the_lock_is_acquired_again(
    store: limpet.Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="limpet.semantic")
    kept = SemanticStore(store)
    kept._copies.check_later = lambda *_: None  # type: ignore[method-assign]
    await put(kept, {"by": "w1"}, semantics=lock_of(SHORT_S), expected_version=0)
    await gone(kept, KEY)

    await put(kept, {"by": "w2"}, semantics=lock_of(60), expected_version=0)

    assert [record.__dict__["event"] for record in caplog.records] == ["kvPut", "kvExpire", "kvPut"]


async def test_what_is_renewed_or_ended_is_not_logged_as_expired(
    store: limpet.Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="limpet.semantic")
    async with SemanticStore(store) as kept:
        held = await put(kept, {"by": "w1"}, semantics=lock_of(SHORT_S), expected_version=0)
        with contextlib.suppress(VersionConflict):
            await put(kept, {"by": "w1"}, semantics=lock_of(60), expected_version=held.version)
        was_late = bool(expiries(caplog))
        await put(kept, {"n": 1}, OTHER, semantics={**CHECKPOINT, "ttlSeconds": 60})
        await kept.kv_delete(OTHER, writer=WRITER)
        await asyncio.sleep(3 * SHORT_S)
        await kept.seal()

    assert was_late or expiries(caplog) == []


async def test_closing_the_store_ends_what_waits_for_expiries(store: limpet.Store) -> None:
    await put(SemanticStore(store), {"n": 1}, semantics={**CHECKPOINT, "ttlSeconds": 3600})
    assert store._session.background

    await store.close()

    assert not store._session.background
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "limpet-expiries"]


# Watching ---------------------------------------------------------------------


async def test_a_watch_gives_what_is_there_and_then_every_change(kept: SemanticStore) -> None:
    await put(kept, {"n": 1})
    seen: list[tuple[str, Any]] = []
    async with asyncio.timeout(PATIENCE_S):
        async for key, envelope in kept.watch("tenant/acme/project/docs/"):
            seen.append((key, envelope and envelope.value))
            if len(seen) == 1:
                await put(kept, {"n": 2})
                await put(kept, {"n": 0}, "tenant/other/project/docs/x")
                await kept.kv_delete(KEY, writer=WRITER)
            if envelope is None:
                break

    assert seen == [(KEY, {"n": 1}), (KEY, {"n": 2}), (KEY, None)]


def test_audit_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LIMPET_AUDIT_KEYS", raising=False)
    monkeypatch.delenv("LIMPET_AUDIT_KEYS_FILE", raising=False)
    assert Audit.from_environment() is None
    (tmp_path / "keys").write_text(f"new:{'ab' * 32}\nold:{'cd' * 32}\n")
    monkeypatch.setenv("LIMPET_AUDIT_KEYS_FILE", str(tmp_path / "keys"))
    found = Audit.from_environment()
    assert found is not None
    assert found.keys.key_id == "new"
    assert "abab" not in repr(found) + repr(found.keys)
    monkeypatch.setenv("LIMPET_AUDIT_KEYS", f"one:{'ef' * 32}")
    found = Audit.from_environment()
    assert found is not None
    assert found.keys.key_id == "one"
    for wrong in ("one:xyz", "one:abcd", f":{'ef' * 32}"):
        monkeypatch.setenv("LIMPET_AUDIT_KEYS", wrong)
        with pytest.raises(InvalidValue):
            Audit.from_environment()
    monkeypatch.delenv("LIMPET_AUDIT_KEYS")
    (tmp_path / "no text").write_bytes(b"\xff")
    for name, problem in (("missing", "No such file"), ("no text", "not UTF-8")):
        monkeypatch.setenv("LIMPET_AUDIT_KEYS_FILE", str(tmp_path / name))
        with pytest.raises(InvalidValue, match=problem):
            Audit.from_environment()
    with pytest.raises(InvalidValue):
        Audit(b"x" * 32, grace_s=0)
