"""Bugs on purpose: a test of the tests.

Each function here breaks one promise inside a running Limpet. Loaded as a pytest plugin with the
environment variable ``LIMPET_PLANTED`` naming one of them, it breaks the Limpet that the suite then
judges. `tests/test_planted_bugs.py` runs the suite once for each and fails if the suite passes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from limpet import hub, model, transition
from limpet.engines import memory
from limpet.engines.sqlite import engine as sqlite
from limpet.engines.sqlite.group import GroupWriter
from limpet.model import Batch, Change, Commit, Entry, HeldBy, Refusal

# The suite is asked as this tree holds it: any name below may move with the code it breaks.
# mypy: disable-error-code="method-assign, attr-defined, assignment"


def version_not_restarting() -> None:
    """A key that is created again goes on counting from its earlier life."""
    right, latest = transition._make_entry, dict[str, int]()

    def wrong(write: Any, current: Entry | None, *rest: Any) -> Entry:
        entry = right(write, current, *rest)
        if current is None and write.key in latest:
            entry = msgspec.structs.replace(entry, version=latest[write.key] + 1)
        latest[write.key] = entry.version
        return entry

    transition._make_entry = wrong


def revision_reused() -> None:
    """A delete gives its revision back."""
    right = memory._Namespace.apply

    def wrong(self: Any, change: Change) -> None:
        before = self.revision
        right(self, change)
        if change.op == "delete":
            self.revision = before

    memory._Namespace.apply = wrong


def early_expiry() -> None:
    """Everything expires a tenth of a second too soon."""
    right = model.live

    def wrong(entry: Entry | None, now_ms: int) -> Entry | None:
        return right(entry, now_ms + 100)

    for module in (transition, memory, sqlite):
        module.live = wrong


def expired_visible_in_scan() -> None:
    """A scan shows what has expired until the sweeper comes."""
    right = memory.MemoryEngine.scan

    async def wrong(self: Any, *args: Any, **options: Any) -> Any:
        memory.live = lambda entry, now_ms: entry
        try:
            return await right(self, *args, **options)
        finally:
            memory.live = model.live

    memory.MemoryEngine.scan = wrong


def refused_batch_leaves_a_trace() -> None:
    """A refused batch has done its first write."""
    right = memory.MemoryEngine.commit

    async def wrong(self: Any, namespace: str, batch: Batch) -> Commit | Refusal:
        outcome = await right(self, namespace, batch)
        if isinstance(outcome, Refusal) and len(batch.writes) > 1:
            await right(self, namespace, msgspec.structs.replace(batch, guards=(), writes=batch.writes[:1]))
        return outcome

    memory.MemoryEngine.commit = wrong


def group_shares_fate() -> None:
    """Where one member of a group is refused, all are."""
    right = GroupWriter._commit_group

    def wrong(self: Any, group: Any) -> Sequence[Any]:
        outcomes = right(self, group)
        refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
        return [refusals[0]] * len(outcomes) if refusals else outcomes

    GroupWriter._commit_group = wrong


def watch_drops_when_full() -> None:
    """A watcher that is behind gets the newest changes and no word about the others."""
    right = hub.Watch._follow

    async def wrong(self: Any) -> None:
        await right(self)
        while len(self._ready) > 64:
            self._ready.popleft()

    hub.Watch._follow = wrong


def lock_without_fence_check() -> None:
    """A fence always holds."""
    right = transition._holds
    transition._holds = lambda condition, found: isinstance(condition, HeldBy) or right(condition, found)


def receipt_in_a_second_step() -> None:
    """The write first, its receipt with the next commit that happens to come."""
    right, late = memory._Namespace.keep_receipt, dict[int, Entry]()

    def wrong(self: Any, receipt: Entry) -> None:
        owed = late.pop(id(self), None)
        if owed is not None:
            right(self, owed)
        late[id(self)] = receipt

    memory._Namespace.keep_receipt = wrong


def late_request_is_done() -> None:
    """A request is done that comes after its own retry."""
    memory._Namespace.check_superseded = lambda self, batch, now_ms: None


BUGS: dict[str, Callable[[], None]] = {
    bug.__name__: bug
    for bug in (
        version_not_restarting,
        revision_reused,
        early_expiry,
        expired_visible_in_scan,
        refused_batch_leaves_a_trace,
        group_shares_fate,
        watch_drops_when_full,
        lock_without_fence_check,
        receipt_in_a_second_step,
        late_request_is_done,
    )
}


def pytest_configure() -> None:
    """Plant the bug that the environment names."""
    BUGS[os.environ["LIMPET_PLANTED"]]()
