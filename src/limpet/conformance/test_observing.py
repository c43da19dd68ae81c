"""Observing a store: each operation is reported once, with how it ended, and an observer can break none."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import OpenStore
from limpet.errors import Conflict, InvalidKey, InvalidValue, LockHeld


class Seen:
    """An observer that keeps what it gets."""

    def __init__(self) -> None:
        self.operations: list[limpet.Operation] = []

    def __call__(self, operation: limpet.Operation) -> None:
        self.operations.append(operation)

    def take(self) -> list[tuple[str, str]]:
        """The names and outcomes since the last call."""
        taken, self.operations = self.operations, []
        return [(one.name, one.outcome) for one in taken]


async def test_each_operation_is_reported_once(open_store: OpenStore, namespace: str) -> None:
    """An observer gets each operation of a store once: its name, namespace, seconds and outcome."""
    seen = Seen()
    store = await open_store(observer=seen)

    await store.put("a", 1)
    assert await store.get("a") == 1
    await store.delete("a")

    assert [(one.name, one.namespace, one.outcome) for one in seen.operations] == [
        ("put", namespace, "ok"),
        ("get", namespace, "ok"),
        ("delete", namespace, "ok"),
    ]
    assert all(0 < one.seconds < 60 for one in seen.operations)


async def test_the_outcome_is_the_code_of_the_error(open_store: OpenStore) -> None:
    """The outcome is `ok`, or the code of the error that the caller gets."""
    seen = Seen()
    store = await open_store(observer=seen)

    await store.put("a", 1)
    with pytest.raises(Conflict):
        await store.create("a", 2)
    with pytest.raises(Conflict):
        await store.put("a", 2, expect=None)
    with pytest.raises(InvalidKey):
        await store.get("")

    assert seen.take() == [("put", "ok"), ("create", "conflict"), ("put", "conflict"), ("get", "invalid_key")]


async def test_an_error_of_the_callers_function_is_an_error(open_store: OpenStore) -> None:
    """The outcome is `error` for an error of the caller's function, and `cancelled` for a cancelled caller."""
    seen = Seen()
    store = await open_store(observer=seen)

    def fail(_: Any) -> Any:
        raise LookupError("mine")

    with pytest.raises(LookupError):
        await store.update("a", fail)

    assert seen.take() == [("update", "error")]


async def test_a_cancelled_caller_is_reported(open_store: OpenStore, face: str) -> None:
    """The outcome is `error` for an error of the caller's function, and `cancelled` for a cancelled caller."""
    if face == "sync":
        return  # A thread that waits cannot be cancelled.
    seen = Seen()
    store = await open_store(observer=seen)
    lock = await store.lock("l", ttl=30).acquire()
    waiting = asyncio.create_task(store.lock("l", ttl=30, wait=60).acquire())
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await lock.release()

    assert seen.take() == [("lock.acquire", "ok"), ("lock.acquire", "cancelled"), ("lock.release", "ok")]


async def test_a_verb_that_is_made_of_others_is_one_operation(open_store: OpenStore) -> None:
    """A verb that is made of others is one operation."""
    seen = Seen()
    store = await open_store(observer=seen)

    await store.update("a", lambda _: 1)
    await store.create("b", 1)
    await store.persist("b")
    await store.append("log/", 1)
    await store.delete_prefix("log/")
    await store.add("n")

    verbs = ("update", "create", "persist", "append", "delete_prefix", "add")
    assert seen.take() == [(verb, "ok") for verb in verbs]


async def test_what_a_store_returns_reports_its_own_verbs(open_store: OpenStore) -> None:
    """Batches, records, edits, locks and elections report their own verbs, such as `lock.acquire`."""
    seen = Seen()
    store = await open_store(observer=seen)

    await store.batch().put("a", 1).put("b", 2).commit()
    record = store.record("r")
    await record.set({"x": 1})
    assert await record.get("x") == 1
    assert not await record.swap("x", 5, 6)
    assert seen.take() == [("batch.commit", "ok"), ("record.set", "ok"), ("record.get", "ok"), ("record.swap", "ok")]

    async with store.edit("doc") as doc:
        doc["x"] = 1
    assert seen.take() == [("edit.start", "ok"), ("edit.finish", "ok")]

    async with store.lock("l", ttl=30):
        with pytest.raises(LockHeld):
            await store.lock("l", ttl=30).acquire()
    assert seen.take() == [("lock.acquire", "ok"), ("lock.acquire", "lock_held"), ("lock.release", "ok")]

    async with store.election("lead", ttl=30):
        pass
    assert seen.take() == [("lock.acquire", "ok"), ("lock.release", "ok")]


async def test_a_refused_batch_is_reported(open_store: OpenStore) -> None:
    """The outcome is `ok`, or the code of the error that the caller gets."""
    seen = Seen()
    store = await open_store(observer=seen)

    with pytest.raises(Conflict):
        await store.batch().expect("a", limpet.PRESENT).put("b", 1).commit()

    assert seen.take() == [("batch.commit", "conflict")]


async def test_an_iteration_is_reported_at_its_end(open_store: OpenStore) -> None:
    """`scan` and `history` are reported at their end, or when the caller wants no more."""
    seen = Seen()
    store = await open_store(observer=seen)
    await store.batch().put("a", 1).put("b", 2).commit()
    seen.take()

    assert [entry.key async for entry in store.scan()] == ["a", "b"]
    assert [event.op async for event in store.history("a")] == ["put"]
    with pytest.raises(InvalidValue):
        _ = [entry async for entry in store.scan(limit=0)]

    assert seen.take() == [("scan", "ok"), ("history", "ok"), ("scan", "invalid_value")]


async def test_other_namespaces_have_the_same_observer(open_store: OpenStore, namespace: str) -> None:
    """Other namespaces of the store have the same observer."""
    seen = Seen()
    store = await open_store(observer=seen)

    await store.namespace(f"{namespace}-2").put("a", 1)

    assert [(one.name, one.namespace) for one in seen.operations] == [("put", f"{namespace}-2")]


async def test_an_observer_that_raises_breaks_nothing(open_store: OpenStore, caplog: pytest.LogCaptureFixture) -> None:
    """An observer that raises breaks no operation."""
    calls: list[str] = []

    def fail(operation: limpet.Operation) -> None:
        calls.append(operation.name)
        raise ZeroDivisionError("of the observer")

    store = await open_store(observer=fail)
    with caplog.at_level(logging.WARNING, "limpet.observed"):
        assert (await store.put("a", 1)).version == 1
        assert await store.get("a") == 1
        with pytest.raises(Conflict):
            await store.create("a", 2)
        assert [entry.key async for entry in store.scan()] == ["a"]

    assert calls == ["put", "get", "create", "scan"]
    assert [line.name for line in caplog.records] == ["limpet.observed"], "its failure is logged once"


@pytest.mark.parametrize("observer", [1, "put", Seen, {}], ids=["int", "str", "class", "dict"])
async def test_an_observer_is_a_function(open_store: OpenStore, observer: object) -> None:
    """An observer is a plain function; anything else is InvalidValue."""
    with pytest.raises(InvalidValue, match="an observer is a plain function"):
        await open_store(observer=observer)


async def test_an_observer_is_not_async(open_store: OpenStore) -> None:
    """An observer is a plain function; anything else is InvalidValue."""

    async def observe(_: limpet.Operation) -> None:
        raise AssertionError("never called")

    with pytest.raises(InvalidValue, match="not an async function"):
        await open_store(observer=observe)
