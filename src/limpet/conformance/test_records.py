"""Records: values made of named fields, written one by one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import limpet
from limpet.conformance.support import next_event
from limpet.errors import Conflict, NotFound, TypeMismatch, ValueTooLarge

if TYPE_CHECKING:
    from limpet.conformance.conftest import Elapse, OpenStore

# Names with a meaning in a query language, a template or an escaping rule.
ODD_NAMES = [
    "$",
    "$text",
    "$bytes",
    "$json",
    "$ref",
    "a.b",
    ".",
    'double"quote',
    "single'quote",
    "back\\slash",
    "new\nline",
    "a b",
    " ",
    "[0]",
    "0",
    "%s",
    "{}",
    "_id",
    "__proto__",
    "NULL",
    "Name",
    "name",
    "\u00e9",
    "e\u0301",
    "🦪",
    "\x7f",
    "\u2028",
    "x" * 1024,
]

# Names of parameters, which are ordinary names of fields.
WORDS_OF_THE_CALL = ["self", "key", "fields", "unset", "if_exists", "fence", "request_id", "ttl", "meta", "set", "name"]

JSON_FIELDS: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "int": 1,
    "float": 1.0,
    "minus zero": -0.0,
    "big": 2**63 - 1,
    "small": -(2**63),
    "empty text": "",
    "text": "true",
    "nul": "\0",
    "escapes": '"\\/\b\f\n\r\t\u2028',
    "astral": "🦪\U0010ffff",
    "list": [],
    "nested": [1, [1.0, [True, [None]]]],
    "object": {},
    "members": {"b": 1, "a": {"": None, '"': 2}},
}

# JSON that looks like an engine's own mark for bytes or text.
LOOKALIKES: dict[str, Any] = {
    "text number": {"$text": 1},
    "text": {"$text": "x"},
    "bytes": {"$bytes": "AA=="},
    "no base64": {"$bytes": "~"},
    "json": {"$json": {"$json": {"$text": "x"}}},
    "json null": {"$json": None},
    "two marks": {"$bytes": "AA==", "$text": "x"},
    "mark and more": {"$text": "x", "a": 1},
    "earlier member": {"!": 1, "$text": "x"},
    "bare": {"$": 1},
    "unknown mark": {"$date": 0},
    "inside a list": [{"$text": 1}, {"$bytes": "AA=="}],
    "inside an object": {"a": {"$bytes": "AA=="}},
    "as text": '{"$text":1}',
}

BYTES_FIELDS: dict[str, Any] = {
    "empty": b"",
    "zero": b"\0",
    "text": b"text",
    "utf-8": "é🦪".encode(),
    "no utf-8": b"\xff\xfe\x80",
    "half a surrogate": b"\xed\xa0\x80",
    "null": b"null",
    "true": b"true",
    "number": b"1",
    "quoted": b'"text"',
    "list": b"[]",
    "object": b"{}",
    "mark of text": b'{"$text":1}',
    "mark of bytes": b'{"$bytes":"AA=="}',
    "base64": b"AA==",
    "every byte": bytes(range(256)),
}

every_odd_set = pytest.mark.parametrize(
    "fields", [JSON_FIELDS, LOOKALIKES, BYTES_FIELDS], ids=["json", "lookalikes", "bytes"]
)


def exact(fields: Mapping[str, Any] | None) -> dict[str, object] | None:
    """Fields in a form in which 1, 1.0 and true differ, and text from bytes, which compare as equal in Python."""
    if fields is None:
        return None
    return {
        name: value if isinstance(value, bytes) else json.dumps(value, sort_keys=True) for name, value in fields.items()
    }


# Writing fields ---------------------------------------------------------------


async def test_put_replaces_all_fields(store: limpet.Store) -> None:
    """A record's `put` replaces all fields."""
    record = store.record("record")
    await record.put({"a": 1, "b": b"2"})

    entry = await record.put({"b": 3, "c": None})

    assert exact(await record.fields()) == exact({"b": 3, "c": None})
    assert (entry.version, entry.kind) == (2, "record")


async def test_put_replaces_a_value_of_another_kind(store: limpet.Store) -> None:
    """A record's `put` replaces all fields."""
    for value in ({"a": 1}, b"bytes", None):
        await store.put("record", value)

        await store.record("record").put({"b": 2})

        assert (await store.get("record"), await store.record("record").get("a")) == ({"b": 2}, None)


