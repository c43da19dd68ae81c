"""What the stream of a namespace keeps, what is purged, and how a reader notices what was dropped."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import limpet
from limpet.engines.nats import stream as nats_stream
from limpet.errors import Compacted
from limpet.model import Window
from tests.engines import unique
from tests.nats.support import client, engine_of, server, stream_of

ALL_BUT_THREE = Window(changes=3, age_ms_min=0)


async def next_event(watch: Any) -> limpet.Event:
    event: limpet.Event = await asyncio.wait_for(anext(watch), 28)
    return event


async def keep_per_key(store: limpet.Store, count: int) -> None:
    """Let the server keep so many messages of a key."""
    stream = stream_of(store)
    config = (await stream.info())["config"] | {"max_msgs_per_subject": count}
    await stream.api(f"STREAM.UPDATE.{stream.name}", config)


async def subjects_of(store: limpet.Store) -> dict[str, int]:
    """How many messages each subject has, without the prefix of the bucket."""
    stream = stream_of(store)
    counts = await stream.count_messages()
    return {subject.split(".", 2)[2]: count for subject, count in counts.items()}


async def history(store: limpet.Store, key: str) -> list[Any]:
    return [event.value for event in [event async for event in store.history(key)]]


async def stop_delivery(store: limpet.Store) -> asyncio.Event:
    """Stop the delivery of messages to a store, as if its process stood still, until the event is set."""
    mirror = engine_of(store)._namespaces[store.name].mirror
    mirror.stop()
    connect, go_on = mirror._connect, asyncio.Event()

    async def connect_later() -> Any:
        await go_on.wait()
        return await connect()

    mirror._connect = connect_later
    return go_on


async def prepare(reader: limpet.Store, has_scanned: bool) -> None:
    """A process that has scanned knows the last message of each key, and reads the earlier ones when it needs them."""
    if has_scanned:
        await reader.keys()


# What was dropped is noticed -----------------------------------------------------


@pytest.mark.parametrize("has_scanned", [False, True])
async def test_a_reader_that_resumes_notices_what_the_server_dropped(has_scanned: bool) -> None:
    """One key has changed more often than the server keeps messages of a key."""
    name = unique()
    async with limpet.open(server(), namespace=name, sweep=False) as store:
        start = await store.put("start", 1)
        await keep_per_key(store, 10)
        entries = [await store.put("hot", number) for number in range(30)]
        await store.put("other", 1)

        async with limpet.open(server(), namespace=name, sweep=False) as other:
            for reader in (store, other):
                await prepare(reader, has_scanned)
                assert (await reader.status()).floor == entries[19].revision
                assert await history(reader, "hot") == [*range(20, 30)]
                for revision in (start.revision, entries[0].revision, entries[18].revision):
                    with pytest.raises(Compacted) as found:
                        await next_event(reader.watch(after=revision))
                    assert found.value.oldest == entries[19].revision
                async with reader.watch(after=entries[19].revision) as resumed:
                    events = [await next_event(resumed) for _ in range(11)]
                assert [event.value for event in events] == [*range(20, 30), 1]


@pytest.mark.parametrize("has_scanned", [False, True])
async def test_a_page_that_ends_between_two_messages_hides_no_gap(has_scanned: bool) -> None:
    """The first page has none of the key, of which a message was dropped that would have been on it."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        start = await store.put("start", 1)
        await keep_per_key(store, 2)
        await store.put("hot", 0)
        for number in range(20):
            await store.put(f"other/{number}", number)
        for number in range(5):
            await store.put("hot", number)

        await prepare(store, has_scanned)
        with pytest.raises(Compacted):
            await engine_of(store).changes(store.name, start.revision, limit=3)


