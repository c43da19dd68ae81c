"""Editing: a copy to work on, merged at the end with what others wrote meanwhile."""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import Blocking
from limpet.errors import Conflict, InvalidTTL, InvalidValue, LockLost, TypeMismatch
from limpet.merge import Clash

Change = Callable[[dict[str, Any]], object]
Meanwhile = Callable[[], Awaitable[object]]


async def run(edit: Any, change: Change, meanwhile: Meanwhile | None = None) -> None:
    """Edit, while something else may happen."""
    async with edit as doc:
        change(doc)
        if meanwhile is not None:
            await meanwhile()


PLAN = {"goal": "ship", "steps": {"one": "open", "two": "open"}, "notes": ["a"]}


async def test_an_edit_writes_what_changed(store: limpet.Store) -> None:
    """`edit` gives a copy of the value, and writes it at the end of the body."""
    await store.put("plan", PLAN, meta={"by": "me"})

    async with store.edit("plan") as doc:
        assert doc == PLAN
        doc["steps"]["one"] = "done"
        del doc["notes"]
        doc["new"] = {"x": (1, 2)}
        assert await store.get("plan") == PLAN

    entry = await store.entry("plan")
    assert entry is not None
    assert entry.value == {"goal": "ship", "steps": {"one": "done", "two": "open"}, "new": {"x": [1, 2]}}
    assert (entry.version, entry.meta) == (2, {"by": "me"})


async def test_an_edit_merges_what_others_wrote(store: limpet.Store, open_store: OpenStore) -> None:
    """What others write meanwhile is merged: each member is taken from the side that changed it."""
    other = await open_store()
    await store.put("plan", PLAN)

    async with store.edit("plan") as doc:
        doc["steps"]["one"] = "done"
        doc["mine"] = 1
        async with other.edit("plan") as theirs:
            theirs["steps"]["two"] = "late"
            theirs["theirs"] = 2
            del theirs["goal"]

    expected = {"steps": {"one": "done", "two": "late"}, "notes": ["a"], "mine": 1, "theirs": 2}
    assert await store.get("plan") == expected


async def test_an_edit_of_a_record_merges_its_fields(store: limpet.Store) -> None:
    """`edit` takes JSON objects and records, and a record stays one."""
    record = store.record("job")
    await record.put({"state": "open", "raw": b"\x01", "tries": 0})

    async with store.edit("job") as doc:
        doc["state"] = "done"
        await record.set(tries=1)

    entry = await store.entry("job")
    assert entry is not None
    assert (entry.kind, entry.value) == ("record", {"state": "done", "raw": b"\x01", "tries": 1})


@pytest.mark.parametrize("value", [None, 1, "text", [1], b"raw"])
async def test_an_edit_of_another_value_is_a_mismatch(store: limpet.Store, value: Any) -> None:
    """`edit` of anything else is TypeMismatch before the body runs."""
    await store.put("k", value)

    with pytest.raises(TypeMismatch, match="a JSON object or a record"):
        async with store.edit("k"):
            pytest.fail("the body runs")


async def test_the_same_member_changed_twice_is_a_conflict(store: limpet.Store) -> None:
    """A member that both sides have changed to different values is a Conflict with its path, and nothing is written."""
    await store.put("plan", PLAN)

    def change(doc: Any) -> None:
        doc["steps"]["one"] = "my secret"
        doc["notes"].append("b")
        doc["mine"] = 1

    with pytest.raises(Conflict) as caught:
        await run(
            store.edit("plan"),
            change,
            lambda: store.put("plan", {**PLAN, "steps": {"two": "open"}, "notes": ["z"]}),
        )

    error, theirs = caught.value, await store.entry("plan")
    assert theirs is not None
    assert theirs.value == {**PLAN, "steps": {"two": "open"}, "notes": ["z"]}
    assert (error.key, error.current, error.reason) == ("plan", theirs, "guard")
    assert sorted(error.clashes, key=lambda clash: clash.path) == [
        Clash(("notes",), ["a"], ["a", "b"], ["z"]),
        Clash(("steps", "one"), "open", "my secret", limpet.ABSENT),
    ]
    assert "$.steps.one" in str(error)
    assert "secret" not in str(error)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert copy.clashes == error.clashes


async def test_equal_changes_are_no_conflict(store: limpet.Store) -> None:
    """Equal changes of both sides are no conflict, and nothing is written when nothing is left to change."""
    await store.put("plan", PLAN)

    async with store.edit("plan") as doc:
        doc["goal"] = "rest"
        doc["notes"] = []
        theirs = await store.put("plan", {**PLAN, "goal": "rest", "notes": []})

    assert await store.entry("plan") == theirs


