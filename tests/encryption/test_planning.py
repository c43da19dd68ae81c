"""Batches that the encrypted engine plans, because the inner engine cannot read values: contention and lost replies."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

import limpet
from limpet.conformance.support import Failing
from limpet.encryption.engine import RECENTLY_SENT_MAX, EncryptedEngine
from limpet.engine import Engine
from limpet.errors import Ambiguous
from limpet.model import Add, Batch, Commit, Guard, Patch, Put, Refusal, Version
from limpet.opening import open_engine
from limpet.session import Session
from tests.encryption.support import keyring

CLOCK = limpet.SystemClock()


async def encrypted_over(engine: Engine) -> EncryptedEngine:
    return EncryptedEngine(engine, keyring("k1"), CLOCK)


@pytest.fixture
async def inner() -> Engine:
    return await open_engine("memory:", CLOCK)


class Between:
    """An engine in front of another, in which another writer comes first a given number of times."""

    def __init__(self, engine: Engine, times: int) -> None:
        self._engine = engine
        self.times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        if self.times and batch.guards:
            self.times -= 1
            (found,) = await self._engine.read(namespace, ("n",))
            assert found is not None
            assert found.stored is not None
            await self._engine.commit(namespace, Batch((), (Put("n", found.stored),)))
        return await self._engine.commit(namespace, batch)


# Contention -------------------------------------------------------------------


async def test_a_batch_is_planned_again_on_what_another_wrote(inner: Engine) -> None:
    between = Between(inner, 0)
    engine = await encrypted_over(between)
    await engine.commit("ns", Batch((), (Add("n", 1),)))
    between.times = 10

    commit = await engine.commit("ns", Batch((), (Add("n", 1),)))

    assert isinstance(commit, Commit)
    assert commit.entries[0] is not None
    assert (commit.entries[0].value, commit.entries[0].version) == (2, 12)


async def test_a_commit_goes_on_however_often_others_are_first(inner: Engine) -> None:
    """Only `update` gives up."""
    between = Between(inner, 0)
    engine = await encrypted_over(between)
    await engine.commit("ns", Batch((), (Add("n", 1),)))
    between.times = 100

    commit = await engine.commit("ns", Batch((), (Add("n", 1),)))

    assert isinstance(commit, Commit)
    assert commit.entries[0] is not None
    assert (commit.entries[0].value, commit.entries[0].version) == (2, 102)


async def test_a_guard_of_the_caller_is_not_tried_again(inner: Engine) -> None:
    between = Between(inner, 0)
    engine = await encrypted_over(between)
    await engine.commit("ns", Batch((), (Add("n", 1),)))
    between.times = 1

    refusal = await engine.commit("ns", Batch((Guard("n", Version(1)),), (Add("n", 1),)))

    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.guard) == ("guard", Guard("n", Version(1)))
    assert refusal.found is not None
    assert (refusal.found.value, refusal.found.version) == (1, 2)


# Lost replies -----------------------------------------------------------------


async def test_a_count_whose_reply_is_lost_returns_its_own_sum(inner: Engine) -> None:
    """Another writer counts before the retry: the retry returns the first sum, and not a later one."""
    failing = Failing(inner)
    engine, other = await encrypted_over(failing), EncryptedEngine(inner, keyring("k1"), CLOCK)
    other._keyring = engine._keyring
    failing.after = 1
    with pytest.raises(Ambiguous) as ambiguous:
        await engine.commit("ns", Batch((), (Add("n", 5),)))
    await other.commit("ns", Batch((), (Add("n", 100),)))

    again = Batch((), (Add("n", 5),), request_id=ambiguous.value.request_id, retry_since=ambiguous.value.since)
    commit = await engine.commit("ns", again)

    assert isinstance(commit, Commit)
    assert commit.replayed
    assert [entry.value for entry in commit.entries if entry] == [5]
    assert [entry.value for entry in await other.read("ns", ["n"]) if entry] == [105]


async def test_a_count_that_was_not_applied_is_applied_by_its_retry(inner: Engine) -> None:
    class NeverApplied(Failing):
        async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
            if self.after:
                self.after -= 1
                since = (await self._engine.status(namespace)).revision
                raise Ambiguous("no one knows", request_id="request-1", since=since)
            return await self._engine.commit(namespace, batch)

    failing = NeverApplied(inner)
    engine = await encrypted_over(failing)
    await engine.commit("ns", Batch((), (Add("n", 1),)))
    failing.after = 1
    with pytest.raises(Ambiguous) as ambiguous:
        await engine.commit("ns", Batch((), (Add("n", 5),)))
    await engine.commit("ns", Batch((), (Add("n", 100),)))

    again = Batch((), (Add("n", 5),), request_id="request-1", retry_since=ambiguous.value.since)
    commit = await engine.commit("ns", again)

    assert isinstance(commit, Commit)
    assert not commit.replayed
    assert [entry.value for entry in commit.entries if entry] == [106]


@pytest.mark.parametrize("engine", ["memory:", "nats"])
async def test_a_store_settles_what_was_lost(engine: str) -> None:
    url = os.environ["LIMPET_TEST_NATS"] + "?bucket_prefix=sealed-" if engine == "nats" else engine
    failing = Failing(await open_engine(url, CLOCK))
    store = limpet.Store(Session(await encrypted_over(failing), CLOCK), f"t-{os.urandom(6).hex()}")
    try:
        failing.after = 2
        assert await store.add("n", 5) == 5
        failing.after = 2
        assert (await store.record("r").set(a=1)).value == {"a": 1}
        failing.after = 1
        assert await store.record("r").swap("a", 1, 2)
        failing.after = 1
        assert await store.record("r").swap("a", 1, 2) is False
        failing.after = 1
        commit = await store.batch().add("n", 5).set("r", b=3).put("p", 1).commit()
        assert [entry.value for entry in commit.entries if entry] == [10, {"a": 2, "b": 3}, 1]
        failing.after = 1
        assert await store.add("n", 5, request_id="request-1") == 15
        assert await store.add("n", 5, request_id="request-1") == 15
    finally:
        await store.close()


async def test_the_batches_kept_for_retries_have_a_bound(inner: Engine) -> None:
    failing = Failing(inner, after=2 * RECENTLY_SENT_MAX)
    engine = await encrypted_over(failing)
    for number in range(2 * RECENTLY_SENT_MAX):
        with pytest.raises(Ambiguous):
            await engine.commit("ns", Batch((), (Patch(f"{number}", {"a": b"1"}),)))

    assert len(engine._recently_sent) == RECENTLY_SENT_MAX


# In one process ---------------------------------------------------------------


def test_a_child_after_a_fork_waits_for_no_turn() -> None:
    with limpet.sync.open("memory:", encryption=keyring("k1")) as store:
        session: Any = store._twin._session
        turn = session.engine._turns.turn(("default", "data", "n"))
        assert turn.join()
        child = os.fork()
        if child == 0:
            os._exit(0 if store.add("n") == 1 else 1)
        _, status = os.waitpid(child, 0)
        turn.leave()

    assert os.waitstatus_to_exitcode(status) == 0


def test_traits_are_those_of_the_inner_engine() -> None:
    with limpet.sync.open("memory:", encryption=keyring("k1")) as store:
        traits = msgspec.structs.asdict(store.traits)

    assert traits == {
        "engine": "memory",
        "durability": "none",
        "clock": "host",
        "inline": True,
        "encrypted": True,
    }
