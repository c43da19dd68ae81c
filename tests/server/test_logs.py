"""The lines of the log: at which level, how many, and what is never in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet import ManualClock, Store
from limpet.errors import Conflict, Corrupt, LimpetError, RateLimited, Unavailable
from limpet.server import logs
from limpet.server.dispatch import Call, Dispatcher, TrustedCaller
from limpet.server.logs import Logs, configure
from limpet.server.metrics import Metrics
from limpet.server.operations import OPERATIONS
from limpet.server.outcome import quote_name
from limpet.server.requests import InvalidJSON, InvalidSubject, MissingField, request_of
from limpet.sweep import SWEEP_S, Round
from tests.engines import url_of
from tests.server.subjects_support import Plugins
from tests.server.test_access import until

pytest_plugins = ["tests.server.subjects_fixtures"]

SECRET = "hunter2-hunter2"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Store]:
    url = url_of(request.param, tmp_path)
    async with limpet.open(url, namespace="trivia", clock=clock, sweep=False) as store:
        yield store


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "limpet.server")
    return caplog


class Talk:
    """A caller of a dispatcher that logs."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        # On a busy machine anything may take a while; what is slow has tests of its own.
        self.logs = Logs(clock, slow_s=3600)
        self.dispatcher = Dispatcher(store._session, "nats", observers=[self.logs])

    async def ask(self, operation: str, namespace: str = "trivia", **members: Any) -> Any:
        row = OPERATIONS[operation]
        return await self.dispatcher.run(row, namespace, request_of(row.request, members), TrustedCaller("alice"))


@pytest.fixture
def talk(store: Store, clock: ManualClock) -> Talk:
    return Talk(store, clock)


def call(operation: str = "get", *, seconds: float = 0.001, error: Exception | None = None, **members: Any) -> Call:
    """A finished request, as an observer gets it."""
    request = request_of(OPERATIONS[operation].request, members or {"key": "k"})
    answer = None if error is not None else {"exists": True}
    return Call("nats", "alice", "trivia", operation, request, seconds, answer, error)


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    """An error that was raised somewhere."""
    try:
        raise error from cause
    except Exception as found:
        return found


# Operations -------------------------------------------------------------------


async def test_every_operation_is_a_debug_line_in_the_documented_form(
    talk: Talk, lines: pytest.LogCaptureFixture
) -> None:
    await talk.ask("set", key="game_123", value="x" * 43)
    await talk.ask("get", key="game_123")
    await talk.ask("get", key="nothing")
    await talk.ask("delete", key="game_123")
    await talk.ask("list", prefix="game_")

    assert [record.getMessage() for record in lines.records] == [
        "KV set: plugin=trivia key=game_123 size=45",
        "KV get: plugin=trivia key=game_123 hit=true",
        "KV get: plugin=trivia key=nothing hit=false",
        "KV delete: plugin=trivia key=game_123 deleted=true",
        "KV list: plugin=trivia prefix=game_ count=0 truncated=false",
    ]
    assert {record.levelno for record in lines.records} == {logging.DEBUG}


async def test_a_record_carries_the_facts_of_its_line(talk: Talk, lines: pytest.LogCaptureFixture) -> None:
    await talk.ask("set", key="game_123", value=1, ttl=60)

    facts = vars(lines.records[0])
    assert facts["latency_ms"] > 0
    assert {name: facts[name] for name in ("operation", "op", "plugin", "namespace", "key", "size", "ttl")} == {
        "operation": "kv_set",
        "op": "set",
        "plugin": "trivia",
        "namespace": "trivia",
        "key": "game_123",
        "size": 1,
        "ttl": 60,
    }
    assert (facts["caller"], facts["face"]) == ("alice", "nats")


async def test_every_operation_can_be_logged(talk: Talk, lines: pytest.LogCaptureFixture) -> None:
    token = (await talk.ask("lock", name="job", ttl=10))["token"]
    await talk.ask("put", key="b", bytes="AAAA")
    await talk.ask("put", key="r", fields={"f": SECRET})
    await talk.ask("fields", key="r", swap={"field": "f", "expected": 1, "new": SECRET})
    await talk.ask("incr", key="n")
    await talk.ask("batch", writes=[{"op": "put", "key": "x", "value": SECRET}])
    await talk.ask("scan")
    await talk.ask("unlock", name="job", token=token)

    text = lines.text
    assert "KV lock: plugin=trivia lock=job ttl=10" in text
    assert "KV put: plugin=trivia key=b size=3" in text
    assert "KV fields: plugin=trivia key=r size=18 swapped=false" in text
    assert "KV batch: plugin=trivia size=17" in text
    assert SECRET not in text


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
async def test_a_slow_operation_is_a_warning(level: str, clock: ManualClock, lines: pytest.LogCaptureFixture) -> None:
    lines.set_level(level, "limpet.server")
    Logs(clock).done(call(seconds=0.1001))

    (record,) = lines.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "KV get slow: plugin=trivia key=k hit=true latency_ms=100.1"


