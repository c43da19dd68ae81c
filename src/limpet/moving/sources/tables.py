"""The two tables that stores before Limpet had: ``state`` and ``plugin_kv_storage``, as rows of either database.

Adopted in place, a table is renamed, and the view of the same name, which Limpet's schema has anyway, takes its place
in the same transaction: programs that read it with SQL go on reading. What was written before the renaming is read once
more, from the renamed table, which no program writes any more. When that is done it gets its last name, by which an
adoption that is complete is recognised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from limpet.errors import InvalidValue
from limpet.moving.entries import Brought, Rejected
from limpet.moving.sources.values import as_item, from_json, time_ms

__all__ = ["ASIDE", "STATE_NAMESPACE", "TABLES", "choose_table", "item_of"]

ASIDE: Final = "_being_adopted"
"""Behind the name of a table whose place a view has taken, until all of it is in the store."""

DONE: Final = "_before_limpet"
"""Behind its name when all of it is in the store."""

STATE_NAMESPACE: Final = "state"
"""The namespace that the view ``state`` shows."""

TABLES: Final[Mapping[str, Sequence[str]]] = {
    "state": ("key", "value", "version", "updated_at"),
    "plugin_kv_storage": ("plugin_name", "key", "value", "expires_at", "created_at", "updated_at"),
}
"""Their columns, in the order in which they are read. Those of times and versions may be missing."""

_REQUIRED: Final = ("plugin_name", "key", "value")


def plain_name(table: str) -> str:
    """The name that a table had before it was renamed."""
    return table.removesuffix(ASIDE).removesuffix(DONE)


def choose_table(found: Mapping[str, Sequence[str]], wanted: str | None, shown: str) -> tuple[str, str]:
    """The table to adopt, and what is behind its name. ``found`` has the columns of each table there is."""
    names = [name for name in TABLES if any(plain_name(one) == name for one in found)]
    if wanted is not None:
        names = [name for name in names if name == wanted]
    if len(names) > 1:
        raise InvalidValue(f"{shown} has the tables {' and '.join(names)}: choose one with --table")
    if not names:
        raise InvalidValue(f"{shown} has no table {wanted or 'state or plugin_kv_storage'} to adopt")
    (name,) = names
    suffix = next(suffix for suffix in ("", ASIDE, DONE) if f"{name}{suffix}" in found)
    required = [column for column in TABLES[name] if column in _REQUIRED]
    missing = [column for column in required if column not in found[f"{name}{suffix}"]]
    if missing:
        raise InvalidValue(f"{shown}: the table {name} has no column {missing[0]}, so it is another program's")
    return name, suffix


def item_of(table: str, row: Mapping[str, Any], now_ms: int) -> Brought | Rejected:
    """A row as an entry. A version or a time that the table does not have is 1, or now."""
    namespace = STATE_NAMESPACE if table == "state" else row["plugin_name"]
    try:
        updated_ms = now_ms if row.get("updated_at") is None else time_ms(row["updated_at"])
        created_ms = updated_ms if row.get("created_at") is None else time_ms(row["created_at"])
        expires_ms = None if row.get("expires_at") is None else time_ms(row["expires_at"], up=True)
    except InvalidValue as error:
        return Rejected(namespace, row["key"], str(error))
    return as_item(
        namespace,
        row["key"],
        lambda: from_json(row["value"]),
        is_exact=row.get("updated_at") is not None,
        version=row.get("version") or 1,
        created_ms=created_ms,
        updated_ms=updated_ms,
        expires_ms=expires_ms,
    )