async def test_a_running_watch_notices_what_was_dropped_before_it_was_read() -> None:
    """A watcher whose process stood still while a key changed more often than the server keeps messages of it."""
    async with (
        limpet.open(server(), namespace=unique(), sweep=False) as store,
        limpet.open(server(), namespace=store.name, sweep=False) as other,
    ):
        async with store.watch() as watch:
            await store.put("hot", 0)
            await next_event(watch)
            await keep_per_key(store, 5)
            go_on = await stop_delivery(store)
            for number in range(1, 20):
                await other.put("hot", number)
            go_on.set()

            with pytest.raises(Compacted):
                await next_event(watch)

        assert await store.get("hot") == 19


async def test_a_value_that_was_dropped_after_its_header_came_is_noticed() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        start = await store.put("start", 1)
        for number in range(3):
            last = await store.put("hot", number)
        await store.status()
        await stream_of(store).purge(stream_of(store).subjects.of(("data", "hot")), last.revision - 1)

        with pytest.raises(Compacted) as found:
            await next_event(store.watch(after=start.revision))

        assert found.value.oldest == last.revision - 1
        async with store.watch(after=found.value.oldest) as watch:
            assert (await next_event(watch)).value == 2


# Other programs --------------------------------------------------------------------


@pytest.mark.parametrize("has_scanned", [False, True])
async def test_what_another_program_writes_is_a_change_like_any_other(has_scanned: bool) -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store, client() as program:
        start = await store.put("ours", 1)
        bucket = await program.jetstream().key_value(f"limpet-{store.name}")
        async with store.watch() as watch:
            for number in range(5):
                await bucket.put("theirs", b"%d" % number)
            await bucket.delete("theirs")
            await bucket.put("theirs", b"again")
            await bucket.update("theirs", b"guarded", last=(await bucket.get("theirs")).revision)
            await store.put("ours", 2)
            events = [await next_event(watch) for _ in range(9)]

        values = [b"0", b"1", b"2", b"3", b"4", None, b"again", b"guarded", 2]
        assert [event.value for event in events] == values
        async with limpet.open(server(), namespace=store.name, sweep=False) as other:
            await prepare(other, has_scanned)
            async with other.watch(after=start.revision) as resumed:
                assert [(await next_event(resumed)).value for _ in range(9)] == values
            assert await history(other, "theirs") == values[:-1]


@pytest.mark.parametrize("has_scanned", [False, True])
async def test_a_key_of_another_program_that_changed_too_often_is_noticed(has_scanned: bool) -> None:
    """Its messages name none before them. The server keeps as many as it may, so some may be gone."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store, client() as program:
        start = await store.put("ours", 1)
        await keep_per_key(store, 5)
        bucket = await program.jetstream().key_value(f"limpet-{store.name}")
        for number in range(20):
            await bucket.put("theirs", b"%d" % number)
        await store.put("ours", 2)

        await prepare(store, has_scanned)
        with pytest.raises(Compacted):
            await next_event(store.watch(after=start.revision))


@pytest.mark.parametrize("has_scanned", [False, True])
async def test_a_purge_by_another_program_is_noticed(has_scanned: bool) -> None:
    """It erases the earlier messages of its key. A reader that has seen them goes on; one that has not gets to know."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store, client() as program:
        start = await store.put("ours", 1)
        bucket = await program.jetstream().key_value(f"limpet-{store.name}")
        async with store.watch() as watch:
            await bucket.put("theirs", b"1")
            await bucket.put("theirs", b"2")
            assert [(await next_event(watch)).value for _ in range(2)] == [b"1", b"2"]
            await bucket.purge("theirs")
            await store.put("ours", 2)
            assert [(event.op, event.key) for event in [await next_event(watch) for _ in range(2)]] == [
                ("delete", "theirs"),
                ("put", "ours"),
            ]

        async with limpet.open(server(), namespace=store.name, sweep=False) as other:
            await prepare(other, has_scanned)
            with pytest.raises(Compacted):
                await next_event(other.watch(after=start.revision))


