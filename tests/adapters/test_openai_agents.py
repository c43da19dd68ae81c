"""The session for the OpenAI Agents SDK."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, RunConfig, Runner, SQLiteSession
from agents import Session as SessionProtocol
from agents.memory import SessionSettings
from agents.testing import ScriptedModel, assistant_message

import limpet
from limpet.adapters.openai_agents import Session
from tests.engines import unique


@pytest.fixture
async def session(url: str) -> AsyncIterator[Session]:
    """A session on an engine."""
    async with Session("ann", url, namespace=unique()) as opened:
        yield opened


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[SQLiteSession]:
    """The SDK's own session, in a file."""
    with contextlib.closing(SQLiteSession("ann", tmp_path / "theirs.db")) as opened:
        yield opened


def say(text: object) -> Any:
    return {"role": "user", "content": str(text)}


def texts(items: Iterable[Any]) -> list[str]:
    return [item["content"] for item in items]


async def test_it_answers_as_the_session_of_the_sdk_does(session: Session, theirs: SQLiteSession) -> None:
    """The same random calls, one after the other, to both."""
    dice, count = random.Random(11), 0
    for step in range(80):
        call = dice.choice(["add_items", "add_items", "get_items", "pop_item", "pop_item", "clear_session"])
        if call == "clear_session" and dice.random() < 0.7:
            continue
        arguments: dict[str, Any] = {}
        if call == "add_items":
            arguments["items"] = [{**say(count := count + 1), "extra": {"a": [1.5, None]}} for _ in range(step % 4)]
        if call == "get_items":
            arguments["limit"] = dice.choice([None, -1, 0, 1, 2, 5, 100])
        assert await getattr(session, call)(**arguments) == await getattr(theirs, call)(**arguments), (step, call)
    assert await session.get_items() == await theirs.get_items()


async def test_fifty_appends_at_once_are_all_kept_and_whole(url: str) -> None:
    """Two stores have nothing in common but the engine, like two processes."""
    namespace = unique()
    async with Session("ann", url, namespace=namespace) as one, Session("ann", url, namespace=namespace) as other:
        await asyncio.gather(*([one, other][number % 2].add_items([say(number), say(number)]) for number in range(50)))
        kept = texts(await one.get_items())

    assert sorted(set(kept), key=int) == [str(number) for number in range(50)]
    # What one call has added stays together.
    assert kept[::2] == kept[1::2]


async def test_of_many_callers_that_pop_each_gets_an_item_of_its_own(session: Session) -> None:
    for number in range(0, 20, 4):
        await session.add_items([say(each) for each in range(number, number + 4)])

    popped = await asyncio.gather(*(session.pop_item() for _ in range(22)))

    assert sorted(texts(filter(None, popped)), key=int) == [str(number) for number in range(20)]
    assert await session.get_items() == []


async def test_sessions_are_apart_whatever_their_names(url: str) -> None:
    async with limpet.open(url, namespace=unique()) as store:
        names = ["a", "a/b", "a/", "", "\0", "ä" * 2000, "%2F"]
        for name in names:
            await Session(name, store).add_items([say(name)])
        await Session("a", store).clear_session()

        assert await Session("a", store).get_items() == []
        for name in names[1:]:
            assert await Session(name, store).get_items() == [say(name)]


async def test_the_settings_say_how_many_items_are_given() -> None:
    async with limpet.open("memory:") as store:
        session = Session("ann", store, session_settings=SessionSettings(limit=2))
        await session.add_items([say(number) for number in range(5)])

        assert isinstance(session, SessionProtocol)
        assert await session.get_items() == [say(3), say(4)]
        assert len(await session.get_items(4)) == 4
        assert await Session("ann", store, session_settings={"limit": 1}).get_items() == [say(4)]


async def test_items_are_stored_as_they_are() -> None:
    async with limpet.open("memory:") as store:
        await Session("ann", store).add_items([say("hello")])

        assert [(entry.key, entry.value) async for entry in store.scan()] == [
            ("sessions/ann/0000000000000001", [say("hello")])
        ]


async def test_more_items_than_an_entry_holds_are_stored(session: Session) -> None:
    items = [say(str(number) * 300_000) for number in range(5)]
    await session.add_items(items)

    assert await session.get_items() == items
    assert await session.pop_item() == items[-1]


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ([say("small"), say("x" * 1_000_000)], limpet.errors.ValueTooLarge),
        ([say("x" * 900_000)] * 2 + [{"a": {1}}], limpet.errors.InvalidValue),
        ("hello", limpet.errors.InvalidValue),
    ],
)
async def test_nothing_is_stored_of_items_that_cannot_be(items: Any, error: type[Exception]) -> None:
    async with Session("ann", "memory:") as session:
        with pytest.raises(error):
            await session.add_items(items)
        assert await session.get_items() == []


async def test_an_agent_remembers_what_was_said() -> None:
    model = ScriptedModel([[assistant_message("San Francisco")], [assistant_message("California")]])
    agent, quiet = Agent(name="guide", model=model), RunConfig(tracing_disabled=True)
    async with Session("ann", "memory:") as session:
        await Runner.run(agent, "Where is the Golden Gate Bridge?", session=session, run_config=quiet)
        await Runner.run(agent, "In which state?", session=session, run_config=quiet)

        assert "Golden Gate" in str(model.calls[-1].input)
        assert len(await session.get_items()) == 4


async def test_closing_ends_what_a_url_has_opened_and_leaves_a_given_store_open() -> None:
    async with limpet.open("memory:") as store:
        async with Session("ann", store) as session:
            await session.add_items([say(1)])
        assert await session.get_items() == [say(1)]
    with pytest.raises(limpet.errors.Closed):
        await session.get_items()
    with pytest.raises(TypeError, match=r"limpet\.open"):
        Session("ann", 5)  # type: ignore[arg-type]
