"""A commit of several keys is decided at one moment, although their messages are read one by one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import pytest

import limpet
from limpet.engines.nats.messages import EntryId, Message
from limpet.errors import Conflict, TypeMismatch
from tests.engines import unique
from tests.nats.support import server, stream_of


async def check(store: limpet.Store, seen: limpet.Entry) -> None:
    """A batch that is refused by the first key, or by none."""
    await store.batch().expect("a", seen).expect("b", limpet.equals(0)).commit()


async def add(store: limpet.Store, seen: limpet.Entry) -> None:
    """The same, where a write is refused and not a guard."""
    await store.batch().expect("a", seen).add("b", 1).commit()


@pytest.mark.parametrize(("call", "after"), [(check, 1), (add, "no number")])
async def test_a_refusal_is_of_one_moment(
    call: Callable[[limpet.Store, limpet.Entry], Awaitable[None]], after: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process wrote both keys between the reads of the first and of the second.

    The refusal named the second key, as if the first had still been as expected.
    """
    async with (
        limpet.open(server(), namespace=unique(), sweep=False) as store,
        limpet.open(server(), namespace=store.name, sweep=False) as other,
    ):
        seen = await store.put("a", 0)
        await store.put("b", 0)
        stream = stream_of(store)
        load_all = stream.load_all

        async def load_in_two_moments(entry_ids: Iterable[EntryId]) -> dict[EntryId, Message | None]:
            first, *rest = sorted(entry_ids, key=lambda entry_id: entry_id != ("data", "a"))
            found = await load_all([first])
            monkeypatch.setattr(stream, "load_all", load_all)
            await other.batch().put("a", 1).put("b", after).commit()
            return found | await load_all(rest)

        monkeypatch.setattr(stream, "load_all", load_in_two_moments)
        with pytest.raises((Conflict, TypeMismatch)) as caught:
            await call(store, seen)

        assert isinstance(caught.value, Conflict)
        assert caught.value.key == "a"
