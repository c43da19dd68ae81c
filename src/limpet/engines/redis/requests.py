"""What the Redis engine sends to its script: batches and items, encoded as msgpack, and the script itself.

The script never decodes a value, so values travel as they are. Its decoder is `limpet.engines.redis.replies`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from limpet.model import (
    ABSENT,
    KEEP,
    Add,
    Batch,
    Condition,
    FieldEquals,
    Patch,
    Put,
    Revision,
    Write,
)

__all__ = [
    "TEST_CLOCK_KEY",
    "Item",
    "encode_field",
    "encode_fields",
    "encode_item",
    "encode_items",
    "encode_text",
    "find_items",
    "load_script",
]

ITEMS_MIN: Final = 16
"""How many batches of a group must have a short way, if others have none, to be sent in a request of their own."""

TEST_CLOCK_KEY: Final = "limpet:test-clock"
"""The key that holds the time in milliseconds, for a store that was opened with ``?clock=test``."""

Item = tuple[Any, Any, Any]
"""What the short way of the script takes: a key, the value or the change of it, and what is expected of the key. Of a
batch of several puts, their keys, their values and False."""

# Numbers up to these are exact in Lua, and their sums too.
_STEP_LIMIT: Final = 10**15
_FIELDS_MAX: Final = 100

_TEST_CLOCK_BLOCK: Final = re.compile(rb"^ *-- test clock: begin\n.*?^ *-- test clock: end\n", re.MULTILINE | re.DOTALL)
_pack = msgspec.msgpack.Encoder().encode


@functools.cache
def load_script(*, test_clock: bool = False) -> tuple[bytes, str]:
    """The text of the script, and the hash by which the server knows it.

    Only the variant for tests has the block that reads the test clock.
    """
    text = Path(__file__).with_name("script.lua").read_bytes()
    if not test_clock:
        text = _TEST_CLOCK_BLOCK.sub(b"", text)
    return text, hashlib.sha1(text, usedforsecurity=False).hexdigest()


def encode_item(batch: Batch) -> Item | None:
    """A batch as an item; None if the script has no short way for it.

    It has one for a put of a JSON value that neither expires nor has meta, or that keeps both as they are, perhaps with
    an expected revision; for an add; for a patch, perhaps with an expected field; and for several puts of JSON values
    that neither expire nor have meta.
    """
    try:
        writes, guards, condition = batch.writes, batch.guards, None
        if batch.request_id is not None:
            return None
        if len(writes) != 1:
            return None if guards else _encode_puts(writes)
        write = writes[0]
        if write.family != "data" or type(write.key) is not str:
            return None
        if guards:
            guard = guards[0]
            if len(guards) > 1 or guard.family != "data" or guard.key != write.key:
                return None
            condition = guard.condition
        if type(write) is Put:
            # First of all the most frequent one: a JSON value, and no more.
            stored, is_bare = write.stored, write.ttl_ms is None and write.meta_json is None and not guards
            if is_bare and type(stored) is bytes and stored[:1] > b"\0":
                return write.key, stored.decode(), False
            return _encode_put(write, condition)
        if type(write) is Add:
            return _encode_add(write) if condition is None else None
        return _encode_patch(batch, write, condition) if type(write) is Patch else None
    except (AttributeError, TypeError, UnicodeDecodeError):
        # It was made by hand. The long way finds the error in it.
        return None


def find_items(batches: list[Batch]) -> dict[int, Item]:
    """The batches of a group that go the short way, by their number: all or most of them, or none.

    Batches on one key keep their order: if one of them has no short way, they go the long way together.
    """
    items = {number: item for number, batch in enumerate(batches) if (item := encode_item(batch)) is not None}
    if len(items) < len(batches):
        others = [batch for number, batch in enumerate(batches) if number not in items]
        keys = {one.key for batch in others for one in (*batch.writes, *batch.guards)}
        items = {number: item for number, item in items.items() if keys.isdisjoint(_each(item[0]))}
        # For a few items, a request of their own takes longer than the short way saves.
        if len(items) < max(ITEMS_MIN, len(batches) / 2):
            return {}
    return items


def encode_items(items: list[Item], writers: list[str | None]) -> bytes:
    """Items as the script takes them, of batches with these writers.

    They are keys, values, what is expected, the number of the items of each batch, and the writer of each item. Of the
    last three each is False if there is nothing of it: nothing expected, only batches of one item, no writer.
    """
    keys, values, expected = zip(*items, strict=True)
    # An expected 0 is something, too, although it equals False.
    wanted: Any = any(map(operator.is_not, expected, itertools.repeat(False))) and expected
    names: Any = any(writers) and [name is not None and _encode_name(name) for name in writers]
    if tuple not in map(type, keys):
        return _pack((keys, values, wanted, False, names))
    sizes = [len(_each(key)) for key in keys]
    flat = itertools.chain.from_iterable
    all_keys, all_values = [*flat(map(_each, keys))], [*flat(map(_each, values))]
    return _pack((all_keys, all_values, wanted and _repeat(wanted, sizes), sizes, names and _repeat(names, sizes)))


def _repeat(ones: Sequence[Any], sizes: list[int]) -> list[Any]:
    """What belongs to each batch, once for each of its items."""
    return [one for one, size in zip(ones, sizes, strict=True) for _ in range(size)]


def _encode_name(writer: str) -> str:
    return msgspec.json.encode(writer).decode()


def _each(part: Any) -> tuple[Any, ...]:
    """The keys or the values of an item: several of a batch of puts."""
    return part if type(part) is tuple else (part,)


def _encode_puts(writes: tuple[Write, ...]) -> Item | None:
    """Several puts that expect nothing; None if one of them is something else."""
    keys, values = [], []
    for write in writes:
        if type(write) is not Put or write.family != "data" or type(write.key) is not str:
            return None
        stored = write.stored
        if write.ttl_ms is not None or write.meta_json is not None or type(stored) is not bytes or stored[:1] <= b"\0":
            return None
        keys.append(write.key)
        values.append(stored.decode())
    return (tuple(keys), tuple(values), False) if keys else None


def _encode_revision(condition: Condition) -> int | None:
    """The revision that a put expects, 0 for no entry; None if it expects something else."""
    if type(condition) is Revision:
        return condition.number if 0 < condition.number < 2**53 else None
    return 0 if condition is ABSENT else None


def _encode_put(put: Put, condition: Condition | None) -> Item | None:
    """A put, and the revision that it expects: in a list, if it keeps the expiry and the meta of the entry."""
    expected, stored = False if condition is None else _encode_revision(condition), put.stored
    if expected is None or not isinstance(stored, bytes) or stored[:1] == b"\0":
        return None
    if put.ttl_ms is KEEP and put.meta_json is KEEP:
        return put.key, stored.decode(), [expected]
    return (put.key, stored.decode(), expected) if put.ttl_ms is None and put.meta_json is None else None


def _encode_add(add: Add) -> Item | None:
    is_sum = add.rule == "add" and type(add.by) is int and abs(add.by) < _STEP_LIMIT
    is_usual = is_sum and add.ttl_ms is KEEP and add.meta_json is KEEP and add.new_ttl_ms is None
    return (add.key, add.by, False) if is_usual else None


def _encode_patch(batch: Batch, patch: Patch, condition: Condition | None) -> Item | None:
    """A patch, and the name of the field that it expects with what it holds, or the name alone if it must be absent."""
    is_usual = patch.ttl_ms is KEEP and patch.meta_json is KEEP and not patch.unset and len(patch.fields) <= _FIELDS_MAX
    if not is_usual or not (condition is None or type(condition) is FieldEquals):
        return None
    if not all(type(name) is str for name in patch.fields):
        return None
    expected: Any = False
    if isinstance(condition, FieldEquals):
        held = condition.stored
        expected = [condition.name, encode_text(encode_field(held))] if isinstance(held, bytes) else [condition.name]
    return patch.key, [encode_fields(patch.fields), patch.if_exists, batch.value_bytes_max, batch.is_brief], expected


def encode_fields(fields: Mapping[str, bytes]) -> list[str | msgspec.Raw]:
    """The fields of a record: names and fields in turn."""
    return [item for name, field in fields.items() for item in (name, encode_text(encode_field(field)))]


def encode_text(item: bytes) -> str | msgspec.Raw:
    """Bytes as a text of msgpack, whether they are UTF-8 or not: the script's decoder knows no other bytes."""
    try:
        return item.decode()
    except UnicodeDecodeError:
        return msgspec.Raw(b"\xdb" + len(item).to_bytes(4, "big") + item)


def encode_field(field: bytes) -> bytes:
    """A field of a record as the Redis hash holds it.

    A field of raw bytes is stored as it is, so that other programs read what they expect. A JSON field gets a zero byte
    in front, and so do raw bytes that begin with one.
    """
    if field[:1] != b"\0":
        return b"\0" + field
    return field if field[1:2] == b"\0" else field[1:]
