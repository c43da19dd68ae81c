"""The key standard: ``tenant/<tenant>/project/<project>/<path>``, and names for identifiers that do not fit.

A key has at most 128 characters: lowercase components between slashes. An error names the component that is wrong. An
identifier that is too long, or has characters that a component cannot have, is replaced by a hash of it; the store
keeps which identifier a hash stands for.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any, Final

from limpet.errors import InvalidKey

__all__ = ["COMPONENT_MAX", "KEY_MAX", "InvalidKeyField", "check_key", "check_prefix", "component_of", "join"]

KEY_MAX: Final = 128
"""The most characters of a key."""
COMPONENT_MAX: Final = 64
"""A longer identifier is replaced by its hash."""

_COMPONENT: Final = re.compile(r"[a-z0-9._~@:+=-]+\Z")
_HASHED: Final = re.compile(r"h-[a-z2-7]{25}\Z")
_DOTS: Final = (".", "..")


class InvalidKeyField(InvalidKey):
    """A key that breaks the standard.

    Attributes:
        field: The part that is wrong: ``key``, ``tenant``, ``project``, or ``path[n]``, counted from 0.
        problem: What is wrong with it.
    """

    def __init__(self, key: object, field: str, problem: str) -> None:
        super().__init__(key, f"{field}: {problem}")
        self.field, self.problem = field, problem

    def to_dict(self) -> dict[str, Any]:
        """The error as a document."""
        return {"code": self.code, "field": self.field, "message": str(self)}


def check_key(key: object) -> str:
    """Return the key, or raise `InvalidKeyField` naming the part that is wrong."""
    parts = _parts(key)
    if len(parts) < 5:
        raise InvalidKeyField(
            key, "path[0]", "a key needs a path after its project, as in tenant/a/project/b/docs/delta"
        )
    assert isinstance(key, str)
    if len(key) > KEY_MAX:
        raise InvalidKeyField(
            key,
            "key",
            f"it has {len(key)} characters, limit {KEY_MAX}: hash its long parts, as SemanticStore.key does",
        )
    return key


def check_prefix(prefix: object) -> str:
    """Return the prefix, or raise: whole components with a slash at the end, at least the tenant."""
    if not isinstance(prefix, str) or not prefix.endswith("/"):
        raise InvalidKeyField(prefix, "key", "a prefix ends with a slash, as in tenant/a/project/b/")
    _parts(prefix[:-1])
    return prefix


def _parts(key: object) -> list[str]:
    """The components of a key or of a prefix, each of them checked."""
    if not isinstance(key, str):
        raise InvalidKeyField(key, "key", f"a key is a str, not of type {type(key).__name__}")
    parts = key.split("/")
    if parts[0] != "tenant" or (len(parts) > 2 and parts[2] != "project"):
        raise InvalidKeyField(key, "key", "it does not begin as in tenant/<tenant>/project/<project>/")
    named = [part for number, part in enumerate(parts) if number not in (0, 2)]
    for name, part in zip(_names(len(named)), named, strict=True):
        if (problem := _problem(part)) is not None:
            raise InvalidKeyField(key, name, problem)
    if len(parts) in (1, 3):
        raise InvalidKeyField(key, "tenant" if len(parts) == 1 else "project", "it is missing")
    return parts


def _names(count: int) -> list[str]:
    """The names of the components of a key in an error."""
    return ["tenant", "project", *(f"path[{number}]" for number in range(count))][:count]


def _problem(part: str) -> str | None:
    """What is wrong with a component; None when it is valid."""
    if not part:
        return "it is empty"
    if part in _DOTS:
        return "it has only dots"
    if part != part.lower():
        return "it has an uppercase letter"
    if any(map(str.isspace, part)):
        return "it has whitespace"
    if not _COMPONENT.match(part):
        return "it has a character other than a-z, 0-9 and . _ ~ @ : + = -"
    return None


def component_of(identifier: str) -> str:
    """The component for an identifier: the identifier where it is valid, else ``h-`` and a hash of it.

    The hash is the first 125 bits of SHA-256 over the UTF-8 bytes, in base 32, lowercase. An identifier that
    looks like such a hash is hashed as well, so that no two identifiers have the same component.
    """
    if len(identifier) <= COMPONENT_MAX and _problem(identifier) is None and not _HASHED.match(identifier):
        return identifier
    return _hash(identifier)


def _hash(identifier: str) -> str:
    try:
        digest = hashlib.sha256(identifier.encode()).digest()
    except UnicodeEncodeError:
        raise InvalidKeyField(
            identifier, "key", "an identifier holds a lone surrogate, which UTF-8 cannot carry"
        ) from None
    return "h-" + base64.b32encode(digest)[:25].decode().lower()


def join(tenant: str, project: str, *path: str) -> tuple[str, dict[str, str]]:
    """The key of some identifiers, and the identifiers that its hashed components stand for.

    Where the key is too long, the longest components are hashed, one after the other, until it fits.
    """
    originals = [tenant, project, *path]
    for name, identifier in zip(_names(len(originals)), originals, strict=True):
        if not isinstance(identifier, str):
            raise InvalidKeyField("", name, f"it is a str, not of type {type(identifier).__name__}")
        if identifier == "":
            raise InvalidKeyField(identifier, name, "it is empty")
    parts = [component_of(identifier) for identifier in originals]
    while len(key := "/".join(("tenant", parts[0], "project", *parts[1:]))) > KEY_MAX:
        longest = max(range(len(parts)), key=lambda number: (len(parts[number]), -number))
        if parts[longest] != originals[longest] or len(parts[longest]) <= 27:
            break
        parts[longest] = _hash(originals[longest])
    hashed = {part: original for part, original in zip(parts, originals, strict=True) if part != original}
    return check_key(key), hashed
