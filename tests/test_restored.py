"""Real backups, restored on real servers: a reader that saw more than they hold gets Compacted, and misses nothing.

A store is backed up, gets changes that a reader sees, is restored, and gets as many changes again. Store,
namespace, epoch and revisions are then those that were seen. Only the changes are others.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest

import limpet
from limpet.engine import Restoring
from limpet.errors import Compacted, Conflict, InvalidValue, LockLost, TransientError
from tests import servers

PATIENCE_S = 120.0


class Place(Protocol):
    """Where a store is, that can be saved and put back."""

    url: str

    async def save(self) -> None: ...

    async def put_back(self) -> None: ...


def copy(source: Path, target: Path) -> None:
    """Copy a file or a folder as it is, its owner included."""
    subprocess.run(["rm", "-rf", target], check=True)
    subprocess.run(["cp", "-a", source, target], check=True)


class File:
    """A SQLite file, copied while no process has it open."""

    def __init__(self, folder: Path) -> None:
        self._file, self._saved = folder / "state.db", folder / "saved.db"
        self.url = f"sqlite:///{self._file}"

    async def save(self) -> None:
        copy(self._file, self._saved)

    async def put_back(self) -> None:
        copy(self._saved, self._file)


class Folder:
    """A server whose folder is copied while it is down."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._folder: Path = server._folder
        self._saved = Path(f"{self._folder}-saved")
        self.url: str = server.url

    async def save(self) -> None:
        await asyncio.to_thread(self._move, self._folder, self._saved)

    async def put_back(self) -> None:
        await asyncio.to_thread(self._move, self._saved, self._folder)

    def _move(self, source: Path, target: Path) -> None:
        self._server.stop()
        copy(source, target)
        self._server.start()


class Dump:
    """A Redis server that stays up, while its keys are dumped, dropped and put back."""

    def __init__(self, server: servers.Redis) -> None:
        self.url = server.url
        self._saved: dict[bytes, bytes] = {}

    async def save(self) -> None:
        async with self._client() as client:
            self._saved = {key: await client.dump(key) for key in await client.keys("*")}

    async def put_back(self) -> None:
        async with self._client() as client, client.pipeline(transaction=True) as pipe:
            pipe.flushall()
            for key, dumped in self._saved.items():
                pipe.restore(key, 0, dumped)
            await pipe.execute()

    def _client(self) -> Any:
        from redis.asyncio import Redis

        return Redis.from_url(self.url)


@contextlib.contextmanager
def sqlite() -> Iterator[Place]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="limpet-restored-") as folder:
        yield File(Path(folder))


@contextlib.contextmanager
def folder_of(running: AbstractContextManager[Any]) -> Iterator[Place]:
    with running as server:
        place = Folder(server)
        try:
            yield place
        finally:
            subprocess.run(["rm", "-rf", place._saved], check=True)


@contextlib.contextmanager
def dump() -> Iterator[Place]:
    with servers.redis() as server:
        yield Dump(server)


