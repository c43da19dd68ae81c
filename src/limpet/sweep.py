"""Expiry, as ordinary commits; and the trimming of the log.

An expired entry is already invisible: reads and guards treat it as absent. The sweeper
records that in the log. It lists the entries that are due and commits an `Expire` for
each, which the engine applies only if the entry is still the one that was due. Watchers
and the audit trail see an expiry as they see a delete.

Several sweepers may run at once. One of them ends an entry; for the others nothing happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from limpet.clock import Clock
from limpet.engine import Engine
from limpet.errors import Closed, TransientError
from limpet.model import Batch, Commit, Window
from limpet.retry import Outage

log = logging.getLogger("limpet.sweep")

SWEEP_S: Final = 1.0
SWEEP_MAX: Final = 250
SWEEP_MIN: Final = 50
SWEEP_LONG_S: Final = 0.02
TRIM_S: Final = 10.0


class Round(NamedTuple):
    """The result of one background pass over all namespaces.

    Attributes:
        ended: How many entries it ended, for the namespaces where it ended any.
        failed: The errors of the namespaces that could not be swept or trimmed.
        seconds: How long it took, the trimming included.
    """

    ended: Mapping[str, int]
    failed: Mapping[str, Exception]
    seconds: float


class Sweeper:
    """Sweeps the namespaces that this process has opened.

    Attributes:
        listeners: Called after every round. They must be quick, and must not raise.
    """

    def __init__(self, engine: Engine, clock: Clock, window: Window) -> None:
        self._engine = engine
        self._clock = clock
        self.window = window
        self.listeners: list[Callable[[Round], None]] = []
        self._namespaces: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._outages: dict[str, Outage] = {}
        self._retry_at: dict[str, float] = {}

    @property
    def namespaces(self) -> list[str]:
        """The namespaces that it sweeps, in no order."""
        return list(self._namespaces)

    def add_namespace(self, namespace: str) -> None:
        """Sweep this namespace from now on."""
        self._namespaces.add(namespace)

    def start(self) -> None:
        """Sweep in the background of the running loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="limpet-sweeper")

    async def stop(self) -> None:
        """End the background work."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def forget_loop(self) -> None:
        """Drop a background task whose loop is gone, as after a fork."""
        self._task = None

    async def sweep(self, namespace: str) -> int:
        """End everything that is due now. Returns how many entries this call ended."""
        total, limit = 0, SWEEP_MAX
        while due := await self._engine.due(namespace, limit=limit):
            began = self._clock.monotonic()
            outcome = await self._engine.commit(namespace, Batch((), tuple(due)))
            # A concurrent writer waits as long as this took, so a slow commit makes the next one smaller.
            limit = max(SWEEP_MIN, limit // 2) if self._clock.monotonic() - began > SWEEP_LONG_S else limit
            ended = sum(entry is not None for entry in outcome.ended) if isinstance(outcome, Commit) else 0
            total += ended
            if ended == 0:
                # Another sweeper ended them first.
                break
        return total

    async def trim(self, namespace: str) -> int:
        """Drop changes that the log need not keep. Returns how many changes this call dropped."""
        total = 0
        while dropped := await self._engine.trim(namespace, self.window):
            total += dropped
        return total

    async def _run(self) -> None:
        trim_at = self._clock.monotonic() + TRIM_S
        while True:
            await self._clock.sleep(SWEEP_S)
            trims = self._clock.monotonic() >= trim_at
            if trims:
                trim_at = self._clock.monotonic() + TRIM_S
            try:
                done = await self._run_round(trims=trims)
            except Closed:
                return
            for listener in self.listeners:
                listener(done)

    async def _run_round(self, *, trims: bool) -> Round:
        began = self._clock.monotonic()
        ended: dict[str, int] = {}
        failed: dict[str, Exception] = {}
        for namespace in self.namespaces:
            if self._retry_at.get(namespace, began) > began:
                continue
            try:
                if count := await self.sweep(namespace):
                    ended[namespace] = count
                if trims:
                    await self.trim(namespace)
            except Closed:
                raise
            except Exception as error:
                failed[namespace] = error
                self._postpone(namespace, error)
            else:
                self._retry_at.pop(namespace, None)
                if namespace in self._outages:
                    self._outages.pop(namespace).record_success()
        return Round(ended, failed, self._clock.monotonic() - began)

    def _postpone(self, namespace: str, error: Exception) -> None:
        """Skip a failing namespace for a while, longer each time; after a transient error the next round tries it."""
        outage = self._outages.setdefault(namespace, Outage(log, f"sweep of namespace {namespace}"))
        pause_s = outage.record_failure(error)
        if not isinstance(error, TransientError):
            self._retry_at[namespace] = self._clock.monotonic() + pause_s
