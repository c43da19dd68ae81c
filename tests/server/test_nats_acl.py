"""The output of ``limpet grant --nats``, as the configuration of a real nats-server."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import nats as driver
import pytest

import limpet
from limpet.errors import InvalidNamespace, InvalidValue
from limpet.isolation.nats import grant_config, inbox_prefix, password_variable
from limpet.server.dispatch import Dispatcher
from limpet.server.subjects import PluginSubjects
from tests.cli.support import Limpet
from tests.server.subjects_support import PATIENCE_S, eventually, opened
from tests.servers import Nats

PLUGINS = ("trivia", "quote-db")


@pytest.fixture(scope="module")
def isolated() -> Iterator[Nats]:
    """A NATS server that is configured with the output of the command."""
    printed = Limpet("memory:")("grant", "--nats", *PLUGINS)
    assert printed.exit_code == 0
    with pytest.MonkeyPatch.context() as environment:
        for user in (*PLUGINS, "limpet"):
            environment.setenv(password_variable(user), f"secret-of-{user}")
        server = Nats(Path(tempfile.mkdtemp(prefix="limpet-isolation-")), printed.stdout)
        server.start()
    yield server
    server.stop()


class Guest:
    """A user of that server, and the errors by which the server refused it."""

    def __init__(self) -> None:
        self.forbidden: list[str] = []
        self.client: Any = None

    async def note(self, error: Exception) -> None:
        self.forbidden.append(str(error))


@contextlib.asynccontextmanager
async def joined(server: Nats, user: str, **options: Any) -> AsyncIterator[Guest]:
    guest = Guest()
    options = {"inbox_prefix": inbox_prefix(user)} | options
    guest.client = await driver.connect(
        server.url, user=user, password=f"secret-of-{user}", error_cb=guest.note, **options
    )
    try:
        yield guest
    finally:
        await guest.client.close()


@pytest.fixture
async def served(isolated: Nats, tmp_path: Path) -> AsyncIterator[PluginSubjects]:
    async with (
        opened(f"sqlite:///{tmp_path}/state.db") as session,
        joined(isolated, "limpet", inbox_prefix="_INBOX") as server,
    ):
        subjects = PluginSubjects(Dispatcher(session.with_value_limit(65_536), "nats"), server.client)
        await subjects.start()
        yield subjects
        await subjects.drain()
        assert server.forbidden == []


def kv_of(guest: Guest, plugin: str) -> Any:
    return limpet.PluginClient(guest.client, plugin, timeout=PATIENCE_S, list_timeout=PATIENCE_S).kv


async def test_a_plugin_with_these_permissions_can_do_everything(isolated: Nats, served: PluginSubjects) -> None:
    async with joined(isolated, "trivia") as guest:
        kv = kv_of(guest, "trivia")
        async with aclosing(kv.watch(initial=True)) as watching:
            assert (await anext(watching)).op == "synced"
            await kv.set("score", 1)
            assert (await anext(watching)).value == 1
        async with kv.lock("n", 30) as lock:
            await kv.cas("score", 2, version=1, fence=lock)
        assert await kv.incr("hits") == 1
        assert await kv.list() == ["hits", "score"]
        assert guest.forbidden == []
    await eventually(lambda: served.watches == 0)


ATTACKS = [
    *(("publish", f"db.kv.trivia.{name}") for name in ("set", "get", "delete", "watch", "unlock", "batch")),
    *(("publish", subject) for subject in ("db.kv.trivia", "db.kv.quote-db.get.x", "db.kv", "_LIMPET.x")),
    *(("publish", subject) for subject in ("_INBOX_trivia.x", "_INBOX.x", "_INBOX_limpet.x", "$SRV.PING", "anything")),
    *(("subscribe", subject) for subject in ("db.kv.>", "db.kv.trivia.*", "db.kv.quote-db.*", "db.kv.*.get", ">")),
    *(("subscribe", subject) for subject in ("_INBOX_trivia.>", "_INBOX.>", "_INBOX_limpet.>", "*.>", "_LIMPET.>")),
    ("subscribe", "$SRV.>"),
    ("join", "db.kv.>"),
]


@pytest.mark.parametrize(("act", "subject"), ATTACKS)
async def test_a_plugin_reaches_nothing_of_another(
    isolated: Nats, served: PluginSubjects, act: str, subject: str
) -> None:
    async with joined(isolated, "trivia") as victim, joined(isolated, "quote-db") as attacker:
        kv = kv_of(victim, "trivia")
        await kv.set("secret", "of trivia alone")
        received: list[Any] = []

        async def receive(message: Any) -> None:
            received.append(message)

        if act == "publish":
            await attacker.client.publish(subject, b'{"key":"secret","value":"gone"}')
        else:
            await attacker.client.subscribe(subject, queue="limpet" if act == "join" else "", cb=receive)
        await eventually(lambda: attacker.forbidden)

        assert await kv.get("secret") == "of trivia alone"
        assert received == []
        assert "permissions violation" in attacker.forbidden[0].lower()


async def test_a_plugin_with_a_shared_inbox_gets_no_reply(isolated: Nats, served: PluginSubjects) -> None:
    """Without its own inbox prefix a plugin can send requests, but the server may not publish the reply there."""
    async with joined(isolated, "trivia", inbox_prefix="_INBOX") as guest:
        with pytest.raises(TimeoutError):
            await guest.client.request("db.kv.trivia.list", b"{}", timeout=0.2)


async def test_the_server_may_not_reply_into_the_subjects_of_a_plugin(isolated: Nats, served: PluginSubjects) -> None:
    async with joined(isolated, "trivia") as victim, joined(isolated, "quote-db") as attacker:
        await kv_of(victim, "trivia").set("k", 1)
        await kv_of(attacker, "quote-db").set("k", {"key": "k", "value": 2})
        for reply in ("db.kv.trivia.set", "$SRV.PING"):
            await attacker.client.publish("db.kv.quote-db.get", b'{"key":"k"}', reply=reply)
        assert (await kv_of(attacker, "quote-db").get("k"))["value"] == 2

        assert await kv_of(victim, "trivia").get("k") == 1


async def test_a_watch_is_not_delivered_to_another(isolated: Nats, served: PluginSubjects) -> None:
    async with joined(isolated, "quote-db") as attacker:
        for deliver in ("_INBOX_trivia.x", "db.kv.trivia.set"):
            body = json.dumps({"deliver": deliver}).encode()
            reply = await attacker.client.request("db.kv.quote-db.watch", body, timeout=PATIENCE_S)
            assert json.loads(reply.data)["error_code"] == "VALIDATION_ERROR"


# The command ------------------------------------------------------------------


def test_the_names_of_everybody_are_checked() -> None:
    for name in ("Trivia", "a.b", "*", "", 'a"b'):
        with pytest.raises(InvalidNamespace):
            grant_config([name])
    with pytest.raises(InvalidValue):
        grant_config(["limpet"])
    for prefix in ("", "a..b", "db.*", 'db"', "db.kv."):
        with pytest.raises(InvalidValue):
            grant_config(["trivia"], prefix=prefix)


def test_the_prefix_and_the_server_can_be_named() -> None:
    block = grant_config(["b", "a", "a"], prefix="rosey.db.kv", server="store")

    assert block.count("user:") == 3
    assert '"rosey.db.kv.a.*"' in block
    assert '"rosey.db.kv.>"' in block
    assert "$STORE_PASSWORD" in block


def test_the_command_prints_json_too_and_refuses_what_does_not_go_with_it() -> None:
    run = Limpet("memory:")
    report = json.loads(run("grant", "--nats", "trivia", "--json").stdout)
    assert report["plugins"] == ["trivia"]
    assert report["configuration"] == grant_config(["trivia"])

    assert run("grant", "--nats", "trivia", "--apply").exit_code == 2
    assert run("grant", "one", "two").exit_code == 2
    assert run("grant", "--nats", "Trivia").exit_code == 7