async def test_put_takes_a_guard(store: limpet.Store) -> None:
    """A record's `put` replaces all fields."""
    record = store.record("record")
    seen = await record.put({"a": 1, "b": 1})
    await record.put({"a": 2}, expect=seen)

    with pytest.raises(Conflict):
        await record.put({"a": 3}, expect=seen)

    assert await record.fields() == {"a": 2}


async def test_fields_are_json_and_bytes_side_by_side(store: limpet.Store) -> None:
    """A record's fields are JSON values or bytes, in any mix."""
    fields = {"text": "1", "bytes": b"1", "number": 1, "none": None, "list": ["1", 1], "empty": b""}
    record = store.record("record")

    await record.put(fields)

    found = await record.fields()
    assert exact(found) == exact(fields)
    assert found is not None
    assert {name: type(value) for name, value in found.items()} == {name: type(v) for name, v in fields.items()}


@every_odd_set
async def test_every_field_comes_back_exactly(store: limpet.Store, fields: dict[str, Any]) -> None:
    """A record's fields are JSON values or bytes, in any mix.

    Bytes that look like JSON stay bytes, and JSON that looks like an engine's mark for bytes stays JSON.
    """
    put, one_by_one = store.record("put"), store.record("set")

    await put.put(fields)
    for name, value in fields.items():
        await one_by_one.set({name: value})

    assert exact(await put.fields()) == exact(fields)
    assert exact(await one_by_one.fields()) == exact(fields)


@every_odd_set
async def test_every_field_comes_back_alone_in_scans_and_commits(store: limpet.Store, fields: dict[str, Any]) -> None:
    """A record's fields are JSON values or bytes, in any mix."""
    record = store.record("record")

    written = await record.put(fields)

    assert exact(written.value) == exact(fields)
    assert [exact(entry.value) async for entry in store.scan()] == [exact(fields)]
    assert exact({name: await record.get(name) for name in fields}) == exact(fields)


async def test_a_watcher_sees_every_field_exactly(store: limpet.Store) -> None:
    """A record's fields are JSON values or bytes, in any mix."""
    fields = {f"{kind} {name}": value for kind, name, value in _all_odd_fields()}
    async with store.watch() as watch:
        await store.record("record").put(fields)
        put = await next_event(watch)
        await store.record("record").set({"one": b'{"$text":1}'}, more={"$text": 1})
        patch = await next_event(watch)

    assert exact(put.value) == exact(fields)
    assert exact(patch.value) == exact({**fields, "one": b'{"$text":1}', "more": {"$text": 1}})


def _all_odd_fields() -> list[tuple[str, str, Any]]:
    kinds = {"json": JSON_FIELDS, "like": LOOKALIKES, "bytes": BYTES_FIELDS}
    return [(kind, name, value) for kind, fields in kinds.items() for name, value in fields.items()]


async def test_a_field_may_have_any_name_that_a_key_may_have(store: limpet.Store) -> None:
    """A record's fields are JSON values or bytes, in any mix."""
    record = store.record("record")
    fields = {name: (number if number % 2 else str(number).encode()) for number, name in enumerate(ODD_NAMES)}

    await record.put(fields)
    assert exact(await record.fields()) == exact(fields)
    for name in ODD_NAMES:
        await record.set({name: [name]})
    assert await record.fields() == {name: [name] for name in ODD_NAMES}
    for name in ODD_NAMES:
        await record.set(unset=[name])
    assert await record.fields() == {}


async def test_set_writes_the_named_fields_only(store: limpet.Store) -> None:
    """`set` writes the named fields and leaves the others."""
    record = store.record("record")
    await record.put({"a": 1, "b": b"2", "c": {"d": 3}})

    entry = await record.set(b="two", e=5)

    fields = {"a": 1, "b": "two", "c": {"d": 3}, "e": 5}
    assert exact(await record.fields()) == exact(fields)
    assert exact(entry.value) == exact(fields)


async def test_set_replaces_a_whole_field(store: limpet.Store) -> None:
    """`set` writes the named fields and leaves the others.

    Inside a field nothing is merged: an object takes the place of the object before.
    """
    record = store.record("record")
    await record.put({"a": {"x": 1, "y": 2}})

    await record.set(a={"y": 3})

    assert await record.fields() == {"a": {"y": 3}}


