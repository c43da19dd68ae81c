"""The names of a framework as keys of Limpet, and back.

A framework's names hold any character and have any length; a key of Limpet has up to 1,024 bytes and no U+0000. What a
key cannot hold is escaped with a percent sign, and a name that is too long is replaced by its hash.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final
from urllib.parse import unquote_to_bytes

from limpet.errors import InvalidValue
from limpet.keys import KEY_BYTES_MAX, check_key

__all__ = ["HASHED", "check_prefix", "escape", "shorten", "unescape"]

HASHED: Final = "~"
"""What a hash starts with. No other escaped name does."""

PREFIX_BYTES_MAX: Final = 200

# A lone surrogate is a character for Python and none for UTF-8.
_UNSAFE: Final = re.compile("^~|[%/\0\ud800-\udfff]")


def check_prefix(prefix: str) -> str:
    """Return the prefix of an adapter's keys, or raise `InvalidValue`.

    An empty one would be every key of the namespace, and an adapter that is cleared deletes its prefix.
    """
    if len(check_key(prefix).encode()) > PREFIX_BYTES_MAX:
        raise InvalidValue(f"a prefix of an adapter's keys is 1 to {PREFIX_BYTES_MAX} bytes")
    return prefix


def escape(name: str) -> str:
    """Escape what a key cannot hold, the slash, and the sign of a hash at the start."""
    return _UNSAFE.sub(_percent, name)


def unescape(escaped: str) -> str:
    """Return the name that was escaped."""
    return unquote_to_bytes(escaped).decode("utf-8", "surrogatepass")


def shorten(escaped: str, bytes_max: int = KEY_BYTES_MAX) -> str:
    """Return an escaped name if it is short enough, otherwise its hash."""
    encoded = escaped.encode()
    return escaped if len(encoded) <= bytes_max else HASHED + hashlib.sha256(encoded).hexdigest()


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))
