"""The values of the contract: what is stored, what is requested, what happened.

Everything here is a frozen value, compared by content and safe to share. Nothing here
waits, logs or reads the time. Values are msgspec structs, which are built in C: an entry
costs a tenth of a frozen dataclass, and entries are made on every read. They hold nothing
that could point back at them, so the garbage collector need not walk through them (gc=False).

They are also what is stored of a commit and sent to a server, encoded as msgpack. An entry, a batch and an outcome
are arrays there; what is one of several kinds begins with the name of its kind (its tag). Members are added at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec

from limpet import codec
from limpet.codec import Kind, Stored
from limpet.errors import InvalidValue
from limpet.keys import TESTS_MAX, VALUE_BYTES_MAX

__all__ = [
    "ABSENT",
    "ANY",
    "BEGINNING",
    "FAMILIES",
    "KEEP",
    "PRESENT",
    "UNCHANGED",
    "Add",
    "Batch",
    "Change",
    "Commit",
    "Condition",
    "Create",
    "Delete",
    "Entry",
    "Equals",
    "Event",
    "Expire",
    "Family",
    "FieldEquals",
    "Filter",
    "Guard",
    "HeldBy",
    "Import",
    "LogPage",
    "Op",
    "Patch",
    "Put",
    "Refusal",
    "Revision",
    "Rule",
    "ScanPage",
    "Sentinel",
    "Status",
    "StoredFamily",
    "Synced",
    "Test",
    "Touch",
    "Traits",
    "Version",
    "Window",
    "Write",
    "fingerprint",
    "join_origin",
    "join_writer",
    "live",
    "split_writer",
]

Family = Literal["data", "lock", "receipt", "audit", "recoverable", "sequence"]
"""The parts of a namespace. They share its revisions, its log and its commits.

Beside the data and its locks: receipts of requests, the audit trail, recoverable copies of expired entries, and the
counters of `append`.
"""

FAMILIES: Final[tuple[Family, ...]] = get_args(Family)

StoredFamily = Literal["data", "lock", "receipt", "audit", "recoverable", "sequence", "superseded"]
"""The families, and the marks of superseded requests, which only a commit reads and writes."""

Op = Literal["put", "patch", "touch", "delete", "expire"]
"""What a change did to its key."""


class Sentinel(Enum):
    """Constants that a caller may give in place of a value. Encoded, each is its number."""

    ABSENT = -1
    PRESENT = -2
    KEEP = -3
    UNCHANGED = -4
    ANY = -5

    def __repr__(self) -> str:
        return f"limpet.{self.name}"


ABSENT: Final = Sentinel.ABSENT
"""No such key, or no such field."""
PRESENT: Final = Sentinel.PRESENT
"""The key exists, whatever it holds."""
KEEP: Final = Sentinel.KEEP
"""Leave the time to live, or the meta, as it is."""
UNCHANGED: Final = Sentinel.UNCHANGED
"""What the function of an update returns to write nothing."""
ANY: Final = Sentinel.ANY
"""No expectation: the default of ``expect``."""

if TYPE_CHECKING:
    Absent = Literal[Sentinel.ABSENT]
    Existence = Literal[Sentinel.ABSENT, Sentinel.PRESENT]
    Keep = Literal[Sentinel.KEEP]
    Ttl = int | Keep | None
else:
    # What msgspec decodes. It knows enums but no single members of one: `limpet.checks` refuses the others. Beside
    # integers it knows no enum at all, so KEEP stays a number there: see `limpet.protocol.engine_msgpack.decode_batch`.
    Absent = Existence = Keep = Sentinel
    Ttl = int | None


# What is stored ---------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What is stored under a key.

    Attributes:
        key: The key.
        version: Counts the writes of this key since it was created: 1, 2, 3 …
        revision: Orders the changes of the namespace. Never reused, so it is the token to compare.
        created_revision: The revision that created this incarnation of the key.
        stored: The encoded value; None where an event carries an entry without its value.
        meta_json: The meta, in one text with the name of the writer: see `join_writer`.
    """

    key: str
    stored: Stored | None
    version: int
    revision: int
    created_revision: int
    created_ms: int
    updated_ms: int
    expires_ms: int | None = None
    meta_json: bytes | None = None

    @property
    def value(self) -> Any:
        """The value, decoded afresh: changing it changes nothing else."""
        return None if self.stored is None else codec.decode(self.stored)

    @property
    def kind(self) -> Kind | None:
        """``"json"``, ``"bytes"`` or ``"record"``."""
        return None if self.stored is None else codec.kind_of(self.stored)

    @property
    def size_bytes(self) -> int:
        """The size of the value, as the limits count it."""
        return 0 if self.stored is None else codec.size_bytes(self.stored)

    @property
    def weight_bytes(self) -> int:
        """The size of the entry in totals: its key and its value."""
        key, stored = self.key, self.stored
        key_bytes = len(key) if key.isascii() else len(key.encode())
        # What `codec.size_bytes` gives, without a call for most values: every write weighs two entries.
        if type(stored) is bytes:
            return key_bytes + len(stored) - (stored[0] == 0)
        return key_bytes if stored is None else key_bytes + codec.size_bytes(stored)

    @property
    def meta(self) -> dict[str, Any]:
        """The JSON object that the writer put beside the value; empty when there is none."""
        _, meta_json = split_writer(self.meta_json)
        return {} if meta_json is None else codec.decode(meta_json)

    @property
    def writer(self) -> str | None:
        """The name of the writer of the value; None for a writer without a name."""
        return split_writer(self.meta_json)[0]

    @property
    def created_at(self) -> datetime:
        """When this incarnation of the key began, UTC."""
        return _utc(self.created_ms)

    @property
    def updated_at(self) -> datetime:
        """When the value was last written, UTC."""
        return _utc(self.updated_ms)

    @property
    def expires_at(self) -> datetime | None:
        """From when on the entry counts as absent, UTC. None means never."""
        return None if self.expires_ms is None else _utc(self.expires_ms)

    def without_value(self) -> Entry:
        """The same entry, its value left out."""
        return msgspec.structs.replace(self, stored=None)

    def __repr__(self) -> str:
        # A repr ends up in logs, and a value may be a secret.
        return f"Entry({self.key!r}, version={self.version}, revision={self.revision})"


