"""Reading the audit trail: its rows as documents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from limpet.semantic.audit import new_key
from limpet.semantic.families import scan_family
from limpet.store import Store

__all__ = ["has_trail", "rows_of"]


async def rows_of(store: Store, *, prefix: str = "") -> AsyncIterator[dict[str, Any]]:
    """The rows of the trail as documents, in the order in which they happened; with a prefix, of keys that begin so.

    A sealed row has its number ``seq``. Nothing is verified here.
    """
    # Read the new rows first. The other way round, a row that is sealed in between would be in neither.
    fresh = {entry.key: entry async for entry in scan_family(store, f"new/{prefix}", "audit")}
    async for entry in scan_family(store, "sealed/", "audit"):
        document = entry.value
        fresh.pop(new_key(document["row"]["key"], document["row"]["n"]), None)
        if document["row"]["key"].startswith(prefix):
            yield {
                "seq": document["seq"],
                "revision": document["revision"],
                "at_ms": document["at_ms"],
                **_without_signatures(document["row"]),
            }
    for entry in sorted(fresh.values(), key=lambda one: one.created_revision):
        yield {
            "seq": None,
            "revision": entry.created_revision,
            "at_ms": entry.created_ms,
            **_without_signatures(entry.value),
        }


async def has_trail(store: Store) -> bool:
    """Whether a namespace was ever audited. Its rows may all be pruned; the head of a key stays."""
    async for _ in scan_family(store, "head/", "audit", values=False):
        return True
    return False


def _without_signatures(row: dict[str, Any]) -> dict[str, Any]:
    return {name: member for name, member in row.items() if name not in ("mac", "previous")}
