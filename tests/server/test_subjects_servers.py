"""Several servers on one store: they share the load, and one of them may be killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.errors import Ambiguous, Unavailable
from tests.server.subjects_support import PATIENCE_S, connected, eventually, nats_server, opened, serving
from tests.server.subjects_workers import Worker

CALLERS = 4
CALLS = 150


async def test_two_servers_share_the_load_of_one_queue_group(tmp_path: Path) -> None:
    async with (
        opened(f"sqlite:///{tmp_path}/state.db") as session,
        serving(session) as one,
        serving(session) as other,
        connected() as client,
    ):
        bodies = [json.dumps({"key": f"k{number}", "value": number}).encode() for number in range(400)]
        replies = await asyncio.gather(*(client.request("db.kv.a.set", body, timeout=PATIENCE_S) for body in bodies))
        served = [server._endpoints["set"].requests for server in (one, other)]

    assert {reply.data for reply in replies} == {b'{"success":true}'}
    assert sum(served) == 400
    assert min(served) > 40


async def test_a_watch_is_ended_by_whichever_server_is_told(tmp_path: Path) -> None:
    async with (
        opened(f"sqlite:///{tmp_path}/state.db") as session,
        serving(session) as one,
        serving(session) as other,
        connected() as client,
    ):

        async def ask(name: str, members: dict[str, Any]) -> dict[str, Any]:
            body = json.dumps(members).encode()
            reply: dict[str, Any] = json.loads((await client.request(f"db.kv.a.{name}", body, timeout=PATIENCE_S)).data)
            return reply

        watches = [(await ask("watch", {"deliver": f"_INBOX.x{number}"}))["watch"] for number in range(24)]
        assert min(one.watches, other.watches) > 0
        ended = [(await ask("unwatch", {"watch": watch}))["ended"] for watch in watches]
        assert ended == [True] * 24
        assert (one.watches, other.watches) == (0, 0)
        gone = await ask("unwatch", {"watch": f"{one.server_id}x.1"})

    assert gone == {"success": True, "ended": False}


async def test_a_watch_of_the_client_goes_on_with_another_server(tmp_path: Path) -> None:
    async with opened(f"sqlite:///{tmp_path}/state.db") as session, connected() as client:
        kv = limpet.PluginClient(client, "a", timeout=PATIENCE_S, list_timeout=PATIENCE_S, attempts=50).kv
        seen: list[Any] = []

        async def watch() -> None:
            async for event in kv.watch("k*"):
                seen.append(event.value)

        async with serving(session) as one:
            watching = asyncio.ensure_future(watch())
            await eventually(lambda: one.watches)
            await kv.set("k", 1)
            await eventually(lambda: seen == [1])
            async with serving(session) as other:
                await one.drain()
                await kv.set("k", 2)
                await eventually(lambda: seen == [1, 2])
                assert other.watches == 1
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                await eventually(lambda: other.watches == 0)


@pytest.mark.slow
async def test_a_killed_server_loses_no_acknowledged_write_and_doubles_none(tmp_path: Path) -> None:
    """Two servers on one file; one is killed under load, and clients notice nothing but a delay."""
    url = f"sqlite:///{tmp_path}/state.db"
    async with connected() as client:
        with Worker("serve", url, nats_server().url) as victim, Worker("serve", url, nats_server().url) as survivor:
            await asyncio.gather(victim.receive_async(), survivor.receive_async())
            done: list[int] = []
            wrong: list[Exception] = []

            async def call(number: int) -> None:
                # A reply that was lost with the server is requested again before the patience of the test ends.
                kv = limpet.PluginClient(client, "a", timeout=2, list_timeout=PATIENCE_S, attempts=20).kv
                for turn in range(CALLS):
                    try:
                        await kv.incr("count")
                        await kv.set(f"key/{number}/{turn}", turn)
                    except (Ambiguous, Unavailable) as error:
                        wrong.append(error)
                    done.append(turn)

            calling = [asyncio.ensure_future(call(number)) for number in range(CALLERS)]
            await eventually(lambda: len(done) > CALLERS * CALLS // 4)
            await asyncio.to_thread(victim.kill)
            assert len(done) < CALLERS * CALLS
            await asyncio.gather(*calling)

            kv = limpet.PluginClient(client, "a", timeout=PATIENCE_S, list_timeout=PATIENCE_S).kv
            assert wrong == []
            assert await kv.get("count") == CALLERS * CALLS
            assert len([key async for key in kv.keys("key/", page=100)]) == CALLERS * CALLS
            # None was written twice: every key is at its first version.
            scanned = await client.request("db.kv.a.scan", b'{"prefix":"key/","limit":1000}', timeout=PATIENCE_S)
            assert {entry["version"] for entry in json.loads(scanned.data)["entries"]} == {1}
            survivor.send("end")