# The name of a writer is stored in fields that engines have already, and do not look into: see
# docs/decisions/writer-names.md.


def join_writer(meta_json: bytes | None, writer: str | None) -> bytes | None:
    """The text of a meta and a writer: the meta alone, or an array of the name and the meta."""
    if writer is None:
        return meta_json
    name = msgspec.json.encode(writer)
    return b"[%b]" % name if meta_json is None else b"[%b,%b]" % (name, meta_json)


def split_writer(meta_json: bytes | None) -> tuple[str | None, bytes | None]:
    """The name of the writer, and the meta: the inverse of `join_writer`."""
    if meta_json is None or meta_json[:1] != b"[":
        return None, meta_json
    name, *rest = _split_array(meta_json)
    return codec.decode(bytes(name)), bytes(rest[0]) if rest else None


_split_array: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode

_WRITER_MARK: Final = "\x1f"


def join_origin(request_id: str | None, writer: str | None) -> str | None:
    """What is logged as the origin of a change: the request id, or the id, a mark and the name of the writer.

    A name is printable and has no mark. An id with a mark of its own gets another one at its end.
    """
    if writer is not None:
        return f"{request_id or ''}{_WRITER_MARK}{writer}"
    return f"{request_id}{_WRITER_MARK}" if request_id is not None and _WRITER_MARK in request_id else request_id


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _utc(ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=ms)


def live(entry: Entry | None, now_ms: int) -> Entry | None:
    """The entry if it still counts: expired is the same as absent."""
    if entry is None or entry.expires_ms is None:
        return entry
    return entry if now_ms < entry.expires_ms else None


# What is requested: guards ----------------------------------------------------


class Version(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="version"):
    """Expect this version of the key. Restarts at 1 when a key is created again."""

    number: int

    def __str__(self) -> str:
        return f"version {self.number}"


class Revision(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="revision"):
    """Expect the entry of this revision. Safe across delete and recreation."""

    number: int

    def __str__(self) -> str:
        return f"revision {self.number}"


class Equals(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="equals"):
    """Expect exactly this value. Build it with `limpet.equals`."""

    stored: Stored

    def __str__(self) -> str:
        return "a certain value"