async def test_an_edit_without_a_change_writes_nothing(store: limpet.Store) -> None:
    """Equal changes of both sides are no conflict, and nothing is written when nothing is left to change."""
    before = await store.put("plan", PLAN)

    async with store.edit("plan") as doc:
        doc["goal"] = "other"
        doc["goal"] = "ship"
    async with store.edit("plan", ttl=60, meta={"m": 1}):
        pass
    async with store.edit("absent"):
        pass

    assert await store.entry("plan") == before
    assert (await store.keys()).keys == ["plan"]
    assert (await store.status()).revision == before.revision


async def test_a_change_of_type_is_a_change(store: limpet.Store) -> None:
    """Equal changes of both sides are no conflict, and nothing is written when nothing is left to change."""
    await store.put("k", {"n": 1})

    async with store.edit("k") as doc:
        doc["n"] = 1.0

    assert repr(await store.get("k")) == "{'n': 1.0}"


async def test_a_conflict_may_be_decided(store: limpet.Store) -> None:
    """`on_conflict` gets the path, base, mine and theirs of such a member, and returns the value to keep."""
    await store.put("plan", {"n": 10, "gone": 1, "quiet": 1})
    seen = []

    def decide(path: tuple[str, ...], base: Any, mine: Any, theirs: Any) -> Any:
        seen.append((path, base, mine, theirs))
        return limpet.ABSENT if path == ("gone",) else mine + theirs - base

    async with store.edit("plan", on_conflict=decide) as doc:
        doc["n"] += 5
        doc["gone"] = 2
        await store.put("plan", {"n": 11, "gone": 3, "quiet": 2})

    assert await store.get("plan") == {"n": 16, "quiet": 2}
    assert sorted(seen) == [(("gone",), 1, 2, 3), (("n",), 10, 15, 11)]


@pytest.mark.face("async")
async def test_a_conflict_may_be_decided_by_an_async_function(store: limpet.Store) -> None:
    """`on_conflict` gets the path, base, mine and theirs of such a member, and returns the value to keep."""
    await store.put("plan", {"n": 1})

    async def decide(path: tuple[str, ...], base: Any, mine: Any, theirs: Any) -> Any:
        await asyncio.sleep(0)
        return [base, mine, theirs, await store.get("plan")]

    async with store.edit("plan", on_conflict=decide) as doc:
        doc["n"] = 2
        await store.put("plan", {"n": 3})

    assert await store.get("plan") == {"n": [1, 2, 3, {"n": 3}]}


@pytest.mark.face("sync")
async def test_the_sync_api_decides_by_a_plain_function(store: Any) -> None:
    """The sync API takes plain functions only: an async one is a TypeError before anything is read."""

    async def decide(*_: Any) -> Any:
        return 1

    assert isinstance(store, Blocking)
    with pytest.raises(TypeError, match="async"):
        store.edit("plan", on_conflict=decide)


async def test_an_error_of_on_conflict_changes_nothing(store: limpet.Store) -> None:
    """An error in the body or in `on_conflict` writes nothing and reaches the caller."""
    await store.put("plan", {"n": 1})

    def refuse(*_: Any) -> Any:
        raise ZeroDivisionError

    for number, (decide, error) in enumerate([(refuse, ZeroDivisionError), (lambda *_: {1, 2}, InvalidValue)]):
        edit, theirs = store.edit("plan", on_conflict=decide), {"n": f"theirs {number}"}
        with pytest.raises(error):
            await run(edit, lambda doc: doc.update(n="mine"), functools.partial(store.put, "plan", theirs))
        assert await store.get("plan") == theirs


