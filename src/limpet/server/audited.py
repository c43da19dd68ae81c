"""Semantic entries on a server: which namespaces are audited, and who observes their writes.

An audited namespace is written by the semantic verbs alone. Any other write would leave no row in the audit trail, and
is refused; so is a batch that a client commits itself, because only the server has the keys of the trail. The trail is
sealed in the background while the server runs.
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
"""How long the last sealing may take when the server stops. The next server seals the rows that remain."""


class AuditedNamespaces:
    """The semantic stores of a server's namespaces. A check of the dispatcher.

    Args:
        audit: The keys of the trail; not needed without audited namespaces.
        audited: The namespaces that have a trail.
        observers: Called with each write and each conflict.
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

    def semantic_store(self, store: Store) -> SemanticStore:
        """The semantic entries of a namespace, with its audit trail if it has one."""
        audit = self._audit if store.name in self._audited else None
        return SemanticStore(store, audit=audit, observer=self._notify)

    async def check(self, store: Store, operation: Operation, request: Request) -> None:
        """Raise `PermissionDenied` for a request that would change an audited namespace and leave no row."""
        if store.name in self._audited and _leaves_no_row(operation, request):
            raise PermissionDenied(
                f"namespace {store.name!r} is audited, and this would leave no row in its trail: "
                "write with kv_put, kv_delete and kv_batch"
            )

    @contextlib.asynccontextmanager
    async def sealing(self, session: Session) -> AsyncIterator[None]:
        """Seal the trails while the body runs, and once more after it."""
        async with contextlib.AsyncExitStack() as sealers:
            stores = [self.semantic_store(Store(session, name)) for name in sorted(self._audited)]
            sealers.push_async_callback(self._seal_last, stores)
            for store in stores:
                await sealers.enter_async_context(store)
            yield

    async def _seal_last(self, stores: Sequence[SemanticStore]) -> None:
        try:
            async with asyncio.timeout(LAST_SEAL_S):
                for store in stores:
                    await store.seal()
        except (LimpetError, TimeoutError) as error:
            log.warning("a trail has rows that the next server will seal: %s", type(error).__name__)

    def _notify(self, observation: Observation) -> None:
        for observer in self._observers:
            observer(observation)


def _leaves_no_row(operation: Operation, request: Request) -> bool:
    if isinstance(request, Primitive):
        # The trail has no rows of locks, and it records an expiry by itself.
        batch = request.what
        return isinstance(batch, Batch) and any(
            write.family != "lock" and not isinstance(write, Expire) for write in batch.writes
        )
    return operation.right_for(request) == "write" and not operation.is_semantic