class FieldEquals(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="field"):
    """Expect this field to hold this value, or not to exist."""

    name: str
    stored: bytes | Absent

    def __str__(self) -> str:
        return (
            f"field {self.name!r} to be absent" if self.stored is ABSENT else f"a certain value in field {self.name!r}"
        )


class HeldBy(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="held"):
    """Expect the lock to be held under this fencing token: the revision that acquired it."""

    token: int

    def __str__(self) -> str:
        return f"token {self.token}"


Condition = Existence | Version | Revision | Equals | FieldEquals | HeldBy


class Guard(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A condition on a key, checked in the same commit as the writes it protects."""

    key: str
    condition: Condition
    family: Family = "data"


# What is requested: writes ----------------------------------------------------


class Put(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="put"):
    """Replace the whole value."""

    key: str
    stored: Stored
    ttl_ms: Ttl = None
    meta_json: bytes | Keep | None = None
    family: Family = "data"


class Import(Put, frozen=True, gc=False, array_like=True, tag="import", kw_only=True):
    """Put an entry as it was in another store: its version, its times and its writer. Only `limpet.moving` sends it.

    The revision is new, as of any write. ``expires_ms`` is the time itself, so ``ttl_ms`` is not used.
    """

    version: int
    created_ms: int
    updated_ms: int
    expires_ms: int | None = None
    writer: str | None = None


class Create(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="create"):
    """Put a value under a key of the data, or keep the entry that is there: then nothing is written."""

    key: str
    stored: Stored
    ttl_ms: int | None = None
    meta_json: bytes | None = None

    @property
    def family(self) -> Family:
        """The data: a commit names by their keys what it has kept."""
        return "data"


Rule = Literal["add", "minimum", "maximum"]
"""What a write makes of an integer and the one found: their sum, the smaller or the larger."""


class Add(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="add"):
    """Add to an integer, where a missing key counts as zero; or keep the smaller or the larger of two.

    ``new_ttl_ms`` is the time to live where there is no entry yet, instead of ``ttl_ms``.
    """

    key: str
    by: int
    ttl_ms: Ttl = KEEP
    meta_json: bytes | Keep | None = KEEP
    family: Family = "data"
    rule: Rule = "add"
    new_ttl_ms: int | None = None


class Patch(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="patch"):
    """Write and clear single fields of a record, leaving the others as they are."""

    key: str
    fields: Mapping[str, bytes]
    unset: tuple[str, ...] = ()
    if_exists: bool = False
    ttl_ms: Ttl = KEEP
    meta_json: bytes | Keep | None = KEEP
    family: Family = "data"


class Touch(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="touch"):
    """Change only when the entry expires. None means never."""

    key: str
    ttl_ms: int | None
    family: Family = "data"


class Delete(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="delete"):
    """End the entry. With ``take``, the commit returns its value."""

    key: str
    take: bool = False
    family: Family = "data"


class Expire(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="expire"):
    """End the entry of this revision if it has expired; otherwise do nothing."""

    key: str
    revision: int
    family: Family = "data"


Write = Put | Import | Create | Add | Patch | Touch | Delete | Expire


class Batch(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Guards and writes that happen together or not at all.

    Attributes:
        request_id: Names this request in the log. A retry carries the same. None lets the engine name it.
        digest: A hash of the request. Given only when a receipt is to be kept.
        receipt_ms: How long to keep the receipt. None writes no receipt.
        retry_since: Set on a retry whose first attempt may have been applied: search the log
            for the request id after this revision before doing anything.
        is_brief: Whether the caller does not need the fields of records that it did not send. Entries of records may
            then come back without their value, which saves sending it.
        writer: The name of the writer, for the entries and the changes of the batch.
    """

    guards: tuple[Guard, ...]
    writes: tuple[Write, ...]
    request_id: str | None = None
    digest: bytes = b""
    receipt_ms: int | None = None
    retry_since: int | None = None
    value_bytes_max: int = VALUE_BYTES_MAX
    is_brief: bool = False
    writer: str | None = None

    @property
    def origin(self) -> str | None:
        """What the log has as the origin of its changes, if the request has an id."""
        return None if self.request_id is None else join_origin(self.request_id, self.writer)


# What happened ----------------------------------------------------------------


class Change(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What happened to one key.

    ``entry`` is the entry after a put, patch or touch. After a delete or expire it is
    the entry that ended, with its value only if it was taken. ``origin`` has the cause and the writer, in one text.
    """

    op: Op
    entry: Entry
    revision: int
    commit: int
    at_ms: int
    origin: str | None = None
    family: Family = "data"

    @property
    def cause(self) -> str | None:
        """The request id of the write; None for an expiry."""
        origin = self.origin
        return origin.rpartition(_WRITER_MARK)[0] or None if origin is not None and _WRITER_MARK in origin else origin

    @property
    def writer(self) -> str | None:
        """The name of the writer; None for a writer without a name, and for an expiry."""
        origin = self.origin
        return None if origin is None or _WRITER_MARK not in origin else origin.rpartition(_WRITER_MARK)[2] or None

    @property
    def key(self) -> str:
        """The key that changed."""
        return self.entry.key

    @property
    def after(self) -> Entry | None:
        """The entry after the change; None when the change ended it."""
        return None if self.op in ("delete", "expire") else self.entry


def fingerprint(change: Change) -> str:
    """Identify a change in a few characters: its revision, its time, and a digest of what distinguishes it.

    A position is made of it, so it holds nothing of the key and the value: a position may be shown to callers that
    may not read them. After a restored backup, two histories of one store may use the same revision for different
    changes; those differ in their time and their cause.
    """
    # Only the part behind the last slash: a server adds a prefix to the ids of some callers, and hides it from them.
    entry, cause = change.entry, "-" if change.origin is None else f"={change.origin.rpartition('/')[2]}"
    # Without the op: where values are encrypted, the engine stores a patch as a put.
    numbers = f"{change.revision} {change.commit} {change.at_ms} {entry.version} {entry.created_revision}"
    digest = blake2b(f"{numbers} {change.family} {cause}".encode(), digest_size=6).hexdigest()
    return f"{change.revision}-{change.at_ms:x}-{digest}"


BEGINNING: Final = "0-0-000000000000"
"""The fingerprint of the state before the first change."""


class Commit(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="commit"):
    """An accepted batch.

    Attributes:
        revision: The last revision of the commit; where nothing changed, the latest of the namespace.
        entries: For each write, in order, the entry after it; None where the key is absent then.
        ended: For each write, in order, the entry that a delete ended; None otherwise.
        at_ms: The engine's time of the commit.
        replayed: Whether this is the result of an earlier request that was repeated.
        kept: The keys whose ``create`` with ``or_keep`` found an entry, and kept it.
    """

    revision: int
    entries: tuple[Entry | None, ...]
    ended: tuple[Entry | None, ...]
    at_ms: int
    replayed: bool = False
    kept: tuple[str, ...] = ()


Reason = Literal["guard", "stale_request", "type", "size", "overflow", "missing"]


class Refusal(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="refusal"):
    """A refused batch: nothing changed. Carries the entry found, so that the caller need not read again."""

    reason: Reason
    key: str
    found: Entry | None
    at_ms: int
    guard: Guard | None = None
    needs: str = ""
    size_bytes: int = 0


class Event(msgspec.Struct, frozen=True, gc=False):
    """What a watcher sees.

    Attributes:
        op: ``put``, ``patch``, ``touch``, ``delete``, ``expire``; ``synced`` for `Synced`.
        key: The key that changed.
        entry: The entry after a put, patch or touch; the entry that ended after a delete or expire.
            Only put and patch carry the value.
        revision: The change's own revision.
        commit: The last revision of its batch.
        position: Where to resume after this event; None for the entries before `Synced`.
        cause: The request id of the write; None for an expiry.
        at_ms: When it was committed; None for `Synced`.
        writer: The name of the writer of the change; None for one without a name, and for an expiry.
    """

    op: Op | Literal["synced"]
    key: str
    entry: Entry | None
    revision: int
    commit: int
    position: str | None
    cause: str | None = None
    at_ms: int | None = None
    writer: str | None = None

    @property
    def value(self) -> Any:
        """The whole value after a put or patch; None otherwise."""
        return None if self.entry is None else self.entry.value

    @property
    def at(self) -> datetime | None:
        """When it happened, UTC; None for `Synced`."""
        return None if self.at_ms is None else _utc(self.at_ms)


class Synced(Event, frozen=True, gc=False):
    """All existing entries have been delivered; changes follow."""


class ScanPage(msgspec.Struct, frozen=True, gc=False):
    """A page of a scan. ``cursor`` is the last key that was examined; None when the span is exhausted."""

    entries: list[Entry]
    cursor: str | None


class LogPage(msgspec.Struct, frozen=True, gc=False, rename={"next_after": "head"}):
    """A page of the log.

    Attributes:
        changes: The changes, in revision order.
        next_after: The revision after which the next page begins. On the wire it is called ``head``.
        before: The fingerprint of the change that these follow: the last one that the log has, or had when it was
            trimmed, at or before the given revision.
        at: The fingerprint of the change at ``next_after``; given when that change was filtered out of ``changes``.
    """

    changes: list[Change]
    next_after: int
    before: str
    at: str | None = None


class Window(msgspec.Struct, frozen=True, gc=False):
    """How much of the log is kept: up to any of the bounds, and always the last ``age_ms_min``."""

    age_ms: int = 86_400_000
    changes: int = 100_000
    size_bytes: int = 256_000_000
    age_ms_min: int = 60_000

    def excess(
        self, oldest: Iterable[tuple[int, int, int]], *, count: int, size_bytes: int, now_ms: int
    ) -> tuple[int, int, int]:
        """Count the oldest changes that exceed the window, their bytes, and the revision of the last of them.

        ``oldest`` gives revision, time and bytes of changes, oldest first; ``count`` and
        ``size_bytes`` are those of the whole log.
        """
        dropped = freed_bytes = floor = 0
        for revision, at_ms, weight_bytes in oldest:
            age_ms = now_ms - at_ms
            over = count - dropped > self.changes or size_bytes - freed_bytes > self.size_bytes or age_ms > self.age_ms
            if not over or age_ms < self.age_ms_min:
                break
            dropped, freed_bytes, floor = dropped + 1, freed_bytes + weight_bytes, revision
        return dropped, freed_bytes, floor


class Status(msgspec.Struct, frozen=True, gc=False):
    """The counters of a namespace.

    Attributes:
        store_id: Identifies the storage, so that a position of another storage is recognised.
        epoch: Raised when the storage may have lost acknowledged writes.
        revision: The latest revision.
        floor: Changes up to this revision are no longer in the log.
        keys: Entries stored, those not yet swept included.
        size_bytes: Their keys and values together.
        log_changes: Changes in the log.
        log_bytes: Their keys and values together.
        now_ms: The time of the namespace: the engine's clock, or the latest time recorded there if that is later.
        behind_ms: How far the engine's clock is behind that time, which stands still meanwhile; mostly 0.
    """

    store_id: str
    epoch: int
    revision: int
    floor: int
    keys: int
    size_bytes: int
    log_changes: int
    log_bytes: int
    now_ms: int
    behind_ms: int = 0


Durability = Literal["none", "seconds", "process", "disk", "quorum"]


class Traits(msgspec.Struct, frozen=True, gc=False):
    """The properties in which engines may differ.

    Attributes:
        engine: Its name.
        durability: What an acknowledged write survives: nothing (``none``), a crash of the server once it is some
            ``seconds`` old, a killed ``process``, a power cut (``disk``), or a lost machine (``quorum``).
        clock: Whose time decides about expiry: this ``host``'s, or the ``server``'s.
        inline: Whether calls complete in place, without an event loop.
        encrypted: Whether values are encrypted before they reach it.
    """

    engine: str
    durability: Durability
    clock: Literal["host", "server"]
    inline: bool
    encrypted: bool = False


# Filters ----------------------------------------------------------------------

Comparison = Literal["eq", "ne", "lt", "le", "gt", "ge", "in", "not_in", "exists"]

_ORDER: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


class Test(msgspec.Struct, frozen=True, gc=False):
    """One test of one field, or of a member below it. ``operands`` are encoded values.

    ``path`` has the names of the members below the field, from the top down.
    A ``raw`` test reads every field as bytes, JSON as its text. Numbers, raw bytes of decimal digits included, are
    ordered as numbers among themselves.
    """

    __test__ = False  # Not for pytest to collect.

    name: str
    comparison: Comparison
    operands: tuple[bytes, ...] = ()
    raw: bool = False
    path: tuple[str, ...] = ()

    def matches(self, stored: Stored) -> bool:
        """Whether the value passes. Equality is of encodings; order only within one type."""
        found = codec.member(stored, self.name)
        for name in self.path:
            found = None if found is None else codec.member(found, name)
        if self.raw and found is not None:
            return self._matches_raw(found)
        match self.comparison:
            case "exists":
                return found is not None
            case "eq" | "in":
                return found in self.operands
            case "ne" | "not_in":
                return found not in self.operands
            case _:
                if found is None:
                    return False
                left, right = codec.decode(found), codec.decode(self.operands[0])
                return _comparable(left, right) and _ORDER[self.comparison](left, right)

    def _matches_raw(self, found: bytes) -> bool:
        text = found.removeprefix(b"\0")
        texts = [operand.removeprefix(b"\0") for operand in self.operands]
        if self.comparison in _ORDER:
            left, right = codec.number(found), codec.number(self.operands[0])
            if left is None or right is None:
                return _ORDER[self.comparison](text, texts[0])
            return _ORDER[self.comparison](left, right)
        return self.comparison == "exists" or (text in texts) == (self.comparison in ("eq", "in"))


def _comparable(left: object, right: object) -> bool:
    """Numbers with numbers, str with str, bytes with bytes; nothing else has an order."""
    if isinstance(left, bool) or isinstance(right, bool):
        return False
    return any(isinstance(left, kind) and isinstance(right, kind) for kind in ((int, float), str, bytes))


class Filter(msgspec.Struct, frozen=True, gc=False):
    """Tests that must all pass, and groups of filters of each of which one must. Join filters with ``&`` and ``|``.

    An engine may leave the groups out where it only narrows a scan down.
    """

    tests: tuple[Test, ...]
    any_of: tuple[tuple[Filter, ...], ...] = ()

    def __and__(self, other: Filter) -> Filter:
        if not isinstance(other, Filter):
            return NotImplemented
        return Filter(self.tests + other.tests, self.any_of + other.any_of)._within_limit()

    def __or__(self, other: Filter) -> Filter:
        if not isinstance(other, Filter):
            return NotImplemented
        return Filter((), (self._alternatives() + other._alternatives(),))._within_limit()

    def _alternatives(self) -> tuple[Filter, ...]:
        """The filters of which one must match: of one that is joined by ``|`` its parts, so that it nests no deeper."""
        return self.any_of[0] if not self.tests and len(self.any_of) == 1 else (self,)

    def _within_limit(self) -> Filter:
        if sum(1 for _ in self.all_tests()) > TESTS_MAX:
            raise InvalidValue(f"a filter has up to {TESTS_MAX} tests: split the scan, or test the rest yourself")
        return self

    def all_tests(self) -> Iterator[Test]:
        """Every test, those in the groups too."""
        yield from self.tests
        for group in self.any_of:
            for each in group:
                yield from each.all_tests()

    def matches(self, stored: Stored) -> bool:
        """Whether the value passes every test, and one filter of each group."""
        return all(test.matches(stored) for test in self.tests) and all(
            any(each.matches(stored) for each in group) for group in self.any_of
        )

    def as_condition(self) -> FieldEquals:
        """Convert this filter, which must be one equality of one field, to a guard."""
        test = self.tests[0] if len(self.tests) == 1 and not self.any_of else None
        if test is None or test.comparison != "eq" or test.path:
            raise InvalidValue("a guard on a field is one equality: limpet.field('state') == 'pending'")
        return FieldEquals(test.name, test.operands[0])


class Resealed(msgspec.Struct, frozen=True):
    """The result of one call of `reseal`. Pass ``cursor`` as ``after`` to go on; None when it was the last."""

    looked_at: int
    resealed: int
    cursor: str | None


class Seals(msgspec.Struct, frozen=True):
    """How much a key has encrypted: entries, and changes that are still in the log."""

    key_id: str
    is_current: bool
    entries: int
    changes: int
