"""One opened engine, and what the stores of its namespaces share.

A session holds the engine and the clock, runs the sweeper, and retries transient failures. It
keeps a hub for each namespace that is watched, and the turns of callers that want the same lock
or update the same key. A write whose outcome is unknown is sent again under the same request id,
so that the engine returns the first result if there was one.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from limpet.clock import Clock
from limpet.engine import Engine
from limpet.errors import Ambiguous, Closed, TransientError
from limpet.hub import Hub
from limpet.keys import VALUE_BYTES_MAX
from limpet.model import Batch, Commit, Entry, Family, Refusal, Window
from limpet.retry import ATTEMPTS, pause_s, retry
from limpet.sweep import Sweeper
from limpet.turns import Turns

if TYPE_CHECKING:
    from limpet.append import Appender

T = TypeVar("T")


class Session:
    """An opened engine with its background work."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        value_bytes_max: int = VALUE_BYTES_MAX,
        window: Window | None = None,
        writer: str | None = None,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.value_bytes_max = value_bytes_max
        # The name that its writes have.
        self.writer = writer
        self.sweeper = Sweeper(engine, clock, window or Window())
        self.turns = Turns()
        self._ended = threading.Event()
        # Background tasks beside the sweeper and the hubs. They end with the session.
        self.background: set[asyncio.Task[None]] = set()
        # Commits for several callers. Closing waits for them.
        self._finishing: set[asyncio.Task[None]] = set()
        self.appenders: dict[tuple[str, str, asyncio.AbstractEventLoop | None], Appender] = {}
        self._hubs: dict[str, Hub] = {}
        self._followed: Engine | None = None

    def with_value_limit(self, value_bytes_max: int) -> Session:
        """Copy the session with another limit for values. Closing one closes both."""
        twin = copy.copy(self)
        twin.value_bytes_max = value_bytes_max
        return twin

    def with_writer(self, writer: str | None) -> Session:
        """Copy the session for another writer. Closing one closes both."""
        twin = copy.copy(self)
        twin.writer = writer
        # A commit of several appends has one writer.
        twin.appenders = {}
        return twin

    def with_engine(self, engine: Engine) -> Session:
        """Copy the session with another engine in front. Both share their hubs, which follow the first engine."""
        twin = copy.copy(self)
        twin.engine = engine
        twin.appenders = {}
        twin._followed = self._followed or self.engine
        return twin

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._ended.is_set()

    async def commit(self, namespace: str, batch: Batch) -> Commit | Refusal:
        """Commit a batch. After an unknown outcome, send it again under the same request id."""
        try:
            return await self.engine.commit(namespace, batch)
        except (Ambiguous, TransientError) as error:
            return await self.commit_again(namespace, batch, error)

    async def commit_again(self, namespace: str, batch: Batch, error: Ambiguous | TransientError) -> Commit | Refusal:
        """Commit a batch after a first attempt failed."""
        unknown: Ambiguous | None = None
        for attempt in range(1, ATTEMPTS + 1):
            if isinstance(error, Ambiguous):
                unknown = error
                since = error.since if batch.retry_since is None else min(batch.retry_since, error.since)
                batch = msgspec.structs.replace(batch, request_id=error.request_id, retry_since=since)
            if attempt == ATTEMPTS:
                break
            await self.clock.sleep(pause_s(attempt))
            try:
                return await self.engine.commit(namespace, batch)
            except (Ambiguous, TransientError) as latest:
                error = latest
        raise unknown or error

    async def read(self, namespace: str, key: str, *, family: Family = "data") -> Entry | None:
        """Read one entry, with retries."""
        try:
            return (await self.engine.read(namespace, (key,), family=family))[0]
        except TransientError:
            return await self.read_again(namespace, key, family=family)

    async def read_again(self, namespace: str, key: str, *, family: Family = "data") -> Entry | None:
        """Read one entry after a first attempt failed."""
        await self.clock.sleep(pause_s(1))
        entries = await retry(self.clock, lambda: self.engine.read(namespace, (key,), family=family), attempt=2)
        return entries[0]

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run a call that changes nothing, and run it again after transient errors."""
        return await retry(self.clock, call)

    def start_to_finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Start work in a task of its own. Closing the session waits until it is done."""
        task = asyncio.create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    def hub(self, namespace: str) -> Hub:
        """Get the hub of a namespace."""
        self.check_open()
        found = self._hubs.get(namespace)
        if found is None:
            found = self._hubs[namespace] = Hub(self._followed or self.engine, namespace, self.clock)
        return found

    def watch_lags(self) -> dict[str, list[int]]:
        """Count, for each watched namespace, how many revisions each of its watches is behind."""
        return {name: lags for name, hub in self._hubs.items() if (lags := hub.lags())}

    def check_open(self) -> None:
        """Raise `Closed` when the session has been closed."""
        if self.closed:
            raise Closed

    def forget_loop(self) -> None:
        """Drop everything that lived on an event loop that is gone, as in a child after a fork."""
        self._hubs.clear()
        self.background.clear()
        self._finishing.clear()
        self.appenders.clear()
        self.sweeper.forget_loop()

    async def close(self) -> None:
        """End watches and background work, then close the engine. Safe to call twice."""
        if self.closed:
            return
        self._ended.set()
        await self.sweeper.stop()
        await asyncio.gather(*self._finishing)
        if self.background:
            for task in (background := [*self.background]):
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        for hub in self._hubs.values():
            await hub.close()
        await self.engine.close()
