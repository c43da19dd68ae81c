"""Records of byte fields under dotted keys, on every engine."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import limpet
from limpet.errors import InvalidKey, InvalidNamespace, InvalidValue
from limpet.faces.fields import Record, ScanFilter, StateStore, StateStoreConfig, Task, requeue_stuck
from tests.engines import ENGINES, unique, url_of


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request.param, tmp_path)


@pytest.fixture
async def states(url: str) -> AsyncIterator[StateStore]:
    async with await StateStore.connect(StateStoreConfig(url, sweep=False)) as opened:
        yield opened


@pytest.fixture
def root() -> str:
    """A namespace of a test's own."""
    return unique("gbe")


# Lifecycle --------------------------------------------------------------------


async def test_connect_takes_a_url_or_a_config_and_ping_answers(url: str) -> None:
    for config in (url, StateStoreConfig(url)):
        opened = await StateStore.connect(config)
        assert await opened.ping() is True
        await opened.close()


async def test_ping_is_false_when_no_server_replies() -> None:
    from tests.servers import redis

    with redis() as server:
        states = await StateStore.connect(server.url)
        assert await states.ping()
        server.stop()
        assert not await states.ping()
        await states.close()


# Records ----------------------------------------------------------------------


async def test_a_record_comes_back_as_it_was_put(states: StateStore, root: str) -> None:
    fields = {"state": b"pending", "blob": b"\x00\xff", "empty": b"", "number": b"17"}

    await states.put(f"{root}.state.a", Record(fields))

    assert await states.get(f"{root}.state.a") == Record(fields, None)
    assert await states.get(f"{root}.state.b") is None


async def test_put_replaces_the_whole_record(states: StateStore, root: str) -> None:
    await states.put(f"{root}.a", Record({"old": b"1", "both": b"1"}))
    await states.put(f"{root}.a", Record({"both": b"2"}))

    found = await states.get(f"{root}.a")
    assert found is not None
    assert found.fields == {"both": b"2"}


async def test_a_time_to_live_is_set_read_and_cleared(states: StateStore, root: str) -> None:
    key = f"{root}.a"
    await states.put(key, Record({"f": b"1"}), ttl=60)
    found = await states.get(key)
    assert found is not None
    assert found.ttl is not None
    assert 50 < found.ttl <= 60

    await states.set_field(key, "f", b"2")
    kept = await states.get(key)
    assert kept is not None
    assert kept.ttl is not None

    assert await states.touch(key, None)
    cleared = await states.get(key)
    assert cleared == Record({"f": b"2"}, None)
    assert not await states.touch(f"{root}.missing", 5)


async def test_delete_ends_a_record(states: StateStore, root: str) -> None:
    await states.put(f"{root}.a", {"f": b"1"})

    assert await states.delete(f"{root}.a")
    assert not await states.delete(f"{root}.a")
    assert await states.get(f"{root}.a") is None


# Fields -----------------------------------------------------------------------


async def test_one_field_is_read_and_written_alone(states: StateStore, root: str) -> None:
    key = f"{root}.a"
    await states.put(key, {"a": b"1", "b": b"2"})

    await states.set_field(key, "a", b"3")

    assert await states.get_field(key, "a") == b"3"
    assert await states.get_field(key, "b") == b"2"
    assert await states.get_field(key, "c") is None
    assert await states.get_field(f"{root}.missing", "a") is None


async def test_concurrent_updates_of_different_fields_all_survive(states: StateStore, root: str) -> None:
    key = f"{root}.a"

    await asyncio.gather(*(states.set_field(key, f"f{number}", b"%d" % number) for number in range(40)))

    found = await states.get(key)
    assert found is not None
    assert found.fields == {f"f{number}": b"%d" % number for number in range(40)}


async def test_a_field_set_to_none_is_cleared(states: StateStore, root: str) -> None:
    key = f"{root}.a"
    await states.put(key, {"timeout_at": b"17", "state": b"running"})

    await states.set_fields(key, {"timeout_at": None, "state": b"completed", "never": None})

    found = await states.get(key)
    assert found is not None
    assert found.fields == {"state": b"completed"}


async def test_of_all_who_swap_exactly_one_wins(states: StateStore, root: str) -> None:
    key = f"{root}.a"
    await states.put(key, {"state": b"pending"})

    won = await asyncio.gather(
        *(states.compare_and_swap(key, "state", b"pending", b"claimed", set={"worker": b"%d" % n}) for n in range(20))
    )

    assert won.count(True) == 1
    assert await states.get_field(key, "worker") == b"%d" % won.index(True)
    assert not await states.compare_and_swap(f"{root}.missing", "state", b"pending", b"claimed")
    assert await states.get(f"{root}.missing") is None
    assert await states.compare_and_swap(key, "error", None, b"none yet")
    assert not await states.compare_and_swap(key, "error", None, b"again")


