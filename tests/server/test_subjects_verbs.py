"""What the plugin storage offers beside set, get, delete and list, and what it tells of itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from limpet.server.nats_requests import NatsEndpoint
from limpet.server.operations import OPERATIONS
from limpet.server.subjects import PluginSubjects
from tests.server.subjects_support import Plugins, connected, eventually, opened, serving

pytest_plugins = ["tests.server.subjects_fixtures"]


async def test_cas_takes_what_it_expected_and_refuses_what_it_did_not(nats: Plugins) -> None:
    made = await nats.ask("cas", key="k", value=1, expect={"absent": True})
    assert (made["success"], made["version"]) == (True, 1)
    assert (await nats.ask("cas", key="k", value=2, expect={"revision": made["revision"]}))["version"] == 2

    refused = await nats.ask("cas", key="k", value=3, expect={"version": 1})

    assert (refused["success"], refused["error_code"], refused["version"]) == (False, "CONFLICT", 2)
    assert refused["revision"] > made["revision"]
    assert (await nats.ask("get", key="k"))["value"] == 2


async def test_a_conflict_about_a_key_that_is_not_there_says_null(nats: Plugins) -> None:
    refused = await nats.ask("cas", key="none", value=1, expect={"version": 1})

    assert (refused["error_code"], refused["version"], refused["revision"]) == ("CONFLICT", None, None)


async def test_of_many_who_swap_one_wins(nats: Plugins) -> None:
    await nats.ask("fields", key="r", set={"owner": None})
    swaps = [
        nats.ask("fields", key="r", swap={"field": "owner", "expected": None, "new": number}) for number in range(8)
    ]

    assert [reply["swapped"] for reply in await asyncio.gather(*swaps)].count(True) == 1


async def test_one_takes_and_the_others_find_nothing(nats: Plugins) -> None:
    await nats.ask("set", key="ticket", value="gold")

    found = await asyncio.gather(*(nats.ask("take", key="ticket") for _ in range(8)))

    assert [reply.get("value") for reply in found].count("gold") == 1


async def test_a_repeated_request_id_is_answered_with_the_first_result(nats: Plugins) -> None:
    first = await nats.ask("incr", key="n", by=5, request_id="once")
    second = await nats.ask("incr", key="n", by=5, request_id="once")
    third = await nats.ask("incr", key="n", by=6, request_id="once")

    assert (first["value"], second["value"]) == (5, 5)
    assert (third["error_code"], third["reason"]) == ("CONFLICT", "stale_request")
    assert (await nats.ask("outcome", request_id="once"))["applied"]


async def test_a_batch_happens_as_a_whole_or_not_at_all(nats: Plugins) -> None:
    writes = [{"op": "put", "key": "a", "value": 1}, {"op": "create", "key": "b", "value": 1}]
    assert (await nats.ask("batch", writes=writes))["success"]

    assert (await nats.ask("batch", writes=[{"op": "put", "key": "a", "value": 2}, writes[1]]))["success"] is False
    assert (await nats.ask("get", key="a"))["value"] == 1


async def test_a_lock_is_held_refreshed_fenced_and_given_back(nats: Plugins) -> None:
    token = (await nats.ask("lock", name="nightly", ttl=30, holder="one"))["token"]
    held = await nats.ask("lock", name="nightly", ttl=30, holder="two")
    assert (held["error_code"], held["holder"], held["token"]) == ("LOCK_HELD", "one", token)
    assert 0 < held["remaining"] <= 30
    assert await nats.ask("refresh", name="nightly", token=token, ttl=60) == {"success": True}
    fence = {"name": "nightly", "token": token}
    assert (await nats.ask("put", key="k", value=1, fence=fence))["success"]

    assert await nats.ask("unlock", name="nightly", token=token) == {"success": True}
    assert (await nats.ask("put", key="k", value=1, fence=fence))["error_code"] == "LOCK_LOST"
    assert (await nats.ask("unlock", name="nightly", token=token))["error_code"] == "LOCK_EXPIRED"


async def test_who_waits_for_a_lock_holds_up_nobody(tmp_path: Any) -> None:
    async with (
        opened(f"sqlite:///{tmp_path}/state.db") as session,
        serving(session, at_once=2),
        connected() as client,
    ):

        async def ask(name: str, /, **members: Any) -> dict[str, Any]:
            return json.loads((await client.request(f"db.kv.a.{name}", json.dumps(members).encode(), timeout=120)).data)  # type: ignore[no-any-return]

        token = (await ask("lock", name="n", ttl=60))["token"]
        waiting = [asyncio.ensure_future(ask("lock", name="n", ttl=60, wait=25)) for _ in range(5)]
        assert (await ask("set", key="k", value=1))["success"]
        assert not any(one.done() for one in waiting)
        await ask("unlock", name="n", token=token)
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=120)
        assert [(await one)["token"] > token for one in done] == [True]
        for one in waiting:
            one.cancel()


async def test_the_keys_of_a_prefix_are_deleted(nats: Plugins) -> None:
    for key in ("job/1", "job/2", "other"):
        await nats.ask("set", key=key, value=1)

    reply = await nats.ask("delete_prefix", prefix="job/")

    assert (reply["deleted"], reply["truncated"]) == (2, False)
    assert (await nats.ask("list"))["keys"] == ["other"]
    assert (await nats.ask("delete_prefix"))["error_code"] == "MISSING_FIELD"


async def test_children_are_one_level_of_keys(nats: Plugins) -> None:
    for key in ("job/1", "job/2/a", "job/2/b"):
        await nats.ask("set", key=key, value=1)

    found = (await nats.ask("children", prefix="job/"))["children"]

    assert [(child["key"], child["folder"], child["keys"]) for child in found] == [
        ("job/1", False, 1),
        ("job/2/", True, 2),
    ]


async def test_appends_of_one_plugin_keep_their_order(nats: Plugins) -> None:
    replies = await asyncio.gather(*(nats.ask("append", prefix="log/", value=number) for number in range(20)))

    keys = [reply["entry"]["key"] for reply in replies]
    assert keys == [f"log/{number:016}" for number in range(1, 21)]
    assert (await nats.ask("get", key=keys[7]))["value"] == 7
    assert (await nats.ask("append", prefix="log/"))["error_code"] == "VALIDATION_ERROR"
    assert (await nats.ask("append", value=1))["error_code"] == "MISSING_FIELD"


async def test_several_entries_are_read_in_the_order_of_their_keys(nats: Plugins) -> None:
    await nats.ask("set", key="b", value=[1])
    await nats.ask("set", key="a", value=2)

    found = (await nats.ask("entries", keys=["b", "none", "a", "b"]))["entries"]

    assert [entry and entry["value"] for entry in found] == [[1], None, 2, [1]]
    assert (await nats.ask("entries", keys=["a", "x" * 256]))["error_code"] == "VALIDATION_ERROR"


async def test_values_of_another_face_that_are_too_large_to_send_are_an_error(sqlite_nats: Plugins) -> None:
    from limpet.store import Store

    await Store(sqlite_nats.session, "my-plugin").put("big", b"x" * 900_000)

    reply = await sqlite_nats.ask("get", key="big")

    assert reply["error_code"] == "VALUE_TOO_LARGE"


async def test_a_scan_that_nats_cannot_carry_is_a_shorter_page(sqlite_nats: Plugins) -> None:
    for number in range(30):
        await sqlite_nats.ask("set", key=f"k{number:02}", value="x" * 65_000)

    page = await sqlite_nats.ask("scan", limit=30)
    assert (page["truncated"], page["cursor"]) == (True, page["entries"][-1]["key"])
    rest = await sqlite_nats.ask("scan", limit=30, after=page["cursor"])
    assert rest["entries"][0]["key"] > page["cursor"]


async def test_a_history_that_nats_cannot_carry_is_a_shorter_page(sqlite_nats: Plugins) -> None:
    """The latest changes come first, and a cursor leads to those before them."""
    for number in range(30):
        await sqlite_nats.ask("set", key="k", value=f"{number:02}" + "x" * 65_000)

    found: list[int] = []
    members: dict[str, Any] = {"key": "k", "limit": 30}
    while True:
        page = await sqlite_nats.ask("history", **members)
        found = [change["version"] for change in page["changes"]] + found
        if not page["truncated"]:
            break
        members["before"] = page["cursor"]

    assert found == [*range(1, 31)]


# The service ------------------------------------------------------------------


async def test_the_service_can_be_found_with_the_schemas_of_its_endpoints(sqlite_nats: Plugins) -> None:
    ping = ServicePing.from_dict(await sqlite_nats.say("$SRV.PING.limpet", b""))
    info = ServiceInfo.from_dict(await sqlite_nats.say(f"$SRV.INFO.limpet.{ping.id}", b""))

    assert ping.id == sqlite_nats.served.server_id == info.id
    assert {endpoint.name for endpoint in info.endpoints} == {*OPERATIONS, "unwatch"}
    found = {endpoint.name: endpoint for endpoint in info.endpoints}
    assert (found["set"].subject, found["set"].queue_group) == ("db.kv.*.set", "limpet")
    schema = json.loads(found["set"].metadata["request_schema"])["$defs"]["Set"]
    assert schema["required"] == ["key", "value"]
    assert schema["properties"]["key"]["maxLength"] == 255
    assert schema["properties"]["ttl"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 2_147_483_647}
    answered = json.loads(found["list"].metadata["reply_schema"])["oneOf"][0]
    assert set(answered["properties"]) == {"success", "keys", "count", "truncated"}


async def test_the_service_counts_what_it_was_asked(sqlite_nats: Plugins) -> None:
    await sqlite_nats.ask("set", key="k", value=1)
    await sqlite_nats.ask("set", key="k")

    stats = ServiceStats.from_dict(await sqlite_nats.say("$SRV.STATS", b""))

    (counted,) = [endpoint for endpoint in stats.endpoints if endpoint.name == "set"]
    assert (counted.num_requests, counted.num_errors, counted.last_error) == (2, 1, "MISSING_FIELD")
    assert counted.processing_time > 0


# Stopping ---------------------------------------------------------------------


async def test_a_server_that_stops_answers_what_it_has_heard(tmp_path: Any) -> None:
    async with opened(f"sqlite:///{tmp_path}/state.db") as session, connected() as client:
        async with serving(session) as served:
            bodies = [json.dumps({"key": f"k{number}", "value": number}).encode() for number in range(200)]
            pending = [asyncio.ensure_future(client.request("db.kv.a.set", body, timeout=120)) for body in bodies]
            await eventually(lambda: served._endpoints["set"].requests > 0)
            await served.drain()
            await served.drain()
        replies = await asyncio.gather(*pending, return_exceptions=True)

        answered = [reply for reply in replies if not isinstance(reply, BaseException)]
        assert {reply.data for reply in answered} == {b'{"success":true}'}
        assert len(answered) >= served._endpoints["set"].requests > 0


async def test_whoever_waits_for_a_lock_is_told_that_the_server_stops(tmp_path: Any) -> None:
    async with opened(f"sqlite:///{tmp_path}/state.db") as session, connected() as client:
        async with serving(session) as served:
            await client.request("db.kv.a.lock", b'{"name":"n","ttl":60}', timeout=120)
            waiting = asyncio.ensure_future(
                client.request("db.kv.a.lock", b'{"name":"n","ttl":60,"wait":29}', timeout=60)
            )
            await eventually(lambda: served._waiting_for_locks == 1)
            await served.drain()
        reply = json.loads((await waiting).data)

    assert (reply["error_code"], reply["code"]) == ("DATABASE_ERROR", "unavailable")


@pytest.mark.parametrize(("name", "code"), [("get", "unavailable"), ("set", "ambiguous")])
async def test_what_does_not_end_in_time_is_cut_off_and_told(tmp_path: Any, name: str, code: str) -> None:
    """A read may be sent to another server. The outcome of a write is known only by its id."""

    async def stuck(*_: Any) -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    async with opened(f"sqlite:///{tmp_path}/state.db") as session, serving(session) as served, connected() as client:
        row = OPERATIONS[name]._replace(run=stuck)
        served._endpoints[name] = NatsEndpoint(row, row.request)
        body = b'{"key":"k","value":1,"request_id":"mine"}'
        pending = [asyncio.ensure_future(client.request(f"db.kv.a.{name}", body, timeout=120)) for _ in range(3)]
        await eventually(lambda: served._running == 3)
        await served.drain(within_s=0.1)
        done, silent = await asyncio.wait(pending, timeout=1, return_when=asyncio.FIRST_COMPLETED)
        for one in silent:
            one.cancel()
        decoded = [json.loads((await one).data) for one in done]

    assert {reply["code"] for reply in decoded} == {code}
    assert name == "get" or decoded[0]["request_id"] == "mine"


async def test_only_so_many_wait_for_locks(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from limpet.server import subjects

    monkeypatch.setattr(subjects, "LOCKS_WAITING_MAX", 0)
    async with opened("memory:") as session, serving(session), connected() as client:
        reply = await client.request("db.kv.a.lock", b'{"name":"n","ttl":60,"wait":1}', timeout=120)

    assert json.loads(reply.data)["error_code"] == "RATE_LIMITED"


async def test_a_server_can_begin_again_on_the_same_connection(tmp_path: Any) -> None:
    async with opened(f"sqlite:///{tmp_path}/state.db") as session, serving(session) as served, connected() as client:
        await served.drain()
        again = PluginSubjects(served._dispatcher, served._connection)
        await again.start()
        reply = await client.request("db.kv.a.set", b'{"key":"k","value":1}', timeout=120)
        await again.drain()

    assert json.loads(reply.data) == {"success": True}


@pytest.mark.parametrize("name", ["lock", "locks"])
async def test_lock_names_are_held_to_the_same_length_as_keys(sqlite_nats: Plugins, name: str) -> None:
    if name == "lock":
        assert (await sqlite_nats.ask("lock", name="n" * 256, ttl=1))["error_code"] == "VALIDATION_ERROR"
    else:
        assert (await sqlite_nats.ask("locks"))["locks"] == []


# Watching ---------------------------------------------------------------------


class Listener:
    """Hears what comes to a subject."""

    def __init__(self, nats: Plugins) -> None:
        self.subject: str = nats.client.new_inbox()
        self.received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._nats = nats

    async def listen(self) -> None:
        async def receive(message: Any) -> None:
            await self.received.put(json.loads(message.data))

        self.subscription = await self._nats.client.subscribe(self.subject, cb=receive)

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(120):
            while True:
                document = await self.received.get()
                if document.get("op") != "heartbeat":
                    return document


async def listening(nats: Plugins, **members: Any) -> tuple[Listener, dict[str, Any]]:
    listener = Listener(nats)
    await listener.listen()
    answer = await nats.ask("watch", **{"deliver": listener.subject, **members})
    return listener, answer


async def test_changes_are_delivered_as_they_happen(nats: Plugins) -> None:
    listener, answer = await listening(nats, pattern="config/*")
    assert (answer["success"], answer["subject"]) == (True, listener.subject)
    await nats.ask("set", key="other", value=0)
    await nats.ask("set", key="config/theme", value="dark", request_id="why")
    await nats.ask("delete", key="config/theme")

    put, delete = await listener.receive(), await listener.receive()

    assert (put["op"], put["key"], put["value"], put["version"]) == ("put", "config/theme", "dark", 1)
    assert (put["watch"], put["cause"]) == (answer["watch"], "why")
    assert (delete["op"], delete["key"], delete["value"]) == ("delete", "config/theme", None)
    assert delete["revision"] > put["revision"]


async def test_a_watch_without_a_subject_delivers_behind_its_answer(nats: Plugins) -> None:
    """Any client can do that: listen to an inbox, and publish with it as the reply subject."""
    listener = Listener(nats)
    await listener.listen()
    await nats.client.publish("db.kv.my-plugin.watch", b'{"initial":true}', reply=listener.subject)
    assert (await listener.receive())["success"]
    assert (await listener.receive())["op"] == "synced"
    await nats.ask("set", key="k", value=1)

    assert (await listener.receive())["key"] == "k"


async def test_a_watch_resumes_after_a_position_and_begins_with_what_there_is(nats: Plugins) -> None:
    await nats.ask("set", key="a", value=1)
    first, _ = await listening(nats, initial=True)
    assert [(await first.receive())["op"] for _ in range(2)] == ["put", "synced"]
    await nats.ask("set", key="b", value=2)
    seen = await first.receive()
    await nats.ask("set", key="c", value=3)

    second, _ = await listening(nats, after=seen["position"])

    assert (await second.receive())["key"] == "c"


async def test_a_watch_from_nowhere_is_refused(nats: Plugins) -> None:
    _, answer = await listening(nats, after="another-store:my-plugin:1:5")

    assert (answer["success"], answer["error_code"]) == (False, "COMPACTED")
    assert nats.served.watches == 0


async def test_a_watch_ends_when_it_is_told_to(nats: Plugins) -> None:
    listener, answer = await listening(nats)

    assert await nats.ask("unwatch", watch=answer["watch"]) == {"success": True, "ended": True}
    ended = await listener.receive()
    assert (ended["op"], ended["reason"]) == ("end", "unwatched")
    assert await nats.ask("unwatch", watch=answer["watch"]) == {"success": True, "ended": False}


async def test_a_plugin_cannot_end_the_watch_of_another(sqlite_nats: Plugins) -> None:
    _, answer = await listening(sqlite_nats)

    assert not (await sqlite_nats.ask("unwatch", "other", watch=answer["watch"]))["ended"]
    assert sqlite_nats.served.watches == 1


@pytest.mark.parametrize("watch", ["", ".", "unknown.1", "*.1", ">.1", "a b.1", "x" * 500])
async def test_a_watch_that_is_none_is_not_ended(sqlite_nats: Plugins, watch: str) -> None:
    assert await sqlite_nats.ask("unwatch", watch=watch) == {"success": True, "ended": False}


async def test_a_server_that_stops_says_so_to_who_watches(tmp_path: Any) -> None:
    async with opened(f"sqlite:///{tmp_path}/state.db") as session, serving(session) as served, connected() as client:
        inbox = client.new_inbox()
        listening = await client.subscribe(inbox)
        await client.publish("db.kv.a.watch", b"{}", reply=inbox)
        assert json.loads((await listening.next_msg(30)).data)["success"]
        await served.drain()
        last = json.loads((await listening.next_msg(30)).data)

    assert (last["op"], last["reason"]) == ("end", "stopping")


async def test_a_watch_that_nobody_listens_to_ends(tmp_path: Any) -> None:
    async with opened(f"sqlite:///{tmp_path}/state.db") as session, connected() as client, serving(session) as served:
        served._deliveries._beat_s = 0.05
        kept, left = client.new_inbox(), client.new_inbox()
        listening = await client.subscribe(kept)
        leaving = await client.subscribe(left)
        for inbox in (kept, left):
            await client.publish("db.kv.a.watch", b"{}", reply=inbox)
        await eventually(lambda: served.watches == 2)
        # The first beat was set when the server started.
        served._deliveries._beating.cancel()  # type: ignore[union-attr]
        served._deliveries._beating = asyncio.ensure_future(served._deliveries._beat())
        assert json.loads((await leaving.next_msg(30)).data)["success"]
        await leaving.unsubscribe()
        await eventually(lambda: served.watches == 1)
        await listening.next_msg(30)
        assert json.loads((await listening.next_msg(30)).data)["op"] == "heartbeat"


@pytest.mark.parametrize(
    "deliver",
    ["db.kv.other.set", "db.kv.my-plugin.set", "_INBOX_other.x", "_INBOX", "_INBOX.", "_INBOX.*", "_INBOX.a.>", "a"],
)
async def test_events_are_delivered_to_an_inbox_alone(sqlite_nats: Plugins, deliver: str) -> None:
    answer = await sqlite_nats.ask("watch", deliver=deliver)

    assert (answer["success"], answer["error_code"]) == (False, "VALIDATION_ERROR")
    assert sqlite_nats.served.watches == 0


async def test_a_plugin_has_only_so_many_watches(sqlite_nats: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    from limpet.server import nats_watch as deliveries

    monkeypatch.setattr(deliveries, "WATCHES_OF_PLUGIN_MAX", 2)
    answers = [await sqlite_nats.ask("watch", deliver=f"_INBOX.x{number}") for number in range(3)]

    assert [answer["success"] for answer in answers] == [True, True, False]
    assert answers[-1]["error_code"] == "RATE_LIMITED"
    assert (await sqlite_nats.ask("watch", "other", deliver="_INBOX.x"))["success"]


async def test_a_value_too_large_for_a_message_is_left_out_of_the_event(sqlite_nats: Plugins) -> None:
    from limpet.store import Store

    listener, _ = await listening(sqlite_nats)
    await Store(sqlite_nats.session, "my-plugin").put("big", b"x" * 900_000)

    event = await listener.receive()

    assert (event["op"], event["key"], event["value"], event["omitted"]) == ("put", "big", None, True)