def test_waiting_for_a_lock_is_not_slowness(clock: ManualClock, lines: pytest.LogCaptureFixture) -> None:
    Logs(clock).done(call("lock", seconds=5.05, name="job", ttl=10, wait=5))

    assert lines.records[0].levelno == logging.DEBUG


# Failures ---------------------------------------------------------------------


@pytest.mark.parametrize("error", [Unavailable(SECRET), Corrupt(SECRET), ValueError(SECRET)])
def test_what_the_server_did_wrong_is_an_error_with_a_traceback(
    error: Exception, clock: ManualClock, lines: pytest.LogCaptureFixture
) -> None:
    Logs(clock).done(call("set", error=raised(error), key="k", value=1))

    (record,) = lines.records
    code = "DATABASE_ERROR" if isinstance(error, LimpetError) else "INTERNAL_ERROR"
    kind = type(error).__name__
    assert record.levelno == logging.ERROR
    assert record.getMessage() == f"KV set failed: plugin=trivia key=k error={code} reason={kind}"
    assert (vars(record)["error_code"], vars(record)["reason"]) == (code, kind)
    assert "in raised" in lines.text
    assert str(error) not in lines.text


def test_the_words_of_a_driver_are_kept_back_with_the_chain_of_causes_shown(
    clock: ManualClock, lines: pytest.LogCaptureFixture
) -> None:
    cause = raised(KeyError(SECRET), raised(OSError(SECRET)))
    Logs(clock).done(call(error=raised(Unavailable(SECRET), cause)))

    assert 'error=DATABASE_ERROR reason="Unavailable from KeyError from OSError"' in lines.text
    for kind in ("Unavailable", "KeyError", "OSError"):
        assert f"Redacted: {kind}" in lines.text
    assert SECRET not in lines.text


MISTAKES: list[tuple[Exception, int, str, str]] = [
    (limpet.errors.InvalidKey("k", "it is not"), logging.INFO, "VALIDATION_ERROR", "key 'k' is not allowed: it is not"),
    (limpet.errors.InvalidTTL("is zero"), logging.INFO, "VALIDATION_ERROR", "ttl is zero; give seconds above zero"),
    (limpet.errors.PermissionDenied("no"), logging.INFO, "PERMISSION_DENIED", "no"),
    (limpet.errors.InvalidNamespace("X"), logging.INFO, "INVALID_PLUGIN_NAME", "namespace 'X' is not allowed"),
    (MissingField("key"), logging.INFO, "MISSING_FIELD", "Missing required field: key"),
    (InvalidJSON("Invalid JSON"), logging.INFO, "INVALID_JSON", "Invalid JSON"),
    (InvalidSubject("db.kv.x"), logging.INFO, "INVALID_SUBJECT", "Invalid subject format: db.kv.x"),
    (Conflict("k", expected="x", current=None), logging.DEBUG, "CONFLICT", "conflict on 'k': expected x"),
    (limpet.errors.NotFound("k"), logging.DEBUG, "NOT_FOUND", "'k' does not exist"),
    (RateLimited("too fast", retry_after=1), logging.DEBUG, "RATE_LIMITED", "too fast; try again in 1.0 s"),
]


@pytest.mark.parametrize(("error", "level", "code", "reason"), MISTAKES)
def test_what_a_caller_did_wrong_is_no_error_of_the_server(
    error: Exception, level: int, code: str, reason: str, clock: ManualClock, lines: pytest.LogCaptureFixture
) -> None:
    Logs(clock).done(call(error=raised(error)))

    (record,) = lines.records
    assert (record.levelno, record.exc_info) == (level, None)
    assert record.getMessage().startswith(f"KV get failed: plugin=trivia key=k error={code} reason=")
    assert vars(record)["error_code"] == code
    assert vars(record)["reason"].startswith(reason)
    assert vars(record).get("field") == getattr(error, "field", None)


