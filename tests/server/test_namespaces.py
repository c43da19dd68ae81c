"""The names of namespaces that are written to: stored beside the first write, finished or given up at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from limpet.clock import ManualClock
from limpet.errors import Unavailable
from limpet.opening import open_session
from limpet.server import namespaces
from limpet.server.dispatch import Dispatcher, TrustedCaller
from limpet.server.namespaces import OWN_NAMESPACE, WrittenNamespaces
from limpet.server.operations import OPERATIONS
from limpet.server.requests import request_of
from limpet.session import Session
from limpet.store import Store


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def session(clock: ManualClock) -> AsyncIterator[Session]:
    opened = await open_session("memory:", clock=clock, max_value_bytes=1000, window=None)
    yield opened
    await opened.close()


async def stored(session: Session) -> list[str]:
    return (await Store(session, OWN_NAMESPACE).keys("namespace/")).keys


async def put(dispatcher: Dispatcher, namespace: str) -> None:
    operation = OPERATIONS["put"]
    request = request_of(operation.request, {"key": "k", "value": 1})
    await dispatcher.run(operation, namespace, request, TrustedCaller())


async def test_a_later_server_sweeps_the_namespaces_that_were_written_to(session: Session) -> None:
    written = WrittenNamespaces(session)
    dispatcher = Dispatcher(session, "http", namespaces=written)
    await put(dispatcher, "trivia")
    await put(dispatcher, "quiz")
    await written.close()

    assert await stored(session) == ["namespace/quiz", "namespace/trivia"]
    assert await WrittenNamespaces(session).load() == ["quiz", "trivia"]


async def test_a_write_that_was_acknowledged_has_its_name_stored(session: Session) -> None:
    """A server that is killed right after its first reply leaves an entry that a later server must sweep."""
    await put(Dispatcher(session, "http"), "trivia")

    assert await stored(session) == ["namespace/trivia"]


async def test_a_read_leaves_no_name(session: Session) -> None:
    written = WrittenNamespaces(session)
    operation = OPERATIONS["get"]
    dispatcher = Dispatcher(session, "http", namespaces=written)
    await dispatcher.run(operation, "trivia", request_of(operation.request, {"key": "k"}), TrustedCaller())
    await written.close()

    assert await stored(session) == []


class Failing:
    """Commits to the server's own namespace fail, as long as this is on."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on, self.attempts = True, 0
        commit = session.engine.commit

        async def fail(namespace: str, batch: Any) -> Any:
            if namespace == OWN_NAMESPACE and self.is_on:
                self.attempts += 1
                raise Unavailable("away")
            return await commit(namespace, batch)

        monkeypatch.setattr(session.engine, "commit", fail)


async def advance(clock: ManualClock, is_so: Callable[[], bool]) -> None:
    """Let time pass until something is so."""
    while not is_so():
        clock.advance(60)
        await asyncio.sleep(0)


async def test_a_write_does_not_wait_long_for_a_name_and_a_name_is_tried_again(
    session: Session, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(session, monkeypatch)
    written = WrittenNamespaces(session)

    await put(Dispatcher(session, "http", namespaces=written), "trivia")
    await advance(clock, lambda: failing.attempts >= 20)
    failing.is_on = False
    await advance(clock, lambda: written._task is None)

    assert await stored(session) == ["namespace/trivia"]


@pytest.mark.parametrize("by", ["close", "session"])
async def test_a_name_that_cannot_be_stored_is_given_up_at_the_end_with_a_log_line(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    Failing(session, monkeypatch)
    monkeypatch.setattr(namespaces, "CLOSE_S", 0.01)
    written = WrittenNamespaces(session)
    written.add("trivia")
    written.add("trivia")
    await (written.close() if by == "close" else session.close())

    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "the names of 1 namespaces were not stored: a later server sweeps each after its next write"
    ]
    assert not session.background


async def test_names_that_wait_are_bounded(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "WAITING_MAX", 2)
    written = WrittenNamespaces(session)
    for name in ("a", "b", "c"):
        written.add(name)
    await written.close()
    assert await stored(session) == ["namespace/a", "namespace/b"]

    written.add("c")
    await written.close()
    assert await stored(session) == ["namespace/a", "namespace/b", "namespace/c"]
