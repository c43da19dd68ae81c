"""A server without room: no batch that is stored in part is acknowledged, or called not applied."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import limpet
from limpet.engines.nats import connection as nats_link
from limpet.engines.nats.connection import ApiError, Connection
from limpet.engines.nats.publisher import MaybeStored
from limpet.engines.nats.stream import ReplyLost
from limpet.errors import Ambiguous, Conflict, LimpetError, Unavailable
from tests.engines import unique
from tests.nats.support import server, stream_of, writer_of
from tests.servers import Nats, jetstream, nats

ROUNDS_MAX = 30
NO_ROOM = ApiError(10023, "insufficient resources")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nats]:
    """A server with little room. To a batch that it stores in part it may not answer at all."""
    monkeypatch.setattr(nats_link, "REQUEST_S", 1.0)
    with nats(lambda folder: jetstream(folder, "max_file_store: 2MB")) as running:
        yield running


async def fill(store: limpet.Store, size_bytes: int) -> dict[int, str]:
    """Commit batches of three puts until some are refused, and return the codes that their callers got."""
    codes: dict[int, str] = {}

    async def commit(number: int) -> None:
        draft = store.batch()
        for part in range(3):
            draft.put(f"{number}/{part}", "x" * size_bytes)
        try:
            await draft.commit()
            codes[number] = "acknowledged"
        except LimpetError as error:
            codes[number] = error.code

    while sum(code != "acknowledged" for code in codes.values()) < 3:
        await asyncio.gather(*(commit(len(codes) + number) for number in range(4)))
    return codes


@pytest.mark.slow
async def test_what_a_caller_is_told_of_a_batch_is_true(small: Nats) -> None:
    """The server checks its room message by message, and leaves off in the middle of a batch."""
    seen: Counter[tuple[str, int]] = Counter()
    for number in range(ROUNDS_MAX):
        async with limpet.open(small.url, namespace=f"n{number}", sweep=False) as store:
            codes = await fill(store, 6_000 + 777 * number)
            for batch, code in codes.items():
                found = [await store.entry(f"{batch}/{part}") for part in range(3)]
                seen[code, 3 - found.count(None)] += 1
            await stream_of(store).api(f"STREAM.DELETE.{stream_of(store).name}")
        if seen["ambiguous", 1] + seen["ambiguous", 2]:
            break

    assert {found for code, found in seen if code == "acknowledged"} == {3}
    assert {found for code, found in seen if code == "unavailable"} <= {0}
    assert {code for code, _ in seen} <= {"acknowledged", "unavailable", "ambiguous"}
    assert seen["ambiguous", 1] + seen["ambiguous", 2], "no batch was stored in part, so nothing was tested"


@pytest.mark.parametrize("syncs", [False, True])
async def test_a_write_of_one_key_is_stored_or_unavailable(small: Nats, syncs: bool) -> None:
    """Where each message is synced, writes of several callers go as one batch, which may be stored in part."""
    url = small.url + ("?sync=always" if syncs else "")
    async with limpet.open(url, namespace="one", sweep=False) as store:
        await store.put("before", 1)
        codes: dict[int, str] = {}

        async def put(number: int) -> None:
            try:
                await store.put(str(number), "x" * 5_000)
                codes[number] = "acknowledged"
            except LimpetError as error:
                codes[number] = error.code

        while set(codes.values()) <= {"acknowledged"}:
            await asyncio.gather(*(put(len(codes) + number) for number in range(40)))
        found = {entry.key async for entry in store.scan()}

        assert set(codes.values()) <= {"acknowledged", "unavailable", "ambiguous"}
        assert {str(number) for number, code in codes.items() if code == "acknowledged"} <= found
        assert not found & {str(number) for number, code in codes.items() if code == "unavailable"}
        with pytest.raises(Unavailable):
            await store.put("before", 2)
        assert await store.get("before") == 1


# What such a server leaves is made here on one with room: the first messages of a batch, and no others.


@contextmanager
def stored_in_part(store: limpet.Store, count: int, *, answers: bool = True) -> Iterator[None]:
    """Let the server store so many messages of a batch and no more, and reply that there was no room, or not at all."""
    publisher = writer_of(store).publisher
    send, room = publisher.send_batch, count

    async def send_part(connection: Connection, messages: list[Any]) -> int:
        nonlocal room
        if room:
            await send(connection, messages[:room])
            room = 0
        raise MaybeStored(NO_ROOM) if answers else ReplyLost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "send_batch", send_part)
        yield


@pytest.fixture
async def store() -> AsyncIterator[limpet.Store]:
    async with limpet.open(server(), namespace=unique(), sweep=False) as opened:
        await opened.add("a", 10)
        await opened.put("c", "old", ttl=60)
        yield opened


def draft_of(store: limpet.Store, request_id: str | None = "mine") -> Any:
    return (
        store.batch(request_id=request_id)
        .expect("a", limpet.equals(10))
        .add("a")
        .add("b")
        .delete("c")
        .put("d", {"n": 1}, ttl=60)
    )


async def held(store: limpet.Store) -> list[Any]:
    return [await store.get(key) for key in "abcd"]


BEFORE = [10, None, "old", None]
AFTER = [11, 1, None, {"n": 1}]
# The mark, and up to three of four changes.
COUNTS = range(1, 5)


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("count", COUNTS)
async def test_a_batch_that_was_stored_in_part_is_finished_when_it_is_repeated(
    store: limpet.Store, count: int, answers: bool
) -> None:
    with stored_in_part(store, count, answers=answers), pytest.raises(Ambiguous) as unknown:
        await draft_of(store).commit()
    assert unknown.value.request_id == "mine"
    assert ("stored a part" in str(unknown.value)) is answers
    assert await held(store) == [*AFTER[: count - 1], *BEFORE[count - 1 :]]
    with pytest.raises(Ambiguous, match="a part of the batch"):
        await store.outcome("mine")

    commit = await draft_of(store).commit()

    assert await held(store) == AFTER
    assert commit.revision == max(entry.revision for entry in commit.entries if entry is not None)
    assert list(commit.entries) == [await store.entry(key) for key in "abcd"]
    assert [entry is not None for entry in commit.ended] == [False, False, True, False]
    repeated = await draft_of(store).commit()
    assert repeated.replayed
    assert (repeated.revision, repeated.entries) == (commit.revision, commit.entries)


async def test_a_batch_of_which_only_the_receipt_is_missing_is_finished_at_once(store: limpet.Store) -> None:
    with stored_in_part(store, 5):
        commit = await draft_of(store).commit()

    assert await held(store) == AFTER
    assert list(commit.entries) == [await store.entry(key) for key in "abcd"]
    assert (await draft_of(store).commit()).replayed


async def test_a_batch_that_is_stored_in_part_twice_is_finished_all_the_same(store: limpet.Store) -> None:
    """There was room for two messages, and then for one more."""
    for count in (2, 1, 1):
        with stored_in_part(store, count), pytest.raises(Ambiguous):
            await draft_of(store).commit()

    await draft_of(store).commit()

    assert await held(store) == AFTER


@pytest.mark.parametrize("count", COUNTS)
async def test_a_batch_without_a_name_is_finished_by_the_store_itself(store: limpet.Store, count: int) -> None:
    """The store retries with the id that the engine gave the batch."""
    publisher = writer_of(store).publisher
    send, sent = publisher.send_batch, 0

    async def send_part_once(connection: Connection, messages: list[Any]) -> int:
        nonlocal sent
        sent += 1
        number = await send(connection, messages[:count] if sent == 1 else messages)
        if sent == 1:
            raise ReplyLost
        return number

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "send_batch", send_part_once)
        await draft_of(store, None).commit()

    assert await held(store) == AFTER


async def test_a_batch_of_which_nothing_was_stored_is_unavailable(store: limpet.Store) -> None:
    with stored_in_part(store, 0), pytest.raises(Unavailable, match="insufficient resources"):
        await draft_of(store).commit()

    assert await held(store) == BEFORE
    assert await store.outcome("mine") is None


@pytest.mark.parametrize("key", ["a", "d"])
async def test_a_batch_whose_keys_were_written_since_stays_unknown(store: limpet.Store, key: str) -> None:
    """It is unknown whether this key had been written, so nothing is written again."""
    with stored_in_part(store, 3), pytest.raises(Ambiguous):
        await draft_of(store).commit()
    async with limpet.open(server(), namespace=store.name, sweep=False) as other:
        await other.put(key, "theirs")
        before = await held(other)

        with pytest.raises(Ambiguous, match="has been written since"):
            await draft_of(store).commit()

        assert await held(other) == before


async def test_another_request_does_not_finish_a_batch_that_was_stored_in_part(store: limpet.Store) -> None:
    with stored_in_part(store, 3), pytest.raises(Ambiguous):
        await draft_of(store).commit()
    before = await held(store)

    with pytest.raises(Conflict) as refused:
        await store.batch(request_id="mine").put("d", 0).commit()

    assert refused.value.reason == "stale_request"
    assert await held(store) == before


async def test_a_taken_value_is_answered_when_it_is_repeated(store: limpet.Store) -> None:
    with stored_in_part(store, 1), pytest.raises(Ambiguous):
        await store.take("c", request_id="mine")

    assert await store.take("c", request_id="mine") == "old"
    assert await store.get("c") is None


async def test_a_taken_value_is_found_in_the_end_of_its_key(store: limpet.Store) -> None:
    """Only the receipt is missing, and the message of the end has the value."""
    with stored_in_part(store, 2):
        assert await store.take("c", request_id="mine") == "old"

    assert await store.take("c", request_id="mine") == "old"
    assert await store.get("c") is None


async def test_an_expiry_that_was_stored_without_its_put_is_completed(store: limpet.Store) -> None:
    """Writing an expired key records the expiry first, and the server had room for that alone."""
    await store.put("short", 1, ttl=0.05)
    await asyncio.sleep(0.1)
    draft = store.batch(request_id="mine").put("short", 2).put("beside", 1)
    with stored_in_part(store, 2), pytest.raises(Ambiguous):
        await draft.commit()

    await store.batch(request_id="mine").put("short", 2).put("beside", 1).commit()

    assert [await store.get(key) for key in ("short", "beside")] == [2, 1]
    assert [event.op async for event in store.history("short")] == ["put", "expire", "put"]
