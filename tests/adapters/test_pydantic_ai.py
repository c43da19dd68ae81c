"""The store for the conversations of Pydantic AI."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationEntry,
    ConversationRecord,
    InMemoryConversationStore,
)
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import BinaryContent, ModelMessage, ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models.test import TestModel

import limpet
from limpet.adapters.pydantic_ai import ConversationStore
from tests.engines import unique


@pytest.fixture
async def store(url: str) -> AsyncIterator[ConversationStore]:
    """A store on an engine."""
    async with ConversationStore(url, namespace=unique()) as opened:
        yield opened


def say(text: object) -> ModelRequest:
    return ModelRequest(parts=[UserPromptPart(content=str(text))])


def texts(conversation: Conversation | None) -> list[Any]:
    return [] if conversation is None else [message.parts[0].content for message in conversation.messages]  # type: ignore[union-attr]


class Script:
    """The same random calls to both stores. What the library makes up, identifiers and revisions, it keeps apart."""

    def __init__(self, ours: ConversationStore, seed: int) -> None:
        self.stores: list[Any] = [ours, InMemoryConversationStore()]
        self.dice = random.Random(seed)
        self.numbers = itertools.count()

    async def both(self, call: Any) -> Any:
        """Make a call on both stores, and compare what comes of it."""
        outcomes: list[Any] = []
        for store in self.stores:
            try:
                outcomes.append(await call(store))
            except UserError as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    async def step(self) -> None:
        conversation_id, other = self.dice.sample(["a", "b/c", "d", "e"], 2)
        keep, scope = self.dice.randint(0, 6), self.dice.choice([None, None, "ann", "bob"])
        call = self.dice.choice([self.save, self.save, self.save, self.rewrite, self.fork, self.branch, self.delete])
        await call(conversation_id, other, keep, scope)
        await self.both(lambda store: self.look(store, scope))

    async def save(self, conversation_id: str, _other: str, keep: int, scope: str | None) -> None:
        messages = [say(next(self.numbers)) for _ in range(keep % 4)]

        async def call(store: Any) -> int:
            found = await store.load(conversation_id, limit=keep or None)
            conversation = found or Conversation(conversation_id=conversation_id)
            conversation.messages.extend(messages)
            conversation.usage.requests += 1
            return len(await store.save(conversation, scope=scope))

        await self.both(call)

    async def rewrite(self, conversation_id: str, _other: str, keep: int, _scope: str | None) -> None:
        message = say(next(self.numbers))

        async def call(store: Any) -> int:
            found = await store.load(conversation_id)
            if found is None:
                return 0
            found.messages[keep:] = [message]
            found.new_message_index = None
            return len(await store.save(found))

        await self.both(call)

    async def fork(self, conversation_id: str, other: str, keep: int, scope: str | None) -> None:
        await self.both(
            lambda store: self._texts(
                store.fork(conversation_id, at=keep, new_conversation_id=other, scope=scope, source_scope=scope)
            )
        )

    async def branch(self, conversation_id: str, _other: str, keep: int, _scope: str | None) -> None:
        async def call(store: Any) -> list[str]:
            found = await store.load(conversation_id)
            revision = None if found is None else found.revision
            return await self._texts(store.branch(conversation_id, at=keep, expected_revision=revision))

        await self.both(call)

    async def delete(self, conversation_id: str, _other: str, keep: int, scope: str | None) -> None:
        if keep < 3:
            await self.both(lambda store: store.delete(conversation_id, scope=scope))

    async def look(self, store: Any, scope: str | None) -> list[Any]:
        """Everything that can be seen, without what the library makes up."""
        records = await store.list_conversations(scope=scope)
        seen: list[Any] = []
        for record in sorted(records, key=lambda record: record.conversation_id):
            lines = [[entry.message for entry in await store.read_history(tip)] for tip in record.branches]
            loaded = await store.load(record.conversation_id)
            seen.append((record.conversation_id, record.scope, record.usage, record.forked_from))
            seen.append((lines, loaded.messages))
        return seen

    async def _texts(self, making: Any) -> list[str]:
        return texts(await making)


async def test_it_answers_as_the_store_of_the_library_does(store: ConversationStore) -> None:
    script = Script(store, seed=13)
    for _ in range(70):
        await script.step()

    # Nothing of a deleted conversation stays, but what others have.
    reference = script.stores[1]
    opened = await store._lazy.open()
    assert len((await opened.keys("conversations/message/")).keys) == len(reference._entries)


async def test_of_two_that_save_a_conversation_one_is_refused_and_leaves_nothing(url: str) -> None:
    namespace = unique()
    async with limpet.open(url, namespace=namespace) as opened, ConversationStore(url, namespace=namespace) as other:
        store = ConversationStore(opened)
        await store.save(Conversation(conversation_id="c", messages=[say("begin")]))
        copies = [await each.load("c") for each in (store, other, store, other)]
        for number, copy in enumerate(copies):
            assert copy is not None
            copy.messages.append(say(number))

        saved = await asyncio.gather(
            *(each.save(copy) for each, copy in zip([store, other] * 2, copies, strict=True) if copy),
            return_exceptions=True,
        )

        assert sorted(isinstance(outcome, ConversationConflict) for outcome in saved) == [False, True, True, True]
        assert len(texts(await store.load("c"))) == 2
        assert len((await opened.keys("conversations/message/")).keys) == 2


async def test_a_fork_keeps_its_messages_when_a_deletion_runs_at_the_same_time(store: ConversationStore) -> None:
    """It has all of them, or it is refused."""
    for number in range(4):
        name = f"c{number}"
        await store.save(Conversation(conversation_id=name, messages=[say(each) for each in range(5)]))
        forked, _ = await asyncio.gather(
            store.fork(name, at=3, new_conversation_id=f"f{number}"), store.delete(name), return_exceptions=True
        )
        found = await store.load(f"f{number}")
        assert texts(found) == ([] if isinstance(forked, UserError) else ["0", "1", "2"])
        await store.delete(f"f{number}")

    opened = await store._lazy.open()
    assert (await opened.keys()).keys == []


async def test_a_long_history_is_stored_and_read_and_deleted(store: ConversationStore) -> None:
    messages = [say(number) for number in range(300)]
    await store.save(Conversation(conversation_id="c", messages=list(messages)))

    loaded = await store.load("c")
    assert loaded is not None
    assert loaded.messages == messages
    assert texts(await store.load("c", limit=45)) == [str(number) for number in range(255, 300)]
    await store.delete("c")
    assert await store.load("c") is None
    assert (await (await store._lazy.open()).keys()).keys == []


async def test_messages_come_back_as_they_were() -> None:
    messages: list[ModelMessage] = [
        ModelRequest(parts=[UserPromptPart(content=["look", BinaryContent(data=b"\xff\0", media_type="audio/wav")])]),
        ModelResponse(parts=[TextPart(content="ä")]),
    ]
    async with ConversationStore("memory:") as store:
        await store.save(Conversation(conversation_id="c", messages=list(messages)))
        loaded = await store.load("c")
        assert loaded is not None
        assert loaded.messages == messages
        record = await store.read_record("c")
        assert isinstance(record, ConversationRecord)
        [_, entry] = await store.load_entries("c") or []
        assert isinstance(entry, ConversationEntry)
        assert await store.read_entry(entry.id) == entry
        with pytest.raises(LookupError):
            await store.read_entry("none")


async def test_messages_that_a_batch_does_not_hold_are_stored_or_none_of_them() -> None:
    async with limpet.open("memory:") as opened:
        store = ConversationStore(opened)
        messages = [say(str(number) * 900_000) for number in range(8)]
        conversation, late = (Conversation(conversation_id="c", messages=list(messages)) for _ in range(2))
        outcomes = await asyncio.gather(store.save(conversation), store.save(late), return_exceptions=True)

        assert sorted(type(each).__name__ for each in outcomes) == ["ConversationConflict", "list"]
        assert len((await opened.keys("conversations/message/")).keys) == 8


async def test_nothing_is_stored_of_messages_when_one_is_too_large() -> None:
    async with limpet.open("memory:") as opened:
        messages: list[ModelMessage] = [*(say("x" * 900_000) for _ in range(5)), say("x" * 1_000_001)]
        with pytest.raises(limpet.errors.ValueTooLarge):
            await ConversationStore(opened).save(Conversation(conversation_id="c", messages=messages))
        assert (await opened.keys()).keys == []


async def test_an_agent_goes_on_where_it_was() -> None:
    agent = Agent(TestModel())
    async with ConversationStore("memory:") as store:
        await store.save(await agent.run("Hello", conversation=Conversation(conversation_id="c")))
        await store.save(await agent.run("And now?", conversation=await store.load("c")))

        loaded = await store.load("c")
        assert loaded is not None
        assert len(loaded.messages) == 4
        assert loaded.usage.requests == 2


async def test_closing_ends_what_a_url_has_opened_and_leaves_a_given_store_open() -> None:
    async with limpet.open("memory:") as opened:
        async with ConversationStore(opened) as store:
            await store.save(Conversation(conversation_id="c"))
        assert await store.load("c") is not None
    with pytest.raises(limpet.errors.Closed):
        await store.load("c")
    with pytest.raises(TypeError, match=r"limpet\.open"):
        ConversationStore(5)  # type: ignore[arg-type]
