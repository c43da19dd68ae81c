"""The retry policy on a turned clock, escalation and dead letters, on every engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import limpet
from limpet.conformance.support import fail
from limpet.errors import Ambiguous, Contention, InvalidValue, NotFound, PermissionDenied, Unavailable
from limpet.protocol.codes import code_of
from limpet.semantic.policy import OutageAlert, RetryPolicy, classify
from limpet.semantic.store import (
    DeadLetters,
    Envelope,
    Escalated,
    InvalidField,
    SemanticStore,
    VersionConflict,
)
from tests.engines import ENGINES, unique, url_of
from tests.processes import PATIENCE_S
from tests.semantic.support import CHECKPOINT, KEY, WRITER, Hasty, SelfTurning, audit

SCHEDULE = [1, 2, 4, 8, 16, 32]
SECRET_VALUE = "s3cret-token"


@pytest.fixture(params=ENGINES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[limpet.Store]:
    # What the store itself tries again, it tries at once.
    async with limpet.open(url_of(request.param, tmp_path), namespace=unique("semantic"), sweep=False) as store:
        store._session.clock = Hasty()
        yield store


@pytest.fixture
def clock() -> SelfTurning:
    return SelfTurning()


@pytest.fixture
def kept(store: limpet.Store, clock: SelfTurning) -> SemanticStore:
    letters = DeadLetters.beside(store)
    return SemanticStore(store, audit=audit(), clock=clock, dead_letters=letters, dice=lambda: 0.5)


class Rival:
    """Makes a value, and lets another writer be quicker a number of times."""

    def __init__(self, kept: SemanticStore, times: int) -> None:
        self._kept = kept
        self.times = times
        self.seen: list[int] = []

    async def __call__(self, found: Envelope | None) -> dict[str, Any]:
        count = 0 if found is None or found.value is None else found.value["n"]
        self.seen.append(count)
        if self.times > 0:
            self.times -= 1
            await self._kept.kv_put(KEY, {"n": count + 10}, writer="rival", semantics=CHECKPOINT)
        return {"n": count + 1, "token": SECRET_VALUE}


async def advance(kept: SemanticStore, change: Any, **options: Any) -> Envelope | None:
    return await kept.advance(KEY, change, writer=WRITER, semantics=CHECKPOINT, **options)


# The schedule -----------------------------------------------------------------


def test_the_policy_is_data() -> None:
    policy = RetryPolicy()

    assert [policy.pause_s("conflict", count) for count in range(1, 8)] == [*SCHEDULE, None]
    for dice, factor in ((0.0, 0.5), (0.5, 1.0), (1.0, 1.5)):
        pauses = [policy.pause_s("transient", count, lambda roll=dice: roll) for count in range(1, 6)]  # type: ignore[misc]
        assert pauses == [0.5 * factor, 1 * factor, 2 * factor, 4 * factor, None]
    assert policy.pause_s("fatal", 1) is None
    assert RetryPolicy(transient_longest_s=1.5, jitter=0).pause_s("transient", 4) == 1.5


def test_failures_are_of_three_kinds() -> None:
    conflict = VersionConflict(KEY, expected_version=1, current=None, request_id="r")
    stale = VersionConflict(KEY, expected_version=1, current=None, request_id="r", reason="stale_request")
    escalated = Escalated(KEY, attempts=1, cause=conflict, letter=None, request_id="r")

    assert [classify(error) for error in (conflict, Unavailable(), Ambiguous(""), Contention(KEY, attempts=1))] == [
        "conflict",
        *["transient"] * 3,
    ]
    fatal = (stale, escalated, PermissionDenied(), InvalidField("value", ""), limpet.errors.Closed())
    assert [classify(error) for error in fatal] == ["fatal"] * 5


@pytest.mark.parametrize("conflicts", [0, 1, 3, 6])
async def test_a_conflict_is_replayed_on_what_is_there_after_1_2_4_and_so_on(
    kept: SemanticStore, clock: SelfTurning, conflicts: int
) -> None:
    rival = Rival(kept, conflicts)
    envelope = await advance(kept, rival)

    assert clock.slept == SCHEDULE[:conflicts]
    assert rival.seen == [10 * number for number in range(conflicts + 1)]
    assert envelope is not None
    assert envelope.value == {"n": 10 * conflicts + 1, "token": SECRET_VALUE}
    assert (await kept.verify()).problems == ()


async def test_callers_of_one_store_take_turns(kept: SemanticStore, clock: SelfTurning) -> None:
    """Otherwise all but one of them would wait by the schedule of conflicts, and most would be escalated."""

    async def change(found: Envelope | None) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"n": 1 if found is None or found.value is None else found.value["n"] + 1}

    written = await asyncio.gather(*(advance(kept, change) for _ in range(40)))

    assert [envelope.value for envelope in written if envelope is not None] == [{"n": n} for n in range(1, 41)]
    assert clock.slept == []


async def test_the_function_may_advance_the_same_key(kept: SemanticStore) -> None:
    calls: list[Envelope | None] = []

    async def change(found: Envelope | None) -> dict[str, Any]:
        calls.append(found)
        if len(calls) == 1:
            await advance(kept, lambda found: {"n": 1})
        return {"n": 10 if found is None or found.value is None else found.value["n"] + 10}

    envelope = await asyncio.wait_for(advance(kept, change), PATIENCE_S)

    assert envelope is not None
    assert envelope.value == {"n": 11}
    assert len(calls) == 2


async def test_the_clock_is_turned_to_the_second() -> None:
    clock = limpet.ManualClock()
    async with limpet.open("memory:", clock=clock, sweep=False) as store:
        kept = SemanticStore(store)
        rival = Rival(kept, 100)
        trying = asyncio.ensure_future(advance(kept, rival))
        for number, pause_s in enumerate(SCHEDULE, 1):
            await asleep(clock)
            assert len(rival.seen) == number
            clock.advance(pause_s - 0.001)
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(rival.seen) == number
            clock.advance(0.001)
        with pytest.raises(Escalated):
            await trying
        assert len(rival.seen) == 7


async def asleep(clock: limpet.ManualClock) -> None:
    async with asyncio.timeout(120):
        while not clock.sleepers:  # noqa: ASYNC110 - no event for a sleeper
            await asyncio.sleep(0)


async def test_conflicts_that_go_on_are_escalated_with_a_letter(
    kept: SemanticStore, clock: SelfTurning, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Escalated) as given_up:
        await advance(kept, Rival(kept, 100), request_id="w-1", spec_ref="adr/7")

    error = given_up.value
    assert clock.slept == SCHEDULE
    assert (error.attempts, error.cause_code, error.request_id) == (7, "version_conflict", "w-1")
    assert isinstance(error.__cause__, VersionConflict)
    assert (error.retryable, code_of(error).status) == (False, 503)
    assert kept.dead_letters is not None
    (letter,) = await kept.dead_letters.list()
    assert letter.letter == error.letter
    assert letter.to_dict() == {
        "letter": error.letter,
        "at": clock.now_ms() / 1000,
        "namespace": kept.store.name,
        "key": KEY,
        "writer": WRITER,
        "semantics": CHECKPOINT,
        "expectedVersion": 6,
        "requestId": "w-1",
        "code": "version_conflict",
        "attempts": 7,
        "foundVersion": 7,
        "specRef": "adr/7",
    }
    assert letter.to_dict(with_value=True)["value"] == {"n": 61, "token": SECRET_VALUE}
    (escalation,) = (record for record in caplog.records if record.__dict__.get("event") == "escalated")
    assert escalation.levelname == "ERROR"
    assert (escalation.__dict__["letter"], escalation.__dict__["correlationId"]) == (error.letter, "w-1")
    logged = "".join(f"{record.getMessage()}{record.__dict__}" for record in caplog.records)
    assert SECRET_VALUE not in logged + repr(letter) + str(error) + repr(error)


async def test_what_fails_for_a_moment_is_tried_five_times(kept: SemanticStore, clock: SelfTurning) -> None:
    # Each attempt of the policy is five of the store.
    failing = fail(kept.store, before=4 * 5)

    envelope = await advance(kept, lambda found: {"n": 1})

    assert envelope is not None
    assert (envelope.version, clock.slept) == (1, [0.5, 1.0, 2.0, 4.0])
    assert failing.before == 0


async def test_what_goes_on_failing_is_escalated(kept: SemanticStore, clock: SelfTurning) -> None:
    elsewhere = limpet.open("memory:")
    async with elsewhere as other:
        kept.dead_letters = DeadLetters(other)
        fail(kept.store, before=1000)
        with pytest.raises(Escalated) as given_up:
            await kept.submit(KEY, {"n": 1}, writer=WRITER, semantics=CHECKPOINT, request_id="w-1")

        assert clock.slept == [0.5, 1.0, 2.0, 4.0]
        assert (given_up.value.attempts, given_up.value.cause_code) == (5, "unavailable")
        (letter,) = await kept.dead_letters.list()
        assert (letter.letter, letter.code, letter.expected_version) == (given_up.value.letter, "unavailable", None)


async def test_an_answer_that_was_lost_is_not_written_twice(kept: SemanticStore) -> None:
    fail(kept.store, after=1000)

    envelope = await kept.submit(KEY, {"n": 1}, writer=WRITER, semantics=CHECKPOINT, request_id="w-1")

    # No reply ever arrived; the receipt of the request shows the result.
    assert (envelope.version, envelope.replayed) == (1, True)
    found = await kept.kv_get(KEY)
    assert found is not None
    assert found.version == 1


async def test_a_fatal_error_fails_at_once(kept: SemanticStore, clock: SelfTurning) -> None:
    tries: list[int] = []

    def refuse(found: Envelope | None) -> dict[str, Any]:
        tries.append(1)
        return {"n": {1, 2}}

    with pytest.raises(InvalidField):
        await advance(kept, refuse)
    with pytest.raises(InvalidField):
        await kept.submit(KEY, [1], writer=WRITER, semantics=CHECKPOINT)  # type: ignore[arg-type]
    assert (len(tries), clock.slept) == (1, [])
    assert kept.dead_letters is not None
    assert await kept.dead_letters.list() == []


async def test_a_conflict_of_a_version_that_the_caller_names_is_the_callers(
    kept: SemanticStore, clock: SelfTurning
) -> None:
    with pytest.raises(VersionConflict):
        await kept.submit(KEY, {"n": 1}, writer=WRITER, semantics=CHECKPOINT, expected_version=3)
    assert clock.slept == []


async def test_a_function_may_leave_things_as_they_are(kept: SemanticStore) -> None:
    assert await advance(kept, lambda found: None) is None
    first = await advance(kept, lambda found: {"n": 1})
    assert first is not None
    assert await advance(kept, lambda found: None) == first


async def test_without_letters_an_escalation_keeps_nothing(store: limpet.Store, clock: SelfTurning) -> None:
    kept = SemanticStore(store, clock=clock)
    with pytest.raises(Escalated, match="nothing was kept") as given_up:
        await advance(kept, Rival(kept, 100))
    assert given_up.value.letter is None


async def test_a_letter_that_cannot_be_kept_is_said_to_be_lost(
    kept: SemanticStore, caplog: pytest.LogCaptureFixture
) -> None:
    fail(kept.store, before=1000)
    with pytest.raises(Escalated) as given_up:
        await kept.submit(KEY, {"n": 1}, writer=WRITER, semantics=CHECKPOINT, request_id="w-1")
    assert given_up.value.letter is None
    assert any("dead letter of request w-1 could not be kept" in record.getMessage() for record in caplog.records)


# Letters ----------------------------------------------------------------------


async def escalate(kept: SemanticStore) -> str:
    with pytest.raises(Escalated) as given_up:
        await advance(kept, Rival(kept, 7))
    assert given_up.value.letter is not None
    return given_up.value.letter


async def test_a_letter_is_replayed_onto_the_version_that_is_named(kept: SemanticStore) -> None:
    letters, name = kept.dead_letters, await escalate(kept)
    assert letters is not None
    with pytest.raises(VersionConflict):
        await letters.replay(name, kept)
    assert (await letters.show(name)).value == {"n": 61, "token": SECRET_VALUE}

    envelope = await letters.replay(name, kept, expected_version=7)

    assert (envelope.version, envelope.value) == (8, {"n": 61, "token": SECRET_VALUE})
    assert await letters.list() == []
    with pytest.raises(NotFound):
        await letters.show(name)
    with pytest.raises(NotFound):
        await letters.replay(name, kept)


async def test_a_letter_is_for_one_namespace_and_can_be_dropped(kept: SemanticStore) -> None:
    letters, name = kept.dead_letters, await escalate(kept)
    assert letters is not None
    other = SemanticStore(kept.store.namespace(unique("other")))
    with pytest.raises(InvalidValue, match="meant for namespace"):
        await letters.replay(name, other)
    assert await letters.drop(name) is True
    assert await letters.drop(name) is False
    await letters.store.put("not-a-letter", 5)
    with pytest.raises(InvalidValue, match="no dead letter"):
        await letters.list()


async def test_letters_are_no_part_of_the_data_and_are_not_kept_for_ever(kept: SemanticStore) -> None:
    name = await escalate(kept)
    assert kept.dead_letters is not None

    assert kept.dead_letters.store.name == f"{kept.store.name}-deadletters"
    assert (await kept.store.keys()).keys == [KEY]
    entry = await kept.dead_letters.store.entry(name)
    assert entry is not None
    assert entry.expires_ms == entry.created_ms + 30 * 86_400_000


# An outage ----------------------------------------------------------------------


async def test_an_outage_of_more_than_five_minutes_is_reported_once(
    store: limpet.Store, clock: SelfTurning, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="limpet.semantic")
    alerts: list[OutageAlert] = []
    kept = SemanticStore(store, clock=clock, on_outage=alerts.append, dice=lambda: 0.5)
    engine = store._session.engine
    down = _Down(engine, clock, until_s=clock.monotonic() + 600)
    store._session.engine = down

    await kept.wait_until_available()

    (alert,) = alerts
    assert clock.slept[:6] == SCHEDULE
    assert set(clock.slept[6:]) == {32}
    # 1 + 2 + 4 + 8 + 16 and then every 32 s: the first look after five minutes.
    assert (alert.namespace, alert.lasted_s, alert.code) == (store.name, 31 + 9 * 32, "unavailable")
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert (await kept.kv_put(KEY, {"n": 1}, writer=WRITER, semantics=CHECKPOINT)).version == 1
    # Another outage raises another alert.
    down.until_s = clock.monotonic() + 400
    await kept.wait_until_available()
    assert len(alerts) == 2


async def test_an_outage_spans_calls(store: limpet.Store, clock: SelfTurning) -> None:
    alerts: list[OutageAlert] = []
    kept = SemanticStore(store, clock=clock, on_outage=alerts.append, dice=lambda: 0.5)
    store._session.engine = _Down(store._session.engine, clock, until_s=clock.monotonic() + 1000)
    for _ in range(3):
        with pytest.raises(Escalated):
            await kept.submit(KEY, {"n": 1}, writer=WRITER, semantics=CHECKPOINT)
        assert not alerts
        clock.advance(100)
    with pytest.raises(Escalated):
        await kept.submit(KEY, {"n": 1}, writer=WRITER, semantics=CHECKPOINT)
    assert [alert.lasted_s > 300 for alert in alerts] == [True]


class _Down:
    """An engine that cannot be reached until a moment."""

    def __init__(self, engine: Any, clock: SelfTurning, until_s: float) -> None:
        self._engine, self._clock, self.until_s = engine, clock, until_s

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "scan", "commit", "status") and self._clock.monotonic() < self.until_s:
            return self._refuse
        return getattr(self._engine, name)

    async def _refuse(self, *_: object, **__: object) -> Any:
        raise Unavailable("no server replies")