async def test_set_takes_a_mapping_and_words(store: limpet.Store) -> None:
    """`set` writes the named fields and leaves the others."""
    record = store.record("record")

    await record.set({"a.b": 1, "c": 2}, d=3)

    assert await record.fields() == {"a.b": 1, "c": 2, "d": 3}


async def test_words_of_the_call_are_names_of_fields(store: limpet.Store) -> None:
    """`set` writes the named fields and leaves the others."""
    record = store.record("record")
    fields = {name: [name] for name in WORDS_OF_THE_CALL}

    await record.set(fields)
    await record.swap("set", ["set"], 1, set={"key": 2, "self": 3})

    assert await record.fields() == {**fields, "set": 1, "key": 2, "self": 3}


async def test_set_leaves_meta_and_the_creation_alone(store: limpet.Store) -> None:
    """`set` writes the named fields and leaves the others."""
    before = await store.record("record").put({"a": 1}, meta={"by": "me"})

    after = await store.record("record").set(b=2)

    assert (after.meta, after.created_revision, after.created_at) == (
        {"by": "me"},
        before.created_revision,
        before.created_at,
    )


async def test_set_makes_the_record(store: limpet.Store) -> None:
    """`set` creates a record that does not exist."""
    entry = await store.record("record").set(a=1, b=b"2")

    assert (entry.version, entry.kind, entry.value) == (1, "record", {"a": 1, "b": b"2"})
    assert await store.entry("record") == entry


async def test_set_makes_the_record_anew_after_its_end(store: limpet.Store, elapse: Elapse) -> None:
    """`set` creates a record that does not exist.

    Nothing of the earlier record comes back: no field, no version, no meta, no time to live.
    """
    await store.record("deleted").put({"old": 1}, meta={"by": "me"})
    await store.record("deleted").delete()
    await store.record("expired").put({"old": 1}, meta={"by": "me"}, ttl=0.1)
    await elapse(0.15)

    for key in ("deleted", "expired"):
        entry = await store.record(key).set(new=1)

        assert (entry.value, entry.version, entry.meta, entry.expires_at) == ({"new": 1}, 1, {}, None)


async def test_if_exists_makes_nothing(store: limpet.Store) -> None:
    """With `if_exists`, `set` on a missing record is NotFound and creates nothing."""
    await store.put("other", 1)
    revision = (await store.status()).revision

    with pytest.raises(NotFound) as refused:
        await store.record("record").set(a=1, if_exists=True)

    assert refused.value.key == "record"
    assert await store.entry("record") is None
    assert (await store.status()).revision == revision


async def test_if_exists_writes_a_record_that_exists(store: limpet.Store) -> None:
    """With `if_exists`, `set` on a missing record is NotFound and creates nothing."""
    await store.record("record").put({})

    await store.record("record").set({"a": 1}, if_exists=True)

    assert await store.record("record").fields() == {"a": 1}


async def test_if_exists_does_not_find_what_ended(store: limpet.Store, elapse: Elapse) -> None:
    """With `if_exists`, `set` on a missing record is NotFound and creates nothing."""
    await store.record("deleted").put({"a": 1})
    await store.delete("deleted")
    await store.record("expired").put({"a": 1}, ttl=0.1)
    await elapse(0.15)

    for key in ("deleted", "expired"):
        with pytest.raises(NotFound):
            await store.record(key).set(a=2, if_exists=True)

    assert (await store.keys()).keys == []


# Clearing fields --------------------------------------------------------------


async def test_unset_clears_fields(store: limpet.Store) -> None:
    """`unset` clears fields, and clearing a missing one is no error."""
    record = store.record("record")
    await record.put({"a": 1, "b": None, "c": b"3", "d": 4})

    entry = await record.set(e=5, unset=["a", "b", "c"])

    assert await record.fields() == entry.value == {"d": 4, "e": 5}


async def test_unset_of_a_missing_field_is_no_error(store: limpet.Store) -> None:
    """`unset` clears fields, and clearing a missing one is no error."""
    record = store.record("record")
    await record.put({"a": 1})

    await record.set(unset=["missing"])
    await record.set(b=2, unset=["missing", "absent"])
    await record.set(unset=["b", "b"])

    assert await record.fields() == {"a": 1}


async def test_absent_clears_a_field(store: limpet.Store) -> None:
    """Setting a field to ABSENT clears it."""
    record = store.record("record")
    await record.put({"a": 1, "b": 2})

    entry = await record.set(a=limpet.ABSENT, c=3, missing=limpet.ABSENT)

    assert await record.fields() == entry.value == {"b": 2, "c": 3}