@pytest.mark.parametrize("count", [3, 20])
async def test_a_running_watch_compares_what_another_program_wrote(count: int) -> None:
    """Numbers are missing in between, so the reader looks whether the messages of the key are all there."""
    async with (
        limpet.open(server(), namespace=unique(), sweep=False) as store,
        limpet.open(server(), namespace=store.name, sweep=False) as other,
        client() as program,
    ):
        await store.put("ours", 1)
        await keep_per_key(store, 5)
        bucket = await program.jetstream().key_value(f"limpet-{store.name}")
        async with store.watch() as watch:
            await bucket.put("theirs", b"first")
            assert (await next_event(watch)).value == b"first"
            go_on = await stop_delivery(store)
            await other.put("short", 1, ttl=60)
            alarms = stream_of(other).subjects.alarms
            await stream_of(other).purge(alarms, 1_000_000)
            for number in range(count):
                await bucket.put("theirs", b"%d" % number)
            go_on.set()

            if count < 5:
                events = [await next_event(watch) for _ in range(1 + count)]
                assert [event.value for event in events] == [1, b"0", b"1", b"2"]
            else:
                with pytest.raises(Compacted):
                    await next_event(watch)


# What the stream keeps -------------------------------------------------------------


async def test_nothing_but_changes_piles_up() -> None:
    """Marks, receipts, carriers of guards, the floor: each is there once, or goes by itself."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await store.put("guard", 1)
        for number in range(20):
            await store.batch().expect("guard", limpet.PRESENT).put("a", number).put("b", number).commit()
            await engine_of(store).trim(store.name, ALL_BUT_THREE)
        async with asyncio.timeout(28):
            while any(name.startswith("c.") for name in await subjects_of(store)):  # noqa: ASYNC110 - by the server
                await asyncio.sleep(0.1)
        found = await subjects_of(store)

        assert found["floor"] == 1
        receipts = [count for name, count in found.items() if name.startswith("r.")]
        assert receipts == [2] * 20
        assert {name for name in found if name[:2] not in ("r.", "a.")} == {"floor", "guard", "a", "b"}


async def test_receipts_and_their_marks_end_together() -> None:
    """A mark that is left when its receipt has gone means nothing: it must not look like a batch stored in part."""
    clock = limpet.ManualClock(1000)
    async with limpet.open(f"{server()}?clock=test", namespace=unique(), clock=clock, sweep=False) as store:
        await store.batch(request_id="mine").put("a", 1).put("b", 1).commit()
        stream = stream_of(store)
        receipt = await stream.last(("receipt", "mine"))
        assert receipt is not None
        clock.advance(601)
        # As the server does it: the later message is dropped first.
        marks = stream.subjects.of(("receipt", "mine"))
        first = await stream.get({"seq": 1, "next_by_subj": marks})
        assert first is not None
        await stream.purge(marks, receipt.seq)
        connection = await engine_of(store).connection()
        lines = [line for line in first[2].split(b"\r\n") if line.startswith(b"Limpet")]
        await connection.request(marks, first[3], b"\r\n".join([b"NATS/1.0", *lines, b"", b""]))

        assert await store.outcome("mine") is None
        commit = await store.batch(request_id="mine").put("a", 2).put("b", 2).commit()
        assert not commit.replayed
        assert await store.get("a") == 2


async def test_trimming_frees_the_disk() -> None:
    """Of each key the last message stays, and what is in the window."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        for number in range(50):
            for key in ("a", "b", "c"):
                await store.put(key, [number] * 100)
        assert await engine_of(store).trim(store.name, ALL_BUT_THREE) == 147

        assert await subjects_of(store) == {"a": 1, "b": 1, "c": 1, "floor": 1}
        assert [await store.get(key) for key in ("a", "b", "c")] == [[49] * 100] * 3
        await store.put("a", "new")
        await store.put("a", "newer")
        assert await engine_of(store).trim(store.name, ALL_BUT_THREE) == 2
        assert await subjects_of(store) == {"a": 2, "b": 1, "c": 1, "floor": 1}
        assert await history(store, "a") == ["new", "newer"]
        assert await store.get("b") == [49] * 100