async def test_only_bytes_are_fields(states: StateStore, root: str) -> None:
    with pytest.raises(InvalidValue, match="field 'n' must be bytes, not of type int"):
        await states.put(f"{root}.a", {"n": 1})  # type: ignore[dict-item]
    with pytest.raises(InvalidValue, match="'n'"):
        await states.set_field(f"{root}.a", "n", "text")  # type: ignore[arg-type]


# Keys and scans ---------------------------------------------------------------


@pytest.mark.parametrize("key", ["gbe", "gbe.", "gbe.a:b", "", "gbe.\0"])
async def test_a_key_is_segments_of_which_the_first_is_the_namespace(key: str) -> None:
    async with await StateStore.connect("memory:") as states:
        with pytest.raises(InvalidKey):
            await states.get(key)
        with pytest.raises(InvalidNamespace):
            await states.get("Not A Namespace.a")


async def test_a_scan_finds_records_by_prefix_in_key_order(states: StateStore, root: str) -> None:
    for name in ("tasks.b.2", "tasks.a.1", "tasks.b.10", "other.x"):
        await states.put(f"{root}.state.{name}", {"name": name.encode()})

    found = [(key, record.fields["name"]) async for key, record in states.scan(f"{root}.state.tasks.")]

    assert found == [(f"{root}.state.{name}", name.encode()) for name in ("tasks.a.1", "tasks.b.10", "tasks.b.2")]
    with pytest.raises(InvalidKey):
        [key async for key, _ in states.scan(root)]


@pytest.mark.parametrize(
    ("op", "found"),
    [
        ("eq", ["9"]),
        ("ne", ["10", "x", "none"]),
        ("lt", []),
        ("le", ["9"]),
        ("gt", ["10", "x"]),
        ("ge", ["9", "10", "x"]),
    ],
)
async def test_a_filter_compares_numbers_as_numbers_and_anything_else_as_bytes(
    states: StateStore, root: str, op: str, found: list[str]
) -> None:
    for name in ("9", "10", "x"):
        await states.put(f"{root}.a.{name}", {"field": name.encode()})
    await states.put(f"{root}.a.none", {"other": b"9"})

    names = {key.rpartition(".")[2] async for key, _ in states.scan(f"{root}.a.", ScanFilter("field", op, b"9"))}  # type: ignore[arg-type]

    assert names == set(found)


async def test_a_scan_stops_at_its_most_results(states: StateStore, root: str) -> None:
    for number in range(10):
        await states.put(f"{root}.a.{number}", {"n": b"%d" % number})

    found = [key async for key, _ in states.scan(f"{root}.a.", ScanFilter("n", "gt", b"2", max_results=3))]

    assert found == [f"{root}.a.{number}" for number in (3, 4, 5)]


async def test_a_scan_can_give_certain_fields_alone(states: StateStore, root: str) -> None:
    for number in range(3):
        fields = {"state": b"open", "updated_at": b"%d" % number, "payload": b"x" * 1000}
        await states.put(f"{root}.tasks.{number}", fields, ttl=60)

    recent = ScanFilter("updated_at", "gt", b"0")
    found = [record async for _, record in states.scan(f"{root}.", recent, fields=("state", "absent"))]
    assert [record.fields for record in found] == [{"state": b"open"}, {"state": b"open"}]
    assert all(record.ttl is not None and 0 < record.ttl <= 60 for record in found)
    # What is sought need not be among what is given.
    assert [record.fields async for _, record in states.scan(f"{root}.", fields=[])] == [{}, {}, {}]


async def test_an_index_finds_the_same_records(states: StateStore, root: str) -> None:
    times = [b"9", b"10", b"099", b"-3", b"", b"soon", b"\xff", b"1.5"]
    for number, time in enumerate(times):
        await states.put(f"{root}.tasks.{number}", {"updated_at": time, "state": b"open"})
    filters = [ScanFilter("updated_at", op, time) for op in ("eq", "lt", "le", "gt", "ge") for time in times]
    filters += [ScanFilter("state", "eq", b"open", 3), ScanFilter("state", "ne", b"open")]

    async def found() -> list[list[str]]:
        return [[key async for key, _ in states.scan(f"{root}.", one)] for one in filters]

    expected = await found()
    assert await states.index(f"{root}.", "updated_at") == await states.index(f"{root}.", "state")
    assert await found() == expected
    assert sum(map(len, expected)) > len(filters)


