"""A write whose answer was lost is found again, however many others have written the key since."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

import limpet
from limpet.codec import encode
from limpet.engines.nats.connection import NoResponders
from limpet.engines.nats.messages import BASE, EntryId, Message, encode_headers
from limpet.engines.nats.stream import ReplyLost
from limpet.errors import Ambiguous
from limpet.model import Add, Batch, Commit, Entry, Put
from tests.engines import unique
from tests.nats.support import engine_of, proxy_of, server, stream_of, writer_of
from tests.proxy import Proxy


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with proxy_of(server()) as running:
        yield running


@pytest.fixture
async def stores(proxy: Proxy) -> AsyncIterator[tuple[limpet.Store, limpet.Store]]:
    """A store on a connection that may break, and another store on the same namespace."""
    async with (
        limpet.open(proxy.url, namespace=unique(), sweep=False) as store,
        limpet.open(server(), namespace=store.name, sweep=False) as other,
    ):
        yield store, other


@asynccontextmanager
async def lose_reply(
    proxy: Proxy, stores: tuple[limpet.Store, limpet.Store], call: Callable[[], Awaitable[Any]], key: str = "hot"
) -> AsyncIterator[asyncio.Future[Any]]:
    """A call that was applied and whose reply is lost. It cannot read its result before this context ends."""
    store, other = stores
    engine = engine_of(store)
    wait, connect = asyncio.Event(), engine.connection
    before = await other.entry(key)

    async def connect_when_allowed() -> Any:
        await wait.wait()
        return await connect()

    proxy.fault("lose")
    doing = asyncio.ensure_future(call())
    try:
        with pytest.MonkeyPatch.context() as patch:
            async with asyncio.timeout(120):
                while not proxy.is_done:  # noqa: ASYNC110 - it runs on a thread of its own
                    await asyncio.sleep(0)
                patch.setattr(engine, "connection", connect_when_allowed)
                # It has done its part when it has passed the request on. The server does its own in a moment.
                while (await other.entry(key)) == before:  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.01)
            yield doing
    finally:
        wait.set()


async def crowd(store: limpet.Store, count: int, key: str = "hot") -> None:
    """Add to a key under so many names, as that many processes would that come and go."""
    for number in range(count):
        added = await engine_of(store).commit(store.name, Batch((), (Add(key, 1),), request_id=f"passer-by/{number}"))
        assert isinstance(added, limpet.Commit)


async def test_a_write_is_found_behind_named_and_unnamed_ones(
    proxy: Proxy, stores: tuple[limpet.Store, limpet.Store]
) -> None:
    """Some callers name their requests and some do not, all on one key, and one of them reads its result late."""
    store, other = stores
    await store.add("hot", 1)

    async with lose_reply(proxy, stores, lambda: store.add("hot", 1000)) as doing:
        for number in range(64):
            await other.add("hot", 1, request_id=f"theirs/{number}")
            await other.add("hot", 1)

    assert await doing == 1001
    assert await other.get("hot") == 1001 + 128


VERBS: dict[str, Callable[[limpet.Store], Awaitable[Any]]] = {
    "add": lambda store: store.add("hot", 1000),
    "put": lambda store: store.put("hot", 7, meta={"by": "me"}),
    "touch": lambda store: store.touch("hot", 60),
    "delete": lambda store: store.delete("hot"),
}


@pytest.mark.parametrize("others", [0, 3, 300])
@pytest.mark.parametrize("verb", VERBS)
async def test_a_write_is_found_in_the_messages_of_its_key(
    proxy: Proxy, stores: tuple[limpet.Store, limpet.Store], verb: str, others: int
) -> None:
    """Its result is the first one, however many have written the key since."""
    store, other = stores
    await crowd(other, 1)
    before = await store.entry("hot")
    assert before is not None

    async with lose_reply(proxy, stores, lambda: VERBS[verb](store)) as doing:
        made = await other.entry("hot")
        await crowd(other, others)

    answer, after = await doing, await other.entry("hot")
    match verb:
        case "add":
            assert (answer, after and after.value) == (before.value + 1000, before.value + 1000 + others)
        case "delete":
            assert (answer, after and after.version) == (True, others or None)
        case _:
            assert made is not None
            assert answer == made
            assert after is not None
            assert after.version == made.version + others


async def test_a_write_that_is_applied_after_it_was_looked_for_is_not_doubled(
    proxy: Proxy, stores: tuple[limpet.Store, limpet.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new leader answered the look before it had applied all that it took over: the second request came too late."""
    store, other = stores
    await store.add("hot", 1)
    stream = stream_of(store)
    look = stream.last
    old = await look(("data", "hot"))
    looks = 0

    async def look_too_early(entry_id: EntryId) -> Message | None:
        nonlocal looks
        found = await look(entry_id)
        if entry_id != ("data", "hot"):
            return found
        looks += 1
        return old if looks == 1 else found

    monkeypatch.setattr(stream, "last", look_too_early)
    async with lose_reply(proxy, stores, lambda: store.add("hot", 1000)) as doing:
        await asyncio.sleep(0)

    assert await doing == 1001
    assert looks == 2
    assert await other.get("hot") == 1001


