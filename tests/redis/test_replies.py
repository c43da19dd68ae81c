"""What comes back from the server: no more than the caller has a use for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import limpet
from limpet.engines.redis.connection import Connection
from limpet.faces.fields import StateStore
from tests.engines import unique
from tests.redis.support import server

FIELDS = {f"field_{number:03}": b"x" * 50 for number in range(100)}
WHOLE_BYTES = sum(len(name) + len(value) for name, value in FIELDS.items())


class Replies:
    """Counts the bytes that the connections of this process receive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bytes = 0
        received = Connection.data_received

        def data_received(connection: Connection, data: bytes) -> None:
            self._bytes += len(data)
            received(connection, data)

        monkeypatch.setattr(Connection, "data_received", data_received)

    async def size_bytes(self, call: Awaitable[Any]) -> int:
        """How much a call is answered with."""
        before = self._bytes
        await call
        return self._bytes - before


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> Replies:
    return Replies(monkeypatch)


@pytest.fixture
async def target() -> AsyncIterator[tuple[StateStore, str]]:
    """A store of records, and the key of one that has a hundred fields."""
    async with limpet.open(server(), sweep=False) as store:
        states, key = StateStore(store), f"{unique()}.job"
        await states.put(key, {**FIELDS, "state": b"open"})
        yield states, key


CALLS: dict[str, Callable[[StateStore, str], Awaitable[Any]]] = {
    "set_field": lambda states, key: states.set_field(key, "n", b"1"),
    "set_fields": lambda states, key: states.set_fields(key, {"n": b"1", "state": b"done"}),
    "compare_and_swap": lambda states, key: states.compare_and_swap(key, "state", b"open", b"done"),
    "refused compare_and_swap": lambda states, key: states.compare_and_swap(key, "state", b"other", b"done"),
    "touch": lambda states, key: states.touch(key, 60),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_write_of_a_field_does_not_send_the_record_back(
    target: tuple[StateStore, str], replies: Replies, name: str
) -> None:
    size_bytes = await replies.size_bytes(CALLS[name](*target))

    assert 0 < size_bytes < 300 < WHOLE_BYTES


async def test_a_swap_of_a_record_does_not_send_it_back(replies: Replies) -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        record = store.record("job")
        await record.put({**FIELDS, "state": "open"})

        assert await replies.size_bytes(record.swap("state", "open", "done")) < 300
        assert await replies.size_bytes(record.swap("state", "open", "done")) < 300
        assert await replies.size_bytes(record.set(n=1)) > WHOLE_BYTES
