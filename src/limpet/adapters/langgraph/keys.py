"""Keys of an adapter: parts of any characters, in the order of the parts.

A part that would be too long for a key becomes its hash, so names that must be read back are stored in the value as
well.
"""

from __future__ import annotations

from typing import Final

from limpet.adapters.names import escape, shorten

__all__ = ["join"]

PART_BYTES_MAX: Final = 240


def join(*parts: str) -> str:
    """Join texts to a key, or with an empty last one to the prefix of keys."""
    return "/".join(shorten(escape(part), PART_BYTES_MAX) for part in parts)
