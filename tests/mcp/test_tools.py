"""The tools, called by the SDK's client: what they do, and how they explain what they refuse."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mcp import Client

import limpet
from limpet.errors import Conflict
from limpet.mcp.server import make_server
from limpet.mcp.tools import PAGE_MAX, TOOLS, Change
from limpet.mcp.values import CHARS_MAX
from limpet.mcp.wording import describe
from limpet.mcp.workspace import Workspace
from limpet.server.dispatch import OWN_NAMESPACE, Dispatcher, TrustedCaller
from tests.mcp.support import Agent, Refused


async def test_each_tool_is_described_with_its_arguments_and_its_answer(agent: Agent) -> None:
    tools = (await agent.client.list_tools()).tools

    assert {tool.name for tool in tools} == set(TOOLS)
    for tool in tools:
        assert tool.description
        assert tool.input_schema["type"] == "object"
        assert tool.output_schema is not None
        assert tool.output_schema["type"] == "object"
        assert all("description" in each for each in tool.input_schema["properties"].values())
        assert "#" not in str(tool.input_schema), "an agent's schema has no references"


# Values -----------------------------------------------------------------------


async def test_a_value_is_made_read_replaced_and_deleted_at_its_revision(agent: Agent) -> None:
    assert await agent("get", key="plan") == {"exists": False, "key": "plan", "revision": 0}

    made = await agent("put", key="plan", value={"a": 1}, revision=0)
    assert await agent("get", key="plan") == {
        "exists": True,
        "key": "plan",
        "revision": made["revision"],
        "value": {"a": 1},
    }
    replaced = await agent("put", key="plan", value=None, revision=made["revision"])
    assert (await agent("get", key="plan"))["value"] is None
    assert await agent("delete", key="plan", revision=replaced["revision"]) == {"key": "plan", "deleted": True}
    assert not (await agent("get", key="plan"))["exists"]


async def test_a_put_that_would_undo_another_writes_nothing_and_says_what_differs(
    agent: Agent, store: limpet.Store
) -> None:
    read = await agent("put", key="plan", value={"flight": "none", "days": 3}, revision=0)
    theirs = await store.put("plan", {"flight": "booked", "days": 3})

    with pytest.raises(Refused) as refused:
        await agent("put", key="plan", value={"flight": "none", "days": 4}, revision=read["revision"])

    assert await store.get("plan") == {"flight": "booked", "days": 3}
    members = refused.value.members
    assert members["error"] == "conflict"
    assert members["revision"] == theirs.revision
    assert members["changed"] == ["/flight"]
    assert members["now"] == {"flight": "booked", "days": 3}
    for part in ("nothing was written", "/flight", '"booked"', f"put with revision {theirs.revision}", "edit"):
        assert part in refused.value.text
    # What it says is what helps.
    await agent("put", key="plan", value={"flight": "booked", "days": 4}, revision=members["revision"])


@pytest.mark.parametrize(("tool", "rest"), [("put", {"value": 1}), ("delete", {}), ("edit", {"set": {"/a": 1}})])
async def test_what_was_deleted_meanwhile_is_a_conflict_that_says_so(
    agent: Agent, store: limpet.Store, tool: str, rest: dict[str, Any]
) -> None:
    read = await store.put("plan", {"a": 0})
    await store.delete("plan")

    with pytest.raises(Refused, match="not there") as refused:
        await agent(tool, key="plan", revision=read.revision, **rest)

    assert refused.value.members["revision"] == 0
    assert await store.entry("plan") is None


async def test_a_put_of_what_is_there_already_is_a_conflict(agent: Agent, store: limpet.Store) -> None:
    await store.put("plan", 1)

    with pytest.raises(Refused, match="there already"):
        await agent("put", key="plan", value=2, revision=0)


async def test_a_time_to_live_ends_an_entry(agent: Agent, store: limpet.Store) -> None:
    await agent("put", key="note", value=1, revision=0, ttl=100)

    entry = await store.entry("note")
    assert entry is not None
    assert entry.expires_at is not None
    assert (await agent("get", key="note"))["expires_at"] == entry.expires_at.isoformat().replace("+00:00", "Z")


# Edits ------------------------------------------------------------------------


async def test_an_edit_keeps_what_others_have_changed_and_names_it(agent: Agent, store: limpet.Store) -> None:
    read = await agent("put", key="plan", value={"steps": {"a": "open", "b": "open"}, "old": 1}, revision=0)
    await store.put("plan", {"steps": {"a": "open", "b": "done"}, "old": 1, "new": 2})

    edited = await agent("edit", key="plan", revision=read["revision"], set={"/steps/a": "done"}, remove=["/old"])

    assert await store.get("plan") == {"steps": {"a": "done", "b": "done"}, "new": 2}
    assert sorted(edited["others_changed"]) == ["/new", "/steps/b"]
    assert edited["revision"] == (await agent("get", key="plan"))["revision"]


async def test_a_member_that_both_have_changed_is_a_conflict_that_shows_the_three_values(
    agent: Agent, store: limpet.Store
) -> None:
    read = await agent("put", key="plan", value={"hotel": "none", "taxi": "none"}, revision=0)
    theirs = await store.put("plan", {"hotel": "Ritz", "taxi": "none"})

    with pytest.raises(Refused) as refused:
        await agent("edit", key="plan", revision=read["revision"], set={"/hotel": "Plaza", "/taxi": "booked"})

    assert await store.get("plan") == {"hotel": "Ritz", "taxi": "none"}
    assert refused.value.members["clashes"] == [
        {"path": "/hotel", "was": "none", "now": "Ritz", "yours": "Plaza", "absent": []}
    ]
    for part in ("/hotel", '"none"', '"Ritz"', '"Plaza"', f"edit with revision {theirs.revision}", "not written"):
        assert part in refused.value.text
    await agent("edit", key="plan", revision=theirs.revision, set={"/hotel": "Plaza", "/taxi": "booked"})
    assert await store.get("plan") == {"hotel": "Plaza", "taxi": "booked"}


async def test_a_clash_is_explained_at_the_revision_that_it_shows(store: limpet.Store) -> None:
    """A third writer may come in between. Its revision would let the next edit replace what the model has not seen."""
    base = await store.put("plan", {"hotel": "none"})
    mine = store.edit("plan")
    (await mine.__aenter__())["hotel"] = "Plaza"
    theirs = await store.put("plan", {"hotel": "Ritz"})
    with pytest.raises(Conflict) as raised:
        await mine.__aexit__(None)
    await store.put("plan", {"hotel": "Hilton"})
    space = Workspace(Dispatcher(store._session, "mcp"), TrustedCaller(), store.name)

    problem = await describe(space, "edit", raised.value, Change(key="plan", revision=base.revision))

    assert problem.revision == theirs.revision
    assert problem.clashes is not None
    assert problem.clashes[0]["now"] == "Ritz"


async def test_an_edit_at_revision_0_makes_the_object_or_joins_one_that_was_made(
    agent: Agent, store: limpet.Store
) -> None:
    await agent("edit", key="plan", revision=0, set={"/a": 1})
    await agent("edit", key="plan", revision=0, set={"/b": 2})

    assert await store.get("plan") == {"a": 1, "b": 2}
    with pytest.raises(Refused, match="/a"):
        await agent("edit", key="plan", revision=0, set={"/a": 3})


async def test_two_agents_edit_one_plan_at_once_and_lose_nothing(store: limpet.Store) -> None:
    """Each ticks twenty steps off, knowing only the revision it read at first."""
    start = await store.put("plan", {f"{name}-{number}": "open" for name in "ab" for number in range(20)})

    async def work(name: str) -> None:
        async with Client(make_server(store)) as client:
            agent = Agent(client)
            for number in range(20):
                await agent("edit", key="plan", revision=start.revision, set={f"/{name}-{number}": "done"})

    await asyncio.gather(work("a"), work("b"))

    assert set((await store.get("plan")).values()) == {"done"}


async def test_lists_and_names_with_slashes_are_reached_by_paths(agent: Agent, store: limpet.Store) -> None:
    read = await store.put("plan", {"steps": [{"who": "a"}, "x"], "a/b": {"~": 1}})

    await agent(
        "edit",
        key="plan",
        revision=read.revision,
        set={"/steps/0/who": "me", "/steps/-": "last", "/a~1b/~0": 2},
    )

    assert await store.get("plan") == {"steps": [{"who": "me"}, "x", "last"], "a/b": {"~": 2}}


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"set": {"hotel": 1}}, "begins with a slash"),
        ({"set": {"": 1}}, "whole value"),
        ({"set": {"/x/y": 1}}, "'/steps'"),
        ({"set": {"/steps/7": 1}}, "'/steps/7' has no place"),
        ({"remove": ["/x"]}, "'/steps'"),
        ({"remove": ["/steps/1"]}, "'/steps/0'"),
        ({}, "set, remove, or both"),
    ],
)
async def test_a_wrong_path_is_explained(agent: Agent, store: limpet.Store, change: dict[str, Any], hint: str) -> None:
    read = await store.put("plan", {"steps": ["x"]})

    with pytest.raises(Refused) as refused:
        await agent("edit", key="plan", revision=read.revision, **change)

    assert hint in refused.value.text
    assert await store.get("plan") == {"steps": ["x"]}


async def test_only_an_object_is_edited(agent: Agent, store: limpet.Store) -> None:
    read = await store.put("count", 7)

    with pytest.raises(Refused, match="put replaces"):
        await agent("edit", key="count", revision=read.revision, set={"/a": 1})


async def test_a_revision_that_is_not_one_of_this_key_is_a_conflict(agent: Agent, store: limpet.Store) -> None:
    await store.put("other", 1)
    plan = await store.put("plan", {"a": 1})

    for revision in (plan.revision - 1, plan.revision + 5):
        with pytest.raises(Refused, match=f"revision {plan.revision} now"):
            await agent("edit", key="plan", revision=revision, set={"/a": 2})
    assert await store.get("plan") == {"a": 1}


async def test_an_edit_is_merged_with_the_value_that_a_touched_entry_had(agent: Agent, store: limpet.Store) -> None:
    await store.put("plan", {"a": 1, "b": 1})
    touched = await store.touch("plan", 100)
    assert touched is not None
    await store.put("plan", {"a": 1, "b": 2})

    await agent("edit", key="plan", revision=touched.revision, set={"/a": 3})

    assert await store.get("plan") == {"a": 3, "b": 2}


# Appending, listing, waiting --------------------------------------------------


async def test_what_many_agents_append_is_all_there_in_order(agent: Agent) -> None:
    wrote = await asyncio.gather(*(agent("append", prefix="log/", value=number) for number in range(20)))

    listed = await agent("list", prefix="log/", values=True)
    assert [line["key"] for line in listed["entries"]] == sorted(each["key"] for each in wrote)
    assert sorted(line["value"] for line in listed["entries"]) == [*range(20)]


async def test_a_list_comes_in_pages(agent: Agent, store: limpet.Store) -> None:
    for number in range(7):
        await store.put(f"task/{number}", number)
    await store.put("task0", "not below task/")

    pages, after = [], None
    while True:
        page = await agent("list", prefix="task/", limit=3, after=after)
        pages.append([line["key"] for line in page["entries"]])
        if (after := page.get("next")) is None:
            break

    assert pages == [["task/0", "task/1", "task/2"], ["task/3", "task/4", "task/5"], ["task/6"]]
    assert "value" not in page["entries"][0]


async def test_no_answer_is_longer_than_a_model_can_take(agent: Agent, store: limpet.Store) -> None:
    for number in range(PAGE_MAX + 10):
        await store.put(f"{'k' * 900}{number:04}", "x" * 900)
    await store.put("big", {"text": "y" * 100_000, "list": ["z" * 500] * 300, "small": 1})

    listed = await agent("list", values=True, limit=PAGE_MAX)
    assert len(str(listed)) < 2 * CHARS_MAX
    assert "next" in listed
    assert {line["key"]: line for line in (await agent("list", prefix="big", values=True))["entries"]}["big"][
        "value_chars"
    ] > 100_000

    outline = await agent("get", key="big")
    assert "value" not in outline
    assert set(outline["members"]) == {"/text", "/list", "/small"}
    assert (await agent("get", key="big", path="/small"))["value"] == 1
    for path, whole in (("/text", "y" * 100_000), ("/list", ["z" * 500] * 300)):
        found = await agent("get", key="big", path=path)
        parts = [found["value"]]
        while "next_offset" in found:
            found = await agent("get", key="big", path=path, offset=found["next_offset"])
            parts.append(found["value"])
        assert max(len(str(part)) for part in parts) < 2 * CHARS_MAX
        assert sum(parts[1:], parts[0]) == whole if isinstance(whole, list) else "".join(parts) == whole


async def test_an_item_that_is_too_long_is_named_and_the_rest_goes_on(agent: Agent, store: limpet.Store) -> None:
    await store.put("list", ["a", "b" * 50_000, "c"])

    assert (await agent("get", key="list"))["next_offset"] == 1
    skipped = await agent("get", key="list", offset=1)
    assert skipped["members"] == {"/1": 50_002}
    assert (await agent("get", key="list", offset=skipped["next_offset"]))["value"] == ["c"]


async def test_an_object_with_many_members_is_outlined_in_parts(agent: Agent, store: limpet.Store) -> None:
    members = {f"member-{number:03}": "x" * 100 for number in range(250)}
    await store.put("many", members)

    found = await agent("get", key="many")
    seen = dict(found["members"])
    while "next_offset" in found:
        found = await agent("get", key="many", offset=found["next_offset"])
        assert len(str(found)) < CHARS_MAX
        seen |= found["members"]

    assert seen == {f"/{name}": 102 for name in members}


async def test_a_conflict_over_many_members_stays_short(agent: Agent, store: limpet.Store) -> None:
    names = [f"member-{number:03}" for number in range(500)]
    first = await store.put("many", dict.fromkeys(names, 0))
    await store.put("many", dict.fromkeys(names, 1))

    changes = {f"/{name}": 2 for name in names}
    for tool, change in (("put", {"value": 1}), ("edit", {"set": changes}), ("edit", {"remove": ["/none"]})):
        with pytest.raises(Refused, match=r"more|there is no") as refused:
            await agent(tool, key="many", revision=first.revision, **change)
        assert len(refused.value.text) < 4_000
        assert len(str(refused.value.members)) < 8_000


async def test_a_list_without_values_does_not_read_them(
    agent: Agent, store: limpet.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("big", "x" * 900_000)
    engine: Any = store._session.engine
    scan, wanted = engine.scan, []

    def note(*args: Any, values: bool = True, **options: Any) -> Any:
        wanted.append(values)
        return scan(*args, values=values, **options)

    monkeypatch.setattr(engine, "scan", note)
    await agent("list")
    await agent.client.list_resources()
    await agent("list", values=True)

    assert wanted == [False, False, True]


async def test_a_conflict_over_a_long_value_stays_short(agent: Agent, store: limpet.Store) -> None:
    first = await store.put("big", {"a": "x" * 100_000, "b": 1})
    await store.put("big", {"a": "y" * 100_000, "b": 1})

    for tool, change in (("put", {"value": 1}), ("edit", {"set": {"/a": "z" * 100_000}})):
        with pytest.raises(Refused, match="/a") as refused:
            await agent(tool, key="big", revision=first.revision, **change)
        assert len(refused.value.text) < 2_000
        # A revision is not to be used before what it holds was seen.
        assert "with the revision that" in refused.value.text
        assert len(str(refused.value.members)) < 2_000


async def test_waiting_ends_with_a_change_and_misses_none(agent: Agent, store: limpet.Store) -> None:
    start = await store.put("task/1", "open")

    waiting = asyncio.create_task(agent("wait", prefix="task/", after=start.revision, seconds=30))
    await asyncio.sleep(0.05)
    await store.put("other", 1)
    second = await store.put("task/2", "open")
    found = await waiting

    assert found["changes"] == [{"key": "task/2", "op": "put", "revision": second.revision}]
    await store.delete("task/1")
    found = await agent("wait", key="task/1", after=found["revision"])
    assert [change["op"] for change in found["changes"]] == ["delete"]
    assert await agent("wait", key="task/1", seconds=0) == {"changes": [], "revision": found["revision"]}
    assert (await agent("wait", prefix="", seconds=0.01))["changes"] == []


# Locks ------------------------------------------------------------------------


async def test_a_lock_is_taken_renewed_used_and_given_back(agent: Agent, store: limpet.Store) -> None:
    lock = await agent("lock", name="report", ttl=60, holder="agent-1")

    with pytest.raises(Refused, match="agent-1") as refused:
        await agent("lock", name="report")
    assert refused.value.members["error"] == "lock_held"
    assert (await agent("renew", name="report", token=lock["token"], ttl=90))["expires_in"] == 90
    held = {"lock": "report", "token": lock["token"]}
    made = await agent("put", key="report", value={}, revision=0, **held)
    edited = await agent("edit", key="report", revision=made["revision"], set={"/a": 1}, **held)
    await agent("append", prefix="log/", value="done", **held)
    await agent("unlock", name="report", token=lock["token"])

    for tool, arguments in (
        ("put", {"key": "report", "value": 0, "revision": edited["revision"]}),
        ("edit", {"key": "report", "set": {"/a": 2}, "revision": edited["revision"]}),
        ("append", {"prefix": "log/", "value": "late"}),
        ("delete", {"key": "report", "revision": edited["revision"]}),
    ):
        with pytest.raises(Refused, match="take the lock again") as refused:
            await agent(tool, **arguments, **held)
        assert refused.value.members["error"] == "lock_lost"
    with pytest.raises(Refused):
        await agent("renew", name="report", token=lock["token"])
    with pytest.raises(Refused):
        await agent("unlock", name="report", token=lock["token"])
    assert await store.get("report") == {"a": 1}
    assert (await store.keys("log/")).count == 1


async def test_waiting_for_a_lock_gets_it_when_it_is_given_back(agent: Agent) -> None:
    first = await agent("lock", name="l")

    waiting = asyncio.create_task(agent("lock", name="l", wait=20))
    await asyncio.sleep(0.05)
    await agent("unlock", name="l", token=first["token"])

    assert (await waiting)["token"] > first["token"]


# Mistakes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "arguments", "hint"),
    [
        ("get", {}, "key"),
        ("get", {"key": 7}, "$.key"),
        ("get", {"key": "a", "offset": -1}, "$.offset"),
        ("get", {"key": "a", "hint": 1}, "hint"),
        ("get", {"key": ""}, "key"),
        ("get", {"key": "x" * 2000}, "1,024"),
        ("put", {"key": "a", "value": 1}, "revision"),
        ("put", {"key": "a", "value": 1, "revision": "7"}, "$.revision"),
        ("put", {"key": "a", "value": 1, "revision": -1}, "$.revision"),
        ("put", {"key": "a", "value": 1, "revision": 0, "ttl": -1}, "ttl"),
        ("put", {"key": "a", "value": 1, "revision": 0, "lock": "l"}, "token"),
        ("put", {"key": "a", "value": "x" * 1_100_000, "revision": 0}, "1,000,000"),
        ("list", {"limit": 1_000}, "$.limit"),
        ("wait", {}, "give one of them"),
        ("wait", {"key": "a", "prefix": "b"}, "give one of them"),
        ("wait", {"key": "a", "seconds": 1_000}, "$.seconds"),
        ("wait", {"key": "a", "after": 1_000}, "not written yet"),
        ("lock", {"name": "l", "ttl": 0}, "$.ttl"),
        ("drop", {}, "Use one of: get, put"),
    ],
)
async def test_a_bad_call_is_answered_and_the_session_goes_on(
    agent: Agent, tool: str, arguments: dict[str, Any], hint: str
) -> None:
    with pytest.raises(Refused) as refused:
        await agent(tool, **arguments)

    assert hint in refused.value.text
    assert "Next: " in refused.value.text
    assert len(refused.value.text) < 1_000
    assert not (await agent("get", key="a"))["exists"]


async def test_the_namespace_of_the_server_is_out_of_reach(store: limpet.Store) -> None:
    async with Client(make_server(store.namespace(OWN_NAMESPACE))) as client:
        for tool, arguments in (
            ("get", {"key": "token/1"}),
            ("list", {}),
            ("wait", {"key": "token/1", "seconds": 0}),
            ("put", {"key": "token/1", "value": 1, "revision": 0}),
        ):
            with pytest.raises(Refused, match="server's own"):
                await Agent(client)(tool, **arguments)


async def test_records_and_bytes_are_shown_as_json(agent: Agent, store: limpet.Store) -> None:
    await store.record("job").put({"state": "open", "raw": b"\0"})
    record = await agent("get", key="job")
    await store.put("raw", b"\0")

    assert record["value"] == {"state": "open", "raw": {"$bytes": "AA=="}}
    assert (await agent("get", key="raw"))["value"] == {"$bytes": "AA=="}
    await agent("edit", key="job", revision=record["revision"], set={"/state": "done"})
    assert await store.record("job").fields() == {"state": "done", "raw": b"\0"}


# Rights -----------------------------------------------------------------------


async def test_without_values_an_agent_sees_keys_and_revisions_alone(store: limpet.Store) -> None:
    entry = await store.put("plan", {"secret": "s3cret"})
    await store.put("plan/2", "s3cret")
    async with Client(make_server(store, reveals=False)) as client:
        agent = Agent(client)

        assert await agent("get", key="plan") == {
            "exists": True,
            "key": "plan",
            "revision": entry.revision,
            "is_hidden": True,
        }
        assert not (await agent("get", key="pla"))["exists"]
        listed = await agent("list", values=True)
        assert listed["is_hidden"]
        seen = [
            str(listed),
            str(await agent.resource("limpet://entry/plan")),
            str(await agent.resource("limpet://prefix/")),
        ]
        for tool, arguments in (
            ("put", {"value": 1, "revision": entry.revision + 10}),
            ("edit", {"set": {"/secret": 1}, "revision": entry.revision}),
            ("delete", {"revision": entry.revision + 10}),
        ):
            with pytest.raises(Refused) as refused:
                await agent(tool, key="plan", **arguments)
            seen += [refused.value.text, str(refused.value.members)]
        assert not [text for text in seen if "s3cret" in text]
        await agent("put", key="plan", value="mine", revision=entry.revision)


async def test_a_server_for_reading_offers_no_tool_that_writes(store: limpet.Store) -> None:
    await store.put("plan", 1)
    async with Client(make_server(store, read_only=True)) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}

        assert names == {"get", "list", "wait"}
        assert (await Agent(client)("get", key="plan"))["value"] == 1
        with pytest.raises(Refused, match="no tool 'put'"):
            await Agent(client)("put", key="plan", value=2, revision=1)


@pytest.mark.parametrize("fault", ["unavailable", "bug"])
async def test_a_failure_of_the_store_is_an_answer_without_details(
    store: limpet.Store, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    async with Client(make_server(store)) as client:
        await store.close()
        if fault == "bug":
            monkeypatch.setitem(TOOLS, "get", TOOLS["get"]._replace(run=_fail))
            client_of_bug = Client(make_server(store))
            async with client_of_bug:
                with pytest.raises(Refused, match="mistake of the server") as refused:
                    await Agent(client_of_bug)("get", key="plan")
        else:
            with pytest.raises(Refused, match="Next") as refused:
                await Agent(client)("get", key="plan")
        assert "s3cret" not in refused.value.text


async def _fail(*_: object) -> Any:
    raise RuntimeError("s3cret")
