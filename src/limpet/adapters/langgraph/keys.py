"""Keys of an adapter: parts of any characters, in the order of the parts.

A part is escaped so that it holds no slash. One that would be too long for a key becomes its hash, so names that must
be read back are stored in the value as well.
"""

from __future__ import annotations

import hashlib
from typing import Final

__all__ = ["escape", "join", "quote", "unquote"]

PART_BYTES_MAX: Final = 240
_ESCAPED: Final = {"%": "%25", "/": "%2F", "\0": "%00"}
_TABLE: Final = str.maketrans(_ESCAPED)


def quote(part: str) -> str:
    """Make a part of a key that can be read back."""
    return part.translate(_TABLE)


def unquote(part: str) -> str:
    """Get the text that a part was quoted from."""
    return part.replace("%2F", "/").replace("%00", "\0").replace("%25", "%")


def escape(part: str) -> str:
    """Make a part of a key from a text of any length."""
    quoted = quote(part)
    encoded = quoted.encode("utf-8", "surrogatepass")
    # No quoted text starts with two percent signs.
    return quoted if len(encoded) <= PART_BYTES_MAX else f"%%{hashlib.blake2b(encoded, digest_size=20).hexdigest()}"


def join(*parts: str) -> str:
    """Join texts to a key, or with an empty last one to the prefix of keys."""
    return "/".join(map(escape, parts))
