"""A connection that fails at the worst moment: each write happens once, and its caller gets the true result."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import limpet
from limpet.engines.nats import connection as nats_connection
from limpet.errors import Ambiguous, Unavailable
from tests.engines import unique
from tests.faults import VERBS, prepared, seen
from tests.nats.support import engine_of, proxy_of, server
from tests.proxy import Fault, Proxy


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with proxy_of(server()) as running:
        yield running


@pytest.mark.parametrize("fault", ["lose", "cut"])
@pytest.mark.parametrize("verb", VERBS)
async def test_a_line_that_breaks_at_a_write_leaves_it_done_once(proxy: Proxy, verb: str, fault: Fault) -> None:
    """An answer that is lost, and a request that never arrives, look alike to a client."""
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        expected = await seen(store, await VERBS[verb](store, await prepared(store)), ranked=True)
        broken = store.namespace(unique())
        lock = await prepared(broken)
        proxy.fault(fault)

        result = await VERBS[verb](broken, lock)

        assert proxy.is_done
        assert await seen(broken, result, ranked=True) == expected


@pytest.mark.parametrize("verb", VERBS)
async def test_a_request_that_arrives_after_its_retry_was_answered_changes_nothing(proxy: Proxy, verb: str) -> None:
    """The network delayed it, and the store retried and went on. It must not be applied when it arrives."""
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        expected = await seen(store, await VERBS[verb](store, await prepared(store)), ranked=True)
        late = store.namespace(unique())
        lock = await prepared(late)
        proxy.fault("keep")

        result = await VERBS[verb](late, lock)
        await asyncio.to_thread(proxy.deliver)

        assert await seen(late, result, ranked=True) == expected


@pytest.mark.parametrize(
    ("verb", "expected"),
    [("add", 8), ("put", "new"), ("delete", True), ("touch", None), ("set", None), ("swap", True)],
)
async def test_a_lost_answer_is_found_though_others_have_written_since(
    proxy: Proxy, verb: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key carries the requests that wrote it, so the result of a write is known after others wrote the key too."""
    async with (
        limpet.open(proxy.url, namespace=unique(), sweep=False) as store,
        limpet.open(server(), namespace=store.name, sweep=False) as other,
    ):
        lock = await prepared(store)
        key = {"add": "count", "put": "plain", "delete": "plain", "touch": "plain"}.get(verb, "job")
        first = await other.entry(key)
        wait = asyncio.Event()
        look = store._session.engine.connection  # type: ignore[attr-defined]

        async def link_when_told() -> Any:
            await wait.wait()
            return await look()

        proxy.fault("lose")
        doing: asyncio.Future[Any] = asyncio.ensure_future(VERBS[verb](store, lock))
        while not proxy.is_done:
            monkeypatch.setattr(store._session.engine, "connection", link_when_told)
            await asyncio.sleep(0)
        # It has done its part when it has passed the request on. The server does its own in a moment.
        while (await other.entry(key)) == first:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.01)
        before = await _version(other, key)
        for number in range(20):
            await (other.record(key).set(other=number) if key == "job" else other.put(key, number))
        wait.set()

        result = await doing

        found = result.value if isinstance(result, limpet.Entry) and result.stored is not None else result
        assert expected is None or found == expected
        if isinstance(result, limpet.Entry):
            assert result.version == before
        assert await _version(other, key) == (20 if verb == "delete" else (before or 0) + 20)


async def _version(store: limpet.Store, key: str) -> int | None:
    entry = await store.entry(key)
    return None if entry is None else entry.version


async def test_ambiguous_is_raised_when_the_server_stays_away(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        await store.put("key", 0)
        engine = engine_of(store)
        proxy.fault("lose")

        async def away() -> Any:
            raise OSError("no server is there")

        batch = store.batch().put("key", 1)._make_batch()
        with monkeypatch.context() as patch:
            writing = asyncio.ensure_future(engine.commit(store.name, batch))
            await asyncio.sleep(0)
            patch.setattr(engine, "connection", away)
            with pytest.raises(Ambiguous) as unknown:
                await writing

        since = unknown.value.since
        again = msgspec.structs.replace(batch, request_id=unknown.value.request_id, retry_since=since)
        commit = await engine.commit(store.name, again)
        assert isinstance(commit, limpet.Commit)
        assert commit.replayed
        assert commit.entries[0] is not None
        assert commit.entries[0].version == 2
        assert await _version(store, "key") == 2


async def test_a_server_that_does_not_answer_is_unavailable(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call hangs for ever: a request without a reply fails after its time."""
    monkeypatch.setattr(nats_connection, "REQUEST_S", 0.3)
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        await store.put("key", 0)
        connection = await engine_of(store).connection()
        monkeypatch.setattr(connection, "_flush", connection._out.clear)

        with pytest.raises(Unavailable):
            await engine_of(store).read(store.name, ["key"])


@pytest.mark.parametrize("several", [False, True])
async def test_an_entry_that_comes_after_its_moment_is_swept(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its alarm was there long before it, and a sweeper of another process found nothing to expire."""
    async with (
        limpet.open(server(), namespace=unique(), sweep=False) as store,
        limpet.open(server(), namespace=store.name, sweep=False) as other,
    ):
        await store.put("other", 1)
        connection = await engine_of(store).connection()
        send, kept = connection.send, list[tuple[Any, ...]]()

        def send_or_keep(subject: str, *rest: bytes) -> None:
            # All but the alarms, which have no headers.
            if len(rest) > 1 and rest[1]:
                kept.append((subject, *rest))
            else:
                send(subject, *rest)

        monkeypatch.setattr(connection, "send", send_or_keep)
        draft = store.batch().put("short", 1, ttl=0.01)
        putting = asyncio.ensure_future((draft.put("shorter", 2, ttl=0.005) if several else draft).commit())
        async with asyncio.timeout(120):
            # In a batch there are a mark and a receipt as well.
            while len(kept) < (4 if several else 1):  # noqa: ASYNC110 - no event says when it is sent
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert await other.sweep() == 0
        monkeypatch.undo()
        for each in kept:
            send(*each)
        await putting

        assert (await other.status()).keys == 2 + several
        assert await other.sweep() == 1 + several
        assert (await other.status()).keys == 1
