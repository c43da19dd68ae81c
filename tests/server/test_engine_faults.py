"""A connection that fails at the worst moment: each write happens once, and its caller learns what happened."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import limpet
from limpet.conformance.support import next_event
from limpet.errors import Ambiguous, Unavailable
from limpet.model import Batch, Commit, Put, Refusal
from tests.engines import unique, url_of
from tests.faults import VERBS, prepared, seen
from tests.proxy import Fault, HttpProxy
from tests.server.engine_support import Behind, running
from tests.servers import LimpetServer, served


@pytest.fixture
def proxy() -> Iterator[HttpProxy]:
    with HttpProxy(f"{os.environ['LIMPET_TEST_HTTP']}/file-faults") as running:
        yield running


@pytest.mark.parametrize("fault", ["lose", "cut"])
@pytest.mark.parametrize("verb", VERBS)
async def test_a_line_that_breaks_at_a_write_leaves_it_done_once(proxy: HttpProxy, verb: str, fault: Fault) -> None:
    """An answer that is lost, and a request that never arrives, look alike to a client."""
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        expected = await seen(store, await VERBS[verb](store, await prepared(store)))
        broken = store.namespace(unique())
        lock = await prepared(broken)
        proxy.fault(fault)

        result = await VERBS[verb](broken, lock)

        assert proxy.is_done
        assert await seen(broken, result) == expected


@pytest.mark.parametrize("verb", VERBS)
async def test_a_request_that_arrives_after_its_retry_was_answered_changes_nothing(proxy: HttpProxy, verb: str) -> None:
    """The network kept it. The store sent it again and went on; the first attempt that arrives now is superseded."""
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        expected = await seen(store, await VERBS[verb](store, await prepared(store)))
        late = store.namespace(unique())
        lock = await prepared(late)
        proxy.fault("keep")

        result = await VERBS[verb](late, lock)
        answer = await asyncio.to_thread(proxy.deliver)

        assert b"200 OK" in answer
        assert await seen(late, result) == expected


async def test_of_a_group_whose_answer_is_lost_each_is_done_once(proxy: HttpProxy) -> None:
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        await store.put("first", 0)
        proxy.fault("lose")

        await asyncio.gather(*(store.add("count", 1) for _ in range(40)))

        assert proxy.is_done
        assert await store.get("count") == 40


@pytest.mark.parametrize("primitive", ["read", "scan", "status", "changes", "due", "trim"])
async def test_a_line_that_breaks_at_a_question_is_asked_again(proxy: HttpProxy, primitive: str) -> None:
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        await store.put("key", 1)
        proxy.fault("lose", f"/engine/{primitive} ".encode())
        engine = store._session.engine
        with pytest.raises(Unavailable):
            await {
                "read": lambda: engine.read(store.name, ["key"]),
                "scan": lambda: engine.scan(store.name, limpet.keys.Span("", None)),
                "status": lambda: engine.status(store.name),
                "changes": lambda: engine.changes(store.name, 0),
                "due": lambda: engine.due(store.name),
                "trim": lambda: engine.trim(store.name, limpet.Window()),
            }[primitive]()

        assert await store.get("key") == 1
        assert [entry.key async for entry in store.scan()] == ["key"]


async def test_ambiguous_tells_under_which_name_to_ask(proxy: HttpProxy) -> None:
    async with limpet.open(proxy.url, namespace=unique(), sweep=False) as store:
        await store.put("first", 0)
        proxy.fault("lose")

        with pytest.raises(Ambiguous) as unknown:
            await store._session.engine.commit(store.name, store.batch().put("key", 1)._make_batch())

        assert unknown.value.request_id is not None
        assert unknown.value.since == 1
        commit = await store.outcome(unknown.value.request_id)
        assert commit is not None
        assert commit.revision == 2


async def test_a_server_that_is_not_there_did_nothing(free_port: int) -> None:
    """A client that cannot connect has sent nothing, which is not the same as not knowing."""
    with pytest.raises(Unavailable):
        await limpet.open(f"http://127.0.0.1:{free_port}")


@pytest.fixture
def free_port() -> int:
    from tests.servers import free_port

    return free_port()


async def test_a_server_that_does_not_answer_in_time_leaves_the_outcome_open() -> None:
    """The answer comes too late. The retry finds the first attempt still under way, and waits for it."""
    async with running() as server:
        engine = _Slow(server.session)
        async with limpet.open(server.url, namespace="test", sweep=False) as store:
            await store.put("key", 0)
            engine.holds = True
            patience: Any = store._session.engine
            patience._reply_s = 0.2
            writing = asyncio.create_task(store.add("key", 1))
            while not _came_again(server.app):  # noqa: ASYNC110 - it is another task's doing
                await asyncio.sleep(0.01)
            patience._reply_s = 30.0
            engine.go()

            assert await writing == 1
            assert await store.get("key") == 1
        assert engine.held == 1


def _came_again(app: Any) -> bool:
    """Whether a retry waits, by the server's own list of running commits."""
    in_flight = app.routes[1].endpoint.__self__._in_flight
    return any(commit._callbacks and len(commit._callbacks) > 1 for _, commit in in_flight._commits.values())