@pytest.mark.parametrize(("error", "level", "code", "reason"), MISTAKES)
def test_an_error_of_a_request_without_a_reply_is_a_warning(
    error: Exception, level: int, code: str, reason: str, clock: ManualClock, lines: pytest.LogCaptureFixture
) -> None:
    """The log is the only place where its sender can learn of it. A spent rate would flood it."""
    Logs(clock).done(call(error=raised(error))._replace(has_reply=False))

    assert lines.records[0].levelno == (logging.DEBUG if isinstance(error, RateLimited) else logging.WARNING)
    assert (vars(lines.records[0])["plugin"], vars(lines.records[0])["op"]) == ("trivia", "get")


async def test_publish_only_requests_can_be_understood_from_the_log(
    sqlite_nats: Plugins, lines: pytest.LogCaptureFixture
) -> None:
    """With the subject, the plugin, the operation, the code and the reason; and counted under that code."""
    metrics = Metrics(sqlite_nats.session, names="both")
    sqlite_nats.served._dispatcher._observers = [sqlite_nats.observer, Logs(), metrics]
    await sqlite_nats.ask("set", "trivia", key="k", value=1)
    lines.clear()
    for subject, body in (
        ("db.kv.trivia.set", b'{"key": "k"}'),
        ("db.kv.trivia.set", b'{"key": "k", "value": 1, "ttl": -1}'),
        ("db.kv.trivia.set", f'{{"key": "k", "value": "{SECRET}"'.encode()),
        ("db.kv.trivia.frobnicate", b"{}"),
        ("db.kv.trivia", b"{}"),
        ("db.kv.Trivia.set", b"{}"),
        ("db.kv.trivia.cas", b'{"key": "k", "value": 2, "expect": {"version": 9}}'),
    ):
        await sqlite_nats.publish(subject, body)
    await until(lambda: len([one for one in lines.records if one.levelno == logging.WARNING]) >= 7)
    await sqlite_nats.ask("get", "trivia", key="k")

    failed = {vars(one)["subject"]: one.getMessage() for one in lines.records if "subject" in vars(one)}
    messages = [one.getMessage() for one in lines.records if one.levelno == logging.WARNING]
    assert failed["db.kv.trivia.frobnicate"] == (
        "KV frobnicate failed: plugin=trivia subject=db.kv.trivia.frobnicate error=INVALID_SUBJECT "
        'reason="Invalid subject format: db.kv.trivia.frobnicate"'
    )
    assert failed["db.kv.trivia"].startswith(
        "KV request failed: plugin=trivia subject=db.kv.trivia error=INVALID_SUBJECT"
    )
    assert failed["db.kv.Trivia.set"].startswith(
        "KV set failed: plugin=Trivia subject=db.kv.Trivia.set error=INVALID_PLUGIN_NAME reason="
    )
    assert any("error=MISSING_FIELD" in one and "field: value" in one for one in messages)
    assert any("error=VALIDATION_ERROR" in one and "ttl is a whole number" in one for one in messages)
    assert any("error=INVALID_JSON" in one for one in messages)
    assert any(one.startswith("KV cas failed: plugin=trivia key=k error=CONFLICT") for one in messages)
    assert SECRET not in lines.text

    counted = (await metrics.render()).decode()
    assert 'rosey_kv_errors_total{error_code="INVALID_SUBJECT",plugin="trivia"} 2.0' in counted
    assert 'rosey_kv_errors_total{error_code="INVALID_PLUGIN_NAME",plugin="other"} 1.0' in counted
    assert "Trivia" not in counted


def test_ending_a_lock_by_force_is_a_warning_with_its_reason(
    clock: ManualClock, lines: pytest.LogCaptureFixture
) -> None:
    Logs(clock).done(call("unlock", name="job", reason="its holder is gone\nforged")._replace(caller="ops#1"))

    (record,) = lines.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "KV unlock of a lock by force: plugin=trivia lock=job hit=true caller=ops#1 "
        r'reason="its holder is gone\nforged"'
    )


def test_an_error_that_a_face_made_for_itself_says_how_bad_it_is(
    clock: ManualClock, lines: pytest.LogCaptureFixture
) -> None:
    class Problem(Exception):
        status = 415

    Logs(clock).done(call(error=raised(Problem(SECRET))))

    assert lines.records[0].levelno == logging.INFO
    assert SECRET not in lines.text


