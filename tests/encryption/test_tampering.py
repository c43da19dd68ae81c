"""An attacker that can write to the database of an encrypted store: every change is noticed."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import limpet
import limpet.sync
from limpet.errors import Corrupt
from tests.encryption.support import keyring

RING = keyring("k1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def store(file: Path) -> Iterator[limpet.sync.Store]:
    with limpet.sync.open(f"sqlite:///{file}", namespace="one", encryption=RING, sweep=False) as store:
        for key in ("a", "b"):
            store.put(key, {"for": key}, meta={"of": key})
        store.record("r").put({"open": 1, "hidden": 2})
        store.record("s").set(open=3)
        store.namespace("two").put("a", {"for": "two"}, meta={"of": "two"})
        yield store


def tamper(file: Path, statement: str, *parameters: object) -> int:
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        return database.execute(statement, parameters).rowcount


MOVES = {
    "from one key to another": ("value", "key = 'a' AND namespace = 'one'", "key = 'b' AND namespace = 'one'"),
    "from one namespace to another": ("value", "key = 'a' AND namespace = 'two'", "key = 'a' AND namespace = 'one'"),
    "from one record to another": ("value", "key = 's'", "key = 'r'"),
    "a meta to another key": ("meta", "key = 'a' AND namespace = 'one'", "key = 'b'"),
    "a meta to another namespace": ("meta", "key = 'a' AND namespace = 'two'", "key = 'a' AND namespace = 'one'"),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_row_cannot_be_moved(store: limpet.sync.Store, file: Path, move: str) -> None:
    column, source, target = MOVES[move]
    moved = f"UPDATE limpet_entries SET {column} = (SELECT {column} FROM limpet_entries WHERE {source}) WHERE {target}"
    assert tamper(file, moved) == 1
    key = target[7]

    attempts: list[Any] = [
        lambda: store.entry(key),
        lambda: list(store.scan()),
        lambda: list(store.scan(where=limpet.field("for") == "a")),
        lambda: store.record(key).set(x=1),
        lambda: store.put(key, 1, expect=limpet.equals({"for": "b"})),
    ]
    for attempt in attempts:
        with pytest.raises(Corrupt, match=f"'{key}' in namespace 'one'"):
            attempt()


def test_two_rows_cannot_change_places(store: limpet.sync.Store, file: Path) -> None:
    tamper(file, "UPDATE limpet_entries SET key = 'c' WHERE key = 'a' AND namespace = 'one'")
    tamper(file, "UPDATE limpet_entries SET key = 'a' WHERE key = 'b' AND namespace = 'one'")
    tamper(file, "UPDATE limpet_entries SET key = 'b' WHERE key = 'c' AND namespace = 'one'")

    for key in ("a", "b"):
        with pytest.raises(Corrupt):
            store.get(key)


def test_a_field_cannot_be_moved_to_another(store: limpet.sync.Store, file: Path) -> None:
    """A record is encrypted as a whole: the database has no single field to move, and none can be added."""
    with contextlib.closing(sqlite3.connect(file)) as database:
        kinds = {kind for (kind,) in database.execute("SELECT kind FROM limpet_entries WHERE family = 'data'")}
    assert kinds == {"bytes"}

    tamper(file, """UPDATE limpet_entries SET kind = 'record', value = '{"hidden":1}' WHERE key = 'r'""")

    with pytest.raises(Corrupt, match="not encrypted"):
        store.record("r").fields()


def test_no_bit_can_be_turned(store: limpet.sync.Store, file: Path) -> None:
    with contextlib.closing(sqlite3.connect(file)) as database:
        find = "SELECT value FROM limpet_entries WHERE key = 'a' AND namespace = 'one'"
        ((value,),) = database.execute(find).fetchall()
    drawn = random.Random(5)
    bits = drawn.sample(range(8 * len(value)), 60)
    for bit in bits:
        altered = bytearray(value)
        altered[bit // 8] ^= 1 << bit % 8
        tamper(file, "UPDATE limpet_entries SET value = ? WHERE key = 'a' AND namespace = 'one'", bytes(altered))

        with pytest.raises(Corrupt):
            store.get("a")
    for size in range(0, len(value), 7):
        tamper(file, "UPDATE limpet_entries SET value = ? WHERE key = 'a' AND namespace = 'one'", value[:size])

        with pytest.raises(Corrupt):
            store.get("a")
    tamper(file, "UPDATE limpet_entries SET value = ? WHERE key = 'a' AND namespace = 'one'", value)
    assert store.get("a") == {"for": "a"}


def test_the_log_cannot_be_rewritten(store: limpet.sync.Store, file: Path) -> None:
    other = "SELECT value FROM limpet_changes WHERE key = 'b'"
    assert tamper(file, f"UPDATE limpet_changes SET value = ({other}) WHERE key = 'a' AND namespace = 'one'") == 1

    with pytest.raises(Corrupt):
        list(store.history("a"))
    with store.watch(after=0) as watch, pytest.raises(Corrupt):
        next(watch)


def test_a_receipt_cannot_be_moved_to_another_request(store: limpet.sync.Store, file: Path) -> None:
    store.add("n", 5, request_id="request-1")
    store.add("n", 6, request_id="request-2")
    other = "SELECT value FROM limpet_entries WHERE key = 'request-1'"
    tamper(file, f"UPDATE limpet_entries SET value = ({other}) WHERE key = 'request-2'")

    with pytest.raises(Corrupt):
        store.outcome("request-2")


def test_an_error_tells_nothing_of_the_value_or_the_key(store: limpet.sync.Store, file: Path) -> None:
    tamper(file, "UPDATE limpet_entries SET value = ? WHERE key = 'a'", b"bytes of an attacker")

    with pytest.raises(Corrupt) as raised:
        store.get("a")

    assert "attacker" not in str(raised.value)
    assert "attacker" not in repr(raised.value.__cause__)
