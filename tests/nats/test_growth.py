"""What depends on the number of keys and what does not: counted by requests and messages, not by time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import limpet
from limpet.engines.nats import log_follower
from limpet.engines.nats import mirror as nats_mirror
from limpet.engines.nats import stream as nats_stream
from limpet.engines.nats.connection import NoReply
from limpet.engines.nats.messages import EntryId, Message
from limpet.engines.nats.mirror import END_MS, Mirror
from limpet.engines.nats.stream import NamespaceStream
from limpet.keys import prefix_span
from limpet.model import Window
from tests.engines import unique
from tests.nats.support import engine_of, server, stream_of

KEYS = 40
Requests = list[dict[str, Any]]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """All requests for a single message, from now on."""
    made: Requests = []
    get = NamespaceStream.get

    async def record(self: NamespaceStream, request: dict[str, Any]) -> Any:
        made.append(request)
        return await get(self, request)

    monkeypatch.setattr(NamespaceStream, "get", record)
    return made


def of_any_subject(requests: Requests) -> Requests:
    """Those for which the server goes through all subjects."""
    return [
        request
        for request in requests
        if ">" in request.get("last_by_subj", "") or (">" in request.get("next_by_subj", "") and request["seq"] == 1)
    ]


def mirror_of(store: limpet.Store) -> Mirror:
    return engine_of(store)._namespaces[store.name].mirror


async def fill(store: limpet.Store, value: object = 0) -> None:
    for number in range(KEYS):
        await store.put(f"key/{number:03}", value)


# Opening, and the time ----------------------------------------------------------


async def test_opening_looks_for_the_last_message_of_no_large_set_of_subjects(requests: Requests) -> None:
    """The server would go through all of them: 27 ms with a million keys, at each opening and every half a minute."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await store.put("a", 1, ttl=60)
        last = await store.put("b", 1, request_id="request")
        requests.clear()

        async with limpet.open(server(), namespace=store.name, sweep=False) as other:
            assert await other.get("a") == 1
            assert await stream_of(other).revision() == last.revision

    assert requests
    assert of_any_subject(requests) == []


async def test_the_latest_change_is_found_behind_other_messages(requests: Requests) -> None:
    """Behind more than a few, the server has to look for it."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        last = await store.put("a", 1)
        stream = stream_of(store)
        connection = await engine_of(store).connection()
        for number in range(10):
            await connection.request(stream.subjects.carrier(number), b"", b"NATS/1.0\r\n\r\n")

        assert await stream.revision() == last.revision

    assert of_any_subject(requests)


async def test_a_namespace_is_listed_once_while_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server lists 256 streams at a time, by their places, and a new one moves those after it."""
    name = unique()
    async with limpet.open(server(), namespace=name, sweep=False) as store:
        await store.put("a", 1)
        ours = await stream_of(store).info()
        pages = iter([{"streams": [ours], "total": 2}, {"streams": [ours], "total": 2}])

        async def list_page(*_: object) -> Any:
            return next(pages)

        monkeypatch.setattr(nats_stream, "_request_api", list_page)
        assert await nats_stream.list_buckets(engine_of(store)) == [f"limpet-{name}"]


# Following ----------------------------------------------------------------------


async def test_a_reply_behind_many_messages_is_waited_for() -> None:
    """The first scan of a million keys failed on a busy machine: a reply came only after all that was before it."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await fill(store)
        mirror, requests = mirror_of(store), 0

        async def reply_late() -> str:
            nonlocal requests
            requests += 1
            if requests < 5:
                mirror.position += 1
                raise NoReply
            return "reply"

        async def reply_never() -> str:
            raise NoReply

        assert await mirror._request(reply_late) == "reply"
        with pytest.raises(NoReply):
            await mirror._request(reply_never)


# Trimming -----------------------------------------------------------------------


async def test_a_sweeping_process_does_not_follow_all_keys_where_the_log_is_within_its_window() -> None:
    """The stream is larger than the window by its keys alone. It took a kilobyte of memory a key to find that out."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await fill(store, "x" * 100)
        await engine_of(store).trim(store.name, Window(changes=3, age_ms_min=0))
        window = Window(size_bytes=1000, age_ms_min=0)

        async with limpet.open(server(), namespace=store.name, sweep=False) as other:
            assert await engine_of(other).trim(other.name, window) == 0
            assert (await stream_of(other).info())["state"]["bytes"] > window.size_bytes
            assert mirror_of(other).position == 0
            assert len(engine_of(other)._namespaces[other.name].log.log) == 3


