"""A connection that fails at every possible moment: each write happens once, and its caller gets the true result."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import limpet
from limpet.engines.sql_indexes import quoted
from limpet.errors import Ambiguous, Unavailable
from limpet.model import Window
from tests.faults import VERBS, prepared, seen
from tests.postgres.proxy import Fault, Proxy
from tests.postgres.support import Holder, connected, contend, engine_of, log_of, new_schema, server, until, url_of

FUNCTION = "limpet_(put|put_one|apply)\\("
# Every other verb is one request, if this process knows the entries.
READS_FIRST = ["update"]
# A verb with a request id of its caller leaves a receipt, by which it is recognised when it comes late.
WITHOUT_RECEIPT = [verb for verb in VERBS if verb not in READS_FIRST and "request id" not in verb]
WITH_RECEIPT = [verb for verb in VERBS if "request id" in verb]


@pytest.mark.parametrize("fault", ["lose", "cut"])
@pytest.mark.parametrize("verb", VERBS)
async def test_a_connection_that_breaks_at_any_request_of_a_write_leaves_it_done_once(
    schema: str, proxy: Proxy, verb: str, fault: Fault
) -> None:
    """To a client, a reply that is lost and a request that never arrives are the same.

    The write is done on a working connection, to record its requests and its result. Then it is done again for each of
    these requests, and the connection breaks there.
    """
    async with limpet.open(url_of(schema, proxy.url), namespace="sound", sweep=False) as store:
        lock = await prepared(store)
        proxy.requests.clear()
        result = await VERBS[verb](store, lock)
        requests = [*proxy.requests]
        expected = await seen(store, result)
        assert re.search(FUNCTION, requests[-1]) is not None
        assert len(requests) == 1 + (verb in READS_FIRST)

        for nth in range(1, len(requests) + 1):
            broken = store.namespace(f"broken-{nth}")
            lock = await prepared(broken)
            proxy.fault(fault, nth=nth)

            result = await VERBS[verb](broken, lock)

            assert proxy.is_done
            assert await seen(broken, result) == expected, f"the connection broke at {requests[nth - 1]}"


@pytest.mark.parametrize("verb", WITHOUT_RECEIPT)
async def test_a_request_that_arrives_after_its_retry_was_answered_is_refused(
    schema: str, proxy: Proxy, verb: str
) -> None:
    """The network delayed it, and the store retried and went on. It must not be applied when it arrives."""
    async with limpet.open(url_of(schema, proxy.url), namespace="sound", sweep=False) as store:
        lock = await prepared(store)
        expected = await seen(store, await VERBS[verb](store, lock))
        late = store.namespace("late")
        lock = await prepared(late)
        proxy.fault("keep", FUNCTION)

        result = await VERBS[verb](late, lock)
        answer = await asyncio.to_thread(proxy.deliver)

        assert answer == "limpet: this request was superseded by its own retry"
        assert await seen(late, result) == expected


@pytest.mark.parametrize("verb", WITH_RECEIPT)
async def test_a_request_that_arrives_after_its_retry_left_a_receipt_changes_nothing(
    schema: str, proxy: Proxy, verb: str
) -> None:
    """It expects that there is no receipt yet, so that its reply is only what is there."""
    async with limpet.open(url_of(schema, proxy.url), namespace="sound", sweep=False) as store:
        lock = await prepared(store)
        expected = await seen(store, await VERBS[verb](store, lock))
        late = store.namespace("late")
        lock = await prepared(late)
        proxy.fault("keep", FUNCTION)

        result = await VERBS[verb](late, lock)

        assert await asyncio.to_thread(proxy.deliver) is None
        assert await seen(late, result) == expected


async def test_a_late_group_is_refused_whole(schema: str, proxy: Proxy) -> None:
    """All its members were retried, each by itself."""
    async with limpet.open(url_of(schema, proxy.url), sweep=False) as store:
        await store.put("first", 0)
        proxy.fault("keep", FUNCTION)

        entries = await asyncio.gather(*(store.put(f"key/{number}", number) for number in range(20)))
        answer = await asyncio.to_thread(proxy.deliver)

        assert answer is not None
        assert "superseded" in answer
        assert sorted(entry.revision for entry in entries) == [*range(2, 22)]
        assert [change.revision for change in await log_of(store)] == [*range(1, 22)]


@pytest.mark.parametrize("fault", ["lose", "cut"])
@pytest.mark.parametrize("function", ["limpet_put\\(", "limpet_apply\\("])
async def test_a_connection_that_breaks_at_either_part_of_a_group_leaves_each_put_done_once(
    schema: str, proxy: Proxy, function: str, fault: Fault
) -> None:
    """One function wrote a part of the group, and left out a put for the other: that put alone is in doubt then."""
    async with limpet.open(url_of(schema, proxy.url), sweep=False) as store:
        kept = await store.put("kept", 0)
        await store.put("ended", 0, ttl=0.001)
        await asyncio.sleep(0.01)
        proxy.fault(fault, function)

        entries = await asyncio.gather(
            store.put("kept", 1, expect=kept), store.create("ended", 1), store.create("made", 1), store.put("plain", 1)
        )

        assert proxy.is_done
        assert [(entry.key, entry.version) for entry in entries] == [
            ("kept", 2),
            ("ended", 1),
            ("made", 1),
            ("plain", 1),
        ]
        log = await log_of(store)
        assert sorted((change.op, change.key) for change in log) == [
            ("expire", "ended"),
            *(("put", key) for key in ("ended", "ended", "kept", "kept", "made", "plain")),
        ]
        assert [change.revision for change in log] == [*range(1, 8)]
        last = {change.key: change.revision for change in log}
        assert last == {entry.key: entry.revision for entry in entries}


async def test_a_late_group_with_guards_is_refused_whole(schema: str, proxy: Proxy) -> None:
    """Its expected revisions may well be there again; it must not be applied all the same."""
    async with limpet.open(url_of(schema, proxy.url), sweep=False) as store:
        await store.put("first", 0)
        proxy.fault("keep", FUNCTION)

        await asyncio.gather(*(store.create(f"key/{number}", number) for number in range(20)))
        for number in range(20):
            await store.delete(f"key/{number}")
        answer = await asyncio.to_thread(proxy.deliver)

        assert answer == "limpet: this request was superseded by its own retry"
        assert [entry.key async for entry in store.scan()] == ["first"]


async def test_a_commit_that_arrives_while_its_retry_waits_is_found_by_it(schema: str, proxy: Proxy) -> None:
    """The retry waits for the namespace, which the first attempt still holds, and then finds it done."""
    async with limpet.open(url_of(schema, proxy.url), sweep=False) as store, connected() as connection:
        await store.add("count", 5)
        contend(engine_of(store), store.name, "count")
        proxy.fault("keep", "COMMIT;")
        adding = asyncio.create_task(store.add("count", 3))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE $1"
        await until(lambda: connection.fetchval(waits, f"%{quoted(schema)}.limpet_apply%"))

        assert await asyncio.to_thread(proxy.deliver) is None

        assert await adding == 8
        assert [change.revision for change in await log_of(store)] == [1, 2]


@pytest.mark.slow
async def test_a_commit_that_never_arrives_is_given_up_by_the_server(schema: str, proxy: Proxy) -> None:
    """Its transaction is ended when it has been idle for five seconds; then the retry gets its turn."""
    async with limpet.open(url_of(schema, proxy.url), sweep=False) as store:
        await store.add("count", 5)
        contend(engine_of(store), store.name, "count")
        proxy.fault("keep", "COMMIT;")

        assert await store.add("count", 3) == 8
        answer = await asyncio.to_thread(proxy.deliver)

        assert answer == "terminating connection due to idle-in-transaction timeout"
        assert [change.revision for change in await log_of(store)] == [1, 2]


@pytest.mark.slow
async def test_a_client_that_vanishes_before_it_has_written_is_given_up_by_the_server(
    schema: str, proxy: Proxy
) -> None:
    """It holds the namespace, and has not sent its writes yet.

    On a connection that has done this before: a driver that has not prepared a statement yet waits in the middle of
    it, which does not count as an idle transaction.
    """
    async with limpet.open(url_of(schema, proxy.url), sweep=False) as store:
        await store.put("key", 1)
        contend(engine_of(store), store.name, "count")
        assert await store.add("count", 0) == 0
        # The first call reads.
        proxy.fault("keep", "limpet_apply", nth=2)

        adding = asyncio.create_task(store.add("count", 3))
        await asyncio.wait([adding], timeout=20)
        is_given_up = adding.done()
        # It is delivered in any case, so that a failing test ends.
        answer = await asyncio.to_thread(proxy.deliver)

        assert await adding == 3
        assert is_given_up, "the namespace was held until the client came back"
        assert answer is not None
        assert [change.revision for change in await log_of(store)] == [1, 2, 3]


@pytest.mark.slow
async def test_a_client_that_vanishes_while_it_trims_is_given_up_by_the_server(schema: str, proxy: Proxy) -> None:
    """It holds the namespace as a writer does."""
    window = Window(changes=1, age_ms_min=0)
    async with (
        limpet.open(url_of(schema), sweep=False) as store,
        limpet.open(url_of(schema, proxy.url), window=window, sweep=False) as trimmer,
    ):
        for number in range(5):
            await store.put("key", number)
        assert await trimmer.trim() == 4
        await store.put("key", 5)
        proxy.fault("keep", "COMMIT;")
        trimming = asyncio.create_task(trimmer.trim())
        await asyncio.to_thread(proxy.await_fault)

        writing = asyncio.create_task(store.put("key", 6))
        await asyncio.wait([writing], timeout=20)
        is_given_up = writing.done()
        await asyncio.to_thread(proxy.deliver)

        assert (await writing).revision == 7
        assert is_given_up, "the namespace was held until the client came back"
        with contextlib.suppress(Unavailable):
            await trimming
        assert (await store.status()).log_changes <= 3


async def test_a_slow_connection_delays_its_own_namespace_alone(schema: str, proxy: Proxy) -> None:
    """Reads and other namespaces use other connections."""
    async with limpet.open(url_of(schema, proxy.url), sweep=False) as store:
        await store.put("key", 1)
        proxy.fault("delay", FUNCTION)
        slow = asyncio.create_task(store.put("key", 2))
        await asyncio.to_thread(proxy.await_fault)

        assert await store.get("key") == 1
        await store.namespace("another").put("key", 3)
        assert not slow.done()

        proxy.release()
        assert (await slow).version == 2


@pytest.mark.parametrize(
    ("request_text", "applied"),
    [(text, applied) for text in ("limpet_put_one", "limpet_apply", "COMMIT;") for applied in (True, False)],
)
async def test_ambiguous_is_raised_when_the_server_stays_away(
    schema: str, proxy: Proxy, request_text: str, applied: bool
) -> None:
    """`outcome` reports whether it was applied, as soon as the server is back."""
    async with limpet.open(url_of(schema, proxy.url), sweep=False) as store:
        await store.add("count", 5)
        if request_text == "COMMIT;":
            contend(engine_of(store), store.name, "key")
        proxy.fault("lose" if applied else "cut", request_text, stays_down=True)

        with pytest.raises(Ambiguous) as unknown:
            await (store.put("key", "value") if request_text == "limpet_put_one" else store.add("key", 1))
        proxy.resume()
        assert unknown.value.request_id is not None
        commit = await store.outcome(unknown.value.request_id)

        assert (commit is not None) == applied
        assert (await store.get("key") is not None) == applied
        if commit is not None:
            assert (commit.revision, commit.replayed) == (2, True)


@pytest.mark.parametrize("request_text", ["limpet_apply", "COMMIT;"])
async def test_the_same_call_under_its_request_id_settles_an_ambiguous_one(
    schema: str, proxy: Proxy, request_text: str
) -> None:
    async with limpet.open(url_of(schema, proxy.url), sweep=False) as store:
        await store.add("count", 5)
        if request_text == "COMMIT;":
            contend(engine_of(store), store.name, "count")
        proxy.fault("lose", request_text, stays_down=True)
        with pytest.raises(Ambiguous):
            await store.add("count", 3, request_id="mine")
        proxy.resume()

        assert await store.add("count", 3, request_id="mine") == 8
        assert await store.get("count") == 8


async def test_a_server_that_is_away_is_unavailable_and_comes_back(schema: str, proxy: Proxy) -> None:
    """Nothing could be sent, so nothing is unknown; and the store need not be opened again."""
    async with limpet.open(url_of(schema, proxy.url), sweep=False) as store:
        await store.put("key", 1)
        await asyncio.to_thread(proxy.stop)

        with pytest.raises(Unavailable):
            await store.get("key")
        with pytest.raises(Unavailable):
            await store.put("key", 2)
        with pytest.raises(Unavailable):
            await store.add("count")
        proxy.resume()

        assert await store.get("key") == 1
        assert (await store.put("key", 3)).version == 2
        assert (await store.status()).revision == 2


READS: dict[str, Callable[[limpet.Store], Awaitable[Any]]] = {
    "get": lambda store: store.get("key"),
    "entry": lambda store: store.entry("key"),
    "keys": lambda store: store.keys(),
    "outcome": lambda store: store.outcome("mine"),
    "locks": lambda store: store.locks(),
}


@pytest.mark.parametrize("verb", READS)
@pytest.mark.parametrize("fault", ["lose", "cut"])
async def test_a_read_is_sent_again_when_its_connection_breaks(
    schema: str, proxy: Proxy, verb: str, fault: Fault
) -> None:
    async with limpet.open(url_of(schema, proxy.url), sweep=False) as store:
        await store.put("key", 1, request_id="mine")
        expected = await READS[verb](store)
        proxy.fault(fault)

        assert await READS[verb](store) == expected
        assert proxy.is_done


async def test_the_error_of_a_broken_connection_does_not_show_the_url_s_secrets(schema: str, proxy: Proxy) -> None:
    url = url_of(schema, proxy.url).replace("postgres@", "postgres:hush-hush@")
    async with limpet.open(url, sweep=False) as store:
        await store.put("key", 1)
        proxy.fault("lose", FUNCTION, stays_down=True)
        with pytest.raises(Ambiguous) as unknown:
            await store.put("key", "private matter")
        with pytest.raises(Unavailable) as away:
            await store.get("key")
        proxy.resume()

    for error in (unknown, away):
        assert "hush" not in repr(error.value) + str(error.value) + repr(error.value.__cause__)
        assert "private" not in repr(error.value) + str(error.value)
        assert "127.0.0.1" in str(error.value)


@pytest.mark.parametrize("setting", ["lock_timeout", "statement_timeout"])
async def test_a_timeout_of_the_server_is_unavailable_and_changes_nothing(schema: str, setting: str) -> None:
    """Such a statement was rolled back by the server, so nothing about it is unknown."""
    role = new_schema()
    async with connected() as connection, connected() as other:
        await connection.execute(f"CREATE ROLE {role} SUPERUSER LOGIN; ALTER ROLE {role} SET {setting} = '30ms'")
        holder = Holder(connection, schema)
        try:
            async with limpet.open(url_of(schema), sweep=False):
                pass
            async with limpet.open(url_of(schema, server().replace("postgres@", f"{role}@")), sweep=False) as store:
                await holder.hold("default")
                with pytest.raises(Unavailable):
                    await store.put("key", 1)
                with pytest.raises(Unavailable):
                    await store.add("count", 1)
                assert await store.get("key") is None
                await holder.release()

                assert (await store.put("key", 2)).revision == 1
        finally:
            await other.execute(f"DROP ROLE {role}")