async def test_an_error_in_the_body_changes_nothing(store: limpet.Store) -> None:
    """An error in the body or in `on_conflict` writes nothing and reaches the caller."""
    before = await store.put("plan", PLAN)

    with pytest.raises(ZeroDivisionError):
        await run(store.edit("plan"), lambda doc: [doc.pop("goal"), 1 // 0])
    with pytest.raises(InvalidValue, match=r"\$\.when"):
        await run(store.edit("plan"), lambda doc: doc.update(when=object()))

    assert await store.entry("plan") == before


async def test_an_edit_makes_a_key(store: limpet.Store) -> None:
    """Where there is no key, the copy is an empty object, and what others create meanwhile is merged."""
    async with store.edit("plan") as doc:
        assert doc == {}
        doc["steps"] = {"one": 1}
    assert await store.get("plan") == {"steps": {"one": 1}}

    async with store.edit("both") as doc:
        doc["steps"] = {"mine": 1}
        await store.put("both", {"steps": {"theirs": 2}})
    assert await store.get("both") == {"steps": {"mine": 1, "theirs": 2}}


@pytest.mark.parametrize("theirs", [None, limpet.ABSENT, 5, [1], b"\x00"])
async def test_a_whole_value_that_both_changed_is_a_conflict(store: limpet.Store, theirs: Any) -> None:
    """A key that was deleted meanwhile, or holds another kind of value, is a Conflict if the copy was changed."""

    async def replace() -> None:
        if theirs is limpet.ABSENT:
            await store.delete("plan")
        else:
            await store.put("plan", theirs)

    await store.put("plan", PLAN)
    await run(store.edit("plan"), lambda doc: None, replace)
    assert await store.get("plan", limpet.ABSENT) == theirs

    await store.put("plan", PLAN)
    with pytest.raises(Conflict) as caught:
        await run(store.edit("plan"), lambda doc: doc.update(goal="mine"), replace)
    assert [(clash.path, clash.theirs) for clash in caught.value.clashes] == [((), theirs)]
    assert await store.get("plan", limpet.ABSENT) == theirs


async def test_a_value_that_appears_meanwhile_is_not_overwritten(store: limpet.Store) -> None:
    """A key that was deleted meanwhile, or holds another kind of value, is a Conflict if the copy was changed."""
    with pytest.raises(Conflict):
        await run(store.edit("plan"), lambda doc: doc.update(goal="mine"), lambda: store.put("plan", None))

    entry = await store.entry("plan")
    assert entry is not None
    assert entry.value is None


async def test_a_deletion_may_be_decided_against(store: limpet.Store) -> None:
    """`on_conflict` gets the path, base, mine and theirs of such a member, and returns the value to keep."""
    for kept in (limpet.ABSENT, {"back": 1}):
        await store.put("plan", PLAN)
        async with store.edit("plan", on_conflict=lambda *_, kept=kept: kept) as doc:
            doc["goal"] = "mine"
            await store.delete("plan")
        assert await store.get("plan", limpet.ABSENT) == kept


async def test_concurrent_edits_lose_nothing(open_store: OpenStore) -> None:
    """Of concurrent edits, no member is lost, however many there are."""
    stores = [await open_store(clock=limpet.SystemClock()) for _ in range(2)]
    await stores[0].put("plan", {"all": {}})
    ready = asyncio.Barrier(16)

    async def edit(number: int) -> None:
        async with stores[number % 2].edit("plan") as doc:
            doc[f"own {number}"] = number
            doc["all"][str(number)] = [number]
            await ready.wait()

    await asyncio.gather(*map(edit, range(16)))

    found = await stores[0].get("plan")
    assert found == {"all": {str(n): [n] for n in range(16)}, **{f"own {n}": n for n in range(16)}}


async def test_an_edit_keeps_the_ttl(store: limpet.Store, elapse: Elapse) -> None:
    """`edit` keeps ttl and meta unless it is given others, and takes a fence."""
    await store.put("plan", PLAN, ttl=100, meta={"m": 1})
    before = await store.entry("plan")
    async with store.edit("plan") as doc:
        doc["goal"] = 1
    kept = await store.entry("plan")
    async with store.edit("plan", ttl=None, meta={"m": 2}) as doc:
        doc["goal"] = 2
    changed = await store.entry("plan")

    assert before is not None
    assert kept is not None
    assert changed is not None
    assert (kept.expires_at, kept.meta) == (before.expires_at, {"m": 1})
    assert (changed.expires_at, changed.meta) == (None, {"m": 2})
    with pytest.raises(InvalidTTL):
        await run(store.edit("plan", ttl=0), lambda doc: doc.update(goal=3))


async def test_an_edit_after_its_lock_was_lost_changes_nothing(store: limpet.Store) -> None:
    """`edit` keeps ttl and meta unless it is given others, and takes a fence."""
    before = await store.put("plan", PLAN)
    async with store.lock("guard", ttl=60) as lock:
        fence = lock.fence

    with pytest.raises(LockLost):
        await run(store.edit("plan", fence=fence), lambda doc: doc.update(goal=1))

    assert await store.entry("plan") == before


async def test_an_edit_begins_once(store: limpet.Store) -> None:
    """An edit is entered once; entering it again is InvalidValue."""
    edit = store.edit("plan")
    async with edit as doc:
        doc["n"] = 1
        with pytest.raises(InvalidValue, match="call edit again"):
            async with edit:
                pytest.fail("the body runs")

    assert await store.get("plan") == {"n": 1}
