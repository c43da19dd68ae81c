"""The alarm for conflicts that go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

import limpet
from limpet import ManualClock
from limpet.errors import InvalidValue
from limpet.semantic import alarm as conflicts
from limpet.semantic.alarm import ConflictAlarm, ConflictAlert
from limpet.semantic.observe import Observation, ObservedOutcome
from limpet.semantic.store import SemanticStore, VersionConflict

KEY = "tenant/acme/project/docs/delta"


class Alarmed:
    """An alarm on a clock that is turned by hand, and its alerts."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        self.alerts: list[ConflictAlert] = []
        self.alarm = ConflictAlarm(self.alerts.append, clock=self.clock, **options)

    def minute(self, writes: int, met: int, namespace: str = "platform") -> None:
        """A fifth of a window: so many writes, so many of which met a conflict."""
        for number in range(writes):
            outcome: ObservedOutcome = "conflict" if number < met else "success"
            self.alarm(Observation("kvPut", outcome, namespace, "checkpoint", KEY, "r"))
        self.clock.advance(60)


def test_conflicts_of_a_whole_window_raise_one_alert(caplog: pytest.LogCaptureFixture) -> None:
    alarmed = Alarmed()
    with caplog.at_level(logging.INFO, "limpet.semantic"):
        for _ in range(10):
            alarmed.minute(10, 2)

    assert alarmed.alerts == [ConflictAlert("platform", 0.2, 10, 50, 300.0)]
    (record,) = caplog.records
    assert (record.levelname, vars(record)["event"]) == ("WARNING", "conflictsGoOn")
    assert record.getMessage() == "conflicts in namespace platform go on: 10 of 50 writes in 300 s"


def test_after_a_pause_it_raises_another(caplog: pytest.LogCaptureFixture) -> None:
    alarmed = Alarmed()
    with caplog.at_level(logging.INFO, "limpet.semantic"):
        for met in (*[5] * 6, 0, 0, *[5] * 6):
            alarmed.minute(10, met)

    assert len(alarmed.alerts) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


@pytest.mark.parametrize(
    ("minutes", "why"),
    [
        ([(10, 1)] * 12, "it is at the bound, and not above"),
        ([(2, 1)] + [(0, 0)] * 11 + [(1, 0)], "one conflict of two"),
        ([(3, 1)] * 12, "there are too few writes for an alert"),
        ([(1000, 1000)] + [(10, 0)] * 11, "a burst, however large"),
        ([(1000, 1000)] + [(0, 0)] * 8 + [(10, 10)] * 3, "silence lies between"),
        ([(10, 9), (10, 0)] * 6, "every other minute is quiet"),
        ([(10, 9)] * 5, "the window is not over before the next write"),
    ],
)
def test_what_does_not_last_raises_nothing(minutes: list[tuple[int, int]], why: str) -> None:
    alarmed = Alarmed()
    for writes, met in minutes:
        alarmed.minute(writes, met)

    assert alarmed.alerts == [], why


def test_bound_window_and_least_writes_can_be_chosen() -> None:
    alarmed = Alarmed(above=0.5, window_s=60.0 * 5 * 2, writes_min=200)
    for _ in range(14):
        alarmed.minute(20, 10)
    assert alarmed.alerts == []

    for _ in range(14):
        alarmed.minute(20, 12)
    (alert,) = alarmed.alerts
    assert (alert.rate > 0.5, alert.writes, alert.window_s) == (True, 200, 600.0)


@pytest.mark.parametrize("options", [{"above": 1.0}, {"above": -0.1}, {"window_s": 0.0}, {"writes_min": 0}])
def test_what_cannot_be_meant_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        ConflictAlarm(**options)


def test_namespaces_are_separate_and_replays_count_as_nothing() -> None:
    alarmed = Alarmed()
    for _ in range(7):
        for number in range(10):
            alarmed.alarm(Observation("kvPut", "success", "calm", "cursor", KEY, str(number)))
            alarmed.alarm(Observation("kvPut", "replayed", "busy", "cursor", KEY, str(number)))
        alarmed.minute(10, 2, "busy")

    assert [(alert.namespace, alert.writes) for alert in alarmed.alerts] == [("busy", 50)]


def test_names_that_were_made_up_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflicts, "NAMESPACES_MAX", 3)
    alarmed = Alarmed()
    for number in range(10):
        alarmed.minute(1, 1, f"made-up-{number}")

    assert len(alarmed.alarm._counters) == 3


async def fight(kept: SemanticStore, turn: Callable[[float], None]) -> None:
    """Six minutes in which every second write comes too late."""
    for _ in range(6):
        for _ in range(5):
            found = await kept.kv_put(KEY, {}, writer="a:b", semantics={"purpose": "cursor"})
            with pytest.raises(VersionConflict):
                await kept.kv_delete(KEY, writer="c:d", expected_version=found.version + 1)
        turn(60)
        await asyncio.sleep(0)
    await kept.kv_put(KEY, {}, writer="a:b", semantics={"purpose": "cursor"})


async def test_it_is_the_observer_of_a_store() -> None:
    clock, alerts = ManualClock(), list[ConflictAlert]()
    async with limpet.open("memory:", clock=clock, sweep=False) as store:
        await fight(SemanticStore(store, observer=ConflictAlarm(alerts.append, clock=clock)), clock.advance)

    assert [(alert.rate, alert.writes) for alert in alerts] == [(0.5, 50)]


async def test_whoever_takes_the_alert_cannot_make_a_write_fail(caplog: pytest.LogCaptureFixture) -> None:
    """It was applied, and its writer would believe that it was not."""

    def broken(_: ConflictAlert) -> None:
        raise RuntimeError("pager")

    clock = ManualClock()
    async with limpet.open("memory:", clock=clock, sweep=False) as store:
        await fight(SemanticStore(store, observer=ConflictAlarm(broken, clock=clock)), clock.advance)

    assert "the alert of conflicts in namespace default failed: RuntimeError" in caplog.text


async def test_a_delete_that_conflicts_is_observed_with_the_purpose_of_what_it_met() -> None:
    observed: list[Observation] = []
    async with limpet.open("memory:") as store:
        kept = SemanticStore(store, observer=observed.append)
        await kept.kv_put(KEY, {}, writer="a:b", semantics={"purpose": "cursor"})
        with pytest.raises(VersionConflict):
            await kept.kv_delete(KEY, writer="a:b", expected_version=7)

    assert [(one.verb, one.outcome, one.purpose) for one in observed] == [
        ("kvPut", "success", "cursor"),
        ("kvDelete", "conflict", "cursor"),
    ]
