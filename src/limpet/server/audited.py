"""Semantic entries on a server: which namespaces are audited, and who hears of what is written.

A namespace that is audited has one way in. What writes to it by other verbs would leave no row in the trail, and is
refused; so is what a client commits by itself, because the keys of the trail are the server's. Its trail is sealed in
the background for as long as the server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Final

from limpet.errors import LimpetError, PermissionDenied
from limpet.model import Batch, Expire
from limpet.semantic.store import Audit, Observation, SemanticStore
from limpet.server.operations import Operation
from limpet.server.requests import Primitive, Request
from limpet.session import Session
from limpet.store import Store

__all__ = ["AuditedNamespaces"]

log = logging.getLogger("limpet.server")

LAST_SEAL_S: Final = 1.0
"""How long the last sealing may take when the server ends. What it leaves, the next server seals."""


class AuditedNamespaces:
    """What a server makes of a namespace when semantic verbs are asked for. A gate of the dispatcher.

    Args:
        audit: The keys of the trail; not needed where nothing is audited.
        audited: The namespaces that have a trail.
        observers: Are told of each write, and of each conflict.
    """

    def __init__(
        self,
        audit: Audit | None = None,
        audited: Collection[str] = (),
        observers: Sequence[Callable[[Observation], None]] = (),
    ) -> None:
        self._audit = audit
        self._audited = frozenset(audited)
        self._observers = observers

    def of(self, store: Store) -> SemanticStore:
        """The semantic entries of a namespace."""
        return SemanticStore(store, audit=self._audit if store.name in self._audited else None, observer=self._tell)

    async def check(self, store: Store, operation: Operation, asked: Request) -> None:
        """Let a request pass, unless it would change an audited namespace and leave no row."""
        if store.name in self._audited and _leaves_no_row(operation, asked):
            raise PermissionDenied(
                f"namespace {store.name!r} is audited, and this would leave no row in its trail: "
                "write with kv_put, kv_delete and kv_batch"
            )

    @contextlib.asynccontextmanager
    async def sealing(self, session: Session) -> AsyncIterator[None]:
        """Seal the trails for as long as the body runs, and once more behind it."""
        async with contextlib.AsyncExitStack() as sealers:
            kept = [self.of(Store(session, name)) for name in sorted(self._audited)]
            sealers.push_async_callback(self._seal_last, kept)
            for one in kept:
                await sealers.enter_async_context(one)
            yield

    async def _seal_last(self, kept: Sequence[SemanticStore]) -> None:
        try:
            async with asyncio.timeout(LAST_SEAL_S):
                for one in kept:
                    await one.seal()
        except (LimpetError, TimeoutError) as error:
            log.warning("a trail has rows that the next server will seal: %s", type(error).__name__)

    def _tell(self, observation: Observation) -> None:
        for observer in self._observers:
            observer(observation)


def _leaves_no_row(operation: Operation, asked: Request) -> bool:
    if isinstance(asked, Primitive):
        # Locks and expiry are no business of the trail: it tells of an expiry by itself.
        batch = asked.what
        return isinstance(batch, Batch) and any(
            write.family != "lock" and not isinstance(write, Expire) for write in batch.writes
        )
    return operation.right_for(asked) == "write" and not operation.is_semantic