async def test_a_request_that_was_refused_early_is_a_line_too(talk: Talk, lines: pytest.LogCaptureFixture) -> None:
    talk.dispatcher.report_refusal(TrustedCaller(), "trivia\nforged", "se t", MissingField("key"))

    assert lines.records[0].getMessage() == (
        r'KV "se t" failed: plugin="trivia\nforged" error=MISSING_FIELD reason="Missing required field: key"'
    )
    # Programs read the attributes, which are as they are.
    assert (vars(lines.records[0])["plugin"], vars(lines.records[0])["op"]) == ("trivia\nforged", "se t")


async def test_an_operation_that_was_cancelled_says_so(clock: ManualClock, lines: pytest.LogCaptureFixture) -> None:
    request = request_of(OPERATIONS["get"].request, {"key": "k"})
    Logs(clock).done(Call("http", "alice", "trivia", "get", request, 0.01))

    assert lines.records[0].getMessage() == "KV get cancelled: plugin=trivia key=k"


# Names and values -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("game_123", "game_123"),
        ("team/a:b.c@d-é", "team/a:b.c@d-é"),
        ("a\nERROR forged", r'"a\nERROR forged"'),
        ("a\r\x1b[31m", r'"a\r\u001b[31m"'),
        ("k hit=true", '"k hit=true"'),
        ("k=v", '"k=v"'),
        ('"', r'"\""'),
        ("\u202eevil", r'"\u202eevil"'),
        ("a\u2028b", r'"a\u2028b"'),
        ("", '""'),
    ],
)
def test_a_name_is_shown_so_that_it_forges_nothing(name: str, text: str) -> None:
    assert quote_name(name) == text


def test_a_long_name_is_cut() -> None:
    assert len(quote_name("x" * 1024)) < 250


@pytest.mark.parametrize("form", ["plain", "json"])
async def test_neither_a_value_nor_a_forged_line_is_ever_written(
    talk: Talk, form: Any, restored: None, clock: ManualClock
) -> None:
    stream = io.StringIO()
    configure("debug", form, stream)
    nasty = "k\n2025-01-01 00:00:00 ERROR [limpet.server] forged\r\x1b[2J"
    await talk.ask("set", key=nasty, value=SECRET)
    await talk.ask("get", key=nasty)
    await talk.ask("take", key=nasty)
    await talk.ask("put", key="r", fields={"f": SECRET}, meta={"m": SECRET})
    with pytest.raises(Conflict):
        await talk.ask("cas", key="r", value=SECRET, expect={"value": SECRET})
    talk.logs.done(call("set", error=raised(ValueError(SECRET)), key="k", value=SECRET))
    logging.getLogger("limpet.other").info("of another part: %s", nasty)

    text = stream.getvalue()
    assert SECRET not in text
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith("2025-01-01")]
    assert text.count("KV ") == 6


# Sampling ---------------------------------------------------------------------


def test_above_a_thousand_a_second_one_debug_line_of_a_hundred_is_written(
    clock: ManualClock, lines: pytest.LogCaptureFixture
) -> None:
    found = Logs(clock)
    for _ in range(1000):
        found.done(call())
    assert len(lines.records) == 1000
    for _ in range(2000):
        found.done(call())
    assert len(lines.records) == 1020

    # The next second is busy from the start, and the one after it is quiet again.
    clock.advance(1)
    for _ in range(500):
        found.done(call())
    assert len(lines.records) == 1025
    clock.advance(1)
    for _ in range(500):
        found.done(call())
    assert len(lines.records) == 1525


def test_what_is_more_than_debug_is_always_written(clock: ManualClock, lines: pytest.LogCaptureFixture) -> None:
    found = Logs(clock)
    for _ in range(3000):
        found.done(call())
    lines.clear()
    for _ in range(50):
        found.done(call(seconds=1.0))
        found.done(call(error=MissingField("key")))
        found.done(call(error=Unavailable("away")))

    assert len(lines.records) == 150


# The sweeper ------------------------------------------------------------------


def test_what_the_sweeper_removed_is_summed_up_every_five_minutes(
    clock: ManualClock, lines: pytest.LogCaptureFixture
) -> None:
    found = Logs(clock)
    for _ in range(299):
        clock.advance(1)
        found.swept(Round({}, {}, 0.0))
    found.swept(Round({"a": 30, "b": 11}, {}, 0.1))
    assert lines.records == []

    clock.advance(1)
    found.swept(Round({"a": 1}, {"b": Unavailable("away")}, 0.05))
    (record,) = lines.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == "KV cleanup: removed 42 expired keys in 0.15s (1 rounds failed)"

    lines.clear()
    clock.advance(300)
    found.swept(Round({}, {}, 0.0))
    assert lines.records == []

    clock.advance(300)
    found.swept(Round({}, {"b": Unavailable("away")}, 0.0))
    assert [record.getMessage() for record in lines.records] == ["KV cleanup: 1 rounds failed"]


