"""The plugin storage as its document tells it: user stories, subjects, replies and errors, on both databases."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from limpet.server.subjects import PluginSubjects
from tests.server.subjects_support import Plugins, connected, eventually, opened, plugins_on, serving

pytest_plugins = ["tests.server.subjects_fixtures"]

Json = dict[str, Any]


async def stored(nats: Plugins, value: Any) -> Any:
    """A value after it was set and read again."""
    assert await nats.ask("set", key="k", value=value) == {"success": True}
    reply = await nats.ask("get", key="k")
    assert set(reply) == {"success", "exists", "value"}
    return reply["value"]


# US-001: store a simple value -------------------------------------------------


async def test_kv_set_and_get_string_value(nats: Plugins) -> None:
    """The example of the document, as written: set without waiting for an answer, then get."""
    await nats.publish("db.kv.my-plugin.set", json.dumps({"key": "theme", "value": "dark"}).encode())

    response = await nats.request("db.kv.my-plugin.get", json.dumps({"key": "theme"}).encode())

    data = json.loads(response.data)
    assert data["exists"] == True  # noqa: E712 - as the document has it
    assert data["value"] == "dark"
    assert data == {"success": True, "exists": True, "value": "dark"}


@pytest.mark.parametrize("number", [0, 42, -7, 2**63 - 1, -(2**63)])
async def test_kv_set_and_get_number_value(nats: Plugins, number: int) -> None:
    found = await stored(nats, number)

    assert (type(found), found) == (int, number)


@pytest.mark.parametrize("truth", [True, False])
async def test_kv_set_and_get_boolean_value(nats: Plugins, truth: bool) -> None:
    assert await stored(nats, truth) is truth


async def test_kv_set_updates_existing_key(nats: Plugins) -> None:
    await nats.ask("set", key="k", value="v1")
    await nats.ask("set", key="k", value="v2")

    assert await nats.ask("get", key="k") == {"success": True, "exists": True, "value": "v2"}
    assert (await nats.ask("list"))["count"] == 1


async def test_kv_end_to_end_via_nats(nats: Plugins) -> None:
    assert await nats.ask("set", key="k", value={"a": 1}, ttl=60) == {"success": True}
    assert await nats.ask("get", key="k") == {"success": True, "exists": True, "value": {"a": 1}}
    assert await nats.ask("list") == {"success": True, "keys": ["k"], "count": 1, "truncated": False}
    assert await nats.ask("delete", key="k") == {"success": True, "deleted": True}
    assert await nats.ask("get", key="k") == {"success": True, "exists": False}


async def test_kv_value_persists_across_a_restart_of_the_service(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    async with connected() as client:
        async with opened(url) as session, serving(session):
            await client.request("db.kv.my-plugin.set", b'{"key":"theme","value":"dark"}', timeout=120)
        async with opened(url) as session, serving(session):
            reply = await client.request("db.kv.my-plugin.get", b'{"key":"theme"}', timeout=120)

    assert json.loads(reply.data)["value"] == "dark"


# US-002: store a complex object -----------------------------------------------


async def test_kv_store_nested_object(nats: Plugins) -> None:
    config = {
        "theme": "dark",
        "cooldown": 30,
        "enabled_features": ["trivia", "quotes"],
        "admin_users": ["groberts", "moderator"],
        "deep": {"a": {"b": {"c": [1, {"d": None}]}}},
    }

    assert await stored(nats, config) == config


async def test_kv_store_array(nats: Plugins) -> None:
    assert await stored(nats, ["a", "b", "c"]) == ["a", "b", "c"]


async def test_kv_store_mixed_types(nats: Plugins) -> None:
    mixed: list[Any] = [1, 1.0, True, False, None, "1", [], {}, -0.0, 1e22]

    found = await stored(nats, mixed)

    assert [(type(item), repr(item)) for item in found] == [(type(item), repr(item)) for item in mixed]


@pytest.mark.parametrize("text", ["héllo", "日本語", "🎮🔒", "a\u0000b", "\u2028", '"\\/'])
async def test_kv_unicode_handling(nats: Plugins, text: str) -> None:
    assert await stored(nats, {text: text}) == {text: text}


async def test_kv_null_handling(nats: Plugins) -> None:
    """A null that is stored exists."""
    await nats.ask("set", key="k", value=None)

    assert await nats.ask("get", key="k") == {"success": True, "exists": True, "value": None}


# US-003: store a counter ------------------------------------------------------


async def test_kv_counter_workflow(nats: Plugins) -> None:
    await nats.publish("db.kv.my-plugin.set", json.dumps({"key": "message_count", "value": 0}).encode())
    response = await nats.request("db.kv.my-plugin.get", json.dumps({"key": "message_count"}).encode())
    count = json.loads(response.data)["value"]
    count += 1
    await nats.publish("db.kv.my-plugin.set", json.dumps({"key": "message_count", "value": count}).encode())

    found = (await nats.ask("get", key="message_count"))["value"]
    assert (type(found), found) == (int, 1)


@pytest.mark.parametrize("number", [0.5, 1.0, -2.25, 1e300, 5e-324])
async def test_kv_float_values(nats: Plugins, number: float) -> None:
    found = await stored(nats, number)

    assert (type(found), found) == (float, number)


async def test_kv_concurrent_counter_updates(nats: Plugins) -> None:
    """Get, add one, set: of ten who do so at once, most are lost. Incr loses none."""
    await nats.ask("set", key="read-modify-write", value=0)
    seen = [(await nats.ask("get", key="read-modify-write"))["value"] for _ in range(10)]
    await asyncio.gather(*(nats.ask("set", key="read-modify-write", value=count + 1) for count in seen))
    counted = await asyncio.gather(*(nats.ask("incr", key="atomic") for _ in range(10)))

    assert (await nats.ask("get", key="read-modify-write"))["value"] == 1
    assert sorted(reply["value"] for reply in counted) == list(range(1, 11))


# US-004: temporary state with a time to live ----------------------------------


async def test_kv_set_with_ttl(nats: Plugins) -> None:
    await nats.publish(
        "db.kv.trivia.set",
        json.dumps({"key": "game_abc123", "value": {"turn": "player1", "score": 0}, "ttl": 1800}).encode(),
    )
    assert (await nats.ask("get", "trivia", key="game_abc123"))["exists"]

    nats.turn(29 * 60)
    assert (await nats.ask("get", "trivia", key="game_abc123"))["exists"]

    nats.turn(2 * 60)
    response = await nats.request("db.kv.trivia.get", json.dumps({"key": "game_abc123"}).encode())
    assert json.loads(response.data)["exists"] == False  # noqa: E712 - as the document has it


async def test_kv_get_expired_key_returns_false(nats: Plugins) -> None:
    await nats.ask("set", key="k", value="v", ttl=1)
    nats.turn(1)

    assert await nats.ask("get", key="k") == {"success": True, "exists": False}


async def test_kv_list_excludes_expired(nats: Plugins) -> None:
    await nats.ask("set", key="active", value=1)
    await nats.ask("set", key="expired", value=2, ttl=1)
    nats.turn(2)

    assert await nats.ask("list") == {"success": True, "keys": ["active"], "count": 1, "truncated": False}


async def test_kv_cleanup_removes_expired(nats: Plugins) -> None:
    for number in range(10):
        await nats.ask("set", key=f"temp{number}", value=number, ttl=1)
    await nats.ask("set", key="active", value=1)
    nats.turn(2)

    swept = await nats.session.sweeper.sweep("my-plugin")

    assert swept == 10
    assert (await nats.ask("status"))["keys"] == 1


async def test_kv_cleanup_task_runs(nats: Plugins) -> None:
    """By itself, and while others ask."""
    await nats.ask("set", key="temp", value=1, ttl=1)
    nats.turn(2)
    nats.session.sweeper.start()
    async with asyncio.timeout(120):
        while (await nats.ask("status"))["keys"] != 0:
            nats.turn(2)
            await asyncio.sleep(0.02)

    assert [change["op"] for change in (await nats.ask("history", key="temp"))["changes"]] == ["put", "expire"]


async def test_kv_ttl_workflow(nats: Plugins) -> None:
    """A new time to live replaces the old one, and none removes it."""
    await nats.ask("set", key="k", value=1, ttl=10)
    await nats.ask("set", key="k", value=2, ttl=100)
    nats.turn(50)
    assert (await nats.ask("get", key="k"))["value"] == 2

    await nats.ask("set", key="k", value=3, ttl=None)
    nats.turn(1000)
    assert (await nats.ask("get", key="k"))["value"] == 3


@pytest.mark.parametrize("ttl", [1, 2_147_483_647])
async def test_a_ttl_at_either_end_is_taken(nats: Plugins, ttl: int) -> None:
    assert await nats.ask("set", key="k", value=1, ttl=ttl) == {"success": True}


@pytest.mark.parametrize("name", ["set", "cas", "touch", "incr", "put", "lock"])
async def test_a_ttl_that_is_no_number_of_seconds_is_refused(sqlite_nats: Plugins, name: str) -> None:
    members: Json = {"lock": {"name": "n"}, "incr": {"key": "k"}, "touch": {"key": "k"}}.get(
        name, {"key": "k", "value": 1}
    )
    members |= {"expect": {"absent": True}} if name == "cas" else {}

    wrong: list[Any] = [0, -1, 2_147_483_648, 10**30, 1.0, 0.5, True, False, "60", [60], {}]
    for ttl in wrong:
        reply = await sqlite_nats.ask(name, **members, ttl=ttl)

        assert (reply["success"], reply["error_code"]) == (False, "VALIDATION_ERROR"), ttl
        assert "ttl" in reply["message"]
    assert (await sqlite_nats.ask("list"))["keys"] == []


# US-005: list keys ------------------------------------------------------------


async def store_three(nats: Plugins) -> None:
    for key, value in (("config_theme", "dark"), ("config_timeout", 30), ("state_active", True)):
        await nats.publish("db.kv.my-plugin.set", json.dumps({"key": key, "value": value}).encode())


async def test_kv_list_all_keys(nats: Plugins) -> None:
    await store_three(nats)

    response = await nats.request("db.kv.my-plugin.list", json.dumps({}).encode())

    data = json.loads(response.data)
    assert set(data["keys"]) == {"config_theme", "config_timeout", "state_active"}
    assert data == {"success": True, "keys": sorted(data["keys"]), "count": 3, "truncated": False}


async def test_kv_list_with_prefix(nats: Plugins) -> None:
    await store_three(nats)

    response = await nats.request("db.kv.my-plugin.list", json.dumps({"prefix": "config_"}).encode())

    assert set(json.loads(response.data)["keys"]) == {"config_theme", "config_timeout"}


async def test_kv_list_empty_result(nats: Plugins) -> None:
    assert await nats.ask("list") == {"success": True, "keys": [], "count": 0, "truncated": False}


async def test_kv_list_with_limit(nats: Plugins) -> None:
    writes = [{"op": "put", "key": f"key{number:02}", "value": number} for number in range(20)]
    await nats.ask("batch", writes=writes)

    page = await nats.ask("list", limit=10)
    assert (page["count"], page["truncated"]) == (10, True)
    rest = await nats.ask("list", limit=10, after=page["keys"][-1])
    assert (rest["keys"][0], rest["count"], rest["truncated"]) == ("key10", 10, False)


@pytest.mark.parametrize("limit", [0, -1, 10_001, 10**30, 1.0, True, "10", None])
async def test_kv_list_limit_out_of_range_is_refused(sqlite_nats: Plugins, limit: Any) -> None:
    assert (await sqlite_nats.ask("list", limit=limit))["error_code"] == "VALIDATION_ERROR"


@pytest.mark.parametrize("limit", [1, 10_000])
async def test_kv_list_limit_at_either_end_is_taken(nats: Plugins, limit: int) -> None:
    assert (await nats.ask("list", limit=limit))["success"]


async def test_kv_list_takes_wildcards_of_sql_literally(nats: Plugins) -> None:
    for key in ("a%b", "a_b", "axb", "a*b"):
        await nats.ask("set", key=key, value=1)

    for key in ("a%", "a_", "a*"):
        assert (await nats.ask("list", prefix=key))["keys"] == [f"{key}b"]


async def test_kv_list_that_nats_cannot_carry_is_a_shorter_page(sqlite_nats: Plugins) -> None:
    """Two thousand keys of 250 characters of four bytes are twice what a message holds."""
    keys = [f"{number:05}" + "🎮" * 245 for number in range(2000)]
    for first in range(0, 2000, 100):
        writes = [{"op": "put", "key": key, "value": 1} for key in keys[first : first + 100]]
        assert (await sqlite_nats.ask("batch", writes=writes))["success"]

    found: list[str] = []
    truncated = True
    while truncated:
        page = await sqlite_nats.ask("list", limit=10_000, after=found[-1] if found else None)
        found += page["keys"]
        truncated = page["truncated"]
    assert found == keys


# US-006: delete a key ---------------------------------------------------------


async def test_kv_delete_existing_key(nats: Plugins) -> None:
    await nats.ask("set", key="k", value=1)

    assert await nats.ask("delete", key="k") == {"success": True, "deleted": True}
    assert await nats.ask("get", key="k") == {"success": True, "exists": False}


async def test_kv_delete_nonexistent_key(nats: Plugins) -> None:
    assert await nats.ask("delete", key="never") == {"success": True, "deleted": False}


async def test_kv_delete_idempotence(nats: Plugins) -> None:
    await nats.ask("set", key="k", value=1)

    assert [(await nats.ask("delete", key="k"))["deleted"] for _ in range(3)] == [True, False, False]


async def test_kv_delete_via_nats(nats: Plugins) -> None:
    await nats.publish("db.kv.my-plugin.set", json.dumps({"key": "temp_data", "value": "xyz"}).encode())
    await nats.publish("db.kv.my-plugin.delete", json.dumps({"key": "temp_data"}).encode())
    response = await nats.request("db.kv.my-plugin.get", json.dumps({"key": "temp_data"}).encode())
    assert json.loads(response.data)["exists"] == False  # noqa: E712 - as the document has it
    await nats.publish("db.kv.my-plugin.delete", json.dumps({"key": "temp_data"}).encode())

    assert not (await nats.ask("get", key="temp_data"))["exists"]


async def test_kv_delete_knows_no_wildcards(nats: Plugins) -> None:
    await nats.ask("set", key="k", value=1)

    assert [(await nats.ask("delete", key=key))["deleted"] for key in ("*", "%", "k*", ">")] == [False] * 4
    assert (await nats.ask("list"))["count"] == 1


# US-008: the size of values ---------------------------------------------------


async def test_kv_value_size_limit_enforced(nats: Plugins) -> None:
    """The example of the document, as written."""
    await nats.publish("db.kv.my-plugin.set", json.dumps({"key": "small", "value": "x" * 100}).encode())
    huge_value = "x" * 100000  # 100KB
    response = await nats.request(
        "db.kv.my-plugin.set", json.dumps({"key": "huge", "value": huge_value}).encode(), timeout=5
    )
    data = json.loads(response.data)
    assert data["success"] == False  # noqa: E712 - as the document has it
    assert data["error_code"] == "VALUE_TOO_LARGE"
    assert "64" in data["message"]  # Mentions limit
    assert (await nats.ask("list"))["keys"] == ["small"]


async def test_kv_size_error_message(nats: Plugins) -> None:
    reply = await nats.ask("set", key="huge", value="x" * 100_000)

    assert reply["message"].startswith("Value size exceeds 64KB limit (got 97.7KB)")
    assert "100,002 bytes" in reply["message"]
    assert "65,536" in reply["message"]
    assert (reply["size_bytes"], reply["limit_bytes"]) == (100_002, 65_536)


@pytest.mark.parametrize("letter", ["x", "é", "\u0001"])
async def test_kv_size_at_boundary(nats: Plugins, letter: str) -> None:
    """Measured as it is stored: é is two bytes, and not the six of an escape."""
    each = {"x": 1, "é": 2, "\u0001": 6}[letter]
    count, rest = divmod(65_536 - 2, each)
    value = letter * count + "x" * rest

    assert await nats.ask("set", key="k", value=value) == {"success": True}
    assert (await nats.ask("set", key="k", value=value + "x"))["error_code"] == "VALUE_TOO_LARGE"
    assert (await nats.ask("get", key="k"))["value"] == value


# US-009: clear errors ---------------------------------------------------------


NOT_JSON = (b"not json at all", b"", b"{", b'{"key":"a"}x', b"\xff\xfe", b"[" * 5000, b"[1]", b'"key"', b"null", b"1")


@pytest.mark.parametrize("name", ["get", "set", "delete", "list", "batch", "lock"])
async def test_kv_error_invalid_json(sqlite_nats: Plugins, name: str) -> None:
    for body in NOT_JSON:
        data = await sqlite_nats.say(f"db.kv.my-plugin.{name}", body)

        assert (data["success"], data["error_code"]) == (False, "INVALID_JSON"), body
        assert data["message"].startswith("Invalid JSON")


@pytest.mark.parametrize(
    ("name", "members", "missing"),
    [
        ("get", {"wrong_field": "value"}, "key"),
        ("set", {"value": "oops"}, "key"),
        ("set", {"key": "k"}, "value"),
        ("delete", {}, "key"),
        ("cas", {"key": "k", "value": 1}, "expect"),
        ("touch", {"key": "k"}, "ttl"),
        ("lock", {"name": "n"}, "ttl"),
        ("unlock", {"name": "n"}, "token"),
        ("unwatch", {}, "watch"),
    ],
)
async def test_kv_error_missing_field(nats: Plugins, name: str, members: Json, missing: str) -> None:
    data = await nats.ask(name, **members)

    assert (data["success"], data["error_code"]) == (False, "MISSING_FIELD")
    assert data["message"] == f"Missing required field: {missing}"


async def test_kv_error_value_too_large(nats: Plugins) -> None:
    data = await nats.ask("set", key="k", value=["x" * 70_000])

    assert (data["success"], data["error_code"]) == (False, "VALUE_TOO_LARGE")


async def test_kv_error_database_failure(nats: Plugins) -> None:
    """The message about a database that is gone gives nothing away."""
    await nats.session.close()

    data = await nats.ask("get", key="k")

    assert (data["success"], data["error_code"]) == (False, "DATABASE_ERROR")
    assert "127.0.0.1" not in data["message"]
    assert "sqlite" not in data["message"]


async def test_an_unexpected_error_is_told_without_its_words(sqlite_nats: Plugins, monkeypatch: Any) -> None:
    from limpet.server import operations
    from limpet.server.nats_requests import NatsEndpoint

    async def broken(*_: Any) -> Json:
        raise RuntimeError("the value was 12345")

    row = operations.OPERATIONS["get"]._replace(run=broken)
    monkeypatch.setitem(sqlite_nats.served._endpoints, "get", NatsEndpoint(row, row.request))

    data = await sqlite_nats.ask("get", key="k")

    assert data == {"success": False, "error_code": "INTERNAL_ERROR", "message": "internal error"}
    assert isinstance(sqlite_nats.observer.calls[-1].error, RuntimeError)


@pytest.mark.parametrize("subject", ["db.kv.x", "db.kv.a.b.get", "db.kv.a.b.c.d.set", "db.kv.a.nope", "db.kv.a.GET"])
async def test_kv_error_invalid_subject(nats: Plugins, subject: str) -> None:
    data = await nats.say(subject, b'{"key":"k"}')

    assert data["success"] is False
    assert data["error_code"] == "INVALID_SUBJECT"
    assert data["message"] == f"Invalid subject format: {subject}"


@pytest.mark.parametrize("name", ["Trivia", "a'b", "a%b", "é", "x" * 101, "a;b", "db\\kv"])
async def test_kv_error_invalid_plugin_name(nats: Plugins, name: str) -> None:
    data = await nats.say(f"db.kv.{name}.get", b'{"key":"k"}')

    assert (data["success"], data["error_code"]) == (False, "INVALID_PLUGIN_NAME")


@pytest.mark.parametrize("key", ["k" * 255, "é" * 255, "🎮" * 255, "*", "%", ">", "a b", "a.b", "../x", "\n", "'--"])
async def test_a_key_is_any_text_up_to_255_characters(nats: Plugins, key: str) -> None:
    assert await nats.ask("set", key=key, value=1) == {"success": True}
    assert (await nats.ask("list"))["keys"] == [key]


@pytest.mark.parametrize("name", ["get", "set", "delete", "incr", "take", "history"])
async def test_a_key_that_is_none_is_refused(sqlite_nats: Plugins, name: str) -> None:
    for key in ("", "k" * 256, "é" * 256, "a\u0000b", 5, None, ["k"], {"k": 1}, True):
        data = await sqlite_nats.ask(name, key=key, **({"value": 1} if name == "set" else {}))

        assert (data["success"], data["error_code"]) == (False, "VALIDATION_ERROR"), key


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
async def test_what_json_does_not_have_is_invalid_json(sqlite_nats: Plugins, value: str) -> None:
    data = await sqlite_nats.say("db.kv.my-plugin.set", b'{"key":"k","value":' + value.encode() + b"}")

    assert data["error_code"] == "INVALID_JSON"


@pytest.mark.parametrize("value", ["9223372036854775808", "[" * 200 + "]" * 200])
async def test_json_that_no_engine_can_hold_is_refused(nats: Plugins, value: str) -> None:
    data = await nats.say("db.kv.my-plugin.set", b'{"key":"k","value":' + value.encode() + b"}")

    assert data["error_code"] == "VALIDATION_ERROR"


# US-011: what operators hear of -----------------------------------------------


async def test_kv_logging_set_operation(nats: Plugins) -> None:
    """The log gets the plugin, the operation, the key and how long it took."""
    await nats.ask("set", "trivia", key="game_123", value={"a": 1})
    await nats.ask("get", "trivia", key="game_123")

    written, read = nats.observer.calls[-2:]
    assert (written.face, written.namespace, written.operation, written.error) == ("nats", "trivia", "set", None)
    assert getattr(written.request, "key", None) == "game_123"
    assert written.seconds > 0
    assert read.answer is not None
    assert read.answer["exists"]


async def test_kv_logging_error_cases(nats: Plugins) -> None:
    for body in (b"nonsense", b"{}", b'{"key":"","value":1}'):
        await nats.say("db.kv.broken-plugin.set", body)

    calls = [(call.namespace, call.operation, type(call.error).__name__) for call in nats.observer.calls[-3:]]
    assert [name for _, _, name in calls] == ["InvalidJSON", "MissingField", "InvalidKey"]
    assert {(plugin, operation) for plugin, operation, _ in calls} == {("broken-plugin", "set")}


async def test_a_subject_that_is_wrong_is_told_to_observers_as_it_was(sqlite_nats: Plugins) -> None:
    """An operator must find the plugin that sends it. What gets a label in a metric is decided there."""
    subjects = ["db.kv.Made-Up.get", "db.kv.a.made-up", "db.kv.made.up.too", f"db.kv.{'x' * 300}.get"]
    for subject in subjects:
        await sqlite_nats.say(subject, b"{}")

    calls = sqlite_nats.observer.calls[-4:]
    assert [call.subject for call in calls] == subjects
    assert [(call.namespace, call.operation) for call in calls[:3]] == [
        ("Made-Up", "get"),
        ("a", "made-up"),
        ("made", "up.too"),
    ]
    assert len(calls[3].namespace) == 100
    assert not {"Made-Up", "made", "x" * 300} & set(sqlite_nats.served._callers)


# Fire and forget --------------------------------------------------------------


@pytest.mark.parametrize("body", [b"nonsense", b"{}", b'{"key":"k","value":1,"ttl":0}', b'{"key":"","value":1}'])
async def test_what_goes_wrong_without_a_reply_subject_is_noted_and_nothing_more(
    sqlite_nats: Plugins, body: bytes
) -> None:
    await sqlite_nats.publish("db.kv.my-plugin.set", body)

    assert (await sqlite_nats.ask("list"))["keys"] == []
    (noted,) = [call for call in sqlite_nats.observer.calls if call.operation == "set"]
    assert noted.error is not None
    assert (noted.caller, noted.has_reply) == ("plugin my-plugin", False)


async def test_reads_without_a_reply_subject_do_no_harm(sqlite_nats: Plugins) -> None:
    for name in ("get", "list", "scan", "status", "watch", "nope"):
        await sqlite_nats.publish(f"db.kv.my-plugin.{name}", b'{"key":"k"}')

    assert (await sqlite_nats.ask("list"))["success"]


# Prefixes and order -----------------------------------------------------------


async def test_a_prefix_of_three_words_works_too(tmp_path: Any) -> None:
    async with (
        opened(f"sqlite:///{tmp_path}/state.db") as session,
        serving(session, prefix="rosey.db.kv"),
        connected() as client,
    ):
        body = json.dumps({"key": "game_123", "value": {"players": ["alice", "bob"], "round": 2}, "ttl": 1800})
        response = await client.request("rosey.db.kv.trivia.set", body.encode(), timeout=120)
        assert json.loads(response.data) == {"success": True}
        found = await client.request("rosey.db.kv.trivia.get", b'{"key":"game_123"}', timeout=120)
        wrong = await client.request("rosey.db.kv.trivia", b"{}", timeout=120)
        with pytest.raises(nats.errors.NoRespondersError):
            await client.request("db.kv.trivia.get", b"{}", timeout=120)

    assert json.loads(found.data)["value"]["round"] == 2
    assert json.loads(wrong.data)["error_code"] == "INVALID_SUBJECT"


@pytest.mark.parametrize("prefix", ["", ".", "a..b", "a.*", "a.>", "a b", "$SRV", "a."])
async def test_a_prefix_that_is_none_is_refused(prefix: str) -> None:
    from limpet.errors import InvalidValue

    async with connected() as client:
        with pytest.raises(InvalidValue):
            PluginSubjects(None, client, prefix=prefix)  # type: ignore[arg-type]


async def test_requests_about_one_key_are_answered_as_they_were_sent(nats: Plugins) -> None:
    """Five hundred of them without waiting: each get sees the set before it, and none after."""
    pending = []
    for number in range(250):
        await nats.publish("db.kv.my-plugin.set", json.dumps({"key": "k", "value": number}).encode())
        pending.append(asyncio.ensure_future(nats.ask("get", key="k")))
        await asyncio.sleep(0)

    assert [reply["value"] for reply in await asyncio.gather(*pending)] == list(range(250))


async def test_a_list_sees_the_writes_before_it(nats: Plugins) -> None:
    for number in range(100):
        await nats.publish("db.kv.my-plugin.set", json.dumps({"key": f"k{number:03}", "value": 1}).encode())

    assert (await nats.ask("list"))["count"] == 100


async def test_a_batch_waits_for_all_of_its_keys(nats: Plugins) -> None:
    for key in ("a", "b"):
        await nats.publish("db.kv.my-plugin.set", json.dumps({"key": key, "value": 1}).encode())
    batch = {
        "guards": [{"key": "a", "expect": {"value": 1}}, {"key": "b", "expect": {"value": 1}}],
        "writes": [{"op": "put", "key": "c", "value": 2}],
    }

    assert (await nats.ask("batch", **batch))["success"]


async def test_more_requests_than_run_at_once_are_all_answered(tmp_path: Any) -> None:
    async with (
        opened(f"sqlite:///{tmp_path}/state.db") as session,
        serving(session, at_once=3) as served,
        connected() as client,
    ):
        bodies = [json.dumps({"key": f"k{number % 7}", "value": number}).encode() for number in range(300)]
        replies = await asyncio.gather(*(client.request("db.kv.a.set", body, timeout=120) for body in bodies))
        assert {reply.data for reply in replies} == {b'{"success":true}'}
        await eventually(lambda: served._running == 0)
        assert len(served._queue) == 0


async def test_a_server_that_has_no_room_for_more_says_so(tmp_path: Any, monkeypatch: Any) -> None:
    from limpet.server import subjects

    monkeypatch.setattr(subjects, "BACKLOG_MAX", 5)
    async with (
        opened(f"sqlite:///{tmp_path}/state.db") as session,
        serving(session, at_once=1),
        connected() as client,
    ):
        body = b'{"key":"k","value":1}'
        replies = await asyncio.gather(*(client.request("db.kv.a.set", body, timeout=120) for _ in range(50)))

    decoded = [json.loads(reply.data) for reply in replies]
    refused = [reply for reply in decoded if not reply["success"]]
    assert len(refused) < 50
    assert {(reply["error_code"], reply["retry_after"]) for reply in refused} == {("RATE_LIMITED", 1.0)}


# Both databases ---------------------------------------------------------------

SCRIPT: list[tuple[str, str]] = [
    ("set", '{"key":"a","value":{"b":[1,2.5,null,true],"é":"ü"}}'),
    ("get", '{"key":"a"}'),
    ("get", '{"key":"none"}'),
    ("set", '{"key":"t","value":1,"ttl":100}'),
    ("set", '{"key":"t","value":1,"ttl":0}'),
    ("set", '{"key":"t","value":1,"ttl":1.5}'),
    ("set", '{"value":1}'),
    ("set", '{"key":"big","value":"' + "x" * 70_000 + '"}'),
    ("set", "nonsense"),
    ("list", "{}"),
    ("list", '{"limit":1}'),
    ("list", '{"limit":0}'),
    ("list", '{"prefix":"zzz"}'),
    ("cas", '{"key":"c","value":1,"expect":{"absent":true}}'),
    ("cas", '{"key":"c","value":2,"expect":{"absent":true}}'),
    ("cas", '{"key":"c","value":2,"expect":{"version":1}}'),
    ("cas", '{"key":"gone","value":2,"expect":{"version":1}}'),
    ("incr", '{"key":"n","by":5}'),
    ("incr", '{"key":"n","by":-7}'),
    ("incr", '{"key":"a"}'),
    ("fields", '{"key":"r","set":{"x":1,"y":{"$bytes":"AAE="}}}'),
    ("fields", '{"key":"r","get":null}'),
    ("fields", '{"key":"r","swap":{"field":"x","expected":1,"new":2}}'),
    ("fields", '{"key":"r","swap":{"field":"x","expected":1,"new":2}}'),
    ("fields", '{"key":"a","set":{"x":1}}'),
    ("batch", '{"writes":[{"op":"delete","key":"c"},{"op":"take","key":"t"},{"op":"create","key":"c2","value":1}]}'),
    ("batch", '{"writes":[{"op":"create","key":"c2","value":1}]}'),
    ("take", '{"key":"c2"}'),
    ("take", '{"key":"c2"}'),
    ("touch", '{"key":"n","ttl":null}'),
    ("touch", '{"key":"gone","ttl":5}'),
    ("put", '{"key":"p","bytes":"AAE=","meta":{"by":"me"}}'),
    ("get", '{"key":"p"}'),
    ("entry", '{"key":"p"}'),
    ("scan", '{"where":[{"field":"x","op":"eq","value":2}]}'),
    ("history", '{"key":"n"}'),
    ("lock", '{"name":"l","ttl":100,"holder":"me"}'),
    ("lock", '{"name":"l","ttl":100,"holder":"you"}'),
    ("locks", "{}"),
    ("refresh", '{"name":"l","token":1,"ttl":100}'),
    ("unlock", '{"name":"l","token":1}'),
    ("outcome", '{"request_id":"unknown"}'),
    ("status", "{}"),
    ("delete", '{"key":"a"}'),
    ("delete", '{"key":"a"}'),
    ("nope", "{}"),
]
# What depends on when, on where, and on what was before.
_VARY = {"created_at", "updated_at", "at", "position", "store_id", "remaining", "log_bytes", "bytes", "epoch", "cause"}
_NUMBERED = {"revision", "created_revision", "commit", "log_changes", "log_after", "token"}


def comparable(document: Any) -> Any:
    if isinstance(document, dict):
        return {
            name: "…" if name in _VARY or (name in _NUMBERED and item is not None) else comparable(item)
            for name, item in document.items()
        }
    return [comparable(item) for item in document] if isinstance(document, list) else document


async def test_sqlite_and_postgresql_reply_the_same(tmp_path: Any, pytestconfig: pytest.Config) -> None:
    replies: list[list[Any]] = []
    for engine in ("sqlite", "postgres"):
        async with plugins_on(engine, tmp_path, pytestconfig) as plugins:
            token = None
            results = []
            for name, body in SCRIPT:
                if token is not None:
                    body = body.replace('"token":1', f'"token":{token}')  # noqa: PLW2901
                reply = await plugins.say(f"db.kv.my-plugin.{name}", body.encode())
                token = reply.get("token", token)
                message = reply.get("message", "")
                if name in ("lock", "cas", "batch"):  # Revisions and seconds are in the text.
                    reply["message"] = message.partition("found")[0].partition(" for another")[0]
                results.append((name, comparable(reply)))
            replies.append(results)

    assert replies[0] == replies[1]
    assert [reply["success"] for _, reply in replies[0]].count(False) == 13


# The tests that the document names --------------------------------------------

NAMED = [
    "test_kv_set_and_get_string_value",
    "test_kv_set_and_get_number_value",
    "test_kv_set_and_get_boolean_value",
    "test_kv_set_updates_existing_key",
    "test_kv_end_to_end_via_nats",
    "test_kv_store_nested_object",
    "test_kv_store_array",
    "test_kv_store_mixed_types",
    "test_kv_unicode_handling",
    "test_kv_null_handling",
    "test_kv_counter_workflow",
    "test_kv_float_values",
    "test_kv_concurrent_counter_updates",
    "test_kv_set_with_ttl",
    "test_kv_get_expired_key_returns_false",
    "test_kv_list_excludes_expired",
    "test_kv_cleanup_removes_expired",
    "test_kv_ttl_workflow",
    "test_kv_list_all_keys",
    "test_kv_list_with_prefix",
    "test_kv_list_empty_result",
    "test_kv_list_with_limit",
    "test_kv_delete_existing_key",
    "test_kv_delete_nonexistent_key",
    "test_kv_delete_idempotence",
    "test_kv_delete_via_nats",
    "test_plugin_isolation_get",
    "test_plugin_isolation_list",
    "test_plugin_isolation_delete",
    "test_plugin_cannot_forge_plugin_name",
    "test_kv_value_size_limit_enforced",
    "test_kv_size_error_message",
    "test_kv_size_at_boundary",
    "test_kv_error_invalid_json",
    "test_kv_error_missing_field",
    "test_kv_error_value_too_large",
    "test_kv_error_database_failure",
    "test_kv_logging_set_operation",
    "test_kv_logging_error_cases",
    "test_kv_cleanup_task_runs",
    "test_kv_cleanup_performance",
    "test_kv_cleanup_logging",
]


def test_every_test_that_the_document_names_is_there() -> None:
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    found = {name for text in texts for name in re.findall(r"^async def (test_\w+)", text, re.MULTILINE)}

    assert [name for name in NAMED if name not in found] == []


# How many tests of a kind there are to be, and where they stand. Coverage is held by ``./dev test``.
KINDS = {
    "unit": (40, ("key_queue", "settings", "limits", "logs", "metrics", "access")),
    "integration": (25, ("subjects", "subjects_verbs", "subjects_servers", "plugin_client")),
    "performance": (5, ("subjects_work",)),
    "security": (10, ("subjects_security", "nats_acl")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_enough_tests_of_every_kind(kind: str) -> None:
    least, names = KINDS[kind]
    texts = [(Path(__file__).parent / f"test_{name}.py").read_text(encoding="utf-8") for name in names]

    assert sum(len(re.findall(r"^(?:async )?def test_", text, re.MULTILINE)) for text in texts) >= least
