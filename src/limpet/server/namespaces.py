"""The namespaces that were written to through a server, kept in the server's own namespace.

A server that starts later loads the list, and sweeps those namespaces too. The name of a namespace is stored while its
first write runs, and the write is acknowledged when both are done: a server that is killed right after its reply leaves
nothing that no later server sweeps. When the name cannot be stored, the write waits for `STORED_S` at most, and the
name is tried again until it works or the server ends. At most `WAITING_MAX` names wait at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Final

from limpet.errors import Closed
from limpet.keys import BATCH_WRITES_MAX
from limpet.retry import Outage
from limpet.session import Session
from limpet.store import Store

__all__ = ["OWN_NAMESPACE", "WrittenNamespaces"]

log = logging.getLogger("limpet.server")

OWN_NAMESPACE: Final = "limpet-server"
"""Where the server keeps its own state: tokens, and which namespaces it serves. No caller reaches it."""

WAITING_MAX: Final = 1_000
STORED_S: Final = 0.5
"""How long a write waits for the name of its namespace after the write itself is done."""
CLOSE_S: Final = 1.0
"""How long the last names may take to be stored when the server ends."""

_PREFIX: Final = "namespace/"


class WrittenNamespaces:
    """The names, as far as this server knows them, and those that are still to be stored."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stored: set[str] = set()
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def load(self) -> list[str]:
        """Have the sweeper of this session sweep every namespace that is stored. Returns their names."""
        names = [entry.key.removeprefix(_PREFIX) async for entry in self._store.scan(_PREFIX)]
        for name in names:
            self._session.sweeper.add_namespace(name)
        self._stored.update(names)
        return names

    def add(self, namespace: str) -> None:
        """Begin to store a name, unless it is stored. Beyond `WAITING_MAX`, the next write adds it."""
        if namespace in self._stored or namespace in self._waiting or len(self._waiting) >= WAITING_MAX:
            return
        loop = asyncio.get_running_loop()
        self._waiting[namespace] = loop.create_future()
        if self._task is None:
            self._task = loop.create_task(self._store_names(), name="limpet-namespaces")
            # So that it ends with the session, also where no one calls `close`.
            self._session.background.add(self._task)
            self._task.add_done_callback(self._end)

    async def wait_until_stored(self, namespace: str) -> None:
        """Wait for a name that is being stored, and for `STORED_S` at most."""
        if (storing := self._waiting.get(namespace)) is not None:
            await asyncio.wait([storing], timeout=STORED_S)

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
            names = list(itertools.islice(self._waiting, BATCH_WRITES_MAX))
            draft = store.batch()
            for name in names:
                draft.put(_PREFIX + name, True)
            try:
                await draft.commit()
            except Closed:
                return
            except Exception as error:
                await self._session.clock.sleep(outage.record_failure(error))
                continue
            outage.record_success()
            self._stored.update(names)
            for name in names:
                self._waiting.pop(name).set_result(None)
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
            for storing in self._waiting.values():
                storing.cancel()
            self._waiting.clear()
