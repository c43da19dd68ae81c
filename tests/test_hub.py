"""The hub wakes the watchers of the keys that change, and no others. Here it is compared with one that wakes all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet import hub, waiters
from limpet.hub import Hub, Watch, event_of, position_prefix
from limpet.keys import Span, key_span, prefix_span
from limpet.model import Event
from limpet.waiters import Point, Waiters, topic_of

ENOUGH_TURNS = 300

# Few and short, so that they often meet. Nothing sorts after U+10FFFF.
keys = st.sampled_from(["a", "b", "aa", "ab", "ba", "aab", "a\U0010ffff", "\U0010ffff"])
spans = st.one_of(
    keys.map(key_span),
    st.one_of(st.just(""), keys).map(prefix_span),
    st.builds(Span, keys, st.none() | keys),
)
writes = st.lists(st.tuples(keys, st.booleans()), min_size=1, max_size=6, unique_by=lambda write: write[0])
watchers = st.integers(0, 7)
joins = st.tuples(st.just("join"), spans, st.just(9))
# Each step, and how many turns the loop gets after it: a watcher may be reading, wait, be due or be woken by then.
steps = st.one_of(
    st.tuples(st.just("write"), writes, st.integers(0, 9)),
    st.tuples(st.just("join"), spans, st.integers(0, 9)),
    st.tuples(st.sampled_from(["leave", "pause", "go on", "resume"]), watchers, st.integers(0, 9)),
)
scripts = st.tuples(st.lists(joins, max_size=6), st.lists(steps, max_size=30))


@pytest.fixture(scope="module", autouse=True)
def small_hub() -> Iterator[None]:
    """Watchers that pause soon fall behind the hub, and a few callers are already several slices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "TAIL_MAX", 4)
        patch.setattr(waiters, "EVENTS_PER_TURN", 3)
        yield


