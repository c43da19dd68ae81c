"""Dead letters: writes that were given up, kept for a person to decide about.

A letter holds all that a replay needs: key, value, writer, semantics, the version that was expected, and the error. It
holds the value, because nothing could be replayed without it; so letters have their own namespace, with its own
permissions, and are not kept for ever. A list of them leaves out the values.

Letters may be kept in another store than the data: one that can still be written when the other cannot.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

from limpet.errors import InvalidValue, NotFound
from limpet.model import Entry
from limpet.store import Store

if TYPE_CHECKING:
    from limpet.semantic.model import Envelope
    from limpet.semantic.store import SemanticStore

__all__ = ["DeadLetter", "DeadLetters"]

KEEP_S: Final = 30 * 86_400.0
"""How long a letter is kept by default."""
SUFFIX: Final = "-deadletters"


class DeadLetter(msgspec.Struct, frozen=True, rename="camel"):
    """A write that was given up.

    Attributes:
        letter: Its name.
        at: When it was given up, in seconds since 1970.
        namespace: The namespace that it was meant for.
        key: The key.
        value: The value of the write.
        writer: The writer.
        semantics: The semantics.
        expected_version: The version that the last attempt expected; None for any.
        request_id: The request id.
        code: The code of the last error.
        attempts: How many attempts were made.
        found_version: The version found instead, after a conflict.
        spec_ref: The specification that governs it.
    """

    letter: str
    at: float
    namespace: str
    key: str
    value: dict[str, Any]
    writer: str
    semantics: dict[str, Any]
    expected_version: int | None
    request_id: str
    code: str
    attempts: int
    found_version: int | None = None
    spec_ref: str | None = None

    def to_dict(self, *, with_value: bool = False) -> dict[str, Any]:
        """The letter as a document; with its value only on request."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        if not with_value:
            del document["value"]
        return document

    def __repr__(self) -> str:
        return f"DeadLetter({self.letter!r}, {self.key!r}, {self.code})"


class DeadLetters:
    """The letters in a namespace.

    Args:
        store: The namespace.
        keep_s: For how many seconds to keep a letter.
    """

    def __init__(self, store: Store, *, keep_s: float = KEEP_S) -> None:
        self.store = store
        self._keep_s = keep_s

    @classmethod
    def beside(cls, store: Store, *, keep_s: float = KEEP_S) -> DeadLetters:
        """The letters of a store, in the same engine: in the namespace ``<name>-deadletters``."""
        return cls(store.namespace(store.name + SUFFIX), keep_s=keep_s)

    def new_name(self, at: float) -> str:
        """A name for a letter. Names sort by time."""
        return f"{round(at * 1000):013}-{os.urandom(6).hex()}"

    async def keep(self, letter: DeadLetter) -> None:
        """Keep a letter."""
        await self.store.create(letter.letter, msgspec.to_builtins(letter), ttl=self._keep_s)

    async def list(self, *, limit: int = 1000, after: str | None = None) -> list[DeadLetter]:
        """The letters, oldest first."""
        return [_letter(entry) async for entry in self.store.scan(limit=limit, after=after)]

    async def show(self, name: str) -> DeadLetter:
        """A letter, with its value. Raises `NotFound`."""
        entry = await self.store.entry(name)
        if entry is None:
            raise NotFound(name)
        return _letter(entry)

    async def replay(self, name: str, target: SemanticStore, *, expected_version: int | None = None) -> Envelope:
        """Make the write of a letter, and drop the letter.

        Args:
            name: The name of the letter.
            target: The store that it was meant for.
            expected_version: The version to expect, after reading what is there. By default the one that the letter
                expected.

        Raises:
            VersionConflict: The key has another version. The letter is kept.
        """
        letter = await self.show(name)
        if target.store.name != letter.namespace:
            raise InvalidValue(f"letter {name!r} is meant for namespace {letter.namespace!r}")
        envelope = await target.kv_put(
            letter.key,
            letter.value,
            writer=letter.writer,
            semantics=letter.semantics,
            expected_version=letter.expected_version if expected_version is None else expected_version,
            # A replay that is interrupted between the write and the drop is recognised by this id.
            request_id=f"{name}.{'' if expected_version is None else expected_version}",
            spec_ref=letter.spec_ref,
        )
        await self.drop(name)
        return envelope

    async def drop(self, name: str) -> bool:
        """Remove a letter. False when it is absent."""
        return await self.store.delete(name)


def _letter(entry: Entry) -> DeadLetter:
    try:
        return msgspec.convert(entry.value, DeadLetter)
    except msgspec.ValidationError:
        raise InvalidValue(
            f"{entry.key!r} is no dead letter: this namespace holds other entries, name the one of the letters"
        ) from None
