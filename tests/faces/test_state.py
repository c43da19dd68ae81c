"""The state functions: what they promise over a pool and over every store."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.errors import Conflict, InvalidKey, InvalidValue, ValueTooLarge
from limpet.faces import state
from limpet.faces.state import (
    CASConflictError,
    state_compare_and_set,
    state_delete,
    state_get,
    state_list,
    state_set,
)
from tests.faces.support import exactly

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 1.0, -1, 0.1, 2**63 - 1, -(2**63), "", "text", '"quoted"', "é\U0001f41a"),
    *([], {}, [1, [2, [3]]], {"a": {"b": [None, True, 1.5]}}, {"": 0, "%": 1, "\n": 2}),
]
# What jsonb would change or refuse.
BEYOND_JSONB: list[Any] = [1e22, -0.0, "\u0000", 1.5e300, 5e-324, {"\u0000": [-0.0, {"n": 1e22}]}, "\\u0000"]


# Getting ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [*VALUES, *BEYOND_JSONB], ids=repr)
async def test_a_value_comes_back_exactly(place: Any, value: Any) -> None:
    await state_set(place, "key", value)

    assert exactly(await state_get(place, "key")) == exactly(value)


async def test_a_missing_key_is_none(place: Any) -> None:
    assert await state_get(place, "absent") is None


async def test_null_is_a_value_that_a_list_tells_from_a_missing_key(place: Any) -> None:
    await state_set(place, "key", None)

    assert await state_get(place, "key") is None
    assert await state_list(place, keys_only=False) == [{"key": "key", "value": None}]


async def test_what_is_returned_is_nobodys_live_object(place: Any) -> None:
    value = {"names": ["alice"]}
    await state_set(place, "key", value)
    value["names"].append("bob")
    (await state_get(place, "key"))["names"].append("carol")

    assert await state_get(place, "key") == {"names": ["alice"]}


# Setting ----------------------------------------------------------------------


async def test_a_new_key_gets_version_1(place: Any) -> None:
    assert await state_set(place, "key", "value") == 1


async def test_each_set_counts_the_version_up_and_replaces_the_value(place: Any) -> None:
    versions = [await state_set(place, "key", value) for value in ("one", "two", "two")]

    assert versions == [1, 2, 3]
    assert await state_get(place, "key") == "two"


async def test_concurrent_sets_of_one_key_count_versions_without_gaps(place: Any) -> None:
    versions = await asyncio.gather(*(state_set(place, "key", number) for number in range(50)))

    assert sorted(versions) == list(range(1, 51))
    assert await state_get(place, "key") == versions.index(50)


@pytest.mark.parametrize("value", [b"raw", bytearray(b"raw"), memoryview(b"raw")], ids=["bytes", "bytearray", "view"])
async def test_raw_bytes_are_refused_because_they_are_no_json(place: Any, value: object) -> None:
    with pytest.raises(InvalidValue, match=f"JSON values, not {type(value).__name__}"):
        await state_set(place, "key", value)

    assert await state_list(place) == []


@pytest.mark.parametrize("value", [float("nan"), {1: 2}, {"a": {3}}, [b"raw"], 2**63], ids=repr)
async def test_what_is_no_json_value_is_refused_and_nothing_is_written(place: Any, value: object) -> None:
    with pytest.raises(InvalidValue):
        await state_set(place, "key", value)
    with pytest.raises(InvalidValue):
        await state_compare_and_set(place, "key", 1, value)

    assert await state_list(place) == []


async def test_a_value_beyond_the_limit_is_refused(place: Any) -> None:
    with pytest.raises(ValueTooLarge):
        await state_set(place, "key", "x" * 1_000_000)


# Comparing and setting --------------------------------------------------------


async def test_a_matching_version_is_replaced_and_counted_up(place: Any) -> None:
    version = await state_set(place, "key", "old")

    assert await state_compare_and_set(place, "key", version, "new") == version + 1
    assert await state_get(place, "key") == "new"


@pytest.mark.parametrize("expected", [0, -1, 1, 3, 2**63 - 1], ids=str)
async def test_another_version_is_a_conflict_that_tells_both_and_writes_nothing(place: Any, expected: int) -> None:
    await state_set(place, "key", "first")
    await state_set(place, "key", "second")

    with pytest.raises(CASConflictError) as refused:
        await state_compare_and_set(place, "key", expected, "third")

    conflict = refused.value
    assert (conflict.key, conflict.expected_version, conflict.actual_version) == ("key", expected, 2)
    assert await state_get(place, "key") == "second"
    assert await state_set(place, "key", "next") == 3


async def test_a_version_that_no_engine_can_count_to_is_a_conflict_too(place: Any) -> None:
    await state_set(place, "key", "value")

    with pytest.raises(CASConflictError) as refused:
        await state_compare_and_set(place, "key", 2**70, "new")

    assert refused.value.actual_version == 1


@pytest.mark.parametrize("expected", [0, 1], ids=str)
async def test_a_missing_key_is_a_conflict_without_an_actual_version(place: Any, expected: int) -> None:
    with pytest.raises(CASConflictError) as refused:
        await state_compare_and_set(place, "absent", expected, "value")

    conflict = refused.value
    assert (conflict.key, conflict.expected_version, conflict.actual_version) == ("absent", expected, None)
    assert await state_list(place) == []


async def test_a_deleted_key_is_a_conflict_without_an_actual_version(place: Any) -> None:
    version = await state_set(place, "key", "value")
    await state_delete(place, "key")

    with pytest.raises(CASConflictError) as refused:
        await state_compare_and_set(place, "key", version, "new")

    assert refused.value.actual_version is None


async def test_of_twenty_at_once_one_wins(place: Any) -> None:
    version = await state_set(place, "key", "free")

    outcomes = await asyncio.gather(
        *(state_compare_and_set(place, "key", version, f"worker {number}") for number in range(20)),
        return_exceptions=True,
    )

    winners = [number for number, outcome in enumerate(outcomes) if outcome == 2]
    losers = [outcome for outcome in outcomes if isinstance(outcome, CASConflictError)]
    assert (len(winners), len(losers)) == (1, 19)
    assert {conflict.actual_version for conflict in losers} == {2}
    assert await state_get(place, "key") == f"worker {winners[0]}"


async def test_a_conflict_brings_the_value_and_version_to_go_on_from(place: Any) -> None:
    """No function returns both, and reading them one after the other would take two moments for one."""
    await state_set(place, "key", ["alice"])

    with pytest.raises(CASConflictError) as refused:
        await state_compare_and_set(place, "key", 0, ["bob"])

    current = refused.value.current
    assert current is not None
    assert await state_compare_and_set(place, "key", current.version, [*current.value, "bob"]) == 2
    assert await state_get(place, "key") == ["alice", "bob"]


@pytest.mark.parametrize("version", [True, 1.0, "1", None], ids=repr)
async def test_a_version_is_an_int_and_nothing_like_one(place: Any, version: Any) -> None:
    await state_set(place, "key", "value")

    with pytest.raises(InvalidValue, match=f"an int, not of type {type(version).__name__}"):
        await state_compare_and_set(place, "key", version, "new")


def test_a_conflict_names_what_was_expected_and_found_and_no_value() -> None:
    assert str(CASConflictError("theme", 3, 5)) == (
        "conflict on 'theme': expected version 3, found version 5. Read it again and decide"
    )
    assert str(CASConflictError("theme", 3, None)) == (
        "conflict on 'theme': expected version 3, the key does not exist. Read it again and decide"
    )


async def test_a_conflict_is_a_conflict_like_every_other(place: Any) -> None:
    with pytest.raises(Conflict) as refused:
        await state_compare_and_set(place, "key", 1, "value")

    assert refused.value.code == "conflict"
    assert not refused.value.retryable


async def test_a_conflict_can_be_sent_to_another_process(place: Any) -> None:
    await state_set(place, "key", "value")
    with pytest.raises(CASConflictError) as refused:
        await state_compare_and_set(place, "key", 7, "new")

    copy = pickle.loads(pickle.dumps(refused.value))  # noqa: S301 - our own bytes
    assert (copy.key, copy.expected_version, copy.actual_version) == ("key", 7, 1)
    assert (str(copy), copy.current) == (str(refused.value), refused.value.current)


# Deleting ---------------------------------------------------------------------


async def test_a_deleted_key_is_gone(place: Any) -> None:
    await state_set(place, "key", "value")
    await state_set(place, "other", "value")

    await state_delete(place, "key")

    assert await state_get(place, "key") is None
    assert await state_list(place) == ["other"]


async def test_deleting_a_missing_key_does_nothing(place: Any) -> None:
    await state_delete(place, "absent")

    assert await state_list(place) == []


async def test_a_key_that_comes_back_starts_at_version_1(place: Any) -> None:
    await state_set(place, "key", "value")
    await state_set(place, "key", "value")
    await state_delete(place, "key")

    assert await state_set(place, "key", "value") == 1


# Listing ----------------------------------------------------------------------


async def test_nothing_lists_as_nothing(place: Any) -> None:
    assert await state_list(place) == []
    assert await state_list(place, keys_only=False) == []


async def test_keys_are_listed_in_the_order_of_their_code_points(place: Any) -> None:
    """Not as a locale sorts them, and not as UTF-16 does, which has the last two the other way round."""
    ordered = ["", "10", "9", "B", "_", "a", "a/b", "ab", "z", "é", "\ue000", "\U00010000"][1:]
    for key in reversed(ordered):
        await state_set(place, key, 1)

    assert await state_list(place) == ordered
    assert [item["key"] for item in await state_list(place, keys_only=False)] == ordered


async def test_a_prefix_lists_the_keys_that_start_with_it(place: Any) -> None:
    for key in ("job", "job/1", "job/2", "job0", "jobs", "joc", "Job/1", "a/job/1"):
        await state_set(place, key, 1)

    assert await state_list(place, prefix="job/") == ["job/1", "job/2"]
    assert await state_list(place, "job") == ["job", "job/1", "job/2", "job0", "jobs"]
    assert await state_list(place, prefix="absent") == []
    assert len(await state_list(place, prefix="")) == 8


@pytest.mark.parametrize("letter", ["%", "_", "*", "?", "[", "\\", "."])
async def test_no_character_of_a_prefix_is_a_wildcard(place: Any, letter: str) -> None:
    for key in (f"a{letter}b", "axb", "a", "ab"):
        await state_set(place, key, key)

    assert await state_list(place, prefix=f"a{letter}") == [f"a{letter}b"]
    assert await state_list(place, prefix=letter) == []


async def test_a_list_with_values_has_keys_and_values_and_nothing_else(place: Any) -> None:
    await state_set(place, "b", {"n": 1.0})
    await state_set(place, "a", [1e22, "\u0000"])
    await state_set(place, "c", 0)

    assert exactly(await state_list(place, keys_only=False)) == exactly(
        [{"key": "a", "value": [1e22, "\u0000"]}, {"key": "b", "value": {"n": 1.0}}, {"key": "c", "value": 0}]
    )
    assert await state_list(place, "b", keys_only=False) == [{"key": "b", "value": {"n": 1.0}}]


async def test_a_list_is_whole_however_many_pages_it_takes(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PAGE_MAX", 400)
    keys = [f"key/{number:04}" for number in range(1200)]
    await asyncio.gather(*(state_set(place, key, key) for key in keys))
    await state_set(place, "lock", 1)

    assert await state_list(place, "key/") == keys
    assert await state_list(place, "key/", keys_only=False) == [{"key": key, "value": key} for key in keys]


# Arguments --------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "a\0b", "x" * 1025, "\ud800", 7, None], ids=repr)
async def test_a_key_outside_the_grammar_is_refused_by_all(place: Any, key: Any) -> None:
    for attempt in (
        lambda: state_get(place, key),
        lambda: state_set(place, key, 1),
        lambda: state_compare_and_set(place, key, 1, 1),
        lambda: state_delete(place, key),
    ):
        with pytest.raises(InvalidKey):
            await attempt()


@pytest.mark.parametrize("prefix", [b"", 0, False, "a\0"], ids=repr)
async def test_a_prefix_that_is_none_is_refused_instead_of_listing_everything(place: Any, prefix: Any) -> None:
    with pytest.raises(InvalidKey):
        await state_list(place, prefix)
    with pytest.raises(InvalidKey):
        await state_list(place, prefix, keys_only=False)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, "builtins.NoneType"),
        ({}, "builtins.dict"),
        ("memory:", "builtins.str"),
        (limpet.open("memory:"), "limpet.store.Opening"),
        (limpet.sync.open("memory:"), "limpet.sync.Store"),
    ],
    ids=lambda name: name if isinstance(name, str) else "",
)
async def test_something_that_is_neither_pool_nor_store_is_refused_by_its_name(given: Any, name: str) -> None:
    with pytest.raises(InvalidValue, match=f"asyncpg.Pool or a limpet.Store, not a {name}"):
        await state_get(given, "key")


# Stores -----------------------------------------------------------------------


async def test_a_store_is_used_in_the_namespace_that_it_has() -> None:
    async with limpet.open("memory:", namespace="health") as health:
        finance = health.namespace("finance")
        await state_set(health, "key", "of health")

        assert await state_get(finance, "key") is None
        assert await state_list(finance) == []
        assert await health.get("key") == "of health"


async def test_raw_bytes_and_records_of_other_writers_come_decoded() -> None:
    async with limpet.open("memory:") as store:
        await store.put("bytes", b"\x00\xff")
        await store.record("record").put({"state": "open", "blob": b"\xff"})

        assert await state_get(store, "bytes") == b"\x00\xff"
        assert await state_get(store, "record") == {"state": "open", "blob": b"\xff"}
        assert await state_list(store, keys_only=False) == [
            {"key": "bytes", "value": b"\x00\xff"},
            {"key": "record", "value": {"state": "open", "blob": b"\xff"}},
        ]


async def test_a_record_that_is_set_again_becomes_a_json_object() -> None:
    async with limpet.open("memory:") as store:
        await store.record("record").put({"state": "open"})

        await state_set(store, "record", await state_get(store, "record"))

        entry = await store.entry("record")
        assert entry is not None
        assert (entry.kind, entry.value, entry.version) == ("json", {"state": "open"}, 2)


async def test_a_set_moves_the_time_of_the_update_and_keeps_that_of_the_creation() -> None:
    clock = limpet.ManualClock()
    async with limpet.open("memory:", clock=clock) as store:
        await state_set(store, "key", "old")
        first = await store.entry("key")
        clock.advance(60)
        await state_set(store, "key", "new")
        second = await store.entry("key")

    assert first is not None
    assert second is not None
    assert second.created_at == first.created_at == first.updated_at
    assert (second.updated_at - first.updated_at).total_seconds() == 60


def test_the_driver_is_not_loaded_for_a_store() -> None:
    script = """
        import asyncio, sys
        import limpet
        from limpet.faces.state import state_compare_and_set, state_delete, state_get, state_list, state_set

        async def main():
            async with limpet.open("memory:") as store:
                await state_set(store, "key", 1)
                await state_compare_and_set(store, "key", 1, 2)
                await state_list(store)
                await state_delete(store, "key")
                try:
                    await state_get(object(), "key")
                except limpet.errors.InvalidValue:
                    pass

        asyncio.run(main())
        print(sorted({"asyncpg", "limpet.engines.postgres.engine"} & set(sys.modules)))
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"
