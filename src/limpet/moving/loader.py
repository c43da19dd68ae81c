"""Writing brought entries into a store: in batches, each compared with what is there.

An entry that is there already, exactly as it is brought, is left alone. That makes everything here safe to repeat: what
was written before an interruption is found, and the rest is written. What becomes of other entries is decided by a
policy, and each write is guarded by what the decision was made on, so that no write of another program is lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, Literal

import msgspec

import limpet
from limpet.checks import check_write
from limpet.errors import Conflict, LimpetError
from limpet.keys import BATCH_WRITES_MAX, check_key, check_namespace
from limpet.model import ABSENT, Batch, Entry, Guard, Import, Refusal, Revision, split_writer
from limpet.moving.entries import Brought, Rejected, Source
from limpet.request_ids import new_request_id

__all__ = ["Policy", "Progress", "Report", "load"]

Policy = Literal["refuse", "keep", "replace", "newer"]
"""What becomes of another entry that is there under the key: stop, keep it, replace it, or replace an older one."""

Progress = Callable[["Report"], None]

BATCH_BYTES: Final = 1_000_000
"""Less than a batch may have: large batches hold up the writers of a busy store."""

SHOWN_MAX: Final = 20
SAME_END_MS: Final = 2_000
"""How far the ends of two entries may be apart where the source counts down and gives no time."""


class OtherEntry(Conflict):
    """The store has another entry under a key, and the policy is to stop there."""

    advice = "What comes before it was written. --on-conflict decides what becomes of it and of the rest."

    def __init__(self, namespace: str, entry: Entry) -> None:
        super().__init__(entry.key, expected="no other entry", current=entry)
        found = f"version {entry.version} at revision {entry.revision}"
        self.args = (f"the store has another entry under {entry.key!r} in namespace {namespace!r}: {found}",)


class Report(msgspec.Struct):
    """What became of the entries that were brought.

    Attributes:
        read: How many were read.
        written: How many were written.
        same: How many were there already.
        kept: How many were left out because the store has another entry, which is newer or is to be kept.
        expired: How many had expired.
        rejected: How many cannot be stored.
        examples: Some of those that were kept or rejected: namespace, key and reason.
    """

    read: int = 0
    written: int = 0
    same: int = 0
    kept: int = 0
    expired: int = 0
    rejected: int = 0
    examples: list[tuple[str, str, str]] = []

    def note(self, namespace: str, key: str, reason: str) -> None:
        """Note an entry that was kept or rejected."""
        if len(self.examples) < SHOWN_MAX:
            self.examples.append((namespace, key, reason))


async def load(
    store: limpet.Store,
    source: Source,
    *,
    policy: Policy = "refuse",
    dry_run: bool = False,
    progress: Progress = lambda _: None,
    cause: str = "import",
) -> Report:
    """Write what a source brings into a store.

    The request ids begin with ``cause``, by which the log tells where an entry came from.

    Raises:
        Conflict: By the policy ``refuse``, another entry is there. What came before it is written.
    """
    report = Report()
    async for namespace, group in _grouped(source, report):
        await _load_group(store, namespace, group, policy, dry_run, report, cause)
        progress(report)
    return report


async def _grouped(source: Source, report: Report) -> AsyncIterator[tuple[str, list[Brought]]]:
    """What is brought, in groups of one namespace and family that fit into a batch."""
    group: list[Brought] = []
    size_bytes = 0
    async for item in source:
        report.read += 1
        fault = item.reason if isinstance(item, Rejected) else _find_fault(item)
        if fault is not None or isinstance(item, Rejected):
            report.rejected += 1
            key = item.key if isinstance(item, Rejected) else str(item.write.key)
            report.note(item.namespace, key, fault or "")
            continue
        weight_bytes = _weigh(item.write)
        place = item.namespace, item.write.family
        if group and (
            place != (group[0].namespace, group[0].write.family)
            or len(group) == BATCH_WRITES_MAX
            or size_bytes + weight_bytes > BATCH_BYTES
        ):
            yield group[0].namespace, group
            group, size_bytes = [], 0
        group.append(item)
        size_bytes += weight_bytes
    if group:
        yield group[0].namespace, group


def _find_fault(item: Brought) -> str | None:
    """Why an entry cannot be stored; None if it can."""
    try:
        check_namespace(item.namespace)
        check_key(item.write.key)
        check_write(item.write)
    except LimpetError as error:
        return str(error)
    return None


def _weigh(write: Import) -> int:
    return limpet.codec.size_bytes(write.stored) + len(write.key.encode())


async def _load_group(
    store: limpet.Store, namespace: str, group: list[Brought], policy: Policy, dry_run: bool, report: Report, cause: str
) -> None:
    """Write a group, and decide again where another writer was faster."""
    # Of a key that is brought twice, the last counts, as where it was written twice.
    pending = list({item.write.key: item for item in group}.values())
    report.same += len(group) - len(pending)
    keys, family = [item.write.key for item in pending], group[0].write.family
    session = store._session
    while True:
        found = await session.retry(lambda: session.engine.read(namespace, keys, family=family))
        now_ms = 0
        if any(item.write.expires_ms is not None for item in pending):
            now_ms = (await session.retry(lambda: session.engine.status(namespace))).now_ms
        decided = _decide(namespace, zip(pending, found, strict=True), policy, now_ms)
        if not decided.writes or dry_run:
            break
        bytes_max = max(limpet.codec.size_bytes(write.stored) for write in decided.writes)
        request_id, parts = f"{cause}-{new_request_id()}", (tuple(decided.guards), tuple(decided.writes))
        batch = Batch(*parts, request_id, value_bytes_max=bytes_max)
        if not isinstance(await session.commit(namespace, batch), Refusal):
            break
    report.written += len(decided.writes)
    report.same += decided.same
    report.expired += decided.expired
    report.kept += len(decided.kept)
    for key in decided.kept:
        report.note(namespace, key, "the store has another entry")


class _Decided(msgspec.Struct):
    """What to write, under which guards; how many are there already or have expired; and the keys to keep."""

    writes: list[Import] = []
    guards: list[Guard] = []
    same: int = 0
    expired: int = 0
    kept: list[str] = []


def _decide(namespace: str, pairs: Iterable[tuple[Brought, Entry | None]], policy: Policy, now_ms: int) -> _Decided:
    """Compare what is brought with what is there."""
    decided = _Decided()
    for item, entry in pairs:
        write = item.write
        if write.expires_ms is not None and write.expires_ms <= now_ms:
            decided.expired += 1
        elif entry is None:
            decided.writes.append(write)
            decided.guards.append(Guard(write.key, ABSENT, write.family))
        elif _is_same(item, entry):
            decided.same += 1
        elif policy == "replace" or (policy == "newer" and _is_newer(item, entry)):
            decided.writes.append(write)
            decided.guards.append(Guard(write.key, Revision(entry.revision), write.family))
        elif policy == "refuse":
            raise OtherEntry(namespace, entry)
        else:
            decided.kept.append(write.key)
    return decided


def _is_same(item: Brought, entry: Entry) -> bool:
    """Whether the entry is there as it is brought. Its revision is its own."""
    write = item.write
    writer, meta_json = split_writer(entry.meta_json)
    if (write.stored, write.meta_json, write.writer) != (entry.stored, meta_json, writer):
        return False
    if not item.is_exact:
        ours, theirs = write.expires_ms, entry.expires_ms
        return ours == theirs or (ours is not None and theirs is not None and abs(ours - theirs) <= SAME_END_MS)
    brought = write.version, write.created_ms, write.updated_ms, write.expires_ms
    return brought == (entry.version, entry.created_ms, entry.updated_ms, entry.expires_ms)


def _is_newer(item: Brought, entry: Entry) -> bool:
    """Whether it was written later, or at the same time as an entry that was not written since it came."""
    ours, theirs = (item.write.updated_ms, item.write.version), (entry.updated_ms, entry.version)
    is_untouched = entry.created_revision == entry.revision
    # A source without times, or with times of whole seconds, cannot tell of two writes which is the later one.
    return is_untouched if not item.is_exact or ours == theirs else ours > theirs
