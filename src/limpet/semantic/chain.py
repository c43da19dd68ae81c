"""The chain of sealed rows: its signed documents, and the anchor that shows whether it went back.

Sealing, verifying and pruning share what is here. All three hold the lock `LOCK` of the namespace while they work.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from limpet.codec import encode_field
from limpet.errors import Corrupt, InvalidValue
from limpet.model import Entry
from limpet.semantic.audit import Keys

__all__ = [
    "LOCK",
    "LOCK_TTL_S",
    "ROWS_MAX",
    "Anchor",
    "Chain",
    "PruneMark",
    "PrunedKey",
    "PrunedKeysHash",
    "check_signature",
    "parse_anchor",
    "read_signed",
    "sealed_key",
]

LOCK: Final = "limpet/audit"
LOCK_TTL_S: Final = 5.0
"""How long after the crash of a sealer the next one can take over."""
ROWS_MAX: Final = 60
"""How many rows one commit seals or removes."""

T = TypeVar("T")


class Chain(msgspec.Struct, frozen=True):
    """The end of the chain: its length and its last link."""

    seq: int = 0
    link: str = ""


class PruneMark(msgspec.Struct, frozen=True):
    """Up to where the chain was pruned.

    Attributes:
        seq: How many links were removed.
        link: The last of them.
        at_ms: When its row was written.
        keys: A `PrunedKeysHash` of what is kept of all keys whose rows were removed.
    """

    seq: int = 0
    link: str = ""
    at_ms: int = 0
    keys: str = ""


class PrunedKey(msgspec.Struct, frozen=True):
    """The last row of a key that was pruned, in short: the next row of the key follows it."""

    n: int
    row: str
    after: str | None
    at_ms: int


class PrunedKeysHash:
    """A keyed hash over the `PrunedKey` of every key, in which one of them can be replaced without reading the others.

    Without it, an attacker could put back an older `PrunedKey` of one key together with its head and its entry. The
    hash is a sum of keyed hashes, and only a keyed hash of the sum is stored: with the terms in hand, an attacker could
    search for other terms with the same sum.
    """

    def __init__(self, keys: Keys, namespace: str, pruned: dict[str, PrunedKey], key_id: str) -> None:
        self._keys, self._namespace, self._key_id = keys, namespace, key_id
        self._pruned: dict[str, PrunedKey] = {}
        self._total = 0
        self.replace(pruned)

    def replace(self, pruned: dict[str, PrunedKey]) -> None:
        """Replace what is kept of these keys."""
        for key, one in pruned.items():
            if key in self._pruned:
                self._total -= self._term(key, self._pruned[key])
            self._total += self._term(key, one)
            self._pruned[key] = one

    def digest(self) -> str:
        """The hash."""
        content = encode_field([self._namespace, f"{self._total % 2**256:064x}"])
        return self._keys.digest("pasts", content, self._key_id)

    def _term(self, key: str, pruned: PrunedKey) -> int:
        content = encode_field([self._namespace, key, msgspec.to_builtins(pruned)])
        return int(self._keys.digest("past", content, self._key_id).rpartition(":")[2] or "0", 16)


class Anchor(msgspec.Struct, frozen=True):
    """The end of the chain at some moment, and how many of its links were pruned by then.

    It is kept outside of the database, so that an older state which was put back there can be detected.
    """

    seq: int
    pruned: int
    link: str

    def __str__(self) -> str:
        return f"{self.seq}{f'/{self.pruned}' if self.pruned else ''}@{self.link}"

    def find_rollback(self, chain: Chain, mark: PruneMark, link_entry: Entry | None) -> str | None:
        """Why the chain no longer goes through this anchor; None when it does.

        ``link_entry`` is the sealed row now stored under the number of the anchor.
        """
        if chain.seq < self.seq:
            return f"it ends with row {chain.seq}"
        if mark.seq < self.pruned:
            return f"{mark.seq} of its rows are pruned, and {self.pruned} were pruned before"
        if mark.seq > self.seq:
            return None
        link = mark.link if mark.seq == self.seq else None
        if link is None and link_entry is not None and isinstance(link_entry.value, dict):
            link = link_entry.value.get("link")
        return None if link == self.link else f"row {self.seq} is another, or is missing"


_ANCHOR: Final = re.compile(r"([0-9]{1,18})(?:/([0-9]{1,18}))?@(.*)\Z")


def parse_anchor(anchor: str | None) -> Anchor | None:
    """An anchor from its text; None for that of an empty chain."""
    if anchor is None:
        return None
    found = _ANCHOR.match(anchor) if type(anchor) is str else None
    if found is None:
        raise InvalidValue("an anchor has the form <number>@<link> or <number>/<number>@<link>: copy it from a report")
    seq, pruned, link = int(found[1]), int(found[2] or 0), found[3]
    return Anchor(seq, pruned, link) if seq else None


def sealed_key(seq: int) -> str:
    """Where a sealed row is kept."""
    return f"sealed/{seq:016}"


def check_signature(keys: Keys, namespace: str, what: str, document: dict[str, Any]) -> dict[str, Any] | None:
    """A signed document without its signature; None when the signature does not match."""
    rest = {name: member for name, member in document.items() if name != "mac"}
    return rest if keys.matches(what, encode_field([namespace, rest]), document["mac"]) else None


def read_signed(keys: Keys, namespace: str, what: str, entry: Entry | None, kind: type[T]) -> T | None:
    """The signed document of an entry; None when the entry is absent, altered or malformed."""
    try:
        document = None if entry is None else check_signature(keys, namespace, what, entry.value)
        return None if document is None else msgspec.convert(document, kind)
    except (Corrupt, InvalidValue, msgspec.ValidationError, KeyError, TypeError, AttributeError):
        return None
