"""Errors of the server: which of ours they become, and that none holds a value."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
from redis import exceptions

import limpet
from limpet.errors import Corrupt, InvalidValue, LimpetError, PermissionDenied, Unavailable
from tests.engines import unique
from tests.redis.support import command, engine_of, server

SECRET = "S3CRET-planted"


async def raise_from(store: limpet.Store, *words: Any) -> LimpetError:
    """Send a command that fails, and return our error for it."""
    with pytest.raises(exceptions.RedisError) as raised:
        await command(store, *words)
    error = engine_of(store)._translate(raised.value)
    assert isinstance(error, LimpetError)
    assert SECRET not in f"{raised.value!r} {raised.value} {error!r} {error}"
    return error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("LOADING Redis is loading the dataset in memory", Unavailable),
        ("BUSY Redis is busy running a script", Unavailable),
        ("MISCONF Redis is configured to save RDB snapshots, but it cannot persist on disk", Unavailable),
        ("OOM command not allowed when used memory > 'maxmemory'.", Unavailable),
        ("READONLY You can't write against a read only replica.", Unavailable),
        ("NOSCRIPT No matching script.", Unavailable),
        ("NOREPLICAS Not enough good replicas to write.", Unavailable),
        ("MASTERDOWN Link with MASTER is down", Unavailable),
        ("CLUSTERDOWN The cluster is down", Unavailable),
        ("TRYAGAIN Multiple keys request during rehashing of slot", Unavailable),
        ("ERR max number of clients reached", Unavailable),
        ("ERR unknown command 'EVALSHA'", Unavailable),
        ("ERR something new", Unavailable),
        ("NEWS of an unknown kind", Unavailable),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", Corrupt),
        ("ERR Error running script: @user_script: 588: @user_script: 588: -OOM command not allowed", Unavailable),
        ("ERR @user_script: 35: WRONGTYPE Operation against a key holding the wrong kind of value", Corrupt),
        ("ERR user_script:35: bad argument #2 to 'unpack' (data string too short)", Corrupt),
        ("NOPERM User bot has no permissions to run the 'get' command", PermissionDenied),
        ("NOAUTH Authentication required.", PermissionDenied),
        ("WRONGPASS invalid username-password pair or user is disabled.", PermissionDenied),
        ("ERR ACL failure in script: User bot has no permissions to run the 'type' command", PermissionDenied),
    ],
)
async def test_each_error_of_the_server_has_its_error(words: str, expected: type[LimpetError]) -> None:
    """The server itself raises each, by a script that returns it."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        assert type(await raise_from(store, "EVAL", "return redis.error_reply(ARGV[1])", 0, words)) is expected


async def test_the_arguments_of_a_command_are_not_shown() -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        error = await raise_from(store, "NOSUCHCOMMAND", SECRET)

    assert "NOSUCHCOMMAND" in str(error)


async def test_what_cannot_be_read_is_corrupt_and_shows_no_value() -> None:
    """Another program has put something under the name of our entries."""
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        await store.put("key", 1)
        await command(store, "HSET", f"limpet:{{{store.name}}}:data", "key", SECRET)
        for call in (store.put("key", 2), store.add("key"), store.delete("key")):
            with pytest.raises(Corrupt) as raised:
                await call
            assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ConnectionError(SECRET),
        exceptions.TimeoutError(SECRET),
        exceptions.InvalidResponse(SECRET),
        exceptions.MaxConnectionsError(SECRET),
        OSError(SECRET),
        TimeoutError(SECRET),
        ssl.SSLCertVerificationError(SECRET),
    ],
)
async def test_each_error_of_the_connection_is_unavailable(error: Exception) -> None:
    async with limpet.open(server(), namespace=unique(), sweep=False) as store:
        translated = engine_of(store)._translate(error)

    assert type(translated) is Unavailable
    assert SECRET not in str(translated)


@pytest.mark.parametrize("url", ["redis://user:pass[@host/0", "redis://host:port/0", "redis://[half/0"])
async def test_a_url_that_cannot_be_used_is_an_invalid_value(url: str) -> None:
    with pytest.raises(InvalidValue) as raised:
        await limpet.open(url)

    assert "pass[" not in str(raised.value)
