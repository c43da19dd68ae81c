"""Attacks on the plugin storage: a client with the subjects of one plugin gets nothing of another."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from limpet.server.nats_watch import is_answerable
from limpet.server.subjects import settle
from tests.server.subjects_support import PATIENCE_S, Plugins, RawLine, connected, eventually, opened, serving

pytest_plugins = ["tests.server.subjects_fixtures"]

SECRET = "of-the-victim-alone"


async def store_secret(nats: Plugins) -> int:
    """State that no other plugin may see, change or watch. Returns a token of the victim's lock."""
    await nats.ask("set", "victim", key="secret", value=SECRET)
    await nats.ask("fields", "victim", key="record", set={"field": SECRET})
    token: int = (await nats.ask("lock", "victim", name="lock", ttl=60, holder="victim"))["token"]
    return token


async def assert_untouched(nats: Plugins, token: int) -> None:
    assert (await nats.ask("get", "victim", key="secret"))["value"] == SECRET
    assert (await nats.ask("list", "victim"))["keys"] == ["record", "secret"]
    assert (await nats.ask("entry", "victim", key="secret"))["entry"]["version"] == 1
    (held,) = (await nats.ask("locks", "victim"))["locks"]
    assert held["token"] == token
    await nats.ask("unlock", "victim", name="lock", token=token)


# The names of the document ----------------------------------------------------


async def test_plugin_isolation_get(nats: Plugins) -> None:
    """The example of the document, as written."""
    await nats.publish("db.kv.quote-db.set", json.dumps({"key": "last_id", "value": 42}).encode())
    response = await nats.request("db.kv.trivia.get", json.dumps({"key": "last_id"}).encode())
    assert json.loads(response.data)["exists"] == False  # noqa: E712 - as the document has it
    await nats.publish("db.kv.trivia.set", json.dumps({"key": "last_id", "value": 99}).encode())

    response = await nats.request("db.kv.quote-db.get", json.dumps({"key": "last_id"}).encode())
    assert json.loads(response.data)["value"] == 42
    response = await nats.request("db.kv.trivia.get", json.dumps({"key": "last_id"}).encode())
    assert json.loads(response.data)["value"] == 99


async def test_plugin_isolation_list(nats: Plugins) -> None:
    await nats.ask("set", "plugin-a", key="key1", value=1)
    await nats.ask("set", "plugin-b", key="key2", value=2)

    assert (await nats.ask("list", "plugin-a"))["keys"] == ["key1"]
    assert (await nats.ask("list", "plugin-b"))["keys"] == ["key2"]


async def test_plugin_isolation_delete(nats: Plugins) -> None:
    await nats.ask("set", "plugin-a", key="key", value="value")

    assert await nats.ask("delete", "plugin-b", key="key") == {"success": True, "deleted": False}
    assert (await nats.ask("get", "plugin-a", key="key"))["exists"]


@pytest.mark.parametrize("member", ["plugin", "plugin_name", "namespace", "name", "subject", "prefix", "store"])
async def test_plugin_cannot_forge_plugin_name(nats: Plugins, member: str) -> None:
    await nats.ask("set", "victim", key="k", value=SECRET)

    assert await nats.ask("get", "attacker", **{"key": "k", member: "victim"}) == {"success": True, "exists": False}
    assert await nats.ask("set", "attacker", **{"key": "k", "value": 1, member: "victim"}) == {"success": True}
    assert (await nats.ask("get", "victim", key="k"))["value"] == SECRET


async def test_json_injection_prevented(nats: Plugins) -> None:
    malicious = "'; DROP TABLE plugin_kv_storage; --"
    await nats.ask("set", key=malicious, value={malicious: malicious})

    assert (await nats.ask("get", key=malicious))["value"] == {malicious: malicious}
    assert (await nats.ask("list", prefix="'"))["keys"] == [malicious]


# Attacks through what a plugin may say ----------------------------------------

