"""Keys are changed twice while processes read and write: no read fails, and no write is lost."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

import limpet
from tests.encryption.support import line, replace_file
from tests.encryption.workers import KEYS, Worker

WORKERS = 2
STILL = 150
STEPS = 4

PLACES = {
    "sqlite": lambda folder: f"sqlite:///{folder}/state.db?",
    "postgres": lambda _: f"{os.environ['LIMPET_TEST_POSTGRES']}?schema=rotation_{uuid.uuid4().hex[:12]}&",
    "redis": lambda _: f"{os.environ['LIMPET_TEST_REDIS'].rpartition('/')[0]}/61?",
    "nats": lambda _: f"{os.environ['LIMPET_TEST_NATS']}?bucket_prefix=rotation-{uuid.uuid4().hex[:12]}-&",
}


async def worked_on(workers: list[Worker]) -> None:
    """Wait until every worker has gone on for a while, and nothing has failed."""
    for worker in workers:
        worker.tell(STEPS)
    for worker in workers:
        assert await worker.heard() == []


@pytest.mark.parametrize("place", PLACES)
async def test_keys_are_changed_under_load(place: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = {name: line(name, os.urandom(32)) for name in ("k1", "k2", "k3")}
    replace_file(file, keys["k1"])
    url = f"{PLACES[place](tmp_path)}encryption=file:{file}"
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
                assert await worker.heard() == "ready"
            await worked_on(workers)
            for old, new in (("k1", "k2"), ("k2", "k3")):
                replace_file(file, keys[old] + keys[new])
                await worked_on(workers)
                replace_file(file, keys[new] + keys[old])
                await worked_on(workers)
                done = await store.reseal()
                assert done.looked_at >= STILL
                assert {seals.key_id for seals in await store.seals() if seals.entries} == {new}
                replace_file(file, keys[new])
                await worked_on(workers)
            told = [await _ended(worker) for worker in workers]

        assert [answer["failed"] for answer in told] == [[], []]
        for key in range(KEYS):
            name = f"counter/{key}"
            assert await store.get(name, 0) == sum(answer["done"].get(name, 0) for answer in told)
        for answer in told:
            for name, step in answer["done"].items():
                if name.startswith("own/"):
                    entry = await store.entry(name)
                    assert entry is not None
                    assert entry.value == step
                    assert entry.expires_at is not None
                    assert entry.meta == {"step": entry.value}
        entries = [entry async for entry in store.scan("still/")]
        assert [entry.meta["n"] for entry in entries] == list(range(STILL))
        # Written once and encrypted anew twice.
        assert {entry.version for entry in entries} == {3}


async def _ended(worker: Worker) -> Any:
    worker.tell(None)
    return await worker.heard()
