"""No call waits for ever: it ends in `Unavailable` when the server makes no progress, and not before."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import limpet
from limpet.engines.nats import connection as nats_link
from limpet.engines.nats import follower as nats_follower
from limpet.engines.nats import stream as nats_stream
from limpet.engines.nats.follower import Follower
from limpet.engines.nats.messages import EntryId, Message
from limpet.errors import Unavailable
from limpet.model import Window
from tests.engines import unique
from tests.nats.support import engine_of, server, stream_of
from tests.servers import Nats, nats

KEYS = 12
# Far more than any of these calls may take, though other work runs on the machine.
LONGEST_S = 60.0

Call = Callable[[limpet.Store], Awaitable[Any]]


async def _scan(store: limpet.Store) -> list[str]:
    return [entry.key for entry in (await engine_of(store).scan(store.name, limpet.keys.Span("", None))).entries]


CALLS: dict[str, Call] = {
    "scan": _scan,
    "changes": lambda store: engine_of(store).changes(store.name, 0),
    "status": lambda store: engine_of(store).status(store.name),
    "due": lambda store: engine_of(store).due(store.name),
    "trim": lambda store: engine_of(store).trim(store.name, Window(age_ms=1, age_ms_min=0)),
    "read": lambda store: engine_of(store).read(store.name, ["0", "1"]),
    "commit": lambda store: engine_of(store).commit(store.name, store.batch().put("0", 1).put("1", 1)._make_batch()),
}


async def _fill(store: limpet.Store) -> None:
    await asyncio.gather(*(store.put(str(number), number, ttl=3600) for number in range(KEYS)))
    # A trim is worth the while only of what is older than it keeps.
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("call", [name for name in CALLS if name not in ("read", "commit")])
async def test_a_call_ends_when_nothing_is_delivered(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers requests, and the messages that it is to deliver do not come."""
    monkeypatch.setattr(nats_follower, "PROGRESS_S", 0.5)
    monkeypatch.setattr(nats_follower, "STALL_S", 0.1)
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await _fill(store)
        monkeypatch.setattr(Follower, "_on_message", lambda *_: None)

        with pytest.raises(Unavailable, match=r"delivered no message for 0\.5 s, at message 0 of \d+"):
            async with asyncio.timeout(LONGEST_S):
                await CALLS[call](store)

        monkeypatch.undo()
        async with asyncio.timeout(LONGEST_S):
            await CALLS[call](store)


@pytest.mark.slow
async def test_a_load_goes_on_while_messages_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large namespace on a slow machine: only the time without a message counts."""
    monkeypatch.setattr(nats_follower, "PROGRESS_S", 3.0)
    take = Follower._on_message
    held: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await _fill(store)
        monkeypatch.setattr(Follower, "_on_message", lambda *message: held.put_nowait(message))

        async def deliver_slowly() -> None:
            while True:
                await asyncio.sleep(0.2)
                take(*await held.get())

        loop = asyncio.get_running_loop()
        started_at = loop.time()
        delivering = asyncio.create_task(deliver_slowly())
        try:
            found = await _scan(store)
        finally:
            delivering.cancel()

        assert len(found) == KEYS
        assert loop.time() - started_at > 3.0


async def test_a_load_that_is_interrupted_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started from the beginning each time, it would never end where it is interrupted often."""
    on_message, count = Follower._on_message, 0

    def receive_with_gaps(self: Follower, *message: Any) -> None:
        nonlocal count
        count += 1
        if count % 5 == 0:
            self.stop()
        else:
            on_message(self, *message)

    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await _fill(store)
        monkeypatch.setattr(Follower, "_on_message", receive_with_gaps)

        async with asyncio.timeout(LONGEST_S):
            assert len(await _scan(store)) == KEYS


@pytest.fixture
def own() -> Iterator[Nats]:
    with nats() as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_ends_when_the_server_stands_still(own: Nats, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_link, "REQUEST_S", 0.5)
    async with limpet.open(own.url, namespace=unique(), sweep=False) as store:
        await _fill(store)
        own.signal(signal.SIGSTOP)
        try:
            with pytest.raises((Unavailable, limpet.errors.Ambiguous)):
                async with asyncio.timeout(LONGEST_S):
                    await CALLS[call](store)
        finally:
            own.signal(signal.SIGCONT)

        monkeypatch.undo()
        async with asyncio.timeout(LONGEST_S):
            await _scan(store)


@pytest.mark.slow
async def test_closing_does_not_wait_for_a_server_that_stands_still(own: Nats) -> None:
    """There is more to send than the system takes without the server's reading it."""
    store = await limpet.open(own.url, namespace=unique(), sweep=False)
    await store.put("key", 0)
    connection = await engine_of(store).connection()
    own.signal(signal.SIGSTOP)
    try:
        for _ in range(40):
            connection.send("unused", b"x" * 1_000_000)
        await asyncio.sleep(0.1)

        async with asyncio.timeout(LONGEST_S):
            await store.close()
    finally:
        own.signal(signal.SIGCONT)


async def test_keys_that_never_stand_still_cannot_be_read_at_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_stream, "READ_S", 0.3)
    async with (
        limpet.open(server(), namespace=unique(), sweep=False) as store,
        limpet.open(server(), namespace=store.name, sweep=False) as other,
    ):
        await store.put("hot", 0)
        stream = stream_of(store)
        look = stream.last

        async def look_and_change(entry_id: EntryId) -> Message | None:
            found = await look(entry_id)
            await other.add("hot")
            return found

        with monkeypatch.context() as patch:
            patch.setattr(stream, "last", look_and_change)
            with pytest.raises(Unavailable, match="read fewer keys at once"):
                await engine_of(store).read(store.name, ["hot", "cold"])

        assert (await engine_of(store).read(store.name, ["hot", "cold"]))[1] is None