SAID: list[tuple[str, dict[str, Any]]] = [
    ("history", {"key": "secret"}),
    ("get", {"key": "secret"}),
    ("get", {"key": "victim/secret"}),
    ("get", {"key": "../victim/secret"}),
    ("get", {"key": "victim.secret"}),
    ("get", {"key": "victim:secret"}),
    ("get", {"key": "limpet:{victim}:secret"}),
    ("get", {"key": "secret' OR '1'='1"}),
    ("get", {"key": "secret' UNION SELECT value FROM limpet_entries --"}),
    ("get", {"key": "%"}),
    ("get", {"key": "*"}),
    ("entry", {"key": "secret"}),
    ("take", {"key": "secret"}),
    ("delete", {"key": "secret"}),
    ("delete", {"key": "'; DELETE FROM limpet_entries; --"}),
    ("touch", {"key": "secret", "ttl": 1}),
    ("incr", {"key": "secret"}),
    ("cas", {"key": "secret", "value": 1, "expect": {"value": SECRET}}),
    ("cas", {"key": "secret", "value": 1, "expect": {"version": 1}}),
    ("fields", {"key": "record", "get": None}),
    ("fields", {"key": "record", "swap": {"field": "field", "expected": SECRET, "new": 1}}),
    ("list", {"prefix": "secret"}),
    ("list", {"prefix": "", "after": "\u0001"}),
    ("list", {"prefix": "", "namespace": "victim"}),
    ("list", {"prefix": "%' OR namespace = 'victim"}),
    ("scan", {}),
    ("scan", {"where": [{"field": "field", "op": "exists"}]}),
    ("scan", {"where": [{"field": "x') OR 1=1 --", "op": "ne", "value": 1}]}),
    ("scan", {"namespace": "victim"}),
    ("outcome", {"request_id": "the victim's"}),
    ("locks", {}),
    ("lock", {"name": "lock", "ttl": 1, "namespace": "victim"}),
    ("refresh", {"name": "lock", "token": 0, "ttl": 60}),
    ("unlock", {"name": "lock", "token": 0}),
    ("put", {"key": "mine", "value": 1, "fence": {"name": "lock", "token": 0}}),
    ("batch", {"writes": [{"op": "delete", "key": "secret"}, {"op": "delete", "key": "record"}]}),
    ("batch", {"guards": [{"key": "secret", "expect": {"value": SECRET}}]}),
    ("batch", {"writes": [{"op": "take", "key": "secret"}], "namespace": "victim"}),
    ("batch", {"writes": [{"op": "put", "key": "k", "value": 1, "plugin": "victim"}]}),
    ("watch", {"deliver": "db.kv.victim.set", "initial": True}),
    ("watch", {"deliver": "_INBOX_victim.events"}),
    ("watch", {"pattern": "secret", "namespace": "victim"}),
    ("unwatch", {"watch": "*.1"}),
    ("status", {"namespace": "victim"}),
]


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_nothing_that_a_plugin_says_reaches_another(engine: str, tmp_path: Any, pytestconfig: Any) -> None:
    from tests.server.subjects_support import plugins_on

    async with plugins_on(engine, tmp_path, pytestconfig) as nats:
        token = await store_secret(nats)
        for name, members in SAID:
            members = json.loads(json.dumps(members).replace('"token": 0', f'"token": {token}'))  # noqa: PLW2901
            reply = await nats.ask(name, "attacker", **members)

            assert SECRET not in json.dumps(reply), (name, members)
            assert reply.get("exists") is not True
            assert reply.get("keys", []) in ([], 0), (name, members)
            assert reply.get("entries") in (None, [], [None], [None, None], []), (name, members)
            assert reply.get("deleted") is not True
            assert reply.get("locks", []) == []
            assert name != "history" or reply["changes"] == []
            # What the attacker has made under the same name is its own.
            await nats.ask("take", "attacker", key="secret")
        await assert_untouched(nats, token)


# Attacks through subjects -----------------------------------------------------

SUBJECTS = [
    *(b"db.kv.%b.get" % name for name in (b"*", b">", b"%", b"victim*", b"vict?m", b"VICTIM", b"Victim", b"victim%00")),
    *(b"db.kv.%b.get" % name for name in (b"../victim", b"..%2fvictim", b"./victim", b"victim/", b"/victim", b"a/b")),
    *(b"db.kv.%b.get" % name for name in (b"victim'--", b"';DROP", b"victim\\", b'victim"', b"victim;", b"\xff\xfe")),
    *(b"db.kv.%b.get" % name for name in (b"\x00victim", b"victim\x00", b"v\xc3\xadctim", b"victim,attacker", b"{a}")),
    *(b"db.kv.%b.get" % name for name in (b"x" * 101, b"attacker.victim", b"victim.secret", b"attacker.get.victim")),
    *(b"db.kv.victim.%b" % name for name in (b"get*", b"*", b">", b"GET", b"get.x", b"get\x00", b"__class__", b"\xff")),
    *(b"db.kv..victim.get", b"db..kv.victim.get", b"db.kv.victim", b"db.kv.victim..get", b"db.kv.limpet-server.get"),
    *(b"db.kv.limpet-server.list", b"db.kv.limpet-server.scan", b"db.kv.limpet-server.set"),
]


