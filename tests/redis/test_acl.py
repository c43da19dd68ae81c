"""A user that was granted some namespaces is refused every other by the server itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis as Client
from redis.exceptions import NoPermissionError, ResponseError

import limpet
from limpet.errors import InvalidNamespace, InvalidValue, PermissionDenied
from limpet.isolation import redis as acl
from tests.cli.support import Limpet
from tests.servers import Redis, redis

PASSWORD = "open sesame"


@pytest.fixture(scope="module", params=["valkey", "redis"])
def shared(request: pytest.FixtureRequest) -> Iterator[Redis]:
    with redis({"appendonly": "yes"}, kind=request.param) as running:
        yield running


@pytest.fixture
def server(shared: Redis) -> Redis:
    with Client.from_url(shared.url) as client:
        client.flushall()
        for user in client.acl_list():
            name = user.split()[1]
            if name != "default":
                client.acl_deluser(name)
    return shared


def url_as(server: Redis, user: str) -> str:
    return f"redis://{user}:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{server.port}/0"


async def grant(server: Redis, user: str, *options: str, query: str = "") -> None:
    """Grant by the command line, and give a password, as an administrator does."""
    run = Limpet(server.url + query)
    result = await asyncio.to_thread(run, "grant", user, "--login", "--apply", *options)
    assert result.exit_code == 0, result.stderr
    with Client.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", user, f">{PASSWORD}")


async def use_everything(store: limpet.Store) -> None:
    """Use every verb for which the engine runs a command."""
    await store.put("plain", {"n": 1})
    await store.put("for a while", 1, ttl=60)
    await store.create("raw", b"\xff\0")
    assert await store.add("count", 2) == 2
    await store.record("job").put({"state": "open", "n": 7})
    await store.record("job").swap("state", "open", "done")
    await store.record("job").set(unset=["n"], m=b"8")
    assert await store.index("m")
    assert [entry.key async for entry in store.scan(where=limpet.field("m") == b"8")] == ["job"]
    await store.unindex("m")
    assert await store.take("raw") == b"\xff\0"
    await store.touch("for a while", 1)
    await store.batch(request_id="mine").put("one", 1).put("two", 2).commit()
    assert await store.outcome("mine") is not None
    async with store.lock("door", ttl=60) as lock:
        await store.put("fenced", 1, fence=lock)
    async with store.watch("*", after=0) as events:
        assert (await anext(events)).key == "plain"
    assert len((await store.keys()).keys) == 7
    assert [event.op async for event in store.history("job")] == ["put", "patch", "patch"]
    await store.sweep()
    await store.trim()
    await store.delete("plain")
    assert (await store.status()).keys == 6


async def test_a_user_has_its_namespaces_and_no_others(server: Redis) -> None:
    async with limpet.open(server.url, sweep=False) as admin:
        for name in ("scores", "secrets"):
            await admin.namespace(name).put("key", name)
            await admin.namespace(name).record("record").put({"of": name})
    await grant(server, "bot", "-n", "games", "-n", "scores")

    async with limpet.open(url_as(server, "bot"), namespace="games", sweep=False) as store:
        await use_everything(store)
        assert await store.namespace("scores").get("key") == "scores"
        for name in ("secrets", "default", "games2", "game"):
            other = store.namespace(name)
            for attempt in (
                other.get("key"),
                other.put("key", "mine now"),
                other.keys(),
                other.status(),
                other.delete("key"),
                other.index("of"),
                other.lock("door", ttl=5).acquire(),
                other.record("record").set(of="me"),
            ):
                with pytest.raises(PermissionDenied):
                    await attempt

    async with limpet.open(server.url, namespace="secrets", sweep=False) as admin:
        assert await admin.get("key") == "secrets"
        assert (await admin.status()).revision == 2


ATTACKS: list[tuple[Any, ...]] = [
    ("GET", "limpet:{secrets}:data"),
    ("HGETALL", "limpet:{secrets}:data"),
    ("HGETALL", "{secrets}:record"),
    ("HSET", "{secrets}:record", "of", "me"),
    ("DEL", "limpet:{secrets}:log"),
    ("XRANGE", "limpet:{secrets}:log", "-", "+"),
    ("EVAL", "return redis.call('HGETALL', 'limpet:{secrets}:data')", 0),
    ("EVAL", "return redis.call('HGETALL', 'limpet:{secrets}:data')", 1, "limpet:{games}:data"),
    ("EVAL", "return redis.call('KEYS', '*')", 0),
    ("EVAL", "return redis.call('FLUSHALL')", 0),
    ("EVAL", "return redis.call('RENAME', 'limpet:{games}:data', 'limpet:{secrets}:data')", 0),
    ("KEYS", "*"),
    ("SCAN", 0),
    ("RANDOMKEY",),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "SET", "appendonly", "no"),
    ("ACL", "SETUSER", "bot", "allkeys"),
    ("ACL", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("SHUTDOWN",),
    ("SAVE",),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("MONITOR",),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("MIGRATE", "127.0.0.1", 1, "limpet:{games}:data", 0, 1),
    ("DUMP", "limpet:{secrets}:data"),
    ("COPY", "limpet:{secrets}:data", "limpet:{games}:stolen"),
    ("SWAPDB", 0, 1),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda words: " ".join(map(str, words))[:50])
async def test_what_is_not_granted_is_refused(server: Redis, attack: tuple[Any, ...]) -> None:
    async with limpet.open(server.url, namespace="secrets", sweep=False) as admin:
        await admin.put("key", "secret")
        await admin.record("record").put({"of": "secrets"})
    await grant(server, "bot", "-n", "games")

    with Client.from_url(url_as(server, "bot")) as client, pytest.raises((NoPermissionError, ResponseError)) as refused:
        client.execute_command(*attack)

    assert re.search("permission|ACL|executing the script can't", str(refused.value))
    async with limpet.open(server.url, namespace="secrets", sweep=False) as admin:
        assert await admin.get("key") == "secret"


async def test_a_reader_reads_and_writes_nothing(server: Redis) -> None:
    async with limpet.open(server.url, namespace="games", sweep=False) as admin:
        await admin.put("key", 1)
        await admin.put("for a while", 1, ttl=60)
        await admin.record("record").put({"n": 1})
        await admin.put("expired", 1, ttl=0.001)
    await asyncio.sleep(0.01)
    await grant(server, "grafana", "--read-only")

    async with limpet.open(url_as(server, "grafana"), namespace="games", sweep=False) as store:
        assert await store.get("key") == 1
        assert await store.get("for a while") == 1
        # A writer would record the time of this expiry.
        assert await store.get("expired") is None
        assert await store.get("record") == {"n": 1}
        assert (await store.keys()).keys == ["for a while", "key", "record"]
        assert [event.key async for event in store.history("key")] == ["key"]
        for attempt in (
            store.put("key", 2),
            store.put("key", 2, expect=limpet.PRESENT),
            store.delete("key"),
            store.record("record").set(n=2),
            store.index("n"),
        ):
            with pytest.raises(PermissionDenied):
                await attempt
        assert (await store.status()).revision == 4


async def test_the_last_grant_counts_and_a_revoke_takes_everything(server: Redis) -> None:
    await grant(server, "bot", "-n", "games", "-n", "scores")
    await grant(server, "bot", "-n", "scores")
    async with limpet.open(url_as(server, "bot"), namespace="scores", sweep=False) as store:
        await store.put("key", 1)
        with pytest.raises(PermissionDenied):
            await store.namespace("games").put("key", 1)

        revoked = await asyncio.to_thread(Limpet(server.url), "grant", "bot", "--revoke", "--apply")
        assert revoked.exit_code == 0
        with pytest.raises(PermissionDenied):
            await store.get("key")


async def test_without_a_hash_tag_the_keys_are_others(server: Redis) -> None:
    await grant(server, "bot", "-n", "games", query="?hash_tag=none")
    url = f"{url_as(server, 'bot')}?hash_tag=none"
    async with limpet.open(url, namespace="games", sweep=False) as store:
        await use_everything(store)
        with pytest.raises(PermissionDenied):
            await store.namespace("secrets").get("key")


def test_the_command_is_printed_without_connecting() -> None:
    result = Limpet("redis://nowhere.invalid:1/0")("grant", "bot", "-n", "games")

    assert result.exit_code == 0
    assert result.stdout.startswith("ACL SETUSER bot resetkeys resetchannels -@all ~limpet:store ~limpet:{games}:* ")
    assert "+@" not in result.stdout


@pytest.mark.parametrize("name", ["", "a b", 'a"b', "a\nb", "a\\b", "a'b"])
def test_a_name_that_no_user_can_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue):
        acl.grant_acl(name)
    with pytest.raises(InvalidValue):
        acl.revoke_acl(name)


@pytest.mark.parametrize("name", ["*", "a*", "{a}", "a ~*", ""])
def test_a_name_that_no_namespace_can_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidNamespace):
        acl.grant_acl("bot", namespaces=[name])
