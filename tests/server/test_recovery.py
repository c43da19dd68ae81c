"""A store that is broken for a while: the server says so, and goes on by itself when it is mended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

import limpet
from limpet import ManualClock
from limpet.errors import Closed, Corrupt, Unavailable
from limpet.model import Batch, Put
from limpet.retry import OUTAGE_S_MAX, Outage, reason_of
from limpet.semantic.audit import Audit
from limpet.semantic.seal import SEAL_S, Sealer
from limpet.semantic.store import SemanticStore
from limpet.server.access import TRUST_S, Issued, Scope, Tokens, create_token, revoke_token
from limpet.server.dispatch import OWN_NAMESPACE
from limpet.server.service import Service
from limpet.server.settings import ListenAddress, Settings
from limpet.sweep import SWEEP_S
from tests.postgres.support import connected, new_schema
from tests.server.engine_support import Behind
from tests.server.test_access import until

pytestmark = pytest.mark.slow

PATIENCE_S = 120.0
SCOPE = Scope("shop", "", ("read", "reveal", "write", "lock"))


class Broken:
    """A store with a table that is taken away and put back."""

    def __init__(self, url: str, run: Callable[[str], Awaitable[None]]) -> None:
        self.url = url
        self._run = run

    async def breaks(self, table: str) -> None:
        await self._run(f"ALTER TABLE {table} RENAME TO {table}_away")

    async def mends(self, table: str) -> None:
        await self._run(f"ALTER TABLE {table}_away RENAME TO {table}")


@pytest.fixture(params=["postgres", "sqlite"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Broken]:
    if request.param == "sqlite":

        async def change(statement: str) -> None:
            with contextlib.closing(sqlite3.connect(tmp_path / "state.db", timeout=PATIENCE_S)) as file:
                file.execute("PRAGMA legacy_alter_table = on")
                file.execute(statement)
                file.commit()

        yield Broken(f"sqlite:///{tmp_path}/state.db", change)
        return
    schema = new_schema()
    async with connected() as other:

        async def run(statement: str) -> None:
            await other.execute(f'SET search_path = "{schema}"; {statement}')

        yield Broken(f"{os.environ['LIMPET_TEST_POSTGRES']}?schema={schema}", run)
        await other.execute(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')


@contextlib.asynccontextmanager
async def served(place: Broken) -> AsyncIterator[tuple[httpx2.AsyncClient, Issued, limpet.Store]]:
    """A server with tokens, a client with one, and the store behind it."""
    async with limpet.open(place.url, namespace=OWN_NAMESPACE, sweep=False) as own:
        issued = await create_token(own, "shop", [SCOPE])
        async with (
            Service(Settings(url=place.url, http=ListenAddress("127.0.0.1", 0), auth="tokens")) as service,
            httpx2.AsyncClient(
                base_url=service.addresses["http"],
                headers={"Authorization": f"Bearer {issued.secret}"},
                timeout=PATIENCE_S,
            ) as client,
        ):
            yield client, issued, own


async def status_becomes(client: httpx2.AsyncClient, path: str, status: int) -> httpx2.Response:
    end = time.monotonic() + PATIENCE_S
    while True:
        answered = await client.get(path)
        if answered.status_code == status:
            return answered
        assert time.monotonic() < end, f"{path} is {answered.status_code}: {answered.text}"
        await asyncio.sleep(0.1)


def lines_about(what: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if what in record.getMessage()]


@pytest.mark.parametrize("table", ["limpet_changes", "limpet_entries", "limpet_namespaces"])
async def test_a_server_goes_on_by_itself_when_a_table_is_back(
    place: Broken, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "limpet")
    async with served(place) as (client, issued, own):
        theme = "/v1/shop/entries/theme"
        assert (await client.put(theme, json="dark")).status_code == 201
        assert (await client.put("/v1/shop/entries/soon", json=1, headers={"Limpet-TTL": "1"})).status_code == 201

        await place.breaks(table)
        reply = await status_becomes(client, "/readyz", 503)
        assert reply.json()["code"] == "not_ready"
        refused = await client.put(theme, json="light")
        assert refused.status_code >= 500, refused.text
        assert refused.json()["code"] in ("unavailable", "corrupt", "ambiguous")
        assert (await client.get("/healthz")).status_code == 200
        await asyncio.sleep(3)
        assert (await client.get("/readyz")).status_code == 503

        await place.mends(table)
        await status_becomes(client, "/readyz", 200)
        assert (await status_becomes(client, theme, 200)).json() == "dark"
        assert (await client.put(theme, json="light")).status_code == 200
        # What was due meanwhile is swept, and what a token may is followed.
        await swept(client)
        await revoke_token(own, issued.id)
        await status_becomes(client, theme, 401)

    for what in ("following the tokens", "probing the engine"):
        lines = lines_about(what, caplog)
        assert len(lines) % 2 == 0, lines
        assert all("failed and is tried again" in line for line in lines[::2])
        assert all("works again" in line for line in lines[1::2])
    assert lines_about("probing the engine", caplog)


async def swept(client: httpx2.AsyncClient) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        changes = (await client.get("/v1/shop/history/soon")).json()["changes"]
        if [change["op"] for change in changes] == ["put", "expire"]:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it was never swept")


async def test_a_token_is_not_called_invalid_while_nobody_can_tell(caplog: pytest.LogCaptureFixture) -> None:
    """Callers with good tokens would throw them away, and those with bad ones would learn that they are."""
    clock = ManualClock()
    async with limpet.open("memory:", namespace=OWN_NAMESPACE, clock=clock, sweep=False) as own:
        issued = await create_token(own, "shop", [SCOPE])
        failing = Failing(own._session)
        tokens = Tokens(own._session)
        await tokens.start()
        failing.error = Corrupt("the table is away")
        own._session.hub(OWN_NAMESPACE)._finish(failing.error)
        await until(lambda: not tokens.is_following)

        for token in (issued.secret, "made up", None):
            with pytest.raises(Unavailable, match="try again later"):
                await tokens.caller_of(token, None)
        for _ in range(20):
            await until(lambda: clock.sleepers >= 2)
            clock.advance(OUTAGE_S_MAX)
        assert len(lines_about("following the tokens failed", caplog)) == 1

        failing.error = None
        while not tokens.is_following:
            clock.advance(OUTAGE_S_MAX)
            await asyncio.sleep(0.01)
        assert (await tokens.caller_of(issued.secret, None)).is_valid()
        await tokens.close()
        with pytest.raises(Closed):
            await tokens.caller_of(issued.secret, None)


async def test_tokens_are_trusted_for_a_moment_while_their_log_cannot_be_read() -> None:
    """A failure that passes refuses no caller; one that lasts would hide that a token was revoked."""
    clock = ManualClock()
    async with limpet.open("memory:", namespace=OWN_NAMESPACE, clock=clock, sweep=False) as own:
        issued = await create_token(own, "shop", [SCOPE])
        tokens = Tokens(own._session)
        await tokens.start()
        hub = own._session.hub(OWN_NAMESPACE)
        hub.failing_since = clock.monotonic()
        assert not tokens.is_following
        clock.advance(TRUST_S)
        assert (await tokens.caller_of(issued.secret, None)).is_valid()
        clock.advance(0.1)
        with pytest.raises(Unavailable, match="try again later"):
            await tokens.caller_of(issued.secret, None)
        hub.failing_since = None
        assert (await tokens.caller_of(issued.secret, None)).is_valid()
        await tokens.close()


async def test_a_hub_that_failed_knows_at_once_when_the_log_can_be_read_again() -> None:
    async with limpet.open("memory:", namespace="shop", sweep=False) as store:
        failing = Failing(store._session)
        async with store.watch() as watch:
            hub = store._session.hub("shop")
            for error in (Unavailable("away"), ValueError("away")):
                failing.error = error
                # Wakes the follower, whose next look fails.
                own = failing._engine
                await own.commit("shop", Batch((), (Put("a", b"1"),)))
                await until(lambda: hub.failing_since is not None)
                failing.error = None
                await until(lambda: hub.failing_since is None)
            events = [await anext(watch) for _ in range(2)]

        assert [event.key for event in events] == ["a", "a"]


class Failing(Behind):
    """An engine that fails for as long as there is an error."""

    error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        if self.error is not None and name in ("status", "due", "scan", "changes", "read", "commit"):
            return self._fail
        return super().__getattr__(name)

    async def _fail(self, *_: Any, **__: Any) -> Any:
        assert self.error is not None
        raise self.error


@pytest.mark.parametrize("error", [Corrupt("away"), Unavailable("away"), ValueError("away")], ids=repr)
async def test_the_sweeper_never_gives_up(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "limpet.sweep")
    clock = ManualClock()
    async with limpet.open("memory:", namespace="shop", clock=clock) as store:
        failing = Failing(store._session)
        store._session.sweeper._engine = failing
        rounds: list[Any] = []
        store._session.sweeper.listeners.append(rounds.append)
        await store.put("soon", 1, ttl=1)

        failing.error = error
        for _ in range(30):
            await turn(clock, rounds)
        assert any(done.failed for done in rounds)
        failing.error = None
        while not any(done.ended for done in rounds):
            await turn(clock, rounds)

        assert [event.op async for event in store.history("soon")] == ["put", "expire"]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("sweep of namespace shop failed and is tried again until it works: code=")
    assert messages[1].startswith("sweep of namespace shop works again")
    assert "away" not in caplog.text


async def turn(clock: ManualClock, rounds: list[Any]) -> None:
    before = len(rounds)
    await until(lambda: clock.sleepers > 0)
    clock.advance(SWEEP_S)
    await until(lambda: len(rounds) > before)


async def test_a_namespace_that_is_broken_holds_up_no_other() -> None:
    clock = ManualClock()
    async with limpet.open("memory:", namespace="sound", clock=clock) as store:
        sweeper, rounds = store._session.sweeper, list[Any]()
        sweeper.listeners.append(rounds.append)
        sweeper.add_namespace("broken")
        sweep = sweeper.sweep
        tried = 0

        async def fail(namespace: str) -> int:
            nonlocal tried
            if namespace == "broken":
                tried += 1
                raise Corrupt("it cannot be read")
            return await sweep(namespace)

        sweeper.sweep = fail  # type: ignore[method-assign]
        for number in range(40):
            await store.put(f"k{number}", 1, ttl=0.5)
            await turn(clock, rounds)
            assert rounds[-1].ended == {"sound": 1}

    # After 1, 2, 4 and 8 seconds, and then every ten.
    assert 5 <= tried <= 9


async def test_the_sealer_never_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "limpet.semantic")
    clock = ManualClock()
    audit = Audit(b"k" * 32)
    async with limpet.open("memory:", namespace="shop", clock=clock, sweep=False) as store:
        failing = Failing(store._session)
        kept = SemanticStore(store, audit=audit)
        await kept.kv_put("tenant/a/project/b/c", {}, writer="test:one", semantics={"purpose": "checkpoint"})
        sealer = Sealer(store, audit)
        sealer.start()
        failing.error = Corrupt("away")
        for _ in range(5):
            await until(lambda: clock.sleepers > 0)
            clock.advance(OUTAGE_S_MAX)
            await asyncio.sleep(0.01)
        failing.error = None
        end = time.monotonic() + PATIENCE_S
        while (await kept.verify()).sealed == 0 and time.monotonic() < end:
            clock.advance(max(SEAL_S, OUTAGE_S_MAX))
            await asyncio.sleep(0.01)
        assert (await kept.verify()).sealed == 1
        await sealer.stop()
    lines = lines_about("sealing of namespace shop", caplog)
    assert [("works again" in line) for line in lines] == [False, True]


def test_an_outage_is_told_once_and_waits_longer_each_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = Outage(logging.getLogger("limpet.test"), "the work")
    assert [outage.record_failure(Corrupt("secret")) for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    was_on = outage.is_on
    outage.record_success()
    outage.record_success()
    assert (was_on, outage.is_on) == (True, False)
    assert outage.record_failure(ValueError("secret")) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "the work failed and is tried again until it works: code=corrupt reason=Corrupt",
        "the work works again, after 6 failed attempts",
        "the work failed and is tried again until it works: code=internal reason=ValueError",
    ]


def test_a_reason_has_kinds_and_the_sqlstate_and_no_words() -> None:
    class DriverError(Exception):
        sqlstate = "23514"

    class Odd(Exception):
        sqlstate = "not a state, but a secret"

    error = Unavailable("secret")
    error.__cause__ = DriverError("secret")
    assert reason_of(error) == "Unavailable from DriverError 23514"
    assert reason_of(Odd("secret")) == "Odd"