async def test_no_subject_that_is_not_the_plugins_reaches_it(sqlite_nats: Plugins) -> None:
    token = await store_secret(sqlite_nats)
    inbox = sqlite_nats.client.new_inbox()
    received: list[bytes] = []

    async def receive(message: Any) -> None:
        received.append(message.data)

    await sqlite_nats.client.subscribe(f"{inbox}.*", cb=receive)
    await settle(sqlite_nats.client)
    body = b'{"key":"secret","value":1}'
    with contextlib.closing(RawLine()) as line:
        for number, subject in enumerate(SUBJECTS):
            line.send(b"PUB %b %b.%d %d\r\n%b\r\n" % (subject, inbox.encode(), number, len(body), body))
    await assert_untouched(sqlite_nats, token)
    replies = [json.loads(reply) for reply in received if reply]

    assert len(SUBJECTS) >= 40
    assert len(replies) >= 30
    assert not any(reply["success"] for reply in replies)
    assert {reply["error_code"] for reply in replies} == {
        *("INVALID_SUBJECT", "INVALID_PLUGIN_NAME", "PERMISSION_DENIED"),
        # A scan with a value, which has no such member, before anybody asks whose it is.
        "VALIDATION_ERROR",
    }


@pytest.mark.parametrize("reply", ["elsewhere", "_INBOX_victim.1", "_LIMPET.1", "_INBOXES.1"])
@pytest.mark.parametrize("subject", ["db.kv.attacker.set", "db.kv.Odd!.set", "db.kv.attacker.none", "$SRV.PING"])
async def test_an_answer_goes_to_an_inbox_of_the_caller_alone(sqlite_nats: Plugins, subject: str, reply: str) -> None:
    """Anywhere else it would be a message of the server, which may say what the caller may not."""
    if subject == "$SRV.PING":
        # It names no plugin, so any inbox will do.
        reply = reply.replace("_INBOX_victim", "_LIMPETS")
    received: list[bytes] = []

    async def receive(message: Any) -> None:
        received.append(message.data)

    await sqlite_nats.client.subscribe(reply, cb=receive)
    await settle(sqlite_nats.client)
    before = len(sqlite_nats.observer.calls)

    await sqlite_nats.client.publish(subject, b'{"key":"mine","value":1}', reply=reply)
    # The next request on the same line comes after it.
    found = await sqlite_nats.ask("get", "attacker", key="mine")
    await settle(sqlite_nats.client)

    assert received == []
    assert found["exists"] is False
    errors = [call.error is not None for call in sqlite_nats.observer.calls[before:]]
    assert errors == ([False] if subject == "$SRV.PING" else [True, False])


@pytest.mark.parametrize("reply", ["_INBOX.1", "_INBOX_attacker.1.2"])
async def test_an_answer_goes_to_any_inbox_of_the_caller(sqlite_nats: Plugins, reply: str) -> None:
    listening = await sqlite_nats.client.subscribe(reply)

    await sqlite_nats.client.publish("db.kv.attacker.set", b'{"key":"mine","value":1}', reply=reply)

    assert json.loads((await listening.next_msg(PATIENCE_S)).data)["success"]


def test_what_nats_puts_in_the_place_of_an_inbox_is_answered() -> None:
    """A request from another account, or through a gateway, has a reply subject that NATS made."""
    assert is_answerable("_R_.aB3xYz", "trivia")
    assert is_answerable("_GR_.clstr.srvr._INBOX.1.2", "trivia")
    assert is_answerable("_GR_.clstr.srvr._INBOX_trivia.1", "trivia")
    assert not is_answerable("_GR_.clstr.srvr._INBOX_quote.1", "trivia")
    assert not is_answerable("_R_.*", "trivia")