def test_a_slow_round_of_the_sweeper_is_a_warning_at_once(clock: ManualClock, lines: pytest.LogCaptureFixture) -> None:
    found = Logs(clock)
    found.swept(Round({"a": 100}, {}, 1.5))
    found.swept(Round({"a": 100}, {}, 1.0))

    (record,) = lines.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "KV cleanup slow: 1.50s for 100 keys"


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
async def test_the_rounds_of_the_sweeper_are_summed_up(
    engine: str, tmp_path: Path, clock: ManualClock, lines: pytest.LogCaptureFixture
) -> None:
    async with limpet.open(url_of(engine, tmp_path), namespace="trivia", clock=clock) as store:
        found = Logs(clock, cleanup_interval_s=10)
        rounds: list[Round] = []
        store._session.sweeper.listeners += [found.swept, rounds.append]
        for number in range(5):
            await store.put(str(number), 1, ttl=3)

        for _ in range(10):
            count = len(rounds)
            await until(lambda: clock.sleepers > 0)
            clock.advance(SWEEP_S)
            await until(lambda count=count: len(rounds) > count)  # type: ignore[misc]

    assert sum(sum(one.ended.values()) for one in rounds) == 5
    assert [record.getMessage() for record in lines.records] == ["KV cleanup: removed 5 expired keys in 0.00s"]


# The form ---------------------------------------------------------------------


@pytest.fixture
def restored() -> Iterator[None]:
    """What `configure` changes is as before, afterwards."""
    ours = logging.getLogger("limpet")
    before = (list(ours.handlers), ours.level, ours.propagate)
    yield
    ours.handlers[:], ours.propagate = before[0], before[2]
    ours.setLevel(before[1])


@pytest.mark.usefixtures("restored")
def test_plain_lines_are_for_people(clock: ManualClock) -> None:
    stream = io.StringIO()
    handler = configure("DEBUG", "plain", stream)
    record = logging.makeLogRecord({"created": 1_763_807_445.0, "levelname": "DEBUG", "name": "limpet.server"})
    record.msg = "KV set: plugin=trivia"

    assert handler.format(record) == "2025-11-22 10:30:45 DEBUG [limpet.server] KV set: plugin=trivia"


@pytest.mark.usefixtures("restored")
def test_json_lines_are_for_programs(clock: ManualClock) -> None:
    stream = io.StringIO()
    configure("DEBUG", "json", stream)
    found = Logs(clock)
    found.done(call())
    found.done(call(error=raised(Unavailable("away"))))

    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "KV get: plugin=trivia key=k hit=true"
    assert (first["level"], first["logger"], first["key"], first["hit"]) == ("DEBUG", "limpet.server", "k", True)
    assert first["at"].endswith("Z")
    assert "in raised" in second["traceback"]
    assert (second["error_code"], second["reason"]) == ("DATABASE_ERROR", "Unavailable")


@pytest.mark.usefixtures("restored")
def test_members_of_a_json_line_are_plain_values(clock: ManualClock) -> None:
    """A search for a key must find it, so nothing in them is quoted twice."""
    stream = io.StringIO()
    configure("DEBUG", "json", stream)
    found = Logs(clock)
    found.done(call(key='high score é "1"')._replace(caller="plugin trivia"))
    found.done(call(error=raised(MissingField("value")), key="")._replace(namespace="", subject="db.kv."))

    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["key"], first["caller"], first["plugin"]) == ('high score é "1"', "plugin trivia", "trivia")
    assert (second["key"], second["plugin"], second["subject"], second["field"]) == ("", "", "db.kv.", "value")
    assert second["reason"] == "Missing required field: value"


@pytest.mark.usefixtures("restored")
def test_setting_up_again_replaces_what_was(clock: ManualClock) -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("DEBUG", "plain", first)
    configure("WARNING", "plain", second)
    found = Logs(clock)
    found.done(call())
    found.done(call(seconds=1.0))

    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


def test_the_defaults_are_those_that_were_promised() -> None:
    assert (logs.SLOW_S, logs.SWEEP_SLOW_S, logs.CLEANUP_INTERVAL_S) == (0.1, 1.0, 300.0)
    assert (logs.SAMPLED_ABOVE, logs.SAMPLED_ONE_OF) == (1000, 100)
