"""Limpet: a state store for agents, plugins and background workers. Small state that must not be lost.

One contract on every engine: versions and revisions, guards, atomic batches, records, TTL,
watch, fenced locks, safe retries. Start with `open`; `limpet.sync.open` is the same without await.
"""

import importlib
from typing import TYPE_CHECKING, Any

from limpet import errors, sync
from limpet.clock import Clock, ManualClock, SystemClock
from limpet.codec import Fields
from limpet.draft import Draft, Fence, equals, field
from limpet.edit import Edit
from limpet.election import Election
from limpet.errors import LimpetError
from limpet.folders import Child, ChildPage
from limpet.hub import Watch
from limpet.lock import Lock, LockInfo
from limpet.merge import Clash
from limpet.model import (
    ABSENT,
    ANY,
    KEEP,
    PRESENT,
    UNCHANGED,
    Commit,
    Entry,
    Event,
    Filter,
    Revision,
    Status,
    Synced,
    Traits,
    Version,
    Window,
)
from limpet.observed import Observer, Operation
from limpet.on_demand import Lazy, lazy
from limpet.record import Record
from limpet.request_ids import new_request_id
from limpet.store import Page, Store, open
from limpet.typed import Typed, TypedEntry

if TYPE_CHECKING:
    from limpet.encryption.keyring import Keyring
    from limpet.plugin.client import PluginClient

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "ANY",
    "KEEP",
    "PRESENT",
    "UNCHANGED",
    "Child",
    "ChildPage",
    "Clash",
    "Clock",
    "Commit",
    "Draft",
    "Edit",
    "Election",
    "Entry",
    "Event",
    "Fence",
    "Fields",
    "Filter",
    "Keyring",
    "Lazy",
    "LimpetError",
    "Lock",
    "LockInfo",
    "ManualClock",
    "Observer",
    "Operation",
    "Page",
    "PluginClient",
    "Record",
    "Revision",
    "Status",
    "Store",
    "Synced",
    "SystemClock",
    "Traits",
    "Typed",
    "TypedEntry",
    "Version",
    "Watch",
    "Window",
    "equals",
    "errors",
    "field",
    "lazy",
    "new_request_id",
    "open",
    "sync",
]

_ON_DEMAND = {"Keyring": "limpet.encryption.keyring", "PluginClient": "limpet.plugin.client"}


def __getattr__(name: str) -> Any:
    """Load what few programs use when it is first used, so that importing limpet stays light."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'limpet' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_ON_DEMAND[name]), name)
    return found
