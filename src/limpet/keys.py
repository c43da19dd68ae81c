"""The grammar of names, and the limits on what a caller may send.

A key is 1 to 1024 bytes of UTF-8 without U+0000. No other character has meaning, and
nothing is normalised. Order is code-point order, which is UTF-8 byte order, so a prefix
is a half-open range and never a pattern for an engine to interpret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from limpet.errors import InvalidKey, InvalidNamespace, InvalidValue

KEY_BYTES_MAX: Final = 1024
META_BYTES_MAX: Final = 8_192
WRITER_MAX: Final = 64
VALUE_BYTES_MAX: Final = 1_000_000
BATCH_BYTES_MAX: Final = 4_000_000
BATCH_WRITES_MAX: Final = 128
BATCH_GUARDS_MAX: Final = 16
PAGE_MAX: Final = 10_000
PAGE_BYTES: Final = 4_000_000
"""The size at which a page ends, whatever it lists. A page may exceed it by one value."""
KEYS_MAX: Final = 1_000
"""How many keys one read takes."""
TESTS_MAX: Final = 32
OPERANDS_MAX: Final = 1_000

_NAMESPACE = re.compile(r"[a-z0-9_-]{1,100}\Z")
_LAST_CODE_POINT: Final = "\U0010ffff"


def fit(sizes_bytes: Iterable[int]) -> int:
    """Count the items, at least one, that make up a page, from their sizes in order."""
    count = total_bytes = 0
    for size_bytes in sizes_bytes:
        if total_bytes > PAGE_BYTES:
            break
        count, total_bytes = count + 1, total_bytes + size_bytes
    return count


class Span(msgspec.Struct, frozen=True):
    """The keys from ``start`` up to, not including, ``stop``. None means no upper end."""

    start: str
    stop: str | None

    def __contains__(self, key: str) -> bool:
        return self.start <= key and (self.stop is None or key < self.stop)


def check_namespace(name: object) -> str:
    """Return the namespace, or raise `InvalidNamespace`."""
    if not isinstance(name, str) or not _NAMESPACE.match(name):
        raise InvalidNamespace(name)
    return str.__str__(name)


def check_key(key: object) -> str:
    """Return the key, or raise `InvalidKey` saying what is wrong with it."""
    # Almost every key returns here: for ASCII text the length is the byte length.
    if type(key) is str and key.isascii() and 0 < len(key) <= KEY_BYTES_MAX and "\0" not in key:
        return key
    if not isinstance(key, str):
        raise InvalidKey(key, "a key is a str")
    if not key:
        raise InvalidKey(key, "it is empty")
    if "\0" in key:
        raise InvalidKey(key, f"U+0000 at position {key.index(chr(0))}")
    try:
        size_bytes = len(key.encode())
    except UnicodeEncodeError as error:
        raise InvalidKey(key, f"lone surrogate at position {error.start}") from None
    if size_bytes > KEY_BYTES_MAX:
        raise InvalidKey(key, f"it is {size_bytes:,} bytes, limit {KEY_BYTES_MAX:,}")
    # Not str(key): an Enum that is also a str would give its member name.
    return str.__str__(key)


def check_text(text: object, what: str) -> str:
    """Return a text that is shown but is not a key, or raise `InvalidValue`. It may be as long as a key."""
    try:
        return check_key(text)
    except InvalidKey:
        raise InvalidValue(f"{what} is a str of 1 to {KEY_BYTES_MAX:,} bytes of UTF-8 without U+0000") from None


def prefix_span(prefix: str) -> Span:
    """Make the span of all keys that start with the prefix. The empty prefix is every key."""
    # Check the type first: some objects compare as equal to everything.
    if type(prefix) is str and not prefix:
        return Span("", None)
    prefix = check_key(prefix)
    # Nothing sorts after U+10FFFF, so a run of them at the end cannot be incremented.
    head = prefix.rstrip(_LAST_CODE_POINT)
    if not head:
        return Span(prefix, None)
    following = ord(head[-1]) + 1
    if 0xD800 <= following <= 0xDFFF:
        following = 0xE000
    return Span(prefix, head[:-1] + chr(following))


def shared_prefix(span: Span) -> str:
    """Return the prefix whose keys a span contains; the empty one for a span of another kind."""
    return span.start if span == prefix_span(span.start) else ""


def pattern_span(pattern: str) -> Span:
    """Make the span of a watch pattern: ``*``, ``something*``, or one exact key."""
    pattern = check_key(pattern)
    if pattern.endswith("*"):
        return prefix_span(pattern[:-1])
    return key_span(pattern)


def key_span(key: str) -> Span:
    """Make the span of one key. No key contains U+0000, so no other key is in it."""
    key = check_key(key)
    return Span(key, key + "\0")