@pytest.mark.parametrize("reply", ["db.kv.victim.set", "db.kv.victim.delete", "$JS.API.STREAM.DELETE.x", "$SRV.PING"])
async def test_the_server_cannot_be_made_to_ask_for_somebody(sqlite_nats: Plugins, reply: str) -> None:
    """Its answer to one plugin, sent to the subject of another, would be a request that NATS lets through."""
    token = await store_secret(sqlite_nats)
    await sqlite_nats.ask("set", "attacker", key="secret", value={"key": "secret", "value": 1})
    before = len(sqlite_nats.observer.calls)

    for name in ("get", "entry", "take", "scan", "watch"):
        await sqlite_nats.client.publish(f"db.kv.attacker.{name}", b'{"key":"secret"}', reply=reply)

    await assert_untouched(sqlite_nats, token)
    calls = [call for call in sqlite_nats.observer.calls[before:] if call.namespace == "victim"]
    assert {call.operation for call in calls} == {"get", "list", "entry", "locks", "unlock"}


async def test_the_servers_own_namespace_is_nobodys(nats: Plugins) -> None:
    await nats.ask("set", key="k", value=1)

    for name, members in (("list", {}), ("get", {"key": "namespace/my-plugin"}), ("scan", {}), ("watch", {})):
        reply = await nats.ask(name, "limpet-server", **members)
        assert (reply["success"], reply["error_code"]) == (False, "PERMISSION_DENIED")


# What no driver would send ----------------------------------------------------

FRAMES = {
    "a subject that is no text": b"PUB db.kv.a.\xff 2\r\n{}\r\n",
    "a plugin that is no text": b"PUB db.kv.\xff\xfe.get 2\r\n{}\r\n",
    "a reply subject that is no text": b"PUB db.kv.a.get \xff\xfe 2\r\n{}\r\n",
    "headers that stop": b"HPUB db.kv.a.get 8 8\r\nNATS/1.0\r\n",
    "headers with a status that is no text": b"HPUB db.kv.a.get 12 12\r\nNATS/1.0 \xff\xff\xff\r\n",
    "headers that are something else": b"HPUB db.kv.a.get 6 8\r\nhello\n{}\r\n",
    "the same to another subscription": b"HPUB $SRV.PING 8 8\r\nNATS/1.0\r\n",
    "a subject of four thousand letters": b"PUB db.kv." + b"x" * 4000 + b" 0\r\n\r\n",
    "a subject with control characters": b"PUB db.kv.\x01\x02.\x03 0\r\n\r\n",
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
async def test_a_message_that_no_driver_would_send_makes_no_server_deaf(sqlite_nats: Plugins, frame: bytes) -> None:
    """The driver ends its reading, without a word, at a subject that is not UTF-8 and at broken headers."""
    with contextlib.closing(RawLine()) as line:
        line.send(frame)

    assert (await sqlite_nats.ask("list"))["success"]


# Fuzzing ----------------------------------------------------------------------

MARK = "MARKED-VALUE"
COUNT = 110_000 if os.environ.get("LIMPET_FUZZ_LONG") else 3_000

VALID: dict[str, dict[str, Any]] = {
    "get": {"key": "k"},
    "set": {"key": "k", "value": {"a": [1, MARK]}, "ttl": 60, "request_id": None},
    "delete": {"key": "k", "expect": {"version": 1}, "fence": {"name": "n", "token": 1}},
    "list": {"prefix": "k", "limit": 10, "after": "k"},
    "entry": {"key": "k"},
    "children": {"prefix": "k", "delimiter": "/", "limit": 3},
    "delete_prefix": {"prefix": "zz", "limit": 5},
    "append": {"prefix": "zy", "value": MARK, "meta": {"m": MARK}, "ttl": 60},
    "entries": {"keys": ["k", "none"], "with_value": False},
    "put": {"key": "k", "fields": {"f": {"$bytes": "AAE="}}, "meta": {"m": MARK}, "keep_ttl": True},
    "cas": {"key": "k", "value": MARK, "expect": {"field": "f", "equals": MARK}},
    "incr": {"key": "n", "by": 5, "ttl": None},
    "take": {"key": "k"},
    "touch": {"key": "k", "ttl": 5},
    "fields": {"key": "r", "swap": {"field": "f", "expected": MARK, "new": 2}, "unset": ["g"]},
    "batch": {
        "writes": [{"op": "put", "key": "b", "value": MARK}],
        "guards": [{"key": "b", "expect": {"absent": True}}],
    },
    "scan": {"prefix": "k", "where": [{"field": "a", "op": "in", "value": [MARK]}], "limit": 5},
    "history": {"key": "k", "limit": 3},
    "watch": {"pattern": "k*", "after": "x", "deliver": "_INBOX.x"},
    "unwatch": {"watch": "a.1"},
    "lock": {"name": "n", "ttl": 1, "holder": "h"},
    "refresh": {"name": "n", "token": 1, "ttl": 1},
    "unlock": {"name": "n", "token": 1},
    "locks": {"prefix": "n"},
    "outcome": {"request_id": "x"},
    "status": {},
}
STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 1e308, 10**40, "", "x" * 300, "\u0000", "\ud800", [], [[]], {}),
    *(
        {"$bytes": "not base64!"},
        {"$bytes": 5},
        {"$json": {}},
        {"a": {"b": {"c": {}}}},
        ["k"] * 200,
        "'; DROP TABLE x;--",
    ),
]


