"""Encryption: what an engine stores, and which keys can read it."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import Any

import pytest
import pytest_asyncio

import limpet
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import next_events, session_of
from limpet.errors import Conflict, Corrupt, InvalidValue
from limpet.model import Batch, Put

pytest.importorskip("cryptography")

OLD, NEW = os.urandom(32), os.urandom(32)


def ring(*ids: str, **options: Any) -> limpet.Keyring:
    """A keyring of these keys, the first of which is the current one."""
    keys = {"old": OLD, "new": NEW}
    return limpet.Keyring({name: keys[name] for name in ids}, **options)


@pytest_asyncio.fixture(loop_scope="module")
async def sealed(open_store: OpenStore) -> limpet.Store:
    """An encrypted store."""
    return await open_store(encryption=ring("old"))


@pytest_asyncio.fixture(loop_scope="module")
async def bare(open_store: OpenStore, url: str, monkeypatch: pytest.MonkeyPatch) -> limpet.Store:
    """The same database, opened without encryption keys."""
    if "encryption=" in url:
        pytest.skip("the URL itself turns encryption on, so no store can be opened without it")
    monkeypatch.delenv("LIMPET_ENCRYPTION_KEYS", raising=False)
    return await open_store()


async def put_back(bare: limpet.Store, entry: limpet.Entry, key: str | None = None, **changed: Any) -> None:
    """Write a stored value under its own or another key, as an attacker with write access to the database could."""
    assert entry.stored is not None
    put = Put(key or entry.key, changed.get("stored", entry.stored), meta_json=changed.get("meta", entry.meta_json))
    engine = session_of(bare).engine
    runner = getattr(getattr(bare, "_twin", None), "_runner", None)
    call = engine.commit(bare.name, Batch((), (put,)))
    await (call if runner is None else asyncio.to_thread(runner.run, call))


VALUES: dict[str, Any] = {
    "object": {"token": "secret-token", "n": 1},
    "text": "secret-token",
    "number": 1234567890123,
    "null": None,
    "bytes": b"secret-token",
    "no bytes": b"",
    "record": limpet.Fields(token=b"secret-token", n=1),
    "no fields": limpet.Fields(),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
async def test_what_is_put_comes_back(sealed: limpet.Store, value: Any) -> None:
    """With keys, values and meta are encrypted before an engine sees them, and every result is the same as without."""
    written = await sealed.put("key", value, meta={"by": "secret-writer"})
    read = await sealed.entry("key")

    assert read == written
    assert (read.value, read.kind, read.meta) == (value, written.kind, {"by": "secret-writer"})


async def test_the_engine_gets_nothing_but_bytes(sealed: limpet.Store, bare: limpet.Store) -> None:
    """With keys, values and meta are encrypted before an engine sees them, and every result is the same as without."""
    for name, value in VALUES.items():
        await sealed.put(name, value, meta={"by": "secret-writer"})
    await sealed.record("record").set(more="secret-token")
    await sealed.add("counter", 1234567890123)

    async for entry in bare.scan():
        assert entry.kind == "bytes"
        shown = bytes(entry.value) + str(entry.meta).encode()
        for secret in (b"token", b"secret", b"1234567890", b"more", base64.b64encode(b"secret-token")[:12]):
            assert secret not in shown


async def test_the_same_value_never_looks_the_same(sealed: limpet.Store, bare: limpet.Store) -> None:
    """With keys, values and meta are encrypted before an engine sees them, and every result is the same as without."""
    await sealed.put("a", "secret", meta={"by": "me"})
    first = await bare.entry("a")
    await sealed.put("a", "secret", meta={"by": "me"})
    second = await bare.entry("a")

    assert first is not None
    assert second is not None
    assert first.stored != second.stored
    assert first.meta_json != second.meta_json


async def test_the_log_has_what_was_written(sealed: limpet.Store) -> None:
    """With keys, values and meta are encrypted before an engine sees them, and every result is the same as without."""
    async with sealed.watch() as watch:
        await sealed.put("a", limpet.Fields(n=1), meta={"by": "me"})
        (put,) = await next_events(watch, 1)
        await sealed.record("a").set(n=2)
        (patch,) = await next_events(watch, 1)
        await sealed.delete("a")
        (deleted,) = await next_events(watch, 1)

    assert [event.op for event in (put, patch, deleted)] == ["put", "patch", "delete"]
    assert [event.value for event in (put, patch, deleted)] == [{"n": 1}, {"n": 2}, None]
    assert deleted.entry is not None
    assert deleted.entry.meta == {"by": "me"}


async def test_many_who_count_at_once_lose_nothing(open_store: OpenStore) -> None:
    """With keys, values and meta are encrypted before an engine sees them, and every result is the same as without."""
    first, second = await open_store(encryption=ring("old")), await open_store(encryption=ring("old"))

    counted = await asyncio.gather(*((first, second)[number % 2].add("n") for number in range(40)))

    assert sorted(counted) == list(range(1, 41))


async def test_a_receipt_hides_what_it_answers_with(sealed: limpet.Store, bare: limpet.Store) -> None:
    """With keys, values and meta are encrypted before an engine sees them, and every result is the same as without."""
    await sealed.put("taken", "secret-token")
    await sealed.take("taken", request_id="request-1")
    await sealed.add("counter", 1234567890123, request_id="request-2")
    await sealed.record("record").set({"token": "secret-token"}, request_id="request-3")

    engine = session_of(bare).engine
    runner = getattr(getattr(bare, "_twin", None), "_runner", None)
    call = engine.read(bare.name, ["request-1", "request-2", "request-3"], family="receipt")
    kept = await (call if runner is None else asyncio.to_thread(runner.run, call))

    for receipt in kept:
        assert receipt is not None
        assert isinstance(receipt.stored, bytes)
        for secret in (b"secret", b"token", b"1234567890123", (1234567890123).to_bytes(8, "big")):
            assert secret not in receipt.stored
    outcomes = [await sealed.outcome(f"request-{number}") for number in (1, 2, 3)]
    assert [[entry.value for entry in (*each.entries, *each.ended) if entry] for each in outcomes if each] == [
        ["secret-token"],
        [1234567890123],
        [{"token": "secret-token"}],
    ]


async def test_traits_say_whether_a_store_is_encrypted(sealed: limpet.Store, bare: limpet.Store) -> None:
    """`traits.encrypted` is True when a store is encrypted."""
    assert sealed.traits.encrypted
    assert not bare.traits.encrypted


# Who can read it --------------------------------------------------------------


@pytest.mark.parametrize("value", ["secret", b"raw", limpet.Fields(a=1)], ids=["json", "bytes", "record"])
async def test_a_value_cannot_be_moved(sealed: limpet.Store, bare: limpet.Store, value: Any) -> None:
    """Data encrypted for one key, namespace or part is Corrupt in any other."""
    await sealed.put("a", value)
    await sealed.put("b", value)
    found = await bare.entry("a")
    assert found is not None

    await put_back(bare, found, "b")
    await put_back(bare.namespace(f"{bare.name}-b"), found)

    with pytest.raises(Corrupt, match="'b'"):
        await sealed.get("b")
    with pytest.raises(Corrupt):
        await sealed.namespace(f"{sealed.name}-b").get("a")
    assert await sealed.get("a") == value


async def test_meta_cannot_be_moved(sealed: limpet.Store, bare: limpet.Store) -> None:
    """Data encrypted for one key, namespace or part is Corrupt in any other."""
    await sealed.put("a", "secret", meta={"may": "read"})
    await sealed.put("b", "secret", meta={"may": "write"})
    first, second = await bare.entry("a"), await bare.entry("b")
    assert first is not None
    assert second is not None
    value = base64.b64decode(second.meta["$sealed"])

    await put_back(bare, first, meta=second.meta_json)
    with pytest.raises(Corrupt):
        await sealed.entry("a")
    await put_back(bare, second, stored=b"\0" + value)
    with pytest.raises(Corrupt):
        await sealed.entry("b")


@pytest.mark.parametrize("part", ["first byte", "nonce", "middle", "last byte", "cut", "half", "header alone", "more"])
async def test_an_altered_entry_is_reported(sealed: limpet.Store, bare: limpet.Store, part: str) -> None:
    """Altered or truncated data is Corrupt."""
    await sealed.put("a", "secret" * 10)
    found = await bare.get("a")

    offsets = {"first byte": 0, "nonce": 10, "middle": len(found) // 2, "last byte": len(found) - 1}
    if part in offsets:
        at = offsets[part]
        altered = found[:at] + bytes([found[at] ^ 1]) + found[at + 1 :]
    else:
        altered = {
            "cut": found[:-1],
            "half": found[: len(found) // 2],
            "header alone": found[:5],
            "more": found + b"\0",
        }[part]
    await bare.put("a", altered)

    for ask in (lambda: sealed.get("a"), lambda: sealed.add("a"), lambda: sealed.take("a")):
        with pytest.raises(Corrupt):
            await ask()


async def test_a_missing_key_is_named(open_store: OpenStore) -> None:
    """Data encrypted with a key that the keyring lacks is Corrupt, and the error names the key by its id."""
    await (await open_store(encryption=ring("old"))).put("a", "secret")
    store = await open_store(encryption=ring("new"))

    with pytest.raises(Corrupt, match="'old'") as raised:
        await store.get("a")

    assert base64.b64encode(OLD).decode() not in str(raised.value)
    assert "secret" not in str(raised.value)


async def test_what_cannot_be_read_is_not_lost(open_store: OpenStore) -> None:
    """Data encrypted with a key that the keyring lacks is Corrupt, and the error names the key by its id.

    A caller without the key may delete an entry, and let it expire, but not take it.
    """
    owner, store = await open_store(encryption=ring("old")), await open_store(encryption=ring("new"))
    for key in ("taken", "counted", "deleted"):
        await owner.put(key, 1, meta={"by": "me"})

    for call in (lambda: store.take("taken"), lambda: store.add("counted"), lambda: store.record("counted").set(a=1)):
        with pytest.raises(Corrupt, match="'old'"):
            await call()

    assert await store.delete("deleted") is True
    assert [entry.key async for entry in owner.scan()] == ["counted", "taken"]


async def test_a_key_of_the_same_name_opens_nothing(open_store: OpenStore) -> None:
    """Altered or truncated data is Corrupt."""
    await (await open_store(encryption=ring("old"))).put("a", "secret")
    store = await open_store(encryption=limpet.Keyring({"old": NEW}))

    with pytest.raises(Corrupt, match="'old'"):
        await store.get("a")


async def test_what_is_not_encrypted_is_refused(sealed: limpet.Store, bare: limpet.Store) -> None:
    """Data that is not encrypted is Corrupt in an encrypted store, unless its keyring takes plain values."""
    await bare.put("a", "forged")
    await bare.put("b", limpet.Fields(a=1))
    await sealed.put("c", 1)
    found = await bare.entry("c")
    assert found is not None
    await put_back(bare, found, meta=b'{"may":"write"}')

    for key in ("a", "b", "c"):
        with pytest.raises(Corrupt, match="not encrypted"):
            await sealed.entry(key)


async def test_plain_values_are_read_while_a_store_is_encrypted(bare: limpet.Store, open_store: OpenStore) -> None:
    """Data that is not encrypted is Corrupt in an encrypted store, unless its keyring takes plain values."""
    await bare.put("a", {"n": 1}, meta={"by": "me"}, ttl=60)
    await bare.put("b", limpet.Fields(n=1))
    await bare.add("c", 5)
    store = await open_store(encryption=ring("old", plain=True))

    assert await store.get("a") == {"n": 1}
    assert (await store.record("b").set(n=2)).value == {"n": 2}
    assert await store.add("c") == 6
    assert (await store.reseal()).resealed == 1

    strict = await open_store(encryption=ring("old"))
    assert [(entry.key, entry.value) async for entry in strict.scan()] == [("a", {"n": 1}), ("b", {"n": 2}), ("c", 6)]
    entry = await strict.entry("a")
    assert entry is not None
    assert (entry.meta, entry.expires_at is None) == ({"by": "me"}, False)


# Changing keys ----------------------------------------------------------------


async def test_every_key_of_the_ring_reads(open_store: OpenStore) -> None:
    """Every key of the keyring reads, and the current one writes."""
    await (await open_store(encryption=ring("old"))).put("a", 1, meta={"by": "me"})
    both = await open_store(encryption=ring("new", "old"))

    assert await both.get("a") == 1
    await both.put("b", 2, meta={"by": "me"})

    after = await open_store(encryption=ring("new"))
    assert await after.get("b") == 2
    with pytest.raises(Corrupt):
        await after.get("a")


async def test_keys_can_be_replaced_while_a_store_is_open(open_store: OpenStore) -> None:
    """Every key of the keyring reads, and the current one writes."""
    keyring = ring("old")
    store = await open_store(encryption=keyring)
    await store.put("a", 1)

    keyring.replace({"new": NEW, "old": OLD})
    await store.put("b", 2)

    assert [await store.get(key) for key in "ab"] == [1, 2]
    assert await (await open_store(encryption=ring("new"))).get("b") == 2


async def test_sealing_anew_keeps_everything_else(open_store: OpenStore) -> None:
    """`reseal` encrypts with the current key what another has, and keeps value, meta, writer and time to live."""
    before = await open_store(encryption=ring("old"), writer="ann")
    for name, value in VALUES.items():
        await before.put(name, value, ttl=60, meta={"by": name})
    entries = [entry async for entry in before.scan()]
    both = await open_store(encryption=ring("new", "old"))
    await both.put("newer", 1)

    done = await both.reseal()
    again = await both.reseal()

    assert (done.looked_at, done.resealed, done.cursor) == (len(VALUES) + 1, len(VALUES), None)
    assert again.resealed == 0
    after = await open_store(encryption=ring("new"))
    found = [entry async for entry in after.scan() if entry.key != "newer"]
    assert [(entry.key, entry.value, entry.kind, entry.meta, entry.expires_ms) for entry in found] == [
        (entry.key, entry.value, entry.kind, entry.meta, entry.expires_ms) for entry in entries
    ]
    assert {entry.writer for entry in found} == {"ann"}
    assert [entry.version for entry in found] == [2] * len(VALUES)


async def test_sealing_anew_names_itself(open_store: OpenStore) -> None:
    """A change by which `reseal` encrypts anew has a cause that starts with `limpet-reseal-`."""
    await (await open_store(encryption=ring("old"))).put("a", 1)
    both = await open_store(encryption=ring("new", "old"))
    async with both.watch() as watch:
        await both.reseal()
        (event,) = await next_events(watch, 1)

    assert (event.op, event.key, event.value) == ("put", "a", 1)
    assert event.cause is not None
    assert event.cause.startswith("limpet-reseal-")


async def test_sealing_anew_goes_on_where_it_was_interrupted(open_store: OpenStore) -> None:
    """`reseal` encrypts with the current key what another has, and keeps value, meta, writer and time to live."""
    before = await open_store(encryption=ring("old"))
    for number in range(10):
        await before.put(f"{number}", number)
    both = await open_store(encryption=ring("new", "old"))

    first = await both.reseal(limit=4)
    rest = await both.reseal(after=first.cursor)

    assert (first.looked_at, first.resealed, first.cursor) == (4, 4, "3")
    assert (rest.looked_at, rest.resealed, rest.cursor) == (6, 6, None)


async def test_sealing_anew_loses_no_write(open_store: OpenStore) -> None:
    """`reseal` loses no write that comes meanwhile."""
    before = await open_store(encryption=ring("old", "new"))
    for number in range(30):
        await before.put(f"k{number:02}", 0)
    both = await open_store(encryption=ring("new", "old"))

    async def count() -> None:
        for number in range(60):
            await before.add(f"k{number % 30:02}")

    _, done = await asyncio.gather(count(), both.reseal())

    assert done.looked_at == 30
    assert [entry.value async for entry in both.scan()] == [2] * 30


async def test_what_has_expired_is_not_brought_back(open_store: OpenStore, elapse: Elapse) -> None:
    """`reseal` loses no write that comes meanwhile."""
    store = await open_store(encryption=ring("old"), sweep=False)
    await store.put("a", 1, ttl=1)
    await elapse(1.5)

    await (await open_store(encryption=ring("new", "old"), sweep=False)).reseal()

    assert await store.entry("a") is None


async def test_the_use_of_each_key_is_listed(open_store: OpenStore) -> None:
    """`seals` counts the entries and changes that each key has encrypted, the current key first."""
    before = await open_store(encryption=ring("old"))
    for number in range(3):
        await before.put(f"{number}", number)
    both = await open_store(encryption=ring("new", "old"))
    await both.put("3", 3)

    found = {seal.key_id: (seal.is_current, seal.entries) for seal in await both.seals()}
    await both.reseal()
    after = await both.seals()

    assert found == {"new": (True, 1), "old": (False, 3)}
    assert [(seal.key_id, seal.entries) for seal in after] == [("new", 4), ("old", 0)]
    assert after[1].changes == 3


@pytest.mark.parametrize("write", ["add", "put", "swap", "take"])
async def test_a_request_is_known_after_the_key_was_changed(open_store: OpenStore, write: str) -> None:
    """A repeated request returns its first result also after the current key was changed."""
    keyring = ring("old")
    store = await open_store(encryption=keyring)
    await store.put("taken", "secret")
    await store.record("record").put({"a": 1})
    act: dict[str, Any] = {
        "add": lambda by=1: store.add("n", by, request_id="request-1"),
        "put": lambda by=1: store.put("p", by, request_id="request-1"),
        "swap": lambda by=1: store.record("record").swap("a", 1, by, request_id="request-1"),
        "take": lambda by=1: store.take("taken" if by == 1 else "other", request_id="request-1"),
    }
    first = await act[write]()
    keyring.replace({"new": NEW, "old": OLD})

    assert await act[write]() == first
    with pytest.raises(Conflict) as raised:
        await act[write](7)
    assert raised.value.reason == "stale_request"


# Opening ----------------------------------------------------------------------


async def test_an_index_is_refused(sealed: limpet.Store) -> None:
    """An encrypted store refuses an index and gives the reason; scans with `where` work the same without one."""
    await sealed.put("a", {"n": 1})
    await sealed.put("b", limpet.Fields(n=2))

    with pytest.raises(InvalidValue, match="encrypted"):
        await sealed.index("n")
    assert [entry.key async for entry in sealed.scan(where=limpet.field("n") > 1)] == ["b"]


async def test_a_store_without_keys_has_none_to_change(bare: limpet.Store) -> None:
    """`reseal` and `seals` of a store that is not encrypted are InvalidValue."""
    with pytest.raises(InvalidValue, match="not encrypted"):
        await bare.reseal()
    with pytest.raises(InvalidValue, match="not encrypted"):
        await bare.seals()


@pytest.mark.face("async")
async def test_a_url_names_where_the_keys_are(url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL names where the keys are, by `encryption=env:NAME` or `file:PATH`, and one that holds a key is refused."""
    if "encryption=" in url:
        pytest.skip("this URL has the option already")
    key = base64.b64encode(OLD).decode()
    monkeypatch.setenv("SOME_KEYS", f"old:{key}")
    (tmp_path / "keys").write_text(f"# of this test\nold:{key}\n")
    joint = "&" if "?" in url else "?"

    for where in ("env:SOME_KEYS", f"file:{tmp_path / 'keys'}"):
        async with limpet.open(f"{url}{joint}encryption={where}", namespace="t-keys") as store:
            assert store.traits.encrypted
    for wrong in (f"old:{key}", key, "env:", "file:", "env:NOT_SET", f"file:{tmp_path / 'none'}"):
        with pytest.raises(InvalidValue) as raised:
            await limpet.open(f"{url}{joint}encryption={wrong}")
        assert key not in str(raised.value)


@pytest.mark.face("async")
async def test_keys_come_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no keys given, those in `LIMPET_ENCRYPTION_KEYS` are used, unless the URL has `encryption=off`."""
    if "encryption=" in url:
        pytest.skip("this URL names the keyring already")
    monkeypatch.setenv("LIMPET_ENCRYPTION_KEYS", f"old:{base64.b64encode(OLD).decode()}")
    joint = "&" if "?" in url else "?"

    async with limpet.open(url, namespace="t-keys") as store:
        assert store.traits.encrypted
    async with limpet.open(f"{url}{joint}encryption=off", namespace="t-keys") as store:
        assert not store.traits.encrypted