async def test_absent_clears_a_field_in_a_batch(store: limpet.Store) -> None:
    """Setting a field to ABSENT clears it."""
    await store.record("record").put({"a": 1, "b": 2})

    await store.batch().set("record", {"a": limpet.ABSENT}).put("other", 1).commit()

    assert await store.record("record").fields() == {"b": 2}


async def test_none_is_a_value_of_a_field(store: limpet.Store) -> None:
    """None is JSON null and not absence."""
    record = store.record("record")
    await record.set(a=1, b=1)

    await record.set(a=None, b=limpet.ABSENT)

    assert await record.fields() == {"a": None}
    assert await record.get("a", "default") is None
    assert await record.get("b", "default") == "default"


async def test_a_record_may_be_empty(store: limpet.Store) -> None:
    """A record without fields is still a record."""
    await store.record("put").put({})
    await store.record("set").set()
    await store.record("cleared").put({"a": 1})
    await store.record("cleared").set(unset=["a"])

    for key in ("put", "set", "cleared"):
        entry = await store.entry(key)
        assert entry is not None
        assert (entry.kind, entry.value, await store.record(key).fields()) == ("record", {}, {})
    assert (await store.keys()).keys == ["cleared", "put", "set"]


async def test_an_empty_record_takes_fields_and_a_missing_one_is_none(store: limpet.Store) -> None:
    """A record without fields is still a record."""
    await store.record("record").put({})

    await store.record("record").set(a=1, if_exists=True)

    assert await store.record("record").fields() == {"a": 1}
    assert await store.record("missing").fields() is None


# Plain values -----------------------------------------------------------------

PLAIN: list[Any] = [None, 1, 1.5, "text", [], {}, {"a": 1}, b"", b"{}"]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
async def test_a_plain_value_has_no_fields_to_write(store: limpet.Store, value: object) -> None:
    """A field write on a value that is not a record is TypeMismatch.

    A JSON object is not a record either, though its members look like fields.
    """
    before = await store.put("key", value)
    revision = (await store.status()).revision

    with pytest.raises(TypeMismatch) as refused:
        await store.record("key").set(a=2)

    assert refused.value.key == "key"
    assert await store.entry("key") == before
    assert (await store.status()).revision == revision


@pytest.mark.parametrize("value", PLAIN, ids=repr)
async def test_a_plain_value_has_no_fields_to_clear_or_swap(store: limpet.Store, value: object) -> None:
    """A field write on a value that is not a record is TypeMismatch."""
    before = await store.put("key", value)
    record = store.record("key")

    with pytest.raises(TypeMismatch):
        await record.set(unset=["a"])
    with pytest.raises(TypeMismatch):
        await record.set(a=2, if_exists=True)
    for expected in (1, limpet.ABSENT, "other"):
        with pytest.raises(TypeMismatch):
            await record.swap("a", expected, 2)

    assert await store.entry("key") == before


async def test_every_field_write_moves_version_and_revision(store: limpet.Store) -> None:
    """A field write counts as a write: version and revision move."""
    record = store.record("record")
    entries = [await record.set(a=1)]
    entries.append(await record.set(b=2))
    entries.append(await record.set(unset=["b"]))
    assert await record.swap("a", 1, 2)
    entries.append(await store.entry("record") or entries[0])

    assert [entry.version for entry in entries] == [1, 2, 3, 4]
    revisions = [entry.revision for entry in entries]
    assert revisions == sorted(set(revisions))
    assert {entry.created_revision for entry in entries} == {entries[0].revision}


async def test_setting_an_equal_field_counts_as_a_write(store: limpet.Store) -> None:
    """A field write counts as a write: version and revision move."""
    before = await store.record("record").put({"a": 1})

    after = await store.record("record").set(a=1)

    assert (after.version, after.value) == (2, before.value)
    assert after.revision > before.revision
    with pytest.raises(Conflict):
        await store.record("record").put({"a": 2}, expect=before)


async def test_a_field_write_moves_the_update_time(store: limpet.Store, elapse: Elapse) -> None:
    """A field write counts as a write: version and revision move."""
    before = await store.record("record").put({"a": 1})
    await elapse(0.05)

    after = await store.record("record").set(b=1)

    assert after.updated_at >= before.updated_at + timedelta(milliseconds=40)
    assert after.created_at == before.created_at