def bodies(dice: random.Random) -> Iterator[tuple[str, bytes]]:
    """Requests that are wrong in one way or another; a few happen to be right."""
    while True:
        name = dice.choice([*VALID])
        members = json.loads(json.dumps(VALID[name]))
        for _ in range(dice.randint(0, 3)):
            target = members
            while isinstance(target, dict) and target:
                member = dice.choice([*target, "strange"])
                if member in target and dice.random() < 0.3 and isinstance(target[member], dict):
                    target = target[member]
                    continue
                if dice.random() < 0.3:
                    target.pop(member, None)
                else:
                    target[member] = copy.deepcopy(dice.choice(STRANGE))
                break
        body = bytearray(json.dumps(members).encode())
        for _ in range(dice.choice([0, 0, 1, 1, 2, 5])):
            at = dice.randrange(len(body) + 1)
            match dice.randrange(4):
                case 0:
                    body[at:at] = dice.randbytes(dice.randint(1, 3))
                case 1:
                    del body[at : at + dice.randint(1, 8)]
                case 2:
                    body[at:at] = b"[" * dice.choice([1, 300, 3000])
                case _:
                    body[at:at] = body[: dice.randint(0, 20)]
        yield name, bytes(body)


def subject_of(dice: random.Random, name: str) -> bytes:
    if dice.random() < 0.8:
        return f"db.kv.fuzz{dice.randrange(5)}.{name}".encode()
    words = [
        bytes(dice.choice([*range(1, 9), *range(33, 46), *range(47, 256)]) for _ in range(dice.randint(1, 12)))
        for _ in range(dice.randint(1, 4))
    ]
    if dice.random() < 0.3:
        words[1:] = [name.encode()]
    return b".".join((b"db.kv", *words))


async def test_malformed_requests_are_answered_and_leave_no_value_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    """Payloads and subjects by the thousand. LIMPET_FUZZ_LONG=1 sends a hundred thousand and more."""
    caplog.set_level(logging.DEBUG)
    dice = random.Random(20_260_101)
    wrong = bodies(dice)
    answered: list[dict[str, Any]] = []

    def has(count: int) -> bool:
        return len(answered) >= count

    async def receive(message: Any) -> None:
        reply = json.loads(message.data)
        # A watch that happens to be right, and names no other subject, delivers its events to the same inbox.
        if not {"op", "position", "watch"} <= reply.keys():
            answered.append(reply)

    async with opened("memory:") as session, serving(session) as served, connected() as client:
        await client.subscribe("_INBOX.fuzz-replies.*", cb=receive)
        await settle(client)
        line = RawLine()
        for first in range(0, COUNT, 250):
            frames = bytearray()
            for number in range(first, first + 250):
                name, body = next(wrong)
                reply = b"_INBOX.fuzz-replies.%d" % number
                frames += b"PUB %b %b %d\r\n%b\r\n" % (subject_of(dice, name), reply, len(body), body)
                # The same once more, without anybody to answer to.
                frames += b"PUB %b %d\r\n%b\r\n" % (subject_of(dice, name), len(body), body)
            line.send(bytes(frames))
            await eventually(functools.partial(has, first + 250))
        line.close()
        last = json.loads((await client.request("db.kv.a.list", b"{}", timeout=PATIENCE_S)).data)
        await eventually(lambda: served._running == 0)

    assert last["success"]
    assert len(answered) == COUNT
    assert all(isinstance(reply["success"], bool) for reply in answered)
    codes = {reply.get("error_code") for reply in answered}
    assert {"INVALID_JSON", "MISSING_FIELD", "VALIDATION_ERROR", "INVALID_SUBJECT", "INVALID_PLUGIN_NAME"} <= codes
    assert "INTERNAL_ERROR" not in codes
    assert MARK not in json.dumps([reply.get("message", "") for reply in answered])
    assert MARK not in caplog.text
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
