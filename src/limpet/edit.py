"""Editing: a copy to work on for as long as it takes, merged at the end with what others wrote meanwhile.

Nothing is held while the caller works. At the end the copy is merged member by member into what is stored then, in an
`update`, so that a write that comes in between is merged as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

from limpet.codec import Stored, decode, encode
from limpet.draft import TTL, Fence, Fencing, Meta
from limpet.errors import Conflict, InvalidValue, TypeMismatch
from limpet.keys import check_key
from limpet.merge import Clash, are_same, merge
from limpet.model import ABSENT, UNCHANGED, Entry, Sentinel

if TYPE_CHECKING:
    from limpet.store import Store

__all__ = ["Decide", "Edit", "merge_into"]

Decide = Callable[[tuple[str, ...], Any, Any, Any], Any]
"""Gets a path and what is there in base, mine and theirs, and returns the value to keep, or ABSENT for none."""


class Edit:
    """A copy of an object or a record, to be used with ``async with``. It is written at the end of the body."""

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        on_conflict: Decide | None = None,
        ttl: TTL | Literal[Sentinel.KEEP],
        fence: Fencing | Fence | None,
        meta: Meta | Literal[Sentinel.KEEP],
    ) -> None:
        if on_conflict is not None and not callable(on_conflict):
            raise InvalidValue(f"on_conflict is a function, not something of type {type(on_conflict).__name__}")
        self.key = check_key(key)
        self._on_conflict = on_conflict
        self._store = store
        self._write = functools.partial(store._change, self.key, ttl=ttl, fence=fence, meta=meta)
        self._base: Stored | None = None
        self._copy: dict[str, Any] | None = None

    async def _start(self) -> dict[str, Any]:
        """Read the value and give the copy: an empty object where there is no such key."""
        if self._copy is not None:
            raise InvalidValue(f"this edit of {self.key!r} has begun: call edit again for another one")
        found = await self._store.entry(self.key)
        value = {} if found is None else found.value
        if not isinstance(value, dict):
            kind = "raw bytes" if isinstance(value, bytes) else "another JSON value"
            raise TypeMismatch(self.key, expected="a JSON object or a record", found=kind)
        self._base = None if found is None else found.stored
        self._copy = value
        return value

    async def _finish(self, decide: Callable[[Clash], Any] | None) -> None:
        """Merge the copy into what is stored now. ``decide`` may be async; without it a clash is a `Conflict`."""
        await self._write(merge_into(self.key, self._base, encode(self._copy), decide))

    async def __aenter__(self) -> dict[str, Any]:
        return await self._start()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._finish(call_with_parts(self._on_conflict))


def merge_into(
    key: str, base: Stored | None, copy: Stored, decide: Callable[[Clash], Any] | None
) -> Callable[[Entry | None], Awaitable[Any]]:
    """Make the change that merges an edited copy into what is stored by then.

    ``base`` is what the copy was made from; None where there was no such key. ``decide`` may be async; without it a
    clash is a `Conflict`.
    """

    def load(found: Entry | None) -> tuple[Any, Any, Any]:
        # Fresh ones each time: a function of the caller may change what it gets.
        before = ABSENT if base is None else decode(base)
        mine = decode(copy)
        if before is ABSENT and not mine:
            # Nothing was there, and nothing was put in.
            mine = ABSENT
        return before, mine, ABSENT if found is None else found.value

    async def change(found: Entry | None) -> Any:
        clashes: list[Clash] = []
        merge(*load(found), clashes.append)
        if clashes and decide is None:
            raise Conflict(key, expected="its members as they were read", current=found, clashes=clashes)
        kept: dict[tuple[str, ...], Any] = {}
        for clash in clashes:
            assert decide is not None
            answer = decide(clash)
            answer = await answer if inspect.isawaitable(answer) else answer
            kept[clash.path] = ABSENT if answer is ABSENT else decode(encode(answer))
        merged = merge(*load(found), lambda clash: kept[clash.path])
        return UNCHANGED if are_same(merged, load(found)[2]) else merged

    return change


def call_with_parts(function: Decide | None) -> Callable[[Clash], Any | Awaitable[Any]] | None:
    """Wrap the function of a caller, which gets the parts of a clash one by one."""
    return None if function is None else lambda clash: function(clash.path, clash.base, clash.mine, clash.theirs)
