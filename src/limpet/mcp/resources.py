"""The resources: entries and lists under URIs, and how their changes reach those who subscribe to them.

``limpet://entry/plan`` is an entry, ``limpet://prefix/task/`` the list of the keys that begin so. What a resource holds
is what the tools get and list answer. A subscriber is notified that a resource has changed, not how: changes that come
in quick succession are one notification.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from limpet.errors import Closed, InvalidValue, LimpetError, PermissionDenied
from limpet.mcp.tools import Found, Listing, Page, read_entry, read_page
from limpet.mcp.workspace import WAIT, Wait, Workspace
from limpet.retry import reason_of

__all__ = ["TEMPLATES", "Resource", "follow", "parse_uri", "read_resource", "uri_of"]

log = logging.getLogger("limpet.mcp")

PAUSE_S: Final = 0.05
RETRY_S: Final = 1.0

TEMPLATES: Final = {
    "limpet://entry/{+key}": ("entry", "The value under a key, with its revision."),
    "limpet://prefix/{+prefix}": ("prefix", "The keys that begin with a prefix, with short values."),
}


class Resource(NamedTuple):
    """What a URI names: one key, or all keys that begin with a prefix."""

    name: str
    is_prefix: bool

    @property
    def pattern(self) -> str:
        """The pattern of a watch."""
        return f"{self.name}*" if self.is_prefix else self.name


def uri_of(key: str) -> str:
    """The URI of an entry."""
    return f"limpet://entry/{quote(key)}"


def parse_uri(uri: str) -> Resource:
    """What a URI names. Raises `InvalidValue`."""
    for start, is_prefix in (("limpet://entry/", False), ("limpet://prefix/", True)):
        if uri.startswith(start):
            name = unquote(uri.removeprefix(start), errors="strict")
            if not is_prefix and name.endswith("*"):
                break
            return Resource(name, is_prefix)
    raise InvalidValue(f"{uri!r} is not here: resources are limpet://entry/KEY and limpet://prefix/PREFIX")


async def read_resource(space: Workspace, resource: Resource) -> str:
    """What a resource holds, as JSON."""
    found: Found | Listing
    if resource.is_prefix:
        found = await read_page(space, Page(prefix=resource.name, values=True))
    else:
        found = await read_entry(space, resource.name)
    return msgspec.json.encode(found).decode()


async def follow(
    space: Workspace,
    resource: Resource,
    notify: Callable[[], Awaitable[None]],
    *,
    task_status: TaskStatus[None] = TASK_STATUS_IGNORED,
) -> None:
    """Notify a subscriber of changes, as long as it may read. Reports as started when no change will be missed."""
    request = Wait(pattern=resource.pattern)
    store = await space.admit(WAIT, request)
    has_started = False
    while True:
        try:
            async with store.watch(resource.pattern) as watch:
                if has_started:
                    # It may have changed while it was not watched.
                    await notify()
                else:
                    task_status.started()
                    has_started = True
                seen = 0
                async for event in watch:
                    if event.revision <= seen:
                        # The subscriber was notified when this was there already.
                        continue
                    await asyncio.sleep(PAUSE_S)
                    # The token may have been revoked, or have lost this right, since the last time.
                    await space.admit(WAIT, request)
                    seen = (await store.status()).revision
                    await notify()
        except (PermissionDenied, Closed):
            return
        except LimpetError as error:
            log.warning("a resource cannot be followed now, and is tried again: %s", reason_of(error))
        await asyncio.sleep(RETRY_S)
