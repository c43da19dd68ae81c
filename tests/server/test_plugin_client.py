"""The plugin's side: the verbs, the errors that come back, and what happens when no answer comes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import nats.errors
import pytest

import limpet
from limpet import errors
from limpet.conformance.oddities import ODD, calls, format_argument
from limpet.plugin.client import PluginKV, error_of
from limpet.server.nats_errors import reply_of
from tests.server.subjects_support import PATIENCE_S, Plugins, connected, eventually

pytest_plugins = ["tests.server.subjects_fixtures"]


def client_of(connection: Any, plugin: str = "trivia", **options: Any) -> PluginKV:
    patient = {"timeout": PATIENCE_S, "list_timeout": PATIENCE_S}
    return limpet.PluginClient(connection, plugin, **(patient | options)).kv


@pytest.fixture
async def kv(sqlite_nats: Plugins) -> PluginKV:
    return client_of(sqlite_nats.client)


# The verbs --------------------------------------------------------------------


async def test_a_value_is_set_read_listed_and_deleted(nats: Plugins) -> None:
    kv = client_of(nats.client)
    await kv.set("score", {"alice": [1, 2.0, None]})

    assert await kv.get("score") == {"alice": [1, 2.0, None]}
    assert await kv.list("sc") == ["score"]
    assert await kv.delete("score")
    assert not await kv.delete("score")
    assert await kv.get("score") is None
    assert await kv.get("score", 7) == 7


async def test_a_ttl_is_passed_on(sqlite_nats: Plugins, kv: PluginKV) -> None:
    await kv.set("session", 1, ttl=60)
    await kv.set("other", 1, ttl=10)
    assert await kv.touch("other", None)
    assert not await kv.touch("none", 5)
    sqlite_nats.turn(15)
    assert [await kv.remaining(key) for key in ("session", "other", "none")] == [45, None, 0]
    sqlite_nats.turn(46)

    assert await kv.get("session") is None
    assert await kv.get("other") == 1


async def test_all_keys_come_page_by_page(kv: PluginKV) -> None:
    await kv.batch([{"op": "put", "key": f"k{number:02}", "value": number} for number in range(25)])

    assert [key async for key in kv.keys("k", page=10)] == [f"k{number:02}" for number in range(25)]
    assert len(await kv.list("k", 5)) == 5


async def test_an_entry_has_what_cas_needs(kv: PluginKV) -> None:
    made = await kv.cas("theme", "dark", absent=True)
    entry = await kv.entry("theme")
    assert entry is not None
    assert (entry.value, entry.version, entry.revision) == ("dark", *made)
    changed = await kv.cas("theme", "light", revision=entry.revision)
    assert changed.version == 2
    assert await kv.entry("none") is None

    with pytest.raises(errors.Conflict) as refused:
        await kv.cas("theme", "blue", version=1)
    assert refused.value.actual_version == 2
    assert refused.value.actual_revision == changed.revision
    assert refused.value.key == "theme"


async def test_counters_and_taking(kv: PluginKV) -> None:
    assert [await kv.incr("n"), await kv.incr("n", 5), await kv.incr("n", -10)] == [1, 6, -4]
    assert await kv.take("n") == -4
    assert await kv.take("n", "nothing") == "nothing"


async def test_fields_of_a_record(kv: PluginKV) -> None:
    assert await kv.get_fields("job") is None
    await kv.set_fields("job", {"state": "new", "blob": b"\xff", "odd": {"$bytes": "no"}})
    await kv.set_fields("job", {"state": "done"}, unset=["odd"])

    assert await kv.get_fields("job") == {"state": "done", "blob": b"\xff"}
    assert await kv.get_fields("job", "state") == {"state": "done"}
    assert await kv.swap_field("job", "state", "done", "old")
    assert not await kv.swap_field("job", "state", "done", "old")
    with pytest.raises(errors.NotFound):
        await kv.set_fields("none", {"a": 1}, if_exists=True)


async def test_a_field_that_looks_like_bytes_stays_what_it_is(kv: PluginKV) -> None:
    await kv.set_fields("job", {"odd": {"$bytes": "no"}})

    assert await kv.get_fields("job") == {"odd": {"$bytes": "no"}}


async def test_a_batch_with_a_guard(kv: PluginKV) -> None:
    await kv.set("a", 1)
    answer = await kv.batch(
        [{"op": "put", "key": "b", "value": {"x": 1}}, {"op": "take", "key": "a"}],
        guards=[{"key": "a", "expect": {"value": 1}}],
    )
    assert answer["taken"] == [None, 1]

    with pytest.raises(errors.Conflict):
        await kv.batch([{"op": "delete", "key": "b"}], guards=[{"key": "a", "expect": {"absent": False}}])


@pytest.mark.parametrize("value", [float("nan"), {1: 2}, {1}, b"bytes", object(), [b"x"], 2**63])
async def test_what_is_not_json_is_refused_before_it_is_sent(value: Any) -> None:
    """The encoder would turn NaN into null, a set into a list and bytes into base64."""
    with pytest.raises(errors.InvalidValue):
        await client_of(None).set("k", value)


async def test_a_lock_is_held_and_fences(sqlite_nats: Plugins, kv: PluginKV) -> None:
    other = client_of(sqlite_nats.client)
    async with kv.lock("nightly", 30) as lock:
        await kv.set("report", 1, fence=lock)
        fence = lock.fence
        with pytest.raises(errors.LockHeld) as held:
            async with other.lock("nightly", 30):
                pass
        assert (held.value.token, lock.token) == (lock.token, fence.token)

    with pytest.raises(errors.LockLost):
        await kv.set("report", 2, fence=fence)
    async with other.lock("nightly", 30, wait=10) as later:
        assert later.token is not None
        assert later.token > fence.token


async def test_who_waits_gets_the_lock_when_it_is_free(sqlite_nats: Plugins, kv: PluginKV) -> None:
    other = client_of(sqlite_nats.client)
    async with kv.lock("n", 60):
        waiting = asyncio.ensure_future(other.lock("n", 60, wait=25).acquire())
        await eventually(lambda: sqlite_nats.served._waiting_for_locks == 1)

    assert (await waiting).token


async def test_a_lock_that_is_lost_ends_its_body(sqlite_nats: Plugins, kv: PluginKV) -> None:
    lock = kv.lock("n", 1)

    async def work() -> None:
        async with lock:
            await sqlite_nats.ask("unlock", "trivia", name="n", token=lock.token)
            await asyncio.sleep(PATIENCE_S)

    with pytest.raises(errors.LockLost):
        await work()
    assert lock.lost


async def test_a_refresh_whose_answer_is_lost_is_sent_again(
    sqlite_nats: Plugins, kv: PluginKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as the loss of the lock at once."""
    async with kv.lock("n", 2) as lock:
        sent: list[str] = []
        read = lock._connection.read

        async def lose_one(name: str, members: Any, **options: Any) -> Any:
            sent.append(name)
            if len(sent) == 1:
                raise errors.Ambiguous("the answer is lost", request_id="1", since=0)
            return await read(name, members, **options)

        monkeypatch.setattr(lock._connection, "read", lose_one)
        await eventually(lambda: len(sent) >= 3)
        (held,) = (await sqlite_nats.ask("locks", "trivia"))["locks"]

    assert (held["token"], lock.lost) == (lock.token, False)