async def test_on_redis_the_key_has_colons_and_the_hash_the_fields(root: str) -> None:
    from redis.asyncio import Redis

    server = os.environ["LIMPET_TEST_REDIS"].rpartition("/")[0] + "/61"
    for options, key in (
        ("", f"{{{root}}}:state:tasks:email-send:job_1"),
        ("?hash_tag=none", f"{root}:state:tasks:email-send:job_1"),
    ):
        async with await StateStore.connect(server + options) as states, Redis.from_url(server) as client:
            await states.put(f"{root}.state.tasks.email-send.job_1", {"state": b"pending", "updated_at": b"17"})

            assert await client.hgetall(key) == {b"state": b"pending", b"updated_at": b"17"}


# Tasks ------------------------------------------------------------------------


async def test_a_task_goes_from_pending_to_completed(states: StateStore, root: str) -> None:
    task = states.task("email-send", "job_1", root=f"{root}.state.tasks")
    assert await task.create(params_ref="s3://in", step_count=2)
    assert not await task.create()

    token = await task.claim("worker-1", timeout_s=30)
    assert token is not None
    assert await task.claim("worker-2", timeout_s=30) is None
    assert await task.step(token, 1, timeout_s=30)
    assert await task.complete(token, result_ref="s3://out")
    assert not await task.complete(token)

    fields = await task.fields()
    assert fields is not None
    assert {name: fields.get(name) for name in ("state", "worker", "current_step", "step_count", "timeout_at")} == {
        "state": "completed",
        "worker": "worker-1",
        "current_step": "1",
        "step_count": "2",
        "timeout_at": None,
    }
    assert (fields["params_ref"], fields["result_ref"]) == ("s3://in", "s3://out")
    assert int(fields["updated_at"]) >= int(fields["created_at"])


async def test_a_worker_whose_task_was_given_to_another_changes_nothing(states: StateStore, root: str) -> None:
    task = states.task("email-send", "job_1", root=f"{root}.state.tasks")
    await task.create()
    lost = await task.claim("slow", timeout_s=0.1)
    assert lost is not None
    published: list[str] = []

    async def publish(key: str, record: Record) -> None:
        published.append(key)

    await asyncio.sleep(0.6)
    both = await asyncio.gather(
        *(requeue_stuck(states, f"{root}.state.tasks.", publish, threshold_s=0.5) for _ in range(2))
    )

    assert (sum(both), published) == (1, [task.key])
    again = await task.claim("quick", timeout_s=30)
    assert again is not None
    assert not await task.step(lost, 1, timeout_s=30)
    assert not await task.fail(lost, "too late")
    assert await task.complete(again)


@pytest.mark.slow
async def test_every_job_is_completed_exactly_once_though_workers_die(states: StateStore, root: str) -> None:
    """Twenty workers, of whom many stop in the middle of a job, and two sweepers at once."""
    jobs, dice = 60, random.Random(7)
    queue: asyncio.Queue[str] = asyncio.Queue()
    completed: dict[str, int] = {}

    def task_of(name: str) -> Task:
        return states.task("job", name, root=f"{root}.state.tasks")

    for number in range(jobs):
        await task_of(f"j{number}").create()
        queue.put_nowait(f"j{number}")

    async def work(worker: str) -> None:
        while len(completed) < jobs:
            try:
                name = await asyncio.wait_for(queue.get(), 0.05)
            except TimeoutError:
                continue
            task = task_of(name)
            token = await task.claim(worker, timeout_s=0.05)
            if token is None or dice.random() < 0.3:
                continue
            if await task.step(token, 1, timeout_s=0.05) and dice.random() < 0.8 and await task.complete(token):
                completed[name] = completed.get(name, 0) + 1

    async def publish(key: str, record: Record) -> None:
        queue.put_nowait(key.rpartition(".")[2])

    async def sweep() -> None:
        while len(completed) < jobs:
            await requeue_stuck(states, f"{root}.state.tasks.", publish, threshold_s=0.1)
            await asyncio.sleep(0.05)

    async with asyncio.timeout(120):
        await asyncio.gather(*(work(f"w{number}") for number in range(20)), sweep(), sweep())

    assert completed == {f"j{number}": 1 for number in range(jobs)}
    fields = [await task_of(f"j{number}").fields() for number in range(jobs)]
    assert [found and found["state"] for found in fields] == ["completed"] * jobs


async def test_what_others_wrote_as_json_is_read_as_its_text(url: str, root: str) -> None:
    async with limpet.open(url, namespace=root, sweep=False) as store:
        await store.record("a").put({"n": 1, "raw": b"x"})
    async with await StateStore.connect(url) as states:
        assert await states.get(f"{root}.a") == Record({"n": b"1", "raw": b"x"}, None)
