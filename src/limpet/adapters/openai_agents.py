"""Sessions for the OpenAI Agents SDK: the history of a conversation, on any engine.

`Session` has the SDK's session protocol. What one call of `add_items` gives is one entry, stored with `append`: it is
there as a whole or not at all, no other call comes in between, and of all calls that run at the same time, in any
number of processes, none is lost. Items are stored as they are, so that every other tool of Limpet shows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

from agents.items import TResponseInputItem
from agents.memory import SessionSettings
from agents.memory.session_settings import coerce_session_settings

from limpet.adapters.lazy import LazyStore
from limpet.adapters.names import check_prefix, escape, shorten
from limpet.codec import encode_field
from limpet.errors import InvalidValue, ValueTooLarge
from limpet.model import ABSENT
from limpet.store import Store

__all__ = ["Session"]

PREFIX: Final = "sessions/"
ID_BYTES_MAX: Final = 500


class Session:
    """The history of one conversation.

    Args:
        session_id: Which conversation; any text.
        store: A URL, or a store from `limpet.open`; ``LIMPET_URL`` or ``./limpet.db`` when not given. A URL is opened
            by the first call, on its event loop. A store that was given is not closed.
        session_settings: How many items `get_items` gives if its caller does not say.
        namespace: The namespace that a URL is opened with.
        prefix: What all keys start with.
    """

    def __init__(
        self,
        session_id: str,
        store: Store | str | None = None,
        *,
        session_settings: SessionSettings | dict[str, Any] | None = None,
        namespace: str = "default",
        prefix: str = PREFIX,
    ) -> None:
        self.session_id = session_id
        self.session_settings: SessionSettings | None = coerce_session_settings(session_settings or SessionSettings())
        self._lazy = LazyStore(store, namespace)
        self._folder = f"{check_prefix(prefix)}{shorten(escape(session_id), ID_BYTES_MAX)}/"

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """The items from the oldest to the newest; with a limit, only the newest."""
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit
        # As for the SDK's own sessions, a negative limit is none.
        wanted = limit if limit is not None and limit >= 0 else None
        newest_first: list[TResponseInputItem] = []
        store = await self._lazy.open()
        if wanted != 0:
            async for entry in store.scan(self._folder, reverse=True):
                newest_first += reversed(entry.value)
                if wanted is not None and len(newest_first) >= wanted:
                    break
        return newest_first[:wanted][::-1]

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Add items to the end, in one step."""
        store = await self._lazy.open()
        # All are checked before the first is stored.
        for part in list(self._parts(items, store._session.value_bytes_max)):
            await store.append(self._folder, part)

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove the newest item and return it; None when there is none."""
        store = await self._lazy.open()
        while True:
            newest = await store.keys(self._folder, limit=1, reverse=True)
            if not newest.keys:
                return None
            popped: list[TResponseInputItem] = []

            def remove_last(found: list[TResponseInputItem] | None, popped: list[Any] = popped) -> Any:
                popped[:] = [] if found is None else found[-1:]
                return found[:-1] or ABSENT if found else ABSENT

            await store.update(newest.keys[0], remove_last)
            if popped:
                return popped[0]
            # Another caller was faster. The next newest will do.

    async def clear_session(self) -> None:
        """Remove all items."""
        await (await self._lazy.open()).delete_prefix(self._folder)

    async def close(self) -> None:
        """Close what was opened on this event loop."""
        await self._lazy.close()

    async def __aenter__(self) -> Self:
        await self._lazy.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _parts(self, items: list[TResponseInputItem], bytes_max: int) -> Iterator[list[TResponseInputItem]]:
        """Split items into lists that an entry can hold: nearly always one."""
        part, part_bytes = list[TResponseInputItem](), 2
        for item in items:
            if not isinstance(item, dict):
                raise InvalidValue(f"an item of a session is a dict, not something of type {type(item).__name__}")
            item_bytes = len(encode_field(item)) + 1
            if item_bytes + 2 > bytes_max:
                raise ValueTooLarge(self._folder, size_bytes=item_bytes + 2, limit_bytes=bytes_max)
            if part_bytes + item_bytes > bytes_max:
                yield part
                part, part_bytes = [], 2
            part.append(item)
            part_bytes += item_bytes
        if part:
            yield part