class Reader:
    """A watcher, and what it was given."""

    def __init__(self, followed: Hub, span: Span, start: int) -> None:
        self._hub = followed
        self._span = span
        self._start = start
        self._watch = Watch(followed, span, after=start, initial=False, overflow="resume")
        self._reading: asyncio.Task[None] | None = None
        self.events: list[Event] = []

    async def begin(self) -> None:
        await self._watch.__aenter__()
        self.go_on()

    def go_on(self) -> None:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())

    async def pause(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def resume(self) -> None:
        """Go on in a new watch, from the position of this one."""
        await self.pause()
        position = self._watch.position or (self.events[-1].position if self.events else self._start)
        await self._watch.aclose()
        self._watch = Watch(self._hub, self._span, after=position, initial=False, overflow="resume")
        await self.begin()

    async def leave(self) -> None:
        """End the watch. What it had ready then is lost with it."""
        await self._watch.aclose()
        await self.pause()

    async def wanted(self) -> list[Event]:
        """What a hub that looks at every change for every watcher gives."""
        status = await self._hub.engine.status(self._hub.namespace)
        prefix = position_prefix(status, self._hub.namespace)
        page = await self._hub.engine.changes(self._hub.namespace, self._start, limit=100_000)
        concerned = [change for change in page.changes if change.family == "data" and change.key in self._span]
        return [event_of(change, prefix) for change in concerned]

    async def _read(self) -> None:
        async for event in self._watch:
            self.events.append(event)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def run(script: list[tuple[str, Any, int]]) -> None:
    async with limpet.open("memory:", sweep=False) as store:
        followed, readers, gone = store._session.hub(store.name), [], []
        for verb, what, pause in script:
            if verb == "write":
                draft = store.batch()
                for key, is_put in what:
                    draft = draft.put(key, 1) if is_put else draft.delete(key)
                await draft.commit()
            elif verb == "join":
                status = await followed.engine.status(store.name)
                readers.append(Reader(followed, what, status.revision))
                await readers[-1].begin()
            elif what < len(readers):
                if verb == "leave":
                    gone.append(readers.pop(what))
                    await gone[-1].leave()
                elif verb == "pause":
                    await readers[what].pause()
                elif verb == "go on":
                    readers[what].go_on()
                else:
                    await readers[what].resume()
            await turns(pause)

        for reader in readers:
            reader.go_on()
        await turns(ENOUGH_TURNS if readers else 0)
        assert [reader.events for reader in readers] == [await reader.wanted() for reader in readers]
        for reader in gone:
            assert reader.events == (await reader.wanted())[: len(reader.events)]
        for reader in readers:
            await reader.leave()
        assert followed._watchers == 0
        assert not followed._waiters._groups
        assert not followed._waiters._prefix_lengths


@settings(max_examples=400, deadline=None)
@given(script=scripts)
def test_each_watcher_gets_what_it_would_get_if_all_were_woken(script: tuple[list[Any], list[Any]]) -> None:
    joined, rest = script
    asyncio.run(run([*joined, *rest]))


async def test_a_change_wakes_the_watchers_of_its_key_alone() -> None:
    async with limpet.open("memory:", sweep=False) as store:
        watches = [store.watch(pattern) for pattern in ("a", "a*", "*", "b", "ab", "ab*")]
        waiting = [asyncio.create_task(anext(watch)) for watch in watches]
        await turns(20)
        before = [watch._waiters[0] for watch in watches]

        await store.put("a", 1)
        await turns(20)

        assert [task.done() for task in waiting] == [True, True, True, False, False, False]
        assert [watch._waiters for watch in watches[3:]] == [[waiter] for waiter in before[3:]]
        for task in waiting:
            task.cancel()


async def test_a_watch_that_waits_is_not_behind() -> None:
    """It was not woken by the changes of other keys, and has missed none of its own."""
    async with limpet.open("memory:", sweep=False) as store, store.watch("quiet") as quiet, store.watch("b") as other:
        waiting = asyncio.create_task(anext(quiet))
        for number in range(20):
            await store.put("b", number)
        async for event in other:
            if event.value == 19:
                break

        assert store._session.watch_lags() == {store.name: [0, 0]}
        assert quiet.position == other.position
        waiting.cancel()


async def test_a_position_is_never_behind_an_event_that_was_not_delivered() -> None:
    """The watch is due, and its turn has not come."""
    async with limpet.open("memory:", sweep=False) as store:
        watches = [store.watch("a") for _ in range(10)]
        for watch in watches:
            await watch.__aenter__()
        start = watches[0].position
        waiting = [asyncio.create_task(anext(watch)) for watch in watches]
        await turns(5)

        await store.put("a", 1)
        while not any(task.done() for task in waiting):
            await turns(1)

        late = [watch for watch, task in zip(watches, waiting, strict=True) if not task.done()]
        assert late
        assert {watch.position for watch in late} == {start}
        await asyncio.gather(*waiting)


async def test_two_tasks_may_wait_in_one_watch() -> None:
    async with limpet.open("memory:", sweep=False) as store, store.watch() as watch:
        one, two = asyncio.create_task(anext(watch)), asyncio.create_task(anext(watch))
        await turns(5)

        await store.put("a", 1)
        first = await one
        assert not two.done()
        await store.put("b", 2)

        assert [first.key, (await two).key] == ["a", "b"]


async def test_those_who_wait_are_woken_in_slices() -> None:
    """A turn of the loop wakes as many as have three events together, and at least one."""
    waiting = Waiters()
    many = [waiting.add(topic_of(prefix_span("a"))) for _ in range(5)]
    store = await limpet.open("memory:", sweep=False)
    entries = [await store.put("a", 1), await store.put("ab", 2)]
    page = await store._session.engine.changes(store.name, 0)
    assert [change.entry for change in page.changes] == entries

    waiting.notify(page.changes[:1], Point(0, ""))
    seen = [sum(waiter.future.done() for waiter in many)]
    for _ in range(3):
        await turns(1)
        seen.append(sum(waiter.future.done() for waiter in many))
    assert seen == [3, 5, 5, 5]

    again = [waiting.add(topic_of(prefix_span("a"))) for _ in range(5)]
    waiting.notify(page.changes, Point(0, ""))
    assert {waiter.due_after for waiter in again} == {Point(0, "")}
    assert sum(waiter.future.done() for waiter in again) == 2
    await store.close()