async def test_a_purge_leaves_what_came_after_it_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is written while it is purged, by a process that the purging one has not seen yet."""
    async with (
        limpet.open(server(), namespace=unique(), sweep=False) as store,
        limpet.open(server(), namespace=store.name, sweep=False) as other,
    ):
        for number in range(10):
            await store.put("key", number)
        stream = stream_of(store)
        purge = stream.purge

        async def write_and_purge(subject: str, seq: int) -> None:
            await other.put("key", "during")
            await purge(subject, seq)

        monkeypatch.setattr(stream, "purge", write_and_purge)
        await engine_of(store).trim(store.name, Window(changes=0, age_ms_min=0))

        assert await subjects_of(store) == {"key": 2, "floor": 1}
        assert await history(other, "key") == ["during"]


async def test_what_another_process_left_is_purged() -> None:
    """It raised the floor, and ended before it had purged what is below."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        for number in range(20):
            await store.put("old", number)
            await store.put("busy", number)
        await store.put("end", 1)
        mirror = engine_of(store)._namespaces[store.name].mirror
        log = await mirror.load_log()
        floor = max(item.seq for item in log.after(0)) - 2
        await stream_of(store).raise_floor(floor, await mirror.before(floor))
        assert (await subjects_of(store))["old"] == 20
    async with limpet.open(server(), namespace=store.name, sweep=False) as other:
        await other.put("end", 2)
        assert await engine_of(other).trim(other.name, Window(changes=2, age_ms_min=0)) == 1

        assert await subjects_of(other) == {"old": 1, "busy": 1, "end": 2, "floor": 1}
        assert [await other.get(key) for key in ("old", "busy", "end")] == [19, 19, 2]


async def test_one_of_several_processes_purges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that raised the floor last. When another does, that one also purges what the first has left."""
    async with (
        limpet.open(server(), namespace=unique(), sweep=False) as store,
        limpet.open(server(), namespace=store.name, sweep=False) as other,
    ):
        await other.status()
        for number in range(20):
            await store.put("key", number)
        purged: list[limpet.Store] = []
        with monkeypatch.context() as patch:
            for one in (store, other):

                async def purge(subject: str, seq: int, one: limpet.Store = one) -> None:
                    purged.append(one)

                patch.setattr(stream_of(one), "purge", purge)
            assert await engine_of(store).trim(store.name, ALL_BUT_THREE) == 17
            assert await engine_of(other).trim(store.name, ALL_BUT_THREE) == 0
        assert purged == [store]
        assert (await subjects_of(store))["key"] == 20

        await other.put("key", 20)
        assert await engine_of(other).trim(store.name, ALL_BUT_THREE) == 1
        assert (await subjects_of(store))["key"] == 3


async def test_a_stream_that_was_made_again_is_not_purged_by_old_numbers() -> None:
    """Its numbers begin anew, so what was below the floor of the old stream may be above that of the new one."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store, client() as program:
        for number in range(20):
            await store.put("key", number)
        await engine_of(store).trim(store.name, ALL_BUT_THREE)
        for number in range(5):
            await store.put("key", number)
        await program.jetstream().delete_key_value(f"limpet-{store.name}")
        async with limpet.open(server(), namespace=store.name, sweep=False) as other:
            for number in range(3):
                await other.put("key", number)

            for _ in range(2):
                await engine_of(store).trim(store.name, Window())

            assert await history(other, "key") == [0, 1, 2]