async def test_a_field_write_is_one_patch_for_watchers(store: limpet.Store) -> None:
    """A field write counts as a write: version and revision move."""
    record = store.record("record")
    async with store.watch() as watch:
        made = await record.set(a=1)
        events = [await next_event(watch)]
        swapped = await record.swap("a", 1, 2, set={"b": 3})
        events.append(await next_event(watch))

    assert swapped
    assert [(event.op, event.value) for event in events] == [("patch", {"a": 1}), ("patch", {"a": 2, "b": 3})]
    assert events[0].revision == made.revision < events[1].revision


# Records as values ------------------------------------------------------------


async def test_a_record_is_read_as_its_fields(store: limpet.Store) -> None:
    """Reading a record as a value gives its fields, and putting those back makes a record again."""
    await store.record("record").put({"a": 1, "b": b"2"})

    value = await store.get("record")

    assert isinstance(value, limpet.Fields)
    assert value == {"a": 1, "b": b"2"}
    assert (await store.put("copy", value)).kind == "record"
    assert exact(await store.record("copy").fields()) == exact(value)


async def test_fields_can_be_changed_and_put_back(store: limpet.Store) -> None:
    """Reading a record as a value gives its fields, and putting those back makes a record again."""
    await store.record("record").put({"a": 1, "b": b"\xff"})

    def change(fields: limpet.Fields) -> limpet.Fields:
        fields["c"] = fields.pop("a")
        return fields

    await store.update("record", change)

    await store.record("record").set(d=4)
    assert exact(await store.record("record").fields()) == exact({"b": b"\xff", "c": 1, "d": 4})


async def test_a_plain_dict_makes_json_and_no_record(store: limpet.Store) -> None:
    """Reading a record as a value gives its fields, and putting those back makes a record again."""
    json_entry = await store.put("json", {"a": 1})
    record_entry = await store.put("record", limpet.Fields(a=1))

    assert (json_entry.kind, record_entry.kind) == ("json", "record")
    assert type(await store.get("json")) is dict


@every_odd_set
async def test_what_was_taken_makes_the_same_record_again(store: limpet.Store, fields: dict[str, Any]) -> None:
    """Reading a record as a value gives its fields, and putting those back makes a record again."""
    await store.record("record").put(fields)

    taken = await store.take("record")
    entry = await store.put("record", taken)

    assert (entry.kind, entry.version) == ("record", 1)
    assert exact(await store.record("record").fields()) == exact(fields)


async def test_get_gives_one_field_or_the_default(store: limpet.Store) -> None:
    """`get` of one field gives the default when the record or the field is missing."""
    record = store.record("record")
    await record.put({"null": None, "zero": 0, "bytes": b""})
    default = object()

    assert await record.get("null", default) is None
    assert await record.get("zero", default) == 0
    assert await record.get("bytes", default) == b""
    assert await record.get("missing", default) is default
    assert await record.get("missing") is None
    assert await store.record("other").get("zero", default) is default
    assert await store.record("other").get("zero") is None


async def test_get_gives_the_default_when_the_record_ended(store: limpet.Store, elapse: Elapse) -> None:
    """`get` of one field gives the default when the record or the field is missing."""
    await store.record("deleted").put({"a": 1})
    await store.record("deleted").delete()
    await store.record("expired").put({"a": 1}, ttl=0.1)
    await elapse(0.15)

    assert await store.record("deleted").get("a", "default") == "default"
    assert await store.record("expired").get("a", "default") == "default"


# The size ---------------------------------------------------------------------


async def test_set_may_fill_a_record_to_the_limit(open_store: OpenStore) -> None:
    """A record over the size limit is refused on field writes too.

    Names and fields count: 1 and 49 bytes, twice, are exactly the limit of 100.
    """
    record = (await open_store(max_value_bytes=100)).record("record")
    await record.set(a=b"x" * 49)

    entry = await record.set(b="x" * 47)

    assert entry.size_bytes == 100


async def test_set_may_not_fill_a_record_beyond_the_limit(open_store: OpenStore) -> None:
    """A record over the size limit is refused on field writes too."""
    store = await open_store(max_value_bytes=100)
    before = await store.record("record").set(a=b"x" * 49)
    revision = (await store.status()).revision

    with pytest.raises(ValueTooLarge) as refused:
        await store.record("record").set(b="x" * 48)

    assert (refused.value.key, refused.value.size_bytes, refused.value.limit_bytes) == ("record", 101, 100)
    assert await store.entry("record") == before
    assert (await store.status()).revision == revision


