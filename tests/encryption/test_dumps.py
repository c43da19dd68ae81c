"""No engine stores a secret in any readable form: not in its files, its journals or its logs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.draft import digest_of
from limpet.model import Add, Delete, Put, Write
from limpet.transition import read_receipt
from tests import servers
from tests.encryption.support import Secrets, files_under, keyring

SECRETS = 1000


@contextlib.contextmanager
def sqlite(folder: Path) -> Iterator[tuple[str, Path, Callable[[], None]]]:
    yield f"sqlite:///{folder}/state.db", folder, lambda: None


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[tuple[str, Path, Callable[[], None]]]:
    # Every statement goes to the log of the server.
    settings = {"fsync": "off", "shared_buffers": "16MB", "log_statement": "all", "log_min_duration_statement": "0"}
    with servers.postgres(settings) as server:
        yield server.url, server._folder, server.stop


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[tuple[str, Path, Callable[[], None]]]:
    settings = {"appendonly": "yes", "rdbcompression": "no", "aof-use-rdb-preamble": "no", "save": "3600 1"}
    with servers.redis(settings) as server:
        yield server.url, server._folder, server.stop


@contextlib.contextmanager
def nats(folder: Path) -> Iterator[tuple[str, Path, Callable[[], None]]]:
    with servers.nats() as server:
        yield server.url, server._folder, server.stop


SERVERS = {"sqlite": sqlite, "postgres": postgres, "redis": redis, "nats": nats}


async def write_all(store: limpet.Store, secrets: Secrets, count: int) -> None:
    """Write secrets by every verb: some with a request id, some overwritten, deleted or taken."""

    async def put(number: int) -> None:
        name = f"{number}"
        match number % 10:
            case 0:
                await store.put(name, {"token": [secrets.text(), {secrets.text(): secrets.number()}]})
            case 1:
                await store.put(name, secrets.text(), meta={"by": secrets.text()}, ttl=1000)
            case 2:
                await store.put(name, secrets.text().encode(), request_id=f"put {number}")
                await store.update(name, lambda found: found + secrets.text().encode())
            case 3:
                await store.record(name).put({"a": secrets.text(), secrets.text(): secrets.text().encode()})
                await store.record(name).set({"b": secrets.text()}, request_id=f"set {number}")
            case 4:
                await store.add(name, secrets.number(), request_id=f"add {number}")
                await store.add(name, 1, meta={"by": secrets.text()})
            case 5:
                await store.put(name, secrets.text(), meta={"by": secrets.text()})
                await store.take(name, request_id=f"take {number}")
            case 6:
                value = secrets.text()
                await store.put(name, {"state": value})
                await store.put(name, {"state": secrets.text()}, expect=limpet.field("state") == value)
                await store.put(name, secrets.text(), expect=limpet.PRESENT)
            case 7:
                await store.put(name, limpet.Fields(state=secrets.text()), meta={"by": secrets.text()})
                await store.touch(name, 1000)
                await store.delete(name)
            case 8:
                batch = store.batch(request_id=f"batch {number}").put(name, secrets.text())
                await batch.add(f"{name}/n", secrets.number()).set(f"{name}/r", token=secrets.text()).commit()
            case _:
                value = secrets.text()
                await store.record(name).put({"state": value})
                await store.record(name).swap("state", value, secrets.text(), set={"c": secrets.number()})

    for start in range(0, count, 50):
        await asyncio.gather(*map(put, range(start, min(start + 50, count))))


@contextlib.asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[limpet.Store]:
    async with limpet.open(url, namespace="tenant", **options) as store:
        yield store


@pytest.mark.parametrize("engine", SERVERS)
async def test_no_secret_is_in_what_an_engine_keeps(engine: str, tmp_path: Path) -> None:
    secrets, plain = Secrets(), Secrets()
    with SERVERS[engine](tmp_path) as (url, folder, stop):
        async with opened(url, encryption=keyring("k1")) as store:
            await write_all(store, secrets, SECRETS)
            if engine == "sqlite":
                assert secrets.found_in(files_under(folder)) == set()
            async with limpet.open(url, namespace="open") as bare:
                await write_all(bare, plain, 50)
        stop()
        files = files_under(folder)

    assert secrets.found_in(files) == set()
    # Without encryption the same search finds the secrets.
    assert {"text", "digits"} <= plain.found_in(files)


async def test_a_receipt_has_no_hash_that_could_be_guessed(tmp_path: Path) -> None:
    """A counter usually moves by a small number, so an attacker could hash all likely requests and compare."""
    url = f"sqlite:///{tmp_path}/state.db"
    async with opened(url, encryption=keyring("k1")) as store, opened(url) as bare:
        await store.add("n", 7, request_id="request-1")
        await store.put("p", 7, request_id="request-2")
        await store.put("p", 7, request_id="request-3")
        await store.take("p", request_id="request-4")

        kept = await bare._session.engine.read("tenant", [f"request-{n}" for n in (1, 2, 3, 4)], family="receipt")

    digests = [read_receipt(receipt).digest[:16] for receipt in kept if receipt is not None]
    requests: list[tuple[Write, ...]] = [
        (Add("n", 7),),
        (Put("p", b"7"),),
        (Put("p", b"7"),),
        (Delete("p", take=True),),
    ]
    assert [digest in [digest_of((), writes) for writes in requests] for digest in digests] == [False] * 4
    assert len({*digests}) == 4
