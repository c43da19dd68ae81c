"""Keys of an adapter: parts of any characters, in the order of the parts.

A part is escaped so that it holds no slash. One that would be too long for a key becomes its hash, so names that must
be read back are stored in the value as well.
"""

from __future__ import annotations

import hashlib
from typing import Final

__all__ = ["escape", "join", "unescape"]

PART_BYTES_MAX: Final = 240
_ESCAPED: Final = {"%": "%25", "/": "%2F", "\0": "%00"}
_TABLE: Final = str.maketrans(_ESCAPED)


def escape(part: str) -> str:
    """Make a part of a key from any text."""
    escaped = part.translate(_TABLE)
    if len(escaped.encode("utf-8", "surrogatepass")) <= PART_BYTES_MAX:
        return escaped
    # No escaped text starts with two percent signs.
    return "%%" + hashlib.blake2b(escaped.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


def unescape(part: str) -> str:
    """Get the text of a part that was not hashed."""
    return part.replace("%2F", "/").replace("%00", "\0").replace("%25", "%")


def join(*parts: str) -> str:
    """Join texts to a key, or with an empty last one to the prefix of keys."""
    return "/".join(map(escape, parts))