async def test_a_process_that_follows_only_the_log_sees_when_it_is_beyond_its_window() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        engine, window = engine_of(store), Window(size_bytes=10 * 120, age_ms_min=0)
        await fill(store, "x" * 100)
        assert await engine.trim(store.name, window) == KEYS - 11

        async with limpet.open(server(), namespace=store.name, sweep=False) as other:
            assert await engine_of(other).trim(other.name, window) == 0
            await fill(store, "y" * 100)
            assert await engine_of(other).trim(other.name, window) == KEYS
            assert (await other.status()).log_changes == 11


async def test_a_small_part_of_a_long_log_is_left_to_the_process_that_trims_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or all processes that sweep would follow all keys, to trim a few changes each."""
    monkeypatch.setattr(log_follower, "MANY", KEYS // 2)
    window = Window(changes=KEYS - 1, age_ms_min=0)
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await fill(store)
        assert await engine_of(store).trim(store.name, window) == 0
        assert mirror_of(store).position == 0

        # No process has trimmed it for so long.
        monkeypatch.setattr(log_follower, "LEFT_S", -1.0)
        assert await engine_of(store).trim(store.name, window) == 1


async def test_the_oldest_change_is_read_without_a_look_at_all_subjects(requests: Requests) -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await fill(store)
        requests.clear()
        await engine_of(store).trim(store.name, Window())

    assert requests
    assert of_any_subject(requests) == []


async def test_a_trim_goes_on_where_the_server_cannot_list_all_subjects_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def count_late(self: NamespaceStream) -> dict[str, int]:
        raise NoReply

    monkeypatch.setattr(NamespaceStream, "count_messages", count_late)
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await fill(store)
        assert await engine_of(store).trim(store.name, Window(changes=3, age_ms_min=0)) == KEYS - 3


async def test_a_long_log_is_trimmed_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of a process runs while it goes through the changes to trim."""
    monkeypatch.setattr(nats_mirror, "TRIM_MAX", 10)
    window = Window(changes=3, age_ms_min=0)
    async with limpet.open(server(), namespace=unique(), sweep=False, window=window) as store:
        await fill(store)

        assert await engine_of(store).trim(store.name, window) == 10
        assert await store.trim() == KEYS - 13
        assert (await store.status()).log_changes == 3


class Counted(dict[EntryId, Message]):
    """A dictionary that counts what is read of it in order."""

    read = 0

    def items(self) -> Any:
        def each() -> Iterator[tuple[EntryId, Message]]:
            for item in super(Counted, self).items():
                self.read += 1
                yield item

        return each()


async def test_a_trim_looks_at_the_ends_that_are_old_and_at_no_others() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await fill(store)
        await store.status()
        for number in range(KEYS):
            await store.delete(f"key/{number:03}")
        await store.status()
        mirror = mirror_of(store)
        mirror._ends = ends = Counted(mirror._ends)

        assert len(ends) == KEYS
        assert list(mirror._old_ends()) == []
        assert ends.read == 1

        mirror.log.floor = [message.seq for message in ends.values()][2]
        now_ms = stream_of(store).now_ms() + END_MS + 1
        mirror._stream.observe_time(now_ms)
        ends.read = 0
        assert [entry_id[1] for entry_id, _ in mirror._old_ends()] == ["key/000", "key/001", "key/002"]
        assert ends.read == 4


# Counting -----------------------------------------------------------------------


async def test_a_count_is_right_where_some_entries_expire_and_where_none_does() -> None:
    span = prefix_span("key/")
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        engine = engine_of(store)
        await fill(store)
        assert await engine.count(store.name, span) == KEYS
        await store.delete("key/003")
        await store.put("other", 1)
        assert await engine.count(store.name, span) == KEYS - 1
        await store.put("key/004", 1, ttl=0.001)
        await store.put("key/005", 1, ttl=60)
        await asyncio.sleep(0.05)
        assert await engine.count(store.name, span) == KEYS - 2
        assert mirror_of(store)._expiring["data"] == 2
        await store.sweep()
        await store.persist("key/005")
        assert await engine.count(store.name, span) == KEYS - 2
        assert mirror_of(store)._expiring["data"] == 0