class _Slow(Behind):
    """Holds commits back until `go` is called."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.holds = False
        self.held = 0
        self._released = asyncio.Event()

    def go(self) -> None:
        self.holds = False
        self._released.set()

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        if self.holds and namespace == "test":
            self.held += 1
            await self._released.wait()
        found: Commit | Refusal = await self._engine.commit(namespace, batch)
        return found


async def test_a_server_that_cannot_tell_says_so() -> None:
    """Its own engine lost the answer, and stays away: that is not known here either."""
    async with running() as server:
        engine = _Failing(server.session)
        async with limpet.open(server.url, namespace="test", sweep=False) as store:
            await store.put("key", 0)
            engine.fails = Ambiguous("the disk does not answer", request_id="of the engine", since=0)
            with pytest.raises(Ambiguous) as unknown:
                await store._session.engine.commit("test", Batch((), (Put("key", b"1"),), "mine"))

    assert unknown.value.request_id == "mine"


async def test_a_server_that_breaks_in_the_midst_of_a_commit_leaves_the_outcome_open() -> None:
    """What it tells of its fault is nothing: an error that is not ours may hold anything."""
    async with running() as server:
        engine = _Failing(server.session)
        async with limpet.open(server.url, namespace="test", sweep=False) as store:
            await store.put("key", 0)
            engine.fails = RuntimeError("hunter2")
            with pytest.raises(Ambiguous) as unknown:
                await store._session.engine.commit("test", Batch((), (Put("key", b"1"),)))
            with pytest.raises(Unavailable) as broken:
                await store._session.engine.status("test")

    assert "hunter2" not in f"{unknown.value!r} {broken.value!r}"


class _Failing(Behind):
    """Fails at a commit or a look, as a test wants it."""

    fails: Exception | None = None

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        if self.fails is not None:
            raise self.fails
        found: Commit | Refusal = await self._engine.commit(namespace, batch)
        return found

    async def status(self, namespace: str) -> limpet.Status:
        if self.fails is not None:
            raise self.fails
        found: limpet.Status = await self._engine.status(namespace)
        return found


# A server that ends, and comes again ----------------------------------------------


@pytest.fixture(scope="module")
def mortal() -> Iterator[LimpetServer]:
    with served() as server:
        yield server


@pytest.mark.slow
async def test_a_server_killed_under_load_loses_and_doubles_nothing(mortal: LimpetServer) -> None:
    """Some callers hear that it is not known, and can ask when the server is back."""
    async with limpet.open(f"{mortal.url}/file-killed", namespace=unique(), sweep=False) as store:
        await store.put("first", 0)
        acknowledged: list[int] = []
        unknown: list[str] = []
        refused: list[Unavailable] = []

        async def write() -> None:
            while not refused:
                try:
                    acknowledged.append(await store.add("count", 1))
                except Ambiguous as error:
                    unknown.append(error.request_id or "")
                except Unavailable as error:
                    refused.append(error)

        writers = [asyncio.create_task(write()) for _ in range(16)]
        while len(acknowledged) < 300:  # noqa: ASYNC110 - others work
            await asyncio.sleep(0.01)
        await asyncio.to_thread(mortal.stop, "immediate")
        await asyncio.gather(*writers)
        await asyncio.to_thread(mortal.start)
        applied = [request_id for request_id in unknown if await store.outcome(request_id) is not None]

        assert await store.get("count") == len(acknowledged) + len(applied)
        assert len(set(acknowledged)) == len(acknowledged)


async def test_a_watch_goes_on_when_its_server_was_restarted(mortal: LimpetServer) -> None:
    async with (
        limpet.open(f"{mortal.url}/file-watched", namespace=unique(), sweep=False) as store,
        store.watch("key/*") as watch,
    ):
        await store.put("key/1", 1)
        assert (await next_event(watch)).key == "key/1"

        await asyncio.to_thread(mortal.restart)
        while True:
            try:
                await store.put("key/2", 2)
                break
            except Unavailable:
                await asyncio.sleep(0.05)

        assert (await next_event(watch)).key == "key/2"


async def test_a_wait_for_changes_ends_when_the_server_does() -> None:
    """Or every client that watches would hold up its stopping."""
    async with running() as server, limpet.open(server.url, namespace="test", sweep=False) as store:
        await store.put("key", 1)
        waiting = asyncio.create_task(store._session.engine.changes("test", 1, wait_s=600))
        while not any(call.operation == "engine.changes" for call in server.book.calls):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.ending.set()

        with pytest.raises(Unavailable):
            await asyncio.wait_for(waiting, 60)


async def test_a_name_that_was_overtaken_is_refused_and_told_apart_from_others() -> None:
    async with running() as server, limpet.open(server.url, namespace="test", sweep=False) as store:
        engine = store._session.engine
        batch = Batch((), (Put("key", b"1"),), "mine")
        again = msgspec.structs.replace(batch, retry_since=0)

        first = await engine.commit("test", again)
        with pytest.raises(Unavailable):
            await engine.commit("test", batch)
        other = await engine.commit("test", msgspec.structs.replace(batch, request_id="other"))

        assert isinstance(first, Commit)
        assert isinstance(other, Commit)
        assert (await store.status()).revision == 2


# One of each way that an engine has to commit.
KEPT = ("put", "create", "add", "take", "set", "batch", "batch with an add", "add with a request id", "refresh")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sqlite", "postgres", "redis", "nats"])
async def test_what_one_server_kept_and_another_has_done_is_done_once(engine: str, tmp_path: Path) -> None:
    """A server stands still with a request in its hands. The store asks another one and goes on. Then it wakes."""
    url = url_of(engine, tmp_path)
    async with running(url=url) as waking, running(url=url) as awake:
        with HttpProxy(awake.url) as proxy:
            async with limpet.open(proxy.url, sweep=False) as store:
                for verb in KEPT:
                    act = VERBS[verb]
                    sound, late = store.namespace(unique()), store.namespace(unique())
                    expected = await seen(sound, await act(sound, await prepared(sound)), ranked=True)
                    lock = await prepared(late)
                    proxy.fault("keep")

                    result = await act(late, lock)
                    proxy.move(waking.url)
                    answer = await asyncio.to_thread(proxy.deliver)
                    proxy.move(awake.url)

                    assert b"200 OK" in answer, verb
                    assert await seen(late, result, ranked=True) == expected, verb
