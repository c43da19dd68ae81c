"""Limpet: a state store for agents, plugins and background workers. Small state that must not be lost.

One contract on every engine: versions and revisions, guards, atomic batches, records, TTL,
watch, fenced locks, safe retries. Start with `open`; `limpet.sync.open` is the same without await.
"""

from limpet import errors, sync
from limpet.batch import Draft, Fence, equals, field
from limpet.clock import Clock, ManualClock, SystemClock
from limpet.codec import Fields
from limpet.election import Election
from limpet.engine import new_request_id
from limpet.errors import LimpetError
from limpet.hub import Watch
from limpet.lock import Lock, LockInfo
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
from limpet.plugin import PluginClient
from limpet.record import Record
from limpet.sealing import Keyring
from limpet.store import Page, Store, open

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "ANY",
    "KEEP",
    "PRESENT",
    "UNCHANGED",
    "Clock",
    "Commit",
    "Draft",
    "Election",
    "Entry",
    "Event",
    "Fence",
    "Fields",
    "Filter",
    "Keyring",
    "LimpetError",
    "Lock",
    "LockInfo",
    "ManualClock",
    "Page",
    "PluginClient",
    "Record",
    "Revision",
    "Status",
    "Store",
    "Synced",
    "SystemClock",
    "Traits",
    "Version",
    "Watch",
    "Window",
    "equals",
    "errors",
    "field",
    "new_request_id",
    "open",
    "sync",
]
