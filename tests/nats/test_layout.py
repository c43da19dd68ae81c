"""What is in NATS, as other programs see it, and what the engine makes of the server's settings."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import limpet
import limpet.sync
from limpet.engines.nats.messages import Subjects, decode_name, encode_name
from limpet.errors import Corrupt, InvalidValue, PermissionDenied, Unavailable, ValueTooLarge
from limpet.model import FAMILIES
from tests.engines import unique
from tests.nats.support import client, engine_of, server, stream_of
from tests.servers import jetstream, nats

KEYS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40)


@given(KEYS)
@example(".")
@example("..")
@example("a..b")
@example(".a.")
@example("=2E")
@example("a b*c>d")
@example("$KV.x")
def test_a_name_is_words_that_a_subject_can_have(name: str) -> None:
    words = encode_name(name)

    assert decode_name(words) == name
    assert all(words.split("."))
    assert not set(words) & set(" *>\t\r\n$")


@given(st.lists(KEYS, min_size=2, max_size=2, unique=True))
def test_two_names_are_never_the_same_words(names: list[str]) -> None:
    assert encode_name(names[0]) != encode_name(names[1])


@pytest.mark.parametrize(
    ("key", "words"), [("game/1", "game/1"), ("a.b-c_D", "a.b-c_D"), ("a b", "a=20b"), ("a..", "a.=2E")]
)
def test_plain_names_stay_readable(key: str, words: str) -> None:
    assert encode_name(key) == words


def test_every_subject_leads_back_to_its_entry() -> None:
    subjects = Subjects("b")
    for entry_id in [
        ("data", "l.x"),
        ("lock", "data.x"),
        ("receipt", "a"),
        ("audit", "a.b"),
        ("recoverable", "g"),
        ("sequence", "log/"),
        ("data", "$LMP.b.l.x"),
    ]:
        assert subjects.entry_id(subjects.of(entry_id)) == entry_id  # type: ignore[arg-type]
    for family in FAMILIES:
        entry_id = family, "a.b c"
        assert subjects.parse_alarm(subjects.alarm(entry_id, 1_700_000_000_123)) == (1_700_000_000_123, entry_id)
    for other in (subjects.floor, subjects.carrier(1), subjects.alarm(("data", "x"), 5)):
        assert subjects.entry_id(other) is None


async def test_a_bucket_tool_sees_keys_and_values_and_nothing_else() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store, client() as other:
        await store.put("config.theme", {"dark": True}, ttl=60)
        await store.put("raw", b"\x00\xff")
        await store.record("job/1").put({"state": "new", "tries": 2})
        await store.put("gone", 1)
        await store.delete("gone")
        await store.put("odd key", 1, request_id="mine")
        async with store.lock("door", ttl=60) as lock:
            await store.put("fenced", 1, fence=lock)

            bucket = await other.jetstream().key_value(f"limpet-{store.name}")
            keys = sorted(await bucket.keys())

        assert keys == ["config.theme", "fenced", "job/1", "odd=20key", "raw"]
        assert (await bucket.get("config.theme")).value == b'{"dark":true}'
        assert (await bucket.get("raw")).value == b"\x00\xff"
        assert (await bucket.get("job/1")).value == b'{"state":"new","tries":2}'


async def test_what_another_program_writes_is_raw_bytes() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store, client() as other:
        await store.put("mine", 1)
        bucket = await other.jetstream().key_value(f"limpet-{store.name}")
        await bucket.put("theirs", b"hello")
        await bucket.put("mine", b"2")

        assert await store.get("theirs") == b"hello"
        assert (await store.put("theirs", "ours")).version == 2
        assert (await store.put("mine", 3)).version == 2
        await bucket.delete("theirs")
        assert await store.get("theirs") is None
        assert (await store.keys()).keys == ["mine"]


async def test_any_request_id_is_a_cause() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        for name in ("-", "=", "+", "+=", "a b", "."):
            await store.put("key", name, request_id=name)
        assert [event.cause async for event in store.history("key")] == ["-", "=", "+", "+=", "a b", "."]


async def test_a_broken_header_is_that_keys_trouble_alone() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store, client() as other:
        await store.put("good", 1)
        await other.jetstream().publish(f"$KV.limpet-{store.name}.bad", b"1", headers={"Limpet": "put j what"})

        with pytest.raises(Corrupt, match="bad"):
            await store.get("bad")
        assert await store.get("good") == 1
        assert (await store.put("good", 2)).version == 2


async def test_a_process_that_only_writes_does_not_follow_the_stream() -> None:
    """Otherwise every message would be delivered back to a process that reads none: twice the work for each write."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        for number in range(9):
            await store.put(f"key/{number % 3}", number)

        window = limpet.Window(changes=10, age_ms_min=0)
        assert await engine_of(store).trim(store.name, window) == 0
        assert (await stream_of(store).info())["state"]["consumer_count"] == 0

        for number in range(30):
            await store.put(f"many/{number}", number)
        assert await engine_of(store).trim(store.name, window) == 29
        assert (await stream_of(store).info())["state"]["consumer_count"] == 1


