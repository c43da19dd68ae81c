"""Typed views: the keys under a prefix as values of a model."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

import limpet
from limpet.errors import Conflict, InvalidValue, LimpetError, TypeMismatch

SECRET = "hunter2"  # noqa: S105 - no real one


@dataclasses.dataclass
class User:
    """A dataclass."""

    name: str
    age: int = 0
    tags: list[str] = dataclasses.field(default_factory=list)


class Job(msgspec.Struct):
    """A struct, with what JSON does not have."""

    due: datetime
    body: bytes
    steps: dict[int, str]


JOB = Job(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), b"\x00\xff", {1: "pack"})


async def test_a_view_gives_and_takes_values_of_its_model(store: limpet.Store) -> None:
    """`typed` gives the keys under a prefix as values of a dataclass, a msgspec struct or a pydantic model."""
    users, jobs = store.typed(User, "user/"), store.typed(Job, "job/")
    await users.put("ada", User("Ada", 36, ["admin"]))
    put = await jobs.put("1", JOB)

    assert await users.get("ada") == User("Ada", 36, ["admin"])
    assert await jobs.get("1") == put.value == JOB
    assert put.value is not JOB
    assert await store.get("user/ada") == {"name": "Ada", "age": 36, "tags": ["admin"]}
    assert await users.get("bob") is None
    assert await users.entry("bob") is None


async def test_a_view_has_the_keys_under_its_prefix(store: limpet.Store) -> None:
    """The keys of a view are without its prefix, and it has no others."""
    await store.put("users", 1)
    await store.put("user0", 1)
    users = store.typed(User, "user/")
    for name in ("ada", "bob", "boz", "cyd"):
        await users.put(name, User(name, len(name)))

    assert [entry.key async for entry in users.scan()] == ["ada", "bob", "boz", "cyd"]
    assert [entry.key async for entry in users.scan("bo", reverse=True)] == ["boz", "bob"]
    assert [entry.value.name async for entry in users.scan(after="ada", limit=2)] == ["bob", "boz"]
    assert [entry.key async for entry in users.scan(where=limpet.field("name") >= "c")] == ["cyd"]
    assert await users.delete("ada")
    assert not await users.delete("ada")
    assert (await store.keys()).keys == ["user/bob", "user/boz", "user/cyd", "user0", "users"]


async def test_an_entry_of_a_view_has_what_an_entry_has(store: limpet.Store) -> None:
    """An entry of a view has the value as the model, with the version, revision, times and meta of the key."""
    users = store.typed(User, "user/")
    first = await users.create("ada", User("Ada"), ttl=60, meta={"by": "me"})
    second = await users.put("ada", User("Ada", 1), expect=first, ttl=limpet.KEEP)
    entry = await store.entry("user/ada")
    assert entry is not None

    found = await users.entry("ada")

    assert found == second
    assert (found.key, found.value, found.entry) == ("ada", User("Ada", 1), entry)
    assert (found.version, found.revision, found.meta) == (2, entry.revision, {})
    assert (found.created_at, found.updated_at) == (entry.created_at, entry.updated_at)
    assert found.expires_at == first.expires_at is not None
    assert first.meta == {"by": "me"}


async def test_a_view_takes_the_guards_of_the_store(store: limpet.Store) -> None:
    """The writes of a view take guards, fences, ttl, meta and request ids, and an entry of the view as a guard."""
    users = store.typed(User, "user/")
    first = await users.create("ada", User("Ada"))
    changed = await users.put("ada", User("Ada", 1), expect=first)
    stale: tuple[Any, ...] = (
        users.create("ada", User("Eve")),
        users.put("ada", User("Eve"), expect=first),
        users.delete("ada", expect=first),
    )
    for write in stale:
        with pytest.raises(Conflict) as conflict:
            await write
        assert conflict.value.key == "user/ada"
    repeated = [await users.put("bob", User("Bob"), request_id="r1") for _ in range(2)]
    async with store.lock("gate", ttl=60) as lock:
        fenced = await users.put("cyd", User("Cyd"), fence=lock)

    assert repeated[0] == repeated[1]
    assert fenced.version == 1
    assert await users.delete("ada", expect=changed)


async def test_a_view_updates_by_a_function_of_the_model(store: limpet.Store) -> None:
    """`update` of a view gives the function the value as the model, or None, and loses nothing."""
    users, others = store.typed(User, "user/"), store.typed(User, "user/")

    def grow(found: User | None) -> User:
        return User("Ada", 1) if found is None else dataclasses.replace(found, age=found.age + 1)

    grown = await asyncio.gather(*((users, others)[number % 2].update("ada", grow) for number in range(8)))
    same = await users.update("ada", lambda _: limpet.UNCHANGED)
    ended = await users.update("ada", lambda _: limpet.ABSENT)

    assert sorted(entry.value.age for entry in grown if entry is not None) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert same is not None
    assert same.value == User("Ada", 8)
    assert ended is None
    assert await store.entry("user/ada") is None


async def test_what_would_not_come_back_is_not_written(store: limpet.Store) -> None:
    """A value that would not come back as the model is InvalidValue, and nothing is written."""
    users = store.typed(User, "user/")
    wrong: dict[str, Any] = {
        "$.age": User("Ada", SECRET),  # type: ignore[arg-type]
        "$.tags[1]": User("Ada", 1, ["a", 5]),  # type: ignore[list-item]
        "$": User("Ada", 1, [SECRET, object()]),  # type: ignore[list-item]
    }
    for path, value in wrong.items():
        for write in (users.put("ada", value), users.create("ada", value), users.update("ada", lambda _: value)):  # noqa: B023
            with pytest.raises(InvalidValue) as refused:
                await write
            assert_tells(refused.value, path)
    with pytest.raises(InvalidValue, match=r"takes a User, not something of type dict"):
        await users.put("ada", {"name": "Ada"})  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"2\^63"):
        await users.put("ada", User("Ada", 2**63))

    assert await store.entry("user/ada") is None


async def test_what_does_not_fit_is_told_and_not_shown(store: limpet.Store) -> None:
    """A stored value that does not fit the model is TypeMismatch."""
    users = store.typed(User, "user/")
    stored: dict[str, Any] = {"$.age": {"name": "Ada", "age": SECRET}, "$": SECRET.encode()}
    stored |= {"$.tags[0]": limpet.Fields(name="Ada", tags=[7])}
    for path, value in stored.items():
        await store.put("user/ada", value)
        before = await store.entry("user/ada")
        for call in (users.get("ada"), users.entry("ada"), users.update("ada", lambda found: found or User("Eve"))):
            with pytest.raises(TypeMismatch) as refused:
                await call
            assert_tells(refused.value, path)
        with pytest.raises(TypeMismatch):
            [entry async for entry in users.scan()]
        assert await store.entry("user/ada") == before


async def test_the_check_of_a_model_tells_nothing_of_the_value(store: limpet.Store) -> None:
    """Both errors of a view name the key and the path, and never the value."""
    await store.put("user/ada", {"pin": SECRET})
    checked = store.typed(Checked, "user/")

    with pytest.raises(TypeMismatch, match="not valid") as found:
        await checked.get("ada")
    with pytest.raises(InvalidValue, match="required field") as refused:
        await checked.put("ada", Checked.__new__(Checked))

    assert_tells(found.value, "$")
    assert_tells(refused.value, "$")


@dataclasses.dataclass
class Checked:
    """A dataclass whose own check quotes the value."""

    pin: str

    def __post_init__(self) -> None:
        """Refuse every pin."""
        raise ValueError(f"not a pin: {self.pin}")


def assert_tells(error: LimpetError, path: str) -> None:
    """The error names the key and the path, and not the value."""
    assert (error.key, error.path) == ("user/ada", path)  # type: ignore[attr-defined]
    assert "'user/ada'" in str(error)
    assert path in str(error)
    shown = repr(error) + str(error.__cause__) + ("" if error.__suppress_context__ else str(error.__context__))
    assert SECRET not in shown


async def test_a_record_is_read_as_the_model(store: limpet.Store) -> None:
    """A view reads a record as a model of its fields."""
    await store.record("user/ada").put({"name": "Ada", "age": 36})
    await store.record("job/1").put({"due": "2026-01-02T03:04:05Z", "body": b"\x00\xff", "steps": {"1": "pack"}})

    assert await store.typed(User, "user/").get("ada") == User("Ada", 36)
    assert await store.typed(Job, "job/").get("1") == JOB


async def test_what_is_no_model_is_refused_at_once(store: limpet.Store) -> None:
    """`typed` gives the keys under a prefix as values of a dataclass, a msgspec struct or a pydantic model."""
    for model in (dict, int, object, "User", User("Ada"), list[int]):
        with pytest.raises(TypeError, match="takes a dataclass, a msgspec struct or a pydantic model"):
            await _make(store, model)


async def _make(store: limpet.Store, model: Any) -> None:
    store.typed(model, "x/")
