"""Semantic entries without await: the same verbs, in any thread.

There is no second implementation: a verb runs the coroutine of `limpet.semantic.store`, as `limpet.sync` does for a
store. Verbs that hold a lock (sealing, verifying, pruning) run on the loop of the store.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from limpet import sync
from limpet.clock import Clock
from limpet.draft import Fence, Fencing
from limpet.errors import Closed, InvalidValue
from limpet.semantic import deadletters as _deadletters
from limpet.semantic import store as _semantic
from limpet.semantic.audit import Audit
from limpet.semantic.copies import GRACE_S
from limpet.semantic.deadletters import KEEP_S
from limpet.semantic.keys import check_prefix
from limpet.semantic.model import Envelope, Semantics
from limpet.semantic.observe import Observation
from limpet.semantic.policy import OutageAlert, RetryPolicy
from limpet.sync import Proxy, mirror, require_plain

__all__ = ["DeadLetters", "SemanticStore", "Watch"]


class SemanticStore(Proxy):
    """Semantic entries in a namespace, without await.

    With ``with`` it also records in the background what has expired, and an audited one seals its trail. Closing the
    store is left to its owner. The arguments are those of `limpet.semantic.store.SemanticStore`. ``observer``,
    ``on_outage`` and the ``progress`` of `prune` may be called on the loop of the store, and so must not call the
    store.
    """

    _twin: _semantic.SemanticStore

    def __init__(
        self,
        store: sync.Store,
        *,
        audit: Audit | None = None,
        anchor: str | None = None,
        clock: Clock | None = None,
        policy: RetryPolicy | None = None,
        dead_letters: DeadLetters | None = None,
        observer: Callable[[Observation], None] | None = None,
        on_outage: Callable[[OutageAlert], None] | None = None,
        dice: Callable[[], float] = random.random,
        grace_s: float = GRACE_S,
    ) -> None:
        if dead_letters is not None:
            dead_letters._check_beside(store)
        twin = _semantic.SemanticStore(
            store._twin,
            audit=audit,
            anchor=anchor,
            clock=clock,
            policy=policy,
            dead_letters=None if dead_letters is None else dead_letters._twin,
            observer=observer,
            on_outage=on_outage,
            dice=dice,
            grace_s=grace_s,
        )
        super().__init__(twin, store._runner)
        self.store = store
        self.dead_letters = dead_letters
        self.policy = twin.policy

    key = mirror(_semantic.SemanticStore.key)
    identifier = mirror(_semantic.SemanticStore.identifier)
    kv_get = mirror(_semantic.SemanticStore.kv_get)
    kv_list = mirror(_semantic.SemanticStore.kv_list)
    kv_put = mirror(_semantic.SemanticStore.kv_put)
    kv_delete = mirror(_semantic.SemanticStore.kv_delete)
    kv_batch = mirror(_semantic.SemanticStore.kv_batch)
    recover = mirror(_semantic.SemanticStore.recover)
    submit = mirror(_semantic.SemanticStore.submit)
    wait_until_available = mirror(_semantic.SemanticStore.wait_until_available)
    seal = mirror(_semantic.SemanticStore.seal, on_loop=True)
    verify = mirror(_semantic.SemanticStore.verify, on_loop=True)
    prune = mirror(_semantic.SemanticStore.prune, on_loop=True)

    def advance(
        self,
        key: str,
        change: Callable[[Envelope | None], dict[str, Any] | None],
        *,
        writer: str,
        semantics: Semantics | dict[str, Any],
        request_id: str | None = None,
        spec_ref: str | None = None,
        held: Envelope | None = None,
        fence: Fencing | Fence | None = None,
    ) -> Envelope | None:
        """Change a key by a require_plain function of its entry; see `limpet.semantic.store.SemanticStore.advance`.

        The function runs in this thread, and may use the store.
        """
        if inspect.iscoroutinefunction(change):
            raise TypeError("advance() of the sync API needs a require_plain function, and this one is async")
        return self._runner.run_with(
            require_plain(change),
            lambda checked_change: self._twin.advance(
                key,
                checked_change,
                writer=writer,
                semantics=semantics,
                request_id=request_id,
                spec_ref=spec_ref,
                held=held,
                fence=fence,
            ),
        )

    def watch(self, prefix: str, *, initial: bool = True) -> Watch:
        """The entries under a prefix, and every change of them: a key with its envelope, or None when it ended."""
        return Watch(self.store.watch(f"{check_prefix(prefix)}*", initial=initial))

    def __enter__(self) -> Self:
        self._runner.wait(self._twin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A store that is already closed has stopped the background task, too.
        with contextlib.suppress(Closed):
            self._runner.wait(self._twin.__aexit__(kind, error, trace))


class Watch:
    """Entries and their changes: an iterator that blocks until the next one.

    Closing it, or the store, from another thread ends it.
    """

    def __init__(self, events: sync.Watch) -> None:
        self._events = events

    def __iter__(self) -> Iterator[tuple[str, Envelope | None]]:
        return self

    def __next__(self) -> tuple[str, Envelope | None]:
        for event in self._events:
            change = _semantic.read_change(event)
            if change is not None:
                return change
        raise StopIteration

    def close(self) -> None:
        """End this watch, also for a thread that waits for its next change."""
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DeadLetters(Proxy):
    """The letters in a namespace, without await. See `limpet.semantic.deadletters.DeadLetters`."""

    _twin: _deadletters.DeadLetters

    def __init__(self, store: sync.Store, *, keep_s: float = KEEP_S) -> None:
        super().__init__(_deadletters.DeadLetters(store._twin, keep_s=keep_s), store._runner)

    @classmethod
    def beside(cls, store: sync.Store, *, keep_s: float = KEEP_S) -> DeadLetters:
        """The letters of a store, in the same engine: in the namespace ``<name>-deadletters``."""
        return cls(store.namespace(store.name + _deadletters.SUFFIX), keep_s=keep_s)

    list = mirror(_deadletters.DeadLetters.list)
    show = mirror(_deadletters.DeadLetters.show)
    drop = mirror(_deadletters.DeadLetters.drop)

    def replay(self, name: str, target: SemanticStore, *, expected_version: int | None = None) -> Envelope:
        """Make the write of a letter, and drop the letter; see `limpet.semantic.deadletters.DeadLetters.replay`."""
        self._check_beside(target.store)
        return target._runner.run(self._twin.replay(name, target._twin, expected_version=expected_version))

    def _check_beside(self, store: sync.Store) -> None:
        """Refuse letters that can only be written on the loop of another store."""
        if self._runner is not store._runner and not self._runner.inline:
            raise InvalidValue(
                "the dead letters of a sync store must be in the engine of their store, or in SQLite or memory"
            )
