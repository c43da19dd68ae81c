"""A group that this process decides, batch by batch with `limpet.transition.plan`, while it holds the namespace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from limpet.engines.postgres.rows import columns_from_rows, decode_json, digits, encode_value, entry_from_row
from limpet.model import Batch, Change, Commit, Entry, Family, Refusal
from limpet.transition import plan

__all__ = ["GroupPlan"]


class GroupPlan:
    """The state of a held namespace as the batches of a group change it, and the rows to write at the end."""

    def __init__(self, held: Sequence[Any]) -> None:
        """Begin with the rows of ``limpet_hold``: the row of the namespace beside each entry that was read."""
        self.revision, _, self._now_ms, self._keys, self._size_bytes, self._log_changes, self._log_bytes = held[0][:7]
        self._revision_before = self.revision
        self._entries: dict[tuple[str, str], Entry | None] = {
            (row[7], row[8]): None if row[11] is None else entry_from_row(row[8:]) for row in held
        }
        self.rows: list[tuple[Any, ...]] = []

    def find(self, family: Family, key: str) -> Entry | None:
        """The entry as the batches so far left it."""
        return self._entries.get((family, key))

    def add(self, batch: Batch, request_id: str) -> Commit | Refusal | Exception:
        """Decide one batch, and apply its changes to this plan."""
        try:
            outcome = plan(batch, self.find, now_ms=self._now_ms, revision=self.revision, cause=request_id)
        except Exception as error:
            # A batch that cannot be decided fails alone.
            return error
        if isinstance(outcome, Refusal):
            return outcome
        for change in outcome.changes:
            self._apply(change)
        if outcome.receipt is not None:
            self._entries["receipt", outcome.receipt.key] = outcome.receipt
            self.rows.append(("put", None, None, None, "receipt", *_entry_columns(outcome.receipt, 0)))
        return outcome.commit

    def _apply(self, change: Change) -> None:
        entry, after = change.entry, change.after
        before = self._entries.get((change.family, entry.key))
        size_bytes = entry.weight_bytes
        self.revision = change.revision
        self._log_changes += 1
        self._log_bytes += size_bytes
        if change.family == "data":
            if before is not None:
                self._keys -= 1
                self._size_bytes -= before.weight_bytes
            if after is not None:
                self._keys += 1
                self._size_bytes += size_bytes
        self._entries[change.family, entry.key] = after
        head = (change.op, str(change.revision), str(change.commit), change.cause, change.family)
        self.rows.append((*head, *_entry_columns(entry, size_bytes)))

    def totals(self) -> tuple[int | None, ...]:
        """The new row of the namespace, with NULL as its revision if the plan adds nothing to the log."""
        revision = None if self.revision == self._revision_before else self.revision
        return self._now_ms, revision, self._keys, self._size_bytes, self._log_changes, self._log_bytes

    def columns(self) -> list[list[Any]]:
        """The rows as columns, for ``limpet_apply``: each change with the entry that it left."""
        return columns_from_rows(self.rows, 18)


def _entry_columns(entry: Entry, size_bytes: int) -> tuple[str | None, ...]:
    return (
        entry.key,
        *encode_value(entry.stored),
        str(entry.weight_bytes),
        str(size_bytes),
        str(entry.version),
        str(entry.revision),
        str(entry.created_revision),
        str(entry.created_ms),
        str(entry.updated_ms),
        digits(entry.expires_ms),
        decode_json(entry.meta_json),
    )