async def test_ends_leave_the_stream_when_they_were_trimmed_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that come and go must not fill the stream with messages that say so."""
    monkeypatch.setattr("limpet.engines.nats.mirror.END_MS", -1)
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await store.put("stays", 1)
        for number in range(20):
            await store.put(f"session/{number}", number)
            await store.delete(f"session/{number}")
        engine = engine_of(store)
        await engine.trim(store.name, limpet.Window(changes=1, age_ms_min=0))

        info = await stream_of(store).info()

        # What stays, and how far the log was trimmed.
        assert info["state"]["messages"] <= 3
        assert await store.get("stays") == 1
        assert (await store.put("session/1", 1)).version == 1


@pytest.mark.slow
async def test_alarms_leave_the_stream_when_they_have_rung() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        for number in range(20):
            await store.put(f"short/{number}", 1, ttl=1)
            await store.put(f"renewed/{number}", 1, ttl=1)
            await store.persist(f"renewed/{number}")
        await asyncio.sleep(2.5)
        await store._session.sweeper.sweep(store.name)
        await store._session.sweeper.sweep(store.name)

        left = await stream_of(store).get({"seq": 1, "next_by_subj": stream_of(store).subjects.alarms})

        assert left is None
        assert (await store.status()).keys == 20


async def test_an_entry_of_the_largest_size_fits_a_server_as_it_comes() -> None:
    """A server takes messages of 1,048,576 bytes by default."""
    with nats(lambda folder: jetstream(folder).replace("max_payload: 5MB", "")) as small:
        async with limpet.open(small.url, sweep=False, max_value_bytes=2_000_000) as store:
            await store.put("key", b"x" * 1_000_000, meta={"by": "y" * 8_000})
            assert len(await store.get("key")) == 1_000_000
            with pytest.raises(ValueTooLarge, match="1,048,576"):
                await store.put("key", b"x" * 1_050_000)
            assert len(await store.get("key")) == 1_000_000


async def test_a_receipt_that_does_not_fit_is_refused() -> None:
    """A server closes the connection at a message that is too large, and the result of the batch would be unknown."""
    with nats(lambda folder: jetstream(folder).replace("max_payload: 5MB", "")) as small:
        async with limpet.open(small.url, sweep=False) as store:
            draft = store.batch(request_id="mine").set("a", {"field": "x" * 600_000}).set("b", {"field": "y" * 600_000})
            with pytest.raises(ValueTooLarge, match="1,048,576"):
                await draft.commit()
            assert (await store.keys()).keys == []


@pytest.mark.parametrize("settings", [{}, {"history": 5}, {"ttl": 60}])
async def test_a_bucket_of_another_program_is_refused_and_left_as_it_is(settings: dict[str, Any]) -> None:
    name = unique()
    async with client() as other, limpet.open(server(), namespace=name, sweep=False) as store:
        bucket = await other.jetstream().create_key_value(bucket=f"limpet-{name}", **settings)
        await bucket.put("key", b"theirs")

        for call in (store.get("key"), store.put("key", 1), store.put("new", 1), store.keys()):
            with pytest.raises(InvalidValue, match=r"not created by Limpet.*choose another bucket_prefix or namespace"):
                await call

        assert (await bucket.get("key")).value == b"theirs"
        assert await bucket.keys() == ["key"]


async def test_a_stream_like_ours_with_other_subjects_is_refused() -> None:
    name = unique()
    async with client() as other, limpet.open(server(), namespace=name, sweep=False) as store:
        about = {"max_msgs_per_subject": 1, "allow_atomic": True, "allow_msg_ttl": True, "storage": "file"}
        config = {"name": f"KV_limpet-{name}", "subjects": [f"$KV.limpet-{name}.>"], **about}
        answer = await other.request(f"$JS.API.STREAM.CREATE.KV_limpet-{name}", json.dumps(config).encode())
        assert "error" not in json.loads(answer.data)

        with pytest.raises(InvalidValue, match="not created by Limpet"):
            await store.put("key", 1)


@pytest.mark.parametrize("content", [None, "not a key"])
def test_credentials_that_cannot_be_used_are_an_invalid_value(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "bot.creds").write_text(content)

    with pytest.raises(InvalidValue, match="credentials"):
        limpet.sync.open(f"{server()}?credentials={tmp_path}/bot.creds")


async def test_a_stream_that_was_removed_is_made_again() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store, client() as other:
        before = await store.put("key", 1)
        await other.jetstream().delete_key_value(f"limpet-{store.name}")

        assert await store.get("key") is None
        assert (await store.put("key", 2)).version == before.version == 1


@pytest.mark.parametrize(
    ("query", "durability"),
    [("", "process"), ("sync=always", "disk"), ("storage=memory", "none")],
)
async def test_durability_is_as_the_url_says_of_the_server(query: str, durability: str) -> None:
    async with limpet.open(f"{server()}?{query}", namespace=unique(), sweep=False) as store:
        assert store.traits.durability == durability
        assert (await store.put("key", 1)).version == 1


@pytest.mark.parametrize(
    "query", ["replicas=2", "sync=sometimes", "bucket_prefix=a.b", "bucket_prefix=a%20b", "what=1"]
)
async def test_an_option_that_nobody_knows_is_refused(query: str) -> None:
    with pytest.raises(InvalidValue):
        await limpet.open(f"{server()}?{query}", sweep=False)


async def test_a_wrong_password_is_told_without_showing_it() -> None:
    with nats(lambda folder: jetstream(folder) + "authorization { user: ann, password: right }\n") as locked:
        entry_id = locked.url.removeprefix("nats://")
        with pytest.raises(PermissionDenied) as wrong:
            await limpet.open(f"nats://ann:wrong@{entry_id}", sweep=False)
        assert "wrong" not in str(wrong.value)
        async with limpet.open(f"nats://ann:right@{entry_id}", sweep=False) as store:
            assert (await store.put("key", 1)).version == 1


async def test_a_server_without_jetstream_says_so() -> None:
    with nats(lambda _: "max_payload: 1MB\n") as bare, pytest.raises(InvalidValue, match="JetStream"):
        await limpet.open(bare.url, sweep=False)


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        await limpet.open("nats://127.0.0.1:1", sweep=False)


async def test_what_a_user_may_not_do_is_denied(tmp_path: Path) -> None:
    """The server names the subject and not the request; the engine finds the request."""
    users = """
    authorization { users: [
        { user: all, password: x }
        { user: reader, password: x, permissions: {
            publish: { allow: ["$JS.API.>"] }
            subscribe: { allow: ["_INBOX.>"] } } }
    ] }
    """
    with nats(lambda folder: jetstream(folder) + users) as guarded:
        entry_id = guarded.url.removeprefix("nats://")
        async with (
            limpet.open(f"nats://all:x@{entry_id}", sweep=False) as store,
            limpet.open(f"nats://reader:x@{entry_id}", sweep=False) as reader,
        ):
            await store.put("key", 1)
            assert await reader.get("key") == 1
            with pytest.raises(PermissionDenied):
                await reader.put("key", 2)
            assert await store.get("key") == 1


async def test_a_namespace_of_many_keys_is_scanned_in_order() -> None:
    names = [f"0.{number}" for number in random.Random(3).sample(range(10_000), 1200)]
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await asyncio.gather(*(store.put(name, 1) for name in names))

        assert [entry.key async for entry in store.scan("0.")] == sorted(names)
        page = await store.keys(limit=1000)
        assert page.truncated
        assert (page.keys, page.cursor) == (sorted(names)[:1000], sorted(names)[999])