async def test_a_field_that_is_replaced_or_cleared_makes_room(open_store: OpenStore) -> None:
    """A record over the size limit is refused on field writes too."""
    record = (await open_store(max_value_bytes=100)).record("record")
    await record.put({"a": b"x" * 49, "b": b"x" * 49})

    await record.set(a=b"y" * 49)
    await record.set(c=b"z" * 49, unset=["b"])
    await record.set(d=b"z" * 49, a=limpet.ABSENT)

    assert await record.fields() == {"c": b"z" * 49, "d": b"z" * 49}


async def test_one_field_over_the_limit_is_refused(open_store: OpenStore) -> None:
    """A record over the size limit is refused on field writes too."""
    store = await open_store(max_value_bytes=100)

    with pytest.raises(ValueTooLarge):
        await store.record("record").set(a=b"x" * 100)

    assert await store.entry("record") is None


async def test_swap_and_batch_keep_the_limit_as_well(open_store: OpenStore) -> None:
    """A record over the size limit is refused on field writes too."""
    store = await open_store(max_value_bytes=100)
    before = await store.record("record").put({"a": b"x" * 49, "state": 1})

    with pytest.raises(ValueTooLarge):
        await store.record("record").swap("state", 1, 2, set={"b": b"x" * 49})
    with pytest.raises(ValueTooLarge):
        await store.batch().put("other", 1).set("record", {"b": b"x" * 49}).commit()

    assert [entry async for entry in store.scan()] == [before]


async def test_names_count_by_their_bytes(open_store: OpenStore) -> None:
    """A record over the size limit is refused on field writes too."""
    record = (await open_store(max_value_bytes=10)).record("record")

    await record.set({"🦪": b"x" * 6})
    with pytest.raises(ValueTooLarge):
        await record.set({"🦪": b"x" * 7})

    assert await record.fields() == {"🦪": b"x" * 6}


# Racing -----------------------------------------------------------------------


async def test_concurrent_sets_of_different_fields_all_survive(store: limpet.Store, open_store: OpenStore) -> None:
    """Concurrent sets of different fields all survive."""
    stores = [store, await open_store()]

    await asyncio.gather(*(stores[n % 2].record("record").set({f"field {n}": n}) for n in range(48)))

    entry = await store.entry("record")
    assert entry is not None
    assert entry.value == {f"field {n}": n for n in range(48)}
    assert entry.version == 48


async def test_concurrent_sets_and_clearings_do_not_undo_each_other(store: limpet.Store) -> None:
    """Concurrent sets of different fields all survive."""
    record = store.record("record")
    await record.put({f"old {n}": n for n in range(16)})

    await asyncio.gather(
        *(record.set(unset=[f"old {n}"]) for n in range(16)), *(record.set({f"new {n}": n}) for n in range(16))
    )

    assert await record.fields() == {f"new {n}": n for n in range(16)}


# Swap -------------------------------------------------------------------------


async def test_swap_writes_the_field_and_others_with_it(store: limpet.Store) -> None:
    """`swap` writes the field, and others with it, only if it holds what was expected."""
    record = store.record("job")
    await record.put({"state": "pending", "by": None, "tries": 1, "log": b"x"})

    won = await record.swap("state", "pending", "running", set={"by": "me", "log": limpet.ABSENT, "at": 5})

    assert won is True
    assert await record.fields() == {"state": "running", "by": "me", "tries": 1, "at": 5}


async def test_a_swap_that_expected_something_else_writes_nothing(store: limpet.Store) -> None:
    """`swap` writes the field, and others with it, only if it holds what was expected."""
    before = await store.record("job").put({"state": "running", "by": "another"})
    revision = (await store.status()).revision
    async with store.watch() as watch:
        won = await store.record("job").swap("state", "pending", "running", set={"by": "me"})
        await store.put("end", 1)

        assert (await next_event(watch)).key == "end"

    assert won is False
    assert await store.entry("job") == before
    assert before.revision == revision