async def test_a_body_ends_though_its_renewal_missed_a_cancellation(
    sqlite_nats: Plugins, kv: PluginKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that has its answer at the moment of the cancellation goes on with it, and the body never ended."""
    renewing = asyncio.Event()

    async def work() -> None:
        async with lock:
            read = lock._connection.read

            async def miss_it(name: str, members: Any, **options: Any) -> Any:
                if name == "refresh":
                    renewing.set()
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()
                return await read(name, members, **options)

            monkeypatch.setattr(lock._connection, "read", miss_it)
            await renewing.wait()

    lock = kv.lock("n", 3)
    await asyncio.wait_for(work(), PATIENCE_S)

    assert (await sqlite_nats.ask("locks", "trivia"))["locks"] == []


async def test_an_unforeseen_failure_loses_the_lock_and_is_in_the_log(
    kv: PluginKV, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = kv.lock("n", 1)

    async def break_down(name: str, members: Any, **options: Any) -> Any:
        raise RuntimeError("s3cret")

    async def work() -> None:
        async with lock:
            monkeypatch.setattr(lock._connection, "read", break_down)
            await asyncio.sleep(PATIENCE_S)

    with pytest.raises(errors.LockLost):
        await work()

    (line,) = [record.getMessage() for record in caplog.records if record.name == "limpet.plugin.client"]
    assert line == f"lock 'n' (token {lock.token}) is lost, because it could not be renewed: RuntimeError"


@pytest.mark.parametrize("error", [errors.PermissionDenied(), RuntimeError("unforeseen")])
async def test_an_error_of_the_body_is_not_hidden_by_a_release_that_fails(
    kv: PluginKV, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def break_down(name: str, members: Any, **options: Any) -> Any:
        raise error

    async def work() -> None:
        async with lock:
            monkeypatch.setattr(lock._connection, "read", break_down)
            raise ZeroDivisionError

    lock = kv.lock("n", 30)
    with pytest.raises(ZeroDivisionError):
        await work()

    assert lock.token is not None
    with pytest.raises(errors.LockNotHeld):
        _ = lock.fence


async def test_a_lock_whose_answer_was_lost_is_recognized(sqlite_nats: Plugins) -> None:
    kv = client_of(Unlucky(sqlite_nats.client, lost=1))

    lock = await kv.lock("n", 60).acquire()

    (held,) = (await sqlite_nats.ask("locks", "trivia"))["locks"]
    assert held["token"] == lock.token
    await lock.release()
    with pytest.raises(errors.LockNotHeld):
        await lock.release()


async def test_a_watch_is_an_iterator_of_events(sqlite_nats: Plugins, kv: PluginKV) -> None:
    await kv.set("config/a", 1)
    async with aclosing(_typed(kv.watch("config/*", initial=True))) as watching:
        first, synced = await anext(watching), await anext(watching)
        await kv.set("other", 0)
        await kv.set("config/b", {"x": 1}, ttl=60)
        await kv.delete("config/a")
        put, delete = await anext(watching), await anext(watching)

    assert (first.op, first.value, synced.op) == ("put", 1, "synced")
    assert (put.op, put.key, put.value, put.version) == ("put", "config/b", {"x": 1}, 1)
    assert put.expires_at is not None
    assert (delete.op, delete.key, delete.value) == ("delete", "config/a", None)
    await eventually(lambda: sqlite_nats.served.watches == 0)
    async with aclosing(_typed(kv.watch("config/*", after=put.position))) as again:
        assert (await anext(again)).key == "config/a"


def _typed(watching: Any) -> Any:
    return watching


async def test_a_watch_from_nowhere_is_compacted(kv: PluginKV) -> None:
    with pytest.raises(errors.Compacted):
        await anext(_typed(kv.watch(after="elsewhere:trivia:1:5")))


# The errors -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda kv: kv.get(""), errors.InvalidKey),
        (lambda kv: kv.get("k" * 256), errors.InvalidKey),
        (lambda kv: kv.set("k", 1, ttl=0), errors.InvalidTTL),
        (lambda kv: kv.set("k", "x" * 70_000), errors.ValueTooLarge),
        (lambda kv: kv.list(limit=0), errors.InvalidValue),
        (lambda kv: kv.cas("k", 1), errors.InvalidValue),
        (lambda kv: kv.cas("k", 1, version=3), errors.Conflict),
        (lambda kv: kv.get_fields("text"), errors.TypeMismatch),
        (lambda kv: kv.set("k", 1, fence=limpet.Fence("n", 5)), errors.LockLost),
        (lambda kv: kv.incr("text"), errors.TypeMismatch),
    ],
)
async def test_what_is_refused_is_raised_as_a_store_raises_it(kv: PluginKV, call: Any, kind: type[Exception]) -> None:
    await kv.set("text", "a")

    with pytest.raises(kind):
        await call(kv)


SAMPLES: list[errors.LimpetError] = [
    errors.InvalidKey("k", "it is bad"),
    errors.InvalidNamespace("N"),
    errors.InvalidValue("bad", path="$.x"),
    errors.InvalidTTL("is bad"),
    errors.ValueTooLarge("k", size_bytes=70_000, limit_bytes=65_536),
    errors.TypeMismatch("k", expected="a record", found="json"),
    errors.PermissionDenied("no"),
    errors.Conflict("k", expected="version 3", current=None),
    errors.Conflict("id", expected="", current=None, reason="stale_request"),
    errors.NotFound("k"),
    errors.LockHeld("n", holder="me", token=5, remaining=1.5),
    errors.LockNotHeld("n"),
    errors.LockExpired("n", token=5),
    errors.LockLost("n", token=5),
    errors.Compacted("trimmed", oldest=7),
    errors.Unavailable("postgresql://db is away"),
    errors.Contention("k", attempts=64),
    errors.RateLimited("slow down", retry_after=2.5),
    errors.Ambiguous("who knows", request_id="r"),
    errors.Corrupt("broken"),
    errors.Closed(),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_survives_the_wire(error: errors.LimpetError) -> None:
    came = error_of(reply_of(error))

    assert type(came) is type(error)
    carried = [
        *("key", "reason", "actual_version", "actual_revision", "size_bytes", "limit_bytes", "retry_after"),
        *("holder", "token", "remaining", "oldest", "request_id"),
    ]
    for name in carried:
        if hasattr(error, name) and not isinstance(error, errors.InvalidKey | errors.TypeMismatch | errors.Contention):
            if isinstance(error, errors.ValueTooLarge) and name == "key":
                continue
            assert getattr(came, name) == getattr(error, name), name


def test_every_kind_of_error_is_among_the_samples() -> None:
    from limpet.protocol.codes import CODES

    assert {type(error) for error in SAMPLES} == set(CODES)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ({"error_code": "VALUE_TOO_LARGE", "message": "m"}, errors.ValueTooLarge),
        ({"error_code": "INVALID_JSON", "message": "m"}, errors.InvalidValue),
        ({"error_code": "MISSING_FIELD", "message": "m"}, errors.InvalidValue),
        ({"error_code": "DATABASE_ERROR", "message": "m"}, errors.Unavailable),
        ({"error_code": "INTERNAL_ERROR", "message": "m"}, errors.Unavailable),
        ({}, errors.Unavailable),
    ],
)
def test_an_error_without_a_code_of_its_own_is_known_by_its_reply(reply: Any, kind: type[Exception]) -> None:
    assert type(error_of(reply)) is kind


def test_a_database_is_told_of_in_words_that_give_nothing_away() -> None:
    for error in (
        errors.Unavailable("postgresql://host/db is away"),
        errors.Corrupt("table x"),
        errors.Closed("file /y"),
    ):
        reply = reply_of(error)
        assert reply["error_code"] == "DATABASE_ERROR"
        assert str(error) not in reply["message"]


# No answer --------------------------------------------------------------------


class Unlucky:
    """A connection on which the first answers get lost, after the server has done its work."""

    def __init__(self, connection: Any, *, lost: int) -> None:
        self._connection = connection
        self._lost = lost
        self.bodies: list[bytes] = []

    async def request(self, subject: str, body: bytes, timeout: float) -> Any:  # noqa: ASYNC109
        self.bodies.append(body)
        answer = await self._connection.request(subject, body, timeout=PATIENCE_S)
        if self._lost:
            self._lost -= 1
            raise nats.errors.TimeoutError
        return answer


async def test_a_write_whose_answer_was_lost_is_applied_once(sqlite_nats: Plugins) -> None:
    unlucky = Unlucky(sqlite_nats.client, lost=2)
    kv = client_of(unlucky)

    assert await kv.incr("n", 5) == 5
    assert await kv.get("n") == 5
    assert len({*unlucky.bodies[:3]}) == 1


async def test_a_taken_value_whose_answer_was_lost_comes_with_the_next(sqlite_nats: Plugins) -> None:
    kv = client_of(Unlucky(sqlite_nats.client, lost=0))
    await kv.set("ticket", "gold")
    unlucky = client_of(Unlucky(sqlite_nats.client, lost=1))

    assert await unlucky.take("ticket") == "gold"


async def test_a_write_that_is_never_answered_is_ambiguous_and_can_be_asked_about(sqlite_nats: Plugins) -> None:
    kv = client_of(Unlucky(sqlite_nats.client, lost=3))

    with pytest.raises(errors.Ambiguous) as unknown:
        await kv.set("k", 1)
    assert unknown.value.request_id
    assert await kv.outcome(unknown.value.request_id)
    assert not await kv.outcome("another")


@pytest.fixture
async def deaf() -> AsyncIterator[Any]:
    """A connection to a NATS server where a subscriber never replies."""
    async with connected() as client:

        async def ignore(_: Any) -> None:
            pass

        await client.subscribe("db.kv.>", cb=ignore)
        yield client


async def test_a_read_that_is_never_answered_is_unavailable(deaf: Any) -> None:
    with pytest.raises(errors.Unavailable):
        await client_of(deaf, timeout=0.01).get("k")


async def test_a_write_that_is_never_answered_is_ambiguous(deaf: Any) -> None:
    with pytest.raises(errors.Ambiguous) as unknown:
        await client_of(deaf, timeout=0.01).incr("k")

    assert unknown.value.request_id


async def test_without_a_server_a_write_was_not_applied_and_that_is_said() -> None:
    async with connected() as client:
        with pytest.raises(errors.Unavailable):
            await client_of(client).set("k", 1)


async def test_on_a_closed_connection_nothing_is_available() -> None:
    async with connected() as client:
        pass
    with pytest.raises(errors.Unavailable):
        await client_of(client).get("k")


async def test_whoever_answers_something_else_is_no_server(deaf: Any) -> None:
    async def answer(message: Any) -> None:
        await deaf.publish(message.reply, b"hello")

    await deaf.subscribe("elsewhere.>", cb=answer)
    with pytest.raises(errors.Unavailable):
        await client_of(deaf, prefix="elsewhere").get("k")


async def test_a_database_that_is_gone_is_unavailable_or_closed(sqlite_nats: Plugins, kv: PluginKV) -> None:
    await sqlite_nats.session.close()

    with pytest.raises(errors.Closed):
        await kv.get("k")


def test_the_patience_of_a_plugin_is_what_the_document_says() -> None:
    given = inspect.signature(limpet.PluginClient).parameters

    assert (given["timeout"].default, given["list_timeout"].default) == (0.1, 0.5)


@pytest.mark.parametrize("name", ["", "Trivia", "a.b", "*", "x" * 101])
def test_a_plugin_that_has_no_name_is_refused(name: str) -> None:
    with pytest.raises(errors.InvalidNamespace):
        limpet.PluginClient(None, name)


@pytest.mark.parametrize("ttl", [0, -1, 1.5, True])
def test_a_lock_is_for_whole_seconds(ttl: Any) -> None:
    with pytest.raises(errors.InvalidTTL):
        client_of(None).lock("n", ttl)


def test_a_client_shows_whose_it_is() -> None:
    client = limpet.PluginClient(None, "trivia")

    assert (repr(client), repr(client.kv.lock("n", 1))) == ("PluginClient('trivia')", "PluginLock('n', free)")
    with pytest.raises(errors.InvalidValue):
        limpet.PluginClient(None, "trivia", attempts=0)


# Odd arguments ----------------------------------------------------------------


GOOD: dict[str, Any] = {
    "key": "k",
    "value": 1,
    "request_id": "r",
    "ttl": 60,
    "fields": {"a": 1},
    "field": "a",
    "expected": 1,
    "new": 2,
    "writes": [{"op": "put", "key": "k", "value": 1}],
    "name": "lock",
}


async def test_odd_arguments_are_refused_by_an_error_of_ours(sqlite_nats: Plugins, kv: PluginKV) -> None:
    """What the encoder would turn into something else, such as bytes into text, is refused as well."""
    found: list[str] = []
    for verb, method in inspect.getmembers(kv, inspect.ismethod):
        if verb.startswith("_") or verb == "watch":
            continue
        # An answer takes a while, so some of the requests that a server refuses were sent.
        for parameter, odd, arguments in calls(method, GOOD, ODD[::3]):
            try:
                made = method(*arguments.args, **arguments.kwargs)
                if inspect.isawaitable(made):
                    await made
                elif isinstance(made, AsyncIterator):
                    _ = [item async for item in made]
                else:
                    await made.acquire()
                    await made.release()
            except (errors.LimpetError, TypeError):
                pass
            except Exception as error:
                found.append(f"{verb}({parameter}={format_argument(odd)}): {type(error).__name__}: {error}")
    assert not found, "\n".join(found)

    with pytest.raises(errors.InvalidValue):
        await kv.get(b"bytes")  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["timeout", "list_timeout", "attempts", "prefix", "plugin"])
def test_odd_options_of_a_client_are_refused(option: str) -> None:
    for odd in (None, True, -1, math.nan, "\ud800", "", [], b"x", object()):
        with contextlib.suppress(errors.LimpetError, TypeError):
            limpet.PluginClient(None, **{"plugin": "trivia", option: odd})  # type: ignore[arg-type]