async def test_a_key_that_ended_stays_ended_when_its_messages_are_purged(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it goes together: without its last message, the one before would be back."""
    monkeypatch.setattr("limpet.engines.nats.mirror.END_MS", -1)
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await store.put("key", 1)
        await store.put("key", 2)
        await store.take("key")
        await store.put("later", 1)
        async with store.watch() as watch:
            await engine_of(store).trim(store.name, Window(changes=1, age_ms_min=0))
            assert await subjects_of(store) == {"later": 1, "floor": 1}
            assert await store.get("key") is None
            await store.put("key", 3)
            event = await next_event(watch)

        assert (event.value, event.entry and event.entry.version) == (3, 1)


@pytest.mark.parametrize("has_scanned", [False, True])
async def test_totals_are_the_same_in_a_process_that_followed_and_in_a_new_one(has_scanned: bool) -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        for number in range(30):
            await store.put(f"key/{number % 7}", "x" * number, ttl=60)
            await store.touch(f"key/{number % 7}", 70)
            await store.status()
        await store.take("key/1")
        await engine_of(store).trim(store.name, Window(changes=40, age_ms_min=0))
        followed = await store.status()
        async with limpet.open(server(), namespace=store.name, sweep=False) as other:
            await prepare(other, has_scanned)
            fresh = await other.status()

    assert followed.log_changes == 40
    for name in ("revision", "floor", "keys", "size_bytes", "log_changes", "log_bytes"):
        assert getattr(fresh, name) == getattr(followed, name), name


async def test_a_scan_loads_the_last_message_of_each_key_alone() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        for number in range(300):
            await store.put(f"key/{number % 3}", number)
        async with limpet.open(server(), namespace=store.name, sweep=False) as other:
            assert len((await other.keys()).keys) == 3
            mirror = engine_of(other)._namespaces[store.name].mirror

            assert mirror._delivered == 3
            assert len(mirror.log) == 0
            assert (await other.status()).log_changes == 300


# Streams of an earlier layout --------------------------------------------------------

EARLIER = {
    "a": ("put j 3 1 1700000000000 1700000000500 0 0 0 1700000000500 2 =2Bx 0 ", b"41"),
    "b": ("touch j 1 2 1700000000000 1700000000000 4000000000000 2,put,2,0,x 0 1700000000600 1 +me 0 ", b"7"),
    "c": ("delete - 2 1 1700000000000 1700000000500 0 5 0 1700000000700 0 x 0 y,put,1,2,3", b""),
}


async def test_a_stream_that_keeps_one_message_of_a_key_is_upgraded() -> None:
    name = unique()
    async with client() as program, limpet.open(server(), namespace=name, sweep=False) as store:

        async def create() -> None:
            config = {
                "name": f"KV_limpet-{name}",
                "subjects": [f"$KV.limpet-{name}.>", f"$LMP.limpet-{name}.>"],
                "max_msgs_per_subject": 1,
                "discard": "new",
                **dict.fromkeys(
                    ("deny_delete", "allow_rollup_hdrs", "allow_msg_ttl", "allow_atomic", "allow_direct"), True
                ),
            }
            answer = await program.request(f"$JS.API.STREAM.CREATE.KV_limpet-{name}", json.dumps(config).encode())
            assert "error" not in json.loads(answer.data)

        await create()
        for key, (header, body) in EARLIER.items():
            number = 0
            for _ in range(2):
                headers = {"Nats-Expected-Last-Subject-Sequence": str(number), "Limpet": header}
                number = (await program.jetstream().publish(f"$KV.limpet-{name}.{key}", body, headers=headers)).seq

        assert await store.get("a") == 41
        assert (await store.keys()).keys == ["a", "b"]
        touched = await store.entry("b")
        assert touched is not None
        assert (touched.value, touched.version) == (7, 1)
        assert await store.add("a") == 42
        assert await store.add("a") == 43
        entry = await store.entry("a")
        assert entry is not None
        assert entry.version == 5

        config = (await stream_of(store).info())["config"]
        assert config["max_msgs_per_subject"] == nats_stream.KEPT_PER_KEY
        # What was before is not in the log: the first message of each key was dropped.
        assert (await store.status()).floor == 5
        assert await history(store, "a") == [42, 43]
        with pytest.raises(Compacted):
            await next_event(store.watch(after=0))
