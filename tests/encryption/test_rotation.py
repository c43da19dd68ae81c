"""Keys are changed twice while processes read and write: no read fails, and no write is lost.

The audit trail and recoverable copies of a namespace change their key too, and stay valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.encryption.engine import EncryptedEngine
from limpet.encryption.keyring import key_id_of_meta, key_id_of_value
from limpet.keys import Span
from limpet.model import FAMILIES
from limpet.semantic.rows import rows_of
from limpet.semantic.store import SemanticStore
from tests.encryption.support import line, replace_file
from tests.encryption.workers import KEYS, Worker
from tests.engines import ENGINES, unique, url_of
from tests.semantic.support import CHECKPOINT, WRITER, audit

WORKERS = 2
STILL = 150
STEPS = 4

URLS = {
    "sqlite": lambda folder: f"sqlite:///{folder}/state.db?",
    "postgres": lambda _: f"{os.environ['LIMPET_TEST_POSTGRES']}?schema=rotation_{uuid.uuid4().hex[:12]}&",
    "redis": lambda _: f"{os.environ['LIMPET_TEST_REDIS'].rpartition('/')[0]}/61?",
    "nats": lambda _: f"{os.environ['LIMPET_TEST_NATS']}?bucket_prefix=rotation-{uuid.uuid4().hex[:12]}-&",
}


async def receive(worker: Worker) -> Any:
    return await asyncio.to_thread(worker.receive)


async def advance(workers: list[Worker]) -> None:
    """Wait until every worker has done some more steps, and none has failed."""
    for worker in workers:
        worker.send(STEPS)
    for worker in workers:
        assert await receive(worker) == []


@pytest.mark.parametrize("engine", URLS)
async def test_keys_are_changed_under_load(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = {name: line(name, os.urandom(32)) for name in ("k1", "k2", "k3")}
    replace_file(file, keys["k1"])
    url = f"{URLS[engine](tmp_path)}encryption=file:{file}"
    namespace = f"rotation-{uuid.uuid4().hex[:12]}"
    async with limpet.open(url, namespace=namespace, sweep=False) as store:
        for start in range(0, STILL, 50):
            batch = store.batch()
            for number in range(start, start + 50):
                batch.put(f"still/{number:03}", {"key": f"still/{number:03}"}, meta={"n": number})
            await batch.commit()
        with contextlib.ExitStack() as ending:
            workers = [ending.enter_context(Worker("work", url, namespace, f"w{n}")) for n in range(WORKERS)]
            for worker in workers:
                assert await receive(worker) == "ready"
            await advance(workers)
            for old, new in (("k1", "k2"), ("k2", "k3")):
                replace_file(file, keys[old] + keys[new])
                await advance(workers)
                replace_file(file, keys[new] + keys[old])
                await advance(workers)
                done = await store.reseal()
                assert done.looked_at >= STILL
                assert {seals.key_id for seals in await store.seals() if seals.entries} == {new}
                replace_file(file, keys[new])
                await advance(workers)
            reports = [await end(worker) for worker in workers]

        assert [report["failed"] for report in reports] == [[], []]
        for key in range(KEYS):
            name = f"counter/{key}"
            assert await store.get(name, 0) == sum(report["done"].get(name, 0) for report in reports)
        for report in reports:
            for name, step in report["done"].items():
                if name.startswith("own/"):
                    entry = await store.entry(name)
                    assert entry is not None
                    assert entry.value == step
                    assert entry.expires_at is not None
                    assert entry.meta == {"step": entry.value}
        entries = [entry async for entry in store.scan("still/")]
        assert [entry.meta["n"] for entry in entries] == list(range(STILL))
        # Written once, and encrypted with another key twice.
        assert {entry.version for entry in entries} == {3}


async def end(worker: Worker) -> Any:
    """End a worker, and return its report."""
    worker.send(None)
    return await receive(worker)


START = "tenant/acme/project/docs/"


async def put(kept: SemanticStore, name: str, number: int, **semantics: Any) -> None:
    await kept.kv_put(f"{START}{name}", {"n": number}, writer=WRITER, semantics={**CHECKPOINT, **semantics})


async def keys_in_use(store: limpet.Store) -> set[str]:
    """The keys by which entries in the database are encrypted. Locks and counters are not, and receipts expire."""
    encrypted = store._session.engine
    assert isinstance(encrypted, EncryptedEngine)
    found: set[str] = set()
    for family in set(FAMILIES) - {"lock", "receipt", "sequence"}:
        page = await encrypted._inner.scan(store.name, Span("", None), family=family)
        found |= {key_id_of_value(entry.stored) for entry in page.entries if entry.stored is not None}
        found |= {key_id_of_meta(entry.meta_json) for entry in page.entries if entry.meta_json is not None}
        assert page.entries
    return found


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_audited_namespace_needs_no_old_key_after_a_rotation(engine: str, tmp_path: Path) -> None:
    old, new = os.urandom(32), os.urandom(32)
    keyring = limpet.Keyring({"old": old})
    async with limpet.open(url_of(engine, tmp_path), namespace=unique("rotated"), encryption=keyring) as store:
        kept = SemanticStore(store, audit=audit())
        for number in range(6):
            await put(kept, "ab"[number % 2], number)
        await put(kept, "brief", 1, ttlSeconds=0.05)
        await put(kept, "lasting", 1, ttlSeconds=60)
        await asyncio.sleep(0.1)
        await kept.seal()
        for number in range(6, 10):
            await put(kept, "ab"[number % 2], number)
        await put(kept, "pending", 1, ttlSeconds=0.05)
        keyring.replace({"new": new, "old": old})
        # A row that has the new key already, and whose predecessors will be written after it.
        await put(kept, "a", 10)
        before = [row async for row in rows_of(store)]

        first = await store.reseal(limit=5)
        assert first.cursor is not None
        await store.reseal(after=first.cursor)
        keyring.replace({"new": new})

        assert await keys_in_use(store) == {"new"}
        assert [seals.key_id for seals in await store.seals() if seals.entries] == ["new"]
        assert [row async for row in rows_of(store)] == before
        await asyncio.sleep(0.06)
        report = await kept.verify()
        assert (report.problems, report.pending) == ((), 1)
        await kept.seal()
        after = [row async for row in rows_of(store)]
        assert [{**row, "seq": None} for row in after[: len(before)]] == [{**row, "seq": None} for row in before]
        assert (await kept.verify()).problems == ()
        for name in ("brief", "pending"):
            assert (await kept.recover(f"{START}{name}", writer="operator")).value == {"n": 1}
        await put(kept, "lasting", 2)
        await kept.seal()
        assert (await kept.verify()).problems == ()


async def test_a_trail_is_sealed_while_its_key_is_changed(tmp_path: Path) -> None:
    old, new = os.urandom(32), os.urandom(32)
    keyring = limpet.Keyring({"old": old})
    async with limpet.open(url_of("redis", tmp_path), namespace=unique("rotated"), encryption=keyring) as store:
        kept = SemanticStore(store, audit=audit())
        for number in range(150):
            await put(kept, f"{number % 7}", number)
        keyring.replace({"new": new, "old": old})

        async def write() -> None:
            for number in range(30):
                await put(kept, f"{number % 7}", -number)

        await asyncio.gather(store.reseal(), kept.seal(), write())
        await store.reseal()
        keyring.replace({"new": new})
        await kept.seal()

        report = await kept.verify()
        assert (report.sealed, report.problems) == (180, ())
        assert [seals.key_id for seals in await store.seals() if seals.entries] == ["new"]


@pytest.mark.parametrize("verb", ["read", "scan", "changes"])
async def test_a_key_that_is_dropped_while_a_read_is_under_way_still_decrypts_it(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value was fetched, then its key was replaced and dropped, and only then the value was decrypted."""
    old, new = os.urandom(32), os.urandom(32)
    keyring = limpet.Keyring({"new": new, "old": old}, current="old")
    async with limpet.open("memory:", encryption=keyring, sweep=False) as store:
        await store.put("a", 1)
        encrypted = store._session.engine
        assert isinstance(encrypted, EncryptedEngine)
        fetch = getattr(encrypted._inner, verb)

        async def fetch_and_drop(*args: Any, **options: Any) -> Any:
            found = await fetch(*args, **options)
            keyring.replace({"new": new})
            return found

        monkeypatch.setattr(encrypted._inner, verb, fetch_and_drop)
        act: dict[str, Any] = {
            "read": lambda: encrypted.read(store.name, ["a"]),
            "scan": lambda: encrypted.scan(store.name, Span("", None)),
            "changes": lambda: encrypted.changes(store.name, 0),
        }
        await act[verb]()
        with pytest.raises(limpet.errors.Corrupt, match="lacks"):
            await act[verb]()
