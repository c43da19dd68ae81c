"""A span for every request, by whatever tracer is handed over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

import limpet
from limpet.errors import Conflict
from limpet.server.dispatch import Call, Dispatcher, TrustedCaller
from limpet.server.operations import OPERATIONS
from limpet.server.requests import request_of
from limpet.server.traces import Traces


class Recorder:
    """A tracer, and its only span."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, dict[str, str]]] = []
        self.times: list[int | None] = []
        self.status: Any = None

    def start_span(
        self, name: str, *, attributes: Mapping[str, str] | None = None, start_time: int | None = None
    ) -> Recorder:
        self.spans.append((name, dict(attributes or {})))
        self.times.append(start_time)
        return self

    def set_status(self, status: Any, description: str | None = None) -> None:
        self.status = (status, description)

    def end(self, end_time: int | None = None) -> None:
        self.times.append(end_time)


async def test_a_request_is_a_span_with_what_came_of_it_and_without_key_or_value() -> None:
    recorder, before = Recorder(), time.time_ns()
    async with limpet.open("memory:", namespace="trivia", sweep=False) as store:
        dispatcher = Dispatcher(store._session, "http", observers=[Traces(recorder)])

        async def ask(operation: str, **members: Any) -> None:
            row = OPERATIONS[operation]
            await dispatcher.run(row, "trivia", request_of(row.request, members), TrustedCaller())

        await ask("set", key="the-key", value="the-value")
        with pytest.raises(Conflict):
            await ask("cas", key="the-key", value="the-value", expect={"version": 9})
        dispatcher.report_refusal(TrustedCaller(), "trivia", "made-up", ValueError("the-value"))

    common = {"db.system.name": "limpet", "db.namespace": "trivia", "limpet.face": "http", "limpet.caller": "anonymous"}
    assert recorder.spans == [
        ("limpet set", {**common, "db.operation.name": "set"}),
        ("limpet cas", {**common, "db.operation.name": "cas", "error.type": "conflict"}),
        ("limpet other", {**common, "db.operation.name": "other", "error.type": "internal"}),
    ]
    assert None not in recorder.times
    assert before <= min(time for time in recorder.times if time) <= max(time for time in recorder.times if time)


def test_only_what_the_server_did_wrong_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limpet.server.traces._error_status", lambda: "ERROR")
    recorder = Recorder()
    traces = Traces(recorder)
    request = request_of(OPERATIONS["get"].request, {"key": "k"})

    traces.done(Call("http", "alice", "trivia", "get", request, 0.1, error=limpet.errors.NotFound("k")))
    assert recorder.status is None
    traces.done(Call("http", "alice", "trivia", "get", request, 0.1, error=limpet.errors.Unavailable("away")))
    assert recorder.status == ("ERROR", "unavailable")
