"""The namespaces that were written to through a server, kept in the server's own namespace.

A server that starts later loads the list, and sweeps those namespaces too. The first write to a namespace does not wait
for its name to be stored: that happens in the background, at most `WAITING_MAX` names at a time, and is tried again
until it works or the server ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from limpet.errors import Closed
from limpet.retry import Outage
from limpet.session import Session
from limpet.store import Store

__all__ = ["OWN_NAMESPACE", "WrittenNamespaces"]

log = logging.getLogger("limpet.server")

OWN_NAMESPACE: Final = "limpet-server"
"""Where the server keeps its own state: tokens, and which namespaces it serves. No caller reaches it."""

WAITING_MAX: Final = 1_000
CLOSE_S: Final = 1.0
"""How long the last names may take to be stored when the server ends."""

_PREFIX: Final = "namespace/"


class WrittenNamespaces:
    """The names, as far as this server knows them, and those that are still to be stored."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stored: set[str] = set()
        self._waiting: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None

    async def load(self) -> list[str]:
        """Have the sweeper of this session sweep every namespace that is stored. Returns their names."""
        names = [entry.key.removeprefix(_PREFIX) async for entry in self._store.scan(_PREFIX)]
        for name in names:
            self._session.sweeper.add_namespace(name)
        self._stored.update(names)
        return names

    def add(self, namespace: str) -> None:
        """Have a name stored in the background, unless it is. Beyond `WAITING_MAX`, the next write adds it."""
        if namespace in self._stored or namespace in self._waiting or len(self._waiting) >= WAITING_MAX:
            return
        self._waiting[namespace] = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._store_names(), name="limpet-namespaces")
            # So that it ends with the session, also where no one calls `close`.
            self._session.background.add(self._task)
            self._task.add_done_callback(self._end)

    async def close(self) -> None:
        """Wait until every name is stored, and for `CLOSE_S` at most."""
        task = self._task
        if task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.wait([task])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @property
    def _store(self) -> Store:
        return Store(self._session, OWN_NAMESPACE)

    async def _store_names(self) -> None:
        outage = Outage(log, "storing the name of a namespace that is written to")
        store = self._store
        while self._waiting:
            name = next(iter(self._waiting))
            try:
                if await store.entry(_PREFIX + name) is None:
                    await store.put(_PREFIX + name, True)
            except Closed:
                return
            except Exception as error:
                await self._session.clock.sleep(outage.record_failure(error))
                continue
            outage.record_success()
            self._stored.add(name)
            del self._waiting[name]
        # Here and not in `_end`, which runs later: a name that is added in between needs a new task.
        self._task = None

    def _end(self, task: asyncio.Task[None]) -> None:
        self._session.background.discard(task)
        if self._task is task:
            self._task = None
            log.warning(
                "the names of %d namespaces were not stored: a later server sweeps each after its next write",
                len(self._waiting),
            )
            self._waiting.clear()
