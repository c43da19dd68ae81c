"""A server inside a program: `limpet.server.serve_in_process`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import nats
import pytest
from nats.aio.client import Client

import limpet
import limpet.server
from limpet.errors import InvalidValue, PermissionDenied, RateLimited
from tests.server.subjects_support import PATIENCE_S


@pytest.fixture
async def connection() -> AsyncIterator[Client]:
    client = await nats.connect(os.environ["LIMPET_TEST_NATS"])
    yield client
    await client.close()


def unique(name: str) -> str:
    return f"{name}-{os.urandom(4).hex()}"


async def test_a_store_is_opened_by_its_http_url() -> None:
    async with (
        limpet.server.serve_in_process() as server,
        limpet.open(server.http_url, namespace="trivia") as store,
    ):
        await store.put("score", 42)

        assert await store.get("score") == 42


async def test_the_program_and_other_processes_share_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    async with limpet.server.serve_in_process(url) as server, limpet.open(url, namespace="trivia") as own:
        async with httpx2.AsyncClient(base_url=server.http_url) as client:
            assert (await client.put("/v1/trivia/entries/score", json=42)).status_code == 201

        assert await own.get("score") == 42


async def test_it_serves_no_longer_than_its_body() -> None:
    async with limpet.server.serve_in_process() as server, httpx2.AsyncClient(base_url=server.http_url) as client:
        assert (await client.get("/readyz")).status_code == 200

    with pytest.raises(httpx2.ConnectError):
        await httpx2.AsyncClient().get(server.http_url)


async def test_plugins_reach_it_by_a_given_connection_that_stays_open(connection: Client) -> None:
    prefix = unique("kv")
    async with limpet.server.serve_in_process(nats=connection, http=None, prefix=prefix) as server:
        kv = limpet.PluginClient(connection, "trivia", prefix=prefix, timeout=PATIENCE_S).kv
        await kv.set("score", 42)

        assert await kv.get("score") == 42
        assert list(server.addresses) == ["nats"]

    assert connection.is_connected


async def test_plugins_reach_it_by_the_url_of_nats(connection: Client) -> None:
    prefix = unique("kv")
    async with limpet.server.serve_in_process(nats=os.environ["LIMPET_TEST_NATS"], prefix=prefix):
        kv = limpet.PluginClient(connection, "trivia", prefix=prefix, timeout=PATIENCE_S).kv

        assert await kv.incr("score") == 1


async def test_it_takes_the_options_of_the_command_line() -> None:
    async with limpet.server.serve_in_process(auth="tokens") as server:
        with pytest.raises(PermissionDenied):
            await limpet.open(server.http_url)


async def test_it_takes_limits_as_a_configuration_file_has_them() -> None:
    async with (
        limpet.server.serve_in_process(limits={"namespaces": {"trivia": {"keys": 1}}}) as server,
        limpet.open(server.http_url, namespace="trivia") as store,
    ):
        await store.put("a", 1)

        with pytest.raises(RateLimited):
            await store.put("b", 1)


async def test_an_option_that_it_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(InvalidValue, match="'colour'"):
        async with limpet.server.serve_in_process(colour="red"):
            pass


def test_importing_it_loads_no_server_before_it_is_used() -> None:
    script = "import sys, limpet.server; assert not {'starlette', 'uvicorn', 'nats'} & {*sys.modules}"

    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="colour"):
        limpet.server.colour  # noqa: B018 - reading it is the test
