"""Semantic entries without await, in threads: the same answers as with it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.errors import InvalidValue, LockLost, NotFound
from limpet.semantic import deadletters
from limpet.semantic import store as semantic
from limpet.semantic import sync as blocking
from limpet.semantic.store import Envelope, Escalated, Observation, RetryPolicy, VersionConflict
from limpet.semantic.sync import DeadLetters, SemanticStore
from tests.engines import unique, url_of
from tests.processes import PATIENCE_S
from tests.semantic.support import CHECKPOINT, KEY, WRITER, audit, lock_of

START = "tenant/acme/project/docs/"
ALL = timedelta(hours=-1)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[limpet.sync.Store]:
    with limpet.sync.open(url_of(request.param, tmp_path), namespace=unique("blocking")) as store:
        yield store


@pytest.fixture
def kept(store: limpet.sync.Store) -> SemanticStore:
    return SemanticStore(store, audit=audit())


def put(kept: SemanticStore, value: dict[str, Any], key: str = KEY, **options: Any) -> Envelope:
    return kept.kv_put(key, value, **{"writer": WRITER, "semantics": CHECKPOINT, **options})


def wait_for(fact: Any) -> None:
    until = time.monotonic() + PATIENCE_S
    while not fact():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("awaited", "face", "own"),
    [
        (semantic.SemanticStore, blocking.SemanticStore, set()),
        # Only escalation uses them, which is the same code.
        (deadletters.DeadLetters, blocking.DeadLetters, {"keep", "new_name"}),
    ],
)
def test_the_verbs_are_the_same_and_none_is_to_be_awaited(awaited: type, face: type, own: set[str]) -> None:
    def verbs(kind: type) -> dict[str, Any]:
        return {name: verb for name, verb in inspect.getmembers(kind, callable) if not name.startswith("_")}

    assert set(verbs(awaited)) - set(verbs(face)) == own
    for name, verb in verbs(face).items():
        assert not inspect.iscoroutinefunction(verb)
        assert inspect.getdoc(verb)
        assert list(inspect.signature(verb).parameters) == list(inspect.signature(verbs(awaited)[name]).parameters)
    assert list(inspect.signature(awaited).parameters) == list(inspect.signature(face).parameters)


def test_entries_are_put_read_listed_and_ended(kept: SemanticStore) -> None:
    assert put(kept, {"n": 1}, expected_version=0).version == 1
    with pytest.raises(VersionConflict) as raised:
        put(kept, {"n": 2}, expected_version=5)
    assert (raised.value.version, raised.value.value) == (1, {"n": 1})
    cursor = {"purpose": "cursor"}
    items = [
        {"op": "put", "key": f"{KEY}/cursor", "value": {"at": 0}, "semantics": cursor, "expectedVersion": 0},
        {"op": "put", "key": KEY, "value": {"n": 2}, "semantics": CHECKPOINT, "expectedVersion": 1},
    ]
    assert [one.version for one in kept.kv_batch(items, writer=WRITER) if one is not None] == [1, 2]
    found = kept.kv_get(KEY)
    assert found is not None
    assert (found.value, found.last_writer) == ({"n": 2}, WRITER)
    assert [one.key for one in kept.kv_list(START).envelopes] == [KEY, f"{KEY}/cursor"]
    assert [one.key for one in kept.kv_list(START, purpose="cursor").envelopes] == [f"{KEY}/cursor"]
    assert kept.kv_delete(KEY, writer=WRITER)
    assert not kept.kv_delete(KEY, writer=WRITER)
    first = put(kept, {"n": 3}, request_id="r-1")
    again = put(kept, {"n": 3}, request_id="r-1")
    assert (first.replayed, again.replayed, again.version) == (False, True, first.version)
    component = "h-o2z26bf3l5m46txxr2oyubevp"
    original = "https://graph.example.org/drives/B!7F3A/root"
    assert kept.key("acme", "docs", original, "delta") == f"{START}{component}/delta"
    assert kept.identifier(component) == original
    kept.wait_until_available()


def test_locks_tie_writes(kept: SemanticStore) -> None:
    lock = put(kept, {"by": "w1"}, f"{START}lock", semantics=lock_of(60), expected_version=0)
    put(kept, {"n": 1}, held=lock)
    kept.kv_delete(f"{START}lock", writer=WRITER, expected_version=lock.version)
    with pytest.raises(LockLost):
        put(kept, {"n": 2}, held=lock)
    with kept.store.lock("work", ttl=30) as fence:
        assert put(kept, {"n": 3}, fence=fence).version == 2


def test_what_expired_is_recovered(kept: SemanticStore) -> None:
    put(kept, {"n": 1}, semantics={**CHECKPOINT, "ttlSeconds": 0.05})
    wait_for(lambda: kept.kv_get(KEY) is None)
    assert kept.recover(KEY, writer="operator").value == {"n": 1}
    with pytest.raises(NotFound):
        kept.recover(f"{START}none", writer="operator")


def test_threads_advance_one_key_and_the_trail_of_it_verifies(store: limpet.sync.Store) -> None:
    seen: list[Observation] = []
    policy = RetryPolicy(conflict_pauses_s=(0.001,) * 200)
    with SemanticStore(store, audit=audit(), policy=policy, observer=seen.append) as kept:

        def counted(found: Envelope | None) -> dict[str, Any]:
            return {"n": 1 if found is None or found.value is None else found.value["n"] + 1}

        def count(_: int) -> None:
            for _ in range(5):
                kept.advance(KEY, counted, writer=WRITER, semantics=CHECKPOINT)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(count, range(4)))
        found = kept.kv_get(KEY)
        assert found is not None
        assert (found.value, found.version) == ({"n": 20}, 20)
        kept.seal()
        report = kept.verify()
        assert (report.problems, report.sealed, report.unsealed) == ((), 20, 0)
    assert [one.outcome for one in seen].count("success") == 20


def test_a_function_that_advances_may_use_the_store_and_must_be_plain(store: limpet.sync.Store) -> None:
    letters = DeadLetters.beside(store)
    kept = SemanticStore(store, policy=RetryPolicy(conflict_pauses_s=(0.001,)), dead_letters=letters)

    def too_late(found: Envelope | None) -> dict[str, Any]:
        put(kept, {"n": 0})
        return {"n": 1}

    async def awaited(found: Envelope | None) -> dict[str, Any]:
        return {}

    with pytest.raises(Escalated) as raised:
        kept.advance(KEY, too_late, writer=WRITER, semantics=CHECKPOINT)
    assert raised.value.attempts == 2
    (letter,) = letters.list()
    assert letters.show(letter.letter).value == {"n": 1}
    assert letters.replay(letter.letter, kept, expected_version=2).version == 3
    assert not letters.drop(letter.letter)
    wrong: Any
    for wrong in (awaited, lambda found: awaited(found) if found else awaited(None)):
        with pytest.raises(TypeError, match="plain function"):
            kept.advance(KEY, wrong, writer=WRITER, semantics=CHECKPOINT)
    assert kept.submit(KEY, {"n": 5}, writer=WRITER, semantics=CHECKPOINT).version == 4
    unchanged = kept.advance(KEY, lambda found: None, writer=WRITER, semantics=CHECKPOINT)
    assert unchanged is not None
    assert unchanged.version == 4


def test_letters_are_kept_where_their_store_can_write_them(store: limpet.sync.Store, tmp_path: Path) -> None:
    with limpet.sync.open(f"sqlite:///{tmp_path}/letters.db") as local:
        SemanticStore(store, dead_letters=DeadLetters(local))
        if not store.traits.inline:
            with pytest.raises(InvalidValue, match="engine of their store"):
                SemanticStore(local, dead_letters=DeadLetters.beside(store))


@pytest.mark.slow
def test_the_trail_is_sealed_in_the_background_and_pruned(store: limpet.sync.Store) -> None:
    with SemanticStore(store, audit=audit()) as kept:
        put(kept, {"n": 1})
        put(kept, {"n": 2})
        wait_for(lambda: kept.verify().sealed == 2)
        assert kept.prune(before=ALL, dry_run=True).rows == 2
        assert kept.prune(before=ALL).rows == 2
        report = kept.verify()
        assert (report.problems, report.pruned, report.sealed) == ((), 2, 0)
    kept.seal()
    with SemanticStore(store.namespace(unique("closed")), audit=audit()):
        store.close()


def test_a_child_after_a_fork_goes_on_and_leaves_the_sealing_to_its_parent(store: limpet.sync.Store) -> None:
    reader, writer = os.pipe()
    with SemanticStore(store, audit=audit()) as kept:
        put(kept, {"n": 1})
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                put(kept, {"n": 2})
                kept.__exit__(None, None, None)
                with kept:
                    kept.seal()
                    os.write(writer, b"done")
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        assert os.read(reader, 10) == b"done"
        os.close(reader)
        report = kept.verify()
        assert (report.problems, report.sealed + report.unsealed) == ((), 2)


def test_changes_are_watched_until_another_thread_ends_it(kept: SemanticStore) -> None:
    put(kept, {"n": 1})
    seen: list[tuple[str, dict[str, Any] | None]] = []
    watch = kept.watch(START)

    def look() -> None:
        for key, envelope in watch:
            seen.append((key, None if envelope is None else envelope.value))

    thread = threading.Thread(target=look)
    thread.start()
    put(kept, {"n": 2})
    kept.store.put("names/other", 1)
    kept.kv_delete(KEY, writer=WRITER)
    wait_for(lambda: seen[-1:] == [(KEY, None)])
    watch.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert {key for key, _ in seen} == {KEY}
    # Nothing is missed between the call and the first look.
    with kept.watch(START, initial=False) as later:
        put(kept, {"n": 3})
        key, envelope = next(later)
    assert envelope is not None
    assert (key, envelope.value) == (KEY, {"n": 3})


async def test_inside_a_running_loop_it_refuses(tmp_path: Path) -> None:
    store = await asyncio.to_thread(lambda: limpet.sync.open(f"sqlite:///{tmp_path}/state.db"))
    kept = SemanticStore(store, audit=audit())
    for call in (lambda: kept.kv_get(KEY), kept.verify, kept.__enter__):
        with pytest.raises(RuntimeError, match="running event loop"):
            call()
    await asyncio.to_thread(store.close)