PLACES: dict[str, Callable[[], AbstractContextManager[Place]]] = {
    "sqlite": sqlite,
    "postgresql": lambda: folder_of(servers.postgres()),
    "redis": lambda: folder_of(servers.redis({"appendonly": "yes", "appendfsync": "always"})),
    "redis-dump": dump,
    "nats": lambda: folder_of(servers.nats()),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with PLACES[request.param]() as found:
        yield found


@pytest.fixture(params=[name for name in PLACES if name != "sqlite"])
def server(request: pytest.FixtureRequest) -> Iterator[Place]:
    with PLACES[request.param]() as found:
        yield found


async def write(store: limpet.Store, *keys: str) -> None:
    """Write keys, however long a server takes to come back."""
    for key in keys:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await store.put(key, key)
                    break
                except TransientError:
                    await asyncio.sleep(0.1)


async def test_a_restored_backup_is_never_followed_in_silence(place: Place) -> None:
    """The changes that the consumer has not seen are at revisions that it has seen."""
    async with limpet.open(place.url, sweep=False) as store:
        await write(store, "a", "b")
        async with store.watch(after=0) as watch:
            kept = [(await anext(watch)).position for _ in range(2)]
    await place.save()
    async with limpet.open(place.url, sweep=False) as store, store.watch() as watch:
        await write(store, "lost-1", "lost-2")
        lost = [(await anext(watch)).position for _ in range(2)]
    await place.put_back()

    async with limpet.open(place.url, sweep=False) as store:
        await write(store, "new-1", "new-2", "new-3")
        for position in lost:
            with pytest.raises(Compacted):
                async with store.watch(after=position):
                    pass
        # What both histories have in common can be resumed, and what came after it is all there.
        for done, position in enumerate(kept, 1):
            async with store.watch(after=position) as watch, asyncio.timeout(PATIENCE_S):
                found = [(await anext(watch)).key for _ in range(5 - done)]
            assert found == ["a", "b", "new-1", "new-2", "new-3"][done:]


@pytest.mark.slow
async def test_a_running_watch_ends_when_its_store_is_put_back(server: Place) -> None:
    """The watcher has no position to give: it stands in the log, and does not notice that its server was away."""
    async with limpet.open(server.url, sweep=False) as store, limpet.open(server.url, sweep=False) as writer:
        await write(writer, "a")
        await server.save()
        # A server that just came back may still refuse.
        await write(writer, "b")
        async with store.watch() as watch:
            await write(writer, "lost-1", "lost-2")
            for _ in range(2):
                await anext(watch)
            waiting = asyncio.ensure_future(anext(watch))
            await server.put_back()
            await write(writer, "new-1", "new-2", "new-3", "new-4", "new-5")

            with pytest.raises(Compacted):
                await asyncio.wait_for(waiting, PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sqlite", "postgresql", "redis"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
async def test_a_new_epoch_leaves_the_past_behind(name: str, encrypted: bool) -> None:
    """After an operator put the data back by the engine's own tool: nothing of the lost time matches."""
    keyring = limpet.Keyring({"k1": bytes(32)}) if encrypted else None
    with PLACES[name]() as place:
        async with limpet.open(place.url, sweep=False, encryption=keyring) as store:
            await write(store, "k")
        await place.save()
        async with limpet.open(place.url, sweep=False, encryption=keyring) as store:
            async with store.watch() as watch:
                entry = await store.put("k", "lost")
                position = (await anext(watch)).position
            lock = store.lock("nightly", ttl=3600)
            await lock.acquire()
            token = lock.token
            assert token is not None
        await place.put_back()

        async with limpet.open(place.url, sweep=False, encryption=keyring) as store:
            engine = store._session.engine
            assert isinstance(engine, Restoring)
            before = await store.status()
            assert await engine.raise_epoch(1000) == before.epoch + 1
            assert await store.get("k") == "k"

        async with limpet.open(place.url, sweep=False, encryption=keyring) as store:
            status = await store.status()
            assert (status.epoch, status.store_id) == (before.epoch + 1, before.store_id)
            assert status.revision >= before.revision + 1000
            async with store.watch() as watch:
                new = await store.put("k", "new")
                assert (await anext(watch)).entry == new
                kept = watch.position
            assert new.version == entry.version
            assert new.revision > before.revision + 1000
            with pytest.raises(Conflict):
                await store.put("k", "x", expect=entry)
            with pytest.raises(LockLost):
                await store.put("k", "x", fence=limpet.Fence("nightly", token))
            again = store.lock("nightly", ttl=3600)
            await again.acquire()
            assert again.token is not None
            assert again.token > before.revision + 1000
            with pytest.raises(Compacted):
                async with store.watch(after=position):
                    pass
            # The log goes on, over the revisions that were left out.
            assert [event.value async for event in store.history("k")] == ["k", "new"]
            await store.put("k", "newer")
            async with store.watch(after=kept) as watch:
                assert (await anext(watch)).key == "k"
            assert (await store.namespace("never-written").status()).revision == 0


async def test_a_watch_goes_on_into_a_new_epoch() -> None:
    """Nothing was put back under it, so it has missed nothing."""
    with sqlite() as place:
        async with limpet.open(place.url, sweep=False) as store, store.watch() as watch:
            await store.put("a", 1)
            await anext(watch)
            engine = store._session.engine
            assert isinstance(engine, Restoring)
            await engine.raise_epoch(1000)
            await store.put("b", 1)

            assert (await asyncio.wait_for(anext(watch), PATIENCE_S)).key == "b"


async def test_an_encrypted_store_without_epochs_says_so() -> None:
    async with limpet.open("memory:", encryption=limpet.Keyring({"k1": bytes(32)})) as store:
        engine = store._session.engine
        assert isinstance(engine, Restoring)
        with pytest.raises(InvalidValue):
            await engine.raise_epoch(1000)