async def test_a_second_request_without_a_responder_leaves_the_first_unknown(
    proxy: Proxy, stores: tuple[limpet.Store, limpet.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was not stored yet when the key was read. It may still be, so the result is not "not applied"."""
    store, other = stores
    await store.add("hot", 1)
    stream, publisher = stream_of(store), writer_of(store).publisher
    look, send = stream.last, publisher.send_one
    old = await look(("data", "hot"))
    sent = 0

    async def look_too_early(entry_id: EntryId) -> Message | None:
        return old if sent < 2 else await look(entry_id)

    async def send_once(*args: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent == 2:
            raise NoResponders("503")
        return await send(*args)

    monkeypatch.setattr(stream, "last", look_too_early)
    monkeypatch.setattr(publisher, "send_one", send_once)
    async with lose_reply(proxy, stores, lambda: store.add("hot", 1000)) as doing:
        await asyncio.sleep(0)

    assert await doing == 1001
    assert sent == 2
    assert await other.get("hot") == 1001


@pytest.mark.parametrize("several", [False, True])
async def test_a_lost_answer_of_the_last_attempt_is_unknown(
    proxy: Proxy, stores: tuple[limpet.Store, limpet.Store], several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without another read it must not be reported as not applied: the caller would send it as a new request."""
    store, other = stores
    await store.add("hot", 1)
    draft = store.batch().add("hot", 1000)
    monkeypatch.setattr("limpet.engines.nats.writer.LOST_MAX", 1)
    proxy.fault("lose")

    await (draft.put("beside", 1) if several else draft).commit()

    assert proxy.is_done
    assert await other.get("hot") == 1001


@pytest.mark.parametrize("is_purged", [False, True])
@pytest.mark.parametrize("several", [False, True])
async def test_a_late_retry_is_answered_or_unknown(
    proxy: Proxy,
    stores: tuple[limpet.Store, limpet.Store],
    several: bool,
    is_purged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine slept for an hour between a request and its retry, and the server has dropped the receipt.

    While the keys have all their messages since, the request is among them; otherwise it cannot be known.
    """
    store, other = stores
    await store.add("hot", 1)
    stream, engine = stream_of(store), engine_of(store)
    writes = (Add("hot", 1000), Put("beside", encode(1))) if several else (Add("hot", 1000),)

    async def away() -> Any:
        raise OSError("no server is there")

    proxy.fault("lose")
    with monkeypatch.context() as patch:
        writing = asyncio.ensure_future(engine.commit(store.name, Batch((), writes)))
        while not proxy.is_done:  # noqa: ASYNC110 - it runs on a thread of its own
            await asyncio.sleep(0)
        patch.setattr(engine, "connection", away)
        with pytest.raises(Ambiguous) as unknown:
            await writing
    name, since = unknown.value.request_id, unknown.value.since
    assert name is not None
    retry = Batch((), writes, request_id=name, retry_since=since)
    await other.add("hot", 1)
    now_ms = stream.now_ms
    monkeypatch.setattr(stream, "now_ms", lambda: now_ms() + 3_600_000)
    monkeypatch.setattr(stream_of(other), "now_ms", lambda: now_ms() + 3_600_000)
    await other.add("hot", 1)
    await other.put("beside", 2)
    if (receipt := await stream.last(("receipt", name))) is not None:
        await stream.purge(stream.subjects.of(("receipt", name)), receipt.seq)
    if is_purged:
        for key in ("hot", "beside"):
            last = await stream.last(("data", key))
            assert last is not None
            await stream.purge(stream.subjects.of(("data", key)), last.seq - 1)

    for _ in range(2):
        if is_purged:
            with pytest.raises(Ambiguous):
                await engine.commit(store.name, retry)
        else:
            answer = await engine.commit(store.name, retry)
            assert isinstance(answer, limpet.Commit)
            assert answer.replayed
            assert answer.entries[0] is not None
            assert answer.entries[0].value == 1001

    assert await other.get("hot") == 1003


async def test_a_write_to_a_key_whose_old_messages_are_gone_is_found(
    proxy: Proxy, stores: tuple[limpet.Store, limpet.Store]
) -> None:
    """The key has lost messages of long ago. That of just now is not among them."""
    store, other = stores
    await crowd(other, 5)
    stream = stream_of(other)
    last = await stream.last(("data", "hot"))
    assert last is not None
    await stream.purge(stream.subjects.of(("data", "hot")), last.seq - 1)

    async with lose_reply(proxy, stores, lambda: store.add("hot", 1000)) as doing:
        await crowd(other, 3)

    assert await doing == 1005
    assert await other.get("hot") == 1008


async def test_a_retry_after_the_mark_of_its_batch_has_ended_searches_the_log(
    stores: tuple[limpet.Store, limpet.Store],
) -> None:
    """A mark that the server still has, but that has ended by our time, is no receipt: it was read as one."""
    store, _ = stores
    since, now_ms = (await store.put("a", 0)).revision, stream_of(store).now_ms()
    ended = Entry("half", None, 1, BASE, BASE, now_ms - 2, now_ms - 2, now_ms - 1, b'"00"')
    headers = encode_headers(Message(BASE, "put", ended, BASE, now_ms - 2, None), "-", 0)
    connection = await engine_of(store).connection()
    await connection.request(stream_of(store).subjects.of(("receipt", "half")), b"", headers)

    batch = Batch((), (Put("a", b"1"), Put("b", b"1")), request_id="half", retry_since=since)
    outcome = await writer_of(store).commit(batch)

    assert isinstance(outcome, Commit)
    assert not outcome.replayed
    assert await store.get("b") == 1


@pytest.mark.parametrize("several", [False, True])
async def test_a_request_whose_reply_was_lost_is_not_applied_after_its_retry(
    stores: tuple[limpet.Store, limpet.Store], several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller gave it up and retried it through another process, while this process still tried."""
    store, other = stores
    await store.add("hot", 1)
    writes = (Add("hot", 1000), Put("beside", encode(1))) if several else (Add("hot", 1000),)

    async def lose_once(*args: Any) -> Any:
        monkeypatch.undo()
        await writer_of(other)._supersede("mine")
        raise ReplyLost

    await other.get("hot")  # Its writer is there from now on.
    monkeypatch.setattr(writer_of(store).publisher, "send_all" if several else "send_one", lose_once)
    with pytest.raises(Ambiguous):
        await engine_of(store).commit(store.name, Batch((), writes, request_id="mine"))

    assert await other.get("hot") == 1


async def test_a_retry_finds_its_receipt_after_it_has_expired(stores: tuple[limpet.Store, limpet.Store]) -> None:
    """The server keeps a receipt a little longer. It stands for the messages, which were dropped meanwhile."""
    store, _ = stores
    since, stream, engine = (await store.put("hot", 1)).revision, stream_of(store), engine_of(store)
    batch = Batch((), (Add("hot", 1000), Put("beside", encode(1))), "mine", digest=b"1", receipt_ms=20)
    first = await engine.commit(store.name, batch)
    await asyncio.sleep(0.1)
    await store.add("hot", 1)
    last = await stream.last(("data", "hot"))
    assert last is not None
    await stream.purge(stream.subjects.of(("data", "hot")), last.seq - 1)

    again = await engine.commit(store.name, msgspec.structs.replace(batch, retry_since=since))

    assert isinstance(first, Commit)
    assert again == msgspec.structs.replace(first, replayed=True)
    assert await store.get("hot") == 1002