async def test_a_swap_to_an_equal_value_is_still_a_write(store: limpet.Store) -> None:
    """`swap` writes the field, and others with it, only if it holds what was expected."""
    before = await store.record("job").put({"state": "same"})

    assert await store.record("job").swap("state", "same", "same") is True

    after = await store.entry("job")
    assert after is not None
    assert (after.version, after.value) == (before.version + 1, before.value)


async def test_a_swap_looks_at_its_own_field_only(store: limpet.Store) -> None:
    """`swap` writes the field, and others with it, only if it holds what was expected.

    Others may write other fields in between. The swap still succeeds, where a guard on the entry would fail.
    """
    record = store.record("job")
    await record.put({"state": "pending", "beat": 1})
    await record.set(beat=2)

    assert await record.swap("state", "pending", "done") is True
    assert await record.fields() == {"state": "done", "beat": 2}


async def test_swap_tells_every_two_fields_apart(store: limpet.Store) -> None:
    """`swap` compares encodings: 1 is not 1.0, and text is not bytes."""
    values: list[Any] = [None, False, True, 0, 1, 0.0, -0.0, 1.0, "", "1", "null", [], [1], [1.0], {}, {"a": 1}]
    values += [{"$text": "1"}, {"$bytes": "MQ=="}, b"", b"1", b"null", b'{"$text":"1"}']
    record = store.record("record")
    for held, value in enumerate(values):
        await record.put({"field": value})

        won = []
        for number, expected in enumerate(values):
            if await record.swap("field", expected, value):
                won.append(number)

        assert won == [held]


async def test_swap_does_not_mind_the_order_of_members(store: limpet.Store) -> None:
    """`swap` compares encodings: 1 is not 1.0, and text is not bytes."""
    record = store.record("record")
    await record.put({"field": {"b": 1, "a": [{"d": 1, "c": 2}]}})

    assert await record.swap("field", {"a": [{"c": 2, "d": 1}], "b": 1}, "new") is True


async def test_swap_may_expect_that_there_is_no_such_field(store: limpet.Store) -> None:
    """`swap` takes ABSENT as expected or as new: no such field."""
    record = store.record("record")
    await record.put({"other": 1})

    assert await record.swap("field", limpet.ABSENT, "mine") is True
    assert await record.swap("field", limpet.ABSENT, "late") is False
    assert await record.fields() == {"other": 1, "field": "mine"}


async def test_swap_may_clear_the_field(store: limpet.Store) -> None:
    """`swap` takes ABSENT as expected or as new: no such field."""
    record = store.record("record")
    await record.put({"field": "mine", "other": 1})

    assert await record.swap("field", "theirs", limpet.ABSENT) is False
    assert await record.swap("field", "mine", limpet.ABSENT) is True
    assert await record.fields() == {"other": 1}


async def test_swap_tells_null_from_no_such_field(store: limpet.Store) -> None:
    """`swap` takes ABSENT as expected or as new: no such field."""
    record = store.record("record")
    await record.put({"null": None})

    assert await record.swap("null", limpet.ABSENT, 1) is False
    assert await record.swap("missing", None, 1) is False
    assert await record.swap("missing", limpet.ABSENT, None) is True
    assert await record.swap("null", None, limpet.ABSENT) is True
    assert await record.fields() == {"missing": None}


async def test_swap_from_absent_to_absent_leaves_the_field_absent(store: limpet.Store) -> None:
    """`swap` takes ABSENT as expected or as new: no such field."""
    record = store.record("record")
    await record.put({"there": 1})

    assert await record.swap("missing", limpet.ABSENT, limpet.ABSENT, set={"mark": 1}) is True
    assert await record.swap("there", limpet.ABSENT, limpet.ABSENT) is False
    assert await record.fields() == {"there": 1, "mark": 1}


@pytest.mark.parametrize("expected", ["value", None, limpet.ABSENT], ids=repr)
async def test_swap_makes_no_record(store: limpet.Store, expected: object) -> None:
    """`swap` on a missing record is False and creates nothing.

    Not even when the field is expected to be absent: without the record there is nothing to swap in.
    """
    await store.record("deleted").put({"a": 1})
    await store.delete("deleted")
    revision = (await store.status()).revision

    for key in ("missing", "deleted"):
        assert await store.record(key).swap("field", expected, "new", set={"other": 1}) is False

    assert (await store.keys()).keys == []
    assert (await store.status()).revision == revision


