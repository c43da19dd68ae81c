"""Opening and closing: URLs, namespaces, engines, options, secrets, and what is left afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import limpet
import limpet.sync
from limpet.conformance.conftest import Elapse, OpenStore
from limpet.conformance.support import Blocking, in_thread, next_event, next_events
from limpet.errors import Closed, Conflict, InvalidNamespace, InvalidValue, LockHeld

HIDDEN = "hunter2"


@pytest_asyncio.fixture(loop_scope="module")
async def open_at(face: str) -> AsyncIterator[OpenStore]:
    """A function that opens any URL through this interface, with no option but those it is given."""
    async with contextlib.AsyncExitStack() as opened:

        async def open_at(url: str | None = None, **options: Any) -> Any:
            if face == "sync":
                blocking = await in_thread(lambda: limpet.sync.open(url, **options))
                opened.push_async_callback(in_thread, blocking.close)
                return Blocking(blocking)
            store = await limpet.open(url, **options)
            opened.push_async_callback(store.close)
            return store

        yield open_at


async def drain(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


@pytest.mark.face("async")
async def test_a_lazy_store_opens_by_its_first_use(url: str, clock: limpet.ManualClock) -> None:
    """`limpet.lazy` opens a store by its first use: once for each event loop, once for callers that do not await."""
    state = limpet.lazy(url, clock=clock, namespace=f"t-{uuid.uuid4().hex[:12]}")
    store, same = await state, await state
    blocking = await in_thread(state.blocking)
    try:
        await store.put("k", 1)
        assert same is store
        assert await in_thread(lambda: blocking.get("k")) == 1
        assert await in_thread(state.blocking) is blocking
    finally:
        await state.close()
        await in_thread(state.close_blocking)
    with pytest.raises(Closed):
        await store.get("k")


# By await and by async with -------------------------------------------------------


@pytest.mark.face("async")
async def test_awaiting_open_gives_a_store_until_it_is_closed(url: str, clock: limpet.ManualClock) -> None:
    """`limpet.open` gives the store by `async with` or by `await`."""
    store = await limpet.open(url, clock=clock)
    try:
        assert isinstance(store, limpet.Store)
        assert await store.get("no/such/key") is None
    finally:
        await store.close()


@pytest.mark.face("async")
async def test_async_with_gives_the_store_and_closes_it_at_its_end(url: str, clock: limpet.ManualClock) -> None:
    """`limpet.open` gives the store by `async with` or by `await`."""
    async with limpet.open(url, clock=clock) as store:
        assert isinstance(store, limpet.Store)
        assert await store.get("no/such/key") is None

    with pytest.raises(Closed):
        await store.get("no/such/key")


@pytest.mark.face("async")
async def test_async_with_closes_the_store_when_its_body_fails(url: str, clock: limpet.ManualClock) -> None:
    """`limpet.open` gives the store by `async with` or by `await`.

    The error of the body goes on unchanged, and the store is closed all the same.
    """
    trouble = LookupError("of the body")

    with pytest.raises(LookupError) as raised:
        async with limpet.open(url, clock=clock) as store:
            raise trouble

    assert raised.value is trouble
    with pytest.raises(Closed):
        await store.get("no/such/key")


@pytest.mark.face("async")
async def test_a_store_closed_by_hand_inside_async_with_is_no_trouble(url: str, clock: limpet.ManualClock) -> None:
    """`limpet.open` gives the store by `async with` or by `await`."""
    async with limpet.open(url, clock=clock) as store:
        await store.close()

    with pytest.raises(Closed):
        await store.status()


@pytest.mark.face("async")
async def test_a_refused_opening_never_enters_the_body() -> None:
    """`limpet.open` gives the store by `async with` or by `await`."""
    entered = False

    with pytest.raises(InvalidValue):
        async with limpet.open("zzzz:"):
            entered = True

    assert not entered


@pytest.mark.face("sync")
async def test_with_gives_the_blocking_store_and_closes_it(url: str, clock: limpet.ManualClock) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""

    def use() -> None:
        with limpet.sync.open(url, clock=clock) as store:
            assert store.get("no/such/key") is None
        with pytest.raises(Closed):
            store.get("no/such/key")
        store.close()

    await in_thread(use)


# Without a URL ----------------------------------------------------------------


async def test_without_a_url_the_environment_names_the_place(
    store: limpet.Store, open_at: OpenStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no URL, `LIMPET_URL` is opened, and without that `./limpet.db`."""
    await store.put("theme", "dark")
    monkeypatch.setenv("LIMPET_URL", url)

    same = await open_at(namespace=store.name)

    assert same.traits == store.traits
    assert await same.get("theme") == "dark"


