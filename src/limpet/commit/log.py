"""The bounds of a log, which are the same on every engine."""

from __future__ import annotations

from limpet.errors import Compacted

__all__ = ["check_after"]


def check_after(after: int, *, floor: int, revision: int) -> None:
    """Raise `Compacted` if the log cannot be read after this revision: it was trimmed, or is not there yet."""
    if after < floor:
        raise Compacted(f"revision {after} was trimmed, the log starts after {floor}", oldest=floor)
    if after > revision:
        raise Compacted(f"revision {after} lies ahead of this store, which is at {revision}")