async def test_swap_does_not_wake_an_expired_record(store: limpet.Store, elapse: Elapse) -> None:
    """`swap` on a missing record is False and creates nothing."""
    await store.record("record").put({"state": "pending"}, ttl=0.1)
    await elapse(0.15)

    assert await store.record("record").swap("state", "pending", "running") is False
    assert await store.record("record").swap("missing", limpet.ABSENT, 1) is False
    assert await store.entry("record") is None


async def test_a_swap_of_a_missing_record_refuses_a_batch(store: limpet.Store) -> None:
    """`swap` on a missing record is False and creates nothing.

    A batch cannot answer False for one of its writes: it is a conflict, and nothing of the batch happens.
    """
    with pytest.raises(Conflict):
        await store.batch().put("other", 1).swap("record", "field", limpet.ABSENT, 1).commit()

    assert (await store.keys()).keys == []


async def test_of_all_who_swap_one_wins(store: limpet.Store, open_store: OpenStore) -> None:
    """Of all callers that swap the same field at once, one wins."""
    stores = [store, await open_store()]
    await store.record("job").put({"state": "pending"})

    def claim(number: int) -> Awaitable[bool]:
        return stores[number % 2].record("job").swap("state", "pending", number, set={"by": number})

    won = await asyncio.gather(*(claim(number) for number in range(24)))

    assert sum(won) == 1
    assert await store.record("job").fields() == {"state": won.index(True), "by": won.index(True)}


async def test_a_field_that_is_passed_on_misses_no_record(store: limpet.Store) -> None:
    """Of all callers that swap the same field at once, one wins.

    Each caller waits for its turn, so every number is written exactly once, one after the other.
    """
    record = store.record("turn")
    await record.put({"turn": 0})

    async def take_turns(first: int) -> None:
        for number in range(first, 30, 3):
            while True:
                if await record.swap("turn", number, number + 1):
                    break
                await asyncio.sleep(0)

    await asyncio.gather(*(take_turns(first) for first in range(3)))

    entry = await store.entry("turn")
    assert entry is not None
    assert (entry.value, entry.version) == ({"turn": 30}, 31)


async def test_of_all_who_swap_in_an_absent_field_one_wins(store: limpet.Store) -> None:
    """Of all callers that swap the same field at once, one wins."""
    record = store.record("job")
    await record.put({})

    won = await asyncio.gather(*(record.swap("owner", limpet.ABSENT, number) for number in range(16)))

    assert sum(won) == 1
    assert await record.get("owner") == won.index(True)


# Time to live -----------------------------------------------------------------

FieldWrite = Callable[[limpet.Store], Awaitable[object]]

FIELD_WRITES: dict[str, FieldWrite] = {
    "set": lambda store: store.record("record").set(b=1),
    "set if exists": lambda store: store.record("record").set(b=1, if_exists=True),
    "unset": lambda store: store.record("record").set(unset=["a"]),
    "swap": lambda store: store.record("record").swap("a", 1, 2),
    "swap away": lambda store: store.record("record").swap("a", 1, limpet.ABSENT),
    "batch set": lambda store: store.batch().set("record", {"b": 1}).commit(),
    "batch swap": lambda store: store.batch().swap("record", "a", 1, 2).commit(),
}


@pytest.mark.parametrize("write", FIELD_WRITES.values(), ids=FIELD_WRITES.keys())
async def test_a_field_write_keeps_the_time_to_live(store: limpet.Store, elapse: Elapse, write: FieldWrite) -> None:
    """A record keeps its time to live when its fields are written."""
    before = await store.record("record").put({"a": 1}, ttl=600)
    await elapse(0.05)

    await write(store)

    after = await store.entry("record")
    assert after is not None
    assert (after.version, after.expires_at) == (2, before.expires_at)


async def test_a_record_that_is_written_still_ends_at_its_moment(store: limpet.Store, elapse: Elapse) -> None:
    """A record keeps its time to live when its fields are written."""
    record = store.record("record")
    await record.put({"a": 1}, ttl=0.8)
    await elapse(0.3)
    await record.set(b=1)
    await elapse(0.2)
    assert await record.swap("a", 1, 2)

    await elapse(0.3)

    assert await record.fields() is None


async def test_a_record_without_a_time_to_live_gets_none(store: limpet.Store) -> None:
    """A record keeps its time to live when its fields are written."""
    record = store.record("record")
    entries = [await record.set(a=1), await record.set(b=1)]

    assert [entry.expires_at for entry in entries] == [None, None]