async def test_without_a_url_and_an_environment_a_file_in_the_working_directory_is_opened(
    open_at: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no URL, `LIMPET_URL` is opened, and without that `./limpet.db`."""
    monkeypatch.delenv("LIMPET_URL", raising=False)
    monkeypatch.chdir(tmp_path)

    store = await open_at()
    await store.put("theme", "dark")

    assert "limpet.db" in os.listdir(tmp_path)
    assert await (await open_at(f"sqlite:///{tmp_path}/limpet.db")).get("theme") == "dark"


async def test_an_empty_environment_is_none(
    open_at: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no URL, `LIMPET_URL` is opened, and without that `./limpet.db`."""
    monkeypatch.setenv("LIMPET_URL", "")
    monkeypatch.chdir(tmp_path)

    await open_at()

    assert "limpet.db" in os.listdir(tmp_path)


async def test_the_file_stays_the_same_when_the_working_directory_changes(
    open_at: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no URL, `LIMPET_URL` is opened, and without that `./limpet.db`.

    A daemon that changes its directory after opening must not begin a second file there, on any of its threads.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.delenv("LIMPET_URL", raising=False)
    monkeypatch.chdir(first)
    store = await open_at()
    await store.put("theme", "dark")

    monkeypatch.chdir(second)
    await asyncio.gather(*(store.put(f"after/{number}", number) for number in range(8)))

    assert (await store.keys("after/")).count == 8
    assert await store.get("theme") == "dark"
    assert os.listdir(second) == []


async def test_a_url_goes_before_the_environment(
    store: limpet.Store, open_at: OpenStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no URL, `LIMPET_URL` is opened, and without that `./limpet.db`."""
    await store.put("theme", "dark")
    monkeypatch.setenv("LIMPET_URL", "zzzz:")

    same = await open_at(url, namespace=store.name)

    assert await same.get("theme") == "dark"


# Namespaces -------------------------------------------------------------------


async def test_the_default_namespace_is_default(open_at: OpenStore, url: str) -> None:
    """The default namespace is `default`, and a store knows its name."""
    unnamed, named = await open_at(url), await open_at(url, namespace="default")

    await unnamed.put("conformance/default", 1)

    assert unnamed.name == "default"
    assert await named.take("conformance/default") == 1


async def test_a_store_knows_the_name_it_was_opened_with(open_store: OpenStore) -> None:
    """The default namespace is `default`, and a store knows its name."""
    store = await open_store(namespace="agents-7_b")

    assert store.name == "agents-7_b"
    assert store.namespace("plugins").name == "plugins"
    assert "agents-7_b" in repr(store)


async def test_a_namespace_may_be_a_hundred_characters_of_every_allowed_kind(store: limpet.Store) -> None:
    """A namespace is 1 to 100 characters of `a-z`, `0-9`, `_` and `-`; anything else is InvalidNamespace."""
    name = f"{store.name}_-abcdefghijklmnopqrstuvwxyz0123456789".ljust(100, "z")
    almost = name[:-1] + "y"

    await store.namespace(name).put("k", "long")
    await store.namespace(almost).put("k", "other")

    assert len(name) == 100
    assert await store.namespace(name).get("k") == "long"
    assert await store.namespace(almost).get("k") == "other"


async def test_a_namespace_may_be_one_character(store: limpet.Store) -> None:
    """A namespace is 1 to 100 characters of `a-z`, `0-9`, `_` and `-`; anything else is InvalidNamespace."""
    for name in ("a", "z", "0", "9", "_", "-"):
        single = store.namespace(name)
        assert single.name == name
        await single.put("conformance/single", name)

    for name in ("a", "z", "0", "9", "_", "-"):
        assert await store.namespace(name).take("conformance/single") == name


BAD_NAMESPACES: list[Any] = [
    "",
    "a" * 101,
    "A",
    "aB",
    "a b",
    " a",
    "a.b",
    "a/b",
    "a:b",
    "a*",
    "a\n",
    "\na",
    "a\0",
    "\u00e9",
    "\u0131",  # Matches i when case is ignored.
    "\u017f",  # Matches s when case is ignored.
    "\u0663",  # A digit of another script.
    "\uff41",  # A full-width a.
    None,
    5,
    b"a",
    ("a",),
]


async def test_any_other_namespace_is_refused_on_opening(open_at: OpenStore, url: str) -> None:
    """A namespace is 1 to 100 characters of `a-z`, `0-9`, `_` and `-`; anything else is InvalidNamespace."""
    for name in BAD_NAMESPACES:
        with pytest.raises(InvalidNamespace):
            await open_at(url, namespace=name)


async def test_any_other_namespace_is_refused_from_a_store(store: limpet.Store) -> None:
    """A namespace is 1 to 100 characters of `a-z`, `0-9`, `_` and `-`; anything else is InvalidNamespace."""
    for name in BAD_NAMESPACES:
        with pytest.raises(InvalidNamespace):
            store.namespace(name)


async def test_a_refused_namespace_comes_with_the_rule(store: limpet.Store) -> None:
    """A namespace is 1 to 100 characters of `a-z`, `0-9`, `_` and `-`; anything else is InvalidNamespace."""
    with pytest.raises(InvalidNamespace, match=r"'Team A'.*1 to 100.*a-z") as raised:
        store.namespace("Team A")

    assert raised.value.code == "invalid_namespace"


async def test_a_namespace_is_another_keyspace_of_the_same_engine(store: limpet.Store, open_store: OpenStore) -> None:
    """`store.namespace(name)` is another keyspace of the same engine."""
    name = f"{store.name}-b"

    await store.namespace(name).put("k", "of b")

    assert await (await open_store(namespace=name)).get("k") == "of b"
    assert await store.namespace(name).get("k") == "of b"
    assert await store.get("k") is None
    assert store.namespace(name).traits == store.traits


async def test_a_namespace_of_a_namespace_is_not_nested(store: limpet.Store) -> None:
    """`store.namespace(name)` is another keyspace of the same engine."""
    middle = store.namespace(f"{store.name}-b")

    await middle.namespace(f"{store.name}-c").put("k", "of c")

    assert await store.namespace(f"{store.name}-c").get("k") == "of c"
    assert await middle.namespace(store.name).get("k") is None
    assert await middle.get("k") is None


async def test_no_read_crosses_a_namespace(store: limpet.Store) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock."""
    other = store.namespace(f"{store.name}-b")
    await store.put("k", "here")

    assert await other.get("k", "nothing") == "nothing"
    assert await other.entry("k") is None
    assert (await other.status()).keys == 0


async def test_no_scan_crosses_a_namespace(store: limpet.Store) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock."""
    other = store.namespace(f"{store.name}-b")
    await store.put("a", "here")
    await store.put("c", "here")
    await other.put("b", "there")

    assert [entry.key for entry in await drain(other.scan())] == ["b"]
    assert (await other.keys()).keys == ["b"]
    assert [entry.key for entry in await drain(store.scan())] == ["a", "c"]
    assert (await store.keys()).keys == ["a", "c"]


async def test_no_write_crosses_a_namespace(store: limpet.Store) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock."""
    other = store.namespace(f"{store.name}-b")
    before = await store.put("k", 1)

    await other.put("k", 2)
    await other.add("k")
    await other.touch("k", 5)
    assert await other.take("k") == 3
    assert await other.delete("k") is False

    assert await store.entry("k") == before


async def test_no_batch_crosses_a_namespace(store: limpet.Store) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock.

    Its guards and its writes use its own namespace alone.
    """
    other = store.namespace(f"{store.name}-b")
    before = await store.put("k", "here")

    await other.batch().expect("k", limpet.ABSENT).put("k", "there").put("l", "there").commit()
    with pytest.raises(Conflict):
        await other.batch().expect("k", limpet.equals("here")).delete("l").commit()

    assert await store.entry("k") == before
    assert await store.entry("l") is None


async def test_no_watch_crosses_a_namespace(store: limpet.Store) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock."""
    other = store.namespace(f"{store.name}-b")
    async with other.watch() as watch:
        await store.put("here", 1)
        await store.delete("here")
        await other.put("there", 2)

        assert (await next_event(watch)).key == "there"


async def test_no_initial_watch_crosses_a_namespace(store: limpet.Store) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock."""
    other = store.namespace(f"{store.name}-b")
    await store.put("here", 1)
    await other.put("there", 2)

    async with other.watch(initial=True) as watch:
        assert [event.key for event in await next_events(watch, 2)] == ["there", ""]


async def test_no_history_crosses_a_namespace(store: limpet.Store) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock."""
    other = store.namespace(f"{store.name}-b")
    await store.put("k", "here")
    await other.put("k", "there")
    await store.put("only/here", 1)

    assert [event.value for event in await drain(other.history("k"))] == ["there"]
    assert await drain(other.history("only/here")) == []


async def test_no_receipt_crosses_a_namespace(store: limpet.Store) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock."""
    other = store.namespace(f"{store.name}-b")
    await store.add("hits", 5, request_id="r-1")

    assert await other.outcome("r-1") is None
    assert await other.add("hits", 7, request_id="r-1") == 7
    assert await store.add("hits", 5, request_id="r-1") == 5


async def test_no_lock_crosses_a_namespace(store: limpet.Store) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock."""
    other = store.namespace(f"{store.name}-b")
    async with store.lock("leader", ttl=30):
        assert await other.locks() == []
        async with other.lock("leader", ttl=30):
            assert [lock.name for lock in await other.locks()] == ["leader"]
            with pytest.raises(LockHeld):
                await store.lock("leader", ttl=30).acquire()


async def test_no_expiry_crosses_a_namespace(store: limpet.Store, elapse: Elapse) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock."""
    other = store.namespace(f"{store.name}-b")
    await store.put("k", "short", ttl=0.1)
    lasting = await other.put("k", "long")

    await elapse(0.2)
    await store.sweep()
    await other.sweep()

    assert await store.get("k") is None
    assert await other.entry("k") == lasting


async def test_namespaces_that_look_alike_are_apart(store: limpet.Store) -> None:
    """Nothing crosses a namespace: no read, scan, batch, watch, history, receipt or lock.

    An engine that joins names to one string, or matches them by a pattern, would mix these up.
    """
    names = [f"{store.name}{tail}" for tail in ("", "-", "_", "x", "-x", "_x", "xx", "-x-x")]
    for name in names:
        await store.namespace(name).put("k", name)
        await store.namespace(name).put("x-k", name)

    for name in names:
        found = await drain(store.namespace(name).scan())
        assert [(entry.key, entry.value) for entry in found] == [("k", name), ("x-k", name)]


# Engines and options ----------------------------------------------------------


@pytest.mark.refused_early
@pytest.mark.parametrize(
    ("scheme", "nearest"), [("sqlit", "sqlite"), ("sqlite3", "sqlite"), ("memry", "memory"), ("memmory", "memory")]
)
async def test_an_unknown_engine_is_answered_with_the_nearest(open_at: OpenStore, scheme: str, nearest: str) -> None:
    """An unknown engine is refused by a message that names the known ones and the nearest."""
    with pytest.raises(InvalidValue) as raised:
        await open_at(f"{scheme}:///state.db")

    text = str(raised.value)
    assert repr(scheme) in text
    assert f"did you mean {nearest!r}" in text
    assert "memory" in text
    assert "sqlite" in text


async def test_an_engine_like_no_other_is_answered_with_the_known_ones(open_at: OpenStore) -> None:
    """An unknown engine is refused by a message that names the known ones and the nearest."""
    with pytest.raises(InvalidValue) as raised:
        await open_at("zzzz:somewhere")

    text = str(raised.value)
    assert "'zzzz'" in text
    assert "memory" in text
    assert "sqlite" in text


async def test_an_unknown_engine_in_the_environment_is_refused_as_well(
    open_at: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown engine is refused by a message that names the known ones and the nearest."""
    monkeypatch.setenv("LIMPET_URL", "sqlit:///state.db")

    with pytest.raises(InvalidValue, match="did you mean 'sqlite'"):
        await open_at()


@pytest.mark.refused_early
@pytest.mark.parametrize("option", ["no_such_option=1", "no_such_option=", "no_such_option"])
async def test_an_unknown_option_is_refused(open_at: OpenStore, url: str, option: str) -> None:
    """An unknown option in the URL is refused, not ignored."""
    joint = "&" if "?" in url else "?"

    with pytest.raises(InvalidValue, match="no_such_option"):
        await open_at(f"{url}{joint}{option}")


async def test_a_refused_option_opens_nothing(open_at: OpenStore, tmp_path: Path) -> None:
    """An unknown option in the URL is refused, not ignored."""
    with pytest.raises(InvalidValue, match="syncronous"):
        await open_at(f"sqlite:///{tmp_path}/fresh.db?syncronous=normal")

    assert "fresh.db" not in os.listdir(tmp_path)


# Secrets ----------------------------------------------------------------------


async def refusal_text(opening: Awaitable[Any]) -> str:
    """All texts of a refused opening: its message, its repr, its traceback and those of its causes."""
    with pytest.raises(InvalidValue) as raised:
        await opening
    error = raised.value
    lines = traceback.format_exception_only(error)
    seen: BaseException | None = error
    while seen is not None:
        lines += [str(seen), repr(seen), repr(seen.args)]
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\n".join(lines)


async def test_the_password_of_an_unknown_engine_is_not_shown(open_at: OpenStore) -> None:
    """A password in a URL never appears in an error or a repr."""
    text = await refusal_text(open_at(f"postgresq1://alice:{HIDDEN}@db.example/state"))

    assert "postgresq1" in text
    assert HIDDEN not in text


async def test_the_password_before_an_unknown_option_is_not_shown(open_at: OpenStore) -> None:
    """A password in a URL never appears in an error or a repr."""
    text = await refusal_text(open_at(f"sqlite://alice:{HIDDEN}@db.example/state.db?no_such_option=1"))

    assert "no_such_option" in text
    assert HIDDEN not in text


async def test_a_password_given_as_an_option_is_not_shown(open_at: OpenStore, tmp_path: Path) -> None:
    """A password in a URL never appears in an error or a repr.

    Many drivers take it behind the question mark, so people write it there.
    """
    text = await refusal_text(open_at(f"sqlite:///{tmp_path}/state.db?password={HIDDEN}"))

    assert "password" in text
    assert HIDDEN not in text


async def test_a_password_beside_a_misspelt_option_is_not_shown(open_at: OpenStore, tmp_path: Path) -> None:
    """A password in a URL never appears in an error or a repr."""
    text = await refusal_text(open_at(f"sqlite:///{tmp_path}/state.db?synchronous=sometimes&sslpassword={HIDDEN}"))

    assert HIDDEN not in text


@pytest.mark.refused_early
@pytest.mark.parametrize("sign", ["/", "#", "@", ":", "%40", "[", " "])
async def test_a_password_of_awkward_characters_is_not_shown(open_at: OpenStore, sign: str) -> None:
    """A password in a URL never appears in an error or a repr.

    A generated password has characters that must be escaped in a URL. A user that forgets it gets this error.
    """
    text = await refusal_text(
        open_at(f"sqlite://alice:left-{HIDDEN}{sign}right-{HIDDEN}@db.example/state.db?no_such_option=1")
    )

    assert HIDDEN not in text


async def test_the_password_of_a_url_without_an_engine_is_not_shown(open_at: OpenStore) -> None:
    """A password in a URL never appears in an error or a repr.

    A variable that was not set leaves the beginning of the URL empty.
    """
    text = await refusal_text(open_at(f"://alice:{HIDDEN}@db.example/state"))

    assert HIDDEN not in text


@pytest.mark.face("async")
async def test_an_opening_does_not_show_the_password() -> None:
    """A password in a URL never appears in an error or a repr."""
    opening = limpet.open(f"postgresql://alice:{HIDDEN}@db.example/state")

    assert HIDDEN not in repr(opening)
    assert HIDDEN not in str(opening)


async def test_nothing_of_a_store_shows_the_password(open_at: OpenStore) -> None:
    """A password in a URL never appears in an error or a repr."""
    store = await open_at(f"memory://alice:{HIDDEN}@db.example/{uuid.uuid4().hex}")
    things = [store, store.traits, store.namespace("b"), store.record("k"), store.lock("k", ttl=5), store.batch()]
    things += [await store.put("k", 1), await store.status()]

    await store.close()

    with pytest.raises(Closed) as closed:
        await store.get("k")
    assert HIDDEN not in "".join(map(repr, [*things, closed.value]))


# Traits -----------------------------------------------------------------------


async def test_traits_say_what_the_engine_is(store: limpet.Store) -> None:
    """`traits` describes the engine: its name, its durability, whose clock it uses."""
    traits = store.traits

    assert traits.engine
    assert traits.engine in repr(store)
    assert traits.durability in ("none", "seconds", "process", "disk", "quorum")
    assert traits.clock in ("host", "server")


async def test_traits_cannot_be_changed(store: limpet.Store) -> None:
    """`traits` describes the engine: its name, its durability, whose clock it uses."""
    loose: Any = store.traits

    with pytest.raises(AttributeError):
        loose.durability = "quorum"

    assert store.traits == loose


# Two stores on one database ---------------------------------------------------


async def test_two_stores_see_each_others_writes(store: limpet.Store, open_store: OpenStore) -> None:
    """Two stores opened on the same storage see each other's writes."""
    other = await open_store()

    for number in range(20):
        writer, reader = (store, other) if number % 2 else (other, store)
        written = await writer.put("turn", number)
        assert await reader.entry("turn") == written


async def test_two_stores_see_each_others_deletes(store: limpet.Store, open_store: OpenStore) -> None:
    """Two stores opened on the same storage see each other's writes."""
    other = await open_store()
    await store.put("k", 1)
    assert await other.get("k") == 1

    await store.delete("k")

    assert await other.entry("k") is None
    assert (await other.keys()).keys == []
    assert await other.delete("k") is False


async def test_two_stores_guard_against_each_other(store: limpet.Store, open_store: OpenStore) -> None:
    """Two stores opened on the same storage see each other's writes."""
    other = await open_store()
    stale = await store.put("k", 1)
    current = await other.put("k", 2)

    with pytest.raises(Conflict) as raised:
        await store.put("k", 3, expect=stale)

    assert raised.value.current == current
    assert (await store.put("k", 4, expect=current)).version == 3


async def test_two_stores_share_one_order_of_revisions(store: limpet.Store, open_store: OpenStore) -> None:
    """Two stores opened on the same storage see each other's writes."""
    other = await open_store()

    revisions = [(await writer.put(f"k/{writer is other}", 1)).revision for writer in (store, other) * 5]

    assert revisions == sorted(set(revisions))
    assert (await store.status()).revision == (await other.status()).revision == revisions[-1]


# Closing ----------------------------------------------------------------------

Verb = Callable[[Any], Awaitable[object]]

VERBS: dict[str, Verb] = {
    "get": lambda store: store.get("k"),
    "entry": lambda store: store.entry("k"),
    "keys": lambda store: store.keys(),
    "scan": lambda store: drain(store.scan()),
    "entries": lambda store: store.entries(["k"]),
    "get_many": lambda store: store.get_many(["k"]),
    "children": lambda store: store.children(),
    "namespaces": lambda store: store.namespaces(),
    "remaining": lambda store: store.remaining("k"),
    "typed": lambda store: store.typed(limpet.LockInfo).get("k"),
    "put": lambda store: store.put("k", 1),
    "create": lambda store: store.create("k", 1),
    "update": lambda store: store.update("k", lambda value: 1),
    "edit": lambda store: store.edit("k").__aenter__(),
    "add": lambda store: store.add("n"),
    "minimum": lambda store: store.minimum("n", 1),
    "maximum": lambda store: store.maximum("n", 1),
    "delete": lambda store: store.delete("k"),
    "append": lambda store: store.append("k", 1),
    "delete_prefix": lambda store: store.delete_prefix("k"),
    "take": lambda store: store.take("k"),
    "touch": lambda store: store.touch("k", 5),
    "persist": lambda store: store.persist("k"),
    "batch": lambda store: store.batch().put("k", 1).commit(),
    "a batch of guards": lambda store: store.batch().expect("k", limpet.ABSENT).commit(),
    "outcome": lambda store: store.outcome("r-1"),
    "record.entry": lambda store: store.record("r").entry(),
    "record.fields": lambda store: store.record("r").fields(),
    "record.get": lambda store: store.record("r").get("f"),
    "record.put": lambda store: store.record("r").put({"f": 1}),
    "record.set": lambda store: store.record("r").set(f=1),
    "record.swap": lambda store: store.record("r").swap("f", 1, 2),
    "record.touch": lambda store: store.record("r").touch(5),
    "record.delete": lambda store: store.record("r").delete(),
    "lock": lambda store: store.lock("l", ttl=5).acquire(),
    "lock with wait": lambda store: store.lock("l", ttl=5, wait=1).acquire(),
    "election": lambda store: store.election("l", ttl=5).campaign(),
    "election.leader": lambda store: store.election("l", ttl=5).leader(),
    "election.observe": lambda store: anext(store.election("l", ttl=5).observe()),
    "locks": lambda store: store.locks(),
    "watch": lambda store: anext(store.watch()),
    "history": lambda store: drain(store.history("k")),
    "status": lambda store: store.status(),
    "sweep": lambda store: store.sweep(),
    "reseal": lambda store: store.reseal(),
    "seals": lambda store: store.seals(),
    "trim": lambda store: store.trim(),
    "index": lambda store: store.index("n"),
    "unindex": lambda store: store.unindex("n"),
    "indexes": lambda store: store.indexes(),
    "namespace": lambda store: store.namespace("b").get("k"),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_closed_store_raises_closed(store: limpet.Store, verb: str) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""
    await store.put("k", 1)
    await store.close()

    with pytest.raises(Closed):
        await VERBS[verb](store)


@pytest.mark.face("async")
async def test_the_table_of_verbs_is_complete() -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""
    aside = {"close", "name", "traits", "record", "batch", "lock"}
    verbs = {name for name in dir(limpet.Store) if not name.startswith("_")} - aside
    tabled = {verb.partition(" ")[0] for verb in VERBS}

    assert verbs <= tabled
    assert {f"record.{name}" for name in dir(limpet.Record) if not name.startswith("_")} - tabled == set()


async def test_handles_made_before_the_close_raise_closed(store: limpet.Store) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""
    record, draft, other = store.record("r"), store.batch().put("k", 1), store.namespace("b")
    lock = store.lock("l", ttl=30)
    await lock.acquire()
    await store.close()

    for use in (record.fields, draft.commit, other.status, lock.refresh, lock.release):
        with pytest.raises(Closed):
            await use()


async def test_a_scan_under_way_raises_closed_at_its_next_page(store: limpet.Store) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed.

    The scan must not seem to be complete.
    """
    for start in range(0, 1200, 120):
        batch = store.batch()
        for number in range(start, start + 120):
            batch = batch.put(f"k/{number:04}", number)
        await batch.commit()
    scan = store.scan()
    await anext(scan)

    await store.close()

    with pytest.raises(Closed):
        await drain(scan)


async def test_a_closed_store_has_written_nothing(store: limpet.Store, open_store: OpenStore) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""
    other = await open_store()
    before = await other.put("k", 1)
    await store.close()

    for verb in ("put", "add", "delete", "take", "touch", "batch", "update", "record.put"):
        with pytest.raises(Closed):
            await VERBS[verb](store)

    assert await other.entry("k") == before
    assert (await other.status()).revision == before.revision


async def test_closing_twice_is_allowed(store: limpet.Store) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""
    await store.close()
    await store.close()

    with pytest.raises(Closed):
        await store.get("k")


async def test_closing_twice_at_once_is_allowed(store: limpet.Store) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""
    await store.put("k", 1)

    await asyncio.gather(store.close(), store.close(), store.close())

    with pytest.raises(Closed):
        await store.get("k")


async def test_a_store_and_its_namespaces_close_together(store: limpet.Store) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""
    other = store.namespace(f"{store.name}-b")
    await other.put("k", 1)

    await store.close()

    with pytest.raises(Closed):
        await other.get("k")
    await other.close()


async def test_closing_one_store_leaves_the_others_of_its_place(store: limpet.Store, open_store: OpenStore) -> None:
    """Two stores opened on the same storage see each other's writes.

    Closing concerns one store: other stores on the same database go on.
    """
    other = await open_store()
    await store.put("k", 1)
    await store.close()

    assert await other.get("k") == 1
    assert (await other.put("k", 2)).version == 2
    assert [entry.key for entry in await drain(other.scan())] == ["k"]


async def test_closed_is_an_error_that_trying_again_does_not_help(store: limpet.Store) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""
    await store.close()

    with pytest.raises(Closed, match="closed") as raised:
        await store.get("k")

    assert (raised.value.code, raised.value.retryable) == ("closed", False)


async def test_a_closed_store_can_still_be_shown(store: limpet.Store) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""
    shown, traits = repr(store), store.traits

    await store.close()

    assert (repr(store), store.traits) == (shown, traits)


@pytest.mark.face("sync")
async def test_a_closed_blocking_store_starts_no_thread(url: str) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed.

    A thread that a closed store starts would never be ended.
    """

    def use() -> list[str]:
        store = limpet.sync.open(url)
        lock = store.lock("l", ttl=30)
        store.close()
        before = threading.enumerate()
        for call in (lambda: store.get("k"), lambda: store.put("k", 1), lambda: list(store.scan()), lock.acquire):
            with pytest.raises(Closed):
                call()
        store.close()
        return [thread.name for thread in threading.enumerate() if thread not in before]

    assert await in_thread(use) == []


@pytest.mark.face("sync")
async def test_the_dict_of_a_closed_store_raises_closed(url: str) -> None:
    """A closed store raises Closed from every verb, and closing twice is allowed."""

    def use() -> None:
        store = limpet.sync.open(url)
        mapping = store.mapping("m/")
        store.close()
        for call in (
            lambda: mapping["k"],
            lambda: mapping.update(k=1),
            lambda: mapping.pop("k", None),
            lambda: mapping.setdefault("k", 1),
            lambda: "k" in mapping,
            lambda: len(mapping),
        ):
            with pytest.raises(Closed):
                call()

    await in_thread(use)


# Opening again ----------------------------------------------------------------


async def test_what_was_acknowledged_is_there_after_reopening(store: limpet.Store, open_store: OpenStore) -> None:
    """An acknowledged write is there when durable storage is opened again."""
    written = await store.put("k", {"deep": [1, 2.0, None, "\u00e9"]}, ttl=3600, meta={"by": "trivia"})
    await store.put("k/bytes", b"\x00\xff")
    await store.record("k/record").put({"a": 1, "b": b"raw"})
    durable = store.traits.durability != "none"
    await store.close()

    again = await open_store()

    found = await again.entry("k")
    assert found == written or (found is None and not durable)
    if durable:
        assert await again.get("k/bytes") == b"\x00\xff"
        assert await again.record("k/record").fields() == {"a": 1, "b": b"raw"}


async def test_what_was_deleted_stays_deleted_after_reopening(store: limpet.Store, open_store: OpenStore) -> None:
    """An acknowledged write is there when durable storage is opened again."""
    await store.put("gone", 1)
    await store.put("taken", 2)
    assert await store.delete("gone") is True
    assert await store.take("taken") == 2
    await store.close()

    again = await open_store()

    assert (await again.keys()).keys == []


async def test_revisions_go_on_after_reopening(store: limpet.Store, open_store: OpenStore) -> None:
    """An acknowledged write is there when durable storage is opened again."""
    await store.put("k", 1)
    await store.put("gone", 1)
    await store.delete("gone")
    last = (await store.status()).revision
    durable = store.traits.durability != "none"
    await store.close()

    again = await open_store()
    found = (await again.status()).revision
    next_one = await again.put("l", 1)

    assert found == last or (found == 0 and not durable)
    assert next_one.revision > found


async def test_the_last_writes_before_a_close_are_there_after_reopening(
    store: limpet.Store, open_store: OpenStore
) -> None:
    """An acknowledged write is there when durable storage is opened again.

    The store is closed right after many replies, while an engine may still have deferred work.
    """
    await asyncio.gather(*(store.put(f"k/{number:03}", number) for number in range(200)))
    durable = store.traits.durability != "none"
    await store.close()

    again = await open_store()

    found = [entry.value for entry in await drain(again.scan("k/"))]
    assert found == list(range(200)) or (found == [] and not durable)


KILLED = """
import os, sys
import limpet.sync

store = limpet.sync.open(sys.argv[1], namespace=sys.argv[2])
store.put("k", "acknowledged")
store.batch().put("a", 1).put("b", 2).commit()
store.delete("old")
os._exit(7)
"""


@pytest.mark.face("sync")
async def test_what_was_acknowledged_survives_a_process_that_never_closed(store: limpet.Store, url: str) -> None:
    """An acknowledged write is there when durable storage is opened again."""
    await store.put("old", 1)

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, url, store.name)
    assert await process.wait() == 7

    found = {entry.key: entry.value for entry in await drain(store.scan())}
    assert found == ({"a": 1, "b": 2, "k": "acknowledged"} if store.traits.durability != "none" else {"old": 1})
